"""Real processes to test against: a cache server, a vLLM engine on CPU, and what a user would ask them.

Used by `lmcache demo`, the benchmarks and the end-to-end tests. Everything binds to 127.0.0.1 and is stopped, with all
its children, by `stop()`, by leaving the `with` block, and on Ctrl-C.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Started = TypeVar("Started", bound="ManagedProcess")

LOOPBACK = "127.0.0.1"
_LOG_END = 3000  # characters that an error shows
_LOOK_SECONDS = 0.2  # how soon the end of a process is noticed
_END_SECONDS = 1.0  # that a process may outlive its connections
_PORTS = range(12_000, 32_000)
_PORTS_A_PROCESS = 37  # between where processes of successive numbers start
_ports_given = itertools.count()


def free_port() -> int:
    """A TCP port that nobody uses right now, and that this process got only once.

    It is none of those that systems give to connections (from 32768 on), so that no connection takes it before its
    server begins; processes start at different ports."""
    first = os.getpid() * _PORTS_A_PROCESS
    for _ in _PORTS:
        port = _PORTS[(first + next(_ports_given)) % len(_PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise OSError(f"No TCP port from {_PORTS.start} to {_PORTS.stop - 1} is free on {LOOPBACK}.")


def http_json(port: int, method: str, path: str, body: Any = None, timeout_seconds: float = 10.0) -> tuple[int, Any]:
    """One request to a local server: (status, decoded JSON or text)."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=timeout_seconds)
    try:
        return _exchange(connection, method, path, body)
    finally:
        connection.close()


def _exchange(connection: http.client.HTTPConnection, method: str, path: str, body: Any) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} if body is not None else {}
    connection.request(method, path, json.dumps(body) if body is not None else None, headers)
    response = connection.getresponse()
    text = response.read().decode()
    try:
        return response.status, json.loads(text)
    except ValueError:
        return response.status, text


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def stop_running(pid: int) -> None:
    """SIGSTOP, and returns when no thread of the process runs any more: one that sleeps takes the signal later than
    another may answer a question. SIGCONT wakes it."""
    os.kill(pid, signal.SIGSTOP)
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that ends meanwhile
            while stat.read_text().rpartition(") ")[2][0] not in "TtZX":
                time.sleep(0.001)


class ProcessEnded(RuntimeError):
    """The process that was asked has ended: the sentence carries the end of its log."""


# A session of its own would have a share of its own of each CPU (autogroups of Linux), which loses against threads that
# spin on all of them. Python 3.10 has nothing else.
_OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}


