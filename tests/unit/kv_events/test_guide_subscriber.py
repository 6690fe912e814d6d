"""The subscriber of the guide knows no block of a server that is gone, nor of batches that nobody has any more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

pytest.importorskip("vllm.distributed.kv_events")

from lmcache.kv_events.endpoint import parse_endpoint
from lmcache.kv_events.event_sockets import EventSockets
from lmcache.kv_events.wire import END_OF_REPLAY, AllBlocksCleared, BlockStored
from manual_clock import ManualClock

GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "publish_kv_events.md"
TOPIC = b"kv@cache-a@model"


class Published:
    """A context of ZMQ whose sockets keep what a server sends. As the subscriber's it repeats that; with an end, unless
    the server dies meanwhile."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, bytes, bytes]] = []
        self.dies = False
        self.replays = 0
        self.linger = 0
        self._replay: list[tuple[bytes, ...]] = []

    def socket(self, kind: int) -> Published:
        return self

    def __enter__(self) -> Published:
        return self

    def __exit__(self, *_: object) -> None:
        self._replay = []

    def setsockopt(self, *_: object) -> None: ...
    def bind(self, address: str) -> None: ...
    def connect(self, address: str) -> None: ...
    def subscribe(self, topic: bytes) -> None: ...
    def destroy(self, linger: int) -> None: ...

    def send_multipart(self, frames: tuple[bytes, ...], copy: bool = True) -> None:
        if len(frames) == 3:
            self.sent.append((frames[0], frames[1], frames[2]))
            return
        self.replays += 1
        self._replay = [(b"", *batch) for batch in self.sent if batch[1] >= frames[1]]
        self._replay = self._replay[:1] if self.dies else [*self._replay, (b"", b"", END_OF_REPLAY, b"")]

    def poll(self, timeout_ms: int) -> bool:
        return bool(self._replay)

    def recv_multipart(self) -> tuple[bytes, ...]:
        return self._replay.pop(0)


class Stage:
    """Servers, one after the other, and the guide's subscriber of all of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._clock = ManualClock(1.7e9)
        self.wire = Published()
        patch.setattr(zmq, "Context", lambda *_: self.wire)
        patch.setattr(sys, "argv", ["subscriber.py", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"])
        code = GUIDE.read_text().split("```python\n")[1].split("```")[0].split("\nwhile True:")[0]
        self._subscriber: dict[str, Any] = {}
        exec(compile(code, str(GUIDE), "exec"), self._subscriber)
        self.start_server()

    def start_server(self, after_seconds: float = 1.0) -> None:
        """By its clock, which may have been set back."""
        self._clock.now_seconds += after_seconds
        self.wire.sent.clear()
        self._sockets = EventSockets(parse_endpoint("tcp://127.0.0.1:1", ""), None, self._clock)
        self._sockets.publish(TOPIC.decode(), [AllBlocksCleared()])

    def store(self, names: str, *, heard: bool = True) -> None:
        """A batch for each letter."""
        for name in names:
            event = BlockStored([name.encode()], None, [], 256, None, "CPU", None, 0)
            self._sockets.publish(TOPIC.decode(), [event])
            if heard:
                self.hear(self.wire.sent[-1])

    def hear(self, sent: tuple[bytes, bytes, bytes]) -> None:
        topic, number, batch = sent
        self._subscriber["take"](topic, int.from_bytes(number, "big"), self._subscriber["decoder"].decode(batch))

    @property
    def held(self) -> str:
        return "".join(sorted(block.decode() for _, _, block in self._subscriber["held"][TOPIC]))


@pytest.fixture
def stage() -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch:
        yield Stage(patch)


def test_what_it_missed_is_asked_for(stage: Stage) -> None:
    stage.store("ab", heard=False)
    stage.store("c")
    stage.store("d", heard=False)
    stage.store("ef")
    assert stage.held == "abcdef"


@pytest.mark.parametrize("after_seconds", [1.0, -3600.0])
@pytest.mark.parametrize("missed", ["", "x", "xy", "xyz"])
def test_of_a_server_that_was_started_again_it_knows_what_that_one_has(
    missed: str, after_seconds: float, stage: Stage
) -> None:
    """Also where it has published as many batches as the one before when the subscriber connects again."""
    stage.store("ab")
    stage.start_server(after_seconds)
    stage.store(missed, heard=False)
    stage.store("cd")
    assert stage.held == "cd" + missed


def test_what_a_replay_had_and_comes_after_it_is_known(stage: Stage) -> None:
    stage.store("abcd", heard=False)
    for sent in stage.wire.sent:
        stage.hear(sent)
    stage.store("e")
    assert stage.held == "abcde" and stage.wire.replays == 1


@pytest.mark.parametrize("after_seconds", [1.0, -3600.0])
def test_what_comes_late_of_a_server_that_is_gone_is_not_held(after_seconds: float, stage: Stage) -> None:
    """It asks for what it missed of that one, and another one answers."""
    stage.store("a")
    stage.store("bcd", heard=False)
    late = stage.wire.sent[-2:]
    stage.start_server(after_seconds)
    stage.store("x", heard=False)
    for sent in [*late, *stage.wire.sent]:
        stage.hear(sent)
    assert stage.held == "x"


def test_what_nobody_has_kept_may_have_removed_anything(stage: Stage) -> None:
    stage.store("ab")
    stage.store("cd", heard=False)
    del stage.wire.sent[:-1]
    stage.store("e")
    assert stage.held == "de"


def test_a_server_that_dies_in_the_middle_of_a_replay_is_not_waited_for(stage: Stage) -> None:
    stage.store("a", heard=True)
    stage.store("bc", heard=False)
    stage.wire.dies = True
    stage.store("d")
    assert stage.held == "d"
