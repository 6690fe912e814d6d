"""What the CURVE key of a client allows it: its own instances, and the cache salts of its key.

A client that is limited to some salts gets no shared memory, in which the objects of all salts lie: its frames travel
over the socket, each checked against a lease or a reservation that was given for one of its salts. A refusal is made
before anything is looked up, so neither its words nor its time depend on what is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from lmcache.errors import RemoteError
from lmcache.protocol.messages import (
    Clear,
    ErrorCode,
    HelloReply,
    Message,
    RegisterInstance,
    RegisterWorker,
    TransferMode,
)
from lmcache.service.instances import InstanceRegistry
from lmcache.transport.deferred import Deferred
from lmcache.transport.rpc_server import RpcServer

if TYPE_CHECKING:
    from lmcache.transport.curve_clients import CurveClient

Reply = TypeVar("Reply", bound="Message | Deferred")


class ClientAccess:
    """Belongs to the message loop. Without CURVE everything is allowed to everybody who can connect."""

    def __init__(self, loop: RpcServer, registry: InstanceRegistry) -> None:
        self._loop = loop
        self._registry = registry

    def guarded(self, handler: Callable[[Any], Reply]) -> Callable[[Any], Reply]:
        """The handler, behind a check of each message against the key of its sender."""

        def handle(message: Any) -> Reply:
            client = self._loop.caller
            if client is None:
                return handler(message)
            self._check(client, message)
            reply = handler(message)
            if isinstance(message, RegisterInstance | RegisterWorker):
                self._registry.instances[message.instance_id].client = client.name
            return reply

        return handle

    def hello(self, reply: HelloReply) -> HelloReply:
        """What this caller is told of it."""
        client = self._loop.caller
        if client is None or client.salts is None:
            return reply
        return msgspec.structs.replace(reply, transfer_modes=[TransferMode.SOCKET.value], shm_path="", shm_bytes=0)

    def _check(self, client: CurveClient, message: Any) -> None:
        salt = getattr(message, "cache_salt", None)
        if client.salts is not None:
            if salt is not None and salt not in client.salts:
                raise RemoteError(ErrorCode.FORBIDDEN, f"The key {client.name} may not use this cache salt.")
            if isinstance(message, Clear):
                raise RemoteError(
                    ErrorCode.FORBIDDEN, f"The key {client.name} is limited to some salts: it clears none."
                )
            if isinstance(message, RegisterWorker) and message.transfer_mode != TransferMode.SOCKET:
                raise RemoteError(
                    ErrorCode.FORBIDDEN,
                    f"The key {client.name} is limited to some salts: its workers must use lmcache.mp.transfer_mode "
                    "socket or auto, as shared memory has the objects of all salts.",
                )
        instance = self._registry.instances.get(getattr(message, "instance_id", ""))
        if instance is not None and instance.client != client.name:
            if isinstance(message, RegisterInstance | RegisterWorker):
                raise RemoteError(
                    ErrorCode.LAYOUT_CONFLICT,
                    f"Instance {instance.instance_id!r} is registered by another engine that lives: give each engine "
                    "an engine_id of its own, or none.",
                )
            raise RemoteError(
                ErrorCode.UNKNOWN_INSTANCE, f"Instance {instance.instance_id!r} is not registered; register first."
            )