class ManagedProcess:
    """A child in a process group of its own, with its output in a file."""

    name = "the process"

    def __init__(self, command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log_path = log_path
        with log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                list(command),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                **_OWN_GROUP,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def alive(self) -> bool:
        return self.popen.poll() is None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def pause(self) -> None:
        """Returns when nothing of the process runs any more. For a server, which has no children."""
        stop_running(self.popen.pid)

    def resume(self) -> None:
        self.signal_group(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the whole group: nothing gets to clean up."""
        self.signal_group(signal.SIGKILL)
        self.popen.wait(timeout=30)

    def stop(self, timeout_seconds: float = 30.0) -> int:
        """SIGTERM, then SIGKILL for whatever is left; returns the exit code. Idempotent."""
        if self.alive():
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout=timeout_seconds)
        self.signal_group(signal.SIGKILL)
        return self.popen.wait(timeout=30)

    def ended(self) -> str:
        """How it has ended, or a part of it without which it does not answer; "" while it goes on."""
        return "" if self.alive() else f"{self.name} ended with code {self.popen.returncode}"

    def check_alive(self) -> None:
        """ProcessEnded if it is not."""
        ended = self.ended()
        if ended:
            raise ProcessEnded(f"{ended}:\n{self.log()[-_LOG_END:]}")

    def ask(
        self, port: int, method: str, path: str, body: Any = None, timeout_seconds: float = 60.0
    ) -> tuple[int, Any]:
        """`http_json` at this process: ProcessEnded as soon as it has ended."""
        with self.connection(port, timeout_seconds) as connection:
            return _exchange(connection, method, path, body)

    def metric_at(self, port: int, name: str, label: str = "") -> float:
        """Sum of the samples of one metric whose labels contain `label`, 0.0 when it has none yet."""
        status, text = self.ask(port, "GET", "/metrics")
        if status != 200:
            raise RuntimeError(f"/metrics answered {status}")
        lines = [line for line in str(text).splitlines() if line.startswith((name + " ", name + "{")) and label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    @contextlib.contextmanager
    def connection(self, port: int, timeout_seconds: float) -> Iterator[http.client.HTTPConnection]:
        """To this process. A child that outlives it may keep its sockets open, so the end of the process is watched
        for: it ends what waits on the connection, and is raised as ProcessEnded."""
        self.check_alive()
        connection = http.client.HTTPConnection(LOOPBACK, port, timeout=timeout_seconds)
        finished = threading.Event()
        cut_off = threading.Event()

        def watch() -> None:
            while not finished.wait(_LOOK_SECONDS):
                if self.ended() and connection.sock is not None:
                    cut_off.set()
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)
                    return

        watcher = threading.Thread(target=watch, name="process-watcher", daemon=True)
        try:
            connection.connect()
            watcher.start()
            yield connection
        except (OSError, http.client.HTTPException):
            with contextlib.suppress(subprocess.TimeoutExpired):  # a connection that breaks may be the first sign of it
                self.popen.wait(_END_SECONDS)
            self.check_alive()
            raise
        finally:
            finished.set()
            if watcher.ident is not None:
                watcher.join()
            connection.close()
        if cut_off.is_set():
            self.check_alive()

    def wait_until_ready(self, port: int, path: str, timeout_seconds: float) -> float:
        """Polls an HTTP path until it answers 200; returns the seconds that it took."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_seconds:
            self.check_alive()
            with contextlib.suppress(OSError, http.client.HTTPException):
                if http_json(port, "GET", path, timeout_seconds=2.0)[0] == 200:
                    return time.monotonic() - started
            time.sleep(0.05)
        raise RuntimeError(f"{self.name} was not ready within {timeout_seconds:.0f} s:\n{self.log()[-_LOG_END:]}")

    def __enter__(self: Started) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class CacheServer(ManagedProcess):
    """`lmcache server` with an L1 of `l1_size_gb` and, when a folder is given, a fs_native L2 in it."""

    name = "the cache server"

    def __init__(
        self,
        work_folder: Path,
        *,
        l1_size_gb: float = 1.0,
        l2_folder: Path | None = None,
        host: str = LOOPBACK,
        port: int | None = None,
        http_port: int | None = None,
        shm_name: str | None = None,
        extra: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log_name: str = "server.log",
        program: Sequence[str] = ("-m", "lmcache.cli.main"),
        interpreter: str = sys.executable,
    ) -> None:
        """`program`: what Python runs as `lmcache`; `interpreter`: that of another environment."""
        self.port = port or free_port()
        self.http_port = http_port or free_port()
        self.shm_name = shm_name or f"lmcache-test-{os.getpid()}-{self.port}"
        command = [
            *(interpreter, *program, "server"),
            *("--host", host, "--port", str(self.port)),
            *("--http-host", LOOPBACK, "--http-port", str(self.http_port)),
            *("--prometheus-port", str(free_port())),
            *("--l1-size-gb", str(l1_size_gb), "--eviction-policy", "LRU", "--shm-name", self.shm_name),
        ]
        if l2_folder is not None:
            command += ["--l2-adapter", json.dumps({"type": "fs_native", "base_path": str(l2_folder)})]
        super().__init__([*command, *extra], work_folder / log_name, environment)

    def wait_ready(self, timeout_seconds: float = 120.0) -> float:
        return self.wait_until_ready(self.http_port, "/healthcheck", timeout_seconds)

    def clear(self, tier: str) -> None:
        status, body = self.ask(self.http_port, "POST", "/cache/clear", {"tier": tier})
        if status != 200:
            raise RuntimeError(f"clearing {tier} was answered with {status}: {body}")

    def status(self) -> dict[str, Any]:
        status, body = self.ask(self.http_port, "GET", "/status")
        if status != 200:
            raise RuntimeError(f"/status answered {status}: {body}")
        return dict(body)

    def metric(self, name: str, label: str = "") -> float:
        """`metric_at` the server's HTTP port."""
        return self.metric_at(self.http_port, name, label)


class CoordinatorProcess(ManagedProcess):
    """`lmcache coordinator` on loopback, unless `host` says otherwise, that notices soon who is gone."""

    name = "the coordinator"

    def __init__(
        self,
        work_folder: Path,
        *,
        host: str = LOOPBACK,
        port: int | None = None,
        extra: Sequence[str] = (),
        log_name: str = "coordinator.log",
    ) -> None:
        self.port = port or free_port()
        self.controller_port = free_port()
        command = [
            *(sys.executable, "-m", "lmcache.cli.main", "coordinator", "--host", host, "--port", str(self.port)),
            *("--controller-port", str(self.controller_port), "--health-check-interval", "0.5"),
        ]
        super().__init__([*command, *extra], work_folder / log_name)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def member_options(self) -> list[str]:
        """The options of a server that joins and reports soon."""
        return [
            *("--coordinator-url", self.url, "--coordinator-heartbeat-interval", "0.3"),
            *("--coordinator-event-flush-interval", "0.1"),
        ]

    def wait_ready(self, timeout_seconds: float = 120.0) -> float:
        return self.wait_until_ready(self.port, "/healthz", timeout_seconds)

    def answer(self, method: str, path: str, body: Any = None) -> Any:
        """RuntimeError for any but a success."""
        status, answer = self.ask(self.port, method, path, body)
        if status >= 300:
            raise RuntimeError(f"{method} {path} was answered with {status}: {answer}")
        return answer


@dataclass(frozen=True)
class Completion:
    """What a client saw of one greedy completion."""

    text: str
    token_ids: tuple[int, ...]
    time_to_first_token_seconds: float
    total_seconds: float
    prompt_tokens: int
    cached_tokens: int
    logprobs: tuple[float, ...] = ()  # of the chosen tokens, where `logprobs` was asked for


class VllmEngine(ManagedProcess):
    """`vllm serve` on CPU with the documented connector setting, or without a connector when `cache_port` is None."""

    name = "vLLM"

    def __init__(
        self,
        model_folder: Path,
        work_folder: Path,
        *,
        cache_port: int | None,
        kv_space_gib: float = 1.0,
        prefix_caching: bool = False,
        extra_config: Mapping[str, Any] | None = None,
        connector: Mapping[str, str] | None = None,
        role: str = "kv_both",
        extra: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log_name: str = "engine.log",
        interpreter: str = sys.executable,
    ) -> None:
        """`connector`: what names another connector class to vLLM; `interpreter`: that of another environment."""
        self._parts: dict[int, str] = {}  # the engine core and the workers, once it is ready
        self.port = free_port()
        self.model = str(model_folder)
        command = [
            *(interpreter, "-m", "vllm.entrypoints.cli.main", "serve", self.model),
            *("--host", LOOPBACK, "--port", str(self.port), "--dtype", "bfloat16", "--seed", "0"),
            *("--max-model-len", "34000", "--max-num-batched-tokens", "2048", "--max-num-seqs", "8"),
            *("--enforce-eager", "--enable-prompt-tokens-details"),
            "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching",
        ]
        if cache_port is not None:
            transfer = {
                **(connector or {"kv_connector": "LMCacheMPConnector"}),
                "kv_role": role,
                "kv_connector_extra_config": {
                    "lmcache.mp.host": f"tcp://{LOOPBACK}",
                    "lmcache.mp.port": cache_port,
                    **(extra_config or {}),
                },
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        settings = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": f"{kv_space_gib:g}",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{max(0, min(2, os.cpu_count() or 1) - 1)}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            **(environment or {}),
        }
        super().__init__([*command, *extra], work_folder / log_name, settings)

    def wait_ready(self, timeout_seconds: float = 600.0) -> float:
        seconds = self.wait_until_ready(self.port, "/health", timeout_seconds)
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # one that ends meanwhile
                program = (folder / "comm").read_text().strip()
                if program.startswith("VLLM::") and os.getpgid(int(folder.name)) == self.pid:
                    self._parts[int(folder.name)] = program
        return seconds

    def ended(self) -> str:
        lost = [f"{program} ({pid})" for pid, program in self._parts.items() if not _runs(pid)]
        return super().ended() or (f"{self.name} has lost {', '.join(lost)}" if lost else "")

    def metric(self, name: str, label: str = "") -> float:
        """`metric_at` the engine's port."""
        return self.metric_at(self.port, name, label)

    def complete(
        self,
        prompt: Sequence[int] | str,
        *,
        max_tokens: int = 16,
        timeout_seconds: float = 300.0,
        replica: int | None = None,
        **parameters: Any,
    ) -> Completion:
        """A greedy streamed completion. `prompt` is text or token ids; `parameters` go into the request body.

        `replica`: which of several data-parallel ones is to answer.
        """
        body = {
            "model": self.model,
            "prompt": list(prompt) if not isinstance(prompt, str) else prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **parameters,
        }
        payload = json.dumps(body)
        started = time.perf_counter()
        first: float | None = None
        texts: list[str] = []
        token_ids: list[int] = []
        logprobs: list[float] = []
        usage: dict[str, Any] = {}
        with self.connection(self.port, timeout_seconds) as connection:
            headers = {"Content-Type": "application/json"}
            if replica is not None:
                headers["X-data-parallel-rank"] = str(replica)
            connection.request("POST", "/v1/completions", payload, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"vLLM answered {response.status}: {response.read().decode()[:500]}")
            for event in _server_sent_events(response):
                for choice in event.get("choices", ()):
                    if first is None:
                        first = time.perf_counter()
                    texts.append(choice.get("text", ""))
                    token_ids += choice.get("token_ids") or ()
                    logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()
                if event.get("error"):
                    raise RuntimeError(f"vLLM ended the stream with {event['error']}")
                usage = event.get("usage") or usage
        ended = time.perf_counter()
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            text="".join(texts),
            token_ids=tuple(token_ids),
            time_to_first_token_seconds=(first or ended) - started,
            total_seconds=ended - started,
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            cached_tokens=int(details.get("cached_tokens") or 0),
            logprobs=tuple(logprobs),
        )


def _server_sent_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """HTTPException when the stream ends before its end was said."""
    for raw in response:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line[len("data: ") :])
    raise http.client.HTTPException("the stream of an answer ended early")
