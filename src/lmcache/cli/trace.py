"""`lmcache trace record|info|replay`: the lookups of a server, kept, described, and asked of another one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from lmcache.cli import http
from lmcache.cli.arguments import Arguments
from lmcache.cli.output import Report, seconds_text
from lmcache.cli.trace_replay import replay
from lmcache.config.values import Text
from lmcache.core.key import SaltDigest
from lmcache.core.limits import GIB, MIB
from lmcache.environment import SYSTEM
from lmcache.errors import ConfigError
from lmcache.simulation.replay import ceiling, footprint_bytes
from lmcache.simulation.trace import Lookup, read_trace, write_trace

_LOOK_SECONDS = 0.5


def run(argv: Sequence[str]) -> int:
    return {"record": _record, "info": _info, "replay": replay}[argv[0]](argv[1:])


def _record(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "trace record",
        "Keeps the lookups of a running server on this machine, which writes them with --lookup-hash-log-dir, or of "
        "logs, as one file: chunk hashes and sizes; cache salts become digests, other ones in every recording, and "
        "request ids numbers.",
    )
    arguments.add_argument("trace", nargs="*", help="files of the lookup log, or folders of them; none: the server's")
    arguments.add_value("--url", Text("URL"), "HTTP address of the server", default=http.DEFAULT_URL)
    arguments.add_number("--seconds", 60.0, "how long to record from a server", unit="seconds", minimum=0)
    arguments.add_argument("--to", metavar="FILE", required=True, help="the trace that is written")
    options = arguments.read(argv)
    lookups = read_trace(options.trace) if options.trace else _from_server(options.url, options.seconds)
    digest = SaltDigest(SYSTEM.random_bytes(SaltDigest.KEY_BYTES))
    write_trace(options.to, [dataclasses.replace(lookup, cache_salt=digest(lookup.cache_salt)) for lookup in lookups])
    report = Report("Trace")
    report.add("lookups", f"Lookups in {options.to}", len(lookups), f"{len(lookups):,}")
    report.emit(options)
    return 0


def _from_server(url: str, seconds: float) -> list[Lookup]:
    folder = http.request(url, "GET", "/config").get("lookup_hash_log_dir")
    if not folder:
        raise ConfigError(f"The server at {url} records no lookups: start it with --lookup-hash-log-dir FOLDER.")
    begun = time.time()
    while (left := begun + seconds - time.time()) > 0:
        time.sleep(min(left, _LOOK_SECONDS))
    return [lookup for lookup in read_trace([folder]) if lookup.seconds >= begun]


def _info(argv: Sequence[str]) -> int:
    arguments = Arguments("trace info", "What a trace, or a lookup log, has.")
    arguments.add_argument("trace", nargs="+", help="files, or folders of them")
    arguments.add_number("--chunk-mb", 0.0, "size of a chunk where the trace does not tell it", unit="MB", minimum=0)
    options = arguments.read(argv)
    trace = read_trace(options.trace)
    if not trace:
        raise ConfigError("The trace has no lookups.")
    requested = sum(lookup.chunks for lookup in trace)
    hit = sum(lookup.hit_chunks for lookup in trace)
    span = trace[-1].seconds - trace[0].seconds
    whole = footprint_bytes(trace, int(options.chunk_mb * MIB))
    endless = ceiling(trace)
    report = Report("Trace")
    report.add("lookups", "Lookups", len(trace), f"{len(trace):,}")
    report.add("seconds", "From the first to the last", span, seconds_text(span))
    report.add("models", "Models", sorted({lookup.model_name for lookup in trace}))
    report.add("salts", "Cache salts", len({lookup.cache_salt for lookup in trace}))
    report.add("chunk_tokens", "Tokens a chunk", sorted({lookup.chunk_tokens for lookup in trace}))
    report.add("requested_chunks", "Chunks asked for", requested, f"{requested:,}")
    report.add("footprint_gb", "All chunks together", whole / GIB, f"{whole / GIB:.3g} GB")
    report.add("hit_rate", "Hit rate when it was recorded", hit / max(1, requested), f"{hit / max(1, requested):.2%}")
    report.add("ceiling", "Hit rate of an endless tier", endless, f"{endless:.2%}")
    report.emit(options)
    return 0
