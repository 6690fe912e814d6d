"""The connector of TensorRT-LLM against its interface, made up, with a real server and real copies."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from lmcache.integration.tensorrt_llm.settings import TIMEOUT_VARIABLE
from lmcache.testing.processes import CacheServer, free_port
from polling import STALL_SECONDS, until
from process.tensorrt_engine import (
    BLOCK_TOKENS,
    CONNECTORS,
    OLD_CONNECTORS,
    Engine,
    Mpi,
    install,
)

CHUNK_TOKENS = 64
PROMPT = [7 * index % 101 + 1 for index in range(3 * CHUNK_TOKENS + 10)]
CACHED = 3 * CHUNK_TOKENS


@pytest.fixture
def mpi() -> Mpi:
    return Mpi()


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch, mpi: Mpi) -> Any:
    return install(monkeypatch, mpi)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_key_value_heads": 4}))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    return folder


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheServer]:
    extra = ("--chunk-size", str(CHUNK_TOKENS))
    with CacheServer(tmp_path, l1_size_gb=0.0625, extra=extra) as running:
        running.wait_ready()
        monkeypatch.setenv("LMCACHE_SERVER_URL", f"tcp://127.0.0.1:{running.port}")
        yield running
        (Path("/dev/shm") / running.shm_name).unlink(missing_ok=True)


def objects(server: CacheServer) -> int:
    return int(server.status()["l1"]["objects"])


def held(server: CacheServer) -> int:
    """Leases, sessions and reservations."""
    status = server.status()
    return sum(int(status[name]) for name in ("leases", "reservations", "sessions"))


def stored(engine: Engine, server: CacheServer, tokens: list[int] = PROMPT, count: int = 3, **more: Any) -> None:
    assert engine.run(tokens, **more).matched == 0
    until(lambda: objects(server) == count)


@pytest.mark.parametrize("connectors", [CONNECTORS, OLD_CONNECTORS])
def test_a_prompt_is_stored_found_and_loaded(
    monkeypatch: pytest.MonkeyPatch, mpi: Mpi, server: CacheServer, model: Path, connectors: str
) -> None:
    engine = Engine(install(monkeypatch, mpi, connectors), mpi, model)
    stored(engine, server)
    [instance] = server.status()["instances"]
    assert instance["engine"] == "tensorrt_llm 1.2.0"
    assert engine.run(PROMPT).matched == CACHED
    # The engine has a part itself, in whole blocks or a few tokens of one.
    assert engine.run(PROMPT, computed=BLOCK_TOKENS).matched == CACHED - BLOCK_TOKENS
    assert engine.run(PROMPT, computed=5).matched == CACHED - 5
    assert engine.run(PROMPT, computed=CACHED + 3).matched == 0
    # Something is left to compute of a prompt that is stored as a whole.
    assert engine.run(PROMPT[:CACHED]).matched == CACHED - BLOCK_TOKENS
    assert engine.run([*PROMPT[:CHUNK_TOKENS], *range(1, 100)]).matched == CHUNK_TOKENS
    assert engine.run(list(range(1, 100))).matched == 0
    engine.scheduler.side.check_idle()
    engine.workers[0].steps.check_idle()
    until(lambda: not held(server))
    engine.close()


def test_a_prompt_that_is_computed_in_pieces_is_stored_in_pieces(
    adapter: Any, mpi: Mpi, server: CacheServer, model: Path
) -> None:
    engine = Engine(adapter, mpi, model)
    request = engine.add(PROMPT)
    engine.step(CHUNK_TOKENS + 10)
    until(lambda: objects(server) == 1)
    engine.step(CHUNK_TOKENS + 10)
    until(lambda: objects(server) == 2)
    engine.step()
    engine.end(request)
    until(lambda: engine.step() or not engine.saving)
    assert engine.run(PROMPT).matched == CACHED
    engine.close()


def test_salts_share_nothing(adapter: Any, mpi: Mpi, server: CacheServer, model: Path) -> None:
    engine = Engine(adapter, mpi, model)
    stored(engine, server)
    assert engine.run(PROMPT, salt="a").matched == 0
    until(lambda: objects(server) == 6)
    assert engine.run(PROMPT, salt="b").matched == 0
    assert engine.run(PROMPT, cache_salt_id=17).matched == 0
    assert engine.run(PROMPT, salt="a").matched == engine.run(PROMPT).matched == CACHED
    engine.close()


@pytest.mark.parametrize("latent", [False, True])
def test_each_rank_loads_what_is_its_own(
    adapter: Any, mpi: Mpi, server: CacheServer, model: Path, latent: bool
) -> None:
    engine = Engine(adapter, mpi, model, ranks=2, latent=latent)
    stored(engine, server, count=3 if latent else 6)
    [instance] = server.status()["instances"]
    assert (instance["ranks"], instance["workers"]) == (1 if latent else 2, [0, 1])
    assert engine.run(PROMPT).matched == CACHED
    engine.close()

    # Another engine of the same model finds it too, one with other weights does not.
    again = Engine(adapter, mpi, model, ranks=2, latent=latent)
    assert again.run(PROMPT).matched == CACHED
    again.close()
    (model / "model.safetensors").write_bytes(bytes(2048))
    other = Engine(adapter, mpi, model, ranks=2, latent=latent)
    assert other.run(PROMPT).matched == 0
    other.close()


def test_what_is_more_than_tokens_runs_uncached(adapter: Any, mpi: Mpi, server: CacheServer, model: Path) -> None:
    engine = Engine(adapter, mpi, model)
    stored(engine, server)
    for beyond in ({"lora_task_id": 3}, {"multimodal_hashes": [[1] * 8]}, {"prompt_embedding_table": object()}):
        assert engine.run(PROMPT, **beyond).matched == 0
    until(lambda: not held(server))
    assert objects(server) == 3
    engine.close()


def test_a_request_that_is_cancelled_while_it_loads_keeps_its_blocks(
    adapter: Any, mpi: Mpi, server: CacheServer, model: Path
) -> None:
    engine = Engine(adapter, mpi, model)
    stored(engine, server)
    for steps in (0, 1):  # before its load has begun, and after
        request = engine.add(PROMPT)
        assert request.matched == CACHED
        for _ in range(steps):
            engine.step()
        engine.end(request)
        assert request.request_id in engine.saving
        until(lambda: engine.step() or not (engine.saving or engine.loading))
    assert engine.run(PROMPT).matched == CACHED
    engine.scheduler.side.check_idle()
    engine.workers[0].steps.check_idle()
    until(lambda: not held(server))
    engine.close()


def test_an_engine_without_its_server_runs_uncached(
    adapter: Any, mpi: Mpi, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("LMCACHE_SERVER_URL", f"tcp://127.0.0.1:{port}")
    monkeypatch.setattr(adapter, "START_SECONDS", 0.1)
    monkeypatch.setenv(TIMEOUT_VARIABLE, "100")
    engine = Engine(adapter, mpi, model)
    assert engine.run(PROMPT).matched == 0
    options: dict[str, Any] = {"port": port, "l1_size_gb": 0.0625, "extra": ("--chunk-size", str(CHUNK_TOKENS))}
    with CacheServer(tmp_path, **options) as server:
        server.wait_ready()
        until(lambda: len(server.status()["instances"]) == 1 and server.status()["instances"][0]["workers"] == [0])
        until(lambda: engine.run(PROMPT).matched == CACHED)  # the scheduler's side may learn it a moment later
        server.pause()
        began = time.monotonic()
        assert engine.run(PROMPT).matched == 0
        assert time.monotonic() - began < 2 * STALL_SECONDS
        server.resume()
        until(lambda: engine.run(PROMPT).matched == CACHED)
        server.kill()
    assert engine.run(PROMPT).matched == 0
    engine.close()


def test_a_load_of_other_bytes_is_never_taken_for_a_hit(
    adapter: Any, mpi: Mpi, server: CacheServer, model: Path
) -> None:
    engine = Engine(adapter, mpi, model)
    stored(engine, server)
    request = engine.add(PROMPT)
    server.kill()
    memory = Path("/dev/shm") / server.shm_name
    with memory.open("r+b") as file:
        file.write(bytes(memory.stat().st_size))
    with pytest.raises(adapter.LoadFailed, match=f"request {request.request_id} could not be loaded"):
        until(engine.step)
    engine.close()


def test_an_engine_that_cannot_be_cached_exactly_goes_on(
    adapter: Any, mpi: Mpi, server: CacheServer, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(adapter, mpi, model, kv_cache_config={"host_cache_size": 1 << 30})
    assert "runs uncached: host_cache_size is set" in capsys.readouterr().err
    assert engine.run(PROMPT).matched == engine.run(PROMPT).matched == 0
    assert server.status()["instances"] == []
    engine.close()
