"""How frames travel between this process and the server it has met: in shared memory where it can be mapped."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lmcache.core.limits import MAX_NAME_BYTES
from lmcache.errors import ServerUnavailable
from lmcache.memory.engine_memory import EngineMemory
from lmcache.protocol.messages import HelloReply, TransferMode


class WantedTransfer(str, enum.Enum):
    AUTO = "auto"  # shared memory if it can be mapped, else the socket
    SHM = "shm"  # shared memory, or nothing is cached
    SOCKET = "socket"  # always the socket


@dataclass(frozen=True)
class Transfer:
    """`reason`: why not shared memory, "" where it is."""

    mode: TransferMode
    reason: str
    memory: EngineMemory | None


def agree(hello: HelloReply, wanted: WantedTransfer) -> Transfer:
    """Maps the server's memory if that is wanted and possible. ServerUnavailable when no mode suits both sides."""
    if wanted is WantedTransfer.SOCKET:
        return _over_socket(hello, "this engine is set to lmcache.mp.transfer_mode=socket")
    if TransferMode.SHM not in hello.transfer_modes:
        if wanted is WantedTransfer.SHM:
            raise ServerUnavailable(
                "The server gives this client's key no shared memory, on which lmcache.mp.transfer_mode=shm insists: "
                "set the mode to auto, or remove the .salts file of the key there."
            )
        return _over_socket(hello, "the server gives this client's key no shared memory")
    try:
        return Transfer(TransferMode.SHM, "", EngineMemory.attach(hello.shm_path, hello.shm_bytes, hello.server_epoch))
    except ServerUnavailable as error:
        if wanted is WantedTransfer.SHM:
            raise ServerUnavailable(
                f"{error}. lmcache.mp.transfer_mode=shm insists on it: share the server's /dev/shm with this engine, "
                "or set the mode to auto."
            ) from error
        return _over_socket(hello, str(error))


def _over_socket(hello: HelloReply, reason: str) -> Transfer:
    if TransferMode.SOCKET not in hello.transfer_modes:
        raise ServerUnavailable(
            f"{reason}, and this server ({hello.server_version}) does not carry frames over the socket: upgrade it."
        )
    return Transfer(TransferMode.SOCKET, reason.encode()[:MAX_NAME_BYTES].decode(errors="ignore"), None)
