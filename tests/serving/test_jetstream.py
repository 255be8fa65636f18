"""The adapter against the real JetStream package, which this test installs for itself beside a stand-in for seqio.

seqio (and TensorFlow with it) is imported by `jetstream.engine.token_utils` for a SentencePiece tokenizer that the
adapter does not use, so the stand-in has two empty classes.
"""

import json
import os
import subprocess
import sys

import jax
import pytest

from launch.__main__ import main

SETTINGS = ["mesh.fsdp=1", "mesh.allow_unused_devices=true", "model.random.initializer_range=0.3"]
PROMPTS = ["Hello", "x", "a longer prompt than the others"]
LIMIT = 12
PACKAGES = ["google-jetstream==0.2.2", "tiktoken", "regex"]
PROGRAM = """
import json, sys
import numpy as np
from jetstream.engine import engine_api, token_utils
from jaxrl_post import recipes
from jaxrl_post.loops.policy import load_policy
from jaxrl_post.rollout.decoding import Decoding
from jaxrl_post.rollout.step_records import Request
from jaxrl_post.rollout.stepper import StepEngine
from jaxrl_post.serving.jetstream import JetStreamEngine

settings, prompts, limit = json.loads(sys.argv[1])
policy = load_policy(recipes.load("configs/tiny/grpo.yaml", settings), None)
net = policy.network
make = lambda: StepEngine(net.graphdef, net.model, net.mesh, policy.stop_ids, slots=2, columns=128, steps=3)
greedy = Request(limit, Decoding(temperature=0.0))
engine = JetStreamEngine(make, net.mesh, policy.params, policy.tokenizer, greedy)
assert isinstance(engine, engine_api.Engine) and engine.max_concurrent_decodes == 2
params, state = engine.load_params(), engine.init_decode_state()
tokenizer = engine.build_tokenizer(engine.get_tokenizer())
waiting, live, answers = list(enumerate(prompts)), {}, [[] for _ in prompts]
while waiting or live:
    for slot in range(2):
        if slot not in live and waiting:
            number, text = waiting.pop(0)
            tokens, length = tokenizer.encode(text)
            prefix = engine.prefill(params=params, padded_tokens=np.pad(tokens, (0, 5)), true_length=length)
            state = engine.insert(prefix, state, slot)
            live[slot] = number, np.zeros(1, bool)
    state, result = engine.generate(params, state)
    result.copy_to_host_async()
    result = result.convert_to_numpy()
    for slot, (number, complete) in list(live.items()):
        samples, complete = token_utils.process_result_tokens(tokenizer, slot, limit, result, complete)
        answers[number] += samples[0].token_ids
        if complete[0] or len(answers[number]) >= limit:
            del live[slot]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jetstream")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *PACKAGES], check=True
    )
    (folder / "seqio").mkdir()
    (folder / "seqio" / "__init__.py").touch()
    (folder / "seqio" / "vocabularies.py").write_text(
        "class Vocabulary: ...\n\n\nclass SentencePieceVocabulary(Vocabulary): ...\n"
    )
    return folder


@pytest.mark.slow
def test_jetstreams_loop_samples_the_ids_of_launch_sample(packages, tmp_path):
    files = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    files[0].write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    flags = ["--max-tokens", str(LIMIT), "--temperature", "0", "--file", str(files[0]), "--to", str(files[1])]
    assert main(["sample", "configs/tiny/grpo.yaml", *SETTINGS, "data.chat=false", *flags]) == 0
    lines = [json.loads(line) for line in files[1].read_text().splitlines()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), str(packages)])}
    words = json.dumps([[*SETTINGS, "data.chat=false"], PROMPTS, LIMIT])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    without_end = [[i for i in line["ids"] if i != 257] for line in lines]
    assert json.loads(done.stdout.splitlines()[-1]) == without_end
    assert sum(map(len, without_end)) > 2 * LIMIT


@pytest.mark.slow
def test_its_orchestrator_calls_what_jax_no_longer_has(packages):
    """Why the orchestrator is not used: the day this fails it can be."""
    source = (packages / "jetstream" / "core" / "orchestrator.py").read_text()
    assert "jax.tree_map(" in source
    assert not hasattr(jax, "tree_map")
