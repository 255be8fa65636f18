"""Jobs of several hosts whose network is cut, whose packets are lost one way, whose hosts die."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import whole_runs
from network_hosts import Namespaces, Stopped, why_no_namespaces
from process_state import is_alive

from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.observe.watchdog import STUCK
from launch.lines import LOST

ROOT = Path(__file__).parents[1]
LIMIT = 8.0  # --lost-limit
STUCK_MINUTES = 2  # watchdog_minutes: the first step compiles
ENDED = STUCK_MINUTES * 60 + 30  # seconds after which nobody may be left
BEATEN = 2.0  # seconds in which all have heard of all, on a busy machine
STEPS = 10
SMALL = (
    f"steps={STEPS}", "evaluation.enabled=false", "rollout.max_new_tokens=8", "model.random.layers=1",
    "checkpoint.every=1",
)  # fmt: skip


@pytest.fixture
def namespaces(capsys):
    """Makes hosts whose network can be cut."""
    if missing := why_no_namespaces():
        with capsys.disabled():
            print(f"\nNO NETWORK NAMESPACES HERE ({missing}): only tests that stop and kill hosts run", flush=True)
        pytest.skip(f"no network to cut: {missing}; hosts are stopped and killed by other tests of this file")
    return Namespaces


def started(hosts, folder, commands):
    """A process for each host; what it says goes to FOLDER/said_I."""
    environ = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    processes = []
    for i, command in enumerate(commands):
        with open(folder / f"said_{i}", "w") as said:
            options = {"stdout": said, "stderr": subprocess.STDOUT, "env": environ, "cwd": ROOT}
            processes.append(hosts.start(i, [sys.executable, *command], **options))
    return processes


def ends(processes, within, but=()):
    """Seconds from now after which each process had ended, None for one that has not."""
    since, seconds = time.monotonic(), dict.fromkeys(range(len(processes)))
    while time.monotonic() - since < within and any(seconds[i] is None for i in seconds if i not in but):
        for i, process in enumerate(processes):
            if seconds[i] is None and process.poll() is not None:
                seconds[i] = time.monotonic() - since
        time.sleep(0.05)
    return seconds


def wait_for(paths, processes, within=300):
    since = time.monotonic()
    while not all(path.exists() for path in paths):
        assert time.monotonic() - since < within
        assert all(process.poll() is None for process in processes), "ended before it was held"
        time.sleep(0.02)


def job(folder, hosts, moment="none", entry=0, *more):
    """The command of each process of a run of the tiny recipe in FOLDER/run, held at a moment."""
    at, count = f"{hosts.addresses[0]}:{hosts.port}", len(hosts.addresses)
    mesh = f"mesh.{'fsdp' if count == 2 else 'data'}={count}"
    words = ["configs/tiny/grpo.yaml", f"run_dir={folder / 'run'}", mesh, *SMALL, *more]
    words += ["--lost-limit", str(LIMIT), "--coordinator", at, "--processes-total", str(count), "--process-id"]
    return [["tests/held_host.py", str(folder), moment, str(entry), *words, str(i)] for i in range(count)]


HEALS = {"cut": "mend", "lose": "find"}


def strike(hosts, fault):
    kind, *which = fault
    getattr(hosts, kind)(*which)


def heal(hosts, fault):
    kind, *which = fault
    if kind in HEALS:
        getattr(hosts, HEALS[kind])(*which)


def run_struck(hosts, folder, moment, entry, fault, *more):
    """Start the job, strike it at the moment, and heal when all have ended; what each said, and codes, and seconds."""
    for mark in (*folder.glob("held_*"), *folder.glob("go")):
        mark.unlink()
    processes = started(hosts, folder, job(folder, hosts, moment, entry, *more))
    wait_for([folder / f"held_{i}" for i in range(len(processes))], processes)
    strike(hosts, fault)
    (folder / "go").touch()
    seconds = ends(processes, ENDED, but=hosts.stopped)
    heal(hosts, fault)
    ends(processes, 20)
    said = [(folder / f"said_{i}").read_text() for i in range(len(processes))]
    return said, [process.poll() for process in processes], seconds


def run_whole(hosts, folder):
    processes = started(hosts, folder, job(folder, hosts))
    assert None not in ends(processes, 300).values()
    said = [(folder / f"said_{i}").read_text() for i in range(len(processes))]
    assert [process.poll() for process in processes] == [0] * len(processes), said
    return said


def check_same(ours, theirs):
    """The same numbers and samples, bit for bit, of every step."""
    a, b = (read_metrics(folder / "run" / "metrics.jsonl") for folder in (ours, theirs))
    assert [record["step"] for record in a] == list(range(1, STEPS + 1))
    assert [whole_runs.numbers(record) for record in a] == [whole_runs.numbers(record) for record in b]
    for step in range(1, STEPS + 1):
        assert whole_runs.rollouts(ours / "run", step) == whole_runs.rollouts(theirs / "run", step)


FAULTS = [  # moment, which of its entries since the start, what happens then
    ("joining", 1, ("cut", 1)),
    ("meeting", 1, ("cut", 1)),
    ("gen", 2, ("cut", 1)),
    ("update_actor", 2, ("cut", 1)),
    ("save_checkpoint", 2, ("cut", 0)),
    ("update_actor", 2, ("lose", 1, 0)),
    ("gen", 2, ("lose", 0, 1)),
    ("update_actor", 2, ("kill", 1)),
    ("save_checkpoint", 2, ("kill", 0)),
]


STOPS = [("gen", 2, ("cut", 1)), ("update_actor", 2, ("cut", 0)), ("save_checkpoint", 2, ("kill", 1))]


def struck_again_and_again(hosts, folder, faults, check):
    """A run that goes on from fault to fault, then to its end, and one without any; `check` looks at each fault."""
    straight, struck = folder / "straight", folder / "struck"
    straight.mkdir()
    struck.mkdir()
    for moment, entry, fault in faults:
        said, codes, seconds = run_struck(hosts, struck, moment, entry, fault)
        print(moment, fault, codes, seconds, said[0][-400:], said[1][-400:], sep="\n", flush=True)
        for i in range(2):
            check(i, moment, fault, said[i], codes[i], seconds[i])
    assert "resuming after step" in run_whole(hosts, struck)[0]
    run_whole(hosts, straight)
    check_same(struck, straight)


def check_lost(i, moment, fault, said, code, seconds):
    """Whoever is left ends in time, and says who is out of reach or gone, and what it was waiting in."""
    if fault == ("kill", i):
        assert code == -signal.SIGKILL
        return
    assert code == LOST, said
    # Of two that do not hear each other one may still hear the other close the connection.
    gone = {"kill": "is gone: it was killed", "cut": f"has not answered for {LIMIT:g} s", "lose": ""}[fault[0]]
    assert f"lost: process {1 - i} of 2 {gone}" in said
    doing = "start" if moment in ("joining", "meeting") else moment
    assert f"this process was in {doing} for " in said
    assert seconds < (5 if fault[0] == "kill" else LIMIT + 10)


def check_frozen(i, moment, fault, said, code, seconds):
    """The kernel of one that is stopped still answers, but no beats come; when it goes on it finds itself alone."""
    if fault == ("cut", i):
        assert (code, seconds) == (LOST, None), said
    else:
        check_lost(i, moment, fault, said, code, seconds)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_whose_network_fails_again_and_again_is_the_run_that_had_none(namespaces, tmp_path):
    with namespaces(2) as hosts:
        struck_again_and_again(hosts, tmp_path, FAULTS, check_lost)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_whose_hosts_are_stopped_and_killed_is_the_run_that_had_none(tmp_path):
    with Stopped(2) as hosts:
        struck_again_and_again(hosts, tmp_path, STOPS, check_frozen)


@pytest.mark.slow
def test_of_three_hosts_the_one_that_is_cut_off_is_named_by_both_others(namespaces, tmp_path):
    with namespaces(3) as hosts:
        said, codes, seconds = run_struck(hosts, tmp_path, "update_actor", 1, ("cut", 2), "data.prompts_per_step=6")
    assert codes == [LOST] * 3, said
    assert "lost: process 2 of 3 has not answered for 8 s; this process was in update_actor" in said[0]
    assert "lost: process 2 of 3 has not answered for 8 s; this process was in update_actor" in said[1]
    assert "lost: process 0 of 3 has not answered" in said[2]
    assert max(seconds.values()) < LIMIT + 10


@pytest.mark.slow
def test_two_hosts_that_reach_the_first_and_not_each_other_end_by_the_watchdog(namespaces, tmp_path):
    """No line breaks: what ends them is that the phase they are in lasts too long."""
    more = ("data.prompts_per_step=6", f"watchdog_minutes={STUCK_MINUTES}")
    with namespaces(3) as hosts:
        said, codes, _ = run_struck(hosts, tmp_path, "update_actor", 2, ("lose", 1, 2), *more)
    assert STUCK in codes
    assert set(codes) <= {STUCK, LOST}, said
    told = "".join(said)
    assert f"stuck: update_actor has lasted {STUCK_MINUTES} minutes, the most that watchdog_minutes allows" in told
    assert "process 1: update_actor" in told


TALK = """
import ctypes, sys, time
from launch.lines import Lines
from launch.rollcall import Place, answer

