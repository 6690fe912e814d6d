"""Checks of what engines send. Each refusal is one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lmcache.core import limits
from lmcache.core.key import is_served_layout
from lmcache.errors import RemoteError
from lmcache.protocol.messages import ErrorCode, RegisterInstance, RegisterWorker, Source, TransferMode


def check_name(subject: str, name: str) -> None:
    if not name:
        raise RemoteError(ErrorCode.BAD_REQUEST, f"The {subject} is empty.")
    if len(name.encode()) > limits.MAX_NAME_BYTES:
        raise RemoteError(ErrorCode.TOO_LARGE, f"The {subject} has more than {limits.MAX_NAME_BYTES} bytes.")


def check_range(subject: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RemoteError(ErrorCode.BAD_REQUEST, f"{subject} is {value}; it must be from {low} to {high}.")


def check_deadline(seconds: float) -> None:
    if not math.isfinite(seconds):
        raise RemoteError(ErrorCode.BAD_REQUEST, "The deadline must be a number of seconds.")


def check_source(source: Source) -> None:
    check_range("The source's number of tokens", source.tokens, 0, limits.MAX_TOKENS_PER_SESSION)
    if not 0 <= source.wait_seconds < math.inf:
        raise RemoteError(ErrorCode.BAD_REQUEST, "The wait for a source must be a number of seconds from 0.")


def check_instance(message: RegisterInstance) -> None:
    check_name("instance id", message.instance_id)
    check_name("model name", message.model_name)
    check_range("kv_world_size", message.kv_world_size, 1, limits.MAX_WORLD_SIZE)
    check_range("object_groups", message.object_groups, 1, limits.MAX_OBJECT_GROUPS)
    if message.kv_world_size * message.object_groups > limits.MAX_NAMESPACES_PER_TENANT:
        raise RemoteError(
            ErrorCode.TOO_MANY,
            f"{message.kv_world_size} ranks of {message.object_groups} object groups are more than the "
            f"{limits.MAX_NAMESPACES_PER_TENANT} namespaces that one instance may have.",
        )
    if message.tail_tokens and len(message.tail_tokens) != message.object_groups:
        raise RemoteError(
            ErrorCode.BAD_REQUEST, "There must be one number of tail tokens for each object group, or none."
        )
    for tokens in message.tail_tokens:
        check_range("number of tail tokens", tokens, 0, limits.MAX_TOKENS_PER_SESSION)
    check_range("lookahead_tokens", message.lookahead_tokens, 0, limits.MAX_LOOKAHEAD_TOKENS)
    _check_heartbeat(message.heartbeat_interval_seconds)
    if len(message.engine.encode()) > limits.MAX_NAME_BYTES:
        raise RemoteError(ErrorCode.TOO_LARGE, f"The engine's name has more than {limits.MAX_NAME_BYTES} bytes.")


def check_worker(message: RegisterWorker, instance: RegisterInstance | None, others: Iterable[RegisterWorker]) -> None:
    """The message itself, against its instance where that is known, and against the instance's other workers."""
    check_name("instance id", message.instance_id)
    check_range("worker_id", message.worker_id, 0, limits.MAX_WORLD_SIZE - 1)
    check_range("kv_rank", message.kv_rank, 0, limits.MAX_WORLD_SIZE - 1)
    _check_heartbeat(message.heartbeat_interval_seconds)
    check_range("number of layouts", len(message.layouts), 1, limits.MAX_OBJECT_GROUPS)
    if len(message.layouts) != len(message.payload_bytes):
        raise RemoteError(ErrorCode.BAD_REQUEST, "There must be one payload size for each layout.")
    for layout in message.layouts:
        if not is_served_layout(layout):
            raise RemoteError(
                ErrorCode.BAD_REQUEST,
                "A layout must be 32 hexadecimal digits, and may have the name of a lossy serde behind a ~.",
            )
    _check_tensors(message.tensors)
    if message.transfer_mode not in [mode.value for mode in TransferMode]:
        raise RemoteError(ErrorCode.BAD_REQUEST, f"There is no transfer mode {message.transfer_mode[:64]!r}.")
    if len(message.transfer_reason.encode()) > limits.MAX_NAME_BYTES:
        raise RemoteError(ErrorCode.TOO_LARGE, f"A reason has at most {limits.MAX_NAME_BYTES} bytes.")
    for size_bytes in message.payload_bytes:
        check_range("payload size", size_bytes, 1, limits.MAX_OBJECT_BYTES)
    if instance is not None:
        if message.kv_rank >= instance.kv_world_size:
            raise RemoteError(
                ErrorCode.LAYOUT_CONFLICT,
                f"Rank {message.kv_rank} does not fit an instance of {instance.kv_world_size} ranks.",
            )
        if len(message.layouts) != instance.object_groups:
            raise RemoteError(
                ErrorCode.LAYOUT_CONFLICT,
                f"{len(message.layouts)} layouts do not fit an instance of {instance.object_groups} object groups.",
            )
    for other in others:
        same_rank = other.kv_rank == message.kv_rank
        if same_rank and (other.layouts, other.payload_bytes) != (message.layouts, message.payload_bytes):
            raise RemoteError(
                ErrorCode.LAYOUT_CONFLICT,
                f"Workers {other.worker_id} and {message.worker_id} have rank {message.kv_rank} and different layouts.",
            )


def _check_tensors(tensors: list[tuple[str, list[int]]]) -> None:
    check_range("number of tensors", len(tensors), 0, limits.MAX_TENSORS)
    for dtype, shape in tensors:
        check_range("length of a dtype", len(dtype), 1, limits.MAX_DTYPE_CHARACTERS)
        check_range("number of dimensions", len(shape), 0, limits.MAX_TENSOR_DIMENSIONS)
        for size in shape:
            check_range("size of a dimension", size, 0, limits.MAX_OBJECT_BYTES)


def _check_heartbeat(seconds: float) -> None:
    low, high = limits.MIN_HEARTBEAT_SECONDS, limits.MAX_HEARTBEAT_SECONDS
    if not (math.isfinite(seconds) and low <= seconds <= high):
        raise RemoteError(ErrorCode.BAD_REQUEST, f"The heartbeat interval must be from {low:g} to {high:g} seconds.")
