"""What one accelerator does: sampler and trainer agree with each attention backend, tokens a second and share of the
peak; prints JSON.

    python benchmarks/gpu.py [--out gpu.json] [--models qwen3-0.6b qwen3-8b] [--minutes 6]
    python benchmarks/gpu.py --compile h200:1x1     # no accelerator: its programs are compiled for one

Models have the shapes of `configs/models` and random weights in bfloat16, so nothing is downloaded. For each: a rollout
in which nobody stops, and a GRPO update on what was sampled, both timed at their second call. MFU is the operations of
the weights and of attention (2 a multiply-add, recomputation not counted) over time and the chip's dense bfloat16 peak.
A model that no longer fits into `--minutes` is left out, and said to be.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
PROMPT = 128
# model: (prompts, samples of each, new tokens, tokens of a micro-batch, most seconds it takes)
SIZES = {
    "qwen3-0.6b": (32, 8, 512, 16384, 100),
    "qwen3-8b": (16, 8, 256, 2048, 180),
    "tiny": (2, 4, 16, 1024, 60),
}
TINY = {"family": "qwen3", "hidden_size": 256, "intermediate_size": 512, "layers": 2, "heads": 4, "kv_heads": 2,
        "head_dim": 128}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the results here")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--compile", metavar="TARGET", help="compile for this target, run nothing")
    options = parser.parse_args()
    results = compiled(options) if options.compile else measured(options)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    begun = time.monotonic()
    results = [say(device())]
    results += [say(one) for dtype in ("float32", "bfloat16") for one in agreement(dtype)]
    for name in options.models:
        left = 60 * options.minutes - (time.monotonic() - begun)
        longest = SIZES[name][-1]
        results.append(say(speed(name) if left > longest else {"model": name, "left_out": f"{left:.0f} s are left"}))
    return results


def compiled(options: argparse.Namespace) -> list[dict[str, Any]]:
    from launch.no_devices import look_for_none

    look_for_none()
    from jaxrl_post.loops.planning import Planner
    from sharding.targets import open_target, parse_target

    target = parse_target(options.compile)
    devices = open_target(target)[:1]
    results = []
    for name in options.models:
        plan = Planner(recipe(name), target, devices).plan()
        peaks = {p.name: round(p.peak / 2**30, 1) if p.refused is None else p.refused for p in plan.programs}
        results.append(say({"model": name, "target": target.name, "peak_gib": peaks, "fits": plan.fits}))
    return results


def say(result: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(result), flush=True)
    return result


def device() -> dict[str, Any]:
    import jax

    first = jax.devices()[0]
    return {"platform": first.platform, "device": first.device_kind, "jax": jax.__version__}


def recipe(name: str, **model: str) -> Any:
    from jaxrl_post.config import Config

    prompts, group, new, tokens, _ = SIZES[name]
    source = {"random": TINY} if name == "tiny" else {"path": str(ROOT / "configs" / "models" / name)}
    return Config.model_validate(
        {
            "model": {"dtype": "bfloat16", "param_dtype": "bfloat16", "remat": "full"} | source | model,
            "mesh": {"data": 1, "allow_unused_devices": True},
            "data": {"prompts_per_step": prompts, "max_prompt_tokens": PROMPT},
            "rollout": {"samples_per_prompt": group, "max_new_tokens": new},
            "training": {"tokens_per_microbatch": tokens},
            # 8B's weights, gradients and moments leave no room for activations: moments wait in the host's memory.
            "optimizer": {"offload": name == "qwen3-8b"},
        }
    )


@dataclasses.dataclass
class Bench:
    """A recipe's sampler, learner and random weights on the first device."""

    job: Any
    sampler: Any
    learner: Any
    params: Any


def build(config: Any) -> Bench:
    import jax

    from jaxrl_post.loops.learner import Learner
    from jaxrl_post.loops.network import decoder_params
    from jaxrl_post.loops.planning import stand_in_job
    from jaxrl_post.rollout.sampler import Sampler

    job = stand_in_job(config, jax.devices()[:1])
    network = job.network
    params = decoder_params(None, network.model, config.seed, network.shardings())
    return Bench(job, Sampler(network.graphdef, network.model, network.mesh, set()), Learner(job), params)


