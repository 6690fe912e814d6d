"""A network between two programs that the test can cut, slow down, drop or lead elsewhere."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from lmcache.testing.processes import LOOPBACK

_PIECE_BYTES = 1 << 18


class Network:
    """Forwards every connection to `target_port`."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = int(self._listener.getsockname()[1])
        self._passing = threading.Event()
        self._passing.set()
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._closed = threading.Event()
        self._delay_seconds = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Nothing passes any more, and nobody is notified: packets are lost."""
        self._passing.clear()

    def mend(self) -> None:
        """What was sent meanwhile arrives, as TCP sees to."""
        self._passing.set()

    def slow_down(self, seconds: float) -> None:
        """Each piece of what the target answers, 256 KiB at most, takes that much longer."""
        self._delay_seconds = seconds

    def lead_to(self, port: int) -> None:
        """Who listens at this address is another one from now on; open connections end."""
        self.target_port = port
        self.drop()

    def drop(self) -> None:
        """Every open connection ends."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                _shut(end)

    def close(self) -> None:
        self._closed.set()
        self._passing.set()
        _shut(self._listener)
        self._listener.close()
        self.drop()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._passing.wait()
        try:
            far = socket.create_connection((LOOPBACK, self.target_port))
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            _shut(near)
            near.close()
            return
        with self._lock:
            self._pairs.append((near, far))
        back = threading.Thread(target=self._forward, args=(far, near, True), daemon=True)
        back.start()
        self._forward(near, far)
        back.join()
        for end in (near, far):
            end.close()

    def _forward(self, source: socket.socket, destination: socket.socket, is_answer: bool = False) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                if is_answer and self._delay_seconds:
                    self._closed.wait(self._delay_seconds)
                self._passing.wait()
                destination.sendall(piece)
        for end in (source, destination):
            _shut(end)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def network_to(port: int) -> Iterator[Network]:
    network = Network(port)
    try:
        yield network
    finally:
        network.close()
