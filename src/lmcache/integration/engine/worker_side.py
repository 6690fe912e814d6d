"""The half of the connector in an engine's worker: copies between KV blocks and L1, as the scheduler side orders.

Loads are submitted to native threads and polled once a step; every load that was ordered is reported as ended exactly
once, whatever happens, because the engine keeps the request and its blocks until then. Stores have their own thread,
or are done by the thread that asks (`store`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache import _native
from lmcache.client.client import Client
from lmcache.client.engine_environment import ENGINE_SYSTEM, EngineEnvironment
from lmcache.core.limits import MAX_TENSORS
from lmcache.device.affinity import engine_cpus, near_cpus, unpinned
from lmcache.device.cpu import PagedGroup
from lmcache.device.cuda import Gpu
from lmcache.errors import LayoutRefused, LMCacheError, StaleServer
from lmcache.integration.engine.connector_metadata import ConnectorMetadata, LoadOrder, StoreOrder, WorkerReport
from lmcache.integration.engine.frame_names import WorkerIdentity
from lmcache.integration.engine.shm_transfer import ShmTransfer
from lmcache.integration.engine.socket_transfer import SocketTransfer
from lmcache.integration.engine.store_telemetry import StoreTelemetry
from lmcache.integration.engine.storer import Storer
from lmcache.integration.engine.transfer_backend import COPIED, UNREADABLE, TransferBackend, TransferJob, WorkerKV
from lmcache.protocol.messages import RegisterWorker
from lmcache.telemetry.log_limiter import LogLimiter

log = logging.getLogger("lmcache.engine")

IDLE_WAIT_SECONDS = 0.004  # a step without a forward pass waits this long for copies instead of spinning
DRAIN_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_MAX_COPY_THREADS = 4


@dataclass
class _Load:
    order: LoadOrder
    jobs: Sequence[TransferJob]


@dataclass
class EndedLoads:
    """Loads of this worker that have ended since the last report, and those of them that failed."""

    requests: set[str] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class WorkerSide:
    def __init__(
        self,
        make_client: Callable[[Callable[[Client], None]], Client],
        identity: WorkerIdentity,
        groups: Sequence[PagedGroup],
        gpu: Gpu | None = None,
        environment: EngineEnvironment = ENGINE_SYSTEM,
        telemetry: StoreTelemetry | None = None,
    ) -> None:
        """`make_client` gets what the client has to call for every server that it meets; the client is started here.
        `gpu`: where the groups' memory is, unless in the host's. `telemetry` is told of stores."""
        self.identity = identity
        self._gpu = gpu
        self._telemetry = telemetry
        cpus = near_cpus(engine_cpus(), gpu.address if gpu is not None else "")
        self._kv = WorkerKV(identity, tuple(groups), min(_MAX_COPY_THREADS, len(cpus)), gpu, environment)
        self._backend: TransferBackend | None = None
        self._loads: list[_Load] = []
        self._ended = EndedLoads()
        self._idle_step = False
        self._unreadable: dict[str, frozenset[int]] = {}
        self._once = LogLimiter()  # log lines that are written once
        self._say_what_stays_exact()
        with unpinned(cpus):
            self.client = make_client(self._meet)
            if telemetry is not None:
                self.client.report(telemetry.counts)
            on_stored = telemetry.settled if telemetry is not None else None
            self._storer = Storer(self.client, identity, lambda: self._backend, self._register, environment, on_stored)
            self.client.start()

    def _say_what_stays_exact(self) -> None:
        exact = sum(not group.may_be_approximate for group in self._kv.groups)
        if self.identity.lossy_serde and exact and self.identity.worker_id == 0:
            log.warning(
                "%d of %d KV cache groups are not attention in bfloat16: they never go through the lossy serde %s",
                *(exact, len(self._kv.groups), self.identity.lossy_serde),
            )

    @property
    def backend(self) -> TransferBackend | None:
        """To the present server; None while there is none that suits."""
        return self._backend

    # ---- the keeper's thread -----------------------------------------------------------------------------------------
    def _meet(self, client: Client) -> None:
        """A server that this worker has not seen: transfers with the previous one end, those with this one begin."""
        previous, self._backend = self._backend, None
        if previous is not None:
            previous.close()
        assert client.hello is not None
        try:
            backend: TransferBackend
            if client.memory is not None:
                backend = ShmTransfer(client.memory, client.hello, self._kv)
            else:
                backend = SocketTransfer(client, client.hello, self._kv)
        except (LayoutRefused, RuntimeError) as refusal:
            if self._gpu is None and not isinstance(refusal, LayoutRefused):
                raise  # RuntimeError is how a GPU's driver refuses
            if self._once.due("refusal"):
                level = logging.ERROR if self.identity.worker_id == 0 else logging.INFO
                log.log(level, "This engine runs uncached: %s", refusal)
            return
        self._backend = backend
        self._register()

    def _register(self) -> None:
        backend = self._backend
        if backend is None:
            return
        self.client.declare(
            RegisterWorker(
                self.identity.instance_id,
                self.identity.worker_id,
                self.identity.kv_rank,
                self._kv.layout_names(backend.layouts),
                [layout.payload_bytes for layout in backend.layouts],
                self.identity.stores,
                self.client.heartbeat_interval_seconds,
                [tensor for layout in backend.layouts for tensor in layout.tensors][:MAX_TENSORS],
            )
        )

    # ---- a step ------------------------------------------------------------------------------------------------------
    def start_loads(self, metadata: ConnectorMetadata, *, idle_step: bool) -> None:
        """`idle_step`: the engine has no forward pass to run in this step."""
        self._idle_step = idle_step
        for order in metadata.impossible_loads:
            self._ended.requests.add(order.request_id)
            self._ended.failed_requests.add(order.request_id)
        for order in metadata.loads:
            try:
                backend = self._backend
                if backend is None or backend.server_epoch != order.server_epoch:
                    raise StaleServer("it names slots of another server epoch")
                self._loads.append(_Load(order, backend.submit_load(order, self._fence())))
            except LMCacheError as error:
                log.warning("A load for request %s is not possible: %s", order.request_id, error)
                self._load_ended(order, None)
            except Exception:
                log.exception("A load for request %s failed", order.request_id)
                self._load_ended(order, None)

    def start_stores(self, metadata: ConnectorMetadata) -> None:
        if self._telemetry is not None:
            self._telemetry.ordered(metadata.stores)
        for order in metadata.stores:
            try:
                self._storer.submit(order, self._fence())
            except LMCacheError as error:
                log.warning("A store is not possible: %s", error)
                self._storer.drop(order)
            except Exception:  # the root of one store
                log.exception("A store failed")
                self._storer.drop(order)
        if metadata.await_stores:
            self.await_stores_read()

    def store(self, order: StoreOrder) -> bytes:
        """Stores on the calling thread; the blocks are not read any more when it returns. Which [group][chunk] the
        server has now; empty: of none is that known."""
        if self._telemetry is not None:
            self._telemetry.ordered([order])
        try:
            computed = self._fence()
        except Exception:  # the root of one store
            log.exception("A store failed")
            self._storer.drop(order)
            return b""
        return self._storer.store(order, computed)

    def _fence(self) -> _native.CudaFence | None:
        """What the engine has launched so far, a forward pass that makes or still uses the blocks included."""
        return self._gpu.fence() if self._gpu is not None else None

    def _log_gpu_failure(self) -> None:
        failure = self._gpu.take_failure() if self._gpu is not None else ""
        if failure and self._once.due("GPU failure"):
            log.error("The GPU failed to copy KV (%s): it is computed again, or not stored (said once)", failure)

    def ended_loads(self) -> EndedLoads:
        """The loads that have ended since the last call. Waits a little when the engine has nothing else to do."""
        wait_seconds = IDLE_WAIT_SECONDS if self._idle_step and not self._ended.requests else 0.0
        if wait_seconds and not self.loading and self._storer.busy:
            self._storer.wait_ended(wait_seconds)
        self._log_gpu_failure()
        running = []
        for load in self._loads:
            results = [job.wait(wait_seconds) for job in load.jobs]
            if any(result is None for result in results):
                running.append(load)
            else:
                self._load_ended(load.order, [result for result in results if result is not None])
            wait_seconds = 0.0
        self._loads = running
        ended, self._ended = self._ended, EndedLoads()
        return ended

    def await_loads(self) -> EndedLoads:
        """All that were started. For engines whose forward pass needs them at once."""
        for load in self._loads:
            for job in load.jobs:
                while job.wait(_LOOK_SECONDS) is None:
                    pass
        return self.ended_loads()

    @property
    def loading(self) -> bool:
        """Whether some load has not ended, or its end was not yet seen."""
        return bool(self._loads)

    @property
    def storing(self) -> bool:
        """Whether some store may still read the engine's blocks."""
        return self._storer.busy

    def await_store_read(self, seconds: float) -> None:
        """Until some store has stopped reading, or the time is over."""
        self._storer.wait_ended(seconds)

    def await_stores_read(self) -> None:
        """Returns when no store reads the engine's blocks. For engines that may reuse blocks without asking."""
        while self._storer.busy:
            self._storer.wait_idle(_LOOK_SECONDS)

    def report(self) -> WorkerReport | None:
        ended, settled = self._storer.take_ended()
        unreadable, self._unreadable = self._unreadable, {}
        return WorkerReport(ended, unreadable, settled) if ended or settled or unreadable else None

    def _load_ended(self, order: LoadOrder, results: Sequence[bytes] | None) -> None:
        """`results`: one byte a chunk for every group, or None when nothing was copied."""
        self._ended.requests.add(order.request_id)
        unreadable: set[int] = set()
        failed: set[int] = set()
        for index, load in enumerate(order.groups):
            chunks: Sequence[int] = range(load.first_chunk, order.hit_chunks)
            if results is not None:
                flags = list(zip(chunks, results[index], strict=True))
                chunks = [chunk for chunk, flag in flags if flag != COPIED]
                unreadable.update(chunk for chunk, flag in flags if flag == UNREADABLE)
            failed.update(block for chunk in chunks for block in load.written_blocks(chunk, order.hit_chunks))
        if unreadable:
            self._unreadable[order.request_id] = frozenset(unreadable)
            if self._once.due("unreadable"):
                log.error("L1 held a chunk that is not what was stored: it is computed again (said once)")
        if not order.all_or_nothing:
            self._ended.failed_blocks |= failed
        elif failed:
            self._ended.failed_requests.add(order.request_id)

    def check_idle(self) -> None:
        """AssertionError if a load or a store is under way, or the server still has to hear of the end of one."""
        assert not self.loading, f"{len(self._loads)} loads are under way"
        self._storer.check_idle()

    def close(self) -> None:
        """Ends what is under way, as far as a short time allows, and leaves the server."""
        self._storer.close(DRAIN_SECONDS)
        backend = self._backend
        if backend is not None:
            backend.close()
        self.client.close()
