"""`lmcache query` on a real server with real objects in L1 and in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache.cli.main import main
from lmcache.testing.processes import CacheServer
from polling import until
from process.support import SmallEngine

CHUNKS = 4


def tokens(chunks: int) -> list[int]:
    return [chunk for chunk in range(chunks) for _ in range(256)]


def test_a_prompt_is_found_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps([*tokens(CHUNKS + 1), 7]))

    def query(server: CacheServer, *words: str) -> tuple[int, Any, str]:
        url = f"http://127.0.0.1:{server.http_port}"
        code = main(["query", "--url", url, "--format", "json", *words])
        out, err = capsys.readouterr()
        return code, json.loads(out)["metrics"] if out else None, err

    with CacheServer(tmp_path, l1_size_gb=0.0625, l2_folder=tmp_path / "l2") as server:
        server.wait_ready()
        code, _, err = query(server, "--tokens-file", str(file))
        assert code == 2 and "No engine is registered" in err
        with SmallEngine(server.port) as engine:
            assert engine.store(engine.tokens(*range(CHUNKS)), salt="tenant") == CHUNKS
            until(lambda: server.status()["l2"]["adapters"][0]["objects"] == CHUNKS, 60)
            code, found, _ = query(server, "--tokens-file", str(file), "--salt", "tenant")
            disk = server.status()["l2"]["adapters"][0]["name"]
            assert code == 0
            assert (found["model_name"], found["tokens"], found["chunks"]) == ("model", len(tokens(CHUNKS + 1)) + 1, 5)
            assert (found["prefix_chunks"], found["hit_tokens"]) == (CHUNKS, CHUNKS * 256)
            assert found["tiers"] == {"l1": CHUNKS, disk: CHUNKS}
            assert [(part["first_chunk"], part["chunks"]) for part in found["ranges"]] == [(0, CHUNKS), (CHUNKS, 1)]
            assert query(server, "--tokens-file", str(file))[1]["prefix_chunks"] == 0
            server.clear("l1")
            assert query(server, "--tokens-file", str(file), "--salt", "tenant")[1]["tiers"] == {disk: CHUNKS}
            code, _, err = query(server, "--tokens", "1", "--model", "modell")
            assert code == 1 and "No engine of the model 'modell' is registered" in err and "--model model." in err
            code, _, err = query(server, "--text", "Once")
            assert code == 1 and "start the server with --tokenizer-dir, or send tokens" in err
            code, _, err = query(server, "--tokens", str(2**32))
            assert code == 1 and "tokens" in err
