"""A LoRA adapter is named by what the engine has loaded, or its requests run uncached."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.integration.vllm import adapters as module
from lmcache.integration.vllm.adapters import Adapter, Adapters


def content(adapters: Adapters, lora: Any) -> str | None:
    named = adapters.named(lora)
    return named.content if named is not None else None


def named(adapters: Adapters, lora: Any) -> Adapter:
    adapter = adapters.named(lora)
    assert adapter is not None
    return adapter


def save(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights * 1000)
    return folder


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
    assert content(Adapters(), lora(folder)) == content(Adapters(), lora(copy, 7)) is not None


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_was_saved_anew_and_loaded_under_another_number_is_another(folder: Path, name: str) -> None:
    adapters = Adapters()
    first = content(adapters, lora(folder, 1))
    (folder / name).write_bytes(b"two" * 1000)
    again = named(adapters, lora(folder, 2))
    assert again.content != first
    assert adapters.unchanged(lora(folder, 2), again)


def test_after_its_files_were_changed_it_is_not_known_what_the_engine_has(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = Adapters()
    first = named(adapters, lora(folder))
    assert adapters.unchanged(lora(folder), first)
    save(folder, b"two")
    assert not adapters.unchanged(lora(folder), first)
    assert content(adapters, lora(folder)) is None
    save(folder, b"one")
    assert content(adapters, lora(folder)) is None  # the engine may have read the other content meanwhile
    assert not adapters.unchanged(lora(folder), first)
    (said,) = warnings(caplog)
    assert "style" in said and "changed after it was loaded" in said


def test_an_adapter_that_the_engine_reads_in_every_step_is_what_its_files_are(folder: Path) -> None:
    adapters = Adapters()
    first = named(adapters, lora(folder, load_inplace=True))
    save(folder, b"two")
    assert not adapters.unchanged(lora(folder, load_inplace=True), first)
    second = named(adapters, lora(folder, load_inplace=True))
    assert second.content != first.content
    assert adapters.unchanged(lora(folder, load_inplace=True), second)


@pytest.mark.parametrize("weights", [b"two", b"one"])
def test_what_a_request_was_named_by_does_not_change_with_a_later_request(folder: Path, weights: bytes) -> None:
    adapters = Adapters()
    first = named(adapters, lora(folder, load_inplace=True))
    save(folder, b"two")
    save(folder, weights)
    named(adapters, lora(folder, load_inplace=True))
    assert not adapters.unchanged(lora(folder, load_inplace=True), first)


@pytest.mark.parametrize("former_inplace", [False, True])
def test_what_is_loaded_in_place_from_another_path_takes_the_number_of_the_former(
    tmp_path: Path, former_inplace: bool
) -> None:
    former = lora(save(tmp_path / "one", b"one"), load_inplace=former_inplace)
    later = lora(save(tmp_path / "two", b"two"), load_inplace=True)
    adapters = Adapters()
    first = named(adapters, former)
    second = named(adapters, later)
    assert not adapters.unchanged(former, first)
    assert adapters.unchanged(later, second)
    assert named(adapters, later) is second
    assert (adapters.named(former) is not None) == former_inplace  # it is read again, or nobody knows
    assert adapters.unchanged(later, second) == (not former_inplace)


def test_of_two_adapters_with_one_number_it_is_not_known_which_the_engine_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = lora(save(tmp_path / "one", b"one")), lora(save(tmp_path / "two", b"two"))
    adapters = Adapters()
    first = named(adapters, one)
    assert adapters.named(two) is None
    assert adapters.named(two) is None
    assert adapters.named(one) is None
    assert not adapters.unchanged(one, first)
    (said,) = warnings(caplog)
    assert "number 1" in said


def test_an_adapter_in_use_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ADAPTERS_KEPT", 4)
    used = lora(save(tmp_path / "used", b"one"))
    adapters = Adapters()
    named(adapters, used)
    save(tmp_path / "used", b"two")
    for number in range(2, 20):
        named(adapters, lora(save(tmp_path / str(number), b"one"), number))
        assert adapters.named(used) is None
    assert len(adapters._kept) == len(adapters._latest) == 4


@pytest.mark.parametrize("path", ["team/adapter-of-the-hub", "/no/such/folder"])
def test_an_adapter_without_a_local_folder_is_not_known(path: str, caplog: pytest.LogCaptureFixture) -> None:
    adapters = Adapters()
    assert content(adapters, lora(path)) is None
    assert content(adapters, lora(path)) is None
    (said,) = warnings(caplog)
    assert "not in a local folder" in said
