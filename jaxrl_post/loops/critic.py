"""PPO's critic in the loop: it values a step's tokens, turns rewards into advantages and learns from the returns.

N samples of a step, R = rollout.max_new_tokens; A micro-batches, B rows, M targets of an update.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Traced

from jaxrl_post.config_ppo import PPO
from jaxrl_post.loops.faulty_update import Skips, read_fault
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.learner import by_number, floats, mean_metrics, mini_batches, update_shape
from jaxrl_post.loops.measures import Metrics, mean_max_min
from jaxrl_post.models import scalar_head
from jaxrl_post.models.decoder import Params
from jaxrl_post.objectives.returns import gae, token_rewards, whiten
from jaxrl_post.objectives.values import explained_variance
from jaxrl_post.observe.progress import Phases
from jaxrl_post.training.critic import critic_micro_loss, make_critic_update, make_values, token_values
from jaxrl_post.training.diagnosis import Diagnosis, diagnose, make_probe
from jaxrl_post.training.optimizer import make_optimizer
from jaxrl_post.training.packing import empty_batch, pack
from jaxrl_post.training.state import TrainState, abstract_gradients, init_state, restorable_state, state_shardings
from jaxrl_post.training.update import batch_shardings
from jaxrl_post.types import TrainBatch, Trajectory
from sharding.placement import Tree, place, placed_shapes, reshard
from sharding.processes import fetch


class Scores(NamedTuple):
    """What the rewards and values of a step come to; `live_N` False has neither.

    `reward_N` float32; `penalty_NR` float32, coef · KL of each token; `value_NR` float32, of the state each token was
    sampled in; `after_N` float32, of the state after the last token, 0 where the response ended; `length_N` int32.
    """

    reward_N: Any
    penalty_NR: Any
    value_NR: Any
    after_N: Any
    length_N: Any
    live_N: Any


class Critic:
    """A scalar head on a decoder, its optimizer and its programs. It holds its state, which `learn` moves.

    The decoder is its own, or the policy's of the moment: `policy` are the policy's parameters, in the training layout.
    """

    def __init__(self, job: Job, algorithm: PPO):
        """Holds no weights yet. Raises: ValueError when a row cannot hold what bootstrapping adds to a sample."""
        self._job, self._algorithm = job, algorithm
        self._abstract_params = {"head": scalar_head.abstract_head(job.network.model)}
        axes, held = {"head": scalar_head.AXES}, {"decoder": job.network.shardings()}
        if self.owns_decoder:
            self._abstract_params["decoder"], axes["decoder"], held = job.network.abstract_params, job.network.axes, {}
        updates = algorithm.epochs * algorithm.mini_batches
        self._optimizer = make_optimizer(algorithm.critic, job.config.steps, updates)
        self._shardings = state_shardings(
            self._abstract_params,
            axes,
            self._optimizer,
            job.network.mesh,
            job.network.stage,
            algorithm.critic.offload,
        )
        # A state after the last token takes that token as an input, with one more target to read it at.
        self.shape = update_shape(job, job.config.rollout.max_new_tokens + algorithm.bootstrap_truncated)
        self._batch_shardings = batch_shardings(self.shape, job.network.mesh)
        values = token_values(job.network.graphdef, self._batch_shardings)
        self._values = make_values(
            values, params_shardings=self._shardings.params | held, batch_shardings=self._batch_shardings
        )
        self._update: Any = make_critic_update(
            values,
            self._optimizer,
            value_clip=algorithm.critic.value_clip,
            shardings=self._shardings,
            held_shardings=held,
            batch_shardings=self._batch_shardings,
        )
        self._probed, self._skips = critic_micro_loss(values, algorithm.critic.value_clip), Skips(job.config, "critic")
        self._credit = jax.jit(functools.partial(credit_tokens, gamma=algorithm.gamma, lam=algorithm.lam))
        self._state: TrainState | None = None

    def start(self, params: Params) -> None:
        """Begin with a head of zeros, as no state is worth anything yet; a decoder of its own is a copy of `params`."""
        head = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._abstract_params["head"])
        own = {"decoder": reshard(params, self._shardings.params["decoder"])} if self.owns_decoder else {}
        self._state = init_state({"head": head} | own, self._optimizer, self._shardings)

    @property
    def owns_decoder(self) -> bool:
        """Or reads the policy's."""
        return self._algorithm.critic.decoder == "own"

    def _held(self, policy: Params) -> Tree:
        """What the values are made from beside the critic's own parameters."""
        return {} if self.owns_decoder else {"decoder": policy}

    def arrays(self) -> Tree:
        """What a checkpoint must hold."""
        return {"critic": self._started()._asdict()}

    def abstract_arrays(self) -> Tree:
        """Shapes, dtypes and shardings of `arrays`."""
        return {"critic": self.abstract_state()._asdict()}

    def abstract_state(self) -> TrainState:
        return restorable_state(self._abstract_params, self._optimizer, self._shardings)

    def abstract_gradients(self) -> Params:
        """Shapes and shardings of what an update adds up."""
        return abstract_gradients(self._abstract_params, self._shardings)

    def traced_update(self) -> Traced:
        """The update from abstract arguments; nothing is allocated on a device."""
        batch = placed_shapes(empty_batch(self.shape), self._batch_shardings)
        network = self._job.network
        held = self._held(placed_shapes(network.abstract_params, network.shardings()))
        return self._update.trace(self.abstract_state(), batch, jax.ShapeDtypeStruct((), np.int32), held)

    def restore(self, arrays: Tree) -> None:
        self._state = TrainState(**arrays["critic"])

    def assign(
        self,
        trajectories: Sequence[Trajectory],
        reward_N: np.ndarray,
        penalty_NR: np.ndarray | None,
        truncated_N: np.ndarray,
        policy: Params,
        phases: Phases,
    ) -> tuple[list[Trajectory], Metrics]:
        """The trajectories with advantage, value and value target of each token, by GAE; whitened over the step.

        `reward_N` float32 counts at the last token, `penalty_NR` float32 is taken from each, `truncated_N` bool marks
        responses cut by the limit. A sample whose reward is not finite, or that is not trained on, gets advantage 0 and
        no target.
        """
        with phases("values"):
            values = self.values(trajectories, policy)
        with phases("adv"):
            scores = self._scores(trajectories, reward_N, penalty_NR, values, truncated_N)
            advantage_NR, return_NR, explained = jax.device_get(self._credit(scores))
            assigned = [
                _with_targets(t, advantage_R, value_R, return_R) if live else t
                for t, live, advantage_R, value_R, return_R in zip(
                    trajectories, scores.live_N, advantage_NR, scores.value_NR, return_NR, strict=True
                )
            ]
        return assigned, _metrics(assigned, float(explained))

    def values(self, trajectories: Sequence[Trajectory], policy: Params) -> list[np.ndarray]:
        """The value of the state each token was sampled in, a float32 [n] for each trajectory, [0] if not trained on.

        With bootstrapping one more, [n + 1]: that of the state after the last token.
        """
        values = []
        for mini in mini_batches(trajectories, self._algorithm.mini_batches):
            # Each target carries its trajectory's number in place of an advantage, to find its way back.
            numbered = [dataclasses.replace(self._asked(t), advantage=float(i)) for i, t in enumerate(mini, start=1)]
            batch, n_micro = self._pack(numbered)
            whole = self._started().params | self._held(policy)
            value_ABM = self._values(whole, place(batch, self._batch_shardings), n_micro)
            values += by_number(fetch(value_ABM), batch.advantage, len(mini))
        return values

    def learn(self, trajectories: Sequence[Trajectory], policy: Params, phases: Phases) -> Metrics:
        """`epochs` passes over the step's mini-batches towards the targets of `assign`; means over the updates, and how
        many were skipped. Raises: NumericFaultError as `Skips.note`."""
        packed = [
            self._pack([_as_targets(t) for t in mini])
            for mini in mini_batches(trajectories, self._algorithm.mini_batches)
        ]
        batches = [(place(batch, self._batch_shardings), n_micro) for batch, n_micro in packed]
        rows = []
        with phases("update_critic"):
            for _ in range(self._algorithm.epochs):
                for batch, n_micro in batches:
                    self._state, metrics, _ = self._update(self._started(), batch, n_micro, self._held(policy))
                    if n_micro:
                        rows.append(floats(metrics))
                        faulty = rows[-1]["critic/skipped_update"] > 0
                        self._skips.note(faulty, self._state, batch, n_micro, held=self._held(policy))
        skipped = {"training/skipped_critic_updates": sum(row["critic/skipped_update"] for row in rows)}
        return mean_metrics(rows) | (skipped if rows else {})

    def replay(self, folder: Path) -> tuple[Diagnosis, Metrics]:
        """A look into one update that `Skips` has kept, and the metrics that it gives. Raises: ValueError as
        `read_fault`."""
        network = self._job.network
        held = self._held(placed_shapes(network.abstract_params, network.shardings()))
        rows = empty_batch(self.shape).tokens.shape
        fault = read_fault(folder, self.abstract_state(), self._batch_shardings, rows, held)
        held = fault.held or {}
        probe = make_probe(self._probed, self._shardings.params)
        found = diagnose(probe, fault.state.params, fault.batch, fault.n_micro, held)
        _, metrics, _ = self._update(fault.state, fault.batch, fault.n_micro, held)
        return found, floats(metrics)

    def _started(self) -> TrainState:
        if self._state is None:
            raise RuntimeError("the critic has no weights before start or restore")
        return self._state

    def _asked(self, t: Trajectory) -> Trajectory:
        """With one target more, whose id nothing looks at, where the state after the last token is asked for."""
        if not self._algorithm.bootstrap_truncated or not len(t.response_ids):
            return t
        return dataclasses.replace(t, response_ids=np.append(t.response_ids, 0), logp=np.append(t.logp, 0.0))

    def _scores(
        self,
        trajectories: Sequence[Trajectory],
        reward_N: np.ndarray,
        penalty_NR: np.ndarray | None,
        values: Sequence[np.ndarray],
        truncated_N: np.ndarray,
    ) -> Scores:
        shape = len(trajectories), self._job.config.rollout.max_new_tokens
        value_NR, after_N = np.zeros(shape, np.float32), np.zeros(len(trajectories), np.float32)
        for i, (t, value) in enumerate(zip(trajectories, values, strict=True)):
            n = min(len(t.response_ids), len(value))
            value_NR[i, :n] = value[:n]
            if len(value) > n and truncated_N[i]:
                after_N[i] = value[n]
        return Scores(
            reward_N,
            np.zeros(shape, np.float32) if penalty_NR is None else penalty_NR,
            value_NR,
            after_N,
            np.array([len(t.response_ids) for t in trajectories], np.int32),
            np.array([t.train for t in trajectories]) & np.isfinite(reward_N),
        )

    def _pack(self, trajectories: Sequence[Trajectory]) -> tuple[TrainBatch, int]:
        config = self._job.config
        batch, n_micro, _ = pack(
            trajectories,
            self.shape,
            aggregation=self._algorithm.aggregation,
            scale_length=self._algorithm.loss_scale_length or config.rollout.max_new_tokens,
            share_prefix=config.training.share_prefix,
            keep_all=True,
        )
        return batch, n_micro


