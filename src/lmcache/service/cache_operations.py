"""What operators may do with cached objects, beside the engines: list, look up, delete, pin, warm, move.

Called from threads of the HTTP listener. What belongs to the message loop or to the storage loop is asked for in calls
that are short there; nothing here is counted as a lookup, and nothing takes a lease for an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from lmcache.core import limits
from lmcache.core.chunking import TOKEN_BYTES
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.key_batch import ChunkHashes, KeyBatch, NamespaceSet, pack_keys
from lmcache.errors import ConfigError, LMCacheError, UnknownModel
from lmcache.l2.runner import Runner
from lmcache.memory.ownership import STORAGE_OWNER
from lmcache.protocol.messages import RegisterInstance, RegisterWorker
from lmcache.protocol.tokens import beginning_identity
from lmcache.service.context import ServiceContext
from lmcache.service.instances import joined, namespaces_of_rank
from lmcache.tiering.leases import FOREVER
from lmcache.tiering.namespace_directory import NamespaceDirectory
from lmcache.tiering.object_listing import ListingPage, ListingRequest, ObjectListing
from lmcache.tiering.pins import Pins
from lmcache.tiering.prefetch import PrefetchRequest, PrefetchResult

LOOKUP_SECONDS = 30.0
MOVE_SECONDS = 120.0  # for a batch
PREFETCH_SECONDS = 60.0  # for a window
_WINDOW_CHUNKS = 256
_GRACE_SECONDS = 5.0
_L1 = "l1"


@dataclass(frozen=True)
class Registered:
    """An instance, all of whose ranks have registered; one worker a rank."""

    profile: RegisterInstance
    ranks: tuple[RegisterWorker, ...]


@dataclass(frozen=True)
class Prompt:
    """The objects of its full chunks, and of every partial chunk that may be behind them: of all the tokens there, of
    one fewer, and so on."""

    keys: KeyBatch
    partials: KeyBatch


@dataclass(frozen=True)
class ChunkPlaces:
    """The tiers that have all of a chunk, and the positions of namespaces of which L1 has it."""

    chunk_hash: bytes
    tiers: tuple[str, ...]
    in_l1: tuple[int, ...]


class Progress:
    """How far a job is. Written by the job's thread, read by any."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.failed = 0
        self.detail = ""
        self.stop = threading.Event()  # the job is to end at its next step


