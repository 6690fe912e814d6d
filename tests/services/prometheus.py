"""A Prometheus that scrapes local ports every second, with the alert rules of deploy/prometheus.

with Prometheus(tmp_path, {"one": 9090}) as prometheus:
    prometheus.wait_ready()
    prometheus.query("up")
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from lmcache.testing.processes import LOOPBACK, ManagedProcess, free_port
from services import FOLDER, program

READY_SECONDS = 60.0
RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yaml"
PROMETHEUS = FOLDER / "debian" / "usr" / "bin" / "prometheus"
PROMTOOL = FOLDER / "debian" / "usr" / "bin" / "promtool"


class Prometheus(ManagedProcess):
    name = "Prometheus"

    def __init__(self, folder: Path, ports: Mapping[str, int], *, scrape_seconds: int = 1) -> None:
        """`ports`: by the value of `instance`."""
        folder.mkdir(exist_ok=True)
        self.port = free_port()
        targets = [{"targets": [f"{LOOPBACK}:{port}"], "labels": {"instance": name}} for name, port in ports.items()]
        config = {
            "global": {"scrape_interval": f"{scrape_seconds}s", "evaluation_interval": f"{scrape_seconds}s"},
            "scrape_configs": [{"job_name": "lmcache", "static_configs": targets}],
            "rule_files": [str(RULES)],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        command = [
            str(program(PROMETHEUS, "Prometheus")),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={LOOPBACK}:{self.port}",
        ]
        super().__init__(command, folder / "prometheus.log")

    def wait_ready(self) -> None:
        self.wait_until_ready(self.port, "/-/ready", READY_SECONDS)

    def _get(self, path: str) -> Any:
        """AssertionError with what it answered for what it cannot do."""
        status, answer = self.ask(self.port, "GET", path)
        assert status == 200 and answer["status"] == "success" and not answer.get("warnings"), answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query, each with "metric" and "value"."""
        return list(self._get(f"/api/v1/query?{urlencode({'query': expression})}")["result"])

    def metric_names(self) -> set[str]:
        return set(self._get("/api/v1/label/__name__/values"))

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]
