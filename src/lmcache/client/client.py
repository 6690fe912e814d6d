"""The client that runs inside an engine process.

One thread, the *keeper*, connects, says HELLO, maps the server's memory, registers, and beats. Calls are made by the
engine's own threads. While the keeper knows the server to be away, a call fails at once; when the server is back, in
the same epoch or a new one, the keeper registers again by itself.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import zmq

from lmcache import __version__
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.client.transfer_mode import Transfer, WantedTransfer, agree
from lmcache.core.address import connect_endpoint
from lmcache.errors import KeyRefused, LMCacheError, RemoteError, ServerUnavailable, VersionError
from lmcache.memory.engine_memory import EngineMemory
from lmcache.protocol.messages import (
    METHODS,
    OLDEST_SUPPORTED_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Empty,
    ErrorCode,
    Hello,
    HelloReply,
    Message,
    Ping,
    PingReply,
    RegisterInstance,
    RegisterReply,
    RegisterWorker,
    Unregister,
)
from lmcache.transport.connection import Connection, Pending
from lmcache.transport.curve_keys import CurveFiles

log = logging.getLogger("lmcache.client")

Registration = RegisterInstance | RegisterWorker
_RegistrationKey = tuple[str, int]

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.25  # while nobody answers: what a restarted server waits for its engines
_REFUSED_PAUSE_SECONDS = 1.0  # while somebody answers whom this client cannot use
CONTROL_TIMEOUT_SECONDS = 2.0  # hello, ping, register: the server answers these whatever else it does
_CLOSE_TIMEOUT_SECONDS = 0.5
_SCHEDULER_SIDE = -1
_CLOSED = "The LMCache client is closed."


class ClientState(enum.Enum):
    CONNECTING = "connecting"
    READY = "ready"
    UNAVAILABLE = "unavailable"
    CLOSED = "closed"


class Client:
    """The connection of one engine process to the server: it heals itself, and no call waits past its deadline.
    Thread-safe.

    Shapes and units: times are seconds. Messages and replies are the structs of `protocol.messages`; in them tokens are
    packed u32, chunk hashes 32 bytes each, slots u64 offsets in `memory`, [rank][group][chunk].

    Errors: ServerUnavailable when there is no server, at once where that is known, else at the deadline; RemoteError
    for what the server refuses; VersionError from `connect` for a server that speaks another protocol.

    Example, with a server at `url` that counts 256 tokens a chunk:

    >>> from lmcache.client import Client
    >>> from lmcache.protocol.messages import Lookup, RegisterInstance
    >>> from lmcache.protocol.tokens import pack_tokens
    >>> client = Client(url)
    >>> owner = client.register(RegisterInstance("engine", "model", 1, 1, 10.0), timeout_seconds=5.0)
    >>> message = Lookup("engine", "request", "", 0, pack_tokens(range(600)))
    >>> reply = client.call("lookup", message, timeout_seconds=5.0)
    >>> reply.chunks, len(reply.hashes)  # nothing is stored of two full chunks
    (0, 64)
    >>> client.close()

    `on_new_server(client)` is called by the keeper for the first server and for every one that takes its place,
    before anything is registered there: `client.hello` and `client.memory` are new already, while the previous memory
    stays mapped until the callback returns. It must end whatever still copies from or to the previous memory. It may
    `declare` other registrations. It must not call `call`, `register` or `close`.
    """

    def __init__(
        self,
        url: str,
        *,
        environment: EngineEnvironment = ENGINE_SYSTEM,
        heartbeat_interval_seconds: float = 10.0,
        map_memory: bool = True,
        transfer: WantedTransfer = WantedTransfer.AUTO,
        on_new_server: Callable[[Client], None] | None = None,
        curve: CurveFiles | None = None,
        quiet_start: bool = False,
    ) -> None:
        """`map_memory` False: for those who move no frames. `curve`: for a server that asks for keys. `quiet_start`:
        until the first server answers, its absence is no news."""
        self.endpoint = connect_endpoint(url)
        self.hello: HelloReply | None = None
        self.memory: EngineMemory | None = None
        self.heartbeat_interval_seconds = heartbeat_interval_seconds
        self._environment = environment
        self._map_memory = map_memory
        self._wanted = transfer
        self._transfer: Transfer | None = None  # agreed on with the present server
        self._on_new_server = on_new_server
        self._curve = curve
        self._quiet_start = quiet_start
        self._changed = environment.condition()
        self._state = ClientState.CONNECTING
        self._reason = f"The LMCache server at {self.endpoint} has not answered yet."
        self._refusal: LMCacheError | None = None
        self._ready: Connection | None = None
        self._current: Connection | None = None
        self._registrations: dict[_RegistrationKey, Registration] = {}
        self._owners: dict[_RegistrationKey, int] = {}
        self._locked: dict[_RegistrationKey, int] = {}  # the keeper's: owner bytes held in the present memory
        self._refused: dict[_RegistrationKey, LMCacheError] = {}
        self._process = environment.random_bytes(16)
        self._counts: Callable[[], Sequence[int]] = tuple
        self._counted: Sequence[int] = ()  # of these, what the server has been told
        self._logged_transfer = self._logged_refusal = ""  # reasons
        self._beat_now = False
        self._closing = False
        self._keeper: threading.Thread | None = None
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)

    # ---- any thread --------------------------------------------------------------------------------------------------
    @property
    def state(self) -> ClientState:
        return self._state

    @property
    def server_epoch(self) -> bytes:
        """The epoch of the present server; empty before the first HELLO."""
        return self.hello.server_epoch if self.hello is not None else b""

    def start(self) -> None:
        """Begins to connect, without waiting. Idempotent."""
        with self._changed:
            if self._keeper is None and not self._closing:
                self._keeper = self._environment.thread(target=self._keep, name="lmcache-keeper", daemon=True)
                self._keeper.start()

    def connect(self, timeout_seconds: float) -> HelloReply:
        """Starts and waits until the server can be used. ServerUnavailable past the deadline; the keeper tries on."""
        self.start()
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready or self._refusal or self._closing, timeout_seconds):
                raise ServerUnavailable(self._reason)
            if self._ready is None:
                raise self._refusal or ServerUnavailable(self._reason)
            assert self.hello is not None
            return self.hello

    def declare(self, registration: Registration) -> None:
        """This client registers so with every server that it meets, and beats for it. Never waits."""
        key = _key(registration)
        with self._changed:
            self._registrations[key] = registration
            self._owners.pop(key, None)
            self._refused.pop(key, None)
        self._nudge()

    def register(self, registration: Registration, timeout_seconds: float) -> int:
        """`declare`, and waits until it is done; the owner number. RemoteError if the server refuses it."""
        key = _key(registration)
        self.start()
        self.declare(registration)
        with self._changed:
            done = self._changed.wait_for(
                lambda: key in self._owners or key in self._refused or self._refusal or self._closing, timeout_seconds
            )
            if key in self._owners:
                return self._owners[key]
            if done:
                raise self._refused.get(key) or self._refusal or ServerUnavailable(self._reason)
            raise ServerUnavailable(self._reason)

    def report(self, counts: Callable[[], Sequence[int]]) -> None:
        """Beats tell the server how far these grow from now on: `Ping.counts`. They never shrink."""
        self._counted = counts()
        self._counts = counts

    def owner(self, instance_id: str, worker_id: int = _SCHEDULER_SIDE) -> int | None:
        return self._owners.get((instance_id, worker_id))

    def submit(self, method: str, message: Message, timeout_seconds: float) -> Pending[Any]:
        """Sends a call and returns at once. ServerUnavailable at once while the server is known to be away, or refuses
        to register this client: the name that the call is made in may be somebody else's."""
        connection, refused = self._ready, self._refused
        if connection is None:
            raise ServerUnavailable(self._reason)
        if refused:
            raise ServerUnavailable(str(next(iter(refused.values()), "")))
        return connection.submit(method, message, METHODS[method][1], timeout_seconds)

    def call(self, method: str, message: Message, timeout_seconds: float) -> Any:
        """`submit`, then waits for the answer at most that long. RemoteError if the server refuses."""
        return self.submit(method, message, timeout_seconds).result()

    def close(self) -> None:
        """Unregisters as far as the server answers, lets go of the memory and ends the keeper. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._nudge()
        if self._keeper is not None:
            self._keeper.join(timeout=2 * CONTROL_TIMEOUT_SECONDS)
            if self._keeper.is_alive():  # in the engine's callback: what it uses has to stay
                log.warning("The LMCache client is still busy and is left to end with the process")
                return
        self._context.destroy(linger=0)
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def _nudge(self) -> None:
        """Makes the keeper beat and register at once."""
        self._beat_now = True
        connection = self._current
        if connection is not None:
            connection.interrupt()

    # ---- the keeper --------------------------------------------------------------------------------------------------
    def _keep(self) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not self._closing:
            connection = None
            try:
                connection = self._connect()
                self._current = connection
                self._establish(connection)
                self._become_ready(connection)
                pause_seconds = _FIRST_PAUSE_SECONDS
                self._beat_until_broken(connection)
            except ServerUnavailable as error:
                self._become_unavailable(str(error), None, tells=isinstance(error, KeyRefused))
            except LMCacheError as error:
                self._become_unavailable(str(error), error)
                pause_seconds = _REFUSED_PAUSE_SECONDS
            except Exception as error:
                log.exception("The LMCache client failed and tries again")
                self._become_unavailable(f"The LMCache client failed: {error}.", None)
                pause_seconds = _REFUSED_PAUSE_SECONDS
            finally:
                self._current = None
                if connection is not None:
                    connection.close()
            with self._changed:
                self._changed.wait_for(lambda: self._closing, pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        self._set_state(ClientState.CLOSED, _CLOSED, None)

    def _connect(self) -> Connection:
        keys = {"curve": self._curve.read()} if self._curve is not None else {}
        environment = self._environment
        return environment.connection(self.endpoint, self._context, environment.clock, self._note_trouble, **keys)

    def _establish(self, connection: Connection) -> None:
        connection.wait_established(CONTROL_TIMEOUT_SECONDS)
        message = Hello(PROTOCOL_VERSION, __version__, OLDEST_SUPPORTED_PROTOCOL_VERSION)
        hello = connection.submit("hello", message, HelloReply, CONTROL_TIMEOUT_SECONDS).result()
        if not OLDEST_SUPPORTED_PROTOCOL_VERSION <= hello.protocol_version <= PROTOCOL_VERSION:
            raise VersionError(
                f"The server at {self.endpoint} ({hello.server_version}) speaks protocol version "
                f"{hello.protocol_version}, this client {OLDEST_SUPPORTED_PROTOCOL_VERSION} to {PROTOCOL_VERSION}: "
                "upgrade the older side."
            )
        if hello.server_epoch != self.server_epoch:
            self._meet(hello)
        if self._owners:  # while this client was away, another one may have taken its name
            self._beat(connection)
        self._register_all(connection)

    def _meet(self, hello: HelloReply) -> None:
        """A server that this client has not seen: its memory takes the place of the previous one's."""
        transfer = agree(hello, self._wanted) if self._map_memory else None
        self._log_transfer(transfer)
        memory = transfer.memory if transfer is not None else None
        previous_hello, previous_memory = self.hello, self.memory
        previous_transfer = self._transfer
        self.hello, self.memory, self._transfer = hello, memory, transfer
        with self._changed:
            self._owners.clear()
            self._refused.clear()
        try:
            if self._on_new_server is not None:
                self._on_new_server(self)
        except BaseException:
            self.hello, self.memory, self._transfer = previous_hello, previous_memory, previous_transfer
            if memory is not None:
                memory.close()
            raise
        self._locked.clear()
        if previous_memory is not None:
            previous_memory.close()

    def _log_transfer(self, transfer: Transfer | None) -> None:
        if transfer is not None and transfer.reason and transfer.reason != self._logged_transfer:
            self._logged_transfer = transfer.reason
            level = logging.INFO if self._wanted is WantedTransfer.SOCKET else logging.WARNING
            log.log(level, "KV travels over the socket, slower than through shared memory: %s", transfer.reason)

    def _register_all(self, connection: Connection, *, retry_refused: bool = True) -> None:
        """Registers whatever is declared and not yet known to this server."""
        with self._changed:
            missing = {
                key: registration
                for key, registration in self._registrations.items()
                if key not in self._owners and (retry_refused or key not in self._refused)
            }
        for key, registration in missing.items():
            method, message = "register_instance", msgspec.structs.replace(registration, process=self._process)
            if isinstance(message, RegisterWorker):
                method, message = "register_worker", self._with_transfer(message)
            try:
                reply = connection.submit(method, message, RegisterReply, CONTROL_TIMEOUT_SECONDS).result()
            except RemoteError as error:
                with self._changed:
                    news = str(self._refused.get(key)) != str(error)
                    self._refused[key] = error
                    self._changed.notify_all()
                if news:
                    log.error("The LMCache server refused a registration, so nothing is cached: %s", error)
                continue
            self._lock_owner(key, reply.owner)
            with self._changed:
                if self._registrations.get(key) is registration:  # not declared anew meanwhile
                    self._owners[key] = reply.owner
                    self._refused.pop(key, None)
                self._changed.notify_all()

    def _with_transfer(self, registration: RegisterWorker) -> RegisterWorker:
        if self._transfer is None:
            return registration
        return msgspec.structs.replace(
            registration, transfer_mode=self._transfer.mode.value, transfer_reason=self._transfer.reason
        )

    def _lock_owner(self, key: _RegistrationKey, owner: int) -> None:
        """Holds the byte that shows the server that this process runs."""
        previous = self._locked.get(key)
        if self.memory is None or previous == owner:
            return
        self.memory.lock_owner(owner)
        self._locked[key] = owner
        if previous is not None:
            self.memory.unlock_owner(previous)

    def _beat_until_broken(self, connection: Connection) -> None:
        nudged = True
        while not self._closing:
            self._beat_now = False
            self._register_all(connection, retry_refused=not nudged)
            self._beat(connection)
            nudged = self._beat_now
            if not nudged and not self._closing and connection.wait_broken(self.heartbeat_interval_seconds):
                raise ServerUnavailable(connection.broken)
            nudged = self._beat_now
        self._leave(connection)

    def _leave(self, connection: Connection) -> None:
        """What this client held need not wait until the server misses it."""
        with self._changed:
            self._reason = _CLOSED
            self._ready = None
            owners = list(self._owners)
        self._set_state(ClientState.CLOSED, _CLOSED, None)
        # All are sent before the first answer: a server that stands still meanwhile hears of each when it goes on.
        farewells = [
            connection.submit("unregister", Unregister(*key, self._process), Empty, _CLOSE_TIMEOUT_SECONDS)
            for key in owners
        ]
        for farewell in farewells:
            farewell.result()

    def _beat(self, connection: Connection) -> None:
        keys = list(self._owners) or [("", _SCHEDULER_SIDE)]
        for instance_id, worker_id in keys:
            counts = self._counts()
            growth = [count - told for count, told in zip_longest(counts, self._counted, fillvalue=0)]
            message = Ping(instance_id, worker_id, self._process, growth)
            reply = connection.submit("ping", message, PingReply, CONTROL_TIMEOUT_SECONDS).result()
            if reply.server_epoch != self.server_epoch:
                raise ServerUnavailable(f"Another server has taken the place of the one at {self.endpoint}.")
            if reply.registered:
                self._counted = counts
            if instance_id and not reply.registered:
                log.warning(
                    "The LMCache server forgot instance %s, worker %d: registering again", instance_id, worker_id
                )
                with self._changed:
                    self._owners.pop((instance_id, worker_id), None)
                self._beat_now = True

    def _note_trouble(self, error: Exception) -> None:
        """A call failed: whether the server is there and knows this client is asked at once, not at the next beat."""
        timed_out = isinstance(error, ServerUnavailable)
        if timed_out or (isinstance(error, RemoteError) and error.code == ErrorCode.UNKNOWN_INSTANCE):
            self._nudge()

    def _become_ready(self, connection: Connection) -> None:
        assert self.hello is not None
        with self._changed:
            self._ready = connection
        if self._state is not ClientState.READY:
            log.info(
                "Connected to the LMCache server at %s (version %s, boot %s)",
                self.endpoint,
                self.hello.server_version,
                self.hello.server_epoch.hex()[:8],
            )
        self._logged_refusal = ""
        self._set_state(ClientState.READY, "", None)

    def _become_unavailable(self, reason: str, refusal: LMCacheError | None, *, tells: bool = False) -> None:
        """Logs the first reason, and later ones of somebody who answers (`refusal`, `tells`) and says another."""
        with self._changed:
            self._reason = reason  # before it is read: calls fail from here on
            self._ready = None
        tells = tells or refusal is not None
        news = self._state is not ClientState.UNAVAILABLE or (tells and reason != self._logged_refusal)
        if news and not self._closing:
            level = logging.DEBUG if self._quiet_start and self.hello is None and refusal is None else logging.WARNING
            log.log(level, "The LMCache server is unavailable, so nothing is cached until it is back: %s", reason)
        if tells:
            self._logged_refusal = reason
        self._set_state(ClientState.UNAVAILABLE, reason, refusal)

    def _set_state(self, state: ClientState, reason: str, refusal: LMCacheError | None) -> None:
        with self._changed:
            self._state, self._reason, self._refusal = state, reason, refusal
            self._changed.notify_all()


def _key(registration: Registration) -> _RegistrationKey:
    if isinstance(registration, RegisterInstance):
        return registration.instance_id, _SCHEDULER_SIDE
    return registration.instance_id, registration.worker_id
