"""Each option of the configuration reference's example changes something that can be seen from outside the server."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lmcache.config.load import load
from lmcache.core.chunking import ChunkHasher
from lmcache.core.limits import GIB
from lmcache.errors import ConfigError
from lmcache.testing.processes import CacheServer, free_port
from polling import until
from process.support import CALL_SECONDS, NO_SLOT, SmallEngine, server_within, split, unpack_slots
from services import need_package

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "documented-commands.md"
ELSEWHERE = "127.0.0.2"
FRAME_BYTES = 8192
FRAMES = 100
OF_FRAMES = FRAMES * FRAME_BYTES / GIB
START = ("--l1-size-gb", "1", "--eviction-policy", "LRU", "--port", "0")  # of a plan that nothing is started from
SEEN: dict[str, set[str]] = {}  # the options that a test shows, by its name


def shows(*flags: str) -> Callable[[Any], Any]:
    """The test shows what these do."""

    def note(test: Any) -> Any:
        SEEN[test.__name__] = set(flags)
        return test

    return note


@contextlib.contextmanager
def ready(folder: Path, *extra: str, **options: Any) -> Iterator[CacheServer]:
    folder.mkdir()
    with CacheServer(folder, extra=extra, **{"l1_size_gb": OF_FRAMES, **options}) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0, server.log()


def test_every_option_of_the_example_is_shown() -> None:
    (example,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| C |") and "--enable-tr" in line]
    assert set(re.findall(r"--[a-z0-9-]+", example)) == set.union(*SEEN.values())


@shows("--host", "--port", "--prometheus-port", "--chunk-size", "--hash-algorithm", "--l1-align-bytes")
def test_where_it_listens_and_how_chunks_are_named_and_placed(tmp_path: Path) -> None:
    prometheus = free_port()
    options = ("--chunk-size", "512", "--hash-algorithm", "sha256_cbor", "--l1-align-bytes", "65536")
    with (
        ready(
            tmp_path / "one", *options, "--prometheus-port", str(prometheus), l1_size_gb=0.0625, host=ELSEWHERE
        ) as server,
        ready(tmp_path / "other") as other,
    ):
        with SmallEngine(f"tcp://{ELSEWHERE}:{server.port}") as engine, SmallEngine(other.port) as plain:
            for asked, tokens, algorithm, align in (
                (engine, 512, "sha256_cbor", 65536),
                (plain, 256, "blake3", 4096),
            ):
                assert asked.client.hello is not None
                assert asked.client.hello.chunk_tokens == tokens
                prompt = asked.tokens(1, 2, 3, 4)
                hasher = ChunkHasher(algorithm, tokens)
                hashes = asked.hashes(prompt)
                assert hashes == hasher.extend(hasher.root(b""), prompt) and len(split(hashes)) == 4
                slots = unpack_slots(asked.reserve(hashes).slots)
                assert not any(slot % align for slot in slots)
                assert any(slot % (2 * align) for slot in slots)
        status, text = server.ask(prometheus, "GET", "/metrics")
        assert status == 200 and "lmcache_mp_lookups_total" in str(text)
        assert server.ask(prometheus, "GET", "/status")[0] == 404
        for host, port in (("127.0.0.1", server.port), (ELSEWHERE, other.port)):  # without --host it is 127.0.0.1
            with pytest.raises(ConnectionRefusedError), socket.create_connection((host, port), CALL_SECONDS):
                pass


@shows("--l1-size-gb", "--l1-use-lazy", "--l1-init-size-gb")
def test_how_much_memory_it_takes(tmp_path: Path) -> None:
    def taken_gb(server: CacheServer) -> float:
        return float(server.status()["l1"]["committed_bytes"] / GIB)

    with (
        ready(tmp_path / "lazy", "--l1-use-lazy", "--l1-init-size-gb", "1.25", l1_size_gb=2.0) as lazy,
        ready(tmp_path / "whole", "--no-l1-use-lazy", l1_size_gb=0.0625) as whole,
    ):
        assert taken_gb(whole) == pytest.approx(0.0625, rel=0.01)
        with SmallEngine(whole.port, payload_bytes=(1 << 20) - 4096) as engine:  # as much as fits, and no more
            slots = unpack_slots(engine.reserve(engine.hashes(engine.tokens(*range(100)))).slots)
            assert 60 <= sum(slot != NO_SLOT for slot in slots) <= 64
        until(lambda: taken_gb(lazy) == pytest.approx(1.25, rel=0.01))
        with SmallEngine(lazy.port) as engine:  # which has it grow where less than 1 GB were left
            engine.store(engine.tokens(1))
        assert taken_gb(lazy) == pytest.approx(1.25, rel=0.01)


@shows("--l1-write-ttl-seconds", "--l1-read-ttl-seconds")
@pytest.mark.parametrize("ends", ["write", "read"])
def test_how_long_an_engine_may_be_silent(tmp_path: Path, ends: str) -> None:
    seconds = {name: "1" if name == ends else "600" for name in ("write", "read")}
    options = [word for name in seconds for word in (f"--l1-{name}-ttl-seconds", seconds[name])]
    turns = count()

    def is_held_and_then_not() -> bool:
        """False where this machine stood still for as long, before anybody could look."""
        with (
            ready(tmp_path / f"server-{next(turns)}", *options) as server,
            SmallEngine(server.port, heartbeat=600.0) as silent,
        ):
            silent.store(silent.tokens(1))
            began = time.monotonic()
            assert silent.lookup("r", silent.tokens(1)).lease
            assert silent.reserve(silent.hashes(silent.tokens(2))).reservation

            def held() -> dict[str, bool]:
                l1 = server.status()["l1"]
                return {"write": not l1["quarantined_bytes"], "read": bool(l1["leases"])}

            at_first = held()
            if time.monotonic() - began >= 1.0:
                return False
            assert at_first == {"write": True, "read": True}
            until(lambda: not held()[ends])
            assert sum(held().values()) == 1
            return True

    until(is_held_and_then_not)


@shows("--eviction-policy", "--eviction-trigger-watermark", "--eviction-ratio", "--metrics-sample-rate")
def test_what_leaves_a_full_l1(tmp_path: Path) -> None:
    early = ("--eviction-trigger-watermark", "0.5", "--eviction-ratio", "0.75", "--metrics-sample-rate", "1")
    late = ("--eviction-trigger-watermark", "0.9", "--eviction-ratio", "0.1", "--metrics-sample-rate", "0")
    with (
        ready(tmp_path / "early", *early) as first,
        ready(tmp_path / "late", *late) as second,
        ready(tmp_path / "noop", *early, "--eviction-policy", "noop") as third,
    ):
        for server in (first, second, third):
            with SmallEngine(server.port) as engine:
                for start in range(0, 60, 20):
                    assert engine.store(engine.tokens(*range(start, start + 20))) == 20
        until(lambda: objects(first) <= 35, tell=first.status)
        assert (objects(second), objects(third)) == (60, 60)
        for server in (second, third):
            with SmallEngine(server.port) as engine:
                for start in range(100, 160, 20):
                    engine.store(engine.tokens(*range(start, start + 20)))
        until(lambda: objects(second) <= 92, tell=second.status)
        assert objects(second) > 75 and second.metric("lmcache_mp_l1_evicted_chunks_total") > 0
        assert objects(third) == FRAMES and third.metric("lmcache_mp_l1_evicted_chunks_total") == 0
        ages = "lmcache_mp_l1_chunk_lifetime_seconds_count"
        assert first.metric(ages) == first.metric("lmcache_mp_l1_evicted_chunks_total") > 0 == second.metric(ages)


def objects(server: CacheServer) -> int:
    return int(server.status()["l1"]["objects"])


@shows("--l2-adapter", "--l2-store-policy", "--l2-prefetch-policy")
def test_what_l2_gets_and_what_l1_keeps_of_it(tmp_path: Path) -> None:
    policies = ("--l2-store-policy", "skip_l1", "--l2-prefetch-policy", "retain")
    with (
        ready(tmp_path / "plain", l2_folder=tmp_path / "plain-l2") as plain,
        ready(tmp_path / "other", *policies, l2_folder=tmp_path / "other-l2") as other,
    ):
        for server, kept, loaded in ((plain, 4, 0), (other, 0, 4)):
            with SmallEngine(server.port) as engine:
                assert engine.store(engine.tokens(1, 2, 3, 4)) == 4
                until(lambda server=server: server.status()["l2"]["adapters"][0]["objects"] == 4)
                until(lambda server=server, kept=kept: objects(server) == kept)
                server.clear("l1")
                found = engine.lookup("r", engine.tokens(1, 2, 3, 4))
                assert found.chunks == 4 and engine.read(found)
                engine.end("r")
                until(lambda server=server, loaded=loaded: objects(server) == loaded)
        assert list((tmp_path / "plain-l2").rglob("*.data")) and list((tmp_path / "other-l2").rglob("*.data"))


@shows("--l2-prefetch-max-in-flight")
@pytest.mark.parametrize("allowed", [1, 3])
def test_how_many_requests_wait_for_an_adapter(tmp_path: Path, allowed: int) -> None:
    slow = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 0.001}
    options = ("--l2-adapter", json.dumps(slow), "--l2-prefetch-max-in-flight", str(allowed))
    with (
        ready(tmp_path / "server", *options, l1_size_gb=0.0625) as server,
        SmallEngine(server.port, payload_bytes=400_000) as engine,
    ):
        prompts = [engine.tokens(number) for number in range(6)]
        for prompt in prompts:
            engine.store(prompt)
        until(lambda: server.status()["l2"]["adapters"][0]["objects"] == len(prompts))
        turns = count()

        def most_at_once() -> int:
            """Of what was seen: where this machine stands still, loads begin and end meanwhile."""
            found: list[int] = []
            server.clear("l1")
            turn = next(turns)

            def ask(number: int) -> None:
                found.append(engine.lookup(f"r{turn}-{number}", prompts[number], deadline_seconds=30.0).chunks)
                engine.end(f"r{turn}-{number}")

            threads = [threading.Thread(target=partial(ask, number)) for number in range(len(prompts))]
            for thread in threads:
                thread.start()
            most = 0
            while any(thread.is_alive() for thread in threads):
                most = max(most, server.status()["l2"]["adapters"][0]["loads_in_flight"])
            assert found == [1] * len(prompts)
            assert most <= allowed
            return most

        until(lambda: most_at_once() == allowed)


@shows("--max-workers")
@pytest.mark.parametrize("workers", [1, 3])
def test_how_many_threads_verify_what_l2_gave_back(workers: int) -> None:
    quick = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1000}

    def verifying() -> int:
        return sum(thread.name.startswith("verify_") for thread in threading.enumerate())

    with (
        server_within(max_workers=workers, l2_adapter=[quick], l1_size_gb=0.25) as server,
        SmallEngine(server.rpc.endpoint, payload_bytes=(4 << 20) - 4096) as engine,
    ):
        prompts = [engine.tokens(*range(8 * number, 8 * number + 8)) for number in range(6)]
        for prompt in prompts:
            assert engine.store(prompt) == 8
        until(lambda: server.status()["l2"]["adapters"][0]["objects"] == 48)

        def load_all() -> bool:
            server.clear("l1", force=False)
            threads = [
                threading.Thread(target=engine.lookup, args=(f"r{number}", prompt))
                for number, prompt in enumerate(prompts)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for number in range(len(prompts)):
                engine.end(f"r{number}")
            return verifying() == workers

        until(load_all)
        assert verifying() == workers


@shows("--max-gpu-workers", "--engine-type")
def test_what_changes_nothing_is_said(tmp_path: Path) -> None:
    with ready(tmp_path / "server", "--max-gpu-workers", "2", "--engine-type", "default") as server:
        until(lambda: "is ready" in server.log())
        said = [line.partition(" has no effect: ")[2] for line in server.log().splitlines() if "no effect" in line]
    assert said == ["engines copy with threads of their own.", "default is the only type that is built."]
    with pytest.raises(ConfigError, match="--engine-type cannot be blend, which is not built yet"):
        load([*START, "--engine-type", "blend"], {})


@shows("--lookup-hash-log-dir", "--lookup-hash-log-rotation-interval", "--lookup-hash-log-rotation-max-size")
@pytest.mark.parametrize("by", ["interval", "size"])
def test_the_log_of_lookups_begins_new_files(tmp_path: Path, by: str) -> None:
    log = tmp_path / "lookups"
    limits = {"interval": ("1", "1048576"), "size": ("3600", "1024")}[by]
    options = ("--lookup-hash-log-rotation-interval", limits[0], "--lookup-hash-log-rotation-max-size", limits[1])
    with (
        ready(tmp_path / "server", "--lookup-hash-log-dir", str(log), *options) as server,
        SmallEngine(server.port) as engine,
    ):

        def files() -> int:
            engine.lookup("r", engine.tokens(1, 2, 3))
            engine.end("r")
            return len(list(log.iterdir()))

        until(lambda: files() > 2)


@shows("--lookup-hash-log-max-files")
def test_the_log_of_lookups_has_no_more_files(tmp_path: Path) -> None:
    log = tmp_path / "lookups"
    options = ("--lookup-hash-log-rotation-max-size", "1024", "--lookup-hash-log-max-files", "2")
    with ready(tmp_path / "server", "--lookup-hash-log-dir", str(log), *options) as server:
        with SmallEngine(server.port) as engine:
            for number in range(30):  # about 400 bytes each
                engine.lookup(f"r{number}", engine.tokens(1, 2, 3))
                engine.end(f"r{number}")
        until(lambda: '"r29"' in "".join(path.read_text() for path in sorted(log.iterdir())))
        assert len(list(log.iterdir())) == 2


@shows("--enable-tracing", "--otlp-endpoint")
def test_what_is_sent_to_a_receiver(tmp_path: Path) -> None:
    need_package("opentelemetry")
    from support.otlp_receiver import a_receiver

    often = {"OTEL_METRIC_EXPORT_INTERVAL": "300"}
    with a_receiver() as traced, a_receiver() as measured:
        with (
            ready(tmp_path / "one", "--enable-tracing", "--otlp-endpoint", traced.endpoint, environment=often) as one,
            ready(tmp_path / "two", "--otlp-endpoint", measured.endpoint, environment=often) as two,
        ):
            for server in (one, two):
                with SmallEngine(server.port) as engine:
                    engine.lookup("r", engine.tokens(1))
                    engine.end("r")
            until(lambda: traced.named("request"), 60.0)
            for receiver in (traced, measured):
                until(lambda receiver=receiver: "lmcache_mp.lookup_requested" in receiver.metrics, 60.0)
        assert not measured.spans
