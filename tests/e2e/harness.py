"""What the end-to-end tests share: one server and one engine, and questions to both."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmcache
from lmcache import _native
from lmcache.testing.processes import CacheServer, VllmEngine, http_json

PACKAGE_PARENT = Path(lmcache.__file__).parents[1]  # of the package under test, installed or not
TESTS = Path(__file__).parents[1]
PROBE = "e2e.worker_probe.KVProbe"
CHUNK_TOKENS = 256


def until(
    condition: Callable[[], Any], seconds: float = 90.0, *, every: float = 0.05, tell: Callable[[], Any] = str
) -> Any:
    """Polls until the condition holds and returns its value. `tell`: what to say of the state when it never does."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not so within {seconds} s {tell()}"
        time.sleep(every)
    return value


def whole_chunks(tokens: int) -> int:
    return tokens // CHUNK_TOKENS * CHUNK_TOKENS


class Stack:
    """A server and an engine that both may be restarted; the server always at the same place."""

    def __init__(self, model: Path, folder: Path, *, l2: bool = True, engine_flags: Sequence[str] = (), **engine: Any):
        self.model = model
        self.folder = folder
        self._l2_folder = folder / "l2" if l2 else None
        self._engine_flags = list(engine_flags)
        self._environment = engine.pop("environment", {})
        # Tests count on hits; what a busy machine measures must not turn one into a prefill.
        extra = {"lmcache.mp.load_or_recompute": False, **engine.pop("extra_config", {})}
        self._engine_options = {**engine, "extra_config": extra}
        self._lives = 0
        self.server = self._new_server()
        try:
            self.server.wait_ready()
            self.engine = self._new_engine()
            self.engine.wait_ready()
        except BaseException:
            self.server.stop()
            raise

    def _new_server(self, former: CacheServer | None = None) -> CacheServer:
        self._lives += 1
        place: dict[str, Any] = {}
        if former is not None:
            place = {"port": former.port, "http_port": former.http_port, "shm_name": former.shm_name}
        return CacheServer(self.folder, l2_folder=self._l2_folder, log_name=f"server-{self._lives}.log", **place)

    def _new_engine(self) -> VllmEngine:
        self._lives += 1
        return VllmEngine(
            self.model,
            self.folder,
            cache_port=self.server.port,
            extra=["--worker-extension-cls", PROBE, *self._engine_flags],
            environment={
                "VLLM_SERVER_DEV_MODE": "1",
                "PYTHONPATH": f"{PACKAGE_PARENT}:{TESTS}",
                **self._environment,
            },
            log_name=f"engine-{self._lives}.log",
            **self._engine_options,
        )

    # ---- the engine --------------------------------------------------------------------------------------------------
    def rpc(self, method: str) -> list[Any]:
        status, body = http_json(self.engine.port, "POST", "/collective_rpc", {"method": method}, 60.0)
        assert status == 200, body
        return list(body["results"])

    def engine_metric(self, name: str) -> float:
        _, text = http_json(self.engine.port, "GET", "/metrics")
        lines = [line for line in str(text).splitlines() if line.startswith((name + " ", name + "{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def restart_engine(self) -> None:
        self.engine.stop()
        self.engine = self._new_engine()
        self.engine.wait_ready()
        self.wait_registered()

    # ---- the server --------------------------------------------------------------------------------------------------
    def restart_server(self) -> None:
        self.server = self._new_server(self.server)
        self.server.wait_ready()
        self.wait_registered()

    def wait_registered(self) -> None:
        """Until the engine, both sides of it, has found the server by itself."""

        def registered() -> bool:
            instances = self.server.status()["instances"]
            return any(instance["ranks"] == len(instance["workers"]) > 0 for instance in instances)

        until(registered, tell=self.server.status)

    def wait_stored(self, objects: int, *, in_l2: bool = False) -> None:
        def stored() -> bool:
            status = self.server.status()
            if in_l2 and any(one["objects"] < objects or one["stores_in_flight"] for one in status["l2"]["adapters"]):
                return False
            return bool(status["l1"]["objects"] >= objects and not status["reservations"])

        until(stored, tell=self.server.status)

    def wait_clean(self) -> None:
        """Nothing is held for anybody."""

        def clean() -> bool:
            status = self.server.status()
            held = [status["sessions"], status["leases"], status["reservations"]]
            held += [status["l1"][name] for name in ("leases", "leased_objects", "reservations", "staged")]
            return not any(held)

        until(clean, tell=self.server.status)

    def spoil_l1(self, frames: Sequence[int]) -> int:
        """Flips a payload byte of the frames at these positions, in order of address; how many frames there are."""
        magic = _native.frame_template(b"", bytes(32), 0)[:8]
        with (Path("/dev/shm") / self.server.shm_name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            starts = [at for at in range(4096, len(memory), 4096) if memory[at : at + 8] == magic]
            for index in frames:
                memory[starts[index] + 4096 + 999] ^= 1
        return len(starts)

    def close(self) -> None:
        self.engine.stop()
        shm = Path("/dev/shm") / self.server.shm_name
        if not self.server.alive():  # a test that failed half-way had killed it
            shm.unlink(missing_ok=True)
            return
        try:
            self.wait_clean()
        finally:
            self.server.stop()
        assert not shm.exists()
        assert not list(self.folder.rglob("*.tmp"))
