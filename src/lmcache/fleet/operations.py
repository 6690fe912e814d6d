"""Work on the objects of a fleet, through the HTTP interfaces of its servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import structs

from lmcache.core.limits import MAX_HTTP_KEYS, MAX_REASON_CHARACTERS
from lmcache.errors import ConfigError, LMCacheError
from lmcache.fleet import messages as m
from lmcache.fleet.fleet import Fleet
from lmcache.fleet.jobs import FleetJob
from lmcache.fleet.keys import keys_of_prompt
from lmcache.fleet.metadata import FleetPin
from lmcache.fleet.pins import PinState
from lmcache.http.client import HttpRefused

JOB_SECONDS = 600.0  # that a server may take for its part of a job
_LOOK_SECONDS = 0.2
_NOT_THERE = 404


# ---- prefetches ------------------------------------------------------------------------------------------------------
def prefetch(fleet: Fleet, body: m.PromptRequest) -> m.Started:
    """LMCacheError as the server has it."""
    keys = keys_of_prompt(fleet.hasher, body.token_ids, body.model_name, body.world_size, body.cache_salt)
    prompt = {"model_name": body.model_name, "tokens": body.token_ids, "cache_salt": body.cache_salt}
    request_id = fleet.servers.read(
        body.instance_id, lambda answer: str(answer["request_id"]), "POST", "/cache/prefetches", prompt
    )
    return m.Started(request_id, keys.chunks, "waiting")


def server_job(fleet: Fleet, instance_id: str, request_id: str) -> m.JobStatus | None:
    """None: the server knows no such job."""

    def read(answer: Any) -> m.JobStatus:
        status = msgspec.convert(answer, m.JobStatus)
        return structs.replace(status, detail=status.detail[:MAX_REASON_CHARACTERS])

    try:
        return fleet.servers.read(instance_id, read, "GET", f"/jobs/{quote(request_id, safe='')}")
    except HttpRefused as refusal:
        if refusal.status == _NOT_THERE:
            return None
        raise


def await_server_job(fleet: Fleet, instance_id: str, request_id: str, job: FleetJob) -> m.JobStatus:
    """Until the server says that it has ended. LMCacheError where it does not in time."""
    deadline = fleet.clock.monotonic() + JOB_SECONDS
    while fleet.clock.monotonic() < deadline and not job.stop.is_set():
        status = server_job(fleet, instance_id, request_id)
        if status is None:
            raise LMCacheError(f"{instance_id} has forgotten its part of this, {request_id}: was it started again?")
        if status.done:
            return status
        job.stop.wait(_LOOK_SECONDS)
    if job.stop.is_set():
        raise LMCacheError(f"The coordinator ended before {instance_id} had ended its part of this.")
    raise LMCacheError(f"{instance_id} did not end its part of this within {JOB_SECONDS:g} s.")


# ---- pins ------------------------------------------------------------------------------------------------------------
def pin(fleet: Fleet, body: m.PinRequest) -> tuple[FleetPin, PinState]:
    """ConfigError where nobody can be asked to hold anything of it."""
    prompt = fleet.prompt(body.keys, body.token_ids, body.model_name, body.world_size, body.cache_salt)
    if body.instance_id:
        fleet.instances.find(body.instance_id)
    names, unnamed = fleet.directory.names_by_instance(fleet.stored_keys(prompt), body.instance_id)
    if not names:
        reason = f"; of {unnamed} objects the servers tell no namespaces" if unnamed else ""
        raise ConfigError(f"No server is known to have any of these objects{reason}: there is nothing to pin.")
    return fleet.pins.add(names, body.owner, body.instance_id, body.ttl_seconds)


# ---- deletion --------------------------------------------------------------------------------------------------------
def delete(fleet: Fleet, body: m.DeleteRequest) -> m.DeleteAnswer:
    prompt = fleet.prompt(body.keys, body.token_ids, body.model_name, body.world_size, body.cache_salt)
    if body.instance_id:
        fleet.instances.find(body.instance_id)
    names, unnamed = fleet.directory.names_by_instance(fleet.stored_keys(prompt), body.instance_id, body.tier)
    answers = fleet.servers.run_each(
        names, lambda name: delete_at(fleet, name, names[name], body.tier, force=body.force)
    )
    deleted = sum(done for done, _ in answers.values.values())
    skipped = sum(left for _, left in answers.values.values())
    return m.DeleteAnswer(deleted, skipped, unnamed, answers.failed)


def delete_at(fleet: Fleet, instance_id: str, names: list[str], tier: str, *, force: bool) -> tuple[int, int]:
    """How many are gone, and how many stay or were not there."""
    deleted = skipped = 0
    for part in _parts(names):
        done, left = fleet.servers.read(
            *(instance_id, lambda answer: (int(answer["deleted"]), int(answer["skipped"])), "DELETE", "/cache/objects"),
            {"keys": part, "tier": tier, "force": force},
        )
        deleted += done
        skipped += left
    return deleted, skipped


def _parts(names: list[str]) -> Iterator[list[str]]:
    for first in range(0, len(names), MAX_HTTP_KEYS):
        yield names[first : first + MAX_HTTP_KEYS]


# ---- moves -----------------------------------------------------------------------------------------------------------
def begin_move(fleet: Fleet, body: m.MoveRequest) -> m.Started:
    """ConfigError where there is nothing to move, or nobody to move it."""
    source, target = fleet.instances.find(body.source), fleet.instances.find(body.target)
    if source.url == target.url:  # of one with two names, too, all copies would go
        raise ConfigError(f'"source" and "target" must be two servers, and both are at {source.url}.')
    prompt = keys_of_prompt(fleet.hasher, body.token_ids, body.model_name, body.world_size, body.cache_salt)
    names, _ = fleet.directory.names_by_instance(fleet.stored_keys(prompt), body.source)
    if body.source not in names:
        raise ConfigError(f"{body.source} is not known to have anything of this prompt.")
    job = fleet.jobs.submit("move", lambda running: _move(fleet, body, names[body.source], running))
    return m.Started(job.request_id, prompt.chunks, job.status)


def _move(fleet: Fleet, body: m.MoveRequest, names: list[str], job: FleetJob) -> None:
    """Loads at the target, then takes from the L1 of the source what the target's L1 really has."""
    job.total = len(names)
    started = prefetch(
        fleet, m.PromptRequest(body.target, body.model_name, body.token_ids, body.world_size, body.cache_salt)
    )
    loaded = await_server_job(fleet, body.target, started.request_id, job)
    prompt = {"model_name": body.model_name, "tokens": body.token_ids, "cache_salt": body.cache_salt}
    in_l1 = fleet.servers.read(body.target, _names_in_l1, "POST", "/cache/lookup", prompt)
    arrived = [name for name in names if name in in_l1]
    job.done, job.failed = len(arrived), len(names) - len(arrived)
    if job.failed:
        job.detail = f"{body.target} could not load {job.failed} objects: {loaded.detail or 'they are not there'}"
    if body.copy or not arrived:
        return
    _, left = delete_at(fleet, body.source, arrived, "l1", force=False)
    if left:
        stayed = f"{left} of them were not deleted at {body.source}: pinned, being read, or gone already."
        job.detail = f"{job.detail} {stayed}".strip()


def _names_in_l1(answer: Any) -> set[str]:
    namespaces = answer["namespaces"]
    chunks = [*answer["chunks"], *answer.get("partial_chunks", ())]
    return {f"{namespaces[index]}/{chunk['hash']}" for chunk in chunks for index in chunk["in_l1"]}
