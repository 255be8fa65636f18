"""The peer of `quickstart_vs_torch.py`: on-policy GRPO in plain torch and transformers, with the quickstart's settings.

Left-padded `generate`, one backward pass over the groups that have signal, logits for the response only. Prints a line
a step.

    python benchmarks/torch_grpo.py MODEL_FOLDER STEPS
"""

from __future__ import annotations

import random
import re
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, SAMPLES, NEW_TOKENS, LEARNING_RATE = 8, 6, 12, 1e-5


def main(folder: str, steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10) if (7 * a + 3 * b) % 5]
    for step in range(1, steps + 1):
        batch = rng.sample(pairs, PROMPTS)
        start = time.perf_counter()
        inputs, response, rewards = rollout(model, tokenizer, batch)
        sampled = time.perf_counter()
        update(model, optimizer, tokenizer, inputs, response, rewards)
        length = response_mask(response, tokenizer.eos_token_id).sum(1).mean()
        seconds = f"gen {sampled - start:.2f} s, update_actor {time.perf_counter() - sampled:.2f} s"
        print(f"step {step}  reward {rewards.mean():.3f}  length {length:.1f}  {seconds}", flush=True)


def rollout(model, tokenizer, batch):
    """Inputs [N, W], sampled ids [N, R] and rewards [N]."""
    texts = [chat(tokenizer, a, b) for a, b in batch for _ in range(SAMPLES)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    response = ids[:, inputs.input_ids.shape[1] :]
    answers = [a + b for a, b in batch for _ in range(SAMPLES)]
    spoken = [re.findall(r"\d+", tokenizer.decode(row, skip_special_tokens=True)) for row in response]
    rewards = [float(bool(n) and n[-1] == str(answer)) for n, answer in zip(spoken, answers, strict=True)]
    return inputs, response, torch.tensor(rewards)


def update(model, optimizer, tokenizer, inputs, response, rewards) -> None:
    grouped = rewards.view(PROMPTS, SAMPLES)
    advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)).view(-1)
    keep = advantages != 0
    if not keep.any():
        return
    mask = response_mask(response, tokenizer.eos_token_id)
    seen = torch.cat([inputs.attention_mask, torch.ones_like(response)], 1)[keep]
    ids = torch.cat([inputs.input_ids, response], 1)[keep]
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    logits = model(
        input_ids=ids, attention_mask=seen, position_ids=positions, logits_to_keep=response.shape[1] + 1
    ).logits[:, :-1]
    logp = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), response[keep], reduction="none")
    loss = -(advantages[keep, None] * logp * mask[keep]).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def response_mask(response, eos: int):
    """1 up to and including the first end token."""
    ended = (response == eos).int()
    return ((ended.cumsum(1) - ended) == 0).float()


def chat(tokenizer, a: int, b: int) -> str:
    content = f"What is {a} + {b}? Answer with just the number."
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
