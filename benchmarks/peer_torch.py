"""transformers' and torch's side of `roofline.py`: prints one line of JSON with the median seconds of each phase.

PYTHON benchmarks/peer_torch.py FOLDER --timed 3 --group 6 --new 64 --batch 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timed", type=int, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--new", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.folder / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    lines = (options.folder / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines for _ in range(options.group)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    laps = [step(model, optimizer, inputs, options) for _ in range(1 + options.timed)][1:]
    median = lambda values: round(statistics.median(values), 3)
    result = {"system": f"transformers {transformers.__version__}, torch {torch.__version__}"}
    print(json.dumps(result | {"gen_s": median(a for a, _ in laps), "update_s": median(b for _, b in laps)}))


def step(model, optimizer, inputs, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of sampling and of an update on what was sampled."""
    start = time.perf_counter()
    with torch.no_grad():
        ids = model.generate(
            **inputs, min_new_tokens=options.new, max_new_tokens=options.new, do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0,
        )  # fmt: skip
    sampled = time.perf_counter()
    seen = torch.cat([inputs.attention_mask, torch.ones(len(ids), options.new, dtype=torch.long)], 1)
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    advantage = torch.where(torch.arange(len(ids)) % 2 == 0, 1.0, -1.0)
    optimizer.zero_grad()
    for rows in torch.arange(len(ids)).split(options.batch):
        logits = model(
            input_ids=ids[rows], attention_mask=seen[rows], position_ids=positions[rows], logits_to_keep=options.new + 1
        ).logits[:, :-1]
        target = ids[rows, -options.new :]
        logp = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        (-(advantage[rows, None] * logp).sum() / (len(ids) * options.new)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return sampled - start, time.perf_counter() - sampled


if __name__ == "__main__":
    main()
