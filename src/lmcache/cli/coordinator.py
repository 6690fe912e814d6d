"""`lmcache coordinator`: knows the servers of a fleet and what they have."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lmcache.cli.arguments import Arguments
from lmcache.config import unbuilt
from lmcache.config.values import Choice, Text, Whole
from lmcache.errors import ConfigError
from lmcache.fleet.event_log import DEFAULT_GROUP, DEFAULT_STREAM, HTTP, KAFKA, VALKEY
from lmcache.fleet.settings import CoordinatorSettings
from lmcache.stop_signals import StopSignals

logger = logging.getLogger("lmcache.fleet")

_DEFAULTS = CoordinatorSettings()
_SECONDS = {"unit": "seconds", "above": 0, "maximum": 366 * 86_400}
_PORT = Whole(minimum=0, maximum=65535, shown_as="PORT")
_OF_TRANSPORTS = {
    VALKEY: ("--valkey-url", "--valkey-stream", "--valkey-password-file"),
    KAFKA: ("--kafka-bootstrap-servers", "--kafka-topic", "--kafka-config-file", "--kafka-group-id"),
}


def arguments() -> Arguments:
    given = Arguments(
        "coordinator",
        "Starts a coordinator and serves until SIGTERM, SIGINT or SIGHUP: servers that have its address as "
        "--coordinator-url join, tell it what they have, and learn of each other. No engine's request waits for it. "
        "Its options come from flags alone.",
        [
            "lmcache coordinator --host 127.0.0.1",
            "lmcache coordinator --admin-token-file /etc/lmcache/token --checkpoint-path /var/lib/lmcache/directory",
        ],
    )
    given.add_value("--host", Text("HOST"), "address of both listeners", default=_DEFAULTS.host)
    given.add_value("--port", _PORT, "port for servers and operators; 0 takes a free one", default=_DEFAULTS.port)
    given.add_value(
        *("--controller-port", _PORT, "another port for the same, where scripts expect a controller"),
        default=_DEFAULTS.controller_port,
    )
    given.add_value(
        *(
            "--admin-token-file",
            Text("FILE"),
            "file with the token that servers and operators of other hosts must have",
        ),
        default="",
    )
    given.add_number("--instance-timeout", 30.0, "a server that is silent for longer is gone", **_SECONDS)
    given.add_number("--health-check-interval", 10.0, "how often silent servers are looked for", **_SECONDS)
    given.add_whole("--chunk-size", 256, "tokens per chunk, as servers have it", unit="tokens", minimum=1)
    given.add_value(
        *("--hash-algorithm", Choice(("blake3", "sha256_cbor", "builtin")), "how servers name chunks"),
        default=_DEFAULTS.hash_algorithm,
    )
    given.add_value("--checkpoint-path", Text("FILE"), "where the directory is kept for the next start", default="")
    given.add_number("--checkpoint-interval", 60.0, "how often it is written", **_SECONDS)
    given.add_value("--metadata-path", Text("FILE"), "where pins and quotas are kept", default="")
    given.add_whole("--timeout-keep-alive", 10, "how long a connection may idle", unit="seconds", minimum=1)
    _add_event_logs(given)
    given.add_argument("--disable-metrics", action="store_true", help="no /metrics")
    for name, (default, about) in unbuilt.COORDINATOR_OPTIONS.items():
        given.add_argument(name, metavar="VALUE", default=default, help=f"not built yet: {about}")
    return given


def _add_event_logs(given: Arguments) -> None:
    transports = Choice((HTTP, VALKEY, KAFKA))
    given.add_value(
        *("--event-transport", transports, "how servers tell what they have, beside POST /events"), default=HTTP
    )
    where = "where their stream is: redis://[USER@]HOST:PORT[/DATABASE], rediss:// for TLS, or unix:///PATH"
    given.add_value("--valkey-url", Text("URL"), where, default="")
    given.add_value("--valkey-stream", Text("NAME"), "name of that stream", default=DEFAULT_STREAM)
    given.add_value("--valkey-password-file", Text("FILE"), "file with the password there", default="")
    given.add_value(
        *("--kafka-bootstrap-servers", Text("HOST:PORT,..."), "brokers of Kafka with their topic"), default=""
    )
    given.add_value("--kafka-topic", Text("NAME"), "name of that topic", default=DEFAULT_STREAM)
    given.add_value(
        *("--kafka-config-file", Text("FILE"), "file with properties of the client, for TLS and a login"), default=""
    )
    given.add_value(
        *("--kafka-group-id", Text("NAME"), "what brokers call this reader, which commits nothing"),
        default=DEFAULT_GROUP,
    )


def run(argv: Sequence[str]) -> NoReturn:
    """Ends the process, once it has started."""
    # Before the slow imports, so that a stop signal during them is not lost.
    with contextlib.closing(StopSignals()) as signals:
        given = arguments()
        options = given.read(argv)
        for name, (default, instead) in unbuilt.COORDINATOR_OPTIONS.items():
            if getattr(options, name[2:].replace("-", "_")) != default:
                raise ConfigError(f"lmcache coordinator {name} is not built yet: {instead}.")
        for transport, own in _OF_TRANSPORTS.items():
            if options.event_transport != transport:
                where = f"without --event-transport {transport}"
                given.refuse_unused(options, where, *own, remedy="give both or none")
        if not options.checkpoint_path:
            given.refuse_unused(
                options, "without --checkpoint-path", "--checkpoint-interval", remedy="give both or none"
            )
        if options.output:
            raise ConfigError("lmcache coordinator has no results to write: --output cannot be used.")
        from lmcache.admin.dashboard_files import DashboardFiles
        from lmcache.cli.main import guarded
        from lmcache.cli.process_end import end_process
        from lmcache.fleet.coordinator import CoordinatorProcess
        from lmcache.telemetry.line_writer import LineWriter
        from lmcache.telemetry.logs import configure_logs, level_from

        stream = LineWriter(sys.stderr.fileno()) if sys.stderr else None  # None: started with 2>&-
        configure_logs(level_from(os.environ), stream=stream)
        names = CoordinatorSettings.__dataclass_fields__
        settings = CoordinatorSettings(**{name: getattr(options, name) for name in names})
        process = CoordinatorProcess(settings, pages=DashboardFiles("fleet.html", "fleet.html"))
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if options.quiet else sys.stdout):
            end_process(guarded(lambda: process.run(signals), as_json=options.format == "json"))