def roll(bench: Bench, params: Any, step: int) -> tuple[list[tuple[int, ...]], Any]:
    """Prompts of random ids, and what the sampler makes of them; no id stops it."""
    import jax
    import numpy as np

    from jaxrl_post.rollout.sampler import SampleOptions

    config, vocabulary = bench.job.config, bench.job.network.model.vocab_size
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, vocabulary, PROMPT).tolist()) for _ in range(config.data.prompts_per_step)]
    options = SampleOptions(config.rollout.samples_per_prompt, config.rollout.max_new_tokens)
    out = bench.sampler.generate(params, prompts, options, seed=0, step=step, width=PROMPT)
    return prompts, jax.block_until_ready(out)


def trajectories(prompts: Sequence[tuple[int, ...]], rollout: Any, group: int) -> list[Any]:
    """Advantages that alternate, so that every group has signal."""
    from jaxrl_post.types import Trajectory

    return [
        Trajectory(i // group, prompts[i // group], c.ids, c.logp, 1.0 if i % 2 else -1.0)
        for i, c in enumerate(rollout.completions)
    ]


def agreement(dtype: str) -> Iterator[dict[str, Any]]:
    """The sampler's log-probs against those of a trainer with each attention backend, and the norm of the gradient that
    it takes, on a tiny model; in float32 with float32 products."""
    import jax

    from jaxrl_post.loops.network import rollout_params

    tiny = lambda attention: recipe("tiny", dtype=dtype, param_dtype="float32", attention=attention)
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        bench = build(tiny("xla"))
        prompts, rollout = roll(bench, rollout_params(bench.job.network, bench.params), 1)
        samples = trajectories(prompts, rollout, bench.job.config.rollout.samples_per_prompt)
        for attention in ("xla", "flash", "cudnn"):
            yield {"agreement": dtype, "attention": attention} | agrees(tiny(attention), samples)


def agrees(config: Any, samples: list[Any]) -> dict[str, Any]:
    from jaxrl_post.observe.progress import Phases

    try:
        bench = build(config)
        _, metrics = bench.learner.learn(bench.learner.trained.start(bench.params), samples, Phases())
    except ValueError as error:  # a backend that cannot serve here says so
        return {"refused": str(error)}
    return {"logp_abs_diff_max": metrics["rollout_corr/logp_abs_diff_max"], "grad_norm": metrics["actor/grad_norm"]}


def speed(name: str) -> dict[str, Any]:
    from jaxrl_post.loops.network import rollout_params
    from jaxrl_post.observe.progress import Phases
    from jaxrl_post.rollout.schedule import decode_attention
    from sharding.mesh import platform

    bench = build(recipe(name))
    group, state, seconds = bench.job.config.rollout.samples_per_prompt, bench.learner.trained.start(bench.params), {}
    bench.params = None  # the state has them
    for step in (1, 2):
        start = time.perf_counter()
        prompts, rollout = roll(bench, rollout_params(bench.job.network, state.params), step)
        sampled = time.perf_counter()
        state, metrics = bench.learner.learn(state, trajectories(prompts, rollout, group), Phases())
        seconds = {"rollout_s": sampled - start, "update_s": time.perf_counter() - sampled}
    network = bench.job.network
    kernels = {
        "attention": network.model.attention,
        "decode_attention": decode_attention("auto", network.model, platform(network.mesh)),
    }
    return {"model": name} | kernels | rates(bench, seconds) | {"grad_norm": metrics["actor/grad_norm"]}


def rates(bench: Bench, seconds: dict[str, float]) -> dict[str, Any]:
    """Tokens a second and share of the peak, None where the chip's peak is not known."""
    import jax

    from sharding.targets import CHIPS

    config, model = bench.job.config, bench.job.network.model
    kind = jax.devices()[0].device_kind.lower().replace(" ", "")
    peak = next((chip.flops for name, chip in CHIPS.items() if name in kind), None)
    new = config.rollout.max_new_tokens
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    heads = model.heads * model.head_dim
    weights = model.parameter_count() - (0 if model.tie_embeddings else model.vocab_size * model.hidden_size)
    # Of a position: its weights, and keys and values of all it sees, half a sample on average.
    seen = PROMPT + new / 2
    flops = 2 * weights + 4 * model.layers * heads * seen
    share = lambda operations, s: round(operations / s / peak, 4) if peak else None
    rollout, update = seconds["rollout_s"], seconds["update_s"]
    trained = samples * new + config.data.prompts_per_step * PROMPT  # a prompt is in a row once
    return {
        "rollout_s": round(rollout, 3),
        "decode_tokens_per_s": round(samples * new / rollout, 1),
        "decode_mfu": share(samples * new * flops, rollout),
        "update_s": round(update, 3),
        "update_tokens_per_s": round(samples * new / update, 1),
        "update_mfu": share(3 * trained * flops, update),
    }


if __name__ == "__main__":
    main()
