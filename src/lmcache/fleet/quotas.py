"""What each cache salt may keep on a server, the same on all of them: told to each, and again to one that joins.

What a server was told is a number: that of the latest change that it has. So all that is behind it is told in order,
whatever was missed and why. That a quota has ended is told to a process of a server once: no other than this
coordinator makes it anew there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import count, takewhile
from urllib.parse import quote

from lmcache.clock import Clock
from lmcache.core.key import DEFAULT_SALT
from lmcache.core.limits import GIB, MAX_FLEET_INSTANCES
from lmcache.errors import ConfigError
from lmcache.fleet.directory import Directory
from lmcache.fleet.instances import Instances
from lmcache.fleet.metadata import Metadata
from lmcache.fleet.server_sync import ServerSync
from lmcache.fleet.servers import Servers
from lmcache.http.client import HttpRefused

_PROCESS = "server_epoch"  # in what a server tells of itself
_MOST_REFUSED = 256  # of a server, before it is told no more until it takes some


@dataclass(frozen=True)
class FleetQuota:
    cache_salt: str
    limit_bytes: int
    usage_bytes: int  # over all servers and tiers
    exists: bool
    behind: list[str]  # servers that have not taken it yet


@dataclass
class _Told:
    """What a server has: all changes up to this one, but for those that it refused."""

    process: str = ""  # as it names itself; "" where it does not
    ended: int = 0  # of the changes up to this one, it has all that end a quota, whenever it joined
    change: int = 0
    refused: dict[str, None] = field(default_factory=dict)  # salts


class FleetQuotas:
    """Thread-safe. `push` is called again and again, and never waits."""

    def __init__(
        self, metadata: Metadata, instances: Instances, servers: Servers, directory: Directory, clock: Clock
    ) -> None:
        self._metadata = metadata
        self._instances = instances
        self._servers = servers
        self._directory = directory
        self._lock = threading.Lock()
        self._numbers = count(1)
        # The latest change of each salt, in their order. A quota that has ended is one.
        self._changes = {salt: next(self._numbers) for salt in (*metadata.ended_quotas(), *metadata.quotas())}
        self._told: dict[str, _Told] = {}  # by server
        self._left: dict[str, _Told] = {}  # the same of the latest that have left
        self._sync = ServerSync("quotas", self._tell, clock)

    def set(self, salt: str, limit_bytes: int | None) -> None:
        """None: no limit any more. LMCacheError: nothing has changed."""
        self._metadata.set_quota(salt, limit_bytes)
        with self._lock:
            self._changes.pop(salt, None)
            self._changes[salt] = next(self._numbers)
            if limit_bytes is None:  # so may be the oldest of those that have ended
                current = {*self._metadata.quotas(), *self._metadata.ended_quotas()}
                self._changes = {name: change for name, change in self._changes.items() if name in current}
        self._sync.note(instance.instance_id for instance in self._instances.all())

    def get(self, salt: str) -> FleetQuota:
        return self._shown([salt], self._metadata.quotas(), self._directory.bytes_of_salts())[0]

    def all(self) -> list[FleetQuota]:
        """Returns the quotas of all salts that have one or of which a server has something."""
        quotas, used = self._metadata.quotas(), self._directory.bytes_of_salts()
        return self._shown(sorted({*quotas, *used}), quotas, used)

    def _shown(self, salts: Sequence[str], quotas: dict[str, int], used: dict[str, int]) -> list[FleetQuota]:
        with self._lock:  # servers that lack nothing are not looked at for every salt
            latest = next(reversed(self._changes.values()), 0)
            lacking = [(name, told) for name, told in self._told.items() if told.change < latest or told.refused]
        shown = []
        for salt in salts:
            with self._lock:
                change = self._changes.get(salt, 0)
                behind = sorted(name for name, told in lacking if told.change < change or salt in told.refused)
            shown.append(FleetQuota(salt, quotas.get(salt, 0), used.get(salt, 0), salt in quotas, behind))
        return shown

    def joined(self, instance_id: str) -> None:
        """It may have been away, or be another one: it is told everything, and what has ended unless that process of it
        knows."""
        try:
            process = str(self._instances.find(instance_id).metadata.get(_PROCESS, ""))
        except ConfigError:  # it has left meanwhile
            return
        with self._lock:
            before = self._left.pop(instance_id, None) or self._told.get(instance_id) or _Told()
            is_same = process != "" and process == before.process
            self._told[instance_id] = _Told(process, before.ended if is_same else 0)
        self._sync.note([instance_id])

    def left(self, instance_id: str) -> None:
        with self._lock:
            if told := self._told.pop(instance_id, None):
                self._left[instance_id] = told
                if len(self._left) > MAX_FLEET_INSTANCES:
                    del self._left[next(iter(self._left))]
        self._sync.forget(instance_id)

    def push(self) -> None:
        """Begins to tell what has not been told. A server that refuses or is away is told again later."""
        self._sync.step()

    def behind(self) -> Set[str]:
        """Servers that have not taken some of them yet."""
        return self._sync.behind()

    def close(self) -> None:
        self._sync.close()

    def _tell(self, instance_id: str) -> None:
        """Everything that it lacks. LMCacheError where it did not take it all."""
        with self._lock:
            told = self._told.get(instance_id)
            if told is None:  # it has left
                return
            changes = takewhile(lambda item: item[1] > told.change, reversed(self._changes.items()))
            changed = dict.fromkeys(reversed([salt for salt, _ in changes]))
            # Each once, in the order of the changes: the number of one that is told stands for all before it.
            lacking = [*(salt for salt in told.refused if salt not in changed), *changed]
            numbers = {salt: self._changes.get(salt, 0) for salt in lacking}
        refusal: HttpRefused | None = None
        for salt in lacking:
            try:
                self._tell_one(instance_id, salt, is_known=numbers[salt] <= told.ended)
                has_taken = True
            except HttpRefused as error:
                refusal, has_taken = error, False
            with self._lock:  # where it has joined anew meanwhile, that is known elsewhere
                told.change = max(told.change, numbers[salt])
                told.refused.pop(salt, None)
                if not has_taken:
                    told.refused[salt] = None
            if len(told.refused) >= _MOST_REFUSED:
                break
        if refusal is not None:
            raise refusal
        with self._lock:
            told.ended = max(told.ended, told.change)

    def _tell_one(self, instance_id: str, salt: str, *, is_known: bool) -> None:
        """`is_known`: if it has ended, that server knows."""
        path, limit_bytes = f"/quota/{quote(salt or DEFAULT_SALT, safe='')}", self._metadata.quota_of(salt)
        if limit_bytes is not None:
            self._servers.ask(instance_id, "PUT", path, {"limit_gb": limit_bytes / GIB})
        elif not is_known:
            self._servers.ask(instance_id, "DELETE", path)
