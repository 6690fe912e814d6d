"""`lmcache server`: reads the options, starts the server and serves until it is told to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Sequence

from lmcache.config.check import remarks
from lmcache.config.load import load_server_config
from lmcache.telemetry.line_writer import LineWriter
from lmcache.telemetry.logs import configure_logs, level_from

logger = logging.getLogger("lmcache.server")


def run(argv: Sequence[str]) -> int:
    rest = list(argv)
    if "--help" in rest or "-h" in rest:
        from lmcache.config.help import server_help

        print(server_help(shutil.get_terminal_size().columns), end="")
        return 0
    quiet = [word for word in rest if word in ("--quiet", "-q")]
    rest = [word for word in rest if word not in quiet]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if quiet else sys.stdout):
        return _serve(rest)


def _serve(options: Sequence[str]) -> int:
    config = load_server_config(options, os.environ)
    configure_logs(
        level_from(os.environ),
        warnings_only=config.disable_logging or config.disable_observability,
        stream=LineWriter(sys.stderr.fileno()) if sys.stderr else None,  # none: the server was started with 2>&-
    )
    for sentence in remarks(config):
        logger.warning("%s", sentence)

    from lmcache.server import Server

    exit_code: int = Server(config).run()
    return exit_code
