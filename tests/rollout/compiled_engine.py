"""Run as `python compiled_engine.py TARGET TOKENS SLOTS [parts]`: compiles a rollout for hardware that is not there.

Prints JSON: bytes of the cache and of the program's temporaries, and what its loops copy that is as large as a stack of
keys or values. Of a rollout in parts: the most temporaries of a part, whatever it copies that is as large, in a loop or
outside, and how much of the cache lies where the part before left it. A process of its own, as the compilers must not
see the settings of the tests.
"""

import json
import sys

from launch.no_devices import look_for_none

look_for_none()


import jax  # noqa: E402
import numpy as np  # noqa: E402

from jaxrl_post.config import Config  # noqa: E402
from jaxrl_post.loops.gather import sample_options  # noqa: E402
from jaxrl_post.loops.planned_rollout import rollout_trips  # noqa: E402
from jaxrl_post.loops.planning import stand_in_job  # noqa: E402
from jaxrl_post.rollout.parts import make_programs  # noqa: E402
from jaxrl_post.rollout.sampler import Sampler  # noqa: E402
from sharding.placement import placed_shapes  # noqa: E402
from sharding.report import Program, element_counts, memory_of  # noqa: E402
from sharding.targets import open_target, parse_target  # noqa: E402

MODEL = {"family": "qwen3", "hidden_size": 256, "intermediate_size": 512, "layers": 8, "heads": 8, "kv_heads": 4,
         "head_dim": 128, "tie_embeddings": False}  # fmt: skip
PROMPTS, GROUP, WIDTH = 4, 16, 64  # a replica's
REFILL = 2 * GROUP


def main(name: str, tokens: int, slots: int, parts: bool) -> None:
    target = parse_target(name)
    devices = open_target(target)
    tensor = 2 if len(devices) > 1 else 1
    replicas = len(devices) // tensor
    rollout = {"samples_per_prompt": GROUP, "max_new_tokens": tokens, "slots": slots, "refill": min(REFILL, slots)}
    config = Config.model_validate(
        {
            "model": {"random": MODEL},
            "mesh": {"fsdp": replicas, "tensor": tensor},
            "data": {"prompts_per_step": PROMPTS * replicas, "max_prompt_tokens": WIDTH},
            "rollout": rollout,
        }
    )
    job = stand_in_job(config, devices)
    network = job.network
    sampler = Sampler(
        network.graphdef, network.model, network.mesh, job.stop_ids, device_memory=float(target.chip.memory)
    )
    options = sample_options(config, job.tokenizer)
    shape, traced = sampler.traced(network.rollout_shapes(), config.data.prompts_per_step, options, WIDTH)
    column = MODEL["layers"] * MODEL["kv_heads"] // tensor * MODEL["head_dim"]
    stacks = {"prompts": column * shape.prompt_rows * WIDTH, "responses": column * shape.slots * tokens}
    build = lambda traced: traced.lower().compile(compiler_options=target.compiler_options)
    found = {"cache": 2 * 2 * sum(stacks.values())}
    if parts:
        compiled = list(compiled_parts(sampler, network, shape, traced, build))
        copied = [line for one in compiled for line in large_copies(one, [], stacks, least_runs=1)]
        found["in_place"] = min(memory_of(one).aliased for one in compiled)
    else:
        compiled = [build(traced)]
        copied = large_copies(compiled[0], [2] * len(rollout_trips(shape, PROMPTS)), stacks, least_runs=2)
    temporaries = max(memory_of(one).temporaries for one in compiled)
    print(json.dumps(found | {"temporaries": temporaries, "copied": copied}))


def large_copies(compiled, trips, stacks, least_runs):
    return [
        f"{instruction.op} {instruction.shapes}"
        for instruction, runs in Program(compiled.as_text(), trips).instructions()
        if runs >= least_runs
        and instruction.op in ("copy", "copy-start", "transpose")
        and any(n >= stacks["responses"] // 2 or n == stacks["prompts"] for n in element_counts(instruction.shapes))
    ]


def compiled_parts(sampler, network, shape, traced, build):
    """Each from the shapes and layouts that the one before it ends with."""
    start, *phases = make_programs(network.graphdef, shape, network.mesh, sampler._specs)
    sharded, whole = sampler._layouts()
    params, requests = network.rollout_shapes(), traced.args_info[0][1]
    requests = placed_shapes(requests, jax.tree.map(lambda _: sharded, requests))
    number = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
    begun = start.trace(params, requests)
    state, layout = begun.out_info, build(begun).output_shardings
    for phase in phases:
        state = placed_shapes(state, layout)
        advance = phase.trace(params, requests, None, number, state.cache, state._replace(cache=()), number)
        yield (compiled := build(advance))
        state, layout = advance.out_info[0], compiled.output_shardings[0]


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "parts" in sys.argv)
