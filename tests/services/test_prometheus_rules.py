"""deploy/prometheus: promtool accepts the alert rules, and their tests show each of them firing and silent."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from typing import Any

import yaml

from services import program
from services.prometheus import PROMTOOL, RULES
from write_grafana_dashboard import FAMILIES

ROOT = RULES.parents[2]
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
]
TESTS: dict[str, Any] = yaml.safe_load((RULES.parent / "alerts_test.yaml").read_text())


def promtool(*arguments: str) -> str:
    command = [str(program(PROMTOOL, "promtool")), *arguments]
    done = subprocess.run(command, cwd=RULES.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules() -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "rules", RULES.name)
    promtool("check", "config", "--syntax-only", "prometheus.yaml")


def test_the_tests_of_the_rules_pass() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yaml")


def test_each_alert_is_shown_firing_and_silent() -> None:
    shown: dict[str, set[bool]] = defaultdict(set)
    for case in (case for test in TESTS["tests"] for case in test["alert_rule_test"]):
        shown[case["alertname"]].add(bool(case["exp_alerts"]))
    assert shown == {alert["alert"]: {True, False} for alert in ALERTS}


def test_each_alert_says_what_to_do() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.+)$", page, re.M)
    }
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}, alert["alert"]
        assert "{{ $labels." in alert["annotations"]["summary"], alert["alert"]
        path, _, anchor = alert["annotations"]["runbook"].partition("#")
        assert path == "docs/troubleshooting.md" and anchor in anchors, alert["alert"]


def test_the_alerts_go_by_metrics_that_there_are() -> None:
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    declared = {family.name + ending for family in FAMILIES.values() for ending in endings[family.type]}
    for alert in ALERTS:
        assert set(re.findall(r"\blmcache_\w+", alert["expr"])) <= declared, alert["alert"]
