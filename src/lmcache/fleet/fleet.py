"""The state of a coordinator, which its routes share: who is there, what they have, what operators decided."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from msgspec import structs

from lmcache.core.chunking import ChunkHasher
from lmcache.core.limits import MAX_LOGGED_EVENT_REQUESTS, MAX_TOLD_LOG_REQUESTS
from lmcache.environment import Environment
from lmcache.errors import ConfigError, LMCacheError
from lmcache.fleet import checkpoint, saved_file
from lmcache.fleet.event_log import open_log
from lmcache.fleet.events import EventIntake
from lmcache.fleet.instances import Instance, Instances
from lmcache.fleet.jobs import FleetJobs
from lmcache.fleet.keys import PromptKeys, keys_of_prompt
from lmcache.fleet.log_reader import EventLogReader
from lmcache.fleet.messages import Key
from lmcache.fleet.metadata import Metadata
from lmcache.fleet.pins import FleetPins
from lmcache.fleet.quotas import FleetQuotas
from lmcache.fleet.servers import Servers
from lmcache.fleet.settings import CoordinatorSettings

logger = logging.getLogger("lmcache.fleet")

_ROUND_SECONDS = 1.0
_MODELS_SECONDS = 60.0  # between two looks which are gone
_CHECKPOINT = "checkpoint of --checkpoint-path"


class Fleet:
    """Thread-safe. Between `start` and `stop` a thread does what is due."""

    def __init__(self, settings: CoordinatorSettings, token: Callable[[], str], environment: Environment) -> None:
        """A damaged checkpoint is kept under another name, and nothing is known at first. ResourceError for files that
        cannot be read."""
        clock = environment.clock
        self.settings = settings
        self.clock = clock
        self.random_bytes = environment.random_bytes
        self.epoch_seconds = clock.wall() - clock.monotonic()  # a monotonic time as seconds since 1970-01-01 UTC
        self.hasher = ChunkHasher(settings.hash_algorithm, settings.chunk_size)
        self.instances = Instances(environment, settings.instance_timeout, self)
        self.intake = EventIntake(self.instances.knows, clock)
        self.directory = self.intake.directory
        self.metadata = Metadata(settings.metadata_path)
        self.servers = Servers(self.instances, token)
        self.jobs = FleetJobs(clock, environment.random_bytes(4).hex())
        self.quotas = FleetQuotas(self.metadata, self.instances, self.servers, self.directory, clock)
        self.pins = FleetPins(self.metadata, self.servers, clock, environment.random_bytes)
        self.log_reader: EventLogReader | None = None
        if settings.event_log is not None:
            self.log_reader = EventLogReader(open_log(settings.event_log), self.intake, clock)
        self._coming = threading.Lock()  # while somebody joins or leaves
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-housekeeping", daemon=True)
        self._checkpointing = threading.Lock()
        if settings.checkpoint_path:
            started_at = clock.monotonic()
            if saved_file.read_or_move_aside(
                settings.checkpoint_path,
                _CHECKPOINT,
                lambda file: checkpoint.restore(file, self.instances, self.intake, started_at),
            ):
                logger.info("The directory is as it was: %d copies", self.directory.stats().records)
            for instance in self.instances.all():  # what was decided since, and not told
                self.quotas.joined(instance.instance_id)
                self.pins.joined(instance.instance_id)

    def start(self) -> None:
        self._thread.start()
        if self.log_reader is not None:
            self.log_reader.start()

    def stop(self) -> None:
        """Writes a last checkpoint. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self.log_reader is not None:
            self.log_reader.stop()
        self.jobs.close()
        self.quotas.close()
        self.pins.close()
        self.servers.close()
        if self._thread.ident is not None:
            self._thread.join(_ROUND_SECONDS * 2)
        self.write_checkpoint()

    def prompt(
        self, keys: Sequence[Key], token_ids: Sequence[int], model_name: str, world_size: int, cache_salt: str
    ) -> PromptKeys:
        """The keys that are given, or those of the prompt."""
        if bool(keys) == bool(token_ids):
            raise ConfigError('The body needs either "keys" or "token_ids".')
        if keys:
            return PromptKeys(len({key.chunk_hash_hex for key in keys}), list(keys))
        return keys_of_prompt(self.hasher, token_ids, model_name, world_size, cache_salt)

    def log_requests(self, instance_id: str) -> int:
        """How many requests of a server may be in the log and unread, so that nothing is dropped there before it is
        read: half of what the log keeps is for servers that tell everything. 0: no log is read."""
        if self.log_reader is None:
            return 0
        if self.intake.turns.has(instance_id):
            return MAX_TOLD_LOG_REQUESTS
        return max(1, MAX_LOGGED_EVENT_REQUESTS // 2 // max(1, len(self.instances)))

    def stored_partials(self, prompt: PromptKeys) -> list[tuple[int, list[Key]]]:
        """The partial chunks of the prompt of which a server has something: how many tokens each has, and its key for
        each rank; the longest first."""
        found = sorted({copy[0] for copy in self.directory.copies(prompt.partials)})
        return [
            (
                len(prompt.partials) - index,
                [structs.replace(prompt.partials[index], kv_rank=rank) for rank in range(prompt.world_size)],
            )
            for index in found
        ]

    def stored_keys(self, prompt: PromptKeys) -> list[Key]:
        """Those of its full chunks, and of the partial chunks that are stored behind them."""
        return prompt.keys + [key for _, keys in self.stored_partials(prompt) for key in keys]

    def write_checkpoint(self) -> None:
        path = self.settings.checkpoint_path
        if not path:
            return
        with self._checkpointing:
            try:
                saved_file.replace(path, lambda file: checkpoint.write(file, self.instances, self.intake))
            except LMCacheError as error:
                logger.error("No checkpoint: %s", error)

    def joined(self, instance: Instance) -> None:
        with self._coming:
            self._welcome(instance.instance_id)
        told = instance.metadata.get("chunk_sample")
        if told is not None and told != self.hasher.sample().hex():
            logger.warning(
                "%s names chunks in another way than this coordinator (--chunk-size %d, --hash-algorithm %s): prompts "
                "are not found there",
                *(instance.instance_id, self.settings.chunk_size, self.settings.hash_algorithm),
            )
        heartbeat_seconds = instance.metadata.get("heartbeat_seconds")
        if isinstance(heartbeat_seconds, (int, float)) and heartbeat_seconds >= self.settings.instance_timeout:
            logger.warning(
                "%s sends a heartbeat every %g s, and is gone here after %g s of silence: give a longer "
                "--instance-timeout here, or a shorter --coordinator-heartbeat-interval there",
                *(instance.instance_id, heartbeat_seconds, self.settings.instance_timeout),
            )

    def left(self, instance_id: str) -> None:
        with self._coming:
            self.intake.forget(instance_id)
            self.quotas.left(instance_id)
            self.pins.left(instance_id)
            self._welcome(instance_id)

    def _welcome(self, instance_id: str) -> None:
        """Who joins may leave meanwhile, and who leaves may have joined again: what counts is who is there."""
        if self.instances.knows(instance_id):
            self.quotas.joined(instance_id)
            self.pins.joined(instance_id)

    def _run(self) -> None:
        due = {"expire": 0.0, "models": 0.0, "checkpoint": self.clock.monotonic() + self.settings.checkpoint_interval}
        while not self._stop.wait(_ROUND_SECONDS):
            try:
                monotonic = self.instances.look(_ROUND_SECONDS)
                if monotonic >= due["expire"]:
                    due["expire"] = monotonic + self.settings.health_check_interval
                    self.instances.expire(monotonic)
                if monotonic >= due["models"]:
                    due["models"] = monotonic + _MODELS_SECONDS
                    self.directory.refresh_models()
                while self.directory.sweep() and not self._stop.is_set():
                    pass
                self.quotas.push()
                self.pins.push()
                if monotonic >= due["checkpoint"]:
                    due["checkpoint"] = monotonic + self.settings.checkpoint_interval
                    self.write_checkpoint()
            except Exception:  # the root of the thread
                logger.exception("What was due could not be done")
