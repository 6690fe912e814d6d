"""The half of the connector that lives in a vLLM worker: copies between KV blocks and L1, as it is told to.

Loads are submitted to native threads and polled once a step; every load that was ordered is reported as ended exactly
once, whatever happens, because vLLM keeps the request and its blocks until then. Stores go to a thread of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache import _native
from lmcache.client.client import Client
from lmcache.core.limits import MAX_TENSORS
from lmcache.device.affinity import engine_cpus, unpinned
from lmcache.device.cpu import PagedGroup
from lmcache.device.cuda import Gpu
from lmcache.errors import LayoutRefused, LMCacheError
from lmcache.integration.vllm.attachment import COPIED, UNREADABLE, AnyAttachment, Attachment, TransferJob
from lmcache.integration.vllm.frame_names import WorkerIdentity
from lmcache.integration.vllm.orders import LoadOrder, StepOrders, WorkerReport
from lmcache.integration.vllm.socket_attachment import SocketAttachment
from lmcache.integration.vllm.storer import Storer
from lmcache.protocol.messages import RegisterWorker

log = logging.getLogger("lmcache.vllm")

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
    """What the workers' loads came to since the last report."""

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
    ) -> None:
        """`make_client` gets what the client has to call for every life of the server; the client is started here.
        `gpu`: where the groups' memory is, unless in the host's."""
        self._identity = identity
        self._groups = tuple(groups)
        self._gpu = gpu
        self._gpu_failure_said = False
        cpus = engine_cpus()
        self._threads = min(_MAX_COPY_THREADS, len(cpus))
        self._attachment: AnyAttachment | None = None
        self._refusal_said = False
        self._loads: list[_Load] = []
        self._ended = EndedLoads()
        self._idle_step = False
        self._unreadable: dict[str, frozenset[int]] = {}
        self._unreadable_said = False
        with unpinned(cpus):
            self.client = make_client(self._meet)
            self._storer = Storer(self.client, identity, lambda: self._attachment, self._register)
            self.client.start()

    # ---- the keeper's thread -----------------------------------------------------------------------------------------
    def _meet(self, client: Client) -> None:
        """A server life that this worker has not seen: leave the former memory, then take hold of the new one."""
        former, self._attachment = self._attachment, None
        if former is not None:
            former.close()
        assert client.hello is not None
        hello = client.hello
        life = hello.boot_token, hello.chunk_tokens, self._groups, self._identity, self._threads, self._gpu
        try:
            attachment: AnyAttachment
            if client.memory is not None:
                attachment = Attachment(client.memory, *life)
            else:
                attachment = SocketAttachment(client, *life)
        except (LayoutRefused, RuntimeError) as refusal:
            if self._gpu is None and not isinstance(refusal, LayoutRefused):
                raise  # RuntimeError is how a GPU's driver refuses
            if not self._refusal_said:
                level = logging.ERROR if self._identity.worker_id == 0 else logging.INFO
                log.log(level, "This engine runs uncached: %s", refusal)
            self._refusal_said = True
            return
        self._attachment = attachment
        self._register()

    def _register(self) -> None:
        attachment = self._attachment
        if attachment is None:
            return
        self.client.declare(
            RegisterWorker(
                self._identity.instance_id,
                self._identity.worker_id,
                self._identity.kv_rank,
                [layout.fingerprint for layout in attachment.layouts],
                [layout.payload_bytes for layout in attachment.layouts],
                self._identity.stores,
                self.client.heartbeat_interval_seconds,
                [tensor for layout in attachment.layouts for tensor in layout.tensors][:MAX_TENSORS],
            )
        )

    # ---- a step ------------------------------------------------------------------------------------------------------
    def start_loads(self, orders: StepOrders, *, idle_step: bool) -> None:
        """`idle_step`: the engine has no forward pass to run in this step."""
        self._idle_step = idle_step
        for order in orders.loads:
            attachment = self._attachment
            try:
                if attachment is None or attachment.boot_token != order.boot_token:
                    raise LayoutRefused("it names slots of another life of the server")
                self._loads.append(_Load(order, attachment.submit_load(order, self._fence())))
            except LMCacheError as error:
                log.warning("A load for request %s is not possible: %s", order.request_id, error)
                self._load_ended(order, None)
            except Exception:
                log.exception("A load for request %s failed", order.request_id)
                self._load_ended(order, None)

    def start_stores(self, orders: StepOrders) -> None:
        for order in orders.stores:
            try:
                self._storer.submit(order, self._fence())
            except LMCacheError as error:
                log.warning("A store is not possible: %s", error)
                self._storer.drop(order)
        if orders.await_stores:
            self.await_stores_read()

    def _fence(self) -> _native.CudaFence | None:
        """What the engine has launched so far, a forward pass that makes or still uses the blocks included."""
        return self._gpu.fence() if self._gpu is not None else None

    def _say_gpu_failure(self) -> None:
        failure = self._gpu.take_failure() if self._gpu is not None else ""
        if failure and not self._gpu_failure_said:
            self._gpu_failure_said = True
            log.error("The GPU failed to copy KV (%s): it is computed again, or not stored (said once)", failure)

    def ended_loads(self) -> EndedLoads:
        """The loads that have ended since the last call. Waits a little when the engine has nothing else to do."""
        wait_seconds = IDLE_WAIT_SECONDS if self._idle_step and not self._ended.requests else 0.0
        if wait_seconds and not self._loads and self._storer.busy:
            self._storer.wait_ended(wait_seconds)
        self._say_gpu_failure()
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
            if not self._unreadable_said:
                self._unreadable_said = True
                log.error("L1 held a chunk that is not what was stored: it is computed again (said once)")
        if len(order.groups) == 1:
            self._ended.failed_blocks |= failed
        elif failed:
            self._ended.failed_requests.add(order.request_id)

    def close(self) -> None:
        """Ends what is under way, as far as a short time allows, and leaves the server."""
        self._storer.close(DRAIN_SECONDS)
        attachment = self._attachment
        if attachment is not None:
            attachment.close()
        self.client.close()
