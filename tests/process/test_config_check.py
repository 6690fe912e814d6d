"""`lmcache config check` against `lmcache server`: what the server refuses, the check refuses in the same words and
with the same exit code; and what the server runs with, the check accepts."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lmcache.testing.processes import CacheServer
from polling import until
from process.commands import COMMAND_SECONDS, LMCACHE, MACHINE, USAGE, lmcache, unprivileged, with_defaults

_FREE_BYTES = re.compile(r"has \d+ left")  # others fill the disk meanwhile
RAW = {"type": "raw_block", "slot_bytes": 1 << 20, "meta_total_bytes": 1 << 20}
MODULE = """
class Incomplete:
    pass

class Failing:
    def __init__(self):
        raise RuntimeError("no\\nlicence")
"""


@dataclass(frozen=True)
class Bad:
    """`make` gets a folder of its own and gives the options; `said` is a part of every sentence, in order."""

    make: Callable[[Path], Sequence[str]]
    said: Sequence[str]
    code: int
    environment: dict[str, str] = field(default_factory=dict)


def adapter(**keys: Any) -> list[str]:
    return ["--l2-adapter", json.dumps(keys)]


def file(path: Path, content: bytes = b"", size_bytes: int = 0) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if size_bytes:
        os.truncate(path, size_bytes)
    return str(path)


def raw(folder: Path, **keys: Any) -> list[str]:
    return adapter(**{**RAW, "device_path": file(folder / "device", size_bytes=64 << 20), **keys})


def dax(folder: Path, content: bytes = b"", **keys: Any) -> list[str]:
    spec = {"type": "dax", "device_path": file(folder / "dax", content), "max_dax_size_gb": 0.01, "slot_bytes": 4096}
    return adapter(**{**spec, **keys})


def plugin(folder: Path, kind: str = "plugin", **keys: Any) -> list[str]:
    module = file(folder / "module.py", MODULE.encode())
    return adapter(**{"type": kind, "module_path": module, "class_name": "Incomplete", **keys})


def yaml(content: bytes) -> Callable[[Path], list[str]]:
    return lambda folder: ["--config", file(folder / "server.yaml", content)]


def given(*options: str) -> Callable[[Path], list[str]]:
    return lambda folder: [option.replace("{folder}", str(folder)) for option in options]


BAD = {
    "flags": Bad(
        given("--chunk-sise", "256", "--port", "x", "--l2-adapter", '{"type": "redis"}'),
        ["did you mean --chunk-size?", "--port must be a whole number", "did you mean resp?"],
        USAGE,
    ),
    "environment": Bad(given(), ["LMCACHE_CHUNK_SIZE must be at least 1 token"], USAGE, {"LMCACHE_CHUNK_SIZE": "0"}),
    "near miss": Bad(given(), ["did you mean LMCACHE_L1_SIZE_GB?"], USAGE, {"LMCACHE_L1_SIZE": "20"}),
    "log level": Bad(given(), ["LMCACHE_LOG_LEVEL must be one of"], USAGE, {"LMCACHE_LOG_LEVEL": "LOUD"}),
    "unit": Bad(given("--l1-size-gb", "20GB"), ["got '20GB'; give the number alone."], USAGE),
    "combination": Bad(given("--l2-store-policy", "skip_l1"), ["needs an --l2-adapter"], USAGE),
    "yaml type": Bad(yaml(b"chunk_size: [1]"), ["must be a whole number of tokens, got [1]."], USAGE),
    "yaml key": Bad(yaml(b"chunk_sise: 1"), ["did you mean chunk_size?"], USAGE),
    "yaml twice": Bad(yaml(b"port: 1\nport: 2"), ["has the key 'port' twice."], USAGE),
    "yaml text": Bad(yaml(b"just words"), ["must hold one mapping of options"], USAGE),
    "yaml broken": Bad(yaml(b"a: ["), ["is not YAML at line 1"], USAGE),
    "yaml binary": Bad(yaml(b"\xff\xfe\x00"), ["is not UTF-8 text"], USAGE),
    "yaml nested": Bad(yaml(b"l2_adapter: [[]]"), ["must be a JSON object"], USAGE),
    "yaml folder": Bad(given("--config", "{folder}"), ["cannot be read: Is a directory."], USAGE),
    "yaml missing": Bad(given("--config", "{folder}/none"), ["cannot be read: No such file"], USAGE),
    "token file": Bad(given("--admin-token-file", "{folder}/none"), ["cannot be read: No such file"], USAGE),
    "token short": Bad(lambda f: ["--admin-token-file", file(f / "t", b"short")], ["at least 16 characters"], USAGE),
    "quota file": Bad(
        lambda f: ["--eviction-policy", "IsolatedLRU", "--quota-file", file(f / "q", b'{"a": -1}')],
        ['the limit of "a" is not a number from 0'],
        USAGE,
    ),
    "quota folder": Bad(
        given("--eviction-policy", "IsolatedLRU", "--quota-file", "{folder}/none/q"), ["cannot be made"], MACHINE
    ),
    "lookup log": Bad(
        lambda f: ["--lookup-hash-log-dir", file(f / "log")], ["cannot be written: File exists"], MACHINE
    ),
    "host": Bad(given("--host", "192.0.2.1"), ["Cannot listen on 192.0.2.1:0"], MACHINE),
    "host with port": Bad(given("--host", "localhost:1"), ["write --host localhost --port 1."], USAGE),
    "http host": Bad(given("--http-host", "192.0.2.1"), ["Cannot listen on 192.0.2.1:0"], MACHINE),
    "hosts": Bad(
        given("--http-host", "192.0.2.1", "--host", "198.51.100.7"), ["198.51.100.7:0", "192.0.2.1:0"], MACHINE
    ),
    "l1 size": Bad(given("--l1-size-gb", "100000"), ["in all; choose a smaller --l1-size-gb or"], MACHINE),
    "fs inside a file": Bad(
        lambda f: adapter(type="fs", base_path=file(f / "x") + "/l2"), ["/x/l2 is not a folder; choose"], MACHINE
    ),
    "a file system that takes no files": Bad(
        lambda f: [
            *("--audit-log", "/proc/audit", "--lookup-hash-log-dir", "/proc/lookups"),
            *adapter(type="fs_native", base_path="/proc/l2"),
            *adapter(type="fs", base_path="/sys/l2"),
        ],
        ["/proc/audit", "--lookup-hash-log-dir /proc/lookups cannot", "the folder /proc/l2:", "the folder /sys/l2:"],
        MACHINE,
    ),
    "fs a file": Bad(lambda f: adapter(type="fs_native", base_path=file(f / "x")), ["/x is not a folder"], MACHINE),
    "fs temporary": Bad(
        lambda f: adapter(type="fs_native", base_path=str(f / "l2"), relative_tmp_dir="../../etc"),
        ['"relative_tmp_dir" must name a folder inside base_path'],
        USAGE,
    ),
    "fs temporary a file": Bad(
        lambda f: adapter(type="fs", base_path=os.path.dirname(file(f / "l2" / "tmp")), relative_tmp_dir="tmp"),
        ["/l2/tmp is not a folder"],
        MACHINE,
    ),
    "fs eviction": Bad(
        lambda f: adapter(type="fs", base_path=str(f), eviction={"eviction_policy": "LRU"}),
        ['needs "max_capacity_gb"'],
        USAGE,
    ),
    "raw slot": Bad(
        lambda f: raw(f, slot_bytes=(1 << 20) + 1), ['"slot_bytes" must be a multiple of block_align'], USAGE
    ),
    "raw align": Bad(lambda f: raw(f, block_align=5000), ['"block_align" must be a power of two'], USAGE),
    "raw header": Bad(lambda f: raw(f, header_bytes=1 << 20), ['"header_bytes" must be less than slot_bytes'], USAGE),
    "raw metadata": Bad(lambda f: raw(f, meta_total_bytes=16385), ['"meta_total_bytes" must be a multiple'], USAGE),
    "raw persist": Bad(lambda f: raw(f, persist_enabled=False), ['"persist_enabled" must be true'], USAGE),
    "raw missing": Bad(lambda f: raw(f, device_path=str(f / "none")), ["cannot open"], MACHINE),
    "raw folder": Bad(lambda f: raw(f, device_path=str(f)), ["must be a block device or a file"], USAGE),
    "raw no room": Bad(lambda f: raw(f, capacity_bytes=1 << 20), ["meta_total_bytes and one slot take"], USAGE),
    "raw foreign": Bad(
        lambda f: raw(f, device_path=file(f / "other", b"important", 64 << 20)), ["nothing was changed"], MACHINE
    ),
    "raw twice": Bad(lambda f: [*raw(f), *raw(f)], ["give each a device of its own"], USAGE),
    "dax missing": Bad(lambda f: dax(f, device_path=str(f / "none")), ["does not exist"], MACHINE),
    "dax folder": Bad(lambda f: dax(f, device_path=str(f)), ["is neither a DAX device nor a file"], USAGE),
    "dax foreign": Bad(lambda f: dax(f, b"important"), ["something that is not this cache's"], MACHINE),
    "dax slot": Bad(lambda f: dax(f, slot_bytes=1 << 30), ["has no room for a slot"], USAGE),
    "dax no room": Bad(lambda f: dax(f, max_dax_size_gb=1 << 29), ["lower it."], MACHINE),
    "plugin import": Bad(
        lambda f: adapter(type="plugin", module_path="no_such_module", class_name="X"), ["cannot be imported"], USAGE
    ),
    "plugin class": Bad(lambda f: plugin(f, class_name="Incomplet"), ["did you mean Incomplete?"], USAGE),
    "plugin methods": Bad(plugin, ["Incomplete lacks open, store"], USAGE),
    "plugin raises": Bad(lambda f: plugin(f, class_name="Failing"), ["RuntimeError: no licence"], USAGE),
    "native import": Bad(lambda f: plugin(f, "native_plugin", module_path="no_such"), ["cannot be imported"], USAGE),
    "native class": Bad(lambda f: plugin(f, "native_plugin", class_name="X"), ["is not a class in"], USAGE),
    "several": Bad(
        lambda f: [
            *raw(f, device_path=str(f / "none")),
            *dax(f, device_path=str(f)),
            "--admin-token-file",
            str(f / "t"),
        ],
        ["--admin-token-file", "--l2-adapter 1 (raw_block)", "--l2-adapter 2 (dax)"],
        USAGE,
    ),
}


def both(
    options: Sequence[str], environment: dict[str, str] | None = None, prefix: Sequence[str] = ()
) -> list[tuple[int, list[str]]]:
    """(exit code, lines on stderr) of the check and of the server."""
    words = with_defaults(f"lmcache-test-check-{os.getpid()}", options)
    running = [
        subprocess.Popen(
            [*prefix, *LMCACHE, *command, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        for command in (["config", "check"], ["server"])
    ]
    ended = []
    for process in running:
        out, err = process.communicate(timeout=COMMAND_SECONDS)
        assert out == ""
        assert "Traceback" not in err
        ended.append((process.returncode, _FREE_BYTES.sub("has some left", err).splitlines()))
    return ended


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", BAD)
def test_the_check_refuses_what_the_server_refuses(tmp_path: Path, name: str) -> None:
    bad = BAD[name]
    options = bad.make(tmp_path)
    before = snapshot(tmp_path)
    check, server = both(options, bad.environment)
    assert check == server
    code, lines = check
    assert code == bad.code
    assert len(lines) == len(bad.said), lines
    for line, part in zip(lines, bad.said, strict=True):
        assert line.startswith("lmcache: ")
        assert line.endswith((".", "?"))
        assert part in line
    assert snapshot(tmp_path) == before


def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    folder.chmod(0o555)
    device = file(tmp_path / "device", size_bytes=64 << 20)
    os.chmod(device, 0o400)
    options = [
        *("--lookup-hash-log-dir", str(folder / "log")),
        *adapter(type="fs_native", base_path=str(folder / "l2")),
        *adapter(**RAW, device_path=device),
    ]
    check, server = both(options, prefix=unprivileged())
    assert check == server
    code, lines = check
    assert (code, len(lines)) == (MACHINE, 3)
    assert all("Permission denied" in line for line in lines)


def test_the_check_of_a_running_server_is_fine_and_disturbs_nothing(tmp_path: Path) -> None:
    """Nothing that a server holds is needed: what is checked may be the configuration of the next start."""
    options = [
        *adapter(type="fs_native", base_path=str(tmp_path / "l2")),
        *raw(tmp_path),
        *dax(tmp_path),
        *("--quota-file", str(tmp_path / "quotas"), "--lookup-hash-log-dir", str(tmp_path / "log"), "--l1-persist"),
    ]
    server = CacheServer(tmp_path, l1_size_gb=0.1, extra=options)
    try:
        server.wait_ready()
        ports = ["--port", str(server.port), "--http-port", str(server.http_port)]
        checked = lmcache("config", "check", *with_defaults(server.shm_name, [*options, *ports]))
        assert (checked.returncode, checked.stderr) == (0, "")
        assert "--quota-file has no effect" in checked.stdout
        assert server.status()["l2"]
        until(lambda: "--quota-file has no effect" in server.log())
    finally:
        assert server.stop() == 0


def test_memory_of_somebody_else_under_the_name_is_refused_by_both() -> None:
    memory = Path(f"/dev/shm/lmcache-test-foreign-{os.getpid()}")
    memory.write_bytes(b"important")
    try:
        check, server = both(["--shm-name", memory.name])
        assert check == server
        assert check[0] == MACHINE
        assert check[1] == [
            f"lmcache: {memory} exists and is not L1 memory of this user; remove it or choose another --shm-name."
        ]
        assert memory.read_bytes() == b"important"
    finally:
        memory.unlink()


def test_an_empty_file_is_no_fault(tmp_path: Path) -> None:
    options = ["--config", file(tmp_path / "empty.yaml")]
    done = lmcache("config", "check", *with_defaults(f"lmcache-test-empty-{os.getpid()}", options))
    assert (done.returncode, done.stderr) == (0, "")