def credit_tokens(scores: Scores, *, gamma: float, lam: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whitened advantages and returns, float32 [N, R], and how much of the returns' variance the values explain."""
    R = scores.value_NR.shape[1]
    mask_NR = (jnp.arange(R)[None] < scores.length_N[:, None]) & scores.live_N[:, None]
    reward_NR = token_rewards(scores.reward_N[:, None], scores.penalty_NR, mask_NR, kl_coef=1.0)
    advantage_NR, return_NR = gae(
        reward_NR, scores.value_NR, mask_NR, gamma=gamma, lam=lam, bootstrap_BS=scores.after_N[:, None]
    )
    return whiten(advantage_NR, mask_NR), return_NR, explained_variance(scores.value_NR, return_NR, mask_NR)


def _with_targets(t: Trajectory, advantage_R: np.ndarray, value_R: np.ndarray, return_R: np.ndarray) -> Trajectory:
    n = len(t.response_ids)
    return dataclasses.replace(t, advantage=advantage_R[:n], value=value_R[:n], value_target=return_R[:n])


def _as_targets(t: Trajectory) -> Trajectory:
    """As `training.critic` reads it: the target for an advantage, the value at sampling time for a log-prob."""
    if t.value is None or t.value_target is None:
        return dataclasses.replace(t, train=False)
    return dataclasses.replace(t, advantage=t.value_target, logp=t.value)


def _metrics(trajectories: Sequence[Trajectory], explained: float) -> Metrics:
    """verl's, over live tokens; none without any."""
    values = [t.value for t in trajectories if t.value is not None and len(t.value)]
    targets = [t.value_target for t in trajectories if t.value_target is not None and len(t.value_target)]
    if not values:
        return {}
    named = {"critic/values": np.concatenate(values), "critic/returns": np.concatenate(targets)}
    metrics = {f"{name}/{kind}": x for name, tokens in named.items() for kind, x in mean_max_min(tokens).items()}
    return metrics | {"critic/vf_explained_var": explained}
