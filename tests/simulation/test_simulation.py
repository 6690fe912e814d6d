"""The real index, leases, controllers and runners in simulated time, with media and engines that do everything wrong,
from a printed seed and against a dictionary: a hit has exactly the bytes that were stored for its key, and at the end
nothing is held, whatever happened.

TEST_SIMULATION_STEPS steps for each setting (2,000); TEST_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lmcache import _native
from lmcache.core.frame import header_template, verify_frames
from lmcache.core.key import ObjectKey
from lmcache.core.key_batch import ChunkHashes, KeyBatch, NamespaceSet
from lmcache.core.limits import FRAME_HEADER_BYTES, GIB
from lmcache.l1.store import L1Options, L1Store
from lmcache.l2.adapter_types import ConfiguredAdapter, build, parse_adapter
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics
from lmcache.testing.frames import namespace
from lmcache.tiering.checked_policies import CheckedPrefetchPolicy, CheckedStorePolicy
from lmcache.tiering.context import TieringContext
from lmcache.tiering.l2_loads import L2Loader
from lmcache.tiering.policies import AdapterInfo
from lmcache.tiering.policy_selection import select_prefetch_policy, select_store_policy
from lmcache.tiering.prefetch import PrefetchRequest
from lmcache.tiering.prefetch_controller import PrefetchController
from lmcache.tiering.verifier import Verifier
from lmcache.tiering.watermark_eviction import WatermarkEviction
from lmcache.tiering.write_back import WriteBack
from seeds import SEED
from support.simulator import NO_FAULTS, Faults, InlineExecutor, SimulatedLoop, SimulatedMedium

STEPS = int(os.environ.get("TEST_SIMULATION_STEPS", "2000"))

PAYLOAD_BYTES = 4096
FRAME_BYTES = 8192
SALTS = ("", "tenant")
PROMPTS = 12
MAX_CHUNKS = 20
ENGINES = 4
LEASE_SECONDS = 5.0
LONGEST_SECONDS = 3600.0  # simulated, for anything that an engine waits for


@dataclass(frozen=True)
class Setting:
    name: str
    l1_slots: int = 160
    l1_policy: str = "LRU"
    store_policy: str = "default"
    prefetch_policy: str = "default"
    media: int = 2


SETTINGS = (
    Setting("default"),
    Setting("retain", prefetch_policy="retain", l1_policy="S3FIFO", media=3),
    Setting("skip_l1", store_policy="skip_l1", l1_policy="noop"),
    Setting("tiny", l1_slots=24, media=1),
)


@dataclass
class Model:
    """What may be true. Payloads follow from keys, so the dictionary needs to know only which keys were ever stored."""

    committed: set[ObjectKey] = field(default_factory=set)
    hits: int = 0
    hits_from_l2: int = 0
    late_copies: int = 0

    @staticmethod
    def payload(key: ObjectKey) -> bytes:
        return hashlib.shake_128(key.namespace.digest + key.chunk_hash).digest(PAYLOAD_BYTES)


class World:
    def __init__(self, loop: SimulatedLoop, l1: L1Store, setting: Setting, dice: random.Random) -> None:
        self.loop, self.l1, self.setting, self.dice = loop, l1, setting, dice
        self.model = Model()
        self.metrics = Metrics().l2
        self.media = [
            SimulatedMedium(random.Random(dice.random()), 80 * FRAME_BYTES, 0.5 * (number + 1))
            for number in range(setting.media)
        ]
        spec = {
            "type": "mock",
            "max_size_gb": 80 * FRAME_BYTES / GIB,
            "mock_bandwidth_gb": 1,
            "eviction": {"eviction_policy": "LRU"},
        }
        self.runners = [
            Runner(
                ConfiguredAdapter(build(parse_adapter({**spec, "timeout_seconds": 30}, number)).config, medium),
                self.metrics,
                loop,
                rng=random.Random(dice.random()),
            )
            for number, medium in enumerate(self.media)
        ]
        adapters = [AdapterInfo(runner.name, "mock", None) for runner in self.runners]
        prefetch = CheckedPrefetchPolicy(select_prefetch_policy(setting.prefetch_policy), adapters, self.metrics)
        context = TieringContext(l1, self.runners, self.metrics, loop)
        self.loader = L2Loader(context, Verifier(InlineExecutor()), retains=prefetch.retains)
        self.prefetch = PrefetchController(context, self.loader, prefetch, max_in_flight=3)
        store = CheckedStorePolicy(select_store_policy(setting.store_policy), adapters, self.metrics)
        self.store = WriteBack(context, store)
        self.eviction = WatermarkEviction(context, self.store, watermark=0.8, ratio=0.2)
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for runner in self.runners:
            await runner.open()
        self.store.start()
        self._background = [*self.eviction.start(), self.loop.create_task(self._expire())]

    async def stop(self) -> None:
        for medium in self.media:
            medium.faults = NO_FAULTS
        assert await self.store.flush(LONGEST_SECONDS)
        await self.store.finish(LONGEST_SECONDS)
        for task in self._background:
            task.cancel()
        for runner in self.runners:
            assert await runner.drain(LONGEST_SECONDS)
        assert await self.loader.drain(LONGEST_SECONDS)
        for owner in range(1, ENGINES + 1):
            self.l1.core.drop_owner(owner)
        self.store.remove_leftovers()
        parts: list[Any] = [self.l1, self.store, self.prefetch, self.loader, *self.runners]
        for part in parts:
            part.check_idle()
        for runner in self.runners:
            assert await runner.close(LONGEST_SECONDS)

    async def _expire(self) -> None:
        while True:
            self.l1.core.expire(self.loop.time())
            self.l1.core.check()
            await asyncio.sleep(1.0)

    # ---- what engines do ---------------------------------------------------------------------------------------------
    def prompt(self) -> list[ObjectKey]:
        number, salt = self.dice.randrange(PROMPTS), self.dice.choice(SALTS)
        of = namespace("model", salt=salt)
        chunks = self.dice.randint(1, MAX_CHUNKS)
        return [ObjectKey(of, hashlib.sha256(f"{number}/{chunk}".encode()).digest()) for chunk in range(chunks)]

    async def put(self, owner: int) -> None:
        """Reserves, copies chunk after chunk, commits - or aborts, or is so late that its slots were quarantined."""
        keys, core = self.prompt(), self.l1.core
        of = keys[0].namespace
        hashes = b"".join(key.chunk_hash for key in keys)
        deadline = self.loop.time() + LEASE_SECONDS
        batch = KeyBatch(NamespaceSet((of,), (FRAME_BYTES,)), ChunkHashes(hashes))
        reserved = core.reserve(owner, of.digest, of.cache_salt, batch.namespaces.sizes, hashes, deadline)
        reservation = reserved.reservation
        if not reservation:
            return
        late = self.dice.random() < 0.1
        offsets = array("Q", reserved.slots)
        template = header_template(of, PAYLOAD_BYTES)
        written = bytearray(len(keys))
        for chunk, (key, offset) in enumerate(zip(keys, offsets, strict=True)):
            if offset == _native.NO_SLOT:
                continue
            await asyncio.sleep(self.dice.uniform(0, 4 * LEASE_SECONDS / len(keys)) if late else 0.001)
            self.model.late_copies += self.loop.time() > deadline
            self.l1.memory.view(offset + FRAME_HEADER_BYTES, PAYLOAD_BYTES)[:] = self.model.payload(key)
            _native.frame_seal(self.l1.address_of(offset), template, key.chunk_hash)
            written[chunk] = self.dice.random() < 0.98
        if self.dice.random() < 0.1:
            core.abort(reservation)
            return
        self.model.committed.update(key for key, done in zip(keys, written, strict=True) if done)
        committed = core.commit(reservation, bytes(written))
        if committed.objects:
            self.store.add(batch, committed)
        else:
            core.abort(reservation)

    async def get(self, owner: int) -> None:
        """A lookup as the service makes it: what L1 has is leased, the rest is asked of L2."""
        keys, core = self.prompt(), self.l1.core
        hashes = b"".join(key.chunk_hash for key in keys)
        acquired = core.acquire(owner, keys[0].namespace.digest, hashes, self.loop.time() + 1e6)
        chunks, packed = acquired.chunks, acquired.slots
        self._check(keys[:chunks], packed)
        if chunks < len(keys):
            rest = keys[chunks:]
            prompt = KeyBatch(NamespaceSet((keys[0].namespace,), (FRAME_BYTES,)), ChunkHashes(hashes))
            deadline_seconds = self.dice.choice([0.1, 3.0, 100.0])
            request = PrefetchRequest(owner, self.loop.time() + 1e6, prompt, chunks, deadline_seconds)
            cancelled = asyncio.Event()
            if self.dice.random() < 0.1:
                self.loop.call_later(self.dice.uniform(0, 2), cancelled.set)
            result = await self.prefetch.run(request, cancelled)
            self.prefetch.note_use(request, result.chunks)
            self._check(rest[: result.chunks], result.slots.packed)
            self.model.hits_from_l2 += result.chunks
            if self.dice.random() < 0.3:
                await asyncio.sleep(self.dice.uniform(0, 20))
                self._check(rest[: result.chunks], result.slots.packed)  # as long as the lease holds
            core.release(result.lease)
        self._check(keys[:chunks], packed)
        core.release(acquired.lease)

    def _check(self, keys: Sequence[ObjectKey], packed: bytes) -> None:
        """The invariant."""
        for key, offset in zip(keys, array("Q", packed), strict=True):
            assert key in self.model.committed, f"seed {SEED}: a hit for what was never stored"
            (reason,) = verify_frames([key], [self.l1.memory.view(offset, FRAME_BYTES)])
            content = bytes(self.l1.memory.view(offset + FRAME_HEADER_BYTES, PAYLOAD_BYTES))
            assert not reason and content == self.model.payload(key), f"seed {SEED}: a hit with wrong bytes ({reason})"
        self.model.hits += len(keys)

    async def engine(self, owner: int, steps: int) -> None:
        for _ in range(steps):
            act = self.put if self.dice.random() < 0.45 else self.get
            await asyncio.wait_for(act(owner), LONGEST_SECONDS)
            await asyncio.sleep(self.dice.expovariate(2))

    async def weather(self) -> None:
        """Faults come and go, together and one by one; now and then an operator acts."""
        names = list(vars(Faults()))
        while True:
            await asyncio.sleep(self.dice.uniform(1, 60))
            for medium in self.media:
                kind = self.dice.randrange(4)
                medium.faults = Faults() if kind == 0 else NO_FAULTS
                if kind == 1:
                    medium.faults = replace(NO_FAULTS, **{self.dice.choice(names): 0.5})
            if self.dice.random() < 0.1:
                self.l1.core.clear()
            if self.dice.random() < 0.1:
                self.dice.choice(self.media).objects.clear()  # somebody else emptied the medium


@contextmanager
def open_l1(setting: Setting, loop: SimulatedLoop) -> Iterator[L1Store]:
    name = f"lmcache-test-simulation-{os.getpid()}-{os.urandom(4).hex()}"
    size_bytes = setting.l1_slots * FRAME_BYTES
    l1 = L1Store.open(name, bytes(16), L1Options(size_bytes, policy=setting.l1_policy, init_bytes=None), clock=loop)
    try:
        yield l1
    finally:
        l1.close()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_hits_are_exact_whatever_happens(setting: Setting) -> None:
    print(f"seed {SEED}")
    dice = random.Random(f"{SEED} {setting.name}")
    random.seed(SEED)  # of retries
    loop = SimulatedLoop()

    async def simulate(world: World) -> None:
        await world.start()
        weather = loop.create_task(world.weather())
        await asyncio.gather(*(world.engine(owner, STEPS // ENGINES) for owner in range(1, ENGINES + 1)))
        weather.cancel()
        await world.stop()

    try:
        with open_l1(setting, loop) as l1:
            world = World(loop, l1, setting, dice)
            asyncio.set_event_loop(loop)
            loop.run_until_complete(simulate(world))
            model = world.model
            print(
                f"{loop.time() - 1000:.0f} simulated seconds, {len(model.committed)} objects, {model.hits} hits, "
                f"{model.hits_from_l2} from L2, {model.late_copies} late copies"
            )
            assert model.hits > 0 and model.hits_from_l2 > 0 and model.late_copies > 0
    finally:
        asyncio.set_event_loop(None)
        loop.close()
