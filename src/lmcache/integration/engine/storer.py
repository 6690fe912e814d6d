"""Stores: slots from the server, the copy, the commit. In the background, so that no forward pass waits for any of it,
or by the thread that asks (`Storer.store`)."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from lmcache import _native
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.core.key_batch import ChunkHashes
from lmcache.errors import LMCacheError, ProtocolError, RemoteError, ResourceError, ServerUnavailable, StaleServer
from lmcache.integration.engine.connector_metadata import StoreOrder
from lmcache.integration.engine.frame_names import WorkerIdentity
from lmcache.integration.engine.transfer_backend import COPIED, TransferBackend, TransferJob
from lmcache.protocol.messages import Commit, Reserve, ReserveReply

if TYPE_CHECKING:
    from lmcache.client.client import Client
    from lmcache.transport.connection import Pending

log = logging.getLogger("lmcache.engine")

T = TypeVar("T")

RESERVE_SECONDS = 1.0  # source blocks are pinned meanwhile
COMMIT_SECONDS = 5.0
_LATE_SECONDS = 60.0
_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class _Unsettled:
    """A reservation whose end is still to be sent to the server, and the epoch of that server. Without a number and
    an answer to come: one whose number nobody knows."""

    server_epoch: bytes
    written: bytes
    reservation: int = 0
    present: bytes = b""  # alike: what the server had already
    pending: Pending[ReserveReply] | None = None  # the answer that names the reservation is still to come


class Storer:
    """One order at a time, on a thread of its own or the caller's. An order has ended when its source blocks are no
    longer read, whatever became of it, and is settled when the server knows its end, or is gone."""

    def __init__(
        self,
        client: Client,
        identity: WorkerIdentity,
        backend: Callable[[], TransferBackend | None],
        register_again: Callable[[], None],
        environment: EngineEnvironment = ENGINE_SYSTEM,
        on_stored: Callable[[StoreOrder, bytes], None] | None = None,
    ) -> None:
        """`register_again` makes the server drop whatever this worker has reserved and does not know of. `on_stored` is
        told once of each order, by its thread, which [group][chunk] the server has now; empty: of none is that known.
        """
        self._on_stored = on_stored
        self._clock = environment.clock
        self._client = client
        self._identity = identity
        self._backend = backend
        self._register_again = register_again
        self._orders: queue.SimpleQueue[tuple[StoreOrder, _native.CudaFence | None] | None] = environment.queue()
        self._turn = environment.lock()  # held while an order is stored, or what an earlier one left is settled
        self._changed = environment.condition()
        self._ended: Counter[int] = Counter()
        self._settled: Counter[int] = Counter()
        self._running = 0
        self._closing = False
        self._held: _Unsettled | None = None  # of the order that is stored now, if it ends as it is
        self._unsettled: list[_Unsettled] = []
        self._settle_at = 0.0  # not before, because orders wait meanwhile
        self._thread = environment.thread(target=self._run, name="lmcache-store", daemon=True)
        self._thread.start()

    def drop(self, order: StoreOrder) -> None:
        """An order that is not to be stored, or cannot be, is over too."""
        self._end(order.job, accepted=False)
        self._settle(order, b"")

    def submit(self, order: StoreOrder, computed: _native.CudaFence | None) -> None:
        """The order's blocks are not read before `computed`."""
        with self._changed:
            is_taken = self._identity.stores and not self._closing
            if is_taken:
                self._running += 1
                self._orders.put((order, computed))
        if not is_taken:
            self.drop(order)

    def store(self, order: StoreOrder, computed: _native.CudaFence | None) -> bytes:
        """`submit`, but here and now, without a change of threads. Which [group][chunk] the server has then; empty: of
        none is that known. An interrupt of the calling thread ends the order, too."""
        is_taken = False
        try:
            with self._turn:
                if not self._identity.stores or self._closing:
                    return b""
                with self._changed:
                    is_taken = True
                    self._running += 1
                try:
                    return _guarded(functools.partial(self._store, order, computed)) or b""
                finally:
                    if self._unsettled:
                        self._orders.put(None)  # the thread is to look after it
        finally:
            if not is_taken:
                self.drop(order)

    @property
    def busy(self) -> bool:
        return self._running > 0

    def take_ended(self) -> tuple[Counter[int], Counter[int]]:
        """(orders that have ended, orders that are settled), each named once."""
        with self._changed:
            ended, self._ended = self._ended, Counter()
            settled, self._settled = self._settled, Counter()
        return ended, settled

    def wait_ended(self, seconds: float) -> None:
        """Until some order has ended, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, seconds)

    def wait_idle(self, seconds: float) -> None:
        """Until every order has ended, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, seconds)

    def check_idle(self) -> None:
        """AssertionError if a store is under way, or its end is still to be sent to the server."""
        held = {"stores": self._running, "unsettled": len(self._unsettled)}
        assert not any(held.values()), f"The storer is not idle: {held}"

    def close(self, drain_seconds: float) -> None:
        """Ends what is queued as far as time allows. Idempotent."""
        with self._changed:
            self._closing = True
            self._orders.put(None)
        self._thread.join(drain_seconds)

    # ---- the thread --------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            try:
                queued = self._orders.get(timeout=_RETRY_SECONDS if self._unsettled else None)
            except queue.Empty:
                queued = None
            with self._turn:
                if queued is not None:
                    _guarded(functools.partial(self._store, *queued))
                elif self._closing and self._orders.empty():  # a None is from `store`, too
                    return
                is_due = self._clock.monotonic() >= self._settle_at  # also where orders never cease
                if self._unsettled and is_due and not self._closing:
                    _guarded(self._settle_all)

    def _store(self, order: StoreOrder, computed: _native.CudaFence | None) -> bytes:
        stored = b""
        try:
            try:
                if computed is not None:
                    _await(computed)  # here, so that no copier's thread is held, nor a slot, while the engine computes
                reserved = self._reserve_and_copy(order)
            finally:
                self._end(order.job)
            committed = self._commit(reserved) if reserved.reservation else 0
            self._held = None
            stored = reserved.present
            if committed == reserved.written.count(COPIED):  # else it ended before: what it wrote is not published
                stored = bytes(map(max, stored, reserved.written))
        except (RemoteError, ProtocolError):  # an answer, which leaves nothing reserved
            self._held = None
            raise
        finally:
            held, self._held = self._held, None
            if held is not None:
                self._put_off(held)
            self._settle(order, stored)
        return stored

    def _reserve_and_copy(self, order: StoreOrder) -> _Unsettled:
        """Returns when the source blocks are no longer read; what is to be committed then."""
        backend = self._backend()
        if backend is None or backend.server_epoch != order.server_epoch:
            raise StaleServer("the server that it was meant for is gone")
        identity = self._identity
        message = Reserve(
            identity.instance_id, identity.worker_id, order.cache_salt, order.hashes, order.wanted, order.request_id
        )
        nothing = bytes(len(order.blocks) * len(ChunkHashes(order.hashes)))
        self._held = _Unsettled(order.server_epoch, nothing)
        try:
            pending = self._client.submit("reserve", message, _LATE_SECONDS)
        except LMCacheError:  # not sent
            self._held = None
            raise
        self._held = _Unsettled(self._client.server_epoch, nothing, pending=pending)
        if self._held.server_epoch != order.server_epoch:  # it came in between, and may hand out slots nobody fills
            raise StaleServer("the server that it was meant for is gone")
        if not pending.wait(RESERVE_SECONDS):
            raise ServerUnavailable("no slots were handed out in time")
        reply = pending.result()
        present = _present(reply)
        if reply.reservation == 0:
            return _Unsettled(order.server_epoch, nothing, present=present)
        if order.wanted:
            reply.slots = _only_wanted(reply.slots, order.wanted)
        written = self._copied(backend, order, reply) or nothing
        self._held = _Unsettled(order.server_epoch, written, reply.reservation, present)
        return self._held

    def _copied(self, backend: TransferBackend, order: StoreOrder, reply: ReserveReply) -> bytes:
        """One byte per [group][chunk]; empty: nothing is copied. An interrupt waits for the copies, too: slots that
        something may still write to are not given back."""
        held, self._held = self._held, None
        jobs: Sequence[TransferJob] = ()
        written = b""
        try:
            jobs = backend.submit_store(order, reply)
            written = b"".join([_result(job) for job in jobs])
        except BaseException as fault:
            for job in jobs:
                with contextlib.suppress(Exception):  # that of a job which has failed
                    _result(job)
            if isinstance(fault, LMCacheError):
                log.debug("Nothing was copied into reserved chunks: %s", fault)
            elif isinstance(fault, Exception):  # the root of one copy: its reservation is ended all the same
                log.exception("A copy into L1 failed")
            else:
                self._held = held
                raise
        self._held = held
        return written

    def _commit(self, unsettled: _Unsettled) -> int | None:
        """How many objects are published by it; None when the commit has to be repeated."""
        if unsettled.server_epoch != self._client.server_epoch:
            return 0
        identity = self._identity
        message = Commit(identity.instance_id, identity.worker_id, unsettled.reservation, unsettled.written)
        try:
            return int(self._client.call("commit", message, COMMIT_SECONDS).committed)
        except ServerUnavailable:
            self._put_off(unsettled)
            return None

    def _put_off(self, unsettled: _Unsettled) -> None:
        self._unsettled.append(unsettled)
        self._settle_at = self._clock.monotonic() + _RETRY_SECONDS

    def _settle_all(self) -> None:
        """Repeats the commits that got no answer, and ends reservations whose own answer was late. Those of a previous
        server epoch are dropped."""
        unsettled, self._unsettled = deque(self._unsettled), []
        try:
            while unsettled and self._settle_reservation(unsettled.popleft()):
                pass
        finally:  # where one failed the rest waits: each may take seconds, and orders wait behind them
            self._unsettled += unsettled

    def _settle_reservation(self, unsettled: _Unsettled) -> bool:
        """False when the server did not answer."""
        if unsettled.server_epoch != self._client.server_epoch:
            return True
        if unsettled.pending is None and not unsettled.reservation:
            self._register_again()
            return True
        if unsettled.pending is None:
            return self._commit(unsettled) is not None
        if not unsettled.pending.done():
            self._put_off(unsettled)
        else:
            self._give_back(unsettled.pending, unsettled.written)
        return True

    def _give_back(self, pending: Pending[ReserveReply], nothing: bytes) -> None:
        """Slots that were handed out too late."""
        server_epoch = self._client.server_epoch
        try:
            reply = pending.result()
        except ServerUnavailable:
            # The answer is lost, the slots perhaps not. No copy of this worker runs now: it is this thread's turn.
            self._register_again()
            return
        except LMCacheError:
            return
        if reply.reservation:
            self._commit(_Unsettled(server_epoch, nothing, reply.reservation))

    def _end(self, job: int, *, accepted: bool = True) -> None:
        with self._changed:
            self._ended[job] += 1
            self._running -= accepted
            self._changed.notify_all()

    def _settle(self, order: StoreOrder, stored: bytes) -> None:
        with self._changed:
            self._settled[order.job] += 1
            self._changed.notify_all()
        if self._on_stored is not None:
            self._on_stored(order, stored)


