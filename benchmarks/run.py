"""Runs every benchmark, one after the other, and prints their results; ends with 1 when a target was missed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ORDER = (
    "kernels.py",
    "index.py",
    "ledger.py",
    "directory.py",
    "fleet.py",
    "rpc.py",
    "copies.py",
    "pages.py",
    "socket_mode.py",
    "files.py",
    "folders.py",
    "dax.py",
    "serde.py",
    "tiers.py",
    "remote.py",
    "peers.py",
    "startup.py",
    "observability.py",
    "warm_restart.py",
    "many_objects.py",
    "end_to_end.py",
    "overhead.py",
    "sharing.py",
    "end_to_end_disk.py",
    "first_request_after_kill.py",
    "autostart.py",
    "end_to_end_remote.py",
    "handover.py",
    "agreement.py",
    "gpu.py",
)


def main() -> int:
    failed = []
    for name in ORDER:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, str(HERE / name), *sys.argv[1:]], check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"\ntargets missed in: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
