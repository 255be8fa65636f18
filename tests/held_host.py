"""`python -m launch` that stops at a moment until it is told to go on.

python tests/held_host.py FOLDER MOMENT ENTRY WORDS: at that entry of the moment, a phase of a step or one of STARTS,
FOLDER/held_I appears, and the program goes on when FOLDER/go is there.
"""

import contextlib
import sys
import time
from pathlib import Path

from jaxrl_post.loops import run_folder
from jaxrl_post.observe import progress
from launch import cluster
from launch.__main__ import main

STARTS = {"joining": (cluster, "_initialize"), "meeting": (run_folder, "meet")}  # before JAX starts; before it connects


def hold(folder, process):
    (folder / f"held_{process}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)


def hold_in_phase(folder, process, moment, entry):
    enter, entries = progress.Phases.__call__, 0

    @contextlib.contextmanager
    def held(self, name):
        nonlocal entries
        with enter(self, name):
            entries += name == moment
            if name == moment and entries == entry:
                hold(folder, process)
            yield

    progress.Phases.__call__ = held


def hold_at_start(folder, process, moment):
    module, name = STARTS[moment]
    function = getattr(module, name)

    def held(*arguments):
        hold(folder, process)
        return function(*arguments)

    setattr(module, name, held)


if __name__ == "__main__":
    folder, moment, entry, *words = sys.argv[1:]
    process = words[words.index("--process-id") + 1]
    if moment in STARTS:
        hold_at_start(Path(folder), process, moment)
    else:
        hold_in_phase(Path(folder), process, moment, int(entry))
    sys.exit(main(words))
