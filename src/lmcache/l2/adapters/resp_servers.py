"""Which servers a `resp` adapter has, and what they say of themselves. Everything here blocks."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache import _native
from lmcache.clock import Clock
from lmcache.environment import SYSTEM
from lmcache.errors import ConfigError, ResourceError
from lmcache.l2.adapters.resp_config import RespConfig, client_options
from lmcache.l2.native_resp import Address, Answer, Reply, SlotRange, ask

LOADING_RETRY_SECONDS = 0.1
OWN_SHARE = 0.9  # of the timeout, so that what is said is more than that it has passed
MAX_INFO_FIELDS = 10_000
SLOTS = 16_384  # of a cluster
MAX_NODES = 1024  # RespNodes::kMaxNodes
MAX_PORT = 65_535


class Deadline:
    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock = clock
        self._at = clock.monotonic() + seconds

    def left_seconds(self) -> float:
        return max(0.0, self._at - self.clock.monotonic())


@dataclass(frozen=True)
class Servers:
    """`slots`: which of a cluster's masters has what; empty for a single server."""

    addresses: list[Address]
    slots: list[SlotRange]
    max_memory_bytes: int | None = None  # None: not told
    max_value_bytes: int | None = None


def find_servers(config: RespConfig, clock: Clock, node: Address | None = None) -> Servers:
    """`node`: of a cluster, to be asked in place of the configured one. ConfigError or ResourceError, a sentence."""
    deadline = Deadline(clock, OWN_SHARE * config.timeout_seconds)
    options = client_options(config)
    if config.sentinel is None:
        return _greet(config, options, node or config.address, deadline)
    return _greet(config, options, _ask_sentinels(config, options, clock), deadline)


def make_client(config: RespConfig, options: Mapping[str, Any], **own: Any) -> _native.RespClient:
    """ConfigError where TLS cannot be had."""
    try:
        return _native.RespClient(**{**options, "no_touch": False, "max_value_bytes": config.max_value_bytes, **own})
    except RuntimeError as error:
        raise ConfigError(f'{config.where}: {error}; check "tls_ca", "tls_cert" and "tls_key".') from None


class _Questions:
    """One server, asked one thing after another."""

    def __init__(self, config: RespConfig, options: Mapping[str, Any], address: Address, deadline: Deadline) -> None:
        self._config = config
        self._deadline = deadline
        self.text = address[0] if address[0].startswith("/") else f"{address[0]}:{address[1]}"
        self._client = make_client(config, options, threads=1)
        self._client.assign_nodes([address], [])

    def __enter__(self) -> _Questions:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, *arguments: str) -> Reply:
        """An error of the server is a str. ConfigError or ResourceError where it does not answer."""
        left_seconds = self._deadline.left_seconds()
        answer: Answer = ask(self._client, [argument.encode() for argument in arguments], 0, left_seconds)
        if answer.error:
            self._refuse(answer.error)
        if isinstance(answer.reply, str) and answer.reply.startswith(("NOAUTH", "WRONGPASS")):
            self._refuse(errno.EACCES, answer.reply)
        return answer.reply

    def _refuse(self, error: int, said: str = "") -> None:
        where, server = self._config.where, self.text
        said = said or self._client.last_error()
        if error == errno.ETIMEDOUT:
            raise ResourceError(
                f"{where}: the server {server} does not answer in time; "
                "see whether it is up, whether its port expects TLS, or raise timeout_seconds."
            )
        if "certificate" in said or "TLS" in said:
            raise ResourceError(f'{where}: {said}; check "tls_ca" and "tls_server_name".')
        if error == errno.EACCES:
            raise ConfigError(
                f'{where}: the server {server} refuses the login ({said}); check "username", "password" and "database".'
            )
        if error == errno.EAGAIN:
            raise ResourceError(
                f"{where}: the server {server} takes nobody now ({said}); start when it does; "
                'if it has too many clients, raise its "maxclients".'
            )
        if error == errno.EPROTO:
            raise ResourceError(
                f"{where}: what listens at {server} does not speak Redis' protocol ({said}); "
                'check "port", and whether it expects TLS.'
            )
        raise ResourceError(
            f"{where}: the server {server} does not answer ({said}); see whether it runs and can be reached from here."
        )