address, i, n, folder, code = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]
place = Place(address, i, n)
with Lines(place, answer(place, 60.0), 6.0, lambda: f"phase {i} for 1 s") as lines:
    open(f"{folder}/held_{i}", "w").close()
    while code != [str(i)]:
        time.sleep(0.05)
    lines.leave(3)
    sys.exit(3)
"""


def talk(hosts, folder, number, count):
    return ["-c", TALK, f"{hosts.addresses[0]}:{hosts.port}", str(number), str(count), str(folder)]


def talking(hosts, folder, fault, count=3):
    """Processes that only hold their lines, struck when all are there."""
    processes = started(hosts, folder, [talk(hosts, folder, i, count) for i in range(count)])
    wait_for([folder / f"held_{i}" for i in range(count)], processes)
    time.sleep(BEATEN)
    strike(hosts, fault)
    return processes


def check_last_words(folder, said):
    for i, text in said.items():
        last = (folder / f"said_{i}").read_text()
        assert f"lost: process {text}" in last
        assert f"this process was in phase {i} for 1 s" in last


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (("cut", 2), {0: "2 of 3 has not", 1: "2 of 3 has not", 2: "0 of 3 has not answered for 6 s"}),
        (("lose", 1, 0), {0: "1 of 3 has not", 1: "0 of 3 ", 2: "1 of 3 has not"}),
    ],
    ids=["cut", "one way"],
)
def test_a_host_out_of_reach_is_named_by_all(namespaces, tmp_path, fault, said):
    with namespaces(3) as hosts:
        processes = talking(hosts, tmp_path, fault)
        seconds = ends(processes, 30)
    assert [process.poll() for process in processes] == [LOST] * 3
    assert 4 < max(seconds.values()) < 10
    check_last_words(tmp_path, said)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_host_is_named_by_all_at_once(tmp_path, killed):
    with Stopped(3) as hosts:
        processes = talking(hosts, tmp_path, ("kill", killed))
        seconds = ends(processes, 30)
    assert [process.poll() for process in processes] == [-signal.SIGKILL if i == killed else LOST for i in range(3)]
    assert max(seconds.values()) < 4
    check_last_words(tmp_path, {i: f"{killed} of 3 is gone: it was killed" for i in range(3) if i != killed})


@pytest.mark.parametrize(("stopped", "how"), [(0, "cut"), (1, "freeze")])
def test_a_process_that_is_stopped_is_named_by_all(tmp_path, stopped, how):
    """With all that it started, as by a container's freezer, or the program alone, as by a debugger."""
    with Stopped(3) as hosts:
        processes = talking(hosts, tmp_path, (how, stopped))
        seconds = ends(processes, 30, but={stopped})
        assert processes[stopped].poll() is None
        hosts.mend(stopped)
        ends(processes, 10)
    assert [process.poll() for process in processes] == [LOST] * 3
    others = {i for i in range(3) if i != stopped}
    assert all(4 < seconds[i] < 10 for i in others)
    check_last_words(tmp_path, {i: f"{stopped} of 3 has not answered for 6 s" for i in others})


