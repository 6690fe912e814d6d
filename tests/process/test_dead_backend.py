"""A backend that is killed is seen where operators look: one line of the log, `lmcache doctor`, an alert of Prometheus.
The dashboard is in test_dashboard.py."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from lmcache.cli.main import main
from lmcache.testing.processes import LOOPBACK, CacheServer
from polling import until
from process.support import SmallEngine
from services.prometheus import Prometheus
from services.redis import Valkey

FAULTS_IN_A_ROW = 2  # before it is left alone, each with a line that says what failed


def test_it_is_seen_in_the_log_by_doctor_and_in_an_alert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Valkey(tmp_path / "valkey") as valkey:
        valkey.wait_ready()
        remote = json.dumps({"type": "resp", "host": LOOPBACK, "port": valkey.port})
        with (
            CacheServer(
                tmp_path, l1_size_gb=0.0625, l2_folder=tmp_path / "l2", extra=("--l2-adapter", remote)
            ) as server,
            Prometheus(tmp_path / "prometheus", {"here": server.http_port}) as prometheus,
        ):
            server.wait_ready()
            prometheus.wait_ready()
            folder, dead = (adapter["name"] for adapter in server.status()["l2"]["adapters"])

            def raised() -> list[str]:
                (rule,) = [rule for rule in prometheus.rules() if rule["name"] == "LMCacheBackendSuspended"]
                return [alert["labels"]["l2_name"] for alert in rule["alerts"]]

            def doctor() -> tuple[int, dict[str, str]]:
                url = f"http://{LOOPBACK}:{server.http_port}"
                code = main(["doctor", "--skip-import", "--format", "json", "--url", url])
                checks = json.loads(capsys.readouterr().out)["metrics"]["checks"]
                return code, {check["name"]: check["level"] for check in checks if "adapter" in check["name"]}

            with SmallEngine(server.port) as engine:
                prompts = count()

                def store() -> None:
                    assert engine.store(engine.tokens(next(prompts))) == 1

                store()
                until(lambda: [adapter["objects"] for adapter in server.status()["l2"]["adapters"]] == [1, 1])
                until(lambda: prometheus.query("up == 1"))
                assert doctor()[1] == {f"adapter {folder}": "ok", f"adapter {dead}": "ok"}
                assert raised() == []

                valkey.kill()

                def suspended() -> bool:
                    store()
                    return bool(server.status()["l2"]["adapters"][1]["stores_suspended"])

                until(suspended, 60.0)
                for _ in range(50):
                    store()
                until(lambda: raised() == [dead], 30.0, tell=raised)
            code, levels = doctor()
            assert (code, levels) == (1, {f"adapter {folder}": "ok", f"adapter {dead}": "problem"})
            lines = [line for line in server.log().splitlines() if dead in line and " WARNING" in line]
            assert "stores are suspended for" in lines.pop(), lines
            assert len(lines) <= FAULTS_IN_A_ROW and not any("suspended" in line for line in lines), lines
