"""A trained reward model as a grader: loads a run of `algorithm.kind: reward_model` and scores answers.

Legend: N answers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxrl_post.config import Mesh
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.config_rewards import ModelReward
from jaxrl_post.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl_post.loops.network import build_network
from jaxrl_post.loops.run_folder import newest_step, params_of, run_config
from jaxrl_post.models.decoder import Params
from jaxrl_post.models.sequence import fitting_length
from jaxrl_post.models.zoo import resolve
from jaxrl_post.training.offline_packing import example_shape, example_shardings, pack_examples
from jaxrl_post.training.offline_update import make_forward, reward_model
from jaxrl_post.types import Response
from jaxrl_post.types_offline import Answer, Example
from sharding.mesh import batch_shards
from sharding.placement import place, placed_shapes
from sharding.processes import fetch


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a grader that is a model must know of the run it grades for.

    `vocab_size` is that of the policy's embedding, whose ids may all be sampled; `max_tokens` bounds prompt and
    response together; `samples` is the number of responses usually graded at once; `early` is what a reward's
    `early: auto` means. In a `deterministic` run no clock may decide a score.
    """

    mesh: Mesh
    tokenizer: Tokenizer
    vocab_size: int
    max_tokens: int
    samples: int
    early: bool = False
    deterministic: bool = False


def open_score(reward: ModelReward, setting: Setting, section: str) -> Callable[[Sequence[Response]], np.ndarray]:
    """From responses to float32 [N]: the reward model of a recipe, on its run's mesh, without weights yet.

    Raises: ValueError as `RewardModel`, and when the ids of the policy do not mean the same to the reward model.
    """
    key = f"{section}.run_dir={reward.run_dir}"
    try:
        model = RewardModel(
            reward.run_dir,
            setting.max_tokens,
            reward.tokens_per_batch,
            mesh=setting.mesh,
            answers_per_call=setting.samples,
        )
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    _check_ids(model, setting, key)

    return lambda responses: model([r.prompt.ids for r in responses], [r.ids.tolist() for r in responses])


def _check_ids(model: RewardModel, setting: Setting, key: str) -> None:
    if setting.vocab_size > model.vocab_size:
        raise ValueError(
            f"{key}: its vocabulary of {model.vocab_size} has no place for the policy's of {setting.vocab_size}: train "
            "the reward model from a model of the policy's family"
        )
    ours, theirs = setting.tokenizer, model.tokenizer
    for i in range(ours.vocab_size):
        text, other = (tokenizer.decode([i], skip_special=False) for tokenizer in (ours, theirs))
        if text != other:
            raise ValueError(
                f"{key}: token id {i} is {text!r} to the policy and {other!r} to the reward model, which reads the "
                "policy's ids: train the reward model from a model with the policy's tokenizer"
            )


class RewardModel:
    """Scores of (prompt ids, answer ids), one program for every call.

    The answer's ids are as a sampler gives them, end token included; those of other models' tokenizers mean nothing.
    `tokenizer` is the one the model was trained with. Weights are read at the first call, cut as in training.
    """

    def __init__(
        self,
        run_dir: str | Path,
        max_tokens: int,
        tokens_per_batch: int = 4096,
        *,
        mesh: Mesh | None = None,
        answers_per_call: int | None = None,
    ):
        """The newest checkpoint of `run_dir`, on `mesh`, or for None on the mesh of its recipe.

        `max_tokens` bounds prompt and answer together, `tokens_per_batch` the positions a device holds at once (one
        row at least); `answers_per_call` go to the devices together, in as many such batches as their tokens take.
        Raises: ValueError for a folder that is no run of a reward model or holds no checkpoint, and for `max_tokens`
        beyond the model's positions.
        """
        self._run_dir = Path(run_dir)
        config = _config(self._run_dir)
        if mesh is not None:
            config = config.model_copy(update={"mesh": mesh})
        folder = None if config.model.path is None else resolve(config.model.path)
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self._network = build_network(config, folder, self.tokenizer)
        self._max_tokens = max_tokens
        if max_tokens > self._network.model.max_positions:
            raise ValueError(
                f"max_tokens={max_tokens} exceeds the {self._network.model.max_positions} positions of {run_dir}"
            )
        self._step = newest_step(self._run_dir)
        shards = batch_shards(self._network.mesh)
        model, mesh_sizes = self._network.model, self._network.mesh.shape
        row_length = fitting_length(model.sequence_attention, max_tokens, mesh_sizes["sequence"])
        budget = max(tokens_per_batch, row_length)
        self._batch = answers_per_call or budget // row_length * shards
        self._shape = example_shape(
            [2, max_tokens],
            1,
            examples_per_step=self._batch,
            tokens_per_microbatch=budget,
            row_length=row_length,
            batch_shards=shards,
        )
        self._shardings = example_shardings(self._shape, self._network.mesh)
        self._forward = make_forward(
            reward_model(self._network.graphdef, self._shardings),
            params_shardings=self._network.shardings(),
            batch_shardings=self._shardings,
        )

    @property
    def vocab_size(self) -> int:
        return self._network.model.vocab_size

    @functools.cached_property
    def _params(self) -> Params:
        wanted = placed_shapes(self._network.abstract_params, self._network.shardings())
        return params_of(self._run_dir, self._step, wanted)

    def __call__(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 [N]; the score of `answers[i]` after `prompts[i]`.

        Raises: ValueError for a prompt or answer without tokens, or longer together than `max_tokens`.
        """
        made = zip(prompts, answers, strict=True)
        # The margin, which no score depends on, carries the place in a part through the packing.
        examples = [
            Example(
                tuple(map(int, prompt)),
                (Answer(tuple(map(int, answer)), (True,) * len(answer)),),
                margin=i % self._batch,
            )
            for i, (prompt, answer) in enumerate(made)
        ]
        for i, example in enumerate(examples):
            if not example.prompt_ids or not example.answers[0].ids or example.size > self._max_tokens:
                raise ValueError(
                    f"answer {i}: {len(example.prompt_ids)} prompt and {len(example.answers[0].ids)} answer tokens; "
                    f"both need at least 1, and together at most max_tokens={self._max_tokens}"
                )
        parts = [self._score(examples[i : i + self._batch]) for i in range(0, len(examples), self._batch)]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _score(self, examples: Sequence[Example]) -> np.ndarray:
        batch, n_micro, _ = pack_examples(examples, self._shape)
        scores = fetch(self._forward(self._params, place(batch, self._shardings), n_micro))
        live = batch.examples.weight > 0
        scores_N = np.empty(len(examples), np.float32)
        scores_N[batch.examples.margin[live].astype(int)] = scores[live]
        return scores_N


def _config(run_dir: Path) -> OfflineConfig:
    config = run_config(run_dir)
    if not isinstance(config, OfflineConfig) or config.algorithm.kind != "reward_model":
        raise ValueError(
            f"{run_dir} is a run of algorithm.kind={config.algorithm.kind}, which has no scores: give the run_dir of a "
            "recipe of kind reward_model"
        )
    return config
