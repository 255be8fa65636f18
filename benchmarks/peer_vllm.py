"""vLLM's side of `rollout.py`, run by a Python that has vLLM: prints one line of JSON.

PYTHON benchmarks/peer_vllm.py FOLDER --timed 3
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path

GROUP, MAX_NEW = 8, 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timed", type=int, required=True)
    options = parser.parse_args()
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    import vllm

    engine = vllm.LLM(
        str(options.folder / "model"), dtype="float32", max_model_len=256, max_num_seqs=256, disable_log_stats=True
    )
    asked = vllm.SamplingParams(n=GROUP, temperature=1.0, top_p=1.0, top_k=0, max_tokens=MAX_NEW, detokenize=False)
    lines = (options.folder / "prompts.jsonl").read_text().splitlines()
    prompts = [{"prompt_token_ids": json.loads(line)["ids"]} for line in lines]
    laps = [lap(engine, prompts, asked) for _ in range(1 + options.timed)][1:]
    median = lambda values: round(statistics.median(values), 3)
    result = {
        "system": f"vllm {vllm.__version__}",
        "tokens_per_s": median(tokens / wall for tokens, wall, _ in laps),
        "step_s": median(wall for _, wall, _ in laps),
        "cpu_s": median(cpu for _, _, cpu in laps),
        "tokens": [tokens for tokens, _, _ in laps],
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    print(json.dumps(result))


def lap(engine, prompts: list[dict], asked) -> tuple[int, float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    answers = engine.generate(prompts, asked, use_tqdm=False)
    tokens = sum(len(sample.token_ids) for answer in answers for sample in answer.outputs)
    return tokens, time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
