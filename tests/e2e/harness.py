"""What the end-to-end tests share: one server and one engine, and questions to both."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lmcache
from lmcache.testing.processes import LOOPBACK, CacheServer, Completion, VllmEngine
from lmcache.testing.tiny_models import sample_tokens
from support.network import Network
from support.spoiled_memory import spoil_frames
from support.stand_stills import StandStills

GIVEN_UP = "The LMCache server does not answer"  # what the engine says then
CONNECTED = "Connected to the LMCache server"  # what each process of the engine says once it asks the server again
PACKAGE_PARENT = Path(lmcache.__file__).parents[1]  # of the package under test, installed or not
TESTS = Path(__file__).parents[1]
# An installed package is found as its vLLM is; in front, its folder would bring that vLLM to engines of other versions.
ENGINE_PATH = ":".join(str(folder) for folder in (PACKAGE_PARENT, TESTS) if not (folder / "vllm").exists())
PROBE = "e2e.worker_probe.KVProbe"
CHUNK_TOKENS = 256
_STAND_STILLS = 3  # that a check survives


def until(
    condition: Callable[[], Any], seconds: float = 90.0, *, every: float = 0.05, tell: Callable[[], Any] = str
) -> Any:
    """Polls until the condition holds and returns its value. `tell`: what to say of the state when it never does."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not so within {seconds} s {tell()}"
        time.sleep(every)
    return value


def call_workers(engine: VllmEngine, method: str) -> list[Any]:
    """What each worker answers: a method of vLLM's, or of the probe."""
    status, body = engine.ask(engine.port, "POST", "/collective_rpc", {"method": method}, 60.0)
    assert status == 200, body
    return list(body["results"])


def whole_chunks(tokens: int) -> int:
    return tokens // CHUNK_TOKENS * CHUNK_TOKENS


def leave_early(engine: VllmEngine, prompt: list[int], after_seconds: float) -> None:
    """Sends a request and hangs up."""
    body = json.dumps({"model": engine.model, "prompt": prompt, "max_tokens": 64, "temperature": 0.0, "stream": True})
    connection = http.client.HTTPConnection(LOOPBACK, engine.port, timeout=30)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    time.sleep(after_seconds)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def push_each_other_out(stack: Stack) -> tuple[list[list[int]], list[Completion]]:
    """Prompts of whose requests some were preempted, as they did not find room together, and their answers."""
    prompts = [sample_tokens(1100, seed=10 + index) for index in range(6)]
    before = stack.engine_metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: stack.engine.complete(prompt, max_tokens=300), prompts))
    assert [len(answer.token_ids) for answer in answers] == [300] * len(prompts)
    assert stack.engine_metric("vllm:num_preemptions_total") > before
    return prompts, answers


