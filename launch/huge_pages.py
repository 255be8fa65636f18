"""Memory in huge pages for a job that computes on a CPU.

XLA asks for the memory of each program anew, and Linux hands it out in pages of 4 KiB, one fault each: a quarter of the
time of an update of SmolLM2-135M (docs/architecture.md). The C library asks for pages of 2 MiB instead, but only if its
environment said so when the process began.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.malloc.hugetlb"
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_huge_pages(policy: Path = POLICY) -> None:
    """Begin this program anew in the same process, the C library told to ask; returns where that would gain nothing.

    `GLIBC_TUNABLES=glibc.malloc.hugetlb=0` given by the user stands.
    """
    if (tunables := wanted(os.environ, policy)) is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: tunables})


def wanted(environ: Mapping[str, str], policy: Path) -> str | None:
    """What `GLIBC_TUNABLES` should be, or None: another platform than a CPU, a kernel whose pages are huge for everyone
    or for nobody, or tunables that name this one already."""
    given = environ.get(VARIABLE, "")
    if environ.get("JAX_PLATFORMS") != "cpu" or TUNABLE in given or not _on_demand(policy):
        return None
    return f"{given}:{TUNABLE}=1".lstrip(":")


def _on_demand(policy: Path) -> bool:
    try:
        return "[madvise]" in policy.read_text()
    except OSError:  # not Linux, or a kernel without them
        return False
