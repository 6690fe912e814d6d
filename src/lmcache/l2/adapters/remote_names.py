"""Names of objects in remote backends, one scheme for all of them (docs/formats/remote-names.md).

    PREFIX/v1/<namespace digest, 64 hex digits>/<chunk hash, 64 hex digits>

The whole key is in the name, so that a lookup of what another server stored is one question to the backend. The names
of a namespace's parts are in its objects: the header of any frame has them (`identify_namespace`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from lmcache.core.frame import parse_header
from lmcache.core.key import Namespace, ObjectKey
from lmcache.core.limits import FRAME_HEADER_BYTES

VERSION = "v1"
DEFAULT_PREFIX = "lmcache"
MAX_PREFIX_CHARACTERS = 128

# No character of it has a meaning in URLs, globs, hash tags or file systems.
_PREFIX = r"[A-Za-z0-9](?:[A-Za-z0-9._:/-]{0,126}[A-Za-z0-9])?"
_OBJECT = re.compile(r"([0-9a-f]{64})/([0-9a-f]{64})")

# The type of an adapter's key "prefix".
Prefix = Annotated[
    str,
    Meta(
        pattern=rf"^{_PREFIX}\Z",
        description="beginning of every name in the backend; servers with the same one share their objects",
        extra={
            "expected": f"1 to {MAX_PREFIX_CHARACTERS} letters, digits and . _ : / -, with a letter or digit at "
            "both ends"
        },
    ),
]


@dataclass(frozen=True, slots=True)
class RemoteNames:
    """The names of one prefix, which `Prefix` has checked."""

    prefix: str = DEFAULT_PREFIX

    @property
    def root(self) -> str:
        """What every name of an object begins with."""
        return f"{self.prefix}/{VERSION}/"

    def folder(self, digest: bytes) -> str:
        """What the names of a namespace's objects begin with; `digest` has 32 bytes."""
        return f"{self.root}{digest.hex()}/"

    def names(self, keys: Iterable[ObjectKey]) -> list[str]:
        root = self.root
        return [f"{root}{namespace.digest.hex()}/{chunk_hash.hex()}" for namespace, chunk_hash in keys]

    def parse(self, name: str) -> tuple[bytes, bytes] | None:
        """Namespace digest and chunk hash, 32 bytes each. None for what is not the name of an object: it is neither
        read nor counted nor deleted."""
        if not name.startswith(self.root):
            return None
        match = _OBJECT.fullmatch(name, len(self.root))
        return (bytes.fromhex(match[1]), bytes.fromhex(match[2])) if match else None


def identify_namespace(beginning: bytes | memoryview, digest: bytes) -> Namespace | None:
    """The namespace of that digest, out of the first 4096 bytes of one of its objects. None where they are not the
    header of such a frame: another object may have it. A namespace of which none has it is an `UnnamedNamespace`."""
    try:
        namespace = Namespace.decode(parse_header(beginning[:FRAME_HEADER_BYTES]).namespace)
    except (ValueError, msgspec.MsgspecError):
        return None
    return namespace if namespace.digest == digest else None
