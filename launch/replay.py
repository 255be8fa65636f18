"""`python -m launch CONFIG --replay DUMP`: one update again, with a look at where its numbers stop being finite."""

from __future__ import annotations

import math
from pathlib import Path

from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.config_ppo import PPO
from jaxrl_post.loops import job, offline_job
from jaxrl_post.loops.critic import Critic
from jaxrl_post.loops.faulty_update import fault_of
from jaxrl_post.loops.learner import Learner
from jaxrl_post.loops.offline_learner import OfflineLearner
from jaxrl_post.loops.teachers import Teachers


def replay(config: Config | OfflineConfig, folder: Path) -> None:
    """Print loss, gradient norm by parameter and the first place that is not finite, then make the update itself.

    Raises: ValueError as `fault_of` and the `replay` of the learner that made it.
    """
    of = fault_of(folder)
    found, metrics = _learner(config, folder).replay(folder)
    prefix = "critic" if of == "critic" else "actor"
    width = max(map(len, found.norms), default=0)
    print(f"loss {sum(found.losses):.6g} over {len(found.losses)} micro-batches")
    for name, norm in found.norms.items():
        print(f"  {name:<{width}}  gradient norm {norm:.6g}")
    norm = math.sqrt(sum(x * x for x in found.norms.values()))
    print(f"gradient norm {norm:.6g} here, {metrics[f'{prefix}/grad_norm']:.6g} in the update")
    print(f"first place that is not finite: {found.first or 'none'}")
    print(f"the update was {'skipped' if metrics[f'{prefix}/skipped_update'] else 'made'}")


def _learner(config: Config | OfflineConfig, folder: Path) -> Learner | Critic | OfflineLearner:
    """Whose update the folder keeps, with the teachers it had."""
    if isinstance(config, OfflineConfig):
        from_files = offline_job.build(config)
        return OfflineLearner(from_files, _loaded(Teachers(from_files.teachers)))
    online = job.build(config)
    if fault_of(folder) != "critic":
        return Learner(online, _loaded(Teachers(online.teachers)))
    if not isinstance(config.algorithm, PPO):
        raise ValueError(
            f"--replay {folder}: an update of a critic, which algorithm.kind={config.algorithm.kind} lacks"
        )
    return Critic(online, config.algorithm)


def _loaded(teachers: Teachers) -> Teachers:
    teachers.load()
    return teachers
