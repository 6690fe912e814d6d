"""The converter of GGUF on a file that is written by hand, as ggml's docs/gguf.md describes it."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
ALIGN = 32
HIDDEN, HEADS, KV_HEADS = 64, 2, 1
F32, Q4_1, Q8_0, Q6_K = 0, 3, 8, 14
UINT32, FLOAT32, STRING, ARRAY, INT32 = 4, 6, 8, 9, 5


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torch", "transformers", "safetensors", "tokenizers"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(BENCHMARKS)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(value: Any) -> bytes:
    """A value of metadata, its type in front."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    of = STRING if isinstance(value[0], str) else INT32
    packed = [text(item) if of == STRING else struct.pack("<i", item) for item in value]
    return struct.pack("<IIQ", ARRAY, of, len(value)) + b"".join(packed)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[Sequence[int], int, bytes]]) -> Path:
    """`tensors`: shape in torch's order, GGML type, bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + entry(value) for key, value in metadata.items())
    data = b""
    for name, (shape, kind, content) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += content + bytes(-len(content) % ALIGN)
    path.write_bytes(head + bytes(-len(head) % ALIGN) + data)
    return path


def halves(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def metadata(**others: Any) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<end>", "a", "b", "1", "2", "ab"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        **others,
    }


def test_blocks_of_4_and_8_bits_are_read_as_ggml_writes_them(tmp_path: Path) -> None:
    from gguf import GgufFile

    codes = bytes(at | (15 - at) << 4 for at in range(16))
    eights = struct.pack("<32b", *range(-16, 16))
    file = GgufFile(
        write_gguf(
            tmp_path / "model.gguf",
            metadata(),
            {
                "four": ((1, 32), Q4_1, halves(0.5, -1.0) + codes),
                "eight": ((2, 16), Q8_0, halves(0.25) + eights),
                "whole": ((3,), F32, struct.pack("<3f", 1.0, 2.5, -3.0)),
            },
        )
    )
    assert file.load("four").tolist() == [[0.5 * at - 1 for at in (*range(16), *range(15, -1, -1))]]
    assert file.load("eight").tolist() == [[0.25 * at for at in range(-16, 0)], [0.25 * at for at in range(16)]]
    assert file.load("whole").tolist() == [1.0, 2.5, -3.0]


def model_tensors() -> dict[str, tuple[Sequence[int], int, bytes]]:
    """The rows of q and k say where they were; everything else is 1."""

    def rows(count: int, columns: int) -> tuple[Sequence[int], int, bytes]:
        numbers = [float(row) for row in range(count) for _ in range(columns)]
        return (count, columns), F32, struct.pack(f"<{len(numbers)}f", *numbers)

    vector = ((HIDDEN,), F32, struct.pack(f"<{HIDDEN}f", *[1.0] * HIDDEN))
    head = HIDDEN // HEADS
    sizes = {"attn_q": HIDDEN, "attn_k": head, "attn_v": head, "attn_output": HIDDEN}
    sizes |= {"ffn_gate": HIDDEN, "ffn_up": HIDDEN, "ffn_down": HIDDEN}
    named = {f"blk.0.{part}.weight": rows(size, HIDDEN) for part, size in sizes.items()}
    norms = {f"blk.0.{part}.weight": vector for part in ("attn_norm", "ffn_norm")}
    return {"token_embd.weight": rows(6, HIDDEN), **named, **norms, "output_norm.weight": vector}


def test_the_folder_is_what_transformers_loads(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from gguf import convert

    folder = convert(write_gguf(tmp_path / "model.gguf", metadata(), model_tensors()), tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(folder)
    attention = model.model.layers[0].self_attn
    # Rows 2i and 2i + 1 of a head are rotated together; transformers has them at i and i + half a head.
    half = [*range(0, 32, 2), *range(1, 32, 2)]
    assert attention.q_proj.weight[:, 0].tolist() == [*half, *(32 + row for row in half)]
    assert attention.k_proj.weight[:, 0].tolist() == half
    assert attention.v_proj.weight[:, 0].tolist() == list(range(32))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert str(model.dtype) == "torch.bfloat16"
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_theta"] == 1000.0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.encode("ab12<end>") == [5, 3, 4, 0]
    assert tokenizer.decode([5, 3, 4]) == "ab12"


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("general.architecture", "gemma3", "is a gemma3 with a gpt2 tokenizer; this converts llama with gpt2"),
        ("tokenizer.ggml.pre", "qwen2", "splits text as qwen2; this knows smollm alone"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, key: str, value: str, sentence: str) -> None:
    from gguf import convert

    source = write_gguf(tmp_path / "model.gguf", metadata(**{key: value}), model_tensors())
    with pytest.raises(ValueError, match=sentence):
        convert(source, tmp_path / "model")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    from gguf import GgufFile

    file = GgufFile(write_gguf(tmp_path / "six.gguf", metadata(), {"six": ((256,), Q6_K, bytes(210))}))
    with pytest.raises(ValueError, match="six has the GGML type 14; F32, F16, Q8_0 and Q4_1 can be read"):
        file.load("six")
    (tmp_path / "other").write_bytes(b"GGUF" + struct.pack("<I", 2) + bytes(64))
    with pytest.raises(ValueError, match="is no GGUF file of version 3"):
        GgufFile(tmp_path / "other")
