"""Credit: from a step's rewards to the advantage of each sample, or of each of its tokens.

Rewards are shaped first (length punishment, KL to the reference), then a method's estimator compares them, then a
teacher may grade each token.
P prompts a step, G samples each, N = P·G samples, R = rollout.max_new_tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.config_algorithms import DAPO, GPG, GRPO, Overlong, PolicyMethod, ReinforcePlusPlus, ReMax, Surrogate
from jaxrl_post.config_distillation import Distillation
from jaxrl_post.config_ppo import PPO
from jaxrl_post.loops.critic import Critic
from jaxrl_post.loops.gather import grade, sample_greedily
from jaxrl_post.loops.groups import Samples
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.measures import Metrics
from jaxrl_post.loops.taught_advantage import TaughtAdvantages
from jaxrl_post.models.decoder import Params
from jaxrl_post.objectives import advantages, kl, overlong, returns
from jaxrl_post.observe.progress import Phases
from jaxrl_post.rollout.sampler import Sampler
from jaxrl_post.training.state import TrainState
from jaxrl_post.types import StopReason, Trajectory


class Signals(NamedTuple):
    """What an estimator may look at. A reward that is not finite is missing: its sample gets advantage 0.

    `reward_N` float32; `group_N`, `length_N` int32, tokens; `greedy_N` float32, the greedy answer's reward, for ReMax;
    `penalty_NR` float32, coef · KL of each token, for REINFORCE++ and a critic (for the others it is in `reward_N`);
    `truncated_N` bool, cut by the token limit; `heads_NK`, `weights_K` float32, each part of a weighted reward, NaN
    where it is missing.
    """

    reward_N: Any
    group_N: Any
    length_N: Any
    greedy_N: Any = None
    penalty_NR: Any = None
    truncated_N: Any = None
    heads_NK: Any = None
    weights_K: Any = None


Estimate = Callable[[Signals], jax.Array]  # -> advantages float32 [N], or [N, R]
# (trajectories without advantages, signals, the policy) -> with them, and metrics
Assign = Callable[[Sequence[Trajectory], Signals, TrainState, Phases], tuple[list[Trajectory], Metrics]]


class Credit:
    """Assigns advantages step by step; its only state is the coefficient of an adaptive KL."""

    def __init__(
        self,
        job: Job,
        sampler: Sampler,
        learner: Learner,
        critic: Critic | None = None,
        taught: TaughtAdvantages | None = None,
    ):
        self._job, self._sampler, self._learner, self._taught = job, sampler, learner, taught
        self._algorithm = job.config.algorithm
        self._assign = (
            _by_critic(critic) if critic else _by_estimate(self._algorithm, job.config.rollout.max_new_tokens)
        )
        self._kl_coef = self._algorithm.kl.coef

    def assign(
        self, samples: Samples, state: TrainState, params: Params, phases: Phases
    ) -> tuple[list[Trajectory], Metrics]:
        """Trajectories with their advantages, and metrics of what shaped the rewards.

        `params` are those of `state` in the rollout layout, before this step's updates.
        """
        bare = to_trajectories(samples, self._algorithm.drop_truncated)
        greedy_N = self._greedy_rewards(samples, params, phases)
        penalty_NR, metrics = self._kl_penalty(bare, state, phases)
        signals = self._signals(samples, greedy_N, penalty_NR)
        trajectories, assigned = self._assign(bare, signals, state, phases)
        if self._taught:
            trajectories, measured = self._taught.assign(trajectories, state, phases)
            assigned |= measured
        return trajectories, metrics | assigned | self._reward_metrics(signals)

    def state(self) -> dict[str, float]:
        """For JSON."""
        return {"kl_coef": self._kl_coef}

    def restore(self, state: dict[str, float]) -> None:
        """An adaptive coefficient goes on from where it was; a fixed one is the config's, which may have changed."""
        if self._algorithm.kl.target is not None:
            self._kl_coef = state["kl_coef"]

    def _signals(self, samples: Samples, greedy_N: np.ndarray | None, penalty_NR: np.ndarray | None) -> Signals:
        completions = samples.rollout.completions
        length_N = np.array([len(c.ids) for c in completions], np.int32)
        reward_N = samples.rewards_N
        if self._algorithm.overlong is not None:
            limit = self._job.config.rollout.max_new_tokens
            reward_N = reward_N + length_penalty(self._algorithm.overlong, length_N, limit)
        per_token = isinstance(self._algorithm, ReinforcePlusPlus | PPO)
        if penalty_NR is not None and not per_token:
            reward_N = reward_N - penalty_NR.sum(axis=1)
        present_N = np.repeat(samples.has_signal_P, len(completions) // len(samples.prompts))
        return Signals(
            np.float32(np.where(present_N, reward_N, np.nan)),
            np.array([c.prompt for c in completions], np.int32),
            length_N,
            greedy_N,
            penalty_NR if per_token else None,
            np.array([c.stop is StopReason.LENGTH for c in completions]),
            np.float32(np.where(present_N[:, None], samples.scores.heads_NK, np.nan)),
            np.array(self._job.reward.weights, np.float32),
        )

    def _reward_metrics(self, signals: Signals) -> Metrics:
        """verl's `critic/rewards`, where shaping makes them differ from the scores."""
        if self._algorithm.overlong is None and not self._algorithm.kl_in_reward:
            return {}
        penalty_N = 0.0 if signals.penalty_NR is None else signals.penalty_NR.sum(axis=1)
        present_N = (signals.reward_N - penalty_N)[np.isfinite(signals.reward_N)]
        if not len(present_N):
            return {}
        return {
            "critic/rewards/mean": float(present_N.mean()),
            "critic/rewards/max": float(present_N.max()),
            "critic/rewards/min": float(present_N.min()),
        }

    def _greedy_rewards(self, samples: Samples, params: Params, phases: Phases) -> np.ndarray | None:
        """float32 [N], for ReMax: the reward of the greedy answer to each sample's prompt."""
        if not isinstance(self._algorithm, ReMax):
            return None
        with phases("gen"):
            rollout = sample_greedily(self._job, self._sampler, params, samples.prompts)
        with phases("reward"):
            _, scores = grade(self._job, samples.prompts, rollout)
        return np.repeat(np.float32(scores.total_N), len(samples.texts) // len(samples.prompts))

    def _kl_penalty(
        self, trajectories: Sequence[Trajectory], state: TrainState, phases: Phases
    ) -> tuple[np.ndarray | None, Metrics]:
        """coef · KL(π_old ‖ π_ref) of each token, float32 [N, R], where it belongs into the reward.

        A sample that is not trained on has 0. The coefficient adapts after it is used; the KL it is held to, like
        verl's, is the mean over samples of the mean over tokens.
        """
        options, coef = self._algorithm.kl, self._kl_coef
        if not self._algorithm.kl_in_reward:
            return None, {}
        old = self._learner.old_logprobs(state, trajectories, phases)
        reference = self._learner.reference_logprobs(trajectories, phases)
        width = self._job.config.rollout.max_new_tokens
        length_N = np.array([len(x) for x in old])
        mask_NR = np.arange(width)[None] < length_N[:, None]
        kl_NR = np.asarray(_token_kl(_padded(old, width), _padded(reference, width), mask_NR, options.estimator))
        live_N = length_N > 0
        mean = float((kl_NR.sum(axis=1)[live_N] / length_N[live_N]).mean()) if live_N.any() else 0.0
        if options.target is not None:
            adapted = kl.adapted_coefficient(
                coef, mean, target=options.target, samples=len(trajectories), horizon=options.horizon
            )
            self._kl_coef = float(adapted)
        metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": coef}
        return np.float32(coef) * kl_NR, metrics


def _by_critic(critic: Critic) -> Assign:
    return lambda bare, s, state, phases: critic.assign(
        bare, s.reward_N, s.penalty_NR, s.truncated_N, state.params, phases
    )


def _by_estimate(algorithm: PolicyMethod, max_new_tokens: int) -> Assign:
    estimate = jax.jit(estimator(algorithm, max_new_tokens))

    def assign(
        bare: Sequence[Trajectory], signals: Signals, _: TrainState, phases: Phases
    ) -> tuple[list[Trajectory], Metrics]:
        with phases("adv"):
            advantages_N = np.asarray(estimate(signals))
            rows = zip(bare, advantages_N, strict=True)
            return [dataclasses.replace(t, advantage=_of_response(advantage, t)) for t, advantage in rows], {}

    return assign


def estimator(algorithm: PolicyMethod, max_new_tokens: int) -> Estimate:
    """The method's advantage as one function of the signals."""
    match algorithm:
        case ReinforcePlusPlus(gamma=gamma):
            return functools.partial(_reinforce_plus_plus, gamma=gamma, width=max_new_tokens)
        case Distillation():
            return lambda s: jnp.zeros_like(s.reward_N)
        case ReMax():
            return lambda s: advantages.remax(s.reward_N, s.greedy_N)
        case GRPO(normalize_by_std=by_std):
            return lambda s: advantages.group_advantages(s.reward_N, s.group_N, by_std)
        case GPG(scale=scale):
            return lambda s: advantages.gpg(s.reward_N, s.group_N, scale)
        case DAPO():
            return _by_name("grpo")
        case Surrogate(advantage=name):
            return _by_name(name)
    return _by_name(algorithm.kind)


def _by_name(name: str) -> Estimate:
    """Estimators without options, by the kind that is named after them."""
    match name:
        case "grpo":
            return lambda s: advantages.group_advantages(s.reward_N, s.group_N)
        case "dr_grpo":
            return lambda s: advantages.group_advantages(s.reward_N, s.group_N, normalize_by_std=False)
        case "rloo":
            return lambda s: advantages.leave_one_out(s.reward_N, s.group_N)
        case "reinforce_plus_plus_baseline":
            return lambda s: advantages.reinforce_plus_plus_baseline(s.reward_N, s.group_N, s.length_N)
        case "opo":
            return lambda s: advantages.length_weighted(s.reward_N, s.group_N, s.length_N)
        case "pass_at_k":
            return lambda s: advantages.pass_at_k(s.reward_N, s.group_N)
        case "maxrl":
            return lambda s: advantages.maxrl(s.reward_N, s.group_N)
        case "gpg":
            return lambda s: advantages.gpg(s.reward_N, s.group_N)
        case "gdpo":
            return lambda s: advantages.gdpo(s.heads_NK, s.group_N, s.weights_K)
        case "lite_ppo":
            return lambda s: advantages.batch_scaled(s.reward_N, s.group_N)
    raise AssertionError(f"no estimator {name}")


def _reinforce_plus_plus(signals: Signals, gamma: float, width: int) -> jax.Array:
    """float32 [N, R]; each row is one sample."""
    present_N = jnp.isfinite(signals.reward_N)
    mask_NR = (jnp.arange(width)[None] < signals.length_N[:, None]) & present_N[:, None]
    penalty_NR = jnp.zeros(mask_NR.shape) if signals.penalty_NR is None else signals.penalty_NR
    return returns.reinforce_plus_plus(signals.reward_N[:, None], penalty_NR, mask_NR, kl_coef=1.0, gamma=gamma)


def to_trajectories(samples: Samples, drop_truncated: bool) -> list[Trajectory]:
    """Completions with advantage 0. Stop reasons, not widths, tell which were cut."""
    return [
        Trajectory(
            group=c.prompt,
            prompt_ids=samples.prompts[c.prompt].ids,
            response_ids=c.ids,
            logp=c.logp,
            advantage=0.0,
            lesson=samples.prompts[c.prompt].lesson,
            choices=c.choices,
            train=bool(samples.has_signal_P[c.prompt]) and not (drop_truncated and c.stop is StopReason.LENGTH),
        )
        for c in samples.rollout.completions
    ]


def length_penalty(options: Overlong, length_N: np.ndarray, limit: int) -> np.ndarray:
    """DAPO's soft punishment, ≤ 0, to be added to the reward; without a buffer a fifth of the limit is one."""
    buffer = options.buffer or max(limit // 5, 1)
    return np.asarray(_soft_penalty(length_N, limit, buffer, options.factor))


def _of_response(advantage: np.ndarray, trajectory: Trajectory) -> float | np.ndarray:
    """One number, or those of the response's tokens."""
    return float(advantage) if advantage.ndim == 0 else advantage[: len(trajectory.response_ids)]


def _padded(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    out = np.zeros((len(rows), width), np.float32)
    for padded, row in zip(out, rows, strict=True):
        padded[: len(row)] = row
    return out


@functools.partial(jax.jit, static_argnums=3)
def _token_kl(logp_NR: jax.Array, ref_NR: jax.Array, mask_NR: jax.Array, estimator: str) -> jax.Array:
    return kl.penalty(logp_NR, ref_NR, mask_NR, estimator)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _soft_penalty(length_N: jax.Array, limit: int, buffer: int, factor: float) -> jax.Array:
    return overlong.soft_penalty(length_N, max_length=limit, buffer=buffer, factor=factor)
