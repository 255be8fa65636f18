"""A run that is stuck, and one that is told to stop."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from jaxrl_post.loops.stopping import Stop
from jaxrl_post.observe.progress import BETWEEN, Phases
from jaxrl_post.observe.watchdog import STUCK, Watchdog

HANG = """
import time
from jaxrl_post.observe.progress import Phases
from jaxrl_post.observe.watchdog import Watchdog

def waiting_for_godot():
    time.sleep(60)

with Watchdog(minutes=0.02) as watchdog:
    phases = Phases(watchdog.enter)
    for _ in range(4):
        with phases("gen"):
            time.sleep(0.4)
    with phases("reward"):
        waiting_for_godot()
"""


def test_a_phase_that_lasts_too_long_ends_the_process_and_is_named():
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == STUCK
    assert "stuck: reward has lasted 0.02 minutes, the most that watchdog_minutes allows" in done.stderr
    assert "in waiting_for_godot" in done.stderr


def test_phases_tell_of_each_that_begins():
    told = []
    phases = Phases(told.append)
    with phases("testing"), phases("gen"):
        pass
    assert told == ["testing", "gen", "testing", BETWEEN]


def test_a_watchdog_without_a_limit_watches_nothing():
    before = threading.active_count()
    with Watchdog(None) as watchdog:
        watchdog.enter("gen")
        assert threading.active_count() == before


def test_a_signal_is_noted_once_and_the_handler_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with Stop() as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a second one ends the process
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_is_a_signal_to_end_and_is_raised_when_all_is_done(capsys):
    before, done = signal.getsignal(signal.SIGINT), []

    def run():
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            done.extend([stop.agreed(), signal.getsignal(signal.SIGINT)])

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == [True, signal.default_int_handler]  # a second one is raised at once
    assert "ending after this step, which is saved" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
