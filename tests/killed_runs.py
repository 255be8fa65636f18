"""Runs one recipe to its end once, and once more killed by SIGKILL at given moments: a process for each start.

python tests/killed_runs.py FOLDER STEPS SEED COUNT: FOLDER/straight and FOLDER/killed are the two runs. A moment is a
phase, which of its entries since the start, and the seconds to wait there. The processes are forks of this one, which
has imported all and started nothing, so that a start costs no import.
"""

import os
import random
import signal
import sys
import threading
from pathlib import Path

import jax

from jaxrl_post import recipes
from jaxrl_post.loops.online import run
from jaxrl_post.observe import progress

ROOT = Path(__file__).parent.parent
PHASES = ("gen", "reward", "update_actor", "save_checkpoint")
OVERRIDES = (
    "data.prompts_per_step=2", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=8", "evaluation.enabled=false",
    "mesh.fsdp=1", "mesh.allow_unused_devices=true", "checkpoint.every=1", "data.task.high=3",
)  # fmt: skip


def moments(seed, count):
    """Phases in turn, each in the second or third step since the start, some time into it or after it."""
    draw = random.Random(seed)
    return [(PHASES[(i + seed) % len(PHASES)], draw.choice([2, 3]), draw.uniform(0.0, 0.15)) for i in range(count)]


def started(run_dir, steps, moment=None):
    """Trains in a fork, which dies at the moment if it comes to it; its exit status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if moment:
                die_at(*moment)
            run(recipes.load(ROOT / "configs/tiny/grpo.yaml", [f"run_dir={run_dir}", f"steps={steps}", *OVERRIDES]))
            code = 0
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


def main(folder, steps, seed, count):
    assert started(f"{folder}/straight", steps) == 0
    for phase, entry, wait in moments(seed, count):
        status = started(f"{folder}/killed", steps, (phase, entry, wait))
        saved = sorted(int(path.name) for path in Path(folder, "killed/checkpoints").glob("*") if path.name.isdecimal())
        print(f"{status} in {phase}, entry {entry}, after {wait:.3f} s; steps saved: {saved[-1:]}", flush=True)
    print(started(f"{folder}/killed", steps), "to the end", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    main(sys.argv[1], *(int(word) for word in sys.argv[2:5]))
