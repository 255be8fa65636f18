"""The server, asked by the real openai client: answers are the engine's, nothing is lost, everything ends."""

import asyncio
import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from tiny_server import COLUMNS, NAME, SLOTS, engine, policy, sampler, serving, until

from jaxrl_post.rollout.decoding import Decoding
from jaxrl_post.rollout.schedule import SampleOptions
from jaxrl_post.serving.protocol import CompletionRequest, parse
from jaxrl_post.serving.server import listen
from jaxrl_post.types import StopReason


@pytest.fixture(scope="module")
def server():
    with serving() as (url, scheduler):
        yield url, scheduler


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def expected(text, limit, seed=0, temperature=1.0, samples=1):
    """The in-graph engine's completions of a text prompt."""
    options = SampleOptions(samples_per_prompt=samples, max_new_tokens=64, temperature=temperature)
    ids = policy().tokenizer.encode(text)
    return (
        sampler()
        .generate(policy().params, [ids], options, seed=seed, step=0, limits=[limit] * samples, width=64)
        .completions
    )


def text_of(completion):
    return policy().tokenizer.decode(completion.ids)


def metric(server, name):
    [value] = re.findall(rf"^{name} (\S+)$", httpx.get(f"{server[0]}/metrics").text, re.MULTILINE)
    return float(value)


# Answers.


def test_completions_are_those_of_the_in_graph_engine(client):
    greedy = client.completions.create(model=NAME, prompt="What", max_tokens=20, temperature=0)
    [reference] = expected("What", 20, temperature=0.0)
    assert greedy.choices[0].text == text_of(reference)
    assert greedy.choices[0].finish_reason == {StopReason.STOP: "stop", StopReason.LENGTH: "length"}[reference.stop]
    assert greedy.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 4, "completion_tokens": len(reference.ids), "total_tokens": 4 + len(reference.ids),
    }  # fmt: skip
    two = client.completions.create(model=NAME, prompt="Two", max_tokens=30, seed=5, n=2)
    assert [c.text for c in two.choices] == [text_of(c) for c in expected("Two", 30, seed=5, samples=2)]


def test_several_prompts_and_ids_as_prompts(client):
    texts = client.completions.create(model=NAME, prompt=["ab", "c"], max_tokens=8, seed=1, n=2)
    by_ids = client.completions.create(model=NAME, prompt=[list(b"ab"), list(b"c")], max_tokens=8, seed=1, n=2)
    assert [c.text for c in texts.choices] == [c.text for c in by_ids.choices]
    assert [c.index for c in texts.choices] == [0, 1, 2, 3]
    assert [c.text for c in texts.choices[:2]] == [text_of(c) for c in expected("ab", 8, seed=1, samples=2)]


def test_chat_renders_the_template_of_training_with_its_system_prompt(client):
    asked = {"model": NAME, "max_tokens": 12, "seed": 3}
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], **asked)
    plain = client.completions.create(prompt="system: Say it.\nuser: Hi\nassistant: ", **asked)
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.choices[0].message.role == "assistant"
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    again = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **asked)
    assert again.choices[0].message.content == chat.choices[0].message.content
    own = [{"role": "system", "content": "No."}, {"role": "user", "content": "Hi"}]
    other = client.chat.completions.create(messages=own, **asked)
    assert other.usage.prompt_tokens == chat.usage.prompt_tokens - 4