def test_one_that_was_stopped_for_less_is_not_lost(tmp_path):
    """Nor does it take the others for lost, whose beats it has not read meanwhile."""
    with Stopped(3) as hosts:
        processes = talking(hosts, tmp_path, ("cut", 1))
        ends(processes, 4)
        hosts.mend(1)
        assert set(ends(processes, 8).values()) == {None}


def test_a_program_that_holds_the_interpreter_is_not_lost(tmp_path):
    """Its kernel still answers, and the process beside it. What ends a job then is the watchdog."""
    with Stopped(3) as hosts:
        commands = [talk(hosts, tmp_path, i, 3) for i in range(3)]
        commands[1][1] = commands[1][1].replace("time.sleep(0.05)", "ctypes.PyDLL(None).sleep(1000)")
        assert set(ends(started(hosts, tmp_path, commands), 12).values()) == {None}
        assert (tmp_path / "held_1").exists()


def test_the_process_that_beats_ends_with_the_program(tmp_path):
    """However that ends; and it hears no signal that is sent to all processes of a job."""
    with Stopped(2) as hosts:
        processes = talking(hosts, tmp_path, ("find", 0), count=2)
        [beating] = children(processes[0].pid)
        os.kill(beating, signal.SIGTERM)
        assert set(ends(processes, 8).values()) == {None}
        assert children(processes[0].pid) == [beating]
        os.kill(processes[0].pid, signal.SIGKILL)
        ends(processes, 10)
        assert not is_alive(beating)


def children(parent):
    with open(f"/proc/{parent}/task/{parent}/children") as file:
        return [int(word) for word in file.read().split()]


def test_who_fails_takes_leave_and_the_others_end_after_it(tmp_path):
    with Stopped(2) as hosts:
        at = f"{hosts.addresses[0]}:{hosts.port}"
        processes = started(hosts, tmp_path, [["-c", TALK, at, str(i), "2", str(tmp_path), "1"] for i in range(2)])
        seconds = ends(processes, 30)
    assert [process.poll() for process in processes] == [LOST, 3]
    assert 9 < seconds[0] - seconds[1] < 14
    check_last_words(tmp_path, {0: "1 of 2 failed, with exit code 3"})
