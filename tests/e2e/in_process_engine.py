"""A vLLM engine inside this process, without a loop of its own: runs the calls that it is given, prints what they gave.

python in_process_engine.py MODEL CACHE_PORT '[["ask", [1, 2, 3]], ["rpc", "reload_weights", {}], ["reset", {}]]'
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main(model: str, cache_port: int, calls: list[list[Any]], options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.lora.request import LoRARequest

    transfer = KVTransferConfig(
        kv_connector=options.pop("kv_connector", "LMCacheMPConnector"),
        kv_role="kv_both",
        kv_connector_extra_config={"lmcache.mp.port": cache_port, "lmcache.mp.load_or_recompute": False},
    )
    llm = LLM(
        model,
        kv_transfer_config=transfer,
        enforce_eager=True,
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=4,
        enable_prefix_caching=True,
        **options,
    )
    results: list[Any] = []
    for kind, *arguments in calls:
        if kind == "ask":
            tokens, max_tokens, *lora = arguments
            adapter = LoRARequest(**lora[0]) if lora else None
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            (output,) = llm.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False, lora_request=adapter)
            results.append([list(output.outputs[0].token_ids), output.num_cached_tokens])
        elif kind == "rpc":
            method, parameters = arguments
            llm.collective_rpc(method, kwargs=parameters)
            results.append(None)
        elif kind == "copy":
            results.append(bool(shutil.copytree(*arguments, dirs_exist_ok=True)))
        elif kind == "reset":
            results.append(llm.reset_prefix_cache(**arguments[0]))
    print("\nRESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))
