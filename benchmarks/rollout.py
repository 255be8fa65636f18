"""Tokens a second of the rollout engine on one small, fixed workload; prints one line of JSON.

    python benchmarks/rollout.py {fixed|ragged} [--timed 3] [--slots N] [--refill N] [--vllm PYTHON] [--tunix PYTHON]

Temperature 1; see `workload.py`. `--vllm` names a Python that has vLLM (its CPU build on a CPU), `--tunix` one that has
google-tunix: the same model folder and prompts are given to each after ours is done, in a process of its own, and the
ratio is printed (above 1: ours is faster).

`tokens_per_s` counts the sampled tokens over the whole call; `cpu_s` is the CPU time of the process a step, the figure
that a busy neighbour disturbs least. `matmul_tokens_per_s` is the limit set by the weights' matmuls alone: as many
decode steps of 256 rows, each product timed by itself in this process. Attention, norms and the draw come on top.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
from peers import run_peer
from products import forward_s
from workload import CONFIG, GROUP, LONGEST, MAX_NEW, PROMPTS, STOP, STOP_BIAS, prompts, weights, write_workload

from jaxrl_post.models.decoder import abstract
from jaxrl_post.rollout.sampler import Rollout, SampleOptions, Sampler
from sharding.mesh import make_mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=STOP_BIAS)
    parser.add_argument("--timed", type=int, default=3, help="timed rollouts, after one to warm up")
    parser.add_argument("--slots", type=int, help="sequences decoded at once; default: the engine's choice")
    parser.add_argument("--refill", type=int, help="free slots awaited before a refill; default: the engine's choice")
    parser.add_argument("--vllm", metavar="PYTHON", help="also run vLLM with this Python")
    parser.add_argument("--tunix", metavar="PYTHON", help="also run Tunix with this Python")
    options = parser.parse_args()
    asked = SampleOptions(GROUP, MAX_NEW, slots=options.slots, refill=options.refill)
    sampler = Sampler(abstract(CONFIG)[0], CONFIG, make_mesh({}, jax.devices()[:1]), {STOP})
    params = weights(STOP_BIAS[options.workload])
    rollout = lambda step: sampler.generate(params, prompts(), asked, seed=0, step=step, width=LONGEST)
    ours = measure(rollout, options.timed)
    print(json.dumps({"workload": options.workload, "system": "jaxrl_post"} | ours))
    with tempfile.TemporaryDirectory() as scratch:
        write_workload(Path(scratch), options.workload)
        timed = f"--timed={options.timed}"
        peers = []
        if options.vllm:
            peers.append(run_peer(options.vllm, "peer_vllm.py", scratch, timed))
        if options.tunix:
            peers.append(run_peer(options.tunix, "peer_tunix.py", "rollout", scratch, timed))
    for theirs in peers:
        print(json.dumps({"workload": options.workload} | theirs))
        print(f"ours / {theirs['system']}: {ours['tokens_per_s'] / theirs['tokens_per_s']:.2f}× tokens a second")


def measure(rollout: Callable[[int], Rollout], timed: int) -> dict[str, float | list[int]]:
    laps = [_lap(rollout, step) for step in range(1 + timed)]
    warm_up, rest = laps[0], laps[1:]
    median = lambda name: statistics.median(lap[name] for lap in rest)
    return {
        "tokens_per_s": round(statistics.median(lap["tokens"] / lap["wall_s"] for lap in rest), 1),
        "step_s": round(median("wall_s"), 3),
        "cpu_s": round(median("cpu_s"), 3),
        "tokens": [int(lap["tokens"]) for lap in rest],
        "decode_steps": [int(lap["decode_steps"]) for lap in rest],
        "refills": [int(lap["refills"]) for lap in rest],
        "warm_up_s": round(warm_up["wall_s"], 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "matmul_tokens_per_s": round(matmul_limit()),
    }


def _lap(rollout: Callable[[int], Rollout], step: int) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    out = rollout(step)
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "tokens": float(sum(len(c.ids) for c in out.completions)),
        "decode_steps": float(max(out.decode_steps)),
        "refills": float(max(out.refills)),
    }


def matmul_limit(rows: int = PROMPTS * GROUP) -> float:
    """Tokens a second if a decode step were the products with its weights and nothing else."""
    return rows / forward_s(CONFIG, rows, rows)


if __name__ == "__main__":
    main()
