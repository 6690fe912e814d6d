"""Blocking connections to Redis or Valkey that send from memory and receive into memory, and do nothing else."""

from __future__ import annotations

import binascii
import socket
import ssl

from lmcache.errors import LMCacheError
from lmcache.l2.adapters.resp_config import RespConfig
from lmcache.l2.adapters.resp_servers import SLOTS, Servers
from lmcache.l2.native_resp import Address

_LINE_BYTES = 65_536
_EXPIRE_SECONDS = 3600  # what a benchmark that was killed leaves


class RespConnections:
    """One to each server. Of one thread at a time."""

    def __init__(self, config: RespConfig, servers: Servers) -> None:
        self._slots = servers.slots
        self._connections = [RespConnection(config, address) for address in servers.addresses]

    def store(self, name: str, value: memoryview) -> None:
        self._of(name).store(name, value)

    def load(self, name: str, value: memoryview) -> None:
        self._of(name).load(name, value)

    def delete(self, name: str) -> None:
        self._of(name).delete(name)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _of(self, name: str) -> RespConnection:
        """In a cluster CRC-16/XMODEM of a name tells its slot."""
        slot = binascii.crc_hqx(name.encode(), 0) % SLOTS
        at = next((position for first, last, position in self._slots if first <= slot <= last), 0)
        return self._connections[at]


class RespConnection:
    """A connection that one thread at a time uses. LMCacheError where the server does not answer as it should."""

    def __init__(self, config: RespConfig, address: Address) -> None:
        self._where = config.where
        try:
            self._socket = _connected(config, address)
        except OSError as error:
            raise LMCacheError(f"{config.where}: the plain program cannot connect: {error}.") from None
        username, password = config.credentials()
        if password:
            self._ask("AUTH", *([username] if username else []), password)
        if config.database_number:
            self._ask("SELECT", str(config.database_number))

    def store(self, name: str, value: memoryview) -> None:
        self._send(b"*5\r\n" + _bulk(b"SET") + _bulk(name.encode()) + b"$%d\r\n" % value.nbytes)
        self._send(value)
        self._send(b"\r\n" + _bulk(b"EX") + _bulk(str(_EXPIRE_SECONDS).encode()))
        self._expect(self._line(), b"+OK")

    def load(self, name: str, value: memoryview) -> None:
        self._send(_command("GET", name))
        self._expect(self._line(), b"$%d" % value.nbytes)
        self._fill(value)
        self._fill(memoryview(bytearray(2)))

    def delete(self, name: str) -> None:
        self._ask("UNLINK", name)

    def close(self) -> None:
        self._socket.close()

    def _ask(self, *words: str) -> None:
        self._send(_command(*words))
        line = self._line()
        if line[:1] not in b"+:":
            raise self._fault(line)

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise LMCacheError(f"{self._where}: the plain program cannot send: {error}.") from None

    def _line(self) -> bytes:
        """Without its end. Byte by byte: what follows belongs somewhere else."""
        line = bytearray()
        byte = memoryview(bytearray(1))
        while not line.endswith(b"\r\n"):
            self._fill(byte)
            line += byte
            if len(line) > _LINE_BYTES:
                raise self._fault(bytes(line[:80]))
        return bytes(line[:-2])

    def _fill(self, value: memoryview) -> None:
        got = 0
        try:
            while got < value.nbytes:
                part = self._socket.recv_into(value[got:])
                if not part:
                    raise OSError("the server closed the connection")
                got += part
        except OSError as error:
            raise LMCacheError(f"{self._where}: the plain program cannot receive: {error}.") from None

    def _expect(self, line: bytes, wanted: bytes) -> None:
        if line != wanted:
            raise self._fault(line)

    def _fault(self, line: bytes) -> LMCacheError:
        return LMCacheError(f"{self._where}: the plain program was answered {line.decode(errors='replace')!r}.")


def _connected(config: RespConfig, address: Address) -> socket.socket:
    host, port = address
    if not port:
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(config.timeout_seconds)
        plain.connect(host)
        return plain
    plain = socket.create_connection((host, port), config.timeout_seconds)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not config.uses_tls:
        return plain
    context = ssl.create_default_context(cafile=config.tls_ca or None)
    if config.tls_cert:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    return context.wrap_socket(plain, server_hostname=config.tls_server_name or host)


def _command(*words: str) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(_bulk(word.encode()) for word in words)


def _bulk(part: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(part), part)
