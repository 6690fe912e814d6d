"""Scripts beside a real server: started, logged, started again, and ended with it and all that they started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmcache.core.limits import (
    MAX_PLUGIN_BYTES_PER_SECOND,
    MAX_PLUGIN_LINE_BYTES,
    MAX_PLUGIN_LINES_PER_SECOND,
    MIB,
)
from lmcache.errors import ConfigError, LMCacheError
from lmcache.runtime_plugins.launcher import PluginLauncher
from lmcache.runtime_plugins.scripts import find_scripts
from lmcache.testing.processes import CacheServer
from manual_clock import ManualClock
from polling import until
from process.support import SmallEngine


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@contextmanager
def serving(folder: Path, *extra: str) -> Iterator[CacheServer]:
    options = ["--runtime-plugin-locations", str(folder / "plugins"), *extra]
    with CacheServer(folder, l1_size_gb=0.0625, extra=options) as server:
        server.wait_ready()
        yield server


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


# A child in its own session that ignores SIGTERM, and a grandchild whose parent has gone.
STUBBORN = """#!/bin/sh
setsid sh -c 'trap "" TERM; echo $$ > {folder}/child; sh -c "sleep 1000 & echo \\$! > {folder}/orphan"; sleep 1000' &
echo $$ > {folder}/self
wait
"""


def pids(folder: Path) -> list[int]:
    names = ("self", "child", "orphan")
    until(lambda: all((folder / name).exists() and (folder / name).read_text().strip() for name in names))
    return [int((folder / name).read_text()) for name in names]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_scripts_end_with_the_server_and_leave_nobody_behind(tmp_path: Path, number: int) -> None:
    script(tmp_path / "plugins" / "stubborn.sh", STUBBORN.format(folder=tmp_path))
    with serving(tmp_path) as server:
        found = pids(tmp_path)
        assert all(runs(pid) for pid in found)
        os.kill(server.pid, number)
        until(lambda: not server.alive())
        until(lambda: not any(runs(pid) for pid in found), seconds=10.0)
    (Path("/dev/shm") / server.shm_name).unlink(missing_ok=True)


def test_work_is_refused_at_once_however_long_a_script_takes_to_end(tmp_path: Path) -> None:
    script(
        tmp_path / "plugins" / "stubborn.sh", "#!/bin/sh\ntrap '' TERM\necho begun\nwhile true; do sleep 0.1; done\n"
    )
    with serving(tmp_path) as server, SmallEngine(server.port) as engine:
        until(lambda: "begun" in server.log())
        server.popen.send_signal(signal.SIGTERM)

        def is_refused() -> bool:
            try:
                engine.lookup("r", engine.tokens(1))
            except LMCacheError:
                return True
            return False

        until(is_refused)
        assert "stubborn.sh: ended" not in server.log() and server.alive()
        assert server.popen.wait(20) == 0
        assert "stubborn.sh: ended" in server.log()


def test_the_environment_has_the_whole_configuration_without_secrets(tmp_path: Path) -> None:
    script(
        tmp_path / "plugins" / "deep" / "er" / "tell.py",
        "import json, os, sys\n"
        "config = json.loads(os.environ['LMCACHE_RUNTIME_PLUGIN_CONFIG'])\n"
        "extra = json.loads(os.environ['LMCACHE_RUNTIME_PLUGIN_EXTRA_CONFIG'])\n"
        f"json.dump([config, extra, sys.stdin.read()], open('{tmp_path}/told.part', 'w'))\n"
        f"os.rename('{tmp_path}/told.part', '{tmp_path}/told')\n",
    )
    extra = ["--runtime-plugin-config", '{"plugin.heartbeat_url": "http://h/beat", "token": "given"}']
    with serving(tmp_path, *extra) as server:
        until((tmp_path / "told").exists)
        config, given, stdin = json.loads((tmp_path / "told").read_text())
        assert given == {"plugin.heartbeat_url": "http://h/beat", "token": "given"}
        assert config["http_port"] == server.http_port
        assert config["l1_size_gb"] == 0.0625
        assert config["runtime_plugin_config"] == {"plugin.heartbeat_url": "http://h/beat", "token": "[hidden]"}
        assert stdin == ""
        until(lambda: "tell.py: ended" in server.log())  # with 0: it is done


def test_output_is_logged_by_lines_within_bounds(tmp_path: Path) -> None:
    text = f"""import sys
