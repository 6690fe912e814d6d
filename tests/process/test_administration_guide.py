"""The commands of docs/how-to/administer_a_server.md, as printed, on a real server."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from lmcache.testing.processes import CacheServer
from polling import until
from process.support import SmallEngine

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "administer_a_server.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
CHUNKS = 4


def test_the_guide(tmp_path: Path) -> None:
    listing, lookup, prefetch, job, pins, removal = BLOCKS
    with CacheServer(tmp_path, l1_size_gb=0.0625, l2_folder=tmp_path / "l2") as server:
        server.wait_ready()
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "SERVER": f"http://127.0.0.1:{server.http_port}",
            "MODEL": "model",
            "TOKENS": json.dumps([chunk for chunk in range(CHUNKS) for _ in range(256)]),
        }

        def run(block: str) -> list[Any]:
            """What each command printed."""
            done = subprocess.run(
                ["bash", "-euc", block.replace("\ncurl", "; echo\ncurl")],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            return [json.loads(line) for line in done.stdout.splitlines() if line]

        with SmallEngine(server.port) as engine:
            assert engine.store(engine.tokens(*range(CHUNKS))) == CHUNKS
            until(lambda: server.status()["l2"]["adapters"][0]["objects"] == CHUNKS, 60)
            (page,) = run(listing)
            assert len(page["entries"]) == 3 and page["next_page_token"]
            environment["KEY"] = page["entries"][0]["key"]
            assert run(lookup)[0]["prefix_chunks"] == CHUNKS
            server.clear("l1")
            assert run(prefetch) == []
            until(lambda: run(job)[0]["done"], 60)
            assert run(job)[0]["objects_done"] == CHUNKS
            pinned, shown, ended = run(pins)
            assert pinned["objects"] == 1 and len(shown["pins"]) == 1 and ended == {"pins": 1, "objects": 1}
            deleted, cleared = run(removal)
            assert deleted == {"deleted": 1, "skipped": 0, "ok": True}
            assert cleared["objects"] >= CHUNKS - 1
            assert run(listing)[0]["entries"] == []
