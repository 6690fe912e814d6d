"""`lmcache describe engine`: what an OpenAI-compatible engine, above all vLLM, tells about itself."""

from __future__ import annotations

import argparse
import os
from typing import Any

from lmcache.cli.http import ENGINE_KEY_VARIABLE, HttpRefused, answer_of, request
from lmcache.cli.output import Report
from lmcache.cli.top_figures import Metrics, parse

_GAUGES = {
    "num_requests_running": "Requests running",
    "num_requests_waiting": "Requests waiting",
    "num_preemptions_total": "Preemptions",
}
_CACHES = {"prefix_cache": "its own prefix cache", "external_prefix_cache": "the connector"}


def describe_engine(url: str, options: argparse.Namespace) -> int:
    """Prints it: 0 where the engine is healthy. ServerUnavailable where nobody answers."""

    def ask(path: str) -> Any:
        """None where the engine has no such path."""
        try:
            key = os.environ.get(ENGINE_KEY_VARIABLE, "")
            return request(url, "GET", path, token=key, timeout_seconds=options.timeout)
        except HttpRefused as error:
            if error.status == 404:
                return None
            raise

    health = "OK"
    try:
        ask("/health")
    except HttpRefused as error:
        health = str(error)
    version, models = ask("/version"), ask("/v1/models")
    report = Report("Engine")
    report.add("health", "Health", health)
    report.add("url", "URL", url)
    report.add("version", "Version", version.get("version") if isinstance(version, dict) else None)
    metrics = ask("/metrics")
    with answer_of(url, "an engine"):
        _add_models(report, models)
        _add_metrics(report, parse(str(metrics or "")))
    report.emit(options)
    return 0 if health == "OK" else 1


def _add_models(report: Report, answer: Any) -> None:
    models = answer.get("data", []) if isinstance(answer, dict) else []
    report.metrics["models"] = [
        {"id": model.get("id"), "max_model_len": model.get("max_model_len")} for model in models
    ]
    for model in report.metrics["models"]:
        length = f", up to {model['max_model_len']:,} tokens" if model["max_model_len"] else ""
        report.text(f"{'Model:':<30}{model['id']}{length}")


def _add_metrics(report: Report, metrics: Metrics) -> None:
    """Those of vLLM; None where the engine has no such figure."""
    for name, label in _GAUGES.items():
        value = _sum(metrics, name)
        report.add(name, label, value, "-" if value is None else f"{value:,.0f}")
    usage = _sum(metrics, "kv_cache_usage_perc")
    report.add("kv_cache_usage", "KV cache in use", usage, "-" if usage is None else f"{usage:.1%}")
    for name, label in _CACHES.items():
        asked, hit = _sum(metrics, f"{name}_queries_total"), _sum(metrics, f"{name}_hits_total")
        ratio = hit / asked if asked and hit is not None else None
        report.metrics |= {f"{name}_queries": asked, f"{name}_hits": hit}
        shown = "-" if ratio is None else f"{ratio:.1%} of {asked:,.0f} tokens"
        report.add(f"{name}_hit_ratio", f"Hits of {label}", ratio, shown)


def _sum(metrics: Metrics, name: str) -> float | None:
    series = metrics.get(f"vllm:{name}")
    return sum(series.values()) if series else None
