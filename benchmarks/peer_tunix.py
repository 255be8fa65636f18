"""Tunix's side of `rollout.py` and `train_step.py`, run by a Python that has google-tunix: prints one line of JSON.

PYTHON benchmarks/peer_tunix.py {rollout|grpo|dpo} FOLDER --timed 3 --batch 64
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig, TrainingInput

GROUP, LONGEST, MAX_NEW, PAIR_PROMPT, PAIR_ANSWER, STOP = 8, 32, 96, 32, 96, 2
NEVER = 10**6
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
SHAPE = llama.ModelConfig(
    num_layers=6, vocab_size=2048, embed_dim=256, hidden_dim=768, num_heads=8, head_dim=32, num_kv_heads=4,
    rope_theta=10000, norm_eps=1e-6, weight_tying=True,
)  # fmt: skip


class Laps:
    """Wall and CPU seconds, and tokens, between marks."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float, int]] = []

    def mark(self, tokens: int) -> None:
        self.marks.append((time.perf_counter(), time.process_time(), tokens))

    def result(self) -> dict[str, float]:
        """Medians of all but the first lap, which warms up."""
        laps = [(b[0] - a[0], b[1] - a[1], b[2]) for a, b in zip(self.marks, self.marks[1:], strict=False)][1:]
        median = lambda values: round(statistics.median(values), 3)
        return {
            "step_s": median(wall for wall, _, _ in laps),
            "cpu_s": median(cpu for _, cpu, _ in laps),
            "tokens_per_s": median(tokens / wall for wall, _, tokens in laps),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=("rollout", "grpo", "dpo"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timed", type=int, required=True)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    laps = Laps()
    {"rollout": rollout, "grpo": grpo, "dpo": dpo}[options.method](options, laps)
    peak_mb = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    system = f"tunix {importlib.metadata.version('google-tunix')}"
    print(json.dumps({"system": system} | laps.result() | {"batch": options.batch, "peak_rss_mb": peak_mb}))


def model(folder: Path) -> llama.Llama3:
    return llama_params.create_model_from_safe_tensors(str(folder / "model"), SHAPE, MESH, dtype=jnp.float32)


def tokenizer_of(folder: Path):
    return AutoTokenizer.from_pretrained(str(folder / "model"))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rollout(options: argparse.Namespace, laps: Laps) -> None:
    cache = CacheConfig(
        cache_size=LONGEST + MAX_NEW, num_layers=SHAPE.num_layers, num_kv_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
    )  # fmt: skip
    sampler = Sampler(model(options.folder), tokenizer_of(options.folder), cache)
    requests = [row["prompt"] for row in rows(options.folder / "prompts.jsonl") for _ in range(GROUP)]
    laps.mark(0)
    for seed in range(1, 2 + options.timed):
        out = sampler(
            requests, max_generation_steps=MAX_NEW, max_prompt_length=LONGEST, temperature=1.0, top_p=1.0, seed=seed
        )
        laps.mark(sum(len(ids) for ids in out.tokens))


def grpo(options: argparse.Namespace, laps: Laps) -> None:
    prompts = [row["prompt"] for row in rows(options.folder / "prompts.jsonl")]
    steps, generated = 2 + options.timed, [0]

    def even_share(prompts: list[str], completions: list[str], **unused) -> list[float]:
        ids = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
        generated[0] += sum(map(len, ids))
        return [sum(i % 2 == 0 for i in row) / len(row) if row else 0.5 for row in ids]

    role = rl_cluster.Role
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-5, weight_decay=0.0), eval_every_n_steps=NEVER, max_steps=steps,
        mini_batch_size=len(prompts), train_micro_batch_size=options.batch // GROUP,
        rollout_micro_batch_size=len(prompts), compute_logps_micro_batch_size=options.batch // GROUP,
    )  # fmt: skip
    sampling = RolloutConfig(
        max_tokens_to_generate=MAX_NEW, max_prompt_length=LONGEST, kv_cache_size=LONGEST + MAX_NEW, temperature=1.0,
        top_p=1.0, top_k=None,
    )  # fmt: skip
    cluster = rl_cluster.RLCluster(
        actor=model(options.folder),
        reference=None,
        tokenizer=tokenizer_of(options.folder),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role.ACTOR: MESH, role.REFERENCE: MESH, role.ROLLOUT: MESH}, rollout_engine="vanilla",
            training_config=training, rollout_config=sampling,
        ),
    )  # fmt: skip
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=GROUP, num_iterations=1, beta=0.0), even_share)
    batch = {"prompts": np.array(prompts)}
    with MESH:
        learner.train(_marked(batch, steps, lambda: cluster.actor_trainer.model, lambda: generated[0], laps))


def dpo(options: argparse.Namespace, laps: Laps) -> None:
    tokenizer, pairs = tokenizer_of(options.folder), rows(options.folder / "pairs.jsonl")
    ids = lambda name, end: np.array([tokenizer.encode(row[name]) + end for row in pairs], np.int32)
    prompt, chosen, rejected = ids("prompt", []), ids("chosen", [STOP]), ids("rejected", [STOP])
    assert prompt.shape[1] == PAIR_PROMPT
    assert chosen.shape[1] == rejected.shape[1] == PAIR_ANSWER
    batch = TrainingInput(
        prompt_ids=prompt, prompt_mask=np.ones_like(prompt), chosen_ids=chosen, chosen_mask=np.ones_like(chosen),
        rejected_ids=rejected, rejected_mask=np.ones_like(rejected),
    )  # fmt: skip
    steps = 2 + options.timed
    trainer = DPOTrainer(
        model(options.folder),
        model(options.folder),
        optax.adamw(1e-5, weight_decay=0.0),
        DPOTrainingConfig(eval_every_n_steps=NEVER, max_steps=steps, beta=0.1),
    )
    tokens = 2 * len(pairs) * (PAIR_PROMPT + PAIR_ANSWER)
    with MESH:
        trainer.train(_marked(batch, steps, lambda: trainer.model, lambda: tokens, laps))


def _marked(batch, steps: int, trained: Callable[[], nnx.Module], tokens: Callable[[], int], laps: Laps) -> Iterator:
    """The batch, again and again; a step has ended when the next batch is asked for and its weights are there."""

    class Batches:
        def __iter__(self) -> Iterator:
            before = 0
            for _ in range(steps):
                jax.block_until_ready(jax.tree.leaves(nnx.state(trained(), nnx.Param)))
                now = tokens()
                laps.mark(now - before if now > before else now)
                before = now
                yield batch

    return Batches()


if __name__ == "__main__":
    main()
