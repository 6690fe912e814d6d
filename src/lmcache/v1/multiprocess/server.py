"""`python -m lmcache.v1.multiprocess.server` is `lmcache server`."""

from __future__ import annotations

import sys

from lmcache.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["server", *sys.argv[1:]]))
