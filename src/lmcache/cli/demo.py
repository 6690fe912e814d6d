"""`lmcache demo`: a real server and a real vLLM on this machine, and what a hit is worth."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from lmcache.cli.arguments import Arguments
from lmcache.cli.output import write
from lmcache.errors import ResourceError


def run(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "demo",
        "Starts the server with L1 and a folder as L2, and a real vLLM on CPU with a small model made on the spot. "
        "Sends one long prompt cold, then answered from L1, from L2, after a restart of the engine and after kill -9 "
        "of the server, and prints what each took. Takes about two minutes; removes all that it made, also on Ctrl-C.",
    )
    arguments.add_whole("--tokens", 8192, "length of the prompt", unit="tokens", minimum=512, maximum=32_000)
    options = arguments.read(argv)
    missing = [name for name in ("vllm", "torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ResourceError(
            f"lmcache demo needs {' and '.join(missing)} in this Python environment: "
            "`make demo` in a checkout of the sources installs vLLM for CPU and runs the demo"
        )
    from lmcache.testing.demo import run_demo

    return run_demo(options.tokens, lambda text: write(text, options), as_json=options.format == "json")
