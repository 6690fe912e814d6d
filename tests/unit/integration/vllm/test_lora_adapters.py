"""A LoRA adapter is named by what the engine has loaded, or its requests run uncached."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.integration.vllm import lora_adapters as module
from lmcache.integration.vllm.lora_adapters import LoadedAdapter, LoraAdapters
from support.held_items import held_items


def content(adapters: LoraAdapters, lora: Any) -> str | None:
    named = adapters.named(lora)
    return named.content if named is not None else None


def named(adapters: LoraAdapters, lora: Any) -> LoadedAdapter:
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
    assert content(LoraAdapters(), lora(folder)) == content(LoraAdapters(), lora(copy, 7)) is not None


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_was_saved_anew_and_loaded_under_another_number_is_another(folder: Path, name: str) -> None:
    adapters = LoraAdapters()
    first = content(adapters, lora(folder, 1))
    (folder / name).write_bytes(b"two" * 1000)
    again = named(adapters, lora(folder, 2))
    assert again.content != first
    assert adapters.unchanged(lora(folder, 2), again)


def test_after_its_files_were_changed_it_is_not_known_what_the_engine_has(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = LoraAdapters()
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
    adapters = LoraAdapters()
    first = named(adapters, lora(folder, load_inplace=True))
    save(folder, b"two")
    assert not adapters.unchanged(lora(folder, load_inplace=True), first)
    second = named(adapters, lora(folder, load_inplace=True))
    assert second.content != first.content
    assert adapters.unchanged(lora(folder, load_inplace=True), second)


@pytest.mark.parametrize("weights", [b"two", b"one"])
def test_what_a_request_was_named_by_does_not_change_with_a_later_request(folder: Path, weights: bytes) -> None:
    adapters = LoraAdapters()
    first = named(adapters, lora(folder, load_inplace=True))
    save(folder, b"two")
    save(folder, weights)
    named(adapters, lora(folder, load_inplace=True))
    assert not adapters.unchanged(lora(folder, load_inplace=True), first)


@pytest.mark.parametrize("previous_inplace", [False, True])
def test_what_is_loaded_in_place_from_another_path_takes_the_number_of_the_previous(
    tmp_path: Path, previous_inplace: bool
) -> None:
    previous = lora(save(tmp_path / "one", b"one"), load_inplace=previous_inplace)
    later = lora(save(tmp_path / "two", b"two"), load_inplace=True)
    adapters = LoraAdapters()
    first = named(adapters, previous)
    second = named(adapters, later)
    assert not adapters.unchanged(previous, first)
    assert adapters.unchanged(later, second)
    assert named(adapters, later) is second
    assert (adapters.named(previous) is not None) == previous_inplace  # it is read again, or nobody knows
    assert adapters.unchanged(later, second) == (not previous_inplace)


def test_of_two_adapters_with_one_number_it_is_not_known_which_the_engine_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lora_a, lora_b = lora(save(tmp_path / "one", b"one")), lora(save(tmp_path / "two", b"two"))
    adapters = LoraAdapters()
    first = named(adapters, lora_a)
    assert adapters.named(lora_b) is None
    assert adapters.named(lora_b) is None
    assert adapters.named(lora_a) is None
    assert not adapters.unchanged(lora_a, first)
    (said,) = warnings(caplog)
    assert "number 1" in said


def test_an_adapter_in_use_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ADAPTERS_KEPT", 4)
    used = lora(save(tmp_path / "used", b"one"))
    adapters = LoraAdapters()
    named(adapters, used)
    save(tmp_path / "used", b"two")
    for number in range(2, 20):
        named(adapters, lora(save(tmp_path / str(number), b"one"), number))
        assert adapters.named(used) is None
    assert list(held_items(adapters, module.__name__).values()) == [4, 4]  # adapters, and numbers


@pytest.mark.parametrize("path", ["team/adapter-of-the-hub", "/no/such/folder"])
def test_an_adapter_without_a_local_folder_is_not_known(path: str, caplog: pytest.LogCaptureFixture) -> None:
    adapters = LoraAdapters()
    assert content(adapters, lora(path)) is None
    assert content(adapters, lora(path)) is None
    (said,) = warnings(caplog)
    assert "not in a local folder" in said


def test_while_requests_of_two_adapters_with_one_number_run_neither_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lora_a = lora(save(tmp_path / "one", b"one"), load_inplace=True)
    lora_b = lora(save(tmp_path / "two", b"two"), load_inplace=True)
    adapters = LoraAdapters()
    adapters.request_begins("a", lora_a)
    first = named(adapters, lora_a)
    adapters.request_begins("b", lora_b)
    assert adapters.named(lora_b) is None  # any step may load either of them last
    assert not adapters.unchanged(lora_a, first)
    adapters.request_begins("c", lora_a)
    assert adapters.named(lora_a) is None
    (warning,) = warnings(caplog)
    assert "number 1" in warning
    adapters.request_ended("b")
    adapters.request_begins("d", lora_a)
    again = named(adapters, lora_a)  # every step reads it
    assert again.content is not None
    assert not adapters.unchanged(lora_a, first)


def test_after_a_conflict_an_adapter_that_is_not_read_again_stays_unknown(tmp_path: Path) -> None:
    lora_a = lora(save(tmp_path / "one", b"one"))
    lora_b = lora(save(tmp_path / "two", b"two"), load_inplace=True)
    adapters = LoraAdapters()
    adapters.request_begins("a", lora_a)
    named(adapters, lora_a)
    adapters.request_begins("b", lora_b)
    assert adapters.named(lora_b) is None
    adapters.request_ended("a")
    adapters.request_ended("b")
    assert adapters.named(lora_a) is None  # the engine may have the other one under its number
    assert named(adapters, lora_b).content is not None


def test_requests_that_ended_leave_nothing_behind(folder: Path) -> None:
    adapters = LoraAdapters()
    for name in ("a", "a", "b"):
        adapters.request_begins(name, lora(folder))
    for name in ("a", "a", "b", "unknown"):
        adapters.request_ended(name)
    assert not held_items(adapters, module.__name__)
