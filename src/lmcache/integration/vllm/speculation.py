"""Which ways of drafting tokens leave KV that can be cached exactly, and what a head's KV depends on.

A head (EAGLE, MTP) computes the KV of a position from the model's hidden state there and from the *next* token. So the
KV of a chunk depends on a token behind the chunk, or on several where a chain of heads reads further ahead. A chunk of
such an engine is therefore named by its tokens and by these: the tokens that are hashed begin so many later, and the
first ones enter the request's identity. A hit then ends where its name says everything about what is restored, and no
block of it has to be computed again. vLLM's own prefix cache names blocks by their own tokens alone, and gives up the
last block of every hit instead.

What a head writes for tokens that the model then rejects lies behind the last accepted token, and a chunk is stored
when the tokens that name it have been accepted.
"""

from __future__ import annotations

from typing import Any

from lmcache.errors import LayoutRefused

_NO_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
_OWN_MODEL = "draft_model"  # its KV of a position depends on the tokens up to there, as the model's does
_HEADS = ("eagle", "eagle3", "mtp")
_WITH_KV = (_OWN_MODEL, *_HEADS)
_REASONS = {
    "dflash": "drafts a block of tokens at once, with attention to later positions, which is not proved to be restored "
    "exactly",
    "dspark": "drafts a block of tokens at once, with attention to later positions, which is not proved to be restored "
    "exactly",
    "extract_hidden_states": "keeps hidden states of the model among its KV, which are for another connector",
}


def has_head(vllm_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in _HEADS


def draft_config(vllm_config: Any) -> Any | None:
    """The configuration of what drafts, where that keeps KV beside the model's; None otherwise."""
    speculative = vllm_config.speculative_config
    return speculative.draft_model_config if speculative is not None and speculative.method in _WITH_KV else None


def lookahead_tokens(vllm_config: Any) -> int:
    """How many tokens behind a position its KV depends on: 0 without a head.

    vLLM says so since it has chains of heads; before, no head reads further ahead than it drafts. Too many cost hits
    that end within them, too few would be wrong.
    """
    if not has_head(vllm_config):
        return 0
    drafted = vllm_config.speculative_config.num_speculative_tokens
    return max(1, int(getattr(vllm_config, "num_prefill_lookahead_tokens", drafted)))


def longest_drafted_tokens(vllm_config: Any) -> int | None:
    """The most tokens of a sequence that is drafted for, where what drafts keeps KV and a longer one makes a step leave
    it out."""
    draft = draft_config(vllm_config)
    if draft is None or getattr(vllm_config, "use_v2_model_runner", False):
        return None
    longest = getattr(draft, "max_model_len", None) or vllm_config.model_config.max_model_len
    return int(longest) - int(vllm_config.speculative_config.num_speculative_tokens)


def refuse_speculation(vllm_config: Any) -> None:
    """LayoutRefused where what drafts keeps KV that cannot be restored exactly, or that is never stored."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    method = speculative.method
    if method not in _NO_KV + _WITH_KV:
        reason = _REASONS.get(method, "is not known to this version, so neither is what its KV depends on")
        raise LayoutRefused(f"Speculation by {method!r} {reason}; use one of {', '.join(_NO_KV + _WITH_KV)}, or none.")
    if getattr(vllm_config, "use_v2_model_runner", False):
        return
    if getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1) > 1:
        raise LayoutRefused(
            "With speculation vLLM's first model runner tells only the last stage of a pipeline when a step ends, so "
            "that the others would store nothing; set pipeline_parallel_size to 1, or leave speculation out."
        )
    if has_head(vllm_config) and _heads_in_a_chain(vllm_config) > 1:
        raise LayoutRefused(
            "vLLM's first model runner does not write the KV of a chain of heads for every token; use its second one "
            "(VLLM_USE_V2_MODEL_RUNNER=1), or leave speculation out."
        )


def _heads_in_a_chain(vllm_config: Any) -> int:
    draft = vllm_config.speculative_config.draft_model_config
    return int(getattr(draft.hf_config, "num_nextn_predict_layers", None) or 1)
