"""Checkpoints and decisions: what is read again, and what is refused."""

from __future__ import annotations

import errno
import io
import logging
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest

from lmcache.core import limits
from lmcache.core.limits import MAX_NAME_BYTES
from lmcache.environment import SYSTEM
from lmcache.errors import ConfigError, LMCacheError, ResourceError
from lmcache.fleet import checkpoint, saved_file
from lmcache.fleet import messages as m
from lmcache.fleet.coordinator import CoordinatorProcess
from lmcache.fleet.events import EventIntake
from lmcache.fleet.fleet import Fleet
from lmcache.fleet.instances import Instances
from lmcache.fleet.messages import Batch, Entry, Key
from lmcache.fleet.metadata import FleetPin, Metadata
from lmcache.fleet.settings import CoordinatorSettings
from seeds import SEED
from unit.fleet.support import told

GOLDEN = Path(__file__).parents[2] / "golden" / "fleet_checkpoint_v1.bin"
NAMESPACE = "77" * 32


def keys(count: int, salt: str = "") -> list[Entry]:
    return [Entry(Key(f"{number:064x}", "model", number % 2, 0, salt), 4096 + number) for number in range(count)]


def filled() -> tuple[Instances, EventIntake]:
    instances = Instances(SYSTEM, 30.0)
    intake = EventIntake(instances.knows)
    for name, url in (("a", "h:1"), ("b", "")):
        request = m.RegisterRequest("10.0.0.1", 8080, name, {"version": "1"}, url, 5555)
        instances.register(request, token="a token" if name == "a" else "")
    told_of = [
        Batch("a", 7, 1, "store", "l1", entries=keys(3), namespace=NAMESPACE),
        Batch("a", 7, 2, "store", "l2", "disk", keys(2, "tenant"), shared=True),
        Batch("a", 7, 3, "config", "l2", "disk", shared=True, capacity_bytes=1 << 30),
        Batch("b", 9, 4, "store", "l1", entries=keys(1)),  # 1 to 3 are missing
    ]
    intake.apply(told_of)
    return instances, intake


def saved(instances: Instances, intake: EventIntake) -> bytes:
    file = io.BytesIO()
    checkpoint.write(file, instances, intake)
    return file.getvalue()


def restored(content: bytes) -> tuple[Instances, EventIntake]:
    instances = Instances(SYSTEM, 30.0)
    intake = EventIntake(instances.knows)
    checkpoint.restore(io.BytesIO(content), instances, intake, 0.0)
    return instances, intake


def test_a_checkpoint_is_read_as_it_was() -> None:
    instances, intake = filled()
    assert restored(saved(instances, intake))[1].log_position == ""
    intake.log_position = "1764320000000-3"
    others, again = restored(saved(instances, intake))
    assert again.log_position == intake.log_position
    assert told(again.directory) == told(intake.directory)
    assert [entry.place for entry in again.directory.usage("a")]
    for name in ("a", "b"):
        before, after = instances.find(name), others.find(name)
        assert (after.url, after.metadata, after.p2p_advertised_url) == (
            before.url,
            before.metadata,
            before.p2p_advertised_url,
        )
        assert (after.has_token, after.token_digest) == (before.has_token, before.token_digest)
        assert again.stream(name) == intake.stream(name)
    (disk,) = [place for place in again.directory.places() if place.tier == "l2"]
    assert (disk.shared, disk.capacity_bytes) == (True, 1 << 30)
    again.directory.check()


def test_world_sizes_are_in_a_checkpoint() -> None:
    instances, intake = filled()
    told_of = [Entry(Key(f"{900 + number:064x}", "model", 0), 1) for number in range(3)]
    intake.apply([Batch("a", 7, 4, "store", "l1", entries=told_of, namespace="88" * 32, world_size=4)])
    _, again = restored(saved(instances, intake))
    sizes = [
        {
            (index, world_size)
            for index, world_size, *_ in directory.copies([entry.key for entry in [*told_of, *keys(1)]])
        }
        for directory in (intake.directory, again.directory)
    ]
    assert sizes == [{(0, 4), (1, 4), (2, 4), (3, 0)}] * 2


def test_many_pages() -> None:
    instances, intake = filled()
    count = checkpoint.PAGE_COPIES + 10
    for seq, first in enumerate(range(0, count, 10_000)):
        some = [
            Entry(Key(f"{1000 + number:064x}", "many", 0), 1) for number in range(first, min(count, first + 10_000))
        ]
        intake.apply([Batch("a", 7, 4 + seq, "store", "l1", entries=some)])
    _, again = restored(saved(instances, intake))
    assert again.directory.stats().records == intake.directory.stats().records > count


def test_the_longest_names_fit(tmp_path: Path) -> None:
    """Of a model and a salt, of each copy its own."""
    instances, intake = filled()
    longest = "\U0001f9ca" * (MAX_NAME_BYTES - 5)
    told_of = [
        Entry(Key("ab" * 32, "\U0001f9ca" * MAX_NAME_BYTES, 0, 0, f"{number:5}{longest}")) for number in range(16_384)
    ]
    for seq, first in enumerate(range(0, len(told_of), 1024), 4):
        intake.apply([Batch("a", 7, seq, "store", "l1", entries=told_of[first : first + 1024])])
    _, again = restored(saved(instances, intake))
    assert again.directory.stats().records == intake.directory.stats().records > len(told_of)


