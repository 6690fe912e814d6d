from __future__ import annotations

import pytest

from lmcache.peers.transports.known_servers import KnownServers


class Engine:
    def __init__(self, most: int) -> None:
        self.learned: list[str] = []
        self.forgotten: list[str] = []
        self.known = KnownServers(self._learn, self.forgotten.append, most)

    def _learn(self, key: str) -> str:
        if key == "liar":
            raise ValueError(key)
        self.learned.append(key)
        return key.upper()

    def read(self, *keys: str) -> None:
        for key in keys:
            with self.known.reading(key) as value:
                assert value == key.upper()


def test_those_read_longest_ago_are_forgotten_and_learned_again() -> None:
    engine = Engine(2)
    engine.read("a", "b", "a", "b")
    assert (engine.learned, engine.forgotten) == (["a", "b"], [])
    engine.read("a", "c")
    assert (engine.learned, engine.forgotten) == (["a", "b", "c"], ["B"])
    engine.read("b")
    assert (engine.learned, engine.forgotten) == (["a", "b", "c", "b"], ["B", "A"])


def test_nobody_is_forgotten_who_is_being_read_from() -> None:
    engine = Engine(1)
    with engine.known.reading("a"), engine.known.reading("a"), engine.known.reading("b"):
        engine.read("c", "d", "c")
        assert engine.forgotten == ["C", "D"]
        engine.read("a", "b")
        assert engine.learned.count("a") == engine.learned.count("b") == 1
    engine.read("e")
    assert sorted(engine.forgotten) == ["A", "B", "C", "C", "D"]


def test_nothing_is_kept_of_who_cannot_be_learned() -> None:
    engine = Engine(1)
    engine.read("a")
    with pytest.raises(ValueError, match="liar"):
        engine.read("liar")
    engine.read("a")
    assert (engine.learned, engine.forgotten) == (["a"], [])
