"""The HTTP server under concurrent clients against the in-graph engine on the same prompts; prints one line of JSON.

    python benchmarks/serving.py {fixed|ragged} [--clients 32] [--slots 32] [--steps 4] [--samples 2] [--timed 3]

Model and prompts are those of `workload.py`, a few samples of each at temperature 1. Each client asks for one sample
after another over a connection of its own, without streaming; clients, server and engine share the process's cores and
its interpreter, so a client's own work counts against the server. Rounds of the two alternate after a warm-up, medians
are told. `ratio` is server / engine in tokens a second, `cpu_ratio` in tokens a second of CPU time, the figure that a
busy neighbour disturbs least.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import jax
from workload import CONFIG, LONGEST, MAX_NEW, STOP, STOP_BIAS, prompts, weights, write_workload

from jaxrl_post.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl_post.models.decoder import Params, abstract
from jaxrl_post.rollout.sampler import SampleOptions, Sampler
from jaxrl_post.rollout.step_records import PLAIN
from jaxrl_post.rollout.stepper import StepEngine
from jaxrl_post.serving.openai_api import Served
from jaxrl_post.serving.scheduler import Scheduler
from jaxrl_post.serving.server import application, listen, run
from sharding.mesh import make_mesh

NAME = "workload"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=STOP_BIAS)
    parser.add_argument("--clients", type=int, default=32, help="requests under way at once")
    parser.add_argument("--slots", type=int, default=32, help="sequences decoded at once, by the server")
    parser.add_argument("--steps", type=int, default=4, help="tokens of each slot that one call of its engine samples")
    parser.add_argument("--samples", type=int, default=2, help="of each prompt")
    parser.add_argument("--timed", type=int, default=3, help="timed rounds of both, after one to warm up")
    asked = parser.parse_args()
    params = weights(STOP_BIAS[asked.workload])
    with tempfile.TemporaryDirectory() as scratch:
        write_workload(Path(scratch), asked.workload)
        tokenizer = load_tokenizer(Path(scratch) / "model")
    in_graph = engine(params, asked.samples)
    with served(params, tokenizer, asked.slots, asked.steps) as url:
        over_http = lambda: asyncio.run(ask_all(url, asked.clients, asked.samples))
        rounds = [(lap(in_graph), lap(over_http)) for _ in range(1 + asked.timed)][1:]
    engine_s, server_s = zip(*rounds, strict=True)
    result = {"engine": median(engine_s), "server": median(server_s)}
    ratio = lambda name: round(result["server"][name] / result["engine"][name], 3)
    print(json.dumps(vars(asked) | result | {"ratio": ratio("tokens_per_s"), "cpu_ratio": ratio("tokens_per_cpu_s")}))


def lap(sample: Callable[[], list[int]]) -> dict[str, float]:
    """One round; `sample` returns the tokens of each request."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = sample()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    total = sum(tokens)
    return {"tokens_per_s": total / wall, "tokens_per_cpu_s": total / cpu, "requests_per_s": len(tokens) / wall}


def median(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 1) for name in rows[0]}


def engine(params: Params, samples: int) -> Callable[[], list[int]]:
    sampler = Sampler(abstract(CONFIG)[0], CONFIG, make_mesh({}, jax.devices()[:1]), {STOP})
    options = SampleOptions(samples_per_prompt=samples, max_new_tokens=MAX_NEW)
    generate = lambda: sampler.generate(params, prompts(), options, seed=0, step=0, width=LONGEST)
    return lambda: [len(completion.ids) for completion in generate().completions]


@contextlib.contextmanager
def served(params: Params, tokenizer: Tokenizer, slots: int, steps: int) -> Iterator[str]:
    """The address of a server that is ready."""
    made = StepEngine(
        abstract(CONFIG)[0], CONFIG, make_mesh({}, jax.devices()[:1]), {STOP},
        slots=slots, columns=LONGEST + MAX_NEW, steps=steps,
    )  # fmt: skip
    scheduler = Scheduler(made, made.load(params), max_queue=10_000, warm_up=PLAIN)
    app = application(Served(NAME, tokenizer, None, 600.0), scheduler, None)
    sock, servers = listen("127.0.0.1", 0), []
    thread = threading.Thread(target=run, args=(app, sock, servers.append))
    thread.start()
    try:
        while not servers or not servers[0].started or scheduler.trouble:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1/completions"
    finally:
        servers[0].should_exit = True
        thread.join()


async def ask_all(url: str, clients: int, samples: int) -> list[int]:
    """The tokens of each answer; every client asks for the next sample when it has its last."""
    asked = lambda ids, seed: {"model": NAME, "prompt": ids, "max_tokens": MAX_NEW, "seed": seed}
    waiting = [asked(ids, seed) for ids in prompts() for seed in range(samples)]
    tokens: list[int] = []

    async def client(http: httpx.AsyncClient) -> None:
        while waiting:
            answer = await http.post(url, json=waiting.pop())
            tokens.append(answer.raise_for_status().json()["usage"]["completion_tokens"])

    # One for all: each would read the certificates of all authorities anew.
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=clients)) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return tokens


if __name__ == "__main__":
    main()
