"""Encrypted objects: the right key gives the bytes that were stored, anything else a miss."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from lmcache import _native
from lmcache.core.frame import parse_header
from lmcache.core.outcome import LoadOutcome, StoreOutcome
from lmcache.errors import AdapterError, ConfigError, LMCacheError
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.serde.aesgcm import AesGcmConfig, KeyFile, build_aesgcm
from lmcache.testing.frames import keys, namespace
from unit.l2.test_serde_layer import MOCK, PAYLOAD_BYTES, Bench, bfloats

OLD, NEW = "5ec2e7" + "01" * 29, "5ec2e7" + "02" * 29
LOADED, MISSING = LoadOutcome.LOADED, LoadOutcome.MISSING


def key_file(folder: Path, *lines: str) -> Path:
    path = folder / "master.key"
    made = folder / "made.key"
    made.write_text("".join(f"{line}\n" for line in lines))
    made.chmod(0o600)
    os.replace(made, path)
    return path


def serde(path: Path, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "exponent"}, {"type": "aesgcm", "master_key_path": str(path), **more}]


@pytest.mark.parametrize("aes_bits", [128, 256])
def test_what_was_stored_comes_back_and_no_byte_of_it_lies_there(aes_bits: int, tmp_path: Path) -> None:
    async def test() -> None:
        async with Bench([serde(key_file(tmp_path, OLD), aes_bits=aes_bits)[1]]) as bench:
            wanted = [*keys(3), *keys(2, of=namespace("other", salt="tenant"))]
            assert await bench.store(wanted) == [StoreOutcome.STORED] * 5
            assert await bench.load(wanted) == [LOADED] * 5
            for key, frame in bench.stored.items():
                header = parse_header(frame)
                assert header.serde == "aesgcm" and header.payload_bytes == PAYLOAD_BYTES
                plain = bfloats(next(served for served in wanted if served.chunk_hash == key.chunk_hash))
                assert all(plain[at : at + 16] not in frame for at in range(0, PAYLOAD_BYTES, 4096))

    asyncio.run(test())


def test_objects_of_another_key_are_misses_and_stay_for_who_has_it(tmp_path: Path) -> None:
    async def test() -> None:
        wanted = keys(3)
        async with Bench(serde(key_file(tmp_path, OLD))) as old:
            await old.store(wanted)
            held = old.stored
        async with Bench(serde(key_file(tmp_path, NEW))) as new:
            new.adapter.inner.objects = held
            new.runner.found([(key, len(frame)) for key, frame in held.items()])
            assert await new.load(wanted) == [MISSING] * 3
            assert new.sample("l2_serde_unreadable_total") == 3 and len(held) == 3
            others = keys(3, seed=9)
            assert await new.store(others) == [StoreOutcome.STORED] * 3
            assert await new.load(others) == [LOADED] * 3
        async with Bench(serde(key_file(tmp_path, NEW, OLD))) as both:
            both.adapter.inner.objects = held
            assert await both.load([*wanted, *others]) == [LOADED] * 6

    asyncio.run(test())


def test_an_object_of_a_key_that_is_gone_is_replaced_when_it_is_stored_again(tmp_path: Path) -> None:
    async def test() -> None:
        wanted, others = keys(3), keys(2, seed=9)
        async with Bench(serde(key_file(tmp_path, OLD))) as old:
            await old.store([*wanted, *others])
            held = old.stored
        async with Bench(serde(key_file(tmp_path, NEW))) as new:
            new.adapter.inner.objects = held
            assert await new.runner.probe(wanted) == [True] * 3
            assert await new.load(wanted) == [MISSING] * 3
            new.adapter.raises = AdapterError("out of order")
            assert await new.store(wanted) == [StoreOutcome.FAILED] * 3
            new.adapter.raises = None
            assert await new.store(wanted) == [StoreOutcome.STORED] * 3
            assert await new.load(wanted) == [LOADED] * 3
            assert new.runner.ledger.used_bytes == sum(len(held[key]) for key in new.runner.stored_keys(wanted))
            assert await new.store(wanted) == [StoreOutcome.ALREADY_THERE] * 3
        async with Bench(serde(key_file(tmp_path, OLD))) as again:  # and what nobody stored anew is left alone
            again.adapter.inner.objects = held
            assert await again.load([*wanted, *others]) == [MISSING] * 3 + [LOADED] * 2

    asyncio.run(test())


def test_a_server_takes_the_keys_of_a_file_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache.l2.layers.serde_queue.REFRESH_SECONDS", 0.0)

    async def test() -> None:
        wanted = keys(2)
        path = key_file(tmp_path, NEW)
        async with Bench(serde(path)) as new:
            await new.store(wanted)
            held = new.stored
        async with Bench(serde(key_file(tmp_path, OLD))) as bench:
            bench.adapter.inner.objects = held
            assert await bench.load(wanted) == [MISSING] * 2
            key_file(tmp_path, OLD, NEW)
            while await bench.load(wanted) != [LOADED] * 2:
                pass

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_key_file_that_becomes_unusable_is_said_once_and_its_keys_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = key_file(tmp_path, OLD)
    keys_of = KeyFile(str(path), "adapter 1", 256)
    stage = _native.aesgcm_stage(keys_of.cipher)
    sealed, plain = bytearray(100), bytearray(100)
    encoded = stage.encode(bytes(range(100)), sealed)
    assert encoded is not None
    for spoil in (path.unlink, lambda: key_file(tmp_path, OLD[:-1]), lambda: key_file(tmp_path, OLD).chmod(0o644)):
        spoil()
        caplog.clear()
        keys_of.refresh()
        keys_of.refresh()
        (record,) = caplog.records
        assert "keys that were read before stay in use" in record.getMessage()
        assert OLD[6:20] not in caplog.text
        assert stage.decode(sealed, plain, encoded[1]) == "" and plain == bytes(range(100))
    key_file(tmp_path, NEW)
    keys_of.refresh()
    assert "read again" in caplog.text
    assert stage.decode(sealed, plain, encoded[1]) == "unreadable" and plain == bytes(100)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", OLD.encode()[:-1], b"\0" * 31, b"\0" * 33, f"{OLD}\n".encode() * 17, b"a" * 5000),
        OLD.encode()[:32],  # half a key, without the end of its line
        b"correct horse battery staple 123",
    ],
)
def test_a_file_without_a_master_key_is_refused_and_not_shown(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o400)
    with pytest.raises(ConfigError, match="must hold a master key of 32 random bytes") as refusal:
        build(parse_adapter({**MOCK, "serde": serde(path)}, 0))
    assert str(refusal.value).startswith("--l2-adapter 1 (mock)") and OLD[6:20] not in str(refusal.value)


def test_a_raw_key_and_its_hex_digits_are_one_key(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.write_bytes(bytes.fromhex(OLD))
    raw.chmod(0o600)
    stages = [
        build_aesgcm(AesGcmConfig(type="aesgcm", master_key_path=str(raw)), "here"),
        build_aesgcm(AesGcmConfig(type="aesgcm", master_key_path=str(key_file(tmp_path, OLD))), "here"),
        build_aesgcm(AesGcmConfig(type="aesgcm", master_key_env="MASTER"), "here", {"MASTER": OLD.upper()}),
    ]
    for first in stages:
        for second in stages:
            sealed, plain = bytearray(50), bytearray(50)
            encoded = first.native.encode(b"x" * 50, sealed)
            assert encoded is not None
            assert second.native.decode(sealed, plain, encoded[1]) == "" and plain == b"x" * 50


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, 'give "master_key_path" or "master_key_env"'),
        ({"master_key_path": "a", "master_key_env": "b"}, 'give "master_key_path" or "master_key_env"'),
        ({"master_key_path": "/nowhere/key"}, "cannot be opened: No such file or directory"),
        ({"master_key_path": "/tmp"}, "must be a file, not a folder or a device"),
        ({"master_key_path": "/dev/zero"}, "must be a file, not a folder or a device"),
        ({"master_key_env": "LMCACHE_NOT_SET"}, 'LMCACHE_NOT_SET of "master_key_env" is not set'),
        ({"master_key_path": "a", "aes_bits": 192}, '"aes_bits"'),
        ({"master_key_path": "a", "key_provider": "kms"}, '"key_provider"'),
        ({"master_key": OLD}, '"master_key"'),
        ({"master_key_path": OLD}, '"master_key_path" must say where the master key is, and holds one itself'),
        ({"master_key_env": OLD.upper()}, '"master_key_env" must say where the master key is, and holds one itself'),
    ],
)
def test_keys_that_cannot_be_are_refused_in_a_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(LMCacheError) as refusal:
        build(parse_adapter({**MOCK, "serde": {"type": "aesgcm", **given}}, 0))
    assert said in str(refusal.value) and OLD not in str(refusal.value).lower()


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o640, 0o666])
def test_a_key_file_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    path = key_file(tmp_path, OLD)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"gives others access.*chmod 600"):
        KeyFile(str(path), "adapter 1", 256)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user; run as root")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path, OLD)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        KeyFile(str(path), "adapter 1", 256)


def test_native_keys_are_checked() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        _native.ObjectCipher([b"short"], 256)
    with pytest.raises(ValueError, match="1 to 16"):
        _native.ObjectCipher([], 256)
    with pytest.raises(ValueError, match="aes_bits"):
        _native.ObjectCipher([bytes(32)], 192)
