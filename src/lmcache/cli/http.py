"""How commands ask a server, or an engine: where they look for it, and what they prove themselves with."""

from __future__ import annotations

import os
from typing import Any

from lmcache.errors import ConfigError
from lmcache.http import client
from lmcache.http.client import HttpRefused, answer_of, split_url

__all__ = ["HttpRefused", "answer_of", "request", "split_url"]

DEFAULT_URL = "http://localhost:8080"
ENGINE_URL = "http://localhost:8000"
TOKEN_VARIABLE = "LMCACHE_ADMIN_TOKEN"
ENGINE_KEY_VARIABLE = "OPENAI_API_KEY"


def request(
    url: str, method: str, path: str, body: Any = None, *, token: str | None = None, timeout_seconds: float = 10.0
) -> Any:
    """Does what `client.request` does. `token`: unless given, the admin token in LMCACHE_ADMIN_TOKEN, for a cache
    server alone."""
    return client.request(url, method, path, body, token=_token(token), timeout_seconds=timeout_seconds)


def _token(given: str | None) -> str:
    """ConfigError for one that no header can carry, which is not shown."""
    token = (os.environ.get(TOKEN_VARIABLE, "") if given is None else given).strip()
    if not (token.isascii() and token.isprintable()):
        variable = TOKEN_VARIABLE if given is None else ENGINE_KEY_VARIABLE
        raise ConfigError(f"What {variable} has must be one line of ASCII.")
    return token
