"""Which weights an engine has: the same identity only for the same weights, and a sentence where they are not known."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from lmcache.errors import LayoutRefused
from lmcache.integration.engine.weight_files import weights_sample
from lmcache.integration.vllm.weights import refuse_unknown_weights, weights_identity

COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
KNOWN = {
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "dummy"),
    *("sharded_state", "runai_streamer", "runai_streamer_sharded"),
}


def config(model: str, load_format: str = "auto", *, parallel: Mapping[str, Any] = {}, **fields: Any) -> Any:
    extra = fields.pop("extra", {})
    values = {"model": model, "revision": None, "quantization": None, "hf_config": SimpleNamespace(), **fields}
    return SimpleNamespace(
        model_config=SimpleNamespace(**values),
        load_config=SimpleNamespace(load_format=load_format, model_loader_extra_config=extra),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, **parallel),
        speculative_config=None,
    )


def identity(folder: Path, *arguments: Any, **fields: Any) -> str:
    engine = config(str(folder), *arguments, **fields)
    refuse_unknown_weights(engine)
    return json.dumps(weights_identity(engine))


def write_tensors(path: Path, tensors: Mapping[str, bytes]) -> None:
    header = tensors_header({name: len(content) for name, content in tensors.items()})
    path.write_bytes(header + b"".join(tensors.values()))


def tensors_header(tensors: Mapping[str, int]) -> bytes:
    """What precedes tensors of these sizes in a safetensors file."""
    header, offset = {}, 0
    for name, size_bytes in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size_bytes], "data_offsets": [offset, offset + size_bytes]}
        offset += size_bytes
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(encoded).to_bytes(8, "little") + encoded


@pytest.mark.engine
def test_every_load_format_of_vllm_is_either_known_or_refused_with_its_name(tmp_path: Path) -> None:
    loader = pytest.importorskip("vllm.model_executor.model_loader")
    formats = set(get_args(loader.LoadFormats)) | {"a_plugin_of_somebody"}
    assert formats >= KNOWN
    for load_format in sorted(formats):
        if load_format in KNOWN:
            refuse_unknown_weights(config(str(tmp_path), load_format))
        else:
            with pytest.raises(LayoutRefused, match=f"load_format {load_format} "):
                refuse_unknown_weights(config(str(tmp_path), load_format))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model": "/tmp/cached", "model_weights": "s3://bucket/model", "load_format": "runai_streamer"},
            "s3://bucket",
        ),
        ({"model": "team/model"}, "team/model"),
        ({"model": "team/model", "revision": "main"}, "team/model"),
        ({"model": "/models/model.gguf"}, "model.gguf"),
        (
            {
                "model": "team/model",
                "hf_config": SimpleNamespace(_commit_hash=COMMIT),
                "hf_config_path": "team/other-configuration",
            },
            "team/model",
        ),
        ({"load_format": "dummy", "model": "/", "quantization": "awq"}, "Made-up weights"),
        ({"model": "/", "hf_config": SimpleNamespace(audio_model_id="team/audio")}, "audio_model_id"),
    ],
)
def test_weights_that_are_not_known_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(LayoutRefused, match=reason):
        refuse_unknown_weights(config(**changes))


def test_a_draft_whose_weights_are_not_known_is_refused_too(tmp_path: Path) -> None:
    both = config(str(tmp_path))
    draft = config("team/draft").model_config
    draft.dtype = "bfloat16"
    both.speculative_config = SimpleNamespace(method="draft_model", model="team/draft", draft_model_config=draft)
    with pytest.raises(LayoutRefused, match="team/draft"):
        refuse_unknown_weights(both)
    draft.hf_config = SimpleNamespace(_commit_hash=COMMIT, to_dict=dict)
    refuse_unknown_weights(both)
    assert "draft" in weights_identity(both)


def test_a_commit_of_the_hub_names_the_weights() -> None:
    names = [
        json.dumps(weights_identity(config("team/model", **fields)))
        for fields in (
            {"revision": COMMIT},
            {"revision": "f" * 40},
            {"hf_config": SimpleNamespace(_commit_hash="e" * 40)},
        )
    ]
    assert len(set(names)) == 3
    assert (
        json.dumps(weights_identity(config("team/model", hf_config=SimpleNamespace(_commit_hash=COMMIT)))) == names[0]
    )


def test_made_up_weights_are_not_those_of_the_folder_nor_of_another_number_of_workers(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(60_000))
    names = {
        identity(tmp_path),
        identity(tmp_path, "dummy"),
        identity(tmp_path, "dummy", parallel={"enable_expert_parallel": True}),
    }
    assert len(names) == 3
    assert identity(tmp_path, "dummy") in names


def test_shards_are_not_taken_for_the_whole_weights_beside_them(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model-rank-0-part-0.safetensors"):
        (tmp_path / name).write_bytes(bytes(60_000))
    pattern = {"pattern": "other-{rank}-{part}.safetensors"}
    names = {
        identity(tmp_path),
        identity(tmp_path, "sharded_state"),
        identity(tmp_path, "sharded_state", extra=pattern),
    }
    assert len(names) == 3


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "consolidated.pt", "transformer/m.safetensors"]
)
def test_weights_that_were_replaced_in_place_are_others(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(3 << 20))
    before = identity(tmp_path)
    assert identity(tmp_path) == before
    path.write_bytes(b"1" * (3 << 20))
    assert identity(tmp_path) != before


def test_one_tensor_of_many_that_was_trained_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {f"layer{index}": bytes(20_000) for index in range(300)}
    write_tensors(path, tensors)
    before = identity(tmp_path)
    for changed in ("layer0", "layer151", "layer299"):
        write_tensors(path, {**tensors, changed: b"1" * 20_000})
        assert identity(tmp_path) != before


def test_each_tensor_of_a_model_of_many_files_has_a_part_in_its_name(tmp_path: Path) -> None:
    files, tensors, tensor_bytes = 200, 100, 20_000
    header = tensors_header({f"layer{index}": tensor_bytes for index in range(tensors)})
    for number in range(files):
        with (tmp_path / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(header)
            file.truncate(len(header) + tensors * tensor_bytes)
    before = weights_sample(tmp_path)
    with (tmp_path / "model-00100.safetensors").open("r+b") as file:
        for index in (43, 44, 45):
            start = len(header) + index * tensor_bytes
            os.pwrite(file.fileno(), b"1" * tensor_bytes, start)
            assert weights_sample(tmp_path) != before, index
            os.pwrite(file.fileno(), bytes(tensor_bytes), start)


def test_a_part_of_a_large_tensor_has_a_part_in_the_name_of_its_model(tmp_path: Path) -> None:
    """Experts of a layer may be one tensor."""
    path, expert_bytes = tmp_path / "model.safetensors", 9 << 20
    names = set()
    for trained in range(3):
        experts = [b"1" if expert == trained else b"0" for expert in range(3)]
        write_tensors(path, {"experts": b"".join(content * expert_bytes for content in experts)})
        names.add(weights_sample(tmp_path))
    assert len(names) == 3


def test_tensors_of_other_names_are_other_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"a" * 60_000: bytes(100), "key": b"1" * 9000, "value": b"2" * 9000})
    before = identity(tmp_path)
    write_tensors(path, {"a" * 60_000: bytes(100), "value": b"1" * 9000, "key": b"2" * 9000})
    assert identity(tmp_path) != before


@pytest.mark.parametrize("checksums", [True, False])
def test_each_tensor_that_pytorch_saved_has_a_part_in_the_name(tmp_path: Path, checksums: bool) -> None:
    path, tensors = tmp_path / "pytorch_model.bin", [bytes(20_000) for _ in range(400)]
    write_archive(path, tensors, checksums=checksums)
    before = identity(tmp_path)
    for index in (0, 7, 200, 399):
        write_archive(path, [*tensors[:index], b"1" * 20_000, *tensors[index + 1 :]], checksums=checksums)
        assert identity(tmp_path) != before, index


def write_archive(path: Path, tensors: Sequence[bytes], *, checksums: bool) -> None:
    """As PyTorch does, which leaves checksums out where it is told so."""
    with zipfile.ZipFile(path, "w") as archive:
        for number, content in enumerate(tensors):
            archive.writestr(f"archive/data/{number}", content)
        if not checksums:
            for entry in archive.infolist():
                entry.CRC = 0


@pytest.mark.parametrize("content", [b"PK\5\6" + bytes(18), b"PK\3\4" + bytes(26)])
def test_a_file_that_is_no_archive_is_sampled_by_its_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pytorch_model.bin"
    names = set()
    for filling in (b"0", b"1"):
        path.write_bytes(filling * 300_000 + content)
        names.add(identity(tmp_path))
    assert len(names) == 2


@pytest.mark.parametrize(
    "header", [b"", b"\x02", (1 << 40).to_bytes(8, "little"), (7).to_bytes(8, "little") + b"[1,2,3]"]
)
def test_a_file_that_is_no_safetensors_is_sampled_by_its_bytes(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header + bytes(100_000))
    before = identity(tmp_path)
    path.write_bytes(header + b"1" * 100_000)
    assert identity(tmp_path) != before


@pytest.mark.parametrize(
    "names",
    [
        b'{"a": {"data_offsets": [0, 1e999]}}',
        b'{"a": {"data_offsets": [-500, 1000]}}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_safetensors_with_impossible_offsets_is_sampled_by_its_bytes(tmp_path: Path, names: bytes) -> None:
    path = tmp_path / "model.safetensors"
    found = set()
    for filling in (b"0", b"1"):
        path.write_bytes(len(names).to_bytes(8, "little") + names + filling * 300_000)
        found.add(identity(tmp_path))
    assert len(found) == 2
