"""Types of fields that several interfaces over HTTP take: what is allowed, and how a refusal says so."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from lmcache.core.limits import MAX_HTTP_TOKENS, MAX_NAME_BYTES

Name = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_NAME_BYTES,
        extra={"expected": f"a string of 1 to {MAX_NAME_BYTES} characters"},
    ),
]
TokenIds = Annotated[
    list[Annotated[int, Meta(ge=0, le=2**32 - 1)]],
    Meta(
        max_length=MAX_HTTP_TOKENS,
        description=f"token ids of a prompt, at most {MAX_HTTP_TOKENS}; behind full chunks counts what is stored",
        extra={"expected": f"a list of at most {MAX_HTTP_TOKENS} whole numbers from 0 to 4294967295"},
    ),
]
