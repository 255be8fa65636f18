"""Programs in full CPython (its standard library) inside bubblewrap: a process in namespaces of its own.

It sees no files but the interpreter's and the system's libraries, read-only, and an empty /tmp of 16 MiB; no network;
no other process, and may start none, nor a thread: a filter on system calls refuses it, for a limit on processes does
not bind the superuser. Memory, processor time and the size of files are limited by the kernel. A test takes 0.1 s.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

from jaxrl_post.rewards.code_case import MOST_PRINTED, Case, Limits

ROOM = 16 << 20  # bytes in /tmp
START_SECONDS = 10.0  # beyond its own time, for the namespaces and the interpreter on a busy machine
SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
# Each machine's own number, and its system calls that make a process (fork, vfork, clone, clone3) or that lead
# further into the kernel than a program needs (unshare, setns, mount, ptrace, keyctl, bpf, io_uring_setup).
MACHINES = {
    "x86_64": (0xC000003E, (56, 57, 58, 435, 272, 308, 165, 101, 250, 321, 425)),
    "aarch64": (0xC00000B7, (220, 435, 97, 268, 40, 117, 219, 280, 425)),
}
X32 = 0x40000000  # system calls from here on are another numbering of the same on x86_64
LOAD, JUMP_EQUAL, JUMP_FROM, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE is EPERM
# Reads program and test before either runs; the last word it prints, if both run, is not known to the program.
HARNESS = """
import json, sys
def main():
    asked = json.loads(sys.stdin.read())
    scope = {"__name__": "__main__"}
    for part in ("program", "test"):
        exec(compile(asked.pop(part), part, "exec"), scope)
    print("\\n" + asked["word"])
main()
"""


def command(limits: Limits) -> Sequence[str]:
    """The command line up to the interpreter's own words, tried once.

    Raises: ValueError where bubblewrap or prlimit is missing or may not make namespaces.
    """
    if shutil.which("bwrap") is None or shutil.which("prlimit") is None or platform.machine() not in MACHINES:
        raise ValueError(
            f"reward.sandbox=bubblewrap needs the programs bwrap and prlimit (apt install bubblewrap util-linux) and a "
            f"machine of {' or '.join(MACHINES)}; reward.sandbox=monty needs neither"
        )
    words = _words(limits)
    if not passes(words, limits, "x = 1", Case(after="assert x == 1")):
        raise ValueError(
            "reward.sandbox=bubblewrap does not work here: bwrap may not be allowed to make namespaces (in a "
            "container, say); take reward.sandbox=monty"
        )
    return words


def passes(words: Sequence[str], limits: Limits, program: str, test: Case) -> bool:
    """Whether the program passes, in a fresh process; a limit reached is no."""
    if test.after is None:
        printed = _run([*words, "-c", program], test.given, limits.seconds)
        return printed is not None and test.printed_right(printed)
    word = secrets.token_hex(16)
    printed = _run(
        [*words, "-c", HARNESS], json.dumps({"program": program, "test": test.after, "word": word}), limits.seconds
    )
    return printed is not None and printed.rstrip().endswith("\n" + word)


def _run(words: Sequence[str], given: str, seconds: float) -> str | None:
    """What it printed; None where it failed or did not end."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as rules:
        for file, content in ((stdin, given.encode("utf-8", "surrogatepass")), (rules, _filter())):
            file.write(content)
            file.seek(0)
        process = subprocess.Popen(
            [words[0], "--seccomp", str(rules.fileno()), *words[1:]],
            stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, pass_fds=(rules.fileno(),), env={},
        )  # fmt: skip
        try:
            code = process.wait(seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            process.kill()  # and with it, by --die-with-parent, all inside
            process.wait()
        return _text(stdout) if code == 0 else None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MOST_PRINTED).decode("utf-8", "replace")


def _words(limits: Limits) -> list[str]:
    base = os.path.realpath(sys.base_prefix)
    links = [word for path in SYSTEM if os.path.islink(path) for word in ("--symlink", os.readlink(path), path)]
    bound = [path for path in (*SYSTEM, base) if os.path.isdir(path) and not os.path.islink(path)]
    binds = [word for path in bound for word in ("--ro-bind", path, path)]
    return [
        str(shutil.which("bwrap")), "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session",
        "--clearenv", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox",
        *binds, *links, "--proc", "/proc", "--dev", "/dev", "--size", str(ROOM), "--tmpfs", "/tmp",
        "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp",
        str(shutil.which("prlimit")), f"--as={limits.memory}", f"--cpu={max(1, round(limits.seconds + 0.5))}",
        f"--fsize={MOST_PRINTED}", "--nofile=64", "--core=0", "--",
        f"{base}/bin/python3", "-I", "-S",
    ]  # fmt: skip


def _filter() -> bytes:
    """A program for the kernel (classic BPF): refuse the system calls of `MACHINES`, allow the rest."""
    machine, refused = MACHINES[platform.machine()]
    checks = [(JUMP_EQUAL, number) for number in refused] + [(JUMP_FROM, X32)]
    lines = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, machine), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    lines += [(code, len(checks) - i, 0, number) for i, (code, number) in enumerate(checks)]
    lines += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