def test_tools_go_to_the_template_unless_none_is_chosen():
    """A template that tells of the tools; what the model makes of them comes back as text."""
    seen = []

    class Telling(type(policy().tokenizer)):
        def render_chat(self, messages, add_generation_prompt=True, **variables):
            seen.append(variables)
            told = "".join(tool["function"]["name"] for tool in variables.get("tools", []))
            return told + super().render_chat(messages, add_generation_prompt)

    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    asked = {"model": NAME, "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}
    with serving(tokenizer=Telling()) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        ask = lambda **more: client.chat.completions.create(**asked, tools=tools, **more)
        told, kept = ask(extra_body={"chat_template_kwargs": {"brief": True}}), ask(tool_choice="none")
    assert seen == [{"tools": tools, "brief": True}, {}]
    assert told.usage.prompt_tokens == kept.usage.prompt_tokens + len("add")
    [reference] = expected("addsystem: Say it.\nuser: Hi\nassistant: ", 4, temperature=0.0)
    assert told.choices[0].message.content == text_of(reference)


@pytest.mark.slow
def test_streams_add_up_to_the_whole_answer(client):
    asked = {"model": NAME, "max_tokens": 40, "seed": 7, "n": 2}
    whole = client.completions.create(prompt="Stream", **asked)
    texts, usage = ["", ""], None
    for chunk in client.completions.create(
        prompt="Stream", stream=True, stream_options={"include_usage": True}, **asked
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert texts == [c.text for c in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    messages = [{"role": "user", "content": "Hi"}]
    whole = client.chat.completions.create(messages=messages, **asked)
    texts, roles, reasons = ["", ""], [None, None], [None, None]
    for chunk in client.chat.completions.create(messages=messages, stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] = choice.delta.role or roles[choice.index]
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [c.message.content for c in whole.choices]
    assert roles == ["assistant"] * 2
    assert reasons == [c.finish_reason for c in whole.choices]


@pytest.mark.slow
def test_logprobs_are_the_models(client):
    [reference] = expected("Log", 6, seed=2)
    answer = client.completions.create(model=NAME, prompt="Log", max_tokens=6, seed=2, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx(reference.raw_logp.tolist(), abs=1e-4)
    assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs)
    for token, logp, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logp
    chat = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "x"}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-5)
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token


def test_stop_strings_end_the_text_before_them_wherever_tokens_cut_them(client):
    """Every token is a byte, so a string of two characters is never in one token."""
    asked = {"model": NAME, "prompt": "Stop", "max_tokens": 60, "seed": 11}
    whole = client.completions.create(**asked)
    text = whole.choices[0].text
    at = next(i for i in range(3, len(text)) if text.find(text[i : i + 2]) == i and len(text[i : i + 2]) == 2)
    for stop in (text[at : at + 2], ["zzzz", text[at : at + 2]]):
        cut = client.completions.create(stop=stop, **asked)
        assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text[:at], "stop")
        assert cut.usage.completion_tokens < whole.usage.completion_tokens
        chunks = list(client.completions.create(stop=stop, stream=True, **asked))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[:at]
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_penalties_biases_and_bans_are_those_of_the_engine(client):
    asked = {"model": NAME, "prompt": "Bias", "max_tokens": 10, "seed": 1}
    only = client.completions.create(logit_bias={"65": 100, "66": 100}, **asked).choices[0].text
    assert len(only) == 10
    assert set(only) == {"A", "B"}
    cold = client.completions.create(extra_body={"min_p": 1.0}, **asked).choices[0].text
    assert cold == client.completions.create(temperature=0, **asked).choices[0].text
    strong = {"logit_bias": {"65": 100}, "extra_body": {"repetition_penalty": 10.0}}
    first, *rest = client.completions.create(temperature=0, **strong, **asked).choices[0].text
    assert first == "A"
    assert rest
    ended = client.completions.create(extra_body={"stop_token_ids": [65]}, logit_bias={"65": 100}, **asked)
    assert (ended.usage.completion_tokens, ended.choices[0].finish_reason) == (1, "stop")
    late = client.completions.create(stop="A", logit_bias={"65": 100}, extra_body={"min_tokens": 4}, **asked)
    assert late.choices[0].text == "AAAA"


def test_a_seed_is_reproducible_and_none_is_fresh(client):
    asked = {"model": NAME, "prompt": "Seed", "max_tokens": 24}
    once, again = (client.completions.create(seed=-4, **asked).choices[0].text for _ in range(2))
    assert once == again
    free = {client.completions.create(**asked).choices[0].text for _ in range(3)}
    assert len(free) == 3


def test_what_a_request_does_not_say_is_as_the_server_has_it():
    own = Decoding(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, min_tokens=2, repetition_penalty=1.2,
                   presence_penalty=0.3, frequency_penalty=0.4, logit_bias=((65, 1.0),), bad_words=((1, 2),),
                   stop_ids=(9,), ignore_eos=True, stop=("ab",))  # fmt: skip
    silent = parse(CompletionRequest, {"model": NAME, "prompt": "x", "top_p": None})
    assert silent.decoding(300, own) == dataclasses.replace(own, stop=())  # strings are looked for in the text
    assert silent.stop_strings(own.stop) == ("ab",)
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0, "repetition_penalty": 1.0,
               "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}, "stop_token_ids": [],
               "ignore_eos": False, "stop": [], "logprobs": 3}  # fmt: skip
    loud = parse(CompletionRequest, {"model": NAME, "prompt": "x"} | neutral)
    assert loud.decoding(300, own) == Decoding(bad_words=((1, 2),), top_logprobs=3)
    assert loud.stop_strings(own.stop) == ()


