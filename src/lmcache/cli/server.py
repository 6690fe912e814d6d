"""`lmcache server`: reads the options, starts the server and serves until a stop signal."""

from __future__ import annotations

import contextlib
import faulthandler
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
    # Before the slow imports, so that a stop signal during them is not lost.
    with contextlib.closing(StopSignals()) as signals:
        from lmcache.cli.arguments import Arguments
        from lmcache.errors import ConfigError

        own, options = Arguments("server", "").read_own(rest)
        if own.output:
            raise ConfigError("lmcache server has no results to write: --output cannot be used.")
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if own.quiet else sys.stdout):
            return _serve(options, signals, as_json=own.format == "json")


def _show_crashes(fd: int) -> None:
    """A crash writes there where each thread was, and ends the process also where nobody reads it: what is full takes
    nothing. A socket, as of systemd's journal, cannot be opened a second time and gets nothing."""
    with contextlib.suppress(OSError):
        faulthandler.enable(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC))


def _serve(options: Sequence[str], signals: StopSignals, *, as_json: bool) -> NoReturn:
    """Ends the process. ConfigError or ResourceError: refused before anything was started."""
    from lmcache.cli.main import guarded
    from lmcache.cli.process_end import end_process
    from lmcache.server import Server
    from lmcache.startup import plan
    from lmcache.telemetry.line_writer import LineWriter
    from lmcache.telemetry.logs import LEVEL_VARIABLE, configure_logs, level_from

    planned = plan(options, os.environ)
    config = planned.config
    configure_logs(
        level_from(os.environ),
        # Both switches silence the logs below warnings, unless LMCACHE_LOG_LEVEL is set.
        warnings_only=(config.disable_logging or config.disable_observability) and not os.environ.get(LEVEL_VARIABLE),
        stream=LineWriter(sys.stderr.fileno()) if sys.stderr else None,  # None: started with 2>&-
        as_json=config.log_format == "json",
    )
    if sys.stderr:
        _show_crashes(sys.stderr.fileno())
    for sentence in planned.notes:
        logger.warning("%s", sentence)
    server = Server(planned)
    end_process(guarded(lambda: server.run(signals), as_json=as_json))