print("out")
print("err", file=sys.stderr)
print("x" * {10 * MAX_PLUGIN_LINE_BYTES})
print("y" * 300_000 + "end of y")
sys.stdout.buffer.write(b"\\xff\\x1b[31m no text\\n")
sys.stdout.flush()
for number in range({5 * MAX_PLUGIN_LINES_PER_SECOND}):
    print("line", number)
print("unfinished", end="")
"""
    script(tmp_path / "plugins" / "talk.py", text)
    with serving(tmp_path) as server:
        until(lambda: "talk.py: ended" in server.log())
        lines = [line.partition("talk.py: ")[2] for line in server.log().splitlines() if "talk.py: " in line]
        assert {"out", "err"} <= set(lines)
        assert "x" * MAX_PLUGIN_LINE_BYTES + " ..." in lines
        assert not any("end of y" in line for line in lines)
        assert any("\\xff" in line for line in lines)
        assert any("are left out" in line for line in lines)
        assert max(map(len, lines)) < 2 * MAX_PLUGIN_LINE_BYTES


def test_a_flood_of_output_waits_for_its_share(tmp_path: Path) -> None:
    """Else it would take the processor from engines."""
    flood = f"""import sys
for number in range(1, 65):
    sys.stdout.write("x" * {MIB})
    sys.stdout.flush()
    open({str(tmp_path / "written")!r}, "w").write(str(number))
"""
    script(tmp_path / "plugins" / "flood.py", flood)
    clock = ManualClock()
    launcher = PluginLauncher(find_scripts([str(tmp_path / "plugins")]), dict, clock)

    def written_bytes() -> int:
        with contextlib.suppress(OSError, ValueError):  # not yet
            return int((tmp_path / "written").read_text()) * MIB
        return 0

    launcher.start()
    try:
        until(lambda: written_bytes() >= MAX_PLUGIN_BYTES_PER_SECOND)
        with pytest.raises(AssertionError, match="not so within 1 s"):
            until(lambda: written_bytes() > MAX_PLUGIN_BYTES_PER_SECOND + MIB, 1.0)
        clock.advance(1.0)
        until(lambda: written_bytes() >= 2 * MAX_PLUGIN_BYTES_PER_SECOND)
    finally:
        launcher.stop()


def test_a_script_that_fails_is_started_again_after_pauses_that_grow(tmp_path: Path) -> None:
    script(tmp_path / "plugins" / "fail.sh", f"#!/bin/sh\necho run >> {tmp_path}/runs\nexit 3\n")
    script(tmp_path / "plugins" / "killed.sh", f"#!/bin/sh\necho run >> {tmp_path}/killed\nkill -9 $$\n")
    with serving(tmp_path) as server:
        until(lambda: "fail.sh: ended with exit code 3; again in 2 s" in server.log())
        until(lambda: "killed.sh: ended with exit code 137; again in 2 s" in server.log())
        assert (tmp_path / "runs").read_text() == "run\nrun\n"


def test_what_cannot_be_run_is_refused_before_the_start(tmp_path: Path) -> None:
    for name in ("a.sh", ".hidden/b.py", "sub/c.py", "sub/notes.txt", "__pycache__/d.py"):
        script(tmp_path / "plugins" / name, "#!/usr/bin/env python3 -x\n" if name == "sub/c.py" else "\n")
    found = find_scripts([str(tmp_path / "plugins"), str(tmp_path / "plugins" / "a.sh")])
    assert [entry.name for entry in found] == ["a.sh", "c.py"]
    assert found[0].command[0] == "/bin/sh"
    assert found[1].command[:2] == ("/usr/bin/env", "python3 -x")
    script(tmp_path / "plugins" / "bad.sh", "#!/no/such/shell\n")
    writable = script(tmp_path / "plugins" / "open.sh", "#!/bin/sh\n")
    writable.chmod(stat.S_IMODE(writable.stat().st_mode) | stat.S_IWOTH)
    locations = [str(tmp_path / "plugins"), str(tmp_path / "missing"), str(tmp_path / "plugins" / "sub" / "notes.txt")]
    with pytest.raises(ConfigError) as refused:
        find_scripts(locations)
    sentences = str(refused.value).splitlines()
    for part in ("names /no/such/shell", "chmod o-w", "no script and no folder", "must end in .py or .sh"):
        assert any(part in sentence for sentence in sentences), part
