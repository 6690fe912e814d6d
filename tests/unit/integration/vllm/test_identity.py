"""What keeps engines and requests apart that must not share KV."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.integration.vllm.identity import (
    engine_identity,
    is_cacheable,
    model_identity,
    names_media,
    request_identity,
)


def engine(folder: Path, *, isa: str = "amx", dtype: str = "auto", version: str = "0.32.0", **model: Any) -> str:
    layer = SimpleNamespace(impl=object(), isa=isa, kv_cache_dtype=dtype)
    values: dict[str, Any] = {
        "hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": 64}),
        "revision": None,
        "dtype": "bfloat16",
        "quantization": None,
        "model": str(folder),
        "max_model_len": 4096,
    }
    config = SimpleNamespace(
        model_config=SimpleNamespace(**{**values, **model}),
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
        parallel_config=SimpleNamespace(),
        speculative_config=None,
    )
    return engine_identity(model_identity(config), version, {"layer0": layer}, ("layer0",))


def test_what_decides_the_bytes_of_a_block_is_part_of_the_layout(tmp_path: Path) -> None:
    """The instruction set and kernel that pack blocks, their type, and the engine's version with its build."""
    pytest.importorskip("torch")
    same = engine(tmp_path)
    assert engine(tmp_path) == same
    others = [
        engine(tmp_path, isa="vec"),
        engine(tmp_path, dtype="fp8"),
        engine(tmp_path, version="0.33.0"),
        engine(tmp_path, version="0.32.1"),
        engine(tmp_path, version="0.32.0+gabc1234"),
        engine(tmp_path, quantization="awq"),
        engine(tmp_path, revision="other"),
    ]
    assert len({same, *others}) == 8


def test_weights_that_were_replaced_in_place_are_another_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(60_000))
    before = engine(tmp_path)
    weights.write_bytes(b"1" + bytes(59_999))
    assert engine(tmp_path) != before


def test_how_an_engine_makes_media_ready_is_part_of_the_layout(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def of_images(**settings: Any) -> str:
        return engine(tmp_path, multimodal_config=SimpleNamespace(**{"mm_processor_kwargs": None, **settings}))

    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": true}')
    assert of_images() == of_images()
    names = [engine(tmp_path), of_images(), of_images(mm_processor_kwargs={"do_normalize": False})]
    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": null}')
    assert len({*names, of_images()}) == 4
    assert engine(tmp_path) == names[0]  # without media those files mean nothing


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "named"), [(4, True, True), (4, False, True), (0, True, True), (0, False, False)]
)
def test_media_that_the_engine_only_counts_are_not_cached(cache_gb: float, prefix_caching: bool, named: bool) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb)),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    assert names_media(config) is named
    text = SimpleNamespace(prompt_token_ids=[1], prompt_embeds=None, mm_features=[], resumable=False)
    with_image = SimpleNamespace(**{**vars(text), "mm_features": [object()]})
    assert is_cacheable(text, media_have_names=named)
    assert is_cacheable(with_image, media_have_names=named) is named


def test_a_request_is_distinguished_by_adapter_its_content_and_the_generation_of_the_weights() -> None:
    plain = SimpleNamespace(lora_request=None)
    assert request_identity(plain) == b""
    style = SimpleNamespace(lora_request=SimpleNamespace(lora_name="style", lora_path="/style"))
    moved = SimpleNamespace(lora_request=SimpleNamespace(lora_name="style", lora_path="/elsewhere"))
    names = [
        request_identity(plain),
        request_identity(plain, generation=b"1"),
        request_identity(plain, generation=b"2"),
        request_identity(style, "content"),
        request_identity(style, "other"),
        request_identity(style, "content", b"1"),
        request_identity(moved, "content"),
    ]
    assert len(set(names)) == len(names)
