"""`lmcache tool cache-simulator`: what a tier of each size would have hit, under each eviction policy."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.cli.arguments import Arguments
from lmcache.cli.output import Report
from lmcache.config.values import Choice, Number
from lmcache.core.key import DEFAULT_SALT
from lmcache.core.limits import GIB, MIB
from lmcache.errors import ConfigError, ResourceError
from lmcache.simulation.plot import draw
from lmcache.simulation.replay import Outcome, ceiling, footprint_bytes, replay
from lmcache.simulation.synthetic import Workload, generate
from lmcache.simulation.trace import Lookup, read_trace, write_trace

POLICIES = ("LRU", "IsolatedLRU", "S3FIFO")
POINTS = 8
_NEARLY = 0.95  # of what an endless tier hits


def run(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "tool cache-simulator",
        "Replays logged lookups on the server's own eviction code, without any KV, and shows the hit rate for each "
        "size and policy. Traces are files or folders that --lookup-hash-log-dir has written; without one, a made-up "
        "trace of a chat service is used.",
    )
    arguments.add_argument("trace", nargs="*", help="files of the lookup log, or folders of them")
    arguments.add_value("--policy", Choice(POLICIES), "what to compare", nargs="+", default=["LRU", "S3FIFO"])
    arguments.add_value("--size-gb", Number("GB", above=0), "sizes; 1 GB is 2^30 bytes", nargs="+", default=[])
    arguments.add_argument(
        "--quota", nargs="+", default=[], metavar="SALT=GB", help="quotas for IsolatedLRU; _default is the empty salt"
    )
    arguments.add_number("--chunk-mb", 0.0, "size of a chunk where the log does not tell it", unit="MB", minimum=0)
    arguments.add_argument("--plot", metavar="FILE.svg", default="", help="draw the curves")
    arguments.add_whole("--seed", 1, "of the made-up trace", minimum=0)
    arguments.add_whole("--requests", Workload.requests, "of the made-up trace", minimum=1)
    arguments.add_number(
        "--scan-share", Workload.scan_share, "requests in it that are one long text, once", minimum=0, maximum=0.9
    )
    arguments.add_argument("--write-trace", metavar="FILE", default="", help="keep the made-up trace")
    options = arguments.read(argv[1:])
    if options.trace:
        trace = read_trace(options.trace)
    else:
        trace = generate(Workload(requests=options.requests, scan_share=options.scan_share), options.seed)
        if options.write_trace:
            write_trace(options.write_trace, trace)
    chunk_bytes = int(options.chunk_mb * MIB)
    _check(trace, chunk_bytes)
    whole_bytes = footprint_bytes(trace, chunk_bytes)
    sizes = [_size_bytes(size) for size in options.size_gb] or [max(1, whole_bytes >> k) for k in range(POINTS)][::-1]
    limits = dict(map(_quota, options.quota))
    outcomes = {
        policy: [replay(trace, policy, size, chunk_bytes=chunk_bytes, limits=limits) for size in sizes]
        for policy in dict.fromkeys(options.policy)
    }
    endless = ceiling(trace)
    if options.plot:
        _plot(options.plot, trace, outcomes, endless)
    _report(trace, whole_bytes, outcomes, endless).emit(options)
    return 0


def _check(trace: list[Lookup], chunk_bytes: int) -> None:
    if not any(lookup.chunks for lookup in trace):
        raise ConfigError("The trace has no lookup of a full chunk.")
    if not chunk_bytes and any(not lookup.chunk_bytes for lookup in trace):
        raise ConfigError("The log does not tell how large a chunk is for every lookup: give --chunk-mb.")


def _size_bytes(size_gb: float) -> int:
    if not 0 < size_gb < 1 << 30:
        raise ConfigError(f"--size-gb must be above 0, got {size_gb:g}.")
    return max(1, int(size_gb * GIB))


def _quota(text: str) -> tuple[str, int]:
    salt, _, limit = text.rpartition("=")
    try:
        limit_bytes = int(float(limit) * GIB)
    except (ValueError, OverflowError):
        limit_bytes = -1
    if not salt or limit_bytes < 0:
        raise ConfigError(f"--quota must be like tenant=1.5, got {text!r}.")
    return "" if salt == DEFAULT_SALT else salt, limit_bytes


def _plot(path: str, trace: list[Lookup], outcomes: dict[str, list[Outcome]], endless: float) -> None:
    curves = {
        policy: [(outcome.capacity_bytes, outcome.hit_rate) for outcome in results]
        for policy, results in outcomes.items()
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(draw(f"Hit rate of {len(trace):,} lookups", curves, endless))
    except OSError as error:
        raise ResourceError(f"--plot {path} cannot be written: {error.strerror}.") from None


def _report(trace: list[Lookup], whole_bytes: int, outcomes: dict[str, list[Outcome]], endless: float) -> Report:
    report = Report("Cache simulator")
    report.add("lookups", "Lookups", len(trace), f"{len(trace):,}")
    report.add("requested_chunks", "Chunks asked for", sum(lookup.chunks for lookup in trace))
    report.add("footprint_gb", "All chunks together", whole_bytes / GIB, f"{whole_bytes / GIB:.3g} GB")
    report.add("ceiling", "Hit rate of an endless tier", endless, f"{endless:.2%}")
    report.section("hit rate")
    report.text(f"{'GB':>12}" + "".join(f"{policy:>14}" for policy in outcomes))
    for row in zip(*outcomes.values(), strict=True):
        report.text(f"{row[0].capacity_bytes / GIB:>12.4g}" + "".join(f"{outcome.hit_rate:>14.2%}" for outcome in row))
    report.section(f"size that hits {_NEARLY:.0%} of what an endless tier hits")
    for policy, results in outcomes.items():
        enough = [outcome for outcome in results if outcome.hit_rate >= _NEARLY * endless]
        smallest = min((outcome.capacity_bytes for outcome in enough), default=None)
        key = f"enough_gb_{policy}"
        if smallest is None:
            report.add(key, policy, None, "none of these sizes")
        else:
            report.add(key, policy, smallest / GIB, f"{smallest / GIB:.3g} GB")
    report.metrics["results"] = [
        {
            "policy": outcome.policy,
            "size_gb": outcome.capacity_bytes / GIB,
            "hit_rate": outcome.hit_rate,
            "evicted_objects": outcome.evicted_objects,
        }
        for results in outcomes.values()
        for outcome in results
    ]
    return report
