"""What an operation over HTTP is. Routes, checks, the list at `/`, OpenAPI and docs/reference/http.md are made from the
table of all of them (app.py)."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request

from lmcache.core.limits import MAX_HTTP_BODY_BYTES, MAX_HTTP_LARGE_BODY_BYTES
from lmcache.http.access import has_token, may_read_salts


class _Text(StringConvertor):
    """Any text, slashes and line ends included, which Starlette's own convertor of paths does not take."""

    regex = r"[\s\S]*"


register_url_convertor("text", _Text())


class Access(enum.Enum):
    """Who may ask. The value ends a sentence."""

    PUBLIC = "everybody"
    READ = "this host, by a name of loopback, and whoever has the admin token"  # keys, tokens or salts are in it
    CHANGE = "this host and whoever has the admin token"


@dataclass
class Call:
    """A request that was let through. `body` and `query` have the types of its operation."""

    request: Request
    body: Any
    query: Any
    token: str  # the admin token that counts now

    @property
    def may_read_salts(self) -> bool:
        return may_read_salts(self.request, self.token)

    @property
    def admin_token(self) -> str:
        """That it came with; "" where it came from this host without."""
        return self.token if has_token(self.request, self.token) else ""

    def path(self, name: str) -> str:
        value: str = self.request.path_params[name]
        return value


@dataclass(frozen=True)
class Operation:
    """`path` as Starlette writes it. `answer` is the Struct of a success, a media type for what is no JSON, or
    None for nothing."""

    method: str
    path: str
    summary: str  # a sentence
    access: Access
    handler: Callable[[Call], Awaitable[Any]]
    answer: Any
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    status: int = 200
    large_body: bool = False
    most_body_bytes: int = 0  # where it is neither of the usual bounds
    decode: Callable[[bytes], Any] | None = None  # of a body that is read in another way; HTTPException
    refusals: dict[int, str] = field(default_factory=dict)  # beyond those of every operation: status and when
    other_answers: dict[int, Any] = field(default_factory=dict)  # statuses with a Struct of their own

    @property
    def action(self) -> str:
        """Its name in the audit log, such as cache.clear or quota.put."""
        words = [word for word in self.path.split("/") if word and not word.startswith("{")]
        return ".".join(words if words[-1] == "clear" else [*words, self.method.lower()])

    @property
    def max_body_bytes(self) -> int:
        if self.most_body_bytes:
            return self.most_body_bytes
        return MAX_HTTP_LARGE_BODY_BYTES if self.large_body else MAX_HTTP_BODY_BYTES

    @property
    def open_path(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":text}", "}")
