"""A tiny random model over bytes, served from a thread of the test."""

import contextlib
import functools
import threading
import time

from jaxrl_post import recipes
from jaxrl_post.loops.policy import load_policy
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.rollout.step_records import PLAIN
from jaxrl_post.rollout.stepper import StepEngine
from jaxrl_post.serving.openai_api import Served
from jaxrl_post.serving.scheduler import Scheduler
from jaxrl_post.serving.server import application, listen, run

NAME = "tiny"
ONE_DEVICE = ["mesh.fsdp=1", "mesh.allow_unused_devices=true"]
SLOTS, COLUMNS = 8, 512


@functools.cache
def policy():
    # A wide initialiser makes peaked distributions, so that greedy answers and ties do not hang on rounding.
    wide = ["model.random.initializer_range=0.3", "data.system_prompt=Say it."]
    return load_policy(recipes.load("configs/tiny/grpo.yaml", [*ONE_DEVICE, *wide]), None)


@functools.cache
def sampler():
    network = policy().network
    return Sampler(network.graphdef, network.model, network.mesh, policy().stop_ids)


@functools.cache
def engine():
    network = policy().network
    made = StepEngine(
        network.graphdef, network.model, network.mesh, policy().stop_ids, slots=SLOTS, columns=COLUMNS, steps=4
    )
    return made, made.load(policy().params)


@contextlib.contextmanager
def serving(max_queue=256, seconds=300.0, key=None, decoding=PLAIN, warm_up=None, tokenizer=None):
    """(base URL, scheduler) of a server that ends with the context."""
    made, weights = engine()
    scheduler = Scheduler(made, weights, max_queue=max_queue, warm_up=warm_up)
    app = application(Served(NAME, tokenizer or policy().tokenizer, "Say it.", seconds, decoding), scheduler, key)
    with listening(app) as url:
        yield url, scheduler


@contextlib.contextmanager
def listening(app):
    """The base URL of an application while the context lasts."""
    sock, servers = listen("127.0.0.1", 0), []
    thread = threading.Thread(target=run, args=(app, sock, servers.append))
    thread.start()
    try:
        until(lambda: servers and servers[0].started)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        servers[0].should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
