"""Run as `python run_here.py ATTENTION [PLATFORM]`: one step of a tiny run in float32 on the first device; prints JSON.

A process of its own: the tests' process is told to look for CPUs alone.
"""

import json
import os
import sys
from pathlib import Path

if len(sys.argv) > 2:
    os.environ["JAX_PLATFORMS"] = sys.argv[2]
else:
    os.environ.pop("JAX_PLATFORMS", None)

import jax
import numpy as np

jax.config.update("jax_default_matmul_precision", "highest")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu  # noqa: E402

from jaxrl_post.loops.network import rollout_params  # noqa: E402
from jaxrl_post.observe.progress import Phases  # noqa: E402


def main() -> None:
    bench = gpu.build(gpu.recipe("tiny", dtype="float32", param_dtype="float32", remat="none", attention=sys.argv[1]))
    prompts, rollout = gpu.roll(bench, rollout_params(bench.job.network, bench.params), 1)
    samples = gpu.trajectories(prompts, rollout, bench.job.config.rollout.samples_per_prompt)
    state, metrics = bench.learner.learn(bench.learner.trained.start(bench.params), samples, Phases())
    device = jax.devices()[0]
    print(
        json.dumps(
            {
                "platform": device.platform,
                "device": device.device_kind,
                "ids": [[int(i) for i in c.ids] for c in rollout.completions],
                "logp": [[float(x) for x in c.logp] for c in rollout.completions],
                "gap": metrics["rollout_corr/logp_abs_diff_max"],
                "loss": metrics["actor/pg_loss"],
                "grad_norm": metrics["actor/grad_norm"],
                "weights": float(sum(np.abs(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(state.params))),
            }
        )
    )


main()
