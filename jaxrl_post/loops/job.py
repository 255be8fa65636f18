"""What a run needs before its first step, built from the config: tokenizer, tasks, mesh, model and its parameters.

Everything a user can get wrong is checked here, cheapest first, before any device holds a weight.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from jaxrl_post.config import Config
from jaxrl_post.data.lessons import with_lessons
from jaxrl_post.data.prompts import prepare
from jaxrl_post.data.tasks import load_task
from jaxrl_post.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl_post.loops.network import Network, build_network, check_ids, check_positions
from jaxrl_post.loops.teachers import Teacher, build_teachers
from jaxrl_post.models.huggingface import open_checked
from jaxrl_post.models.zoo import resolve
from jaxrl_post.rewards.model import Setting
from jaxrl_post.rewards.reward import Reward, build_reward
from jaxrl_post.rollout.sampler import check_stops_early
from jaxrl_post.rollout.schedule import decode_attention
from jaxrl_post.types import Prompt
from sharding.mesh import platform
from sharding.rules import ROLLOUT

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Job:
    """The fixed parts of a run; nothing in it changes from step to step."""

    config: Config
    network: Network
    tokenizer: Tokenizer
    reward: Reward
    train_prompts: list[Prompt]
    held_out: list[Prompt]
    task_name: str
    teachers: tuple[Teacher, ...] = ()

    @property
    def stop_ids(self) -> frozenset[int]:
        own = frozenset() if self.config.rollout.ignore_eos else self.tokenizer.stop_ids
        return own | set(self.config.rollout.stop_token_ids)

    @property
    def token_bytes(self) -> list[bytes]:
        """What each id adds to the text, where stop strings need it."""
        return self.tokenizer.token_bytes() if self.config.rollout.stop else []

    @property
    def prompt_width(self) -> int:
        """Columns for prompts, one for the whole run: the longest prompt, up to a multiple of 8 within the limit."""
        longest = max(len(prompt.ids) for prompt in (*self.train_prompts, *self.held_out))
        return min(-(-longest // 8) * 8, self.config.data.max_prompt_tokens)

    @property
    def lesson_width(self) -> int:
        """Columns for prompts where teachers see prompts of their own."""
        seen = (len(prompt.lesson.prompt_ids or ()) for prompt in self.train_prompts)
        return max(self.prompt_width, -(-max(seen) // 8) * 8)


def build(config: Config) -> Job:
    """Raises ValueError or FileNotFoundError for whatever the config asks for that cannot be had."""
    folder = None if config.model.path is None else resolve(config.model.path)
    tokenizer = load_tokenizer(folder)
    task = load_task(config.data.task, config.seed)
    for line in task.dropped:
        log.warning("skipped %s", line)
    train_prompts, report = prepare(task.train, tokenizer, config.data, "data.task")
    if report.too_long:
        log.warning("%d of %d prompts are over data.max_prompt_tokens and were dropped", report.too_long, report.rows)
    taught = config.algorithm.taught
    train_prompts = with_lessons(train_prompts, taught, tokenizer, config.data) if taught else train_prompts
    held_out = prepare(task.held_out, tokenizer, config.data, "held-out rows")[0] if task.held_out else []
    held_out = held_out[: config.evaluation.max_prompts]
    network = build_network(config, folder, tokenizer)
    if config.rollout.partial:
        check_stops_early(network.model, network.mesh)
    decode_attention(config.rollout.attention, network.model, platform(network.mesh))  # refuse a kernel there is not
    network.shardings(ROLLOUT)  # refuse sizes that do not divide before anything is loaded
    lengths = {
        "data.max_prompt_tokens": config.data.max_prompt_tokens,
        "rollout.max_new_tokens": config.rollout.max_new_tokens,
    }
    check_positions(network, lengths)
    reward = build_reward(config.reward, _setting(config, tokenizer, network, (*train_prompts, *held_out)))
    reward.check_rows([prompt.row for prompt in (*train_prompts, *held_out)])
    teachers = build_teachers(taught, network, config.seed, tokenizer)
    job = Job(config, network, tokenizer, reward, train_prompts, held_out, task.name, teachers)
    _check_decoding(job)
    check_ids(network, ((f"the prompt {prompt.text[:80]!r}", prompt.ids) for prompt in (*train_prompts, *held_out)))
    _check_lessons(job)
    if folder is not None:
        open_checked(folder, network.model)
    return job


def grades_early(config: Config, platform: str) -> bool:
    """What a reward's `early: auto` means on devices of this platform: whether samples are graded while others are
    sampled."""
    return platform != "cpu" and config.rollout.partial is None


def _setting(config: Config, tokenizer: Tokenizer, network: Network, prompts: Sequence[Prompt]) -> Setting:
    return Setting(
        mesh=config.mesh,
        tokenizer=tokenizer,
        vocab_size=network.model.vocab_size,
        max_tokens=max(len(prompt.ids) for prompt in prompts) + config.rollout.max_new_tokens,
        samples=config.data.prompts_per_step * config.rollout.samples_per_prompt,
        early=grades_early(config, platform(network.mesh)),
        deterministic=config.debug.deterministic,
    )


def _check_decoding(job: Job) -> None:
    """The vocabulary holds all ids that rollout.* names, and stop strings can be found in its tokens."""
    size, folder = job.network.model.vocab_size, str(job.network.folder)
    if outside := sorted(i for i in job.config.rollout.logit_bias if i >= size):
        raise ValueError(f"rollout.logit_bias: ids {outside} are outside the model's vocabulary of {size}")
    if job.config.rollout.stop:
        job.tokenizer.token_bytes()
    for source, ids in (("rollout.stop_token_ids", job.config.rollout.stop_token_ids), (folder, job.stop_ids)):
        if outside := sorted(i for i in ids if i >= size):
            raise ValueError(f"{source}: stop ids {outside} are outside the model's vocabulary of {size}")


def _check_lessons(job: Job) -> None:
    """Where teachers see prompts of their own, these and a response must lie within a teacher's positions."""
    for prompt in job.train_prompts if job.teachers else []:
        seen = len(prompt.lesson.prompt_ids or prompt.ids)
        job.teachers[prompt.lesson.teacher].check_positions(seen + job.config.rollout.max_new_tokens)
