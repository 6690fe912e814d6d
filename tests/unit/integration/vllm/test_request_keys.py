"""What of a request enters its key beside its tokens, and which requests have none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from unit.integration.vllm.fakes import request
from unit.integration.vllm.test_scheduler_side import Engine


def test_media_and_adapters_enter_the_question(tmp_path: Path) -> None:
    engine = Engine()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapter")
    image = SimpleNamespace(identifier="image-1", mm_position=SimpleNamespace(offset=200, length=100))
    lora = SimpleNamespace(lora_name="l", lora_path=str(tmp_path), lora_int_id=1)
    engine.side.on_new_request(request("a", 600, mm_features=[image], lora_request=lora))
    engine.side.on_new_request(request("b", 600, mm_features=[image]))
    moved = SimpleNamespace(identifier="image-1", mm_position=SimpleNamespace(offset=201, length=100))
    engine.side.on_new_request(request("c", 600, mm_features=[moved]))
    a, b, c = engine.client.messages("lookup")
    assert a.identity and not b.identity
    assert [chunk for chunk, _ in b.extras] == [0, 1]
    assert a.extras == b.extras
    assert dict(b.extras)[0] != dict(c.extras)[0]


def test_a_request_with_media_that_have_no_names_is_not_asked_for() -> None:
    engine = Engine(media_have_names=False)
    image = SimpleNamespace(identifier="renderer0-mm-1-image-0", mm_position=SimpleNamespace(offset=200, length=100))
    engine.side.on_new_request(asked := request("a", 600, mm_features=[image]))
    assert engine.side.matched_tokens(asked, 0) == (0, False)
    engine.side.on_new_request(request("b", 600))
    assert [message.request_id for message in engine.client.messages("lookup")] == ["b"]
