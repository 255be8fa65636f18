"""Whether a process that is no child of ours lives."""

from pathlib import Path


def is_alive(process):
    """A zombie, which nobody reaps in a container without an init, is dead."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
