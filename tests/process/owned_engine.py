"""A process that uses a server as an engine with autostart does: prints a line when it is there or why not, and leaves
when its stdin ends.

python owned_engine.py URL KEEP WAIT_SECONDS OPTION...
"""

from __future__ import annotations

import os
import sys

from lmcache.errors import LMCacheError
from lmcache.integration.engine.owned_server import OwnedServer
from lmcache.integration.engine.server_order import autostart_order


def main(url: str, keep: bool, wait_seconds: float, options: list[str]) -> None:
    server = OwnedServer.enter(autostart_order(url, options, os.environ, keep=keep))
    try:
        server.wait(wait_seconds)
        print("ready", flush=True)
    except LMCacheError as error:
        print(f"failed {error}", flush=True)
    sys.stdin.read()
    server.leave()
    print("left", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "keep", float(sys.argv[3]), sys.argv[4:])
