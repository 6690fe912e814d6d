"""KV on an NVIDIA GPU: copies against one large pinned copy, and with real vLLM time to first token and decoding.

Without a GPU it prints why it cannot run, and that is all.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch

from lmcache import _native
from lmcache.cli.bench_timing import Region
from lmcache.device.cuda import Gpu, describe_gpu_group
from lmcache.testing.gpu import why_no_gpu
from lmcache.testing.processes import CacheServer, VllmEngine
from lmcache.testing.tiny_models import LlamaShape, describe_llama, sample_tokens
from measure import MIB, Result, at_least, at_most, command_line, median_seconds, report, spread

BLOCK_TOKENS, CHUNK_TOKENS = 16, 256


@dataclass(frozen=True)
class KVShape:
    """`content`: elements of a token and head, K and V beside each other. With 1 head: MLA, without that dimension."""

    name: str
    layers: int
    heads: int
    content: int
    dtype: torch.dtype = torch.bfloat16

    def tensors(self, blocks: int) -> torch.Tensor:
        """[layer, block, head, token, content], random bytes."""
        heads = (self.heads,) if self.heads > 1 else ()
        size = (self.layers, blocks, *heads, BLOCK_TOKENS, self.content)
        return torch.randint(
            0, 256, (*size[:-1], size[-1] * self.dtype.itemsize), dtype=torch.uint8, device="cuda"
        ).view(self.dtype)


KV_SHAPES = (
    KVShape("8B", 32, 8, 2 * 128),
    KVShape("70B", 80, 8, 2 * 128),
    KVShape("MLA", 61, 1, 576),
    KVShape("8B fp8", 32, 8, 2 * 128, torch.uint8),
)
SHAPE_8B = LlamaShape(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    max_position_embeddings=40960,
)
DECODED_TOKENS = 256


def copies(shape: KVShape, size_bytes: int, runs: int, threads: int) -> list[Result]:
    """About `size_bytes` in chunks between the tensors of an engine and pinned memory, sealed and verified, as a worker
    does it. What comes back is compared."""
    per_chunk = CHUNK_TOKENS // BLOCK_TOKENS
    chunk_bytes = shape.tensors(per_chunk).nbytes
    chunks = max(1, size_bytes // chunk_bytes)
    blocks = chunks * per_chunk
    kv = shape.tensors(blocks)
    group = describe_gpu_group(
        [(f"layer{layer}", kv[layer]) for layer in range(shape.layers)],
        engine="benchmark",
        block_tokens=BLOCK_TOKENS,
        num_blocks=blocks,
    )
    gpu = Gpu([group], 0)
    payload_bytes = group.layout(CHUNK_TOKENS).payload_bytes
    frame_bytes = _native.FRAME_HEADER_BYTES + -(-payload_bytes // 4096) * 4096
    arena = Region(chunks * frame_bytes)
    pinning = gpu.pin_buffer(arena.address, arena.size_bytes)
    pinning.wait(60.0)
    copier = _native.PagedCopier(arena.address, arena.size_bytes, threads, gpu.copy_methods)
    number = copier.add_group(group.segments, per_chunk, blocks)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
    packed, slots = array("q", order), array("Q", range(0, chunks * frame_bytes, frame_bytes))
    hashes, digest = bytes(32 * chunks), bytes(32)
    template = _native.frame_template(b"", digest, payload_bytes)

    def finish(job: int) -> None:
        result = copier.wait(job, 60.0)
        assert result == b"\1" * chunks, gpu.take_failure()

    host = torch.empty(chunks * payload_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")

    def one_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def gb_per_second(seconds: list[float]) -> float:
        return chunks * payload_bytes / statistics.median(seconds) / 1e9

    store = median_seconds(lambda: finish(copier.submit_store(number, slots, packed, hashes, template)), runs)
    original = kv.view(torch.uint8).clone()
    kv.zero_()
    torch.cuda.synchronize()
    load = median_seconds(lambda: finish(copier.submit_load(number, slots, packed, hashes, digest)), runs)
    is_same = torch.equal(kv.view(torch.uint8), original)
    to_host = gb_per_second(median_seconds(lambda: one_copy(host, device), runs))
    to_device = gb_per_second(median_seconds(lambda: one_copy(device, host), runs))
    copier.close()
    pinning.close()
    size = f"{chunks} chunks, {chunks * payload_bytes // MIB} MiB"
    results = [
        at_least(f"{shape.name}: KV that comes back as it was", float(is_same), "ratio", 1.0, size),
        Result(f"{shape.name}: one pinned copy to the host", to_host, "GB/s"),
        Result(f"{shape.name}: one pinned copy to the GPU", to_device, "GB/s"),
        Result(f"{shape.name}: store", gb_per_second(store), "GB/s", detail=f"by {gpu.copy_methods.best} copies"),
        Result(f"{shape.name}: load", gb_per_second(load), "GB/s"),
        at_least(
            f"{shape.name}: store / pinned copy", gb_per_second(store) / to_host, "ratio", 0.9, spread(store, 1000)
        ),
        at_least(
            f"{shape.name}: load / pinned copy", gb_per_second(load) / to_device, "ratio", 0.9, spread(load, 1000)
        ),
    ]
    for way, way_store, way_load in gpu.copy_methods.trials:
        results.append(Result(f"{shape.name}: {way} copies in the trial: store", way_store, "GB/s"))
        results.append(Result(f"{shape.name}: {way} copies in the trial: load", way_load, "GB/s"))
    return results


def first_token(engine: VllmEngine, tokens: int, runs: int) -> list[Result]:
    prompts = [sample_tokens(tokens, seed=seed) for seed in range(runs)]
    cold = [engine.complete(prompt, max_tokens=1).time_to_first_token_seconds for prompt in prompts]
    hits = [engine.complete(prompt, max_tokens=1) for prompt in prompts]
    hit = [answer.time_to_first_token_seconds for answer in hits]
    cached = min(answer.cached_tokens for answer in hits)
    return [
        Result(f"{tokens} tokens: cold", statistics.median(cold) * 1000, "ms", detail=spread(cold, 1000)),
        Result(f"{tokens} tokens: L1 hit", statistics.median(hit) * 1000, "ms", detail=spread(hit, 1000)),
        at_least(f"{tokens} tokens: fewest that came from the cache", cached, "tokens", tokens - 2 * CHUNK_TOKENS),
    ]


def decode_seconds(engine: VllmEngine, tokens: int, seed: int) -> float:
    """A token of one request, while another client sends prompts that are new, so that they are stored."""
    done = threading.Event()

    def others() -> None:
        nonlocal seed
        while not done.is_set():
            seed += 1
            engine.complete(sample_tokens(tokens, seed=seed), max_tokens=1)

    load = threading.Thread(target=others)
    load.start()
    try:
        answer = engine.complete(sample_tokens(64, seed=seed), max_tokens=DECODED_TOKENS)
    finally:
        done.set()
        load.join()
    return (answer.total_seconds - answer.time_to_first_token_seconds) / (DECODED_TOKENS - 1)


def engines(tokens: int, runs: int, l1_size_gb: float) -> list[Result]:
    extra = ("--load-format", "dummy", "--gpu-memory-utilization", "0.8")
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as name:
        folder = Path(name)
        model = describe_llama(folder / "model", SHAPE_8B)
        with CacheServer(folder, l1_size_gb=l1_size_gb) as server:
            server.wait_ready()
            with VllmEngine(model, folder, cache_port=server.port, extra=extra) as cached:
                cached.wait_ready(900.0)
                cached.complete(sample_tokens(tokens, seed=999), max_tokens=4)
                results = first_token(cached, tokens, runs)
                storing = [decode_seconds(cached, tokens, 10_000 * (run + 1)) for run in range(runs)]
        with VllmEngine(model, folder, cache_port=None, extra=extra, log_name="plain.log") as plain:
            plain.wait_ready(900.0)
            plain.complete(sample_tokens(tokens, seed=999), max_tokens=4)
            without = [decode_seconds(plain, tokens, 10_000 * (run + 1)) for run in range(runs)]
    ratio = statistics.median(storing) / statistics.median(without)
    return [
        *results,
        Result("a decoded token beside prompts, not stored", statistics.median(without) * 1000, "ms"),
        Result("a decoded token beside prompts that are stored", statistics.median(storing) * 1000, "ms"),
        at_most("the second / the first", ratio, "ratio", 1.01, spread(storing, 1000)),
    ]


def main() -> int:
    parser = command_line(__doc__, runs=7)
    parser.add_argument("--size-mib", type=int, default=1024, help="of KV that is copied, of each shape")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--l1-size-gb", type=float, default=16.0)
    parser.add_argument("--copies-only", action="store_true", help="leave the real engines out")
    arguments = parser.parse_args()
    missing = why_no_gpu()
    if missing:
        print(missing, file=sys.stderr)
        return report([], arguments.json)
    results = []
    for shape in KV_SHAPES:
        results += copies(shape, arguments.size_mib * MIB, arguments.runs, arguments.threads)
    if not arguments.copies_only:
        results += engines(arguments.tokens, arguments.runs, arguments.l1_size_gb)
    return report(results, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
