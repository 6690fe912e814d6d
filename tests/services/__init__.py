"""Real services for tests, a file each. `scripts/install_services.py` installs them into the environment."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest

FOLDER = Path(sys.prefix) / "services"
_PACKAGES_OF_ENGINES = {"nixl": "nixl", "mooncake_te": "mooncake"}
REQUIRED = "TEST_SERVICES_REQUIRED"  # set by `make test` and `make nightly`: what is missing is a failure then


def missing(part: str, *, installed: bool = True) -> NoReturn:
    """Ends the test, or the module that calls this when it is imported: the part is not installed, or this machine does
    not give it."""
    sentence = f"{part} is not installed; `python scripts/install_services.py` does it."
    if not installed:
        sentence = f"{part} is not to be had on this machine."
    if os.environ.get(REQUIRED):
        pytest.fail(sentence)
    pytest.skip(sentence, allow_module_level=True)


def need_package(name: str) -> None:
    """Ends the test or the module where a Python package of the services is not installed."""
    if importlib.util.find_spec(name) is None:
        missing(name)


def need_engine(name: str) -> None:
    """Ends the test where --p2p-transfer-engine `name` needs a package that is not installed."""
    if name in _PACKAGES_OF_ENGINES:
        need_package(_PACKAGES_OF_ENGINES[name])


def program(path: Path, part: str) -> Path:
    """The path of a service's program, which must be there."""
    if not os.access(path, os.X_OK):
        missing(part)
    return path


def debian_environment() -> dict[str, str]:
    """What a program of an unpacked Debian package needs to find its libraries."""
    libraries = FOLDER / "debian" / "usr" / "lib"
    return {"LD_LIBRARY_PATH": f"{libraries / 'x86_64-linux-gnu'}:{libraries}"}
