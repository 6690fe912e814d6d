"""A LoRA adapter is named by what the engine has loaded, or its requests run uncached."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.integration.vllm.adapters import Adapters


def lora(folder: Path | str, number: int = 1, *, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name="style", lora_path=str(folder), lora_int_id=number, load_inplace=load_inplace)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one" * 1000)
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 16}')
    return tmp_path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_same_content_has_the_same_name_everywhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert Adapters().content(lora(folder)) == Adapters().content(lora(copy, 7)) is not None


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_was_saved_anew_and_loaded_under_another_number_is_another(folder: Path, name: str) -> None:
    adapters = Adapters()
    first = adapters.content(lora(folder, 1))
    (folder / name).write_bytes(b"two" * 1000)
    again = adapters.content(lora(folder, 2))
    assert None is not again != first
    assert adapters.unchanged(lora(folder, 2))


def test_after_its_files_were_changed_it_is_not_known_what_the_engine_has(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = Adapters()
    assert adapters.content(lora(folder)) is not None
    assert adapters.unchanged(lora(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"two" * 1000)
    assert not adapters.unchanged(lora(folder))
    assert adapters.content(lora(folder)) is None
    (folder / "adapter_model.safetensors").write_bytes(b"one" * 1000)
    assert adapters.content(lora(folder)) is None  # the engine may have read the other content meanwhile
    (said,) = warnings(caplog)
    assert "style" in said and "changed after it was loaded" in said


def test_an_adapter_that_the_engine_reads_in_every_step_is_what_its_files_are(folder: Path) -> None:
    adapters = Adapters()
    first = adapters.content(lora(folder, load_inplace=True))
    (folder / "adapter_model.safetensors").write_bytes(b"two" * 1000)
    assert not adapters.unchanged(lora(folder, load_inplace=True))
    second = adapters.content(lora(folder, load_inplace=True))
    assert None is not second != first
    assert adapters.unchanged(lora(folder, load_inplace=True))


@pytest.mark.parametrize("path", ["team/adapter-of-the-hub", "/no/such/folder"])
def test_an_adapter_without_a_local_folder_is_not_known(path: str, caplog: pytest.LogCaptureFixture) -> None:
    adapters = Adapters()
    assert adapters.content(lora(path)) is None
    assert adapters.content(lora(path)) is None
    assert not adapters.unchanged(lora(path))
    (said,) = warnings(caplog)
    assert "not in a local folder" in said
