"""Calls by an engine that a fault of ours must not end."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def contained(log: logging.Logger, fallback: Any, *, of_arguments: bool = False) -> Callable[[Method], Method]:
    """The root of one call by the engine: an unexpected fault is logged and answered with `fallback`, or with what it
    returns, for the call's arguments where `of_arguments`."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                return method(self, *arguments, **keywords)
            except Exception:
                log.exception("LMCache failed in %s; the engine goes on without it", method.__name__)
                if of_arguments:
                    return fallback(*arguments, **keywords)
                return fallback() if callable(fallback) else fallback

        return cast(Method, call)

    return wrap
