"""Who has how much of a prompt, in a fleet all of whose servers have it."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.fleet.directory import Copy, Directory
from lmcache.fleet.messages import Key
from lmcache.fleet.prefixes import Prefix, prefixes

MOST_KEYS = 32  # that may be looked at while events wait
MOST_COPIES = 32_768  # as many, once it is known how many a key has


class Crowd(Directory):
    """Each of its servers has every key."""

    def __init__(self, servers: int) -> None:
        super().__init__(lambda instance_id: 1)
        self.names = [f"server-{number}" for number in range(servers)]
        self.looks: list[tuple[int, int]] = []  # keys, copies

    def copies(self, keys: Sequence[Key]) -> list[Copy]:
        found = [(index, 1, name, "l1") for index in range(len(keys)) for name in self.names]
        self.looks.append((len(keys), len(found)))
        return found


def test_a_look_at_a_prompt_that_everybody_has_is_short_and_ends() -> None:
    """A router takes a shorter prefix that is told in time over a longer one that is not."""
    crowd = Crowd(4096)
    found, is_complete = prefixes(crowd, [Key(f"{number:064x}", "m", 0) for number in range(2048)], 1)
    assert max(keys for keys, _ in crowd.looks) <= MOST_KEYS
    assert max(copies for _, copies in crowd.looks[1:]) <= MOST_COPIES
    chunks = sum(keys for keys, _ in crowd.looks)
    assert sum(copies for _, copies in crowd.looks[:-1]) <= 1 << 19
    assert not is_complete and found == dict.fromkeys(crowd.names, Prefix(chunks, True))


def test_all_of_a_long_prompt_is_looked_at_in_a_fleet_of_a_thousand() -> None:
    crowd = Crowd(1000)
    found, is_complete = prefixes(crowd, [Key(f"{number:064x}", "m", 0) for number in range(500)], 1)
    assert is_complete and found == dict.fromkeys(crowd.names, Prefix(500, True))
