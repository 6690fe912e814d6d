"""`lmcache bench l2`: measures one adapter through its runner, beside plain copies and a plain program."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache import _native
from lmcache.cli.arguments import Arguments
from lmcache.cli.bench_plain import PlainProgram, plain_program
from lmcache.cli.bench_timing import Region, add_milliseconds, add_rate, best_copy_seconds, timed
from lmcache.cli.output import Report, bytes_text
from lmcache.clock import SystemClock
from lmcache.config.load import parse_adapter_text
from lmcache.core.frame import frame_bytes, header_template
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import MAX_L2_BATCH_OBJECTS, MIB
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import LMCacheError, ResourceError
from lmcache.l2.adapter_types import ConfiguredAdapter, build, parse_adapter
from lmcache.l2.adapters.nixl_config import NixlStoreConfig
from lmcache.l2.runner import Runner
from lmcache.telemetry.metrics import Metrics

_DRAIN_SECONDS = 30.0


def run(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "bench l2",
        "Stores, looks up, loads and verifies objects through one L2 adapter, beside plain copies and a plain program "
        "of the same run: file I/O, SET and GET, awscrt, NIXL, Mooncake. Works in a folder of its own below that of "
        "the adapter, or under names of its own, and removes them, but for objects that went through NIXL, which "
        "cannot delete any.",
    )
    arguments.add_argument("--l2-adapter", required=True, metavar="JSON", help="as for lmcache server")
    arguments.add_whole("--objects", 32, "objects a round", minimum=1, maximum=65_536)
    arguments.add_number("--object-mib", 2.0, "size of one of them", unit="MiB", above=0, maximum=4096)
    arguments.add_whole("--rounds", 7, "how often everything is done", minimum=1, maximum=10_000)
    options = arguments.read(argv[1:])
    spec = parse_adapter_text("--l2-adapter", options.l2_adapter)
    config = parse_adapter(spec, 0)
    with contextlib.ExitStack() as stack:
        if config.folder:
            key = "file_path" if "backend_params" in spec else "base_path"
            config = parse_adapter(_moved(spec, stack.enter_context(_folder_below(config.folder, key))), 0)
        elif isinstance(config, NixlStoreConfig):  # a pool of objects, which belongs to one server
            params = {**spec["backend_params"], "object_prefix": f"{config.object_prefix}/bench"}
            config = parse_adapter({**spec, "backend_params": params}, 0)
        report = asyncio.run(_Bench(build(config), options).run())
    report.emit(options)
    return 0


def _moved(spec: dict[str, Any], folder: str) -> dict[str, Any]:
    """The same adapter in another folder."""
    if "backend_params" in spec:
        return {**spec, "backend_params": {**spec["backend_params"], "file_path": folder}}
    return {**spec, "base_path": folder}


@contextlib.contextmanager
def _folder_below(base: str, key: str) -> Iterator[str]:
    try:
        os.makedirs(base, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base, prefix="lmcache-bench-") as folder:
            yield folder
    except OSError as error:
        raise ResourceError(f'The folder "{key}" {base} cannot be written: {error.strerror or error}.') from None


@dataclass
class _Bench:
    """The state of one benchmark. Times are wall seconds, one value a round."""

    configured: ConfiguredAdapter
    options: argparse.Namespace
    store: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    lookup: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    plain_write: list[float] = field(default_factory=list)
    plain_read: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.payload_bytes = max(1, int(self.options.object_mib * MIB))
        self.frame_bytes = frame_bytes(self.payload_bytes)
        self.total_bytes = self.frame_bytes * self.options.objects
        self.namespace = Namespace(f"lmcache-bench-{uuid.uuid4().hex}", 1, 0, 0, "bench")
        self.memory = Region(2 * self.total_bytes)  # of one piece, as L1 is
        self.source, self.target = self.memory.halves()
        self.source.map[:] = os.urandom(4096) * (self.total_bytes // 4096)
        self.plain: PlainProgram | None = None

    async def run(self) -> Report:
        runner = Runner(self.configured, Metrics(enabled=False).l2, SystemClock())
        runner.lend_memory(self.memory.address, self.memory.size_bytes)
        await runner.open()
        try:
            self.plain = plain_program(self.configured.config, self.options.objects)
            for _ in range(self.options.rounds + 1):  # the first round warms up
                await self._round(runner)
        finally:
            if self.plain is not None:
                self.plain.close()
            await runner.drain(_DRAIN_SECONDS)
            await runner.close(_DRAIN_SECONDS)
        return self._report()

    async def _round(self, runner: Runner) -> None:
        keys = self._seal()
        stored_keys = runner.stored_keys(keys)
        sources, targets = self.source.pieces(self.frame_bytes), self.target.pieces(self.frame_bytes)
        try:
            started = time.perf_counter()
            stored = await _in_batches(runner.store, keys, sources)
            self.store.append(time.perf_counter() - started)
            if any(outcome is not StoreOutcome.STORED for outcome in stored):
                raise LMCacheError(_counted("stored", stored))
            started = time.perf_counter()
            sizes = await self.configured.adapter.probe(stored_keys)  # the runner would answer from memory
            self.lookup.append(time.perf_counter() - started)
            if None in sizes:
                raise LMCacheError("The adapter does not find what it has just stored.")
            started = time.perf_counter()
            loaded = await _in_batches(runner.load, keys, targets)
            self.load.append(time.perf_counter() - started)
            if any(outcome is not LoadOutcome.LOADED for outcome in loaded):
                raise LMCacheError(_counted("loaded", loaded))
            if bytes(self.target.map) != bytes(self.source.map):
                raise LMCacheError("What was loaded differs from what was stored.")
        finally:
            await self.configured.adapter.delete(stored_keys)
            runner.lost(stored_keys)
        self.copy.append(best_copy_seconds(self.target.address, self.source.address, self.total_bytes, 1))
        if self.plain is not None:
            await asyncio.to_thread(self._run_plain, self.plain, sources, targets)

    def _seal(self) -> list[ObjectKey]:
        """Seals the source frames under new keys."""
        template = header_template(self.namespace, self.payload_bytes)
        hashes = [os.urandom(32) for _ in range(self.options.objects)]
        for index, chunk_hash in enumerate(hashes):
            _native.frame_seal(self.source.address + index * self.frame_bytes, template, chunk_hash)
        return [ObjectKey(self.namespace, chunk_hash) for chunk_hash in hashes]

    def _run_plain(self, plain: PlainProgram, sources: list[memoryview], targets: list[memoryview]) -> None:
        self.target.map[: self.frame_bytes] = bytes(self.frame_bytes)
        try:
            self.plain_write.append(timed(lambda: plain.write(sources)))
            self.plain_read.append(timed(lambda: plain.read(targets)))
        finally:
            plain.clean_up()
        if targets[0] != sources[0]:
            raise LMCacheError("What the plain program read differs from what it wrote.")

    def _report(self) -> Report:
        report = Report("L2 bench")
        report.add("adapter", "Adapter", self.configured.config.type)
        shown = f"{self.options.objects} of {bytes_text(self.payload_bytes)}"
        report.add("objects", "Objects a round", self.options.objects, shown)
        report.metrics["object_bytes"] = self.payload_bytes
        report.add("rounds", "Rounds", self.options.rounds)
        report.section("machine, same run")
        medians = {name: statistics.median(getattr(self, name)[1:]) for name in ("copy", "store", "load")}
        limits = {"store": medians["copy"], "load": medians["copy"]}
        add_rate(report, "copy", "Copy in memory, one thread", self.total_bytes, medians["copy"])
        if self.plain is not None:
            limits = {"store": statistics.median(self.plain_write[1:]), "load": statistics.median(self.plain_read[1:])}
            name, how = self.plain.name, self.plain.how
            add_rate(report, "plain_write", f"{name}, write, {how}", self.total_bytes, limits["store"])
            add_rate(report, "plain_read", f"{name}, read, {how}", self.total_bytes, limits["load"])
        report.section("adapter")
        for name in ("store", "load"):
            add_milliseconds(report, name, f"{name.capitalize()} of all", getattr(self, name)[1:])
            add_rate(report, name, f"{name.capitalize()} rate", self.total_bytes, medians[name], limits[name])
        add_milliseconds(report, "lookup", "Lookup of all", self.lookup[1:])
        report.add("same_bytes", "Loaded bytes", "identical")
        return report


async def _in_batches(operation: Any, keys: list[ObjectKey], buffers: list[memoryview]) -> list[Any]:
    """In concurrent batches of limited length, as the server does."""

    def released() -> None:
        """Nothing to do: the buffers live as long as the benchmark."""

    parts = range(0, len(keys), MAX_L2_BATCH_OBJECTS)
    results = await asyncio.gather(
        *(
            operation(
                keys[start : start + MAX_L2_BATCH_OBJECTS], buffers[start : start + MAX_L2_BATCH_OBJECTS], released
            )
            for start in parts
        )
    )
    return [outcome for part in results for outcome in part]


def _counted(wanted: str, outcomes: Sequence[Any]) -> str:
    counts = {outcome.value: outcomes.count(outcome) for outcome in set(outcomes)}
    return f"Not every object could be {wanted}: " + ", ".join(
        f"{count} {name}" for name, count in sorted(counts.items())
    )
