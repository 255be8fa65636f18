"""Says again and again that the program which started this process runs: an empty line on each of its connections.

beats.py PARENT SECONDS NUMBER …, the numbers those of open sockets. A process of its own, for a Python that holds its
lock for a minute is not stopped. While its parent is stopped (SIGSTOP, a debugger) it is silent, as it is when a whole
host is frozen; the kernel ends it with its parent. It imports none of ours.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time

BEAT = b"\n"
PR_SET_PDEATHSIG = 1
DEAF = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # sent to all processes of a job


def main(parent: int, seconds: float, sockets: list[int]) -> None:
    """Until the parent is gone."""
    for number in DEAF:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connections = [socket.socket(fileno=number) for number in sockets]
    while os.getppid() == parent:
        if not _is_stopped(parent):
            for connection in connections:
                _beat(connection)
        time.sleep(seconds)


def _beat(connection: socket.socket) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    events = dict(poll.poll(0)).get(connection.fileno(), 0)
    # The word of what has become of a broken connection is the parent's to read: sending would take it.
    if events & select.POLLOUT and not events & (select.POLLERR | select.POLLHUP):
        with contextlib.suppress(OSError):
            connection.send(BEAT, socket.MSG_DONTWAIT)


def _is_stopped(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:  # it is gone, or the system tells in another way
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), [int(word) for word in sys.argv[3:]])
