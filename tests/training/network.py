"""A network namespace of a job's own, in which rails of replicas can be cut. Gone when its last process is."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000


def enter_namespace(path: str) -> None:
    """Of the calling thread."""
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(namespace)


@contextmanager
def entered(path: str) -> Iterator[None]:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter_namespace(path)
        yield
    finally:
        enter_namespace(f"/proc/self/fd/{home}")
        os.close(home)


class Network:
    """Loopback alone; replica number i has the rails 127.0.(10 + i).1 and .2."""

    def __init__(self) -> None:
        script = "ip link set lo up && echo up && exec sleep 3600"
        self._holder = subprocess.Popen(["unshare", "--net", "sh", "-c", script], stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n"
        self.path = f"/proc/{self._holder.pid}/ns/net"
        self.inside = ["nsenter", f"--net={self.path}"]

    @staticmethod
    def rails(replica: int) -> str:
        return f"a=127.0.{10 + replica}.1,b=127.0.{10 + replica}.2"

    def cut(self, one: int, other: int) -> None:
        """Packets between the rails of two replicas vanish, both ways."""
        a, b = f"127.0.{10 + one}.0/24", f"127.0.{10 + other}.0/24"
        rules = (
            "add table inet cut; add chain inet cut out { type filter hook output priority 0; }; "
            f"add rule inet cut out ip saddr {a} ip daddr {b} drop; "
            f"add rule inet cut out ip saddr {b} ip daddr {a} drop"
        )
        subprocess.run([*self.inside, "nft", rules], check=True)

    def mend(self) -> None:
        subprocess.run([*self.inside, "nft", "delete table inet cut"], check=True)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        for _ in range(100):
            if not os.path.exists(self.path):
                return
            time.sleep(0.01)
