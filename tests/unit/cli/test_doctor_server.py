"""What `lmcache doctor` makes of a server's figures and options, each complaint with a remedy."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lmcache import __version__
from lmcache.cli import doctor_checks, doctor_options, doctor_server
from lmcache.cli.doctor_checks import NOTE, OK, PROBLEM, Verdict
from lmcache.cli.top_figures import parse
from lmcache.protocol.messages import PROTOCOL_VERSION

STATUS: dict[str, Any] = {
    "rpc_endpoint": "tcp://h:5555",
    "hash_algorithm": "blake3",
    "instances": [
        {
            "instance_id": "e",
            "model_name": "m",
            "ranks": 1,
            "workers": [0],
            "transfer": [{"worker": 0, "mode": "shm", "reason": ""}],
        }
    ],
    "l1": {"quarantined_bytes": 0, "allocation_failures": 0, "used_bytes": 1, "capacity_bytes": 4},
    "l2": {
        "adapters": [
            {
                "name": "disk",
                "objects": 3,
                "used_bytes": 1024,
                "full": False,
                "loads_suspended": False,
                "stores_suspended": False,
                "abandoned": 0,
            }
        ]
    },
}


def status(**changes: Any) -> dict[str, Any]:
    """With other values of the first engine, of the adapter or of L1."""
    found = copy.deepcopy(STATUS)
    for part in (found, found["instances"][0], found["l2"]["adapters"][0], found["l1"]):
        part.update({key: value for key, value in changes.items() if key in part or key == "buffered_fallbacks"})
    return found


def verdicts(found: dict[str, Any]) -> list[Verdict]:
    parts = (doctor_server.engines, doctor_server.adapters, doctor_server.memory)
    return [verdict for part in parts for verdict in part(found)]


def test_a_server_that_is_well() -> None:
    assert {verdict.level for verdict in verdicts(status())} == {OK}
    assert list(doctor_server.misses({})) == list(doctor_server.faults({})) == []


@pytest.mark.parametrize(
    ("changes", "level", "found", "remedy"),
    [
        ({"instances": []}, NOTE, "none is registered", "tcp://h:5555 by lmcache.mp.host"),
        (
            {"transfer": [{"worker": 0, "mode": "socket", "reason": "no such file"}]},
            NOTE,
            "which is slower than memory: no such file",
            "--ipc=host",
        ),
        ({"ranks": 2}, NOTE, "1 of 2 workers are registered", "look at its log"),
        ({"loads_suspended": True, "full": True}, PROBLEM, "loads are suspended after faults", "goes on"),
        ({"full": True}, NOTE, "full with 1.0 KiB", '"max_capacity_gb"'),
        ({"buffered_fallbacks": 7}, NOTE, "7 operations wanted O_DIRECT", '"use_odirect"'),
        ({"abandoned": 2}, NOTE, "2 operations did not end in time", "stands still"),
        ({"quarantined_bytes": 1024}, NOTE, "1.0 KiB are in quarantine", "kill what is left"),
        ({"allocation_failures": 5}, NOTE, "5 chunks found no room", "larger --l1-size-gb"),
    ],
)
def test_what_figures_say(changes: dict[str, Any], level: str, found: str, remedy: str) -> None:
    (verdict,) = [verdict for verdict in verdicts(status(**changes)) if verdict.level != OK]
    assert verdict.level == level
    assert found in verdict.found and remedy in verdict.remedy


def test_causes_of_misses_and_faults() -> None:
    metrics = parse(
        'lmcache_mp_misses_total{reason="too_short"} 30\nlmcache_mp_misses_total{reason="not_stored"} 20\n'
        'lmcache_mp_corrupt_frames_total{tier="l1"} 1\nlmcache_mp_corrupt_frames_total{tier="disk"} 2\n'
        'lmcache_mp_internal_faults_total{logger="x"} 0\n'
    )
    (verdict,) = doctor_server.misses(metrics)
    assert verdict.found == "30 of 50: prompts are shorter than a chunk" and "--chunk-size" in verdict.remedy
    (verdict,) = doctor_server.faults(metrics)
    assert (verdict.level, verdict.found) == (PROBLEM, "3 frames did not verify")
    few = parse('lmcache_mp_misses_total{reason="too_short"} 5\n')
    assert list(doctor_server.misses(few)) == []


def test_versions() -> None:
    def told(version: str, oldest: int, current: int) -> Verdict:
        protocol = {"oldest_supported": oldest, "current": current}
        return doctor_server.versions({"version": version, "protocol_version": protocol})

    assert told(__version__, PROTOCOL_VERSION, PROTOCOL_VERSION).level == OK
    assert told("9.9", PROTOCOL_VERSION, PROTOCOL_VERSION).level == NOTE
    for oldest in (PROTOCOL_VERSION + 1, 0):
        verdict = told("9.9", oldest, oldest)
        assert verdict.level == PROBLEM and "no protocol in common" in verdict.found


def test_hash_seed() -> None:
    assert doctor_server.hash_seed(STATUS, "").level == OK
    verdict = doctor_server.hash_seed({"hash_algorithm": "builtin"}, "")
    assert verdict.level == NOTE and "no PYTHONHASHSEED" in verdict.found
    assert "'0' here" in doctor_server.hash_seed({"hash_algorithm": "builtin"}, "0").found


# ---- the machine -----------------------------------------------------------------------------------------------------
def test_large_pages(tmp_path: Path) -> None:
    assert doctor_checks.large_pages(tmp_path / "none").level == NOTE
    (tmp_path / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    assert doctor_checks.large_pages(tmp_path, "6.1.0-9").level == OK
    assert "use Linux 6.1" in doctor_checks.large_pages(tmp_path, "5.15.0").remedy
    (tmp_path / "shmem_enabled").write_text("always within_size advise never [deny] force\n")
    assert "denies" in doctor_checks.large_pages(tmp_path, "6.1.0-9").found


def test_clock() -> None:
    assert [doctor_checks.clock(state).level for state in (0, 5, -1)] == [OK, NOTE, OK]
    assert doctor_checks.clock().name == "clock"


@pytest.mark.parametrize(
    ("free_blocks", "free_files", "said"), [(10, 1 << 20, "too little to be of use"), (1 << 30, 9, "room for 9 files")]
)
def test_a_folder_that_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_blocks: int, free_files: int, said: str
) -> None:
    full = os.statvfs_result((4096, 4096, 1 << 31, free_blocks, free_blocks, 1 << 21, free_files, free_files, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    verdict = doctor_checks.folder(tmp_path)
    assert verdict.level == NOTE and said in verdict.found


# ---- options ---------------------------------------------------------------------------------------------------------
def test_options_of_a_server(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    token.chmod(0o604)
    words = ["--l1-size-gb", "0.1", "--eviction-policy", "LRU", "--admin-token-file", str(token)]
    words += ["--http-host", "127.0.0.1", "--l2-adapter", json.dumps({"type": "fs", "base_path": str(tmp_path)})]
    found = doctor_options.configured(words, {})
    assert found.verdict.level == OK and found.config is not None
    assert doctor_options.folders(found.adapters) == [tmp_path]
    (secret,) = doctor_options.secrets(found.config, found.adapters)
    assert secret.level == PROBLEM and secret.remedy == f"chmod 600 {token}."
    for mode, level in ((0o640, NOTE), (0o600, OK)):
        token.chmod(mode)
        assert [verdict.level for verdict in doctor_options.secrets(found.config, ())] == [level]
    noted = doctor_options.configured([*words, "--max-gpu-workers", "2"], {}).verdict
    assert noted.level == NOTE and "--max-gpu-workers has no effect" in noted.details[0]
    token.write_text("short")
    refused = doctor_options.configured(words, {}).verdict
    assert refused.level == PROBLEM and any("--admin-token-file" in detail for detail in refused.details)
    assert doctor_options.configured(["--chunk-size", "0"], {}).config is None
