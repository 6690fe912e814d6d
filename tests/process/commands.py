"""The command line as operators use it, and the options of every server of a test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

LMCACHE = [sys.executable, "-m", "lmcache.cli.main"]
COMMAND_SECONDS = 120
USAGE, MACHINE = 2, 1  # exit codes: what was asked for is wrong; this machine cannot do it


def lmcache(
    *words: str, environment: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, *LMCACHE, *words],
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
    )


def with_defaults(shm_name: str, options: Sequence[str]) -> list[str]:
    """The options, and for what they do not say: a small server on loopback, with ports of the system's choice."""
    defaults = {
        "--shm-name": shm_name,
        "--host": "127.0.0.1",
        "--port": "0",
        "--http-host": "127.0.0.1",
        "--http-port": "0",
        "--prometheus-port": "0",
        "--l1-size-gb": "0.1",
        "--eviction-policy": "LRU",
    }
    missing = [word for option, value in defaults.items() if option not in options for word in (option, value)]
    return [*missing, *options]


def unprivileged() -> list[str]:
    """What a command is begun with so that the modes of files bind it, as they bind everybody but root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is needed to test this as root")
    return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all"]
