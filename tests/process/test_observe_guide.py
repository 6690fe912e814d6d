"""The commands of docs/how-to/observe_a_server.md, as printed but for sizes and folders, in a network of their own,
where the default ports are free."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import yaml

from lmcache.protocol import messages as m
from polling import until
from process.support import CALL_SECONDS, SmallEngine
from process.test_share_guide import Tour
from process.test_short_guides import HOW_TO, RPC_PORT, blocks, hits, serving
from services import need_package
from services.network import Network, in_own_network, with_own_memory

PAGE = "observe_a_server.md"
TEXT = (HOW_TO / PAGE).read_text()
SENT_SECONDS = 60.0
TRACED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def sections(folder: Path) -> list[list[str]]:
    """The lines of each block; blocks of the same server follow each other."""
    fitted = {"--l1-size-gb 60": "--l1-size-gb 0.05", "/var/log/lmcache": str(folder)}
    return [block.splitlines() for block in blocks(PAGE, **fitted)]


def a_traced_request(engine: SmallEngine) -> None:
    message = m.Lookup(engine.instance_id, "traced", "", 0, engine.tokens(1), trace_parent=TRACED)
    engine.client.call("lookup", message, CALL_SECONDS)
    engine.end("traced")


def test_it_is_observed(tmp_path: Path) -> None:
    need_package("opentelemetry")
    from support.otlp_receiver import a_receiver

    (
        (plain, scrape),
        (install, exporting),
        (losses,),
        (logging,),
        (louder,),
        (placed,),
        where,
    ) = sections(tmp_path)
    assert install.startswith("pip install ")

    def test(_: Network) -> None:
        with_own_memory()
        tour = Tour(tmp_path)
        with serving(tour, plain), SmallEngine(RPC_PORT) as engine:
            assert hits(engine)
            assert 'lmcache_mp_misses_total{reason="' in tour.run(scrape)
        tour.environment["OTEL_METRIC_EXPORT_INTERVAL"] = "300"
        with a_receiver(4317) as receiver, serving(tour, exporting), SmallEngine(RPC_PORT) as engine:
            a_traced_request(engine)
            until(lambda: receiver.named("request"), SENT_SECONDS)
            until(lambda: "lmcache_mp.lookup_requested" in receiver.metrics, SENT_SECONDS)
            assert receiver.resources[0]["service.instance.id"] == "cache-1"
            # How many is not known: a machine that stands still for seconds loses some.
            assert sorted(line.split()[0] for line in tour.run(losses).splitlines()) == [
                "lmcache_mp_otlp_dropped_spans_total",
                "lmcache_mp_otlp_failed_exports_total",
            ]
        with serving(tour, logging), SmallEngine(RPC_PORT) as engine:
            assert hits(engine)
            assert json.loads(tour.run(louder)) == {"level": "DEBUG"}
            written = (tmp_path / "server.log").read_text().splitlines()
            assert any(json.loads(line)["level"] == "INFO" for line in written if line.startswith("{"))
        assert list((tmp_path / "lookups").iterdir())
        with serving(tour, placed):
            assert " interleave:" in tour.run("\n".join(where))
            assert "is interleaved over NUMA nodes " in (tmp_path / "server.log").read_text()

    in_own_network(test)


def test_what_it_names_is_there(tmp_path: Path) -> None:
    reference = (HOW_TO.parent / "reference" / "metrics.md").read_text()
    for name in set(re.findall(r"`(lmcache_mp_\w+)`", TEXT)):
        assert f"| `{name}` |" in reference, name
    tracing = (HOW_TO.parents[1] / "src" / "lmcache" / "telemetry" / "tracing.py").read_text()
    for span in re.findall(r"^\| `(request|mp\.\w+)` \|", TEXT, re.MULTILINE):
        assert span in tracing
    (scraping,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (job,) = yaml.safe_load(scraping)["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:9090"]}] and set(job["authorization"]) == {
        "credentials_file"
    }
    for path in re.findall(r"`(deploy/[\w./]+)`", TEXT):
        assert os.path.exists(HOW_TO.parents[1] / path), path
