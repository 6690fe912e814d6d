"""Which KV cache groups of a vLLM configuration can be cached exactly, and the sentence for those that cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmcache.errors import LayoutRefused
from lmcache.integration.vllm.speculation import refuse_speculation
from lmcache.integration.vllm.versions import is_transferable
from lmcache.integration.vllm.weights import refuse_unknown_weights

# Specs whose blocks hold nothing but the KV of their own tokens, written once, and what says how far back later tokens
# look. Compared by exact class name: a subclass that this version does not know may keep something else in its blocks.
_ATTENTION_SPECS = {
    "FullAttentionSpec": None,
    "MLAAttentionSpec": None,
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "attention_chunk_size",
}
_STATE_SPEC = "MambaSpec"  # the block that ends at a boundary holds the state there, and nothing of its own tokens
_OPAQUE_QUANTIZATION = (0, 1)  # none, and fp8 with the scales of the weights: a block is nothing but its tokens


@dataclass(frozen=True)
class CacheGroup:
    """One KV cache group. Its position in the tuple that `cacheable_groups` returns is the object group on the wire."""

    block_tokens: int
    layer_names: tuple[str, ...]
    # How many tokens before the end of a hit need their blocks, 0 for all. Where it is not 0 the engine drops blocks
    # that later tokens no longer need: such a block id is the null block.
    tail_tokens: int = 0
    # Of a recurrent state: its tensors. Of a chunk only the last block counts: it holds the state at the chunk's end.
    state: str = ""

    @property
    def is_state(self) -> bool:
        return bool(self.state)

    def blocks_in(self, chunk_tokens: int) -> int:
        """How many blocks hold what is stored of a chunk."""
        return 1 if self.is_state else chunk_tokens // self.block_tokens


def cacheable_groups(vllm_config: Any, kv_cache_config: Any, *, follows_sleep: bool = False) -> tuple[CacheGroup, ...]:
    """Every group of the engine, in its order. LayoutRefused when the engine has to run uncached. `follows_sleep`: the
    engine says when it takes KV memory away."""
    refuse_settings(vllm_config, follows_sleep=follows_sleep)
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        specs = list(getattr(group.kv_cache_spec, "kv_cache_specs", {}).values()) or [group.kv_cache_spec]
        for spec in specs:
            kind = type(spec).__name__
            if kind == _STATE_SPEC:
                _refuse_state(spec)
            elif kind not in _ATTENTION_SPECS:
                raise LayoutRefused(
                    f"This model keeps {kind} state beside or instead of plain attention KV, which this version cannot "
                    "restore exactly."
                )
            else:
                _refuse_format(spec)
        if len({type(spec).__name__ == _STATE_SPEC for spec in specs}) > 1:
            raise LayoutRefused("This model has a KV cache group of recurrent states together with attention.")
        if not is_transferable(group):
            raise LayoutRefused("This model has a KV cache group that the engine keeps for itself.")
        groups.append(
            CacheGroup(
                block_tokens=group.kv_cache_spec.block_size,
                layer_names=tuple(group.layer_names),
                tail_tokens=_tail_tokens(specs),
                state=" ".join(sorted({_state_tensors(spec) for spec in specs if type(spec).__name__ == _STATE_SPEC})),
            )
        )
    if not groups:
        raise LayoutRefused("This model has no KV cache.")
    return tuple(groups)


def _tail_tokens(specs: list[Any]) -> int:
    """0 as soon as one layer needs every block."""
    tails = []
    for spec in specs:
        if type(spec).__name__ == _STATE_SPEC:
            tails.append(1)
            continue
        window = _ATTENTION_SPECS[type(spec).__name__]
        if window is None:
            return 0
        tails.append(max(1, getattr(spec, window) - 1))
    return max(tails)


def _state_tensors(spec: Any) -> str:
    """The engine shows a state as opaque bytes; this says what they are."""
    pairs = zip(spec.dtypes, spec.shapes, strict=True)
    return ",".join([str(spec.mamba_type), *(f"{dtype}{tuple(shape)}" for dtype, shape in pairs)])


def _refuse_state(spec: Any) -> None:
    """Only states that the engine keeps at block boundaries, each in a block of its own, can be restored."""
    if spec.mamba_cache_mode != "align":
        raise LayoutRefused(
            f"This model keeps a recurrent state, which the engine holds at block boundaries only with its own prefix "
            f"cache: start vLLM with --enable-prefix-caching (mamba_cache_mode is {spec.mamba_cache_mode!r}, "
            "not 'align')."
        )
    if spec.num_speculative_blocks or getattr(spec, "num_prefill_checkpoint_blocks", 0):
        raise LayoutRefused(
            "This model keeps a recurrent state and the engine speculates or takes checkpoints of it inside blocks, "
            "which this version cannot prove to restore; start vLLM without speculation."
        )


def _refuse_format(spec: Any) -> None:
    """What a spec of a known class may say that makes its blocks more, or less, than the KV of their tokens."""
    if getattr(spec, "non_causal", False):
        raise LayoutRefused("This model attends to later tokens, so the KV of a prefix depends on what follows it.")
    if getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "model_version", None) is not None:
        raise LayoutRefused("This model keeps compressed KV, which this version cannot restore exactly.")
    if getattr(spec, "prefix_replay_tokens", 0):
        raise LayoutRefused("This model rebuilds a part of its KV after a prefix hit, which this version cannot do.")
    mode = getattr(spec, "kv_quant_mode", 0)
    if mode not in _OPAQUE_QUANTIZATION:
        raise LayoutRefused(
            f"The KV cache format {getattr(mode, 'name', mode)} keeps scales beside the values, which this version "
            "cannot prove to restore; use --kv-cache-dtype auto or fp8."
        )


def refuse_settings(vllm_config: Any, *, follows_sleep: bool = False) -> None:
    """LayoutRefused where a setting makes KV depend on more than its tokens."""
    parallel = vllm_config.parallel_config
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, setting, 1) > 1:
            raise LayoutRefused(
                f"{setting} above 1 splits the KV of a block between workers, which is not supported; set it to 1."
            )
    if str(getattr(parallel, "distributed_executor_backend", "")) == "external_launcher" and parallel.world_size > 1:
        raise LayoutRefused(
            "The executor external_launcher has a scheduler for each worker; use the executor mp or ray."
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise LayoutRefused(
            "calculate_kv_scales makes KV bytes depend on the first prompt that the engine served; leave it out."
        )
    if getattr(vllm_config.model_config, "enable_sleep_mode", False) and not follows_sleep:
        raise LayoutRefused(
            "Sleep mode takes KV memory away from under copies, which is not supported; start vLLM without "
            "--enable-sleep-mode."
        )
    refuse_speculation(vllm_config)
    refuse_unknown_weights(vllm_config)
