"""vLLM's engine alone, for what its server has no path for: a request that gets an image while it runs.

Reads a JSON line a session from stdin, [name, image seed], and answers each with a line: [name, tokens].
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

from lmcache.testing.tiny_models import sample_text
from support.tiny_images import image_url

FIRST_TOKENS, FURTHER_TOKENS, SAMPLED = 300, 500, 4


def image(seed: int) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(image_url(seed).partition(",")[2])))


def text_of(tokens: int, model: str) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = sample_text(4 * tokens, seed=tokens)
    return next(text[:end] for end in range(tokens, len(text)) if len(tokenizer(text[:end]).input_ids) == tokens)


async def main(model: str, transfer: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            seed=0,
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=4,
            enable_prefix_caching=False,
            kv_transfer_config=KVTransferConfig(**transfer),
        )
    )
    texts = [text_of(tokens, model) for tokens in (FIRST_TOKENS, FURTHER_TOKENS)]
    sampling = SamplingParams(max_tokens=SAMPLED, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def session(name: str, seed: int) -> list[int]:
        async def inputs() -> AsyncGenerator[StreamingInput, None]:
            yield StreamingInput(prompt={"prompt": texts[0]})
            yield StreamingInput(prompt={"prompt": "<image>" + texts[1], "multi_modal_data": {"image": image(seed)}})

        tokens: list[int] = []
        async for output in engine.generate(inputs(), sampling, name):
            tokens += output.outputs[0].token_ids
        return tokens

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, seed = json.loads(line)
        print(json.dumps([name, await session(name, seed)]), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
