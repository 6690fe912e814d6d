"""Replaces every value of a configuration that grants access, so that it can be shown."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from lmcache.config.spec import ServerConfig

HIDDEN = "[hidden]"
_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|token|credential|signature|private|connection_?string|auth|access_?key|account_?key|api_?key"
    r"|encryption_?key|(^|_)(key|sas|pw|pwd)$",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"(?<=://).+(?=@)", re.DOTALL)
_URL_QUERY = re.compile(r"(?<=\?)\S+")


def redacted(config: ServerConfig) -> dict[str, Any]:
    """Every option by name. Inside adapters and plugins, values are hidden by the name of their key, and users and
    queries of URLs wherever they stand."""
    return {option.name: shown(getattr(config, option.name)) for option in dataclasses.fields(config)}


def is_secret(name: str) -> bool:
    """Whether the value of a key of that name grants access."""
    return _SECRET_NAME.search(name) is not None


def shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: HIDDEN if is_secret(key) and item else shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    if isinstance(value, str) and "://" in value:
        return _URL_QUERY.sub(HIDDEN, _URL_USER.sub(HIDDEN, value))
    return value
