"""A server of another version of the package, which speaks other versions of the protocol."""

from __future__ import annotations

PACKAGE_VERSION = "99.0"
_PROGRAM = """
import sys, lmcache, lmcache.protocol.messages as messages
lmcache.__version__ = "{package}"
messages.OLDEST_SUPPORTED_PROTOCOL_VERSION, messages.PROTOCOL_VERSION = {oldest}, {newest}
from lmcache.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def other_version(oldest: int, newest: int) -> tuple[str, str]:
    """What Python runs as `lmcache`: it speaks these versions of the protocol and those between them."""
    return "-c", _PROGRAM.format(package=PACKAGE_VERSION, oldest=oldest, newest=newest)
