"""What an operator reads about the keys of an adapter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache.cli.adapter_help import about, adapter_keys
from lmcache.cli.main import main
from lmcache.l2.adapter_types import TYPES

SOURCES = Path(__file__).parents[3]


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["config", "adapter", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", TYPES)
def test_every_key_of_every_adapter_is_described(name: str) -> None:
    config = TYPES[name].config
    assert about(config).endswith(".")
    for key in adapter_keys(config):
        assert key.description and key.expected, key.name
        assert not key.description.endswith("."), key.name


def test_the_types_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[0] for line in shown(capsys).splitlines()] == list(TYPES)


def test_the_keys_of_a_type_are_shown_with_ranges_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown(capsys, "raw_block").split())
    assert text.startswith("""Usage: --l2-adapter '{"type": "raw_block", "device_path": ..., "slot_bytes": ...}'""")
    assert (
        "capacity_bytes how much of the device is used; 0 is all; a whole number from 0 to 1152921504606846976." in text
    )
    assert "block_align alignment of the device, a power of two;" in text and "Default: 4096." in text
    assert text.index("reformat") < text.index("Keys of every adapter:") < text.index("eviction.trigger_watermark")


def test_programs_read_the_keys_too(capsys: pytest.CaptureFixture[str]) -> None:
    adapters = json.loads(shown(capsys, "fs", "--format", "json"))["metrics"]
    assert list(adapters) == ["fs"]
    keys = {key["name"]: key for key in adapters["fs"]["keys"]}
    assert keys["base_path"]["required"] is True
    assert keys["timeout_seconds"]["default"] == 30.0


def test_the_reference_page_is_current() -> None:
    script = SOURCES / "scripts" / "write_adapter_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
