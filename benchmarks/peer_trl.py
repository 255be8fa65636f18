"""TRL's side of `train_step.py`, run by a Python that has TRL: prints one line of JSON.

PYTHON benchmarks/peer_trl.py {grpo|dpo} FOLDER --timed 3 --batch 64
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import trl
from datasets import Dataset
from transformers import TrainerCallback

GROUP, MAX_NEW, PAIRS, PAIR_TOKENS = 8, 96, 32, 128


class Laps(TrainerCallback):
    """Wall and CPU seconds between the ends of optimizer steps."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_step_end(self, args, state, control, **unused):
        self.marks.append((time.perf_counter(), time.process_time()))

    def medians(self) -> tuple[float, float]:
        laps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return statistics.median(lap[0] for lap in laps), statistics.median(lap[1] for lap in laps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=("grpo", "dpo"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timed", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    options = parser.parse_args()
    laps = Laps()
    trainer = (grpo if options.method == "grpo" else dpo)(options, laps)
    trainer.train()
    step_s, cpu_s = laps.medians()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {"system": f"trl {trl.__version__}", "step_s": round(step_s, 3), "cpu_s": round(cpu_s, 3)}
    print(json.dumps(result | {"batch": options.batch, "peak_rss_mb": round(peak_mb)}))


def common(options: argparse.Namespace) -> dict:
    """Float32 on the CPU, AdamW at a fixed rate, nothing saved or reported."""
    return {
        "output_dir": str(options.folder / "trl"), "max_steps": 1 + options.timed, "learning_rate": 1e-5,
        "weight_decay": 0.0, "lr_scheduler_type": "constant", "optim": "adamw_torch", "bf16": False, "use_cpu": True,
        "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "dataloader_pin_memory": False, "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def grpo(options: argparse.Namespace, laps: Laps) -> trl.GRPOTrainer:
    asked = rows(options.folder / "prompts.jsonl")
    samples = len(asked) * GROUP
    arguments = trl.GRPOConfig(
        per_device_train_batch_size=options.batch, gradient_accumulation_steps=samples // options.batch,
        num_generations=GROUP, max_completion_length=MAX_NEW, temperature=1.0, top_p=1.0, top_k=0, beta=0.0,
        shuffle_dataset=False, **common(options),
    )  # fmt: skip

    def even_share(completion_ids: list[list[int]], **unused) -> list[float]:
        words = [[i for i in ids if i > 2] for ids in completion_ids]
        return [sum(i % 2 == 0 for i in ids) / len(ids) if ids else 0.5 for ids in words]

    dataset = Dataset.from_list(asked * arguments.max_steps)
    model = str(options.folder / "model")
    return trl.GRPOTrainer(
        model=model, args=arguments, reward_funcs=even_share, train_dataset=dataset, callbacks=[laps]
    )


def dpo(options: argparse.Namespace, laps: Laps) -> trl.DPOTrainer:
    batch = min(options.batch, PAIRS)
    arguments = trl.DPOConfig(
        per_device_train_batch_size=batch, gradient_accumulation_steps=PAIRS // batch, beta=0.1,
        max_length=PAIR_TOKENS, **common(options),
    )  # fmt: skip
    spaced = [
        {"prompt": row["prompt"], "chosen": " " + row["chosen"], "rejected": " " + row["rejected"]}
        for row in rows(options.folder / "pairs.jsonl")
    ]
    model = str(options.folder / "model")
    return trl.DPOTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(spaced), callbacks=[laps])


if __name__ == "__main__":
    main()
