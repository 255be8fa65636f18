"""Runs one recipe to its end once, and once more killed by SIGKILL at given moments: a process for each start.

python tests/killed_runs.py FOLDER KIND STEPS SEED COUNT, the kind one of KINDS: FOLDER/straight and FOLDER/killed are
the two runs. A moment is a phase, which of its entries since the start, and the seconds to wait there. The processes
are forks of this one, which has imported all and started nothing, so that a start costs no import.
"""

import os
import random
import signal
import sys
import threading
import traceback
from pathlib import Path

import jax

from jaxrl_post import recipes
from jaxrl_post.loops.online import run
from jaxrl_post.observe import progress

ROOT = Path(__file__).parent.parent
PHASES = ("gen", "reward", "update_actor", "save_checkpoint")
OVERRIDES = (
    "evaluation.enabled=false", "mesh.fsdp=1", "mesh.allow_unused_devices=true", "checkpoint.every=1",
    "data.task.high=3",
)  # fmt: skip
SHORT = ("data.prompts_per_step=2", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=8")
TRIPLES = ("data.prompts_per_step=4", "rollout.samples_per_prompt=3", "rollout.max_new_tokens=8")
KINDS = {  # recipe, and overrides
    "plain": ("grpo", SHORT),
    # Groups under way, and a coefficient that follows the KL.
    "partial": (
        "partial_rollout",
        (
            "data.prompts_per_step=4",
            "rollout.samples_per_prompt=4",
            "algorithm.kl={coef: 0.1, target: 0.01, horizon: 50, where: reward}",
        ),
    ),
    # Groups of a batch that the step had no place for: of triples, some are alike and dropped.
    "carried": ("dapo", (*TRIPLES, "algorithm.overlong=null", "optimizer.learning_rate=1e-3")),
    # Prompts that rest: of pairs many are alike.
    "curriculum": (
        "grpo",
        (
            "data.prompts_per_step=4",
            "rollout.samples_per_prompt=2",
            "rollout.max_new_tokens=8",
            "data.curriculum.chance=0.3",
        ),
    ),
    "critic": ("ppo", SHORT),
    "best": ("grpo", (*SHORT, "checkpoint.keep_best={metric: critic/score/mean}", "checkpoint.keep_last=1")),
}


def moments(seed, count):
    """Phases in turn, each in the second or third step since the start, some time into it or after it."""
    draw = random.Random(seed)
    return [(PHASES[(i + seed) % len(PHASES)], draw.choice([2, 3]), draw.uniform(0.0, 0.15)) for i in range(count)]


def started(run_dir, kind, steps, moment=None):
    """Trains in a fork, which dies at the moment if it comes to it; its exit status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if moment:
                die_at(*moment)
            recipe, overrides = KINDS[kind]
            words = [f"run_dir={run_dir}", f"steps={steps}", *OVERRIDES, *overrides]
            run(recipes.load(ROOT / "configs" / "tiny" / f"{recipe}.yaml", words))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def die_at(phase, entry, wait):
    """SIGKILL to this process, `wait` seconds after it has entered the phase so many times."""
    entries = 0
    enter = progress.Phases.__call__

    def counted(self, name):
        nonlocal entries
        entries += name == phase
        if name == phase and entries == entry:
            threading.Timer(wait, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return enter(self, name)

    progress.Phases.__call__ = counted


def main(folder, kind, steps, seed, count):
    assert started(f"{folder}/straight", kind, steps) == 0
    for phase, entry, wait in moments(seed, count):
        status = started(f"{folder}/killed", kind, steps, (phase, entry, wait))
        saved = sorted(int(path.name) for path in Path(folder, "killed/checkpoints").glob("*") if path.name.isdecimal())
        print(f"{status} in {phase}, entry {entry}, after {wait:.3f} s; steps saved: {saved[-1:]}", flush=True)
    print(started(f"{folder}/killed", kind, steps), "to the end", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    main(*sys.argv[1:3], *(int(word) for word in sys.argv[3:6]))
