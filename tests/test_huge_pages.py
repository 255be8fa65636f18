"""A job on a CPU asks for huge pages by beginning anew, once, as the same process with the same words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.huge_pages import wanted

ON_DEMAND, ALWAYS, NEVER = "always [madvise] never\n", "[always] madvise never\n", "always madvise [never]\n"
CPU = {"JAX_PLATFORMS": "cpu"}
OURS = "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize(
    ("policy", "environ", "expected"),
    [
        (ON_DEMAND, CPU, OURS),
        (ON_DEMAND, CPU | {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}, f"glibc.malloc.arena_max=4:{OURS}"),
        (ON_DEMAND, CPU | {"GLIBC_TUNABLES": OURS}, None),  # so it begins anew once
        (ON_DEMAND, CPU | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, None),
        (ON_DEMAND, {"JAX_PLATFORMS": "cuda"}, None),
        (ON_DEMAND, {}, None),
        (ALWAYS, CPU, None),
        (NEVER, CPU, None),
    ],
    ids=str,
)
def test_it_asks_where_the_kernel_gives_on_demand_and_the_user_has_said_nothing(tmp_path, policy, environ, expected):
    file = tmp_path / "enabled"
    file.write_text(policy)
    assert wanted(environ, file) == expected


def test_a_system_without_them_asks_for_nothing(tmp_path):
    assert wanted(CPU, tmp_path / "absent") is None


def test_the_process_keeps_its_number_and_its_words(tmp_path, monkeypatch):
    policy, program = tmp_path / "enabled", tmp_path / "program.py"
    policy.write_text(ON_DEMAND)
    program.write_text(
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "from launch.huge_pages import restart_with_huge_pages\n"
        "with open(sys.argv[1], 'a') as log: log.write('began\\n')\n"
        "restart_with_huge_pages(Path(sys.argv[2]))\n"
        "print(json.dumps([os.getpid(), sys.argv[3:], os.environ['GLIBC_TUNABLES'], sys.dont_write_bytecode]))\n"
    )
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    words = ["a b", "section.key='quoted'", ""]
    command = [sys.executable, "-B", str(program), str(tmp_path / "log"), str(policy), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=60)
    assert json.loads(said) == [process.pid, words, OURS, True]
    assert (tmp_path / "log").read_text() == "began\n" * 2
