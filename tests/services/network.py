"""A network of a test's own, with a loopback alone, on which packets can be lost or refused.

def test(network: Network) -> None: ...
in_own_network(test)
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from services import FOLDER, debian_environment, missing, program

NFT = FOLDER / "debian" / "usr" / "sbin" / "nft"
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18


class Network:
    """Of the thread that made it, and of the processes and threads that this one starts."""

    def __init__(self) -> None:
        self._nft = Path(shutil.which("nft") or program(NFT, "nft"))
        leave_network()
        self._rules("add table inet test", "add chain inet test faults { type filter hook input priority 0; }")

    def well(self) -> None:
        """Every packet arrives."""
        self._rules("flush chain inet test faults")

    def lose(self, *ports: int, share: float = 1.0) -> None:
        """That share of the packets to and from TCP ports, by chance."""
        chance = f"numgen random mod 100 < {round(share * 100)} drop" if share < 1 else "drop"
        self._set(ports, chance)

    def reset(self, *ports: int) -> None:
        """Every packet to and from TCP ports is answered with a reset."""
        self._set(ports, "reject with tcp reset")

    def _set(self, ports: Sequence[int], verdict: str) -> None:
        self.well()
        each = f"{{ {', '.join(map(str, ports))} }}"
        self._rules(*(f"add rule inet test faults tcp {side} {each} {verdict}" for side in ("dport", "sport")))

    def _rules(self, *rules: str) -> None:
        environment = {**os.environ, **debian_environment()}
        done = subprocess.run([self._nft, "; ".join(rules)], env=environment, capture_output=True, text=True)
        if done.returncode:
            missing(f"A packet filter ({done.stderr.strip()})", installed=False)


def leave_network() -> None:
    """From now on this thread, and what it starts, has a network of its own with a loopback alone."""
    if os.geteuid() != 0 or ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        missing("The right to make a network namespace", installed=False)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def listening_ports(pid: int) -> list[int]:
    """TCP ports at which a process waits for connections."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(descriptor))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in listening})


def in_own_network(test: Callable[[Network], None]) -> None:
    """Runs it in a thread that has a network of its own; what it raises is raised here."""
    _in_own_thread(lambda: test(Network()))


def with_own_memory() -> None:
    """/dev/shm of this thread and of what it starts, so that the names of the guide's servers are free, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
    ):
        missing("The right to mount", installed=False)


def with_files(files: Mapping[str, Path], test: Callable[[], None]) -> None:
    """Runs it in a thread for which those files stand in place of the system's, such as "/etc/hosts"; what it raises is
    raised here."""

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if os.geteuid() != 0 or libc.unshare(CLONE_NEWNS) != 0:
            missing("The right to make a mount namespace", installed=False)
        mounts = [(bytes(source), target.encode(), MS_BIND) for target, source in files.items()]
        for source, target, flags in ((b"none", b"/", MS_REC | MS_PRIVATE), *mounts):
            if libc.mount(source, target, None, flags, None) != 0:
                missing(f"A mount ({os.strerror(ctypes.get_errno())})", installed=False)
        test()

    _in_own_thread(run)


def with_small_disk(folder: Path, size_bytes: int, test: Callable[[], None]) -> None:
    """Runs it in a thread for which that folder is a disk of that size; what it raises is raised here."""

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        folder.mkdir(parents=True, exist_ok=True)
        if (
            libc.unshare(CLONE_NEWNS)
            or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
            or libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size_bytes}".encode())
        ):
            missing("The right to mount", installed=False)
        test()

    _in_own_thread(run)


def grow_small_disk(folder: Path, size_bytes: int) -> None:
    """Within `with_small_disk`: from now on the disk has that size."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"tmpfs", bytes(folder), b"tmpfs", MS_REMOUNT, f"size={size_bytes}".encode()) == 0


def _in_own_thread(test: Callable[[], None]) -> None:
    raised: list[Any] = []

    def run() -> None:
        try:
            test()
        except BaseException as error:  # the root of a thread: a skip is one, too
            raised.append(error)

    thread = threading.Thread(target=run, name="own-namespace")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
