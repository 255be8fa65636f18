"""Hosts on one machine: each a network namespace behind a switch, to cut apart, or a name for processes to stop."""

import os
import shutil
import signal
import subprocess
import sys

from launch.supervisor import free_port

NOBODY = "02:00:00:00:00:99"  # an address on the switch that no host has


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True).stdout


def why_no_namespaces():
    """What is missing to make network namespaces; empty where nothing is."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "no Linux with the command `ip` (iproute2)"
    name = f"jaxrl{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    ip("netns", "del", name, check=False)
    return made.stderr.strip()


class Namespaces:
    """`count` hosts 10.77.0.1, 10.77.0.2, …, each with a cable to a switch."""

    stopped = frozenset()

    def __init__(self, count):
        self._names = [f"jaxrl{os.getpid()}h{i}" for i in range(count)]
        self._switch = f"jaxrl{os.getpid()}s"
        self.addresses, self.port = [f"10.77.0.{i + 1}" for i in range(count)], 8476

    def __enter__(self):
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for i, name in enumerate(self._names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", self._switch, "link", "add", f"p{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self._switch, "link", "set", f"p{i}", "master", "br0", "up")
            ip("-n", name, "address", "add", f"{self.addresses[i]}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        return self

    def __exit__(self, *exc):
        for i in range(len(self._names)):
            self.kill(i)
        for name in (*self._names, self._switch):
            ip("netns", "del", name, check=False)

    def start(self, host, command, **options):
        return subprocess.Popen(["ip", "netns", "exec", self._names[host], *command], **options)

    def cut(self, host):
        """Pull the host's cable."""
        ip("-n", self._switch, "link", "set", f"p{host}", "down")

    def mend(self, host):
        ip("-n", self._switch, "link", "set", f"p{host}", "up")

    def lose(self, sender, receiver):
        """From now on nothing that one host sends to another arrives there."""
        arrives = ("neigh", "replace", self.addresses[receiver], "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
        ip("-n", self._names[sender], *arrives)

    def find(self, sender, receiver):
        ip("-n", self._names[sender], "neigh", "del", self.addresses[receiver], "dev", "eth0")

    def kill(self, host):
        """All that runs there, at once."""
        for pid in ip("netns", "pids", self._names[host], check=False).split():
            os.kill(int(pid), signal.SIGKILL)


class Stopped:
    """`count` hosts that share this machine's network: one to be cut off is stopped, with all that it started."""

    def __init__(self, count):
        self.addresses, self.port = ["127.0.0.1"] * count, free_port()
        self._started, self.stopped = {}, set()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for host in self._started:
            self.kill(host)

    def start(self, host, command, **options):
        self._started[host] = subprocess.Popen(command, start_new_session=True, **options)
        return self._started[host]

    def cut(self, host):
        self.stopped.add(host)
        os.killpg(self._started[host].pid, signal.SIGSTOP)

    def freeze(self, host):
        """The program alone."""
        self.stopped.add(host)
        os.kill(self._started[host].pid, signal.SIGSTOP)

    def find(self, host):
        """Of one that was not lost: nothing."""

    def mend(self, host):
        self.stopped.discard(host)
        if self._started[host].poll() is None:
            os.killpg(self._started[host].pid, signal.SIGCONT)

    def kill(self, host):
        if self._started[host].poll() is None:
            os.killpg(self._started[host].pid, signal.SIGKILL)
