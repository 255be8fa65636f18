"""Run as `python compiled_engine.py TARGET TOKENS`: compiles a run's rollout for hardware that is not there.

Prints JSON: bytes of the cache and of the program's temporaries, and what its loops copy that is as large as a stack of
keys or values. A process of its own, as the compilers must not see the settings of the tests.
"""

import json
import sys

from launch.no_devices import look_for_none

look_for_none()


from jaxrl_post.config import Config  # noqa: E402
from jaxrl_post.loops.gather import sample_options  # noqa: E402
from jaxrl_post.loops.planning import rollout_trips, stand_in_job  # noqa: E402
from jaxrl_post.rollout.sampler import Sampler  # noqa: E402
from sharding.report import Program, element_counts, memory_of  # noqa: E402
from sharding.targets import open_target, parse_target  # noqa: E402

MODEL = {"family": "qwen3", "hidden_size": 256, "intermediate_size": 512, "layers": 8, "heads": 8, "kv_heads": 4,
         "head_dim": 128, "tie_embeddings": False}  # fmt: skip
PROMPTS, GROUP, WIDTH = 4, 16, 64  # a replica's


def main(name: str, tokens: int) -> None:
    target = parse_target(name)
    devices = open_target(target)
    tensor = 2 if len(devices) > 1 else 1
    replicas = len(devices) // tensor
    config = Config.model_validate(
        {
            "model": {"random": MODEL},
            "mesh": {"fsdp": replicas, "tensor": tensor},
            "data": {"prompts_per_step": PROMPTS * replicas, "max_prompt_tokens": WIDTH},
            "rollout": {"samples_per_prompt": GROUP, "max_new_tokens": tokens},
        }
    )
    job = stand_in_job(config, devices)
    network = job.network
    sampler = Sampler(
        network.graphdef, network.model, network.mesh, job.stop_ids, device_memory=float(target.chip.memory)
    )
    options = sample_options(config, job.tokenizer)
    shape, traced = sampler.traced(network.rollout_shapes(), config.data.prompts_per_step, options, WIDTH)
    compiled = traced.lower().compile(compiler_options=target.compiler_options)
    stack = MODEL["layers"] * MODEL["kv_heads"] // tensor * MODEL["head_dim"] * PROMPTS
    stacks = {"prompts": stack * WIDTH, "responses": stack * GROUP * tokens}
    program = Program(compiled.as_text(), [2] * len(rollout_trips(shape, PROMPTS)))
    copied = [
        f"{instruction.op} {instruction.shapes}"
        for instruction, runs in program.instructions()
        if runs > 1
        and instruction.op in ("copy", "copy-start", "transpose")
        and any(n >= stacks["responses"] // 2 or n == stacks["prompts"] for n in element_counts(instruction.shapes))
    ]
    temporaries = memory_of(compiled).temporaries
    print(json.dumps({"cache": 2 * 2 * sum(stacks.values()), "temporaries": temporaries, "copied": copied}))


main(sys.argv[1], int(sys.argv[2]))
