"""Engines on servers of their own that share a service: what one has computed the other loads, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Stack, until, whole_chunks
from lmcache.testing.processes import LOOPBACK, Completion, ManagedProcess
from lmcache.testing.tiny_models import sample_tokens
from services import mooncake, nixl
from services.mooncake import Master, Peer
from services.redis import Valkey
from services.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS
from support.network import Network, network_to

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT_TOKENS = 2200
CHUNKS = PROMPT_TOKENS // 256
ANSWER_TOKENS = 24
MOONCAKE_BYTES = 256 << 20
DELAY_SECONDS = 0.1  # of 256 KiB, so that loads are under way when the service is killed

TIMEOUT_SECONDS = 60  # of the adapters: what a busy machine delays must not become a miss

# The service and what leads to it, where there is one that can be killed and slowed down from here, and the adapter.
Shared = tuple[ManagedProcess | None, Network | None, dict[str, Any]]


@contextmanager
def valkey(folder: Path) -> Iterator[Shared]:
    with Valkey(folder) as service:
        service.wait_ready()
        with network_to(service.port) as network:
            yield service, network, {"type": "resp", "host": LOOPBACK, "port": network.port}


@contextmanager
def s3(folder: Path) -> Iterator[Shared]:
    with SeaweedFS(folder) as service:
        service.wait_ready()
        service.make_bucket("cache")
        with network_to(service.port) as network:
            adapter = {
                "type": "s3",
                "s3_endpoint": f"{LOOPBACK}:{network.port}/cache",
                "s3_region": REGION,
                "disable_tls": True,
                "aws_access_key_id": ACCESS_KEY,
                "aws_secret_access_key": SECRET_KEY,
            }
            yield service, network, adapter


@contextmanager
def mooncake_store(folder: Path) -> Iterator[Shared]:
    """In the memory of a third process."""
    with Master(folder) as master:
        master.wait_ready()
        with Peer(folder, master, MOONCAKE_BYTES) as peer:
            peer.wait_ready()
            yield None, None, {"type": "mooncake_store", **mooncake.setup_keys(master, 0)}


@contextmanager
def nixl_files(folder: Path) -> Iterator[Shared]:
    """One folder of both servers."""
    nixl.need()
    params = {"file_path": str(folder / "shared"), "use_direct_io": "false"}
    yield None, None, {"type": "nixl_store_dynamic", "backend": "POSIX", "backend_params": params}


class Machines:
    """Two machines, each with a server and an engine, and the service behind both."""

    def __init__(self, service: ManagedProcess | None, network: Network | None, first: Stack, second: Stack) -> None:
        self.service = service
        self.network = network
        self.both = (first, second)

    def watch(self) -> None:
        for stack in self.both:
            stack.rpc("kv_watch")

    def clear(self) -> None:
        """Everywhere, in the service too."""
        for stack in self.both:
            stack.server.clear("all")

    def seen(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Digests of KV in the first engine and in the second."""
        [first], [second] = (stack.rpc("kv_seen") for stack in self.both)
        return first, second


def ask(stack: Stack, prompt: list[int], **options: Any) -> Completion:
    return stack.engine.complete(prompt, max_tokens=ANSWER_TOKENS, **options)


@pytest.fixture(scope="module", params=[valkey, s3, mooncake_store, nixl_files], ids=["resp", "s3", "mooncake", "nixl"])
def machines(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machines]:
    serve: Callable[[Path], AbstractContextManager[Shared]] = request.param
    with serve(tmp_path_factory.mktemp("service")) as (service, network, adapter):
        adapter["timeout_seconds"] = TIMEOUT_SECONDS
        stacks: list[Stack] = []
        try:
            for name in ("a", "b"):
                folder = tmp_path_factory.mktemp(name)
                flags = ["--l2-adapter", json.dumps(adapter)]
                stacks.append(Stack(llama, folder, l2=False, server_flags=flags))
            yield Machines(service, network, *stacks)
        finally:
            for stack in stacks:
                stack.close()


