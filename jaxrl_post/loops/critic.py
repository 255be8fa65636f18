"""PPO's critic in the loop: it values a step's tokens, turns rewards into advantages and learns from the returns.

N samples of a step, R = rollout.max_new_tokens; A micro-batches, B rows, M targets of an update.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.stages import Traced

from jaxrl_post.config_ppo import PPO
from jaxrl_post.loops.faulty_update import Skips, read_fault
from jaxrl_post.loops.job import Job
from jaxrl_post.loops.measures import Metrics, floats, mean_metrics
from jaxrl_post.loops.packed import by_number, mini_batches, numbered, pack_update, update_shape
from jaxrl_post.loops.token_credit import Scores, as_targets, credit_tokens, value_metrics, with_targets
from jaxrl_post.loops.trained import make_trained
from jaxrl_post.models import scalar_head
from jaxrl_post.models.decoder import Params
from jaxrl_post.observe.progress import Phases
from jaxrl_post.training.critic import critic_micro_loss, make_critic_update, token_values
from jaxrl_post.training.diagnosis import Diagnosis, diagnose, make_probe
from jaxrl_post.training.micro_batches import make_scorer
from jaxrl_post.training.packing import empty_batch
from jaxrl_post.training.state import TrainState
from jaxrl_post.training.update import batch_shardings
from jaxrl_post.types import TrainBatch, Trajectory
from sharding.placement import Tree, place, placed_shapes, reshard
from sharding.processes import fetch


class Critic:
    """A scalar head on a decoder, its optimizer and its programs. It holds its state, which `learn` moves.

    The decoder is its own, or the policy's of the moment: `policy` are the policy's parameters, in the training layout.
    """

    def __init__(self, job: Job, algorithm: PPO):
        """Holds no weights yet. Raises: ValueError when a row cannot hold what bootstrapping adds to a sample."""
        self._job, self._algorithm = job, algorithm
        params, axes = {"head": scalar_head.abstract_head(job.network.model)}, {"head": scalar_head.AXES}
        held = {"decoder": job.network.shardings()}
        if self.owns_decoder:
            params["decoder"], axes["decoder"], held = job.network.abstract_params, job.network.axes, {}
        updates = algorithm.epochs * algorithm.mini_batches
        self.trained = make_trained(job.network, algorithm.critic, job.config.steps, updates, params, axes)
        # A state after the last token takes that token as an input, with one more target to read it at.
        self.shape = update_shape(job, job.config.rollout.max_new_tokens + algorithm.bootstrap_truncated)
        self._batch_shardings = batch_shardings(self.shape, job.network.mesh)
        values = token_values(job.network.graphdef, self._batch_shardings)
        self._values = make_scorer(
            values,
            params_shardings=self.trained.shardings.params | held,
            batch_shardings=self._batch_shardings,
            said_shardings=self._batch_shardings.old_logp,
        )
        self._update: Any = make_critic_update(
            values,
            self.trained.optimizer,
            value_clip=algorithm.critic.value_clip,
            shardings=self.trained.shardings,
            held_shardings=held,
            batch_shardings=self._batch_shardings,
        )
        self._probed, self._skips = critic_micro_loss(values, algorithm.critic.value_clip), Skips(job.config, "critic")
        self._credit = jax.jit(functools.partial(credit_tokens, gamma=algorithm.gamma, lam=algorithm.lam))
        self._state: TrainState | None = None

    def start(self, params: Params) -> None:
        """Begin with a head of zeros, as no state is worth anything yet; a decoder of its own is a copy of `params`."""
        head = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.trained.abstract_params["head"])
        own = {"decoder": reshard(params, self.trained.shardings.params["decoder"])} if self.owns_decoder else {}
        self._state = self.trained.start({"head": head} | own)

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
        return {"critic": self.trained.abstract_state()._asdict()}

    def traced_update(self) -> Traced:
        """The update from abstract arguments; nothing is allocated on a device."""
        batch = placed_shapes(empty_batch(self.shape), self._batch_shardings)
        network = self._job.network
        held = self._held(placed_shapes(network.abstract_params, network.shardings()))
        return self._update.trace(self.trained.abstract_state(), batch, jax.ShapeDtypeStruct((), np.int32), held)

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
                with_targets(t, advantage_R, value_R, return_R) if live else t
                for t, live, advantage_R, value_R, return_R in zip(
                    trajectories, scores.live_N, advantage_NR, scores.value_NR, return_NR, strict=True
                )
            ]
        return assigned, value_metrics(assigned, float(explained))

    def values(self, trajectories: Sequence[Trajectory], policy: Params) -> list[np.ndarray]:
        """The value of the state each token was sampled in, a float32 [n] for each trajectory, [0] if not trained on.

        With bootstrapping one more, [n + 1]: that of the state after the last token.
        """
        values = []
        for mini in mini_batches(trajectories, self._algorithm.mini_batches):
            batch, n_micro = self._pack(numbered([self._asked(t) for t in mini]))
            whole = self._started().params | self._held(policy)
            value_ABM = self._values(whole, place(batch, self._batch_shardings), n_micro)
            values += by_number(fetch(value_ABM), batch.advantage, len(mini))
        return values

    def learn(self, trajectories: Sequence[Trajectory], policy: Params, phases: Phases) -> Metrics:
        """`epochs` passes over the step's mini-batches towards the targets of `assign`; means over the updates, and how
        many were skipped. Raises: NumericFaultError as `Skips.note`."""
        packed = [
            self._pack([as_targets(t) for t in mini])
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
        fault = read_fault(folder, self.trained.abstract_state(), self._batch_shardings, rows, held)
        held = fault.held or {}
        probe = make_probe(self._probed, self.trained.shardings.params)
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
        batch, n_micro, _ = pack_update(self._job, trajectories, self.shape, keep_all=True)
        return batch, n_micro