def test_a_server_answers_with_its_own_options_where_none_are_named(client):
    asked = {"model": NAME, "prompt": "Own", "max_tokens": 16}
    text = client.completions.create(temperature=0, **asked).choices[0].text
    end = text[2:4]
    with (
        serving(decoding=Decoding(temperature=0.0, stop=(end,))) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as own,
    ):
        silent = own.completions.create(**asked).choices[0]
        assert (silent.text, silent.finish_reason) == (text[: text.index(end)], "stop")
        assert own.completions.create(stop=[], **asked).choices[0].text == text
        warm = own.completions.create(temperature=1, seed=3, stop=[], **asked).choices[0].text
        assert warm == client.completions.create(seed=3, **asked).choices[0].text


# The start.


def test_health_is_503_until_all_is_compiled_and_what_came_before_is_answered(monkeypatch):
    open_gate, decoded = threading.Event(), []

    def compile_all(weights, decoding):
        decoded.append(decoding)
        open_gate.wait(60)
        yield 1

    monkeypatch.setattr(engine()[0], "compile_all", compile_all)
    own = Decoding(temperature=0.0)
    with serving(warm_up=own) as (url, scheduler), ThreadPoolExecutor(1) as pool:
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert health.json()["status"].startswith("warming up")
        asked = {"model": NAME, "prompt": "q", "max_tokens": 4}
        early = pool.submit(lambda: httpx.post(f"{url}/v1/completions", json=asked, timeout=60))
        until(lambda: scheduler.queued == 1)
        assert not early.done()
        open_gate.set()
        assert early.result().status_code == 200
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert decoded == [own]


def test_an_end_during_the_warm_up_is_an_end(monkeypatch):
    compiled = []

    def compile_all(weights, decoding):
        for length in itertools.count(1):
            time.sleep(0.01)
            compiled.append(length)
            yield length

    monkeypatch.setattr(engine()[0], "compile_all", compile_all)
    with serving(warm_up=Decoding()) as (_, scheduler):
        until(lambda: compiled)
    assert scheduler.trouble == "the server shuts down"


# Refusals.


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": COLUMNS}, "prompt"),
        ({"n": 0}, "n"),
        ({"logprobs": 99}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": "x" * COLUMNS}, "prompt"),
        ({"prompt": ""}, None),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"extra_body": {"beams": 3}}, "beams"),
    ],
)
def test_bad_input_is_a_bad_request_that_names_the_field(client, asked, param):
    if asked == {"prompt": ""}:
        assert client.completions.create(**{"model": NAME, "max_tokens": 2} | asked).usage.prompt_tokens == 1  # BOS
        return
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(**{"model": NAME, "prompt": "x"} | asked)
    assert raised.value.body["param"] == param
    assert raised.value.body["type"] == "invalid_request_error"


def test_bad_chats_and_models(client, server):
    user = {"role": "user", "content": "x"}
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs"):
        client.chat.completions.create(model=NAME, messages=[user], top_logprobs=2)
    with pytest.raises(openai.BadRequestError, match="no role"):
        client.chat.completions.create(model=NAME, messages=[{"content": "x"}])
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model=NAME, messages=[image])
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="x")
    for body in (b"{", b"[]", b"\xff"):
        assert httpx.post(f"{server[0]}/v1/completions", content=body).status_code == 400
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    assert httpx.get(f"{server[0]}/health").status_code == 200


def test_a_key_is_asked_for_when_there_is_one():
    with serving(key="secret") as (url, _):
        wrong = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        assert [m.id for m in wrong.with_options(api_key="secret").models.list()] == [NAME]
        assert httpx.get(f"{url}/health").status_code == 200


# Load.


def test_two_hundred_at_once_are_each_answered_as_alone(server, client):
    kinds = [{"prompt": "p" * (1 + i), "seed": i, "max_tokens": 4 + i % 20} for i in range(40)]

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key="-", max_retries=0, timeout=300) as many:
            create = many.completions.create
            return await asyncio.gather(*(create(model=NAME, **kinds[i % 40]) for i in range(200)))

    began = time.monotonic()
    answers = asyncio.run(ask_all())
    seconds = time.monotonic() - began
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    print(f"{200 / seconds:.0f} requests/s, {tokens / seconds:.0f} tokens/s")
    alone = [client.completions.create(model=NAME, **kind).choices[0].text for kind in kinds]
    assert [answer.choices[0].text for answer in answers] == [alone[i % 40] for i in range(200)]
    assert metric(server, "jaxrl_queued") == metric(server, "jaxrl_running") == 0
    assert metric(server, "jaxrl_generated_tokens_total") >= tokens
    assert metric(server, "jaxrl_request_latency_seconds_count") >= 200