def _greet(config: RespConfig, options: Mapping[str, Any], address: Address, deadline: Deadline) -> Servers:
    with _Questions(config, options, address, deadline) as server:
        info = _info(server, deadline)
        if info.get("loading") == "1":
            raise ResourceError(
                f"{config.where}: the server {server.text} is still loading its data; start when it is ready."
            )
        is_cluster = config.cluster or info.get("cluster_enabled") == "1"
        if not is_cluster and info.get("role") == "slave":
            raise ConfigError(
                f"{config.where}: the server {server.text} is a replica, which takes no writes; "
                'give its master, or "sentinel".'
            )
        addresses, slots = [address], list[SlotRange]()
        if is_cluster:
            addresses, slots = _cluster(config, server, address)
        return Servers(
            addresses, slots, _number(info.get("maxmemory")), _number(_setting(server, "proto-max-bulk-len"))
        )


def _info(server: _Questions, deadline: Deadline) -> dict[str, str]:
    """Waits while the server loads its data. Empty where this user may not ask."""
    while True:
        reply = server.ask("INFO")
        fields: dict[str, str] = {}
        if isinstance(reply, bytes):
            for line in reply.decode(errors="replace").splitlines()[:MAX_INFO_FIELDS]:
                name, colon, value = line.partition(":")
                if colon:
                    fields[name] = value
        is_loading = fields.get("loading") == "1" or (isinstance(reply, str) and reply.startswith("LOADING"))
        if not is_loading or deadline.left_seconds() < LOADING_RETRY_SECONDS:
            return fields
        deadline.clock.sleep(LOADING_RETRY_SECONDS)


def _cluster(config: RespConfig, server: _Questions, asked: Address) -> tuple[list[Address], list[SlotRange]]:
    reply = server.ask("CLUSTER", "SLOTS")
    if isinstance(reply, str):
        raise ConfigError(f'{config.where}: the server {server.text} is in no cluster ({reply}); leave out "cluster".')
    addresses: dict[Address, int] = {}
    slots: list[SlotRange] = []
    for entry in reply if isinstance(reply, list) else []:
        match entry:
            case [int() as first, int() as last, [bytes() | None as host, int() as port, *_], *_] if (
                0 <= first <= last < SLOTS and 0 < port <= MAX_PORT
            ):
                # A node that does not know its own name leaves it out.
                address = ((host or b"").decode(errors="replace") or asked[0], port)
            case _:
                raise ResourceError(f"{config.where}: the answer of {server.text} to CLUSTER SLOTS cannot be read.")
        slots.append((first, last, addresses.setdefault(address, len(addresses))))
    if len(addresses) > MAX_NODES:
        raise ResourceError(f"{config.where}: the cluster of {server.text} has more than {MAX_NODES} masters.")
    if not slots:
        raise ResourceError(
            f"{config.where}: the cluster of {server.text} has no slots assigned yet; start when it is ready."
        )
    return list(addresses), slots


def _ask_sentinels(config: RespConfig, options: Mapping[str, Any], clock: Clock) -> Address:
    assert config.sentinel is not None
    sentinel = config.sentinel
    own = {"username": sentinel.username, "password": sentinel.password, "database": 0}
    own |= {"username_file": "", "password_file": ""}
    seconds = OWN_SHARE * config.timeout_seconds / (len(sentinel.addresses) + 1)
    refusals: list[Exception] = []
    for address in sentinel.addresses:
        try:
            settings = {**options, **own, "timeout_seconds": seconds}
            with _Questions(config, settings, address, Deadline(clock, seconds)) as questions:
                reply = questions.ask("SENTINEL", "get-master-addr-by-name", sentinel.master)
        except (ConfigError, ResourceError) as error:
            refusals.append(error)
            continue
        match reply:
            case [bytes() as host, bytes() as port] if port.isdigit():
                if 0 < int(port[:6]) <= MAX_PORT:
                    return host.decode(errors="replace"), int(port)
        refusals.append(
            ConfigError(
                f"{config.where}: the Sentinel {questions.text} knows no master with the name {sentinel.master!r}."
            )
        )
    raise refusals[-1]


def _setting(server: _Questions, name: str) -> str | None:
    """None where this user, or a hosted server, does not tell."""
    match server.ask("CONFIG", "GET", name):
        case [bytes(), bytes() as value]:
            return value.decode(errors="replace")
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def check(config: RespConfig, clock: Clock = SYSTEM.clock) -> list[str]:
    """The `AdapterType.check` of this type; asks the servers."""
    limit_bytes, max_memory_bytes = config.limit_bytes, find_servers(config, clock).max_memory_bytes
    if limit_bytes and max_memory_bytes and limit_bytes > max_memory_bytes:
        return [
            f'{config.where}: "max_capacity_gb" is {limit_bytes} bytes, more than the server\'s maxmemory of '
            f"{max_memory_bytes}: the server refuses or evicts before this adapter does."
        ]
    return []
