"""Ways of drafting tokens: which are cached, what their KV depends on, and what keeps two of them apart."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from lmcache.errors import LayoutRefused
from lmcache.integration.vllm.speculation import lookahead_tokens, refuse_speculation
from lmcache.integration.vllm.weights import weights_identity

DROPPED = {"medusa", "mlp_speculator"}  # by vLLM 0.33
WITHOUT_KV = {"ngram", "ngram_gpu", "suffix", *DROPPED}
HEADS = {"eagle", "eagle3", "mtp"}
REFUSED = {
    "dflash": "with attention to later positions",
    "dspark": "with attention to later positions",
    "extract_hidden_states": "hidden states of the model",
    "custom_class": "not known to this version",
}


def config(method: str | None, *, drafted: int = 3, heads: int = 1, stages: int = 1, **fields: Any) -> Any:
    draft = SimpleNamespace(
        model="/draft",
        revision=None,
        dtype="bfloat16",
        quantization=None,
        hf_config=SimpleNamespace(num_nextn_predict_layers=heads, to_dict=lambda: {"hidden_size": 64}),
    )
    speculative = SimpleNamespace(
        method=method, model="/draft", num_speculative_tokens=drafted, draft_model_config=draft
    )
    values: dict[str, Any] = {
        "speculative_config": speculative if method is not None else None,
        "parallel_config": SimpleNamespace(pipeline_parallel_size=stages),
        "model_config": SimpleNamespace(model="/model", revision=None, quantization=None, hf_config=SimpleNamespace()),
        "load_config": SimpleNamespace(load_format="auto", model_loader_extra_config={}),
    }
    return SimpleNamespace(**{**values, **fields})


@pytest.mark.engine
def test_every_method_that_vllm_names_is_either_known_or_refused_with_its_name() -> None:
    speculative = pytest.importorskip("vllm.config.speculative")

    def names(kind: Any) -> set[str]:
        return {name for part in get_args(kind) for name in (names(part) if get_args(part) else {part})}

    # vLLM replaces the names of single models' MTP heads by "mtp".
    methods = names(speculative.SpeculativeMethod) - (names(speculative.MTPModelTypes) - {"mtp"})
    assert methods | DROPPED == WITHOUT_KV | HEADS | {"draft_model"} | REFUSED.keys()


@pytest.mark.parametrize("method", sorted(WITHOUT_KV | HEADS | {"draft_model"}))
def test_these_are_cached(method: str) -> None:
    refuse_speculation(config(method))
    assert lookahead_tokens(config(method)) == (3 if method in HEADS else 0)  # this vLLM does not say how many


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_these_are_refused_with_a_reason(method: str) -> None:
    with pytest.raises(LayoutRefused, match=f"Speculation by '{method}' .*{REFUSED[method]}.*; use one of ngram"):
        refuse_speculation(config(method))


@pytest.mark.parametrize("said", [1, 2])
def test_vllm_says_how_many_tokens_ahead_a_head_reads(said: int) -> None:
    assert lookahead_tokens(config("mtp", num_prefill_lookahead_tokens=said)) == said
    assert lookahead_tokens(config("ngram", num_prefill_lookahead_tokens=said)) == 0
    assert lookahead_tokens(config(None)) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"method": "ngram", "stages": 2}, "last stage of a pipeline"), ({"method": "mtp", "heads": 3}, "chain of heads")],
)
def test_what_the_first_model_runner_leaves_out_is_refused_there(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutRefused, match=words):
        refuse_speculation(config(**changes))
    refuse_speculation(config(**changes, use_v2_model_runner=True))


def test_another_head_is_another_engine(tmp_path: Path) -> None:
    def identity(method: str | None, content: bytes = b"head", **fields: Any) -> str:
        engine = config(method, **fields)
        if method is not None:
            (tmp_path / "model.safetensors").write_bytes(content)
            engine.speculative_config.draft_model_config.model = str(tmp_path)
        return json.dumps(weights_identity(engine))

    def deeper() -> dict[str, int]:
        return {"hidden_size": 64, "num_hidden_layers": 2}

    other = config("eagle")
    other.speculative_config.draft_model_config.model = str(tmp_path)
    names = [identity(None), identity("eagle"), identity("eagle", b"daeh"), identity("mtp"), identity("draft_model")]
    names.append(identity("eagle", num_prefill_lookahead_tokens=1))
    other.speculative_config.draft_model_config.hf_config.to_dict = deeper
    names.append(json.dumps(weights_identity(other)))
    assert len(set(names)) == len(names)
    assert identity("eagle") == names[1]
    assert identity("medusa") == names[0]  # keeps no KV, so the model's is as without it