class Gate:
    """Holds the engine between two calls."""

    def __init__(self, monkeypatch):
        made, self.open, generate = engine()[0], threading.Event(), engine()[0].generate

        def gated(weights):
            self.open.wait(60)
            return generate(weights)

        monkeypatch.setattr(made, "generate", gated)


def test_a_full_queue_is_status_429_and_what_waits_is_answered(monkeypatch):
    gate = Gate(monkeypatch)
    with serving(max_queue=3) as (url, scheduler), ThreadPoolExecutor(32) as pool:
        asked = {"model": NAME, "prompt": "q", "max_tokens": 4}
        post = lambda: httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
        waiting = [pool.submit(post) for _ in range(SLOTS + 3)]
        until(lambda: scheduler.running + scheduler.queued == SLOTS + 3)
        refused = post()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        both = httpx.post(f"{url}/v1/completions", json=asked | {"prompt": ["a", "b"]}, timeout=60)
        assert both.status_code == 429
        gate.open.set()
        assert [future.result().status_code for future in waiting] == [200] * (SLOTS + 3)
        assert post().status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server, stream, monkeypatch):
    gate = Gate(monkeypatch)
    asked = {"model": NAME, "prompt": "gone", "max_tokens": COLUMNS - 10, "temperature": 0, "stream": stream, "n": 2}
    if stream:
        with httpx.stream("POST", f"{server[0]}/v1/completions", json=asked, timeout=60):
            until(lambda: server[1].running == 2)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server[0]}/v1/completions", json=asked, timeout=httpx.Timeout(5, read=0.5))
    gate.open.set()
    before = metric(server, "jaxrl_generated_tokens_total")
    until(lambda: server[1].running == server[1].queued == 0)
    assert metric(server, "jaxrl_generated_tokens_total") - before < COLUMNS
    assert all(slot.request is None for slot in engine()[0].slots)


def test_a_request_that_takes_too_long_ends_with_an_error(monkeypatch):
    gate = Gate(monkeypatch)
    with serving(seconds=0.3) as (url, scheduler):
        asked = {"model": NAME, "prompt": "slow", "max_tokens": 4}
        late = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
        with client, pytest.raises(openai.APIError, match="took longer"):
            list(client.completions.create(stream=True, **asked))
        gate.open.set()
        until(lambda: scheduler.running == scheduler.queued == 0)


def test_a_broken_engine_answers_with_errors_and_health_says_so(monkeypatch):
    def broken(weights):
        raise RuntimeError("out of memory")

    with serving() as (url, scheduler):
        monkeypatch.setattr(engine()[0], "generate", broken)
        assert httpx.post(f"{url}/v1/completions", json={"model": NAME, "prompt": "x"}, timeout=60).status_code == 500
        until(lambda: scheduler.trouble == "the engine broke")
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "the engine broke"})
        assert httpx.post(f"{url}/v1/completions", json={"model": NAME, "prompt": "x"}, timeout=60).status_code == 503
    for slot in range(SLOTS):
        engine()[0].free(slot)


def test_sigterm_lets_a_stream_end_and_exits_with_0(tmp_path):
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    words = ["serve", "configs/tiny/grpo.yaml", "--port", "0", "--context", "256", "--slots", "2", "--name", NAME]
    words += ["--no-warm-up"]
    with subprocess.Popen(
        [sys.executable, "-m", "launch", *words], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        line = next(line for line in process.stderr if "serving" in line)
        url = re.search(r"http://127.0.0.1:\d+/v1", line)[0]
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=120) as client:
            stream = client.completions.create(model=NAME, prompt="x", max_tokens=200, temperature=0, stream=True)
            chunks = [next(stream)]
            process.send_signal(signal.SIGTERM)
            chunks += stream
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        rest = process.stderr.read()
        assert process.wait(60) == 0, rest


def test_a_port_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="--port 65536: ports go from 0"):
        listen("127.0.0.1", 65536)