def _guarded(action: Callable[[], T]) -> T | None:
    """The root of one order, or of one look at what is unsettled. None where it failed."""
    try:
        return action()
    except LMCacheError as error:
        log.debug("A store was given up: %s", error)
    except Exception:
        log.exception("A store failed")
    return None


def _await(computed: _native.CudaFence) -> None:
    try:
        computed.wait()
    except RuntimeError as error:
        raise ResourceError(f"The GPU does not answer: {error}.") from error


def _only_wanted(slots: bytes, wanted: bytes) -> bytes:
    """A server of an earlier version hands out slots for what is not wanted; nothing may be written there."""
    pairs = zip(array("Q", slots), wanted, strict=True)
    return array("Q", [slot if is_wanted else _native.NO_SLOT for slot, is_wanted in pairs]).tobytes()


def _present(reply: ReserveReply) -> bytes:
    """One byte per [group][chunk], 1 where there is no slot because the server has the object, or another worker is
    storing it. The last chunks may have none for want of room."""
    slots = array("Q", reply.slots)
    if not reply.chunks_without_room:
        return bytes(slot == _native.NO_SLOT for slot in slots)
    return bytes(len(slots))


def _result(job: TransferJob) -> bytes:
    while (result := job.wait(1.0)) is None:
        pass
    return result
