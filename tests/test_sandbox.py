"""Programs of a model run in sandboxes: what is right passes, what tries to get out or to take all fails, soon."""

import functools
import os
import shutil
import time

import numpy as np
import pytest

from jaxrl_post import config, config_rewards
from jaxrl_post.data.tokenizer import ByteTokenizer
from jaxrl_post.rewards import code_bubblewrap
from jaxrl_post.rewards.code import Options, extract_program, open_sandbox, read_tests
from jaxrl_post.rewards.code_case import Case
from jaxrl_post.rewards.model import Setting
from jaxrl_post.rewards.reward import build_reward
from jaxrl_post.types import Prompt, Response

SANDBOXES = ["monty", *(["bubblewrap"] if shutil.which("bwrap") else [])]  # the second is a system's package
SQUARE = "def f(x):\n    return x * x\n"


@functools.cache
def opened(sandbox):
    return open_sandbox(Options(sandbox, "tests", "all", 1.0, 128))


@pytest.mark.parametrize("sandbox", SANDBOXES)
@pytest.mark.parametrize(
    ("program", "test", "right"),
    [
        (SQUARE, Case(after="assert f(3) == 9"), True),
        (SQUARE, Case(after="assert f(3) == 8"), False),
        ("import math\nprint(math.gcd(12, 18))", Case(printed="6\n"), True),
        (
            "n = int(input())\nfor i in range(n):\n    print(int(input()) * 2, ' ')",
            Case(None, "2\n3\n4\n", "6\n8"),
            True,
        ),
        ("print(input())\nprint(input())", Case(None, "one line", "one line"), False),
        ("def f(:", Case(after="assert True"), False),
        ("raise SystemExit(0)", Case(after="assert False"), False),
        ("import os\nos._exit(0)", Case(after="assert False"), False),
        ("x = 'ü\u2028'\nprint(x)", Case(printed="ü\u2028"), True),
    ],
)
def test_programs_and_their_tests(sandbox, program, test, right):
    assert opened(sandbox)(program, test) == right


ESCAPES = {
    "the machine's files": "open('/etc/passwd').read()",
    "the run's folder": f"import os\nassert os.listdir({os.getcwd()!r})",
    "a program": "import os\nassert os.system('true') == 0",
    "a process": "import os\nos.fork()",
    "a subprocess": "import subprocess\nsubprocess.run(['/bin/true'], check=True)",
    "a thread": "import threading\nthreading.Thread(target=print).start()",
    "the network": "import socket\nsocket.create_connection(('127.0.0.1', 22), 1)",
    "a write beside it": "open('/usr/written', 'w')",
    "a write at the root": "open('/written', 'w')",
    "devices": "open('/dev/written', 'w')",
    "other processes": "import os, signal\nos.kill(2**15, signal.SIGKILL)",
    "the environment": "import os\nassert 'HOME' in os.environ",
    "a native call that forks": "import ctypes\nassert ctypes.CDLL(None).fork() > 0",
    "memory": "x = 'a' * 10**10",
    "memory by and by": "x = ['a' * 10**6]\nwhile True:\n    x = x + x",
    "a disk": "f = open('/tmp/x', 'w')\nwhile True:\n    f.write('a' * 10**6)",
    "time": "while True: pass",
    "time in native code": "x = 10 ** (10**9)\nassert False",
    "the output": "while True: print('x' * 10000)",
    "the stack": "def f(): return f()\nf()",
    "a mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "a namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
}


@pytest.mark.parametrize("sandbox", SANDBOXES)
@pytest.mark.parametrize("what", ESCAPES)
def test_no_program_takes(sandbox, what):
    start = time.monotonic()
    assert not opened(sandbox)(ESCAPES[what], Case(after="pass"))
    assert time.monotonic() - start < 15
    assert not os.path.exists("/usr/written")


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_a_fork_bomb_leaves_no_process(sandbox):
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    count = len([name for name in os.listdir("/proc") if name.isdecimal()])
    assert not opened(sandbox)(bomb, Case(after="pass"))
    assert len([name for name in os.listdir("/proc") if name.isdecimal()]) < count + 50
    assert opened(sandbox)(SQUARE, Case(after="assert f(2) == 4"))


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("First\n```python\nx = 1\n```\nthen\n```py\nx = 2\n```\ndone", "x = 2"),
        ("```\nx = 1\n```", "x = 1"),
        ("cut off: ```python\nx = 1\ny", "x = 1\ny"),
    ],
)
def test_the_program_of_a_completion(completion, program):
    assert extract_program(completion) == program


@pytest.mark.parametrize("tests", [None, [], "assert 1", [3], [""], [{"input": "x"}], [{"input": 1, "output": "x"}]])
def test_rows_without_usable_tests(tests):
    with pytest.raises(ValueError, match="tests"):
        read_tests({"prompt": "a", "tests": tests}, "tests")


def test_a_reward_of_code_in_workers():
    row = {"tests": ["assert f(2) == 4", {"input": "", "output": ""}, "assert f(-1) == 1"]}
    texts = [SQUARE, f"```python\n{SQUARE}```", "def f(x): return x + 3", "while True: pass", "import os; os._exit(1)"]
    setting = Setting(config.Mesh(), ByteTokenizer(), ByteTokenizer.vocab_size, max_tokens=64, samples=4)
    for score, expected in (("all", [1, 1, 0, 0, 0]), ("share", [1, 1, 1 / 3, 0, 0])):
        reward = build_reward(config_rewards.CodeReward(kind="code", workers=1, seconds=0.5, score=score), setting)
        reward.check_rows([row])
        prompts = [Prompt((1,), "q", row)] * len(texts)
        responses = [Response(p, text, np.array([2])) for p, text in zip(prompts, texts, strict=True)]
        np.testing.assert_allclose(reward(responses).total_N, expected)
        assert set(reward.collect().values()) == {0.0}
        reward.close()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(code_bubblewrap.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"reward\.sandbox=bubblewrap needs the programs bwrap"):
        open_sandbox(Options("bubblewrap", "tests", "all", 1.0, 128))
    monkeypatch.setitem(__import__("sys").modules, "pydantic_monty", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxrl-post\[code\]'"):
        open_sandbox(Options("monty", "tests", "all", 1.0, 128))