class CacheOperations:
    """Thread-safe."""

    def __init__(
        self, context: ServiceContext, registered: Callable[[str, str], list[Registered]], server_epoch: bytes
    ) -> None:
        """`registered(model_name, instance_id)` asks the message loop; ServerUnavailable when it does not answer."""
        self._context = context
        self._registered = registered
        self._l1 = context.l1
        self._storage = context.storage
        self._directory = NamespaceDirectory(context.l1, context.storage.own_runners)
        self.mark = server_epoch[:4].hex()
        self._listing = ObjectListing(context.l1, context.storage.own_runners, self._directory, self.mark)

    @property
    def pins(self) -> Pins:
        return self._storage.pins

    # ---- objects by name ---------------------------------------------------------------------------------------------
    def list_objects(self, request: ListingRequest) -> ListingPage:
        """ConfigError for what cannot be listed."""
        return self._listing.page(request)

    def keys_of(self, names: Sequence[str]) -> list[ObjectKey]:
        """The keys of names NAMESPACE/HASH, each once."""
        split = [name.split("/") for name in dict.fromkeys(names)]
        return self._directory.keys_of([(bytes.fromhex(digest), bytes.fromhex(chunk)) for digest, chunk in split])

    def delete(self, names: Sequence[str], tier: str, *, force: bool) -> tuple[int, int, int]:
        """How many are deleted, stay, were not there."""
        return self._storage.delete(self.keys_of(names), tier, force=force)

    # ---- prompts -----------------------------------------------------------------------------------------------------
    def prompt(self, model_name: str, tokens: bytes, cache_salt: str, instance_id: str = "") -> Prompt:
        """Every object of a prompt, as an engine with that model names them. `tokens`: packed u32. UnknownModel,
        ConfigError."""
        registered = self._registered(model_name, instance_id)
        if not registered:
            whom = f"the model {model_name!r}" + (f" and the name {instance_id!r}" if instance_id else "")
            raise UnknownModel(
                f"No engine with {whom} is registered, and only an engine says how its objects are named: start it, or "
                "see GET /status for those that are there."
            )
        namespaces = self._namespaces(registered[0], cache_salt)
        hasher = self._context.hasher
        identity = b""
        if ahead := TOKEN_BYTES * registered[0].profile.lookahead_tokens:
            identity, tokens = msgspec.msgpack.encode(beginning_identity(tokens[:ahead])), tokens[ahead:]
        if len(tokens) // TOKEN_BYTES // hasher.chunk_tokens * len(namespaces) > limits.MAX_CHUNKS_PER_CALL:
            raise ConfigError(f"A prompt may have at most {limits.MAX_CHUNKS_PER_CALL} objects here.")
        root = hasher.root(identity)
        hashes = hasher.extend(root, tokens)
        partials: list[bytes] = []
        if not any(registered[0].profile.tail_tokens):  # else no engine makes any
            partials = hasher.partials(root, hashes, tokens)
        return Prompt(KeyBatch(namespaces, ChunkHashes(hashes)), KeyBatch(namespaces, ChunkHashes(b"".join(partials))))

    def _namespaces(self, registered: Registered, cache_salt: str) -> NamespaceSet:
        namespaces = joined(
            [namespaces_of_rank(self._context, registered.profile, worker, cache_salt) for worker in registered.ranks]
        )
        self._directory.note(namespaces.namespaces)
        return namespaces

    def lookup(self, keys: KeyBatch, *, asks_backends: bool = True) -> list[ChunkPlaces]:
        """Where each chunk is. `asks_backends` of adapters about what is not known here."""
        if not keys.chunks:
            return []
        tails = keys.namespaces.tail_chunks
        counted = [index for index in range(len(keys.namespaces)) if not tails or not tails[index]]
        counted = counted or list(range(len(keys.namespaces)))
        every = [keys.key(index, chunk) for index in range(len(keys.namespaces)) for chunk in range(keys.chunks)]
        objects = [every[index * keys.chunks + chunk] for index in counted for chunk in range(keys.chunks)]
        resident = self._l1.core.resident_each(*pack_keys(every))
        of_chunks = [resident[index * keys.chunks : (index + 1) * keys.chunks] for index in counted]
        found = {_L1: b"".join(of_chunks)}
        for runner in self._storage.own_runners:
            probe = _probe if asks_backends else _known
            found[runner.name] = self._storage.run(probe(runner, objects), LOOKUP_SECONDS)
        places = []
        for chunk in range(keys.chunks):
            at = slice(chunk, None, keys.chunks)
            tiers = tuple(tier for tier in found if all(found[tier][at]))
            in_l1 = tuple(index for index, is_there in enumerate(resident[at]) if is_there)
            places.append(ChunkPlaces(keys.hashes[chunk], tiers, in_l1))
        return places

    def stored_partials(self, prompt: Prompt, *, asks_backends: bool) -> list[tuple[int, ChunkPlaces]]:
        """The partial chunks of which a tier has all, and how many tokens each has; the longest first. There may be a
        name for each token: a lookup does not ask backends about all of them."""
        places = self.lookup(prompt.partials, asks_backends=asks_backends)
        return [(len(places) - index, place) for index, place in enumerate(places) if place.tiers]

    def with_partial(self, prompt: Prompt) -> KeyBatch:
        """The objects of its full chunks and of the longest partial chunk that is stored behind them."""
        stored = self.stored_partials(prompt, asks_backends=True)
        if not stored:
            return prompt.keys
        return KeyBatch(prompt.keys.namespaces, ChunkHashes(prompt.keys.hashes.packed + stored[0][1].chunk_hash))

    # ---- jobs --------------------------------------------------------------------------------------------------------
    def prefetch(self, keys: KeyBatch, progress: Progress) -> None:
        """Loads into L1, to stay, the longest prefix that there is. Returns when nothing of it goes on."""
        step = keys.chunks if keys.namespaces.tail_chunks else _WINDOW_CHUNKS
        for end in range(step, keys.chunks + step, step):
            part = keys[: min(end, keys.chunks)]
            result, resident = self._warm(part)
            progress.done = resident * len(keys.namespaces)
            if resident < part.chunks or progress.stop.is_set():
                reason = result.miss_reason.value if result.miss_reason is not None else "stopped"
                progress.detail = f"L1 has {resident} of {keys.chunks} chunks; the next one: {reason}."
                return

    def _warm(self, keys: KeyBatch) -> tuple[PrefetchResult, int]:
        """And how many chunks L1 has then."""
        core, namespaces = self._l1.core, keys.namespaces
        held = core.acquire(
            STORAGE_OWNER, namespaces.digests, keys.hashes.packed, FOREVER, is_use=False, tails=namespaces.tails
        )
        result = PrefetchResult()
        try:
            if held.chunks < keys.chunks:
                result = self._load(keys, held.chunks)
            resident = held.chunks + result.chunks
            digests = b"".join(namespace.digest * resident for namespace in namespaces.namespaces)
            core.retain(digests, keys.hashes[:resident].packed * len(namespaces))
        finally:
            for lease in (held.lease, result.lease):
                if lease:
                    core.release(lease)
        return result, resident

    def _load(self, keys: KeyBatch, first_chunk: int) -> PrefetchResult:
        answered = threading.Event()
        results: list[PrefetchResult] = []

        def on_done(result: PrefetchResult) -> None:  # on the storage loop
            results.append(result)
            answered.set()

        request = PrefetchRequest(STORAGE_OWNER, FOREVER, keys, first_chunk, PREFETCH_SECONDS)
        cancel = self._storage.prefetch(request, on_done)
        if not answered.wait(PREFETCH_SECONDS + _GRACE_SECONDS):
            cancel()
            answered.wait(_GRACE_SECONDS)
        if not results:
            raise LMCacheError("The storage loop does not answer.")
        return results[0]

    def tier(self, name: str) -> Runner | None:
        """The adapter of that name, None for L1. ConfigError."""
        if name == _L1:
            return None
        for runner in self._storage.own_runners:
            if runner.name == name:
                return runner
        names = ", ".join(["l1", *(runner.name for runner in self._storage.own_runners)])
        raise ConfigError(f'There is no tier "{name}"; there are {names}.')

    def move(
        self, keys: Sequence[ObjectKey], source: Runner | None, target: Runner | None, progress: Progress, *, copy: bool
    ) -> None:
        """A batch at a time. An object is removed from `source` when `target` has it."""
        sizes = self._frame_bytes(keys) if source is not None else {}
        unknown = sum(key.namespace not in sizes for key in keys) if source is not None else 0
        for first in range(0, len(keys), limits.MAX_L2_BATCH_OBJECTS):
            if progress.stop.is_set():
                return
            part = keys[first : first + limits.MAX_L2_BATCH_OBJECTS]
            moved, left = self._move(part, source, target, sizes, copy)
            progress.done += moved
            progress.failed += len(part) - moved
            if left:
                progress.detail = f"{left} objects are where they were, too: they are read or pinned there."
        if progress.failed:
            cause = f"; of {unknown} no registered engine says the size" if unknown else ""
            progress.detail = f"{progress.failed} objects were not there, or found no room{cause}."

    def _move(
        self,
        keys: Sequence[ObjectKey],
        source: Runner | None,
        target: Runner | None,
        sizes: dict[Namespace, int],
        copy: bool,
    ) -> tuple[int, int]:
        """How many the target has, and how many of these stay in the source although they were to leave."""
        transfer, run = self._storage.transfer, self._storage.run
        were_resident = self._l1.core.resident_each(*pack_keys(keys))
        arrived = list(keys)
        if source is not None:
            arrived = run(transfer.to_l1(source, arrived, sizes), MOVE_SECONDS)
        if target is not None:
            arrived = run(transfer.to_adapter(target, arrived), MOVE_SECONDS)
        if source is not None and target is not None:
            new = {key for key, was_resident in zip(keys, were_resident, strict=True) if not was_resident}
            transfer.leave_l1([key for key in arrived if key in new])
        if copy or not arrived:
            return len(arrived), 0
        if source is None:
            return len(arrived), len(arrived) - transfer.leave_l1(arrived)
        return len(arrived), run(source.delete(arrived), MOVE_SECONDS).count(False)

    def _frame_bytes(self, keys: Sequence[ObjectKey]) -> dict[Namespace, int]:
        """Bytes of a frame in the namespaces that some registered engine has."""
        sizes: dict[Namespace, int] = {}
        for salt in {key.namespace.cache_salt for key in keys}:
            for registered in self._registered("", ""):
                namespaces = self._namespaces(registered, salt)
                sizes.update(zip(namespaces.namespaces, namespaces.frame_bytes, strict=True))
        return {key.namespace: sizes[key.namespace] for key in keys if key.namespace in sizes}


async def _probe(runner: Runner, keys: Sequence[ObjectKey]) -> bytes:
    """One byte a key, in batches between which the loop does other things."""
    found = bytearray()
    for first in range(0, len(keys), limits.MAX_L2_BATCH_OBJECTS):
        found += bytes(await runner.probe(keys[first : first + limits.MAX_L2_BATCH_OBJECTS]))
    return bytes(found)


async def _known(runner: Runner, keys: Sequence[ObjectKey]) -> bytes:
    return bytes(runner.knows(keys))
