"""What a user's script does: an engine in Python, the same prompt cold and then from the cache.

python offline_script.py MODEL '{"kv_connector": ...}' PROMPT_TOKENS ANSWERS ANSWER_TOKENS
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main(model: str, transfer: dict[str, Any], tokens: int, answers: int, answer_tokens: int) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    began = time.perf_counter()
    llm = LLM(
        model,
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **transfer) if transfer else None,
        enforce_eager=True,
        dtype="float32",
        max_model_len=tokens + 256,
        max_num_seqs=2,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
    )
    results: dict[str, Any] = {"start_seconds": time.perf_counter() - began, "answers": []}
    prompt = {"prompt_token_ids": [7 + at * 31 % 900 for at in range(tokens)]}
    sampling = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True)
    for _ in range(answers):
        began = time.perf_counter()
        (output,) = llm.generate(prompt, sampling, use_tqdm=False)
        answer = [list(output.outputs[0].token_ids), output.num_cached_tokens, time.perf_counter() - began]
        results["answers"].append(answer)
    print("\nRESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:]))
