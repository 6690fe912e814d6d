"""A KV cache server for LLM inference engines, and the client side that runs inside an engine."""

from __future__ import annotations

__version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata  # on demand: it costs more time than every other import of a short command

    try:
        version = metadata.version("lmcache")
    except metadata.PackageNotFoundError:  # running from a source tree that was not installed
        version = "0.1.0"
    globals()["__version__"] = version
    return version
