from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
HEAD_BLOCK = 128 * 64  # elements of K, and of V, of a head in a block


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_answers_agree_up_to_their_first_other_token() -> None:
    from agreement import results_of

    exact = [[1, 2, 3, 4], [5, 6, 7, 8]]
    plain = {"computed": exact, "computed again": exact, "plain": [[1, 2, 3, 4], [5, 6, 9, 8]]}
    outcomes = {
        "plain": {"answers": plain, "size_bytes": 1000, "errors": {"fp8": [0.25, 0.125]}},
        "fp8": {"answers": {"fp8": [[1, 2, 3, 4], [0, 6, 9, 8]]}, "size_bytes": 510},
    }
    figures = {result.name: result.value for result in results_of(outcomes)}
    assert figures == {
        "computed again beside computed: all 4 tokens equal": 100,
        "computed again beside computed: equal tokens at the beginning": 4,
        "computed again beside computed: first token equal": 100,
        "plain beside computed: all 4 tokens equal": 50,
        "plain beside computed: equal tokens at the beginning": 3,
        "plain beside computed: first token equal": 100,
        "fp8 beside plain: all 4 tokens equal": 50,
        "fp8 beside plain: equal tokens at the beginning": 2,
        "fp8 beside plain: first token equal": 50,
        "fp8: size": 51,
        "fp8: error of K": 0.25,
        "fp8: error of V": 0.125,
    }


def test_errors_of_k_and_of_v_are_apart() -> None:
    """V here is a power of two, which every type gives back exactly."""
    import torch

    from agreement import Errors

    keys = torch.randn(4, HEAD_BLOCK, generator=torch.Generator().manual_seed(1))
    values = torch.full((4, HEAD_BLOCK), 0.5)
    payload = torch.stack((keys, values), dim=1).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    errors = Errors()
    errors.add(payload)
    relative = errors.relative()
    assert {name: of_values for name, (_, of_values) in relative.items()} == dict.fromkeys(relative, 0.0)
    of_keys = {name: error for name, (error, _) in relative.items()}
    assert 0.02 < of_keys["fp8"] < 0.03 < of_keys["fp8-e5m2"] < 0.055 < of_keys["cachegen"] < 0.1
    assert of_keys["cachegen"] < of_keys["cachegen-16"] < 0.2
