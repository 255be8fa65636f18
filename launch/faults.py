"""Whose fault an exception is: a mistake in what was typed gets one line, a mistake in the code keeps its traceback."""

from __future__ import annotations

import dis
import os

OURS = ("__main__", "jaxrl_post", "launch", "sharding")
REFUSED, INTERRUPTED, BUG = 2, 130, 1  # exit codes; after a refusal, trying again changes nothing


def is_user_error(error: BaseException) -> bool:
    """True for a file that cannot be used, and for a ValueError that a `raise` statement of ours ended with.

    A ValueError that came out of a library, or that the interpreter made (`int("x")`), is a bug. JAXRL_POST_TRACEBACK=1
    makes every error one, to see where it came from.
    """
    if os.environ.get("JAXRL_POST_TRACEBACK", "0") not in ("", "0"):
        return False
    if isinstance(error, OSError):
        return error.filename is not None or _raised_by_us(error)
    return isinstance(error, ValueError) and _raised_by_us(error)


def exit_code(error: BaseException) -> int:
    """Of a program that ends with it."""
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else REFUSED if is_user_error(error) else BUG


def _raised_by_us(error: BaseException) -> bool:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None or at.tb_frame.f_globals["__name__"].partition(".")[0] not in OURS:
        return False
    return at.tb_frame.f_code.co_code[at.tb_lasti] == dis.opmap["RAISE_VARARGS"]
