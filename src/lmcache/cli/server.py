"""`lmcache server`: reads the options, starts the server and serves until it is told to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lmcache.stop_signals import StopSignals

logger = logging.getLogger("lmcache.server")


def run(argv: Sequence[str]) -> int:
    rest = list(argv)
    if "--help" in rest or "-h" in rest:
        import shutil

        from lmcache.config.help import server_help

        print(server_help(shutil.get_terminal_size().columns), end="")
        return 0
    # Before anything else is imported: a stop that is asked for from now on is not lost.
    with contextlib.closing(StopSignals()) as signals:
        from lmcache.cli.arguments import Arguments
        from lmcache.errors import ConfigError

        own, options = Arguments("server", "").read_own(rest)
        if own.output:
            raise ConfigError("lmcache server has no results to write: --output cannot be used.")
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if own.quiet else sys.stdout):
            return _serve(options, signals, as_json=own.format == "json")


def _serve(options: Sequence[str], signals: StopSignals, *, as_json: bool) -> NoReturn:
    """Ends the process, unless ConfigError or ResourceError tells that nothing was begun."""
    from lmcache.cli.main import guarded
    from lmcache.server import Server
    from lmcache.startup import plan
    from lmcache.telemetry.line_writer import LineWriter
    from lmcache.telemetry.logs import LEVEL_VARIABLE, configure_logs, level_from

    planned = plan(options, os.environ)
    config = planned.config
    configure_logs(
        level_from(os.environ),
        # These two silence what subscribes to events; a level that is asked for stands.
        warnings_only=(config.disable_logging or config.disable_observability) and not os.environ.get(LEVEL_VARIABLE),
        stream=LineWriter(sys.stderr.fileno()) if sys.stderr else None,  # none: the server was started with 2>&-
    )
    for sentence in planned.notes:
        logger.warning("%s", sentence)
    server = Server(config, planned.adapters, planned.store_policy, planned.prefetch_policy)
    _end(guarded(lambda: server.run(signals), as_json=as_json))


def _end(exit_code: int) -> NoReturn:
    """The interpreter would wait for the threads of every pool, and some may hang in a backend or in the kernel."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it
            stream.flush()
    os._exit(exit_code)
