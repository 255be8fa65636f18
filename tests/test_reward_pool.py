"""Foreign graders: each fault costs its own sample and no other, within the limit, and leaves no process."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from process_state import is_alive

from jaxrl_post import config, config_rewards
from jaxrl_post.data.tokenizer import ByteTokenizer
from jaxrl_post.observe.metrics import read_metrics
from jaxrl_post.rewards.call import RewardError, graded
from jaxrl_post.rewards.model import Setting
from jaxrl_post.rewards.reward import build_reward
from jaxrl_post.types import Prompt, Response
from launch.__main__ import main

SETTING = Setting(config.Mesh(), ByteTokenizer(), ByteTokenizer.vocab_size, max_tokens=64, samples=4)
SOURCE = """
import ctypes, math, os, signal, subprocess, sys, time

def score(prompts, completions, rows):
    [completion] = completions
    match completion:
        case "python loop":
            while True:
                pass
        case "native call":
            ctypes.PyDLL(None).pause()  # holds the interpreter
        case "tower":
            return [float(9 ** 9 ** 9 ** 9 > 0)]
        case "child":
            subprocess.run(["sleep", "1000"])
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(7)
        case "sys.exit":
            sys.exit(0)
        case "raise":
            raise KeyError("gone")
        case "alarm":
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return [float(signal.sigtimedwait([signal.SIGALRM], 0) is None)]
        case "pid":
            return [os.getpid()]
        case "nan":
            return [math.nan]
        case "two":
            return [1.0, 2.0]
        case "none":
            return [None]
    return [len(completion) / 7]

def wait(prompts, completions, rows):
    time.sleep(1000)

def spread(prompts, completions, rows):
    return [float(len(set(completions)))] * len(completions)
"""


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graders")
    (folder / "hostile_grader.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
    sys.modules.pop("hostile_grader", None)


def reward_of(name="score", **keys):
    return build_reward(
        config_rewards.FunctionReward(kind="function", function=f"hostile_grader:{name}", **keys), SETTING
    )


def responses(*texts, groups=1):
    prompts = [Prompt((1,), f"q{i}", {}) for i in range(groups)]
    size = len(texts) // groups
    return [Response(prompts[i // size], text, np.array([2])) for i, text in enumerate(texts)]


def children():
    """Graders' workers of this process that live; other tests of it may have left helpers of another kind."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        state, parent = read(path).decode().rpartition(")")[2].split()[:2] or ("Z", "0")
        lives = parent == str(os.getpid()) and state != "Z"
        if lives and b"jaxrl_post.rewards.worker" in read(path.parent / "cmdline"):
            found.append(path.parent.name)
    return found


def sleepers():
    return [
        path
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
        if path.exists() and b"sleep\x001000" in read(path)
    ]


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def pool():
    """One worker with a limit of a second and a half, called from a thread that is not the main one."""
    reward = reward_of(workers=1, timeout=1.5, failure_score=-1.0)
    yield reward
    reward.close()
    assert not children()


def in_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    ("text", "timeouts", "crashes"),
    [
        ("python loop", 1, 0),
        ("native call", 1, 0),
        ("tower", 1, 0),
        ("child", 1, 0),
        ("segfault", 0, 1),
        ("exit", 0, 1),
        ("sys.exit", 0, 0),
        ("raise", 0, 0),
        ("nan", 0, 0),
        ("two", 0, 0),
        ("none", 0, 0),
    ],
)
def test_a_fault_costs_its_own_sample_alone(pool, text, timeouts, crashes):
    in_thread(lambda: pool(responses("warm")))  # a worker is there
    pool.collect()
    began = time.monotonic()
    scores = in_thread(lambda: pool(responses("a", "abc", text, "abcde")))
    assert time.monotonic() - began < (1.5 if timeouts else 0) + 8  # two seconds and what a busy machine adds
    assert scores.total_N.tolist() == [1 / 7, 3 / 7, -1.0, 5 / 7]
    assert pool.collect() == {
        "reward/failed": 1.0,
        "reward/timeouts": timeouts,
        "reward/crashes": crashes,
        "reward/all_failed": 0.0,
    }
    assert pool.collect()["reward/failed"] == 0
    assert len(children()) == 1
    assert not sleepers()


def test_a_batch_that_hangs_whole_is_told():
    """Of two rewards one grades: what the other failed at is counted against its own samples."""
    reward = build_reward(
        config_rewards.WeightedReward(
            kind="weighted",
            parts={
                name: {"reward": {"kind": "function", "function": "hostile_grader:score", "workers": 1, "timeout": 1.0}}
                for name in ("one", "two")
            },
        ),
        SETTING,
    )
    hanging = dataclasses.replace(reward, graders=(reward.graders[0], reward_of("wait", timeout=0.5).graders[0]))
    try:
        assert hanging(responses("a", "exit")).heads_NK.tolist() == [[1 / 7, 0.0], [0.0, 0.0]]
        told = {"reward/failed": 3.0, "reward/timeouts": 2.0, "reward/crashes": 1.0, "reward/all_failed": 1.0}
        assert hanging.collect() == told
    finally:
        hanging.close()
        reward.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), ("--rollout-only",)], ids=["run", "rollouts"])
