"""`launch serve` on what a user has: the folder of a run, and a model exported from it."""

import threading

import httpx
import pytest
from tiny_server import listening, until

from jaxrl_post import recipes
from jaxrl_post.loops.offline import run as train
from jaxrl_post.loops.policy import load_policy
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.rollout.schedule import SampleOptions
from launch.__main__ import main
from launch.serve import Asked, make_application

RECIPE, LIMIT = "configs/tiny/sft.yaml", 12
ASKED = Asked("127.0.0.1", 0, None, None, 2, 8, 32, 4, 60.0, True)


def answer(source, overrides=()):
    """The greedy text for a prompt, from a server that is asked once it says that it is ready; and what it serves."""
    app, origin = make_application(source, overrides, None, ASKED, "m", None)
    body = {"model": "m", "prompt": "Hi", "max_tokens": LIMIT, "temperature": 0}
    with listening(app) as url:
        until(lambda: httpx.get(f"{url}/health").status_code == 200, seconds=300)
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"], origin


@pytest.mark.slow
def test_a_run_and_its_export_answer_as_the_sampler_does(tmp_path):
    run_dir, export = tmp_path / "run", tmp_path / "export"
    train(recipes.load(RECIPE, [f"run_dir={run_dir}", "steps=1", "evaluation.enabled=false"]))
    assert main(["export", str(run_dir), "--to", str(export)]) == 0
    policy = load_policy(recipes.load(run_dir / "config.yaml", []), run_dir)
    network = policy.network
    sampler = Sampler(network.graphdef, network.model, network.mesh, policy.stop_ids)
    options = SampleOptions(max_new_tokens=LIMIT, temperature=0.0)
    found = sampler.generate(policy.params, [policy.tokenizer.encode("Hi")], options, seed=0, step=0).completions
    text = policy.tokenizer.decode(found[0].ids)
    assert answer(run_dir) == (text, f"{run_dir}, step 1")
    assert answer(run_dir / "config.yaml", [f"model.path={export}", "model.random=null"]) == (text, str(export))
    assert not [thread for thread in threading.enumerate() if thread.name == "scheduler"]
