"""Reads a model in GGUF and writes it as a folder of Hugging Face's: weights in bfloat16, configuration, tokenizer.

For the architecture `llama` with a tokenizer of the kind `gpt2`, and tensors in F32, F16, Q8_0 or Q4_1. The format is
that of ggml's docs/gguf.md. Needs the torch, transformers, tokenizers and safetensors of an engine.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache.core.rounding import round_up

MAGIC, VERSION = b"GGUF", 3
DEFAULT_ALIGN_BYTES = 32
BLOCK_ELEMENTS = 32  # of Q8_0 and Q4_1
CONTROL_TOKEN = 3
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Tensor:
    """`shape` as in torch: rows first."""

    shape: tuple[int, ...]
    kind: int
    offset_bytes: int  # in the file

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class _Reader:
    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.offset = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._content, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def bytes(self, count: int) -> bytes:
        self.offset += count
        return self._content[self.offset - count : self.offset]

    def string(self) -> str:
        return self.bytes(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, count = self.number("I"), self.number("Q")
            return [self.value(of) for _ in range(count)]
        return self.number(_NUMBERS[kind])


class GgufFile:
    """`metadata` by key, `tensors` by name. ValueError where the file is none, or of another version."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = _Reader(self._content)
        if reader.bytes(4) != MAGIC or reader.number("I") != VERSION:
            raise ValueError(f"{path} is no GGUF file of version {VERSION}; convert it with a current llama.cpp.")
        tensors, keys = reader.number("Q"), reader.number("Q")
        self.metadata = {reader.string(): reader.value(reader.number("I")) for _ in range(keys)}
        described = [self._tensor(reader) for _ in range(tensors)]
        align = self.metadata.get("general.alignment", DEFAULT_ALIGN_BYTES)
        start = round_up(reader.offset, align)
        self.tensors = {name: Tensor(shape, kind, start + offset) for name, shape, kind, offset in described}

    @staticmethod
    def _tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = reader.string(), reader.number("I")
        shape = tuple(reversed([reader.number("Q") for _ in range(dimensions)]))
        return name, shape, reader.number("I"), reader.number("Q")

    def load(self, name: str) -> Any:
        """The tensor in float32. ValueError names one that is stored in a way that this does not read."""
        import torch

        tensor = self.tensors[name]
        if tensor.kind not in _KINDS:
            raise ValueError(f"{name} has the GGML type {tensor.kind}; F32, F16, Q8_0 and Q4_1 can be read.")
        block_elements, block_bytes, decode = _KINDS[tensor.kind]
        size_bytes = tensor.elements // block_elements * block_bytes
        raw = bytearray(self._content[tensor.offset_bytes : tensor.offset_bytes + size_bytes])
        return decode(torch.frombuffer(raw, dtype=torch.uint8)).reshape(tensor.shape)


def _halves(columns: Any) -> Any:
    import torch

    return columns.contiguous().view(torch.float16).float()


def _f32(raw: Any) -> Any:
    import torch

    return raw.view(torch.float32)


def _q8_0(raw: Any) -> Any:
    """A scale in float16, then 32 signed bytes."""
    import torch

    blocks = raw.reshape(-1, 34)
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _halves(blocks[:, :2])


def _q4_1(raw: Any) -> Any:
    """Scale and minimum in float16, then 16 bytes: elements 0 to 15 in the lower halves, the others in the upper."""
    import torch

    blocks = raw.reshape(-1, 20)
    codes = torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), dim=1)
    return codes.float() * _halves(blocks[:, :2]) + _halves(blocks[:, 2:4])


# By GGML type: elements and bytes of a block, and how it is read.
_KINDS: dict[int, tuple[int, int, Callable[[Any], Any]]] = {
    0: (1, 4, _f32),
    1: (1, 2, _halves),
    3: (BLOCK_ELEMENTS, 20, _q4_1),
    8: (BLOCK_ELEMENTS, 34, _q8_0),
}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(source: Path, folder: Path) -> Path:
    """Writes the folder. ValueError names what this does not convert."""
    import torch
    from safetensors.torch import save_file

    file = GgufFile(source)
    architecture = file.metadata["general.architecture"]
    tokenizer = file.metadata["tokenizer.ggml.model"]
    if (architecture, tokenizer) != ("llama", "gpt2"):
        raise ValueError(f"{source} is a {architecture} with a {tokenizer} tokenizer; this converts llama with gpt2.")
    folder.mkdir(parents=True, exist_ok=True)
    heads = {
        "attn_q": file.metadata["llama.attention.head_count"],
        "attn_k": file.metadata["llama.attention.head_count_kv"],
    }
    weights = {}
    for name in file.tensors:
        weight = file.load(name)
        part = name.split(".")[-2]
        if part in heads:
            weight = _halves_apart(weight, heads[part])
        weights[_hugging_face_name(name)] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _save_configuration(file, folder)
    _save_tokenizer(file.metadata, folder)
    return folder


def _hugging_face_name(name: str) -> str:
    if not name.startswith("blk."):
        return f"{_NAMES[name.removesuffix('.weight')]}.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _halves_apart(weight: Any, heads: int) -> Any:
    """GGUF has the two rows that are rotated together side by side, transformers half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _save_configuration(file: GgufFile, folder: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    settings = file.metadata
    heads = settings["llama.attention.head_count"]
    special = {
        f"{name}_token_id": settings.get(f"tokenizer.ggml.{long}_token_id")
        for name, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=settings["llama.embedding_length"],
        intermediate_size=settings["llama.feed_forward_length"],
        num_hidden_layers=settings["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=settings["llama.attention.head_count_kv"],
        head_dim=settings["llama.embedding_length"] // heads,
        max_position_embeddings=settings["llama.context_length"],
        rms_norm_eps=settings["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": settings["llama.rope.freq_base"]},
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype="bfloat16",
        **special,
    ).save_pretrained(folder)
    GenerationConfig(do_sample=False, **special).save_pretrained(folder)


def _save_tokenizer(settings: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE that takes digits one by one, as the models whose `pre` is `smollm` were trained."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = settings["tokenizer.ggml.tokens"]
    kind = settings["tokenizer.ggml.pre"]
    if kind != "smollm":
        raise ValueError(f"The tokenizer splits text as {kind}; this knows smollm alone.")
    merges = [tuple(pair.split(" ")) for pair in settings["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = settings["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[settings["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[settings["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[settings["tokenizer.ggml.padding_token_id"]],
        chat_template=settings["tokenizer.chat_template"],
    ).save_pretrained(folder)
