"""A step's samples as the lines of rollouts/step_N.jsonl, and such lines in the place of a rollout.

N samples, K graders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post.data.curriculum import PromptSource
from jaxrl_post.data.jsonl import Row
from jaxrl_post.loops.groups import Samples
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.measures import Metrics
from jaxrl_post.models.decoder import Params
from jaxrl_post.observe.metrics import ROLLOUTS, rollout_file
from jaxrl_post.observe.progress import Phases
from jaxrl_post.rewards.reward import Scores
from jaxrl_post.rollout.sampler import Rollout
from jaxrl_post.types import Completion, Prompt, StopReason


def dump(samples: Samples, names: Sequence[str], advantages_N: np.ndarray) -> Iterator[dict[str, Any]]:
    """`names` are the graders'. A group that only fills the step up is marked as `filler`."""
    trained_N = np.repeat(samples.has_signal_P, len(samples.texts) // max(len(samples.prompts), 1))
    columns = (samples.rollout.completions, samples.texts, *samples.scores, advantages_N, trained_N)
    for c, text, reward, heads, advantage, trained in zip(*columns, strict=True):
        prompt = samples.prompts[c.prompt]
        yield (
            {
                "prompt": prompt.text,
                "completion": text,
                "reward": float(reward),
                "scores": {name: None if np.isnan(x) else float(x) for name, x in zip(names, heads, strict=True)},
                "advantage": float(advantage),
                "stop": c.stop.name.lower(),
                "prompt_ids": list(prompt.ids),
                "ids": c.ids.tolist(),
                "logp": c.logp.tolist(),
                "row": prompt.row,
            }
            | ({} if c.versions is None else {"versions": c.versions.tolist()})
            | ({} if trained else {"filler": True})
        )


class DumpedRollouts:
    """Gives a run the samples that another one has drawn and graded, step by step; nothing is sampled.

    The prompt stream moves on as if they had been, so that a later run may go on by sampling.
    """

    def __init__(self, job: Job, folder: Path, stream: PromptSource) -> None:
        """Raises: ValueError for a recipe whose samples a dump does not hold in full, and for missing steps."""
        inside = folder / ROLLOUTS  # of a run's folder
        self._job, self._folder, self._stream = job, inside if inside.is_dir() else folder, stream
        config = job.config
        if config.rollout.partial or config.model.moe.routing_replay:
            key = "rollout.partial" if config.rollout.partial else "model.moe.routing_replay"
            raise ValueError(f"--rollouts: dumped samples lack what {key} needs: unset it, or sample")
        if config.data.curriculum:
            raise ValueError("--rollouts: data.curriculum chooses what to sample, and nothing is: set it to null")
        missing = [step for step in range(1, config.steps + 1) if not self._file(step).is_file()]
        if missing:
            raise ValueError(
                f"--rollouts {folder}: there is no {self._file(missing[0]).name}; give the folder of a run that dumped "
                f"its rollouts (or that rollouts/), and at most as many `steps`, not {config.steps}"
            )
        self._prompts = {_key(prompt.ids, prompt.row): prompt for prompt in job.train_prompts}

    def next(self, params: Params, step: int, phases: Phases) -> tuple[Samples, Metrics]:
        """As `Gather.next`. Raises: ValueError for samples of other prompts or in other numbers than the recipe's."""
        config = self._job.config
        self._stream.next()
        with phases("gen"):
            lines = self._file(step).read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines]
        G, wanted = config.rollout.samples_per_prompt, config.data.prompts_per_step * config.rollout.samples_per_prompt
        if len(rows) != wanted:
            raise ValueError(
                f"{self._file(step)} holds {len(rows)} samples, and "
                f"data.prompts_per_step={config.data.prompts_per_step} × "
                f"rollout.samples_per_prompt={G} makes {wanted}: use the recipe of that run"
            )
        completions = [_completion(i // G, row) for i, row in enumerate(rows)]
        heads_NK = [[row["scores"][name] for name in self._job.reward.names] for row in rows]
        scores = Scores(np.array([row["reward"] for row in rows], np.float64), np.array(heads_NK, np.float64))
        has_signal_P = np.array([not row.get("filler", False) for row in rows[::G]])
        prompts = [self._prompt(row, step) for row in rows[::G]]
        texts = [row["completion"] for row in rows]
        return Samples(prompts, Rollout(completions, (0,), (0,)), texts, scores, has_signal_P), {}

    def state(self) -> dict[str, Any]:
        return {"data": self._stream.state(), "carried": []}

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state["data"])

    def _file(self, step: int) -> Path:
        return self._folder / rollout_file("", step).name

    def _prompt(self, row: Row, step: int) -> Prompt:
        prompt = self._prompts.get(_key(row["prompt_ids"], row["row"]))
        if prompt is None:
            raise ValueError(
                f"{self._file(step)}: {row['prompt'][:80]!r} is no prompt of this recipe: use the data.* and the model "
                "of the run that sampled it"
            )
        return prompt


def _key(ids: Sequence[int], row: Row) -> str:
    return json.dumps([list(ids), row], sort_keys=True)


def _completion(prompt: int, row: Row) -> Completion:
    """The log-probs before any reshaping are not dumped, and no update reads them."""
    logp = np.array(row["logp"], np.float32)
    versions = np.array(row["versions"], np.int32) if "versions" in row else None
    return Completion(
        prompt, np.array(row["ids"], np.int32), logp, logp, StopReason[row["stop"].upper()], versions=versions
    )