class Stack:
    """A server and an engine that both may be restarted; the server always at the same place."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        l2: bool = True,
        engine_flags: Sequence[str] = (),
        server_flags: Sequence[str] = (),
        l1_size_gb: float = 1.0,
        ranks: int = 1,
        workers: int | None = None,
        networked: bool = False,
        dtype: str = "float32",
        **engine: Any,
    ) -> None:
        """`ranks` of the engine that each store a part of a chunk; `workers`, where several hold the same. `networked`:
        engine and server have a `network` between them that the test can cut. `dtype`: a step's size decides how its
        sums are rounded, whatever loads the KV; in bfloat16 that turns tokens of which two are almost as likely."""
        self.model = model
        self.folder = folder
        self._l2_folder = folder / "l2" if l2 else None
        self._dtype = dtype
        self._engine_flags = list(engine_flags)
        self._server_flags = list(server_flags)
        self._l1_size_gb = l1_size_gb
        self.ranks = ranks
        self._workers = workers or ranks
        self._environment = engine.pop("environment", {})
        # Tests count on hits; what a busy machine measures must not turn one into a prefill.
        extra = {"lmcache.mp.load_or_recompute": False, **engine.pop("extra_config", {})}
        self._engine_options = {**engine, "extra_config": extra}
        self._starts = 0
        self._stand_stills = StandStills()
        self.server = self._new_server()
        self.network = Network(self.server.port) if networked else None
        try:
            self.server.wait_ready()
            self.engine = self._new_engine()
            self.engine.wait_ready()
        except BaseException:
            self.server.stop()
            raise

    def _new_server(self, previous: CacheServer | None = None) -> CacheServer:
        self._starts += 1
        place: dict[str, Any] = {}
        if previous is not None:
            place = {"port": previous.port, "http_port": previous.http_port, "shm_name": previous.shm_name}
        return CacheServer(
            self.folder,
            l1_size_gb=self._l1_size_gb,
            l2_folder=self._l2_folder,
            extra=self._server_flags,
            log_name=f"server-{self._starts}.log",
            **place,
        )

    def _new_engine(self) -> VllmEngine:
        return self.another_engine(self.model, self._engine_flags)

    def another_engine(self, model: Path, flags: Sequence[str] = ()) -> VllmEngine:
        """On the same server, with the probe."""
        self._starts += 1
        return VllmEngine(
            model,
            self.folder,
            cache_port=self.network.port if self.network is not None else self.server.port,
            extra=["--worker-extension-cls", PROBE, "--dtype", self._dtype, *flags],
            environment={
                "VLLM_SERVER_DEV_MODE": "1",
                "PYTHONPATH": ENGINE_PATH,
                **self._environment,
            },
            log_name=f"engine-{self._starts}.log",
            **self._engine_options,
        )

    # ---- the engine --------------------------------------------------------------------------------------------------
    def rpc(self, method: str, engine: VllmEngine | None = None) -> list[Any]:
        return call_workers(engine or self.engine, method)

    def unless_machine_stood_still(self, check: Callable[[], None]) -> None:
        """Runs a check of hits. An engine rightly gives up a server that nothing of the machine let answer: where both
        happened, the check is run again."""
        for _ in range(_STAND_STILLS):
            began, given_up = time.monotonic(), self.engine.log().count(GIVEN_UP)
            try:
                return check()
            except AssertionError:
                seconds = self._stand_stills.seconds_since(began)
                if not seconds or self.engine.log().count(GIVEN_UP) == given_up:
                    raise
                print(f"the machine stood still for {seconds:.1f} s, and the engine gave the server up: once more")
        return check()

    def forget_prefixes(self) -> None:
        """Empties the engine's own prefix cache."""

        def done() -> bool:
            status, _ = self.engine.ask(self.engine.port, "POST", "/reset_prefix_cache")
            return status == 200 and self.engine_metric("vllm:kv_cache_usage_perc") == 0

        until(done)

    def engine_metric(self, name: str, label: str = "") -> float:
        return self.engine.metric(name, label)

    def kill_engine(self) -> None:
        """SIGKILL to all its processes, and another one in its place."""
        self.engine.kill()
        self.engine = self._new_engine()

    def restart_engine(self) -> None:
        self.engine.stop()
        self.engine = self._new_engine()
        self.engine.wait_ready()
        self.wait_registered()

    # ---- the server --------------------------------------------------------------------------------------------------
    def restart_server(self) -> None:
        connected = self.engine.log().count(CONNECTED)
        self.server = self._new_server(self.server)
        self.server.wait_ready()
        self.wait_registered()
        # The server knows of the scheduler a moment before the scheduler does, and until then a request is a miss.
        until(lambda: self.engine.log().count(CONNECTED) - connected > self._workers, tell=self.engine.log)

    def replace_server(self, flags: Sequence[str] = (), **options: Any) -> None:
        """Another server, which is ready, takes the address of this one in the moment that this one is killed."""
        assert self.network is not None
        previous = self.server
        self._starts += 1
        self.server = CacheServer(
            self.folder, l2_folder=self._l2_folder, extra=flags, log_name=f"server-{self._starts}.log", **options
        )
        self.server.wait_ready()
        previous.kill()
        self.network.lead_to(self.server.port)
        (Path("/dev/shm") / previous.shm_name).unlink()

    def wait_registered(self) -> None:
        """Until the engine, both sides of it, has found the server by itself."""

        def registered() -> bool:
            self.engine.check_alive()
            instances = self.server.status()["instances"]
            return any(entry["model_name"] and len(entry["workers"]) == self._workers for entry in instances)

        until(registered, tell=self.server.status)

    def wait_stored(self, chunks: int, *, in_l2: bool = False) -> None:
        objects = chunks * self.ranks

        def stored() -> bool:
            self.engine.check_alive()
            status = self.server.status()
            if in_l2 and any(
                adapter["objects"] < objects or adapter["stores_in_flight"] for adapter in status["l2"]["adapters"]
            ):
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
        """`spoil_frames` of the server."""
        return spoil_frames(self.server.shm_name, frames)

    def close(self) -> None:
        self._stand_stills.close()
        self.engine.stop()
        if self.network is not None:
            self.network.close()
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
