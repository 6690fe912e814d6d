"""A real SGLang keeps its pages in the cache server, which gives the same tokens as pages of its own cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hicache.harness import PAGE_TOKENS, PYTHON, SGLangServer
from lmcache.testing.processes import CacheServer
from lmcache.testing.tiny_models import make_llama
from polling import until
from support.spoiled_memory import spoil_frames

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make sglang` installs SGLang into an environment of its own"),
]

PAGES = 5
LONG_PAGES = 32


def prompt(seed: int, pages: int) -> list[int]:
    """Token ids of so many pages, and 20 more."""
    tokens = random.Random(seed)
    return [tokens.randrange(2, 8000) for _ in range(pages * PAGE_TOKENS + 20)]


PROMPT, OTHER, LONG = prompt(1, PAGES), prompt(2, PAGES), prompt(3, LONG_PAGES)


def cache_server(folder: Path, port: int | None = None) -> CacheServer:
    server = CacheServer(folder, l1_size_gb=0.25, l2_folder=folder / "l2", port=port, log_name=f"cache-{port}.log")
    server.wait_ready()
    return server


def in_all(cache: CacheServer) -> int:
    """Objects that were stored, but for those that did not verify."""
    l1 = cache.status()["l1"]
    return int(l1["objects"] + l1["evicted_objects"])


def test_tokens_are_those_after_a_hit_of_its_own_cache(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = make_llama(tmp_path / "model")
    with cache_server(tmp_path) as cache:
        with SGLangServer(tmp_path, model, cache.port, log_name="sglang-1.log") as engine:
            engine.wait_ready()
            computed = engine.generate(PROMPT)
            assert computed.cached_tokens == 0
            # Of SGLang's own cache: where a step begins decides how its sums are rounded, on some processors (AMX).
            own = engine.generate(PROMPT)
            assert (own.cached_tokens, own.from_storage) == (PAGES * PAGE_TOKENS, 0)
            until(lambda: cache.status()["l1"]["objects"] >= PAGES, 60.0)
            other = engine.generate(OTHER)
            assert other.tokens != computed.tokens, "tokens that do not depend on the prompt prove nothing"
            first = engine.generate(LONG, 1)
            until(lambda: cache.status()["l1"]["objects"] >= 2 * PAGES + LONG_PAGES, 60.0)
            until(engine.flush, 60.0)
            loaded = engine.generate(PROMPT)
            assert loaded.tokens == own.tokens
            assert loaded.from_storage == PAGES * PAGE_TOKENS
            again = engine.generate(LONG, 1)
            assert again.tokens == first.tokens
            assert again.from_storage == LONG_PAGES * PAGE_TOKENS
            print(f"{len(LONG)} tokens, seconds to the first: computed {first.seconds:.2f}, loaded {again.seconds:.2f}")
            until(lambda: len(list((tmp_path / "l2").rglob("*.data"))) >= 2 * PAGES + LONG_PAGES, 60.0)
            assert "Traceback" not in engine.log_since_started()
        until(lambda: not cache.status()["instances"], 60.0)
        assert not cache.status()["l1"]["leased_objects"]
        cache.kill()
    with cache_server(tmp_path) as cache, SGLangServer(tmp_path, model, cache.port, log_name="sglang-2.log") as engine:
        engine.wait_ready()
        restarted = engine.generate(PROMPT)
        assert restarted.tokens == own.tokens
        assert restarted.from_storage == PAGES * PAGE_TOKENS
        cache.kill()  # SGLang goes on without it
        uncached = engine.generate([*OTHER[:PAGE_TOKENS], *PROMPT])
        assert uncached.from_storage == 0
        assert engine.generate(OTHER).tokens == other.tokens
        with cache_server(tmp_path, cache.port) as later:
            until(lambda: bool(later.status()["instances"]), 60.0)
            until(engine.flush, 60.0)
            again = engine.generate(PROMPT)
            assert again.tokens == own.tokens
            assert again.from_storage == PAGES * PAGE_TOKENS
        assert "Traceback" not in engine.log_since_started()


def test_after_weights_were_replaced_no_page_of_the_previous_ones_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, other = make_llama(tmp_path / "model"), make_llama(tmp_path / "other", seed=1)
    with cache_server(tmp_path) as cache, SGLangServer(tmp_path, model, cache.port, log_name="sglang.log") as engine:
        engine.wait_ready()
        computed = engine.generate(PROMPT)
        until(lambda: cache.status()["l1"]["objects"] >= PAGES, 60.0)
        until(engine.flush, 60.0)
        assert engine.generate(PROMPT).from_storage == PAGES * PAGE_TOKENS
        status, answer = engine.ask(
            engine.port, "POST", "/update_weights_from_disk", {"model_path": str(other)}, timeout_seconds=120.0
        )
        assert status == 200 and answer["success"], answer
        objects = cache.status()["l1"]["objects"]
        replaced = engine.generate(PROMPT)
        assert replaced.tokens != computed.tokens
        assert replaced.cached_tokens == replaced.from_storage == 0
        assert engine.generate(OTHER).from_storage == 0
        until(engine.flush, 60.0)
        assert engine.generate(PROMPT).from_storage == 0
        assert cache.status()["l1"]["objects"] == objects
        assert "This engine runs uncached, because its weights were replaced" in engine.log()


def test_pages_that_were_damaged_or_evicted_are_computed_again(tmp_path: Path) -> None:
    """All pages of a prompt at once: where a step of SGLang begins decides how its sums are rounded."""
    pytest.importorskip("transformers")
    model = make_llama(tmp_path / "model")
    longs = [prompt(seed, LONG_PAGES) for seed in range(10, 18)]
    with CacheServer(tmp_path, l1_size_gb=0.125) as cache:  # of 512 KiB and a header: room for 255 at most
        cache.wait_ready()
        with SGLangServer(tmp_path, model, cache.port, log_name="sglang.log") as engine:
            engine.wait_ready()
            computed = engine.generate(PROMPT)
            until(lambda: cache.status()["l1"]["objects"] >= PAGES, 60.0)
            until(engine.flush, 60.0)
            pages = spoil_frames(cache.shm_name, [])
            assert pages >= PAGES
            spoil_frames(cache.shm_name, range(pages))
            spoiled = engine.generate(PROMPT)
            assert (spoiled.tokens, spoiled.from_storage) == (computed.tokens, 0)
            assert "L1 held a page that is not what was stored" in engine.log()
            firsts = [engine.generate(long, 1) for long in longs]
            until(lambda: in_all(cache) >= len(longs) * LONG_PAGES, tell=cache.status)
            until(lambda: cache.status()["l1"]["evicted_objects"] >= LONG_PAGES, tell=cache.status)
            until(engine.flush, 60.0)
            kept, evicted = engine.generate(longs[-2], 1), engine.generate(PROMPT)
            assert (kept.tokens, kept.from_storage) == (firsts[-2].tokens, LONG_PAGES * PAGE_TOKENS)
            assert (evicted.tokens, evicted.from_storage) == (computed.tokens, 0)
            assert "Traceback" not in engine.log_since_started()
        until(lambda: not cache.status()["instances"], 60.0)
        assert not cache.status()["l1"]["leased_objects"]
