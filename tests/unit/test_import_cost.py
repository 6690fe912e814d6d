"""Scripts and engines import the package beside others: that alone costs little and brings no engine."""

from __future__ import annotations

import subprocess
import sys

LIMIT_SECONDS = 0.05
PROGRAM = """
import sys, time
began = time.process_time()
import lmcache
print(time.process_time() - began, *sys.modules)
"""


def test_the_package_alone_is_imported_at_once_and_without_an_engine() -> None:
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        took, *modules = done.stdout.split()
        assert not {"vllm", "torch", "transformers", "numpy", "starlette"} & set(modules)
        seconds.append(float(took))
    assert min(seconds) < LIMIT_SECONDS