def test_columns_of_a_page_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time is a copy of all of them: to read one for every row made a checkpoint of a million copies take a
    minute."""
    instances, intake = filled()
    reads: Counter[str] = Counter()

    class Page:
        def __init__(self, page: Any) -> None:
            self._page = page

        def __getattr__(self, name: str) -> Any:
            reads[name] += 1
            return getattr(self._page, name)

    page = intake.directory.page

    def counted(start: int, most: int) -> tuple[Any, ...]:
        found, *more = page(start, most)
        return Page(found), *more

    monkeypatch.setattr(intake.directory, "page", counted)
    saved(instances, intake)
    assert reads["hashes"] == reads["sizes_bytes"] == reads["positions"] == 1


def test_every_damage_is_refused_and_nothing_is_restored() -> None:
    content = saved(*filled())
    rng = random.Random(SEED)
    places = [*sorted(rng.sample(range(len(content)), 150)), 0, 8, len(content) - 1]
    damaged = [content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :] for at in places]
    for text in [*damaged, *(content[:at] for at in places), content + b"x", b""]:
        instances = Instances(SYSTEM, 30.0)
        intake = EventIntake(instances.knows)
        with pytest.raises(ConfigError):
            checkpoint.restore(io.BytesIO(text), instances, intake, 0.0)
        assert not instances.all() and not intake.directory.stats().records


def test_the_format_is_the_pinned_one() -> None:
    """Later versions may write another one, and read this one."""
    instances, intake = restored(GOLDEN.read_bytes())
    assert told(intake.directory) == told(filled()[1].directory)
    assert intake.stream("a") == filled()[1].stream("a")
    assert [instance.instance_id for instance in instances.all()] == ["a", "b"]
    assert saved(*filled()) == GOLDEN.read_bytes()


def test_a_server_of_an_older_checkpoint_has_no_token() -> None:
    older = ["a", "10.0.0.1", 8080, {}, "", 5555, True, 7, 3, False]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=checkpoint.SavedInstance).token_digest == b""


def test_a_damaged_checkpoint_is_kept_aside_and_the_coordinator_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "directory"
    path.write_bytes(b"nothing of a checkpoint")
    with caplog.at_level(logging.ERROR):
        fleet = Fleet(CoordinatorSettings(checkpoint_path=str(path)), str, SYSTEM)
    assert "is not used, and kept as" in caplog.text and "no checkpoint of a coordinator" in caplog.text
    assert (tmp_path / "directory.damaged").read_bytes() == b"nothing of a checkpoint"
    fleet.stop()
    assert path.exists()
    assert os.stat(path).st_mode & 0o077 == 0
    Fleet(CoordinatorSettings(checkpoint_path=str(path)), str, SYSTEM).stop()


def test_decisions_are_kept_and_damage_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "decisions")
    metadata = Metadata(path)
    metadata.set_quota("tenant", 5)
    metadata.add_pin(FleetPin("one", "me", ["x/y"], "", 100.0), 0.0)
    metadata.add_pin(FleetPin("two", "you", ["x/z"], "a", 50.0), 0.0)
    again = Metadata(path)
    assert again.quotas() == {"tenant": 5}
    assert [pin.pin_id for pin in again.pins(60.0)] == ["one"]
    assert [pin.pin_id for pin in again.remove_pins("", "me")] == ["one"]
    assert [pin.pin_id for pin in Metadata(path).pins(0.0)] == ["two"]
    text = Path(path).read_text().replace('"tenant":5', '"tenant":6')
    Path(path).write_text(text)
    assert Metadata(path).quotas() == {}
    assert "its checksum is not that of its content" in caplog.text
    assert Path(path + ".damaged").read_text() == text


def test_pins_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FLEET_PINS", 3)
    metadata = Metadata("")
    for number in range(3):
        metadata.add_pin(FleetPin(str(number), "me", [], "", 100.0), 0.0)
    with pytest.raises(LMCacheError, match="end some"):
        metadata.add_pin(FleetPin("more", "me", [], "", 100.0), 0.0)
    metadata.add_pin(FleetPin("more", "me", [], "", 300.0), 200.0)  # the others have ended


def test_a_file_that_cannot_be_written_is_refused_before_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path(os.devnull), tmp_path / "missing" / "file"):
        with pytest.raises(ResourceError, match="--checkpoint-path"):
            saved_file.refuse_unusable(str(path), "--checkpoint-path")
    with pytest.raises(LMCacheError, match="cannot be written"):
        saved_file.replace(str(tmp_path / "missing" / "file"), lambda file: None)


@pytest.mark.parametrize("names", [("state", "state.new"), ("state.damaged", "state"), ("state", "elsewhere/../state")])
def test_a_file_is_not_what_another_one_becomes(tmp_path: Path, names: tuple[str, str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    paths = [str(tmp_path / name) for name in names]
    with pytest.raises(ConfigError, match=f"must be two files.* got {paths[0]} and {paths[1]}"):
        CoordinatorProcess(CoordinatorSettings("127.0.0.1", 0, 0, checkpoint_path=paths[0], metadata_path=paths[1]))


def test_what_could_not_be_written_to_its_end_is_not_left(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        file.write(bytes(1 << 16))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "directory"
    path.write_bytes(b"as it was")
    with pytest.raises(LMCacheError, match="No space left"):
        saved_file.replace(str(path), write)
    assert os.listdir(tmp_path) == ["directory"] and path.read_bytes() == b"as it was"
