"""`lmcache server`: reads the options, starts the server and serves until it is told to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Sequence

from lmcache.cli.arguments import Arguments
from lmcache.errors import ConfigError
from lmcache.telemetry.line_writer import LineWriter
from lmcache.telemetry.logs import LEVEL_VARIABLE, configure_logs, level_from

logger = logging.getLogger("lmcache.server")


def run(argv: Sequence[str]) -> int:
    rest = list(argv)
    if "--help" in rest or "-h" in rest:
        from lmcache.config.help import server_help

        print(server_help(shutil.get_terminal_size().columns), end="")
        return 0
    own, options = Arguments("server", "").read_own(rest)  # --format is for errors, which cli/main.py prints
    if own.output:
        raise ConfigError("lmcache server has no results to write: --output cannot be used.")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if own.quiet else sys.stdout):
        return _serve(options)


def _serve(options: Sequence[str]) -> int:
    from lmcache.server import Server  # here, so that --help is quick
    from lmcache.startup import plan

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
    exit_code: int = Server(config, planned.adapters, planned.store_policy, planned.prefetch_policy).run()
    return exit_code
