"""Installs SGLang into the environment that runs this script, one of its own: it asks for other versions than vLLM.

The wheel asks for CUDA libraries and kernels that a machine without a GPU neither needs nor can use. So it goes in
without its dependencies, followed by the plain packages that its modules import; tests/hicache/shim stands in for
the rest.
"""

from __future__ import annotations

import subprocess
import sys

SGLANG = "sglang==0.5.23"
TORCH = "torch==2.13.0"
PLAIN = (
    *("aiohttp", "anthropic>=0.20.0", "cloudpickle", "dill", "distro", "einops", "fastapi", "gguf", "interegular"),
    *("IPython", "jsonschema", "llguidance>=1.7.6,<2", "msgspec", "ninja", "numba==0.65.1", "openai==2.8.0"),
    *("openai-harmony==0.0.4", "orjson", "packaging", "partial_json_parser", "pillow", "prometheus-client>=0.20.0"),
    *("psutil", "py-spy", "pybase64", "pydantic", "python-dateutil<3", "python-multipart", "pyzmq>=25.1.2", "regex"),
    *("nvidia-ml-py", "requests", "scipy", "sentencepiece==0.2.1", "setproctitle", "soundfile==0.13.1", "tiktoken"),
    *("tqdm", "transformers==5.19.0", "uvicorn>=0.51", "uvloop", "watchfiles", "xgrammar==0.2.7", "xxhash"),
    *("zstandard", "accelerate", "loguru"),
)
WITHOUT_DEPENDENCIES = (SGLANG, "compressed-tensors==0.18.0", "datasets")


def pip_install(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def install() -> None:
    print(f"installing {TORCH}", flush=True)
    pip_install(TORCH)
    print(f"installing {SGLANG} and {len(PLAIN)} packages that it imports", flush=True)
    pip_install("--no-deps", *WITHOUT_DEPENDENCIES)
    pip_install(*PLAIN)


if __name__ == "__main__":
    install()
