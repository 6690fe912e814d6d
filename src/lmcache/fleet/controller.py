"""The controller's questions and orders, over the fleet's state: prompts by their tokens, tiers by the names of the
places where LMCache inside an engine keeps KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.limits import MAX_HTTP_KEYS
from lmcache.errors import ConfigError, LMCacheError
from lmcache.fleet import messages as m
from lmcache.fleet import operations as work
from lmcache.fleet.fleet import Fleet
from lmcache.fleet.jobs import FleetJob
from lmcache.fleet.keys import keys_of_prompt
from lmcache.fleet.prefixes import Prefix, prefixes

logger = logging.getLogger("lmcache.fleet")

L1_LOCATION, L2_LOCATION = "LocalCPUBackend", "LocalDiskBackend"
TIERS = {L1_LOCATION: "l1", L2_LOCATION: "l2"}


@dataclass(frozen=True)
class Model:
    """A model of which the directory knows objects, and the most ranks that any server has of it."""

    name: str
    world_size: int


@dataclass(frozen=True)
class Prompt:
    """Keys chunk by chunk, each with its ranks. `partials`: tokens and keys of those that are stored behind them."""

    model: Model
    keys: list[m.Key]
    cache_salt: str
    partials: list[tuple[int, list[m.Key]]]

    @property
    def all_keys(self) -> list[m.Key]:
        return self.keys + [key for _, keys in self.partials for key in keys]


def tier_of(location: str) -> str:
    if location not in TIERS:
        raise ConfigError(f'"location" must be one of {", ".join(TIERS)}, got {location!r}.')
    return TIERS[location]


class Controller:
    """Thread-safe."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    # ---- prompts -----------------------------------------------------------------------------------------------------
    def _model(self, model_name: str) -> Model:
        """ConfigError where several are known and none is named."""
        models = {name: Model(name, ranks) for name, ranks in self.fleet.directory.models().items()}
        if model_name:
            return models.get(model_name, Model(model_name, 1))
        if len(models) > 1:
            names = ", ".join(sorted(models)[:8])
            raise ConfigError(f'The body needs "model_name", as there are several models: {names}.')
        return next(iter(models.values()), Model("", 1))

    def prompt(self, tokens: Sequence[int], model_name: str, cache_salt: str) -> Prompt:
        """ConfigError where several models are known and none is named, or the prompt has too many objects."""
        model = self._model(model_name)
        if not model.name:
            return Prompt(model, [], cache_salt, [])
        prompt_keys = keys_of_prompt(self.fleet.hasher, tokens, model.name, model.world_size, cache_salt)
        return Prompt(model, prompt_keys.keys, cache_salt, self.fleet.stored_partials(prompt_keys))

    def layout(self, prompt: Prompt) -> tuple[dict[str, tuple[str, int]], bool]:
        """For each server the location and the tokens of the prefix that it has, the longest first. It is in L1 only
        where all of it is. And whether they were looked for to their end."""
        directory, ranks = self.fleet.directory, prompt.model.world_size
        found, is_complete = prefixes(directory, prompt.keys, ranks)
        chunk_tokens, chunks = self.fleet.settings.chunk_size, len(prompt.keys) // ranks
        held = {name: (prefix.chunks * chunk_tokens, prefix.all_in_l1) for name, prefix in found.items()}
        for tokens, keys in reversed(prompt.partials):  # the longest counts
            for name, prefix in prefixes(directory, keys, ranks)[0].items():
                before = found.get(name, Prefix(0, True))
                if before.chunks == chunks:
                    held[name] = chunks * chunk_tokens + tokens, before.all_in_l1 and prefix.all_in_l1
        longest = sorted(held.items(), key=lambda item: (-item[1][0], not item[1][1], item[0]))
        return {
            name: (L1_LOCATION if all_in_l1 else L2_LOCATION, tokens) for name, (tokens, all_in_l1) in longest
        }, is_complete

    def lookup(
        self, tokens: Sequence[int], model_name: str, cache_salt: str
    ) -> tuple[dict[str, tuple[str, int]], bool]:
        """The layout of as much of a prompt as is looked for at once, and whether that is all of it."""
        chunks = MAX_HTTP_KEYS // self._model(model_name).world_size
        beginning = tokens[: chunks * self.fleet.settings.chunk_size]
        found, is_complete = self.layout(self.prompt(beginning, model_name, cache_salt))
        return found, is_complete and len(beginning) == len(tokens)

    # ---- orders ------------------------------------------------------------------------------------------------------
    def clear(self, instance_id: str, location: str) -> tuple[int, int]:
        """Objects and bytes that were removed."""
        return self.fleet.servers.read(
            *(instance_id, lambda answer: (int(answer["objects"]), int(answer["bytes"])), "POST", "/cache/clear"),
            {"tier": tier_of(location)},
        )

    def pin(self, instance_id: str, location: str, prompt: Prompt) -> tuple[str, int]:
        """The pin's id, and how many tokens of the prompt it holds at least."""
        tier = tier_of(location)
        self.fleet.instances.find(instance_id)
        names, _ = self.fleet.directory.names_by_instance(prompt.all_keys, instance_id, tier)
        if instance_id not in names:
            raise ConfigError(f"{instance_id} is not known to have anything of this prompt in {location}.")
        pin, state = self.fleet.pins.add(names, _owner(location), instance_id, m.PinRequest().ttl_seconds)
        if state.failed:
            raise LMCacheError(f"{instance_id} could not be asked: {state.failed[instance_id]}")
        hashes = {name[-2 * CHUNK_HASH_BYTES :] for name in pin.names}
        ranks = -(-len(pin.names) // len(hashes))  # of that server
        # A partial chunk is a part of the longest one, and of a chunk that is not held nobody knows which it is.
        partial_tokens = [tokens for tokens, keys in prompt.partials if keys[0].chunk_hash_hex in hashes]
        held = sum(state.held.values())
        tokens = max(0, held // ranks - len(partial_tokens)) * self.fleet.settings.chunk_size
        return pin.pin_id, tokens + (max(partial_tokens, default=0) if held >= len(pin.names) else 0)

    def unpin(self, instance_id: str, location: str, prompt: Prompt) -> int:
        """Ends pins of the controller at that server that hold something of the prompt: how many."""
        tier_of(location)
        hashes = {key.chunk_hash_hex for key in prompt.all_keys}
        ended = 0
        for pin, _ in self.fleet.pins.all():
            is_of_controller = pin.owner == _owner(location) and pin.instance_id == instance_id
            if is_of_controller and any(name[-2 * CHUNK_HASH_BYTES :] in hashes for name in pin.names):
                ended += self.fleet.pins.remove(pin.pin_id, "").pins
        return ended

    def move(
        self, source: Sequence[str], target: Sequence[str], prompt: Prompt, tokens: Sequence[int], *, copy: bool
    ) -> FleetJob:
        """Between servers into L1, or between the tiers of one server."""
        (source_id, source_location), (target_id, target_location) = source, target
        source_tier, target_tier = tier_of(source_location), tier_of(target_location)
        if source_id == target_id:
            if source_tier == target_tier:
                raise ConfigError('"old_position" and "new_position" must be two places.')
            adapter = self._adapters(source_id)[0]
            places = [adapter if tier == "l2" else "l1" for tier in (source_tier, target_tier)]
            return self._move_between_tiers(source_id, places[0], places[1], prompt, tokens, copy=copy)
        if (source_tier, target_tier) != ("l1", "l1"):
            raise ConfigError(f"Between servers objects move from {L1_LOCATION} to {L1_LOCATION} alone.")
        body = m.MoveRequest(
            *(source_id, target_id, prompt.model.name, list(tokens), prompt.model.world_size, prompt.cache_salt, copy)
        )
        started = work.begin_move(self.fleet, body)
        job = self.fleet.jobs.find(started.request_id)
        assert job is not None
        return job

    def recode(
        self, instance_id: str, method: str, location: str, prompt: Prompt, tokens: Sequence[int], *, encode: bool
    ) -> FleetJob:
        """Between L1 and the adapter of that server whose serde is `method`. ConfigError where it has none."""
        if tier_of(location) == "l2" and encode:
            raise ConfigError(f'"location" must be {L1_LOCATION}, from which a prompt is compressed, got {location!r}.')
        serdes = self._serdes(instance_id)
        adapter = next((name for name, serde in serdes.items() if serde == method), "")
        if not adapter:
            built = ", ".join(f"{name} ({serde})" for name, serde in serdes.items() if serde) or "none"
            raise ConfigError(
                f"{instance_id} has no L2 adapter with the serde {method!r}; with a serde it has: {built}."
            )
        places = ("l1", adapter) if encode else (adapter, "l1")
        return self._move_between_tiers(instance_id, *places, prompt, tokens, copy=False)

    def health(self, instance_id: str) -> str:
        """ "" or why that server is not healthy."""
        self.fleet.instances.find(instance_id)
        try:
            self.fleet.servers.ask(instance_id, "GET", "/healthcheck")
        except LMCacheError as error:
            return str(error)
        return ""

    def _move_between_tiers(
        self, instance_id: str, source: str, target: str, prompt: Prompt, tokens: Sequence[int], *, copy: bool
    ) -> FleetJob:
        body = {
            "from": source,
            "to": target,
            "model_name": prompt.model.name,
            "tokens": list(tokens),
            "cache_salt": prompt.cache_salt,
            "copy": copy,
        }
        self.fleet.jobs.refuse_beyond_limit()
        request_id = self.fleet.servers.read(
            instance_id, lambda answer: str(answer["request_id"]), "POST", "/cache/moves", body
        )
        return self.fleet.jobs.submit("move", lambda job: self._follow(instance_id, request_id, job))

    def _follow(self, instance_id: str, request_id: str, job: FleetJob) -> None:
        status = work.await_server_job(self.fleet, instance_id, request_id, job)
        job.total, job.done, job.failed = status.objects_total, status.objects_done, status.objects_failed
        job.detail = status.detail
        if status.status == "failed":
            raise LMCacheError(status.detail or f"{instance_id} failed, and does not say why.")

    def _adapters(self, instance_id: str) -> list[str]:
        names = self._read_adapters(instance_id, lambda adapter: str(adapter["name"]))
        if not names:
            raise ConfigError(f"{instance_id} has no L2 adapter, hence no {L2_LOCATION}.")
        return names

    def _serdes(self, instance_id: str) -> dict[str, str]:
        """The name of its serde by adapter; "" for none."""
        return dict(
            self._read_adapters(instance_id, lambda adapter: (str(adapter["name"]), str(adapter.get("serde") or "")))
        )

    def _read_adapters(self, instance_id: str, read: Callable[[Any], Any]) -> list[Any]:
        return self.fleet.servers.read(
            instance_id, lambda answer: [read(adapter) for adapter in answer["l2"]["adapters"]], "GET", "/status"
        )


def _owner(location: str) -> str:
    return f"controller {location}"