def test_a_run_whose_reward_hangs_on_every_sample_ends_where_asked(tmp_path, capsys, mode):
    small = ("mesh.fsdp=1", "mesh.allow_unused_devices=true", "rollout.max_new_tokens=4", "data.prompts_per_step=2",
             "rollout.samples_per_prompt=2", "evaluation.enabled=false", "training.tokens_per_microbatch=256",
             "model.random={family: llama, layers: 1, hidden_size: 16, intermediate_size: 32}")  # fmt: skip
    hangs = ("reward.function=hostile_grader:wait", "reward.timeout=0.2", "alerts.failed_reward_steps=2",
             "alerts.limits={response_length/mean: 0.5}")  # fmt: skip
    assert main(["configs/tiny/grpo.yaml", f"run_dir={tmp_path}", *small, *hangs, *mode]) == 2
    out, err = capsys.readouterr()
    told = "a reward failed on all of its samples (4 failed, 4 timeouts, 0 crashes)"
    assert [line for line in out.splitlines() if told in line] == [f"alert: step {i}: {told}" for i in (1, 2)]
    assert "error: alerts.failed_reward_steps=2: a reward failed on all samples of so many steps in a row" in err
    assert [line.partition(" is ")[0] for line in out.splitlines() if "beyond" in line] == [
        f"alert: step {i}: response_length/mean" for i in (1, 2)
    ]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert (
        [row["alert/reward/all_failed"] for row in rows]
        == [row["alert/response_length/mean"] for row in rows]
        == [1, 1]
    )


def test_a_grader_may_use_alarms_and_workers_are_kept(pool):
    """Packages that limit themselves by SIGALRM work in main threads alone."""
    first, alarm, second = in_thread(lambda: pool(responses("pid", "alarm", "pid"))).total_N.tolist()
    assert alarm in (0.0, 1.0)
    assert first == second != os.getpid()


def test_the_failure_is_told_once_with_its_place(pool, caplog):
    in_thread(lambda: pool(responses("raise", "a", "raise")))
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "reward hostile_grader:score failed on 2 of 3 samples, which get -1; sample 0 ('raise'): raised"
    )
    assert line.endswith("KeyError: 'gone' (hostile_grader.py:23)")


class Unshown:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("given", "score", "told"),
    [
        (True, 1.0, ""),
        (np.float32(0.5), 0.5, ""),
        (10**400, None, "returned 1000"),
        (Unshown(), None, "returned something of type Unshown, not a finite number"),
        (np.array([1.0]), None, "returned array([1.]), not a finite number"),
        ("1", None, "returned '1', not a finite number"),
    ],
)
def test_what_is_no_number_is_told_whatever_it_is(given, score, told):
    found = graded(given)
    assert (found.score, bool(found.fault)) == (score, score is None)
    assert found.why.startswith(told)


def test_a_grader_that_grades_nothing_is_an_error(pool):
    with pytest.raises(RewardError, match=r"failed on all 2 samples; sample 0 \('two'\): returned 2 scores for 1 comp"):
        pool(responses("two", "raise"))
    with pytest.raises(RewardError, match=r"score, sample 1 \('nan'\): returned nan, not a finite number"):
        reward_of(workers=0, failure_score=None)(responses("a", "nan"))


def test_scores_are_the_same_bits_whoever_grades(pool):
    texts = ["x" * n for n in range(40)]
    here = reward_of(workers=0)(responses(*texts, groups=4)).total_N
    np.testing.assert_array_equal(pool(responses(*texts, groups=4)).total_N, here)


@pytest.mark.parametrize(("per", "expected"), [("sample", [1] * 4), ("group", [1, 1, 2, 2]), ("step", [3] * 4)])
def test_what_a_call_grades(per, expected):
    reward = reward_of("spread", workers=0, per=per)
    assert reward(responses("a", "a", "b", "c", groups=2)).total_N.tolist() == expected


def test_a_grader_that_cannot_be_loaded_is_told(tmp_path, monkeypatch):
    """It is there when the run begins, and gone when a worker looks for it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fleeting_grader.py").write_text("def score(prompts, completions, rows):\n    return [1.0]\n")
    reward = build_reward(
        config_rewards.FunctionReward(kind="function", function="fleeting_grader:score", workers=1), SETTING
    )
    (tmp_path / "fleeting_grader.py").unlink()
    before = len(children())
    with pytest.raises(RewardError, match=r"a worker process could not load it: .*No module named 'fleeting_grader'"):
        reward(responses("a"))
    assert len(children()) == before


PARENT = """
import sys, time
from jaxrl_post.rewards.call import Call
from jaxrl_post.rewards.pool import Pool
from jaxrl_post.rewards.worker import Target
pool = Pool("r", Target("hostile_grader:score", {}), 2, 1000.0)
[[one]] = [outcome.result() for outcome in pool.submit([Call(["q"], ["pid"], [{}])])]
print(int(one.score), flush=True)
[outcome.result() for outcome in pool.submit([Call(["q"], [text], [{}]) for text in ("native call", "child")])]
"""


def test_no_worker_outlives_a_killed_run():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment)
    worker = int(parent.stdout.readline())
    wait_until(sleepers)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not sleepers() and not is_alive(worker))


def wait_until(condition):
    for _ in range(300):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("not within 30 s")
