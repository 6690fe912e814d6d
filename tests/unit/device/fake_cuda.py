"""The driver without a device (native/tests/fake), built on first use: torch's host memory plays the GPU's."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

NATIVE = Path(__file__).resolve().parents[3] / "native"
ILLEGAL_ADDRESS = 700
OUT_OF_MEMORY = 2


class FakeCuda:
    def __init__(self, path: str) -> None:
        self.path = path
        self._mapped: list[torch.Tensor] = []
        self._library = ctypes.CDLL(path)
        for name in ("calls", "copies", "alive"):
            getattr(self._library, f"fake_cuda_{name}").restype = ctypes.c_long
        self._library.fake_cuda_misuse.restype = ctypes.c_char_p
        self._library.fake_cuda_stream.restype = ctypes.c_void_p
        self.stream = int(self._library.fake_cuda_stream())  # the engine's

    def map_device(self, tensor: torch.Tensor) -> None:
        """The tensor's whole storage is device memory from now on."""
        storage = tensor.untyped_storage()
        self._library.fake_cuda_map_device(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()))
        self._mapped.append(tensor)

    def fail(self, call: str, *, skip: int = 0, times: int = 1, code: int = OUT_OF_MEMORY) -> None:
        self._library.fake_cuda_fail(call.encode(), skip, times, code)

    def hold(self) -> None:
        """The engine computes, until `release`."""
        self._library.fake_cuda_hold(ctypes.c_void_p(self.stream))

    def release(self) -> None:
        self._library.fake_cuda_release()

    def lose_context(self) -> None:
        self._library.fake_cuda_lose_context()

    def delay(self, microseconds: int) -> None:
        self._library.fake_cuda_delay(microseconds)

    def calls(self, name: str) -> int:
        return int(self._library.fake_cuda_calls(name.encode()))

    def copies(self, *, to_device: bool, priority: int) -> int:
        return int(self._library.fake_cuda_copies(int(to_device), priority))

    @property
    def misuse(self) -> str:
        return str(self._library.fake_cuda_misuse().decode())

    @property
    def alive(self) -> int:
        return int(self._library.fake_cuda_alive())

    def reset(self) -> None:
        for tensor in self._mapped:
            self._library.fake_cuda_unmap_device(ctypes.c_void_p(tensor.untyped_storage().data_ptr()))
        self._mapped.clear()
        self._library.fake_cuda_reset()


@functools.cache
def the_fake_cuda() -> FakeCuda:
    """The one of this process. Tests take the fixture, which checks what was done with it."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "the package is built with a C++ compiler"
    path = f"{tempfile.mkdtemp(prefix='lmcache-fake-cuda-')}/libfake_cuda.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{NATIVE / 'include'}"]
    subprocess.run([compiler, *flags, str(NATIVE / "tests/fake/fake_cuda.cc"), "-o", path], check=True)
    return FakeCuda(path)


@pytest.fixture
def fake_cuda() -> Iterator[FakeCuda]:
    """Whatever a test does, nothing that a real driver may punish."""
    fake = the_fake_cuda()
    fake.reset()
    yield fake
    fake.release()
    misuse = fake.misuse
    fake.reset()
    assert misuse == "", misuse
