"""`python -m launch CONFIG --replay DUMP`: one update again, with a look at where its numbers stop being finite."""

from __future__ import annotations

import math
from pathlib import Path

from jaxrl_post.config import Config
from jaxrl_post.loops.faulty_update import read_fault
from jaxrl_post.loops.job import build
from jaxrl_post.loops.learner import Learner


def replay(config: Config, folder: Path) -> None:
    """Print loss, gradient norm by parameter and the first place that is not finite, then make the update itself.

    Raises: ValueError as `read_fault` and `Learner.replay`.
    """
    learner = Learner(build(config))
    fault = read_fault(folder, learner.abstract_state())
    found, metrics = learner.replay(fault)
    width = max(map(len, found.norms), default=0)
    print(f"loss {sum(found.losses):.6g} over {len(found.losses)} micro-batches")
    for name, norm in found.norms.items():
        print(f"  {name:<{width}}  gradient norm {norm:.6g}")
    norm = math.sqrt(sum(x * x for x in found.norms.values()))
    print(f"gradient norm {norm:.6g} here, {metrics['actor/grad_norm']:.6g} in the update")
    print(f"first place that is not finite: {found.first or 'none'}")
    print(f"the update was {'skipped' if metrics['actor/skipped_update'] else 'made'}")
