"""Every exception that this package raises on purpose. Expected outcomes (hit, miss ...) are values, not these."""

from __future__ import annotations


class LMCacheError(Exception):
    """Root of the tree. Each problem is one sentence that names the cause and what to do; nearly always it is one, and
    the message is that sentence. Several are one a line (core/problems.py collects them)."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class ConfigError(LMCacheError):
    """A flag, key, file or combination is not acceptable. Command lines exit with 2."""


class ResourceError(LMCacheError):
    """The machine refuses what the configuration asks for: memory, a port, a folder, a name in use. Exit code 1."""


class ProtocolError(LMCacheError):
    """A peer sent something that the protocol does not allow."""


class VersionError(ProtocolError):
    """The peer speaks a protocol version that this side does not."""


class UnknownModel(LMCacheError):
    """No registered engine says how the objects of that model are named."""


class RemoteError(LMCacheError):
    """The server answered a call with an error. `code` is one of `protocol.messages.ErrorCode`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ServerUnavailable(LMCacheError):
    """No answer within the deadline, or no connection."""


class KeyRefused(ServerUnavailable):
    """The server does not let this client's CURVE key in."""


class StaleServer(LMCacheError):
    """Slots or leases of a server that has ended since: they name nothing any more. A load is then a miss."""


class OrderRefused(LMCacheError):
    """One load or store that an engine orders cannot be done; the sentence says why. Its tokens are computed."""


class AdapterError(LMCacheError):
    """An L2 adapter could not do an operation. `retryable` tells the runner whether trying again makes sense."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class DeadlineError(AdapterError):
    """An operation of an adapter did not end, or could not begin, within its deadline."""


class CapacityError(AdapterError):
    """The backend is full: disk, quota or slots."""


class LayoutRefused(LMCacheError):
    """The engine's KV layout cannot be cached exactly; the sentence says why. The engine runs uncached."""
