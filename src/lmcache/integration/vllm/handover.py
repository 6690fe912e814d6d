"""Prefill and decode apart: what the engine that computes a prompt tells the one that goes on with it.

A router has the first engine compute the prompt alone, and gives what that one's answer has under `kv_transfer_params`
to the second engine, unchanged. Connectors share these parameters, so ours has one key in it. They come from whoever
sends requests, so nothing that they name is trusted: a server asks no peer that is not a member already, and all that
is found is checked as ever.
"""

from __future__ import annotations

import logging
from typing import Any

from lmcache.core.limits import MAX_NAME_BYTES, MAX_TOKENS_PER_SESSION, SERVER_EPOCH_BYTES
from lmcache.protocol.messages import HelloReply, Source

log = logging.getLogger("lmcache.vllm")

SOURCE_KEY = "lmcache.mp.source"
HANDOVER_SECONDS = 10.0


def is_handed_over(request: Any) -> bool:
    """Whether another engine goes on with the request."""
    params = getattr(request, "kv_transfer_params", None)
    return isinstance(params, dict) and params.get("do_remote_decode") is True


def is_fetched_by_another(request: Any) -> bool:
    """Whether NixlConnector, beside ours in a MultiConnector, has still to load the prompt from the engine that
    computed it: it takes that word away when it begins. Without it no answer of an engine names blocks."""
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
        return False
    return bool(params.get("remote_block_ids")) and bool(params.get("remote_engine_id"))


def handover(instance_id: str, server: HelloReply, tokens: int) -> dict[str, Any]:
    """`tokens` of the request's beginning are stored at that server, or are being stored."""
    source = {
        "instance": instance_id,
        "p2p": server.peer_address,
        "epoch": server.server_epoch.hex(),
        "tokens": tokens,
    }
    return {SOURCE_KEY: source}


def source_of(request: Any, wait_seconds: float) -> Source | None:
    """What another engine has told; None for nothing, or nothing that can be used."""
    params = getattr(request, "kv_transfer_params", None)
    told = params.get(SOURCE_KEY) if isinstance(params, dict) else None
    if told is None:
        return None
    source = _read(told, wait_seconds)
    if source is None:
        log.warning("%s of request %s is not what an engine tells: ignored", SOURCE_KEY, request.request_id)
    return source


def _read(told: Any, wait_seconds: float) -> Source | None:
    if not isinstance(told, dict):
        return None
    instance_id, peer_address, epoch, tokens = (told.get(key) for key in ("instance", "p2p", "epoch", "tokens"))
    if not (isinstance(instance_id, str) and isinstance(peer_address, str) and isinstance(epoch, str)):
        return None
    if type(tokens) is not int or not 0 <= tokens <= MAX_TOKENS_PER_SESSION:
        return None
    try:
        longest = max(len(instance_id.encode()), len(peer_address.encode()))
        server_epoch = bytes.fromhex(epoch)
    except ValueError:
        return None
    if longest > MAX_NAME_BYTES or len(server_epoch) != SERVER_EPOCH_BYTES:
        return None
    return Source(instance_id, peer_address, server_epoch, tokens, wait_seconds)
