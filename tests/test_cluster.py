"""Finding the other processes of a job, and keeping N of them on one machine: no accelerator, no jax."""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jax._src.clusters import ClusterEnv
from process_state import is_alive

from launch import cluster, supervisor
from launch.__main__ import main
from launch.lines import LOST
from launch.rollcall import Place, StartError, answer
from launch.supervisor import Cast, environment, free_port, supervise

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[017-018],gpu020",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def options(*words):
    parser = argparse.ArgumentParser()
    cluster.add_options(parser)
    return parser.parse_args(words)


@pytest.fixture
def clean(monkeypatch):
    """An environment without any scheduler in it."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JOB_COMPLETION", "JAX_COORDINATOR", "JAX_PROCESS")):
            monkeypatch.delenv(name)

    def with_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return dict(os.environ)

    return with_variables


def test_options_name_the_place(clean):
    given = options("--coordinator", "10.0.0.1:1234", "--process-id", "1", "--processes-total", "2")
    assert cluster.find_place(given, clean()) == Place("10.0.0.1:1234", 1, 2)
    assert cluster.find_place(given, clean(**SLURM)) == Place("10.0.0.1:1234", 1, 2)  # options come first
    assert Place("[fe80::1]:99", 0, 2).address == ("fe80::1", 99)


def test_variables_name_the_place(clean):
    found = clean(JAX_COORDINATOR_ADDRESS="trainer-0:8476", JAX_PROCESS_ID="3", JAX_NUM_PROCESSES="4")
    assert cluster.find_place(options(), found) == Place("trainer-0:8476", 3, 4)


def test_one_process_needs_no_coordinator(clean):
    assert cluster.find_place(options(), clean()) is None
    one = options("--coordinator", "localhost:1", "--process-id", "0", "--processes-total", "1")
    assert cluster.find_place(one, clean()) is None
    assert cluster.find_place(options(), clean(**SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"})) is None


def test_slurm_is_read_as_jax_reads_it(clean):
    environ = clean(**SLURM)
    address, processes, process, local = ClusterEnv.auto_detect_unset_distributed_params(*[None] * 5, 10)
    assert (address.partition(":")[0], processes, process, local) == ("gpu017", 3, 2, [0])
    # One process a node takes all of the node's devices; JAX would give it the first.
    assert cluster.find_place(options(), environ) == Place(address, 2, 3, None)
    shared = clean(SLURM_STEP_TASKS_PER_NODE="2,1", SLURM_STEP_NUM_NODES="2", SLURM_LOCALID="1")
    assert cluster.find_place(options(), shared) == Place(address, 2, 3, (1,))


def test_open_mpi_is_read_as_jax_reads_it(clean):
    found = cluster.find_place(options(), clean(**OPEN_MPI))
    assert (found.process, found.processes, found.local_devices) == (3, 4, (1,))
    assert found.address[0] == "10.96.0.1"
    alone = cluster.find_place(options(), clean(OMPI_COMM_WORLD_LOCAL_SIZE="1"))
    assert alone.local_devices is None


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["--process-id", "1"], {}, "--coordinator and --processes-total is not given"),
        (
            ["--coordinator", "here", "--process-id", "0", "--processes-total", "2"],
            {},
            "--coordinator 'here': expected HOST:PORT, such as 10.0.0.1:8476",
        ),
        (["--coordinator", "here"], {}, "--coordinator 'here': expected HOST:PORT"),
        (["--lost-limit", "1"], {}, "--lost-limit 1: expected seconds, 6 or more"),
        (["--join-limit", "nan"], {}, "--join-limit nan: expected seconds, 0 or more"),
        (["--coordinator", "h:99999", "--process-id", "0", "--processes-total", "2"], {}, "expected HOST:PORT"),
        (
            ["--coordinator", "h:1", "--process-id", "2", "--processes-total", "2"],
            {},
            "--process-id 2 of --processes-total 2",
        ),
        ([], {"JAX_PROCESS_ID": "0"}, "JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES is not given"),
        (
            [],
            {"JAX_PROCESS_ID": "x", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "h:1"},
            "JAX_PROCESS_ID='x'",
        ),
        ([], {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}, "nothing tells where process 0 is"),
        ([], {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "nothing tells where process 0 is"),
        (
            [],
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;udp://x"},
            "does not tell where process 0 is",
        ),
    ],
)
def test_what_cannot_be_is_refused(clean, words, variables, said):
    with pytest.raises(ValueError, match=said):
        cluster.find_place(options(*words), clean(**variables))


def called(places, limit=20.0):
    """What each place's roll call came to: None, or the error's text."""

    def call(place):
        try:
            answer(place, limit)
        except StartError as error:
            return str(error)

    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(call, places))


def test_all_there_is_an_answer_whatever_the_order():
    at = f"127.0.0.1:{free_port()}"
    late = threading.Timer(0.5, lambda: results.append(called([Place(at, 0, 3)])))
    results = []
    late.start()
    assert called([Place(at, 2, 3), Place(at, 1, 3)]) == [None, None]
    late.join()
    assert results == [[None]]


def test_a_health_check_is_no_process():
    at = f"127.0.0.1:{free_port()}"
    port = int(at.partition(":")[2])

    def knock():
        with socket.create_connection(("127.0.0.1", port)) as caller:
            caller.sendall(b"GET / HTTP/1.0\r\n\r\n")

    threading.Timer(0.3, knock).start()
    threading.Timer(0.8, called, [[Place(at, 1, 2)]]).start()
    assert called([Place(at, 0, 2)]) == [None]


def test_absent_processes_are_named_to_all_who_came():
    at = f"127.0.0.1:{free_port()}"
    since = time.monotonic()
    for said in called([Place(at, 0, 4), Place(at, 2, 4)], limit=1.0):
        assert f"2 of 4 processes came to {at} within 1 s; missing: process 1, 3." in said
        assert "--join-limit" in said
    assert time.monotonic() - since < 5


def test_an_absent_first_process_is_named():
    at = f"127.0.0.1:{free_port()}"
    (said,) = called([Place(at, 1, 2)], limit=1.0)
    assert f"process 0, which listens at {at}, did not answer process 1 within 1 s: 1 of 2 processes seen" in said


def test_two_of_one_number_are_refused():
    at = f"127.0.0.1:{free_port()}"
    said = called([Place(at, 0, 3), Place(at, 1, 3), Place(at, 1, 3)], limit=20.0)
    assert sum("two processes came as number 1 of 3" in (text or "") for text in said) == 3
    first, second = called([Place(at, 0, 2), Place(at, 0, 2)], limit=1.0)
    assert any("Another process 0" in text and at in text and "1 of 2 processes" in text for text in (first, second))
    assert any("missing: process 1" in text for text in (first, second))


def test_two_totals_are_refused():
    at = f"127.0.0.1:{free_port()}"
    said = called([Place(at, 0, 2), Place(at, 1, 3)])
    assert all("process 1 expects 3 processes" in text and "process 0 expects 2" in text for text in said)


def script(text):
    """A program that stands for a process of a job; `i` is its number."""
    return [sys.executable, "-c", f"import os, signal, sys, time; i = int(sys.argv[4])\n{text}"]


def test_processes_are_told_their_places_and_logged(tmp_path, capfdbinary):
    tell = script("print(sys.argv[1:], os.environ['CUDA_VISIBLE_DEVICES'], os.environ['XLA_FLAGS'])")
    assert supervise(tell, Cast(3, devices=2), tmp_path) == 0
    logs = [(tmp_path / f"process_{i}.log").read_text() for i in range(3)]
    for i, log in enumerate(logs):
        assert f"'--process-id', '{i}', '--processes-total', '3'" in log
        assert f" {2 * i},{2 * i + 1} " in log
        assert "device_count=2" in log
    assert capfdbinary.readouterr().out.decode() == logs[0]


def test_own_gpus_are_taken_from_those_visible():
    assert environment({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1, 2)["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_when_one_dies_all_end_and_its_last_words_are_told(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "ALONE_SECONDS", 0.5)
    die = script("print('last words', flush=True)\nos.kill(os.getpid(), 9) if i else time.sleep(60)")
    since = time.monotonic()
    assert supervise(die, Cast(2), tmp_path) == 137
    assert time.monotonic() - since < 10
    said = capfd.readouterr().err
    assert "[1] last words" in said
    assert "process 1 ended with code 137" in said
    assert "ending process 0" in said


def test_a_job_is_started_again_as_often_as_was_allowed(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "ALONE_SECONDS", 0.5)
    count = tmp_path / "count"
    fail = script(
        f"n = open({str(count)!r}, 'a'); n.write('x' * i); n.close()\n"
        f"sys.exit(i and os.stat({str(count)!r}).st_size < 3)"
    )
    assert supervise(fail, Cast(2, max_restarts=1), tmp_path) == 1
    assert count.read_text() == "xx"
    assert supervise(fail, Cast(2, max_restarts=1), tmp_path) == 0
    refuse = script(f"open({str(count)!r}, 'a').write('y'); sys.exit(2)")
    count.write_text("")
    assert supervise(refuse, Cast(1, max_restarts=3), tmp_path) == 2
    assert count.read_text() == "y"  # a mistake in the recipe is not tried again


@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_passed_on_and_waited_for(tmp_path, capfd, order):
    polite = script(
        "signal.signal(15, lambda *_: (print('saved', flush=True), os._exit(0)))\n"
        f"open({str(tmp_path)!r} + f'/ready{{i}}', 'w').close()\ntime.sleep(60)"
    )

    def interrupt():
        while not all((tmp_path / f"ready{i}").exists() for i in range(2)):
            time.sleep(0.05)
        os.kill(os.getpid(), order)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt) if order == signal.SIGINT else contextlib.nullcontext():
        assert supervise(polite, Cast(2, max_restarts=5), tmp_path) == 0
    assert "every process saves the step it is in and ends, within 120 s" in capfd.readouterr().err
    assert all("saved" in (tmp_path / f"process_{i}.log").read_text() for i in range(2))


@pytest.mark.parametrize(("orders", "grace"), [(1, 0.5), (2, 60.0)])
def test_whoever_ignores_a_stop_is_ended(tmp_path, orders, grace):
    """When its time is up, or at once when told again."""
    deaf = script(f"signal.signal(15, signal.SIG_IGN); open({str(tmp_path / 'ready')!r}, 'w').close()\ntime.sleep(60)")

    def stop():
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        for _ in range(orders):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    threading.Thread(target=stop).start()
    since = time.monotonic()
    assert supervise(deaf, Cast(1, grace=grace), tmp_path) == 1
    assert time.monotonic() - since < 10


def test_who_was_left_alone_is_not_the_one_that_failed(tmp_path, capfd):
    die = script(f"time.sleep(0.5 * i); sys.exit([{LOST}, 9][i])")
    assert supervise(die, Cast(2), tmp_path) == 9
    assert "process 1 ended with code 9" in capfd.readouterr().err


@pytest.mark.slow
def test_an_interrupted_job_leaves_no_process(tmp_path):
    command = [sys.executable, "-m", "launch", "configs/tiny/grpo.yaml", f"run_dir={tmp_path / 'run'}", "steps=1000"]
    with subprocess.Popen(
        [*command, "--processes", "2"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert any(" 1/1000 " in line for line in job.stdout)
        children = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        assert len(children) == 2
        job.send_signal(signal.SIGINT)
        said = job.communicate(timeout=120)
    assert job.returncode == 130
    assert said[1].endswith("interrupted\n")
    assert "told to stop: step" in said[0]
    assert not any(map(is_alive, children))
    assert sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_processes_end_with_whoever_watches_them(tmp_path):
    say = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    sleep = [sys.executable, "-c", say]
    watch = (
        "from pathlib import Path; from launch.supervisor import *\n"
        f"supervise({sleep!r}, Cast(1), Path({str(tmp_path)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", watch]) as supervisor_process:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        child = int((tmp_path / "pid").read_text())
        assert os.path.exists(f"/proc/{child}")
        supervisor_process.kill()
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


@pytest.mark.parametrize("process", ["0", "1"])
def test_the_command_ends_in_time_when_a_peer_is_absent(tmp_path, process):
    at = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "launch", "configs/tiny/grpo.yaml", f"run_dir={tmp_path / 'run'}"]
    command += ["--coordinator", at, "--process-id", process, "--processes-total", "2", "--join-limit", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    for said in (at, "1 of 2 processes", "--join-limit"):
        assert said in done.stderr
    assert not (tmp_path / "run").exists()


def test_counts_below_one_are_refused():
    with pytest.raises(ValueError, match="--processes 0: at least 1"):
        Cast(0)
    with pytest.raises(ValueError, match="--devices-per-process 0"):
        Cast(1, devices=0)
    with pytest.raises(ValueError, match="--max-restarts -1"):
        Cast(1, max_restarts=-1)


def test_a_whole_job_has_a_coordinator_of_its_own(capsys):
    assert main(["configs/tiny/grpo.yaml", "--processes", "2", "--process-id", "0"]) == 2
    assert "leave out --coordinator, --process-id, --processes-total" in capsys.readouterr().err
