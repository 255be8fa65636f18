"""Tokens a second of the rollout engine on one small, fixed workload; prints one line of JSON.

    python benchmarks/rollout.py {fixed|ragged} [--timed 3] [--slots N] [--refill N]

A Llama of 5.25M parameters in float32, 32 prompts of 8 to 32 tokens, 8 samples of each, at most 96 new tokens,
temperature 1. `fixed`: nobody stops early. `ragged`: a chance of about 1/30 to stop at every token, so that lengths
are geometric. The chance is in the weights: hidden dim 0 keeps the embedding's constant, since no layer writes to it,
and the head's column 0 is then a bias of the logits. The same weights can be run by any other engine.

`tokens_per_s` counts the sampled tokens over the whole call; `cpu_s` is the CPU time of the process a step, the figure
that a busy neighbour disturbs least. `matmul_tokens_per_s` is the limit set by the weights' matmuls alone: as many
decode steps of 256 rows, each product timed by itself in this process. Attention, norms and the draw come on top.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Params, abstract
from jaxrl_post.rollout.sampler import Rollout, SampleOptions, Sampler
from sharding.mesh import make_mesh

CONFIG = ModelConfig("llama", 2048, 256, 768, 6, 8, 4, 32, max_positions=512, tie_embeddings=True)
PROMPTS, GROUP, SHORTEST, LONGEST, MAX_NEW = 32, 8, 8, 32, 96
PAD, UNKNOWN, STOP, SEED = 0, 1, 2, 20261130
NEVER = -45.0
STOP_BIAS = {"fixed": NEVER, "ragged": 9.1748}  # ragged: found by bisection for a mean P(stop) of 1/30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=STOP_BIAS)
    parser.add_argument("--timed", type=int, default=3, help="timed rollouts, after one to warm up")
    parser.add_argument("--slots", type=int, help="sequences decoded at once; default: the engine's choice")
    parser.add_argument("--refill", type=int, help="free slots awaited before a refill; default: the engine's choice")
    options = parser.parse_args()
    asked = SampleOptions(GROUP, MAX_NEW, slots=options.slots, refill=options.refill)
    sampler = Sampler(abstract(CONFIG)[0], CONFIG, make_mesh({}, jax.devices()[:1]), {STOP})
    params = weights(STOP_BIAS[options.workload])
    rollout = lambda step: sampler.generate(params, prompts(), asked, seed=0, step=step, width=LONGEST)
    print(json.dumps({"workload": options.workload} | measure(rollout, options.timed)))


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
    c = CONFIG
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer = [
        (c.hidden_size, queries + 2 * keys), (queries, c.hidden_size), (c.hidden_size, 2 * c.intermediate_size),
        (c.intermediate_size, c.hidden_size),
    ]  # fmt: skip
    seconds = c.layers * sum(_product_s(rows, *shape) for shape in layer)
    return rows / (seconds + _product_s(rows, c.hidden_size, c.vocab_size))


def _product_s(rows: int, inner: int, columns: int, repeats: int = 30) -> float:
    x, w = jnp.ones((rows, inner)), jnp.ones((inner, columns))
    product = jax.jit(jnp.dot)
    product(x, w).block_until_ready()
    start = time.perf_counter()
    for _ in range(repeats):
        product(x, w).block_until_ready()
    return (time.perf_counter() - start) / repeats


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(SEED + 1)
    lengths = (int(rng.integers(SHORTEST, LONGEST + 1)) for _ in range(PROMPTS))
    return [rng.integers(STOP + 1, CONFIG.vocab_size, length).tolist() for length in lengths]


def weights(stop_bias: float) -> Params:
    """Normal with deviation 0.02, but for what keeps hidden dim 0 constant and turns it into a bias of the logits."""
    rng = np.random.default_rng(SEED)
    _, shapes, _ = abstract(CONFIG)

    def weight(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if "norm" in jax.tree_util.keystr(path):
            return np.ones(leaf.shape, np.float32)
        return 0.02 * rng.standard_normal(leaf.shape, np.float32)

    params = jax.tree_util.tree_map_with_path(weight, shapes)
    params["layers"]["o"][..., 0] = params["layers"]["down"][..., 0] = 0.0
    params["embed"][:, 0] = 0.1
    params["embed"][[PAD, UNKNOWN], 0] = NEVER
    params["embed"][STOP, 0] = stop_bias
    return jax.tree.map(jnp.asarray, params)


if __name__ == "__main__":
    main()
