"""Versions of the wire protocol (docs/formats/wire.md)."""

PROTOCOL_VERSION = 1
OLDEST_SUPPORTED_PROTOCOL_VERSION = 1
