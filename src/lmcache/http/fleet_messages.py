"""What a coordinator tells of its fleet, and each server that has joined one: what the page at `/` of either shows."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Struct = msgspec.Struct

Told = Literal["everything", "nothing", "gap", "waits", "resync"]


class FleetServer(Struct, frozen=True):
    """A server of the fleet."""

    instance_id: str
    url: Annotated[str, Meta(description="where its HTTP listener is reached")]
    joined_seconds: Annotated[float, Meta(description="since it joined")]
    silent_seconds: Annotated[float, Meta(description="since its last heartbeat")]
    l1_objects: int
    l1_used_bytes: int
    l1_capacity_bytes: Annotated[int, Meta(description="0: not told")]
    l2_objects: Annotated[int, Meta(description="over all its adapters; what several servers share counts for each")]
    told: Annotated[
        Told,
        Meta(description="what is known; gap: events are missing; resync: it tells everything; waits: others do first"),
    ]
    behind: Annotated[list[str], Meta(description="what it has not taken yet of operators: pins, quotas")]


class FleetOverview(Struct, frozen=True):
    """The servers of the fleet."""

    servers: list[FleetServer]
    instance_timeout_seconds: Annotated[float, Meta(description="a server that is silent for longer is gone")]
    # of a server that answers
    coordinator: Annotated[str, Meta(description="its address; empty: the coordinator itself answers")] = ""
    instance_id: Annotated[str, Meta(description="this server's name in the fleet")] = ""
    joined: Annotated[bool, Meta(description="this server has joined")] = True
    problem: Annotated[str, Meta(description="why the coordinator cannot be asked; empty: it answered")] = ""
    age_seconds: Annotated[float, Meta(description="since the coordinator said so; 0 where it never did")] = 0.0
