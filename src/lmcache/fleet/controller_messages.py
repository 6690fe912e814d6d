"""Requests and answers of the controller's routes. `model_name` and `cache_salt` are additions: without them it is the
only model that is known, and the empty salt."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from lmcache.fleet.messages import Text
from lmcache.http.field_types import Name, TokenIds

Struct = msgspec.Struct

Location = Annotated[Text, Meta(description="LocalCPUBackend: L1; LocalDiskBackend: L2")]
Position = Annotated[
    list[Text],
    Meta(
        min_length=2,
        max_length=2,
        description="[instance_id, location]",
        extra={"expected": "a list of an instance_id and a location"},
    ),
]
LocationAndTokens = Annotated[list[str | int], Meta(min_length=2, max_length=2)]
Event = Annotated[Text, Meta(description="repeated in the answer; empty: one is made")]


class QueryInstance(Struct, frozen=True):
    """An address."""

    ip: Name
    event_id: Event = ""


class QueryInstanceAnswer(Struct, frozen=True):
    """Who is there."""

    event_id: str
    instance_id: Annotated[str | None, Meta(description="null: nobody")]


class Lookup(Struct, frozen=True):
    """A prompt."""

    tokens: TokenIds
    event_id: Event = ""
    model_name: Text = ""
    cache_salt: Text = ""


class LookupAnswer(Struct, frozen=True):
    """Who has how much of its beginning."""

    event_id: str
    layout_info: Annotated[
        dict[str, LocationAndTokens], Meta(description="location and tokens by server, the most tokens first")
    ]
    complete: Annotated[bool, Meta(description="false: servers may have more of it")] = True  # an addition


class Clear(Struct, frozen=True):
    """A tier of a server."""

    instance_id: Name
    location: Location = "LocalCPUBackend"
    event_id: Event = ""


class ClearAnswer(Struct, frozen=True):
    """What was removed."""

    event_id: str
    num_objects: int
    num_bytes: int


class Positioned(Struct, frozen=True):
    """A prompt in a tier of a server."""

    instance_id: Name
    tokens: TokenIds
    location: Location = "LocalCPUBackend"
    event_id: Event = ""
    model_name: Text = ""
    cache_salt: Text = ""


class PinAnswer(Struct, frozen=True):
    """What is held."""

    event_id: str
    num_tokens: int
    pin_id: str


class UnpinAnswer(Struct, frozen=True):
    """What has ended."""

    event_id: str
    pins: int


class Recode(Struct, frozen=True):
    """A prompt of a server, and a serde."""

    instance_id: Name
    method: Annotated[Name, Meta(description="the serde of one of its L2 adapters, such as zstd")]
    tokens: TokenIds
    location: Location = "LocalCPUBackend"
    event_id: Event = ""
    model_name: Text = ""
    cache_salt: Text = ""


class Move(Struct, frozen=True):
    """A prompt, where it is and where it is to be."""

    old_position: Position
    new_position: Position
    tokens: TokenIds
    should_copy: Annotated[bool, Meta(description="leave it where it was, too")] = False
    event_id: Event = ""
    model_name: Text = ""
    cache_salt: Text = ""


class JobAnswer(Struct, frozen=True):
    """A job has begun."""

    event_id: Annotated[str, Meta(description="of the job, for POST /check_finish and GET /jobs/{request_id}")]


class OfInstance(Struct, frozen=True):
    """A server."""

    instance_id: Name
    event_id: Event = ""


class HealthAnswer(Struct, frozen=True):
    """Whether it answers."""

    event_id: str
    error_codes: Annotated[dict[str, int], Meta(description="0: it is healthy")]
    reason: str


class CheckFinish(Struct, frozen=True):
    """A job."""

    event_id: Name


class FinishAnswer(Struct, frozen=True):
    """How far it is."""

    event_id: str
    status: Annotated[str, Meta(description='"waiting", "running", "done" or "failed"')]
    objects_total: int
    objects_done: int
    objects_failed: int
    detail: str


class Worker(Struct, frozen=True):
    """A server, as a controller shows one."""

    instance_id: str
    worker_id: int
    ip: str
    port: int
    peer_init_url: str
    registration_time: Annotated[float, Meta(description="seconds since 1970-01-01 UTC")]
    last_heartbeat_time: float


class WorkerInfoAnswer(Struct, frozen=True):
    """The workers of a server: one."""

    event_id: str
    worker_infos: list[Worker]


class WorkersAnswer(Struct, frozen=True):
    """The workers of all servers."""

    workers: list[Worker]


class KeyStats(Struct, frozen=True):
    """Objects of the fleet."""

    total_keys: Annotated[int, Meta(description="each counted once")]
    keys_by_instance: Annotated[dict[str, int], Meta(description="copies")]
