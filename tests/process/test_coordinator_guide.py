"""docs/how-to/run_a_coordinator.md: its commands as printed, but for the size of L1, in a network of their own, where
its ports are free."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from lmcache.protocol.tokens import pack_tokens
from lmcache.testing.processes import http_json
from polling import until
from process.support import SmallEngine
from process.test_share_guide import Tour
from services.network import Network, in_own_network, with_own_memory

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "run_a_coordinator.md").read_text()
RPC_PORT, HTTP_PORT, PORT, CONTROLLER_PORT = 5555, 8080, 9300, 9000
START_SECONDS = 60.0


def test_the_commands_of_the_guide(tmp_path: Path) -> None:
    secret, server_line, *asked = re.findall(r"^```bash\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    *preparing, coordinator_line = secret.splitlines()
    assert server_line.count("60") == 1

    def test(_: Network) -> None:
        with_own_memory()
        tour = Tour(tmp_path)
        tour.run("\n".join(preparing))
        tour.environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        settings, commands = "", []  # each with the variables that are set before it
        for line in "".join(asked).splitlines():
            if re.match("[A-Z]+=", line):
                settings += f"{line}\n"
            else:
                commands.append((line, settings + line))
        model, tokens = tour.run(f'{settings}echo "$MODEL"\necho "$TOKENS"').splitlines()
        with (
            tour.start(coordinator_line, "coordinator") as coordinator,
            tour.start(server_line.replace("60", "0.05"), "server") as server,
        ):
            coordinator.wait_until_ready(PORT, "/healthz", START_SECONDS)
            server.wait_until_ready(HTTP_PORT, "/healthcheck", START_SECONDS)
            with SmallEngine(RPC_PORT, model_name=model) as engine:
                engine.store(pack_tokens(json.loads(tokens)))
                until(lambda: http_json(PORT, "GET", "/directory/stats")[1]["placements"] == 3)
                servers, shown = [tour.run(command) for line, command in commands if line.startswith("lmcache query")]
                assert len([line for line in servers.splitlines() if line.startswith("machine-a ")]) == 1
                assert "machine-a l1" in shown and "3 of 3 chunks, 768 tokens" in shown
                joined, usage, stats, keys, found, layout, pin, quota, prefetch, unpinned, deleted = (
                    json.loads(tour.run(command)) for line, command in commands if line.startswith("curl")
                )
                assert [entry["instance_id"] for entry in joined["instances"]] == ["machine-a"]
                assert usage["instances"][0]["usage"][0]["objects"] == stats["placements"] == len(keys["keys"]) == 3
                assert [len(result["placements"]) for result in found["results"]] == [1, 1, 1]
                assert layout["layout_info"] == {"machine-a": ["LocalCPUBackend", 768]}
                assert (pin["objects"], pin["owner"]) == (3, "me")
                assert (quota["cache_salt"], quota["limit_gb"]) == ("tenant", 20)
                assert prefetch["chunks"] == 3
                assert unpinned == {"pins": 1, "objects": 3, "behind": []}
                assert (deleted["deleted"], deleted["failed"]) == (3, {})
            assert http_json(CONTROLLER_PORT, "GET", "/controller/workers")[1]["workers"]
            until(lambda: http_json(HTTP_PORT, "GET", "/quota/tenant")[1]["limit_gb"] == 20)
            assert server.stop() == 0, server.log()
            assert coordinator.stop() == 0, coordinator.log()
        assert (tmp_path / "directory").exists() and (tmp_path / "decisions").exists()

    in_own_network(test)