def test_what_one_engine_computed_the_other_loads(machines: Machines) -> None:
    prompt = sample_tokens(PROMPT_TOKENS, seed=1)
    first, second = machines.both
    machines.clear()
    machines.watch()
    cold = ask(first, prompt)
    assert cold.cached_tokens == 0
    first.wait_stored(CHUNKS, in_l2=True)
    warm = ask(second, prompt)
    assert (warm.token_ids, warm.cached_tokens) == (cold.token_ids, whole_chunks(PROMPT_TOKENS))
    computed, loaded = machines.seen()
    assert len(loaded["loaded"]) == CHUNKS
    assert loaded["loaded"] == computed["stored"]
    for stack in machines.both:
        assert stack.server.metric("lmcache_mp_corrupt_frames_total") == 0
        stack.wait_clean()


def test_salts_are_apart_on_every_machine(machines: Machines) -> None:
    prompt = sample_tokens(PROMPT_TOKENS, seed=2)
    first, second = machines.both
    machines.clear()
    cold = ask(first, prompt, cache_salt="alice")
    assert cold.cached_tokens == 0
    first.wait_stored(CHUNKS, in_l2=True)
    for salt in ({}, {"cache_salt": "bob"}):
        other = ask(second, prompt, **salt)
        assert (other.token_ids, other.cached_tokens) == (cold.token_ids, 0)
    same = ask(second, prompt, cache_salt="alice")
    assert (same.token_ids, same.cached_tokens) == (cold.token_ids, whole_chunks(PROMPT_TOKENS))


def test_both_at_once_on_one_prompt(machines: Machines) -> None:
    prompt = sample_tokens(PROMPT_TOKENS, seed=3)
    machines.clear()
    machines.watch()
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda stack: ask(stack, prompt), machines.both))
    assert answers[0].token_ids == answers[1].token_ids
    computed, also_computed = machines.seen()
    assert computed["stored"] == also_computed["stored"] and len(computed["stored"]) == CHUNKS
    for stack in machines.both:
        stack.wait_stored(CHUNKS, in_l2=True)
    for stack in machines.both:
        stack.server.clear("l1")
    with ThreadPoolExecutor(2) as pool:
        hits = list(pool.map(lambda stack: ask(stack, prompt), machines.both))
    assert [(hit.token_ids, hit.cached_tokens) for hit in hits] == [
        (answers[0].token_ids, whole_chunks(PROMPT_TOKENS))
    ] * 2
    for seen in machines.seen():
        assert seen["loaded"] == computed["stored"]
    for stack in machines.both:
        stack.wait_clean()


@pytest.mark.parametrize("machines", [valkey, s3], ids=["resp", "s3"], indirect=True)
def test_a_service_that_is_killed_costs_misses(machines: Machines) -> None:
    """The last test of a service: nothing comes after it."""
    prompts = [sample_tokens(PROMPT_TOKENS, seed=10 + number) for number in range(4)]
    first = machines.both[0]
    assert machines.network is not None and machines.service is not None
    machines.clear()
    cold = [ask(first, prompt) for prompt in prompts]
    first.wait_stored(CHUNKS * len(prompts), in_l2=True)
    first.server.clear("l1")
    machines.network.slow_down(DELAY_SECONDS)
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        asked = [pool.submit(ask, stack, prompt) for prompt in prompts for stack in machines.both]
        until(lambda: any(stack.server.status()["l2"]["adapters"][0]["loads_in_flight"] for stack in machines.both))
        machines.service.kill()
        answers = [request.result() for request in asked]
    expected = [answer.token_ids for answer in cold for _ in machines.both]
    assert [answer.token_ids for answer in answers] == expected
    assert all(answer.cached_tokens % 256 == 0 for answer in answers)
    print(f"cached tokens of requests under way: {[answer.cached_tokens for answer in answers]}")
    for stack in machines.both:
        again = [ask(stack, prompt) for prompt in prompts]
        assert [answer.token_ids for answer in again] == [answer.token_ids for answer in cold]
        stack.wait_clean()
