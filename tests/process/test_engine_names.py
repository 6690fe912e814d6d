"""The processes of an engine come to one name for it, however its workers were started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from typing import Any

import pytest

from lmcache.client.client import Client, ClientState
from lmcache.client.transfer_mode import WantedTransfer
from lmcache.errors import RemoteError, ServerUnavailable
from lmcache.integration.engine.instance_id import instance_name
from lmcache.integration.vllm.scheduler_process import scheduler_process_id
from lmcache.protocol import messages as m
from lmcache.testing.processes import free_port
from polling import until
from process.support import CALL_SECONDS, SmallEngine, server_within


def _name_of_engine(answers: Any) -> None:
    answers.put(instance_name("vllm", scheduler_process_id(in_scheduler=False, executor="mp", workers=2)))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_started_in_any_way_name_their_engine(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    worker = context.Process(target=_name_of_engine, args=(answers,))
    worker.start()
    assert answers.get() == instance_name("vllm", os.getpid())
    worker.join()


def test_processes_of_an_engine_agree_on_its_name() -> None:
    mine = instance_name("vllm", os.getpid())
    assert mine == instance_name("vllm", scheduler_process_id(in_scheduler=False, executor="uni", workers=1))
    assert mine == instance_name("vllm", scheduler_process_id(in_scheduler=True, executor="", workers=4))
    child = os.fork()
    if child == 0:
        named = instance_name("vllm", scheduler_process_id(in_scheduler=False, executor="mp", workers=2))
        os._exit(0 if named == mine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert mine != instance_name("vllm", os.getppid())


@pytest.mark.parametrize("transfer", [WantedTransfer.SHM, WantedTransfer.SOCKET])
def test_a_second_engine_under_the_name_of_a_running_one_is_kept_out(transfer: WantedTransfer) -> None:
    """Both number their requests from 0 on, so the one would go on with what the other one has sent."""
    port = free_port()
    with server_within(port=port):
        first = SmallEngine(port, instance_id="configured", transfer=transfer)  # in no stall of this machine silent
        second = SmallEngine(port, instance_id="configured", heartbeat=0.2, transfer=transfer)
        with first:
            mine = first.tokens(1)
            assert first.lookup("0", mine).hashes
            try:
                with pytest.raises(RemoteError, match="engine_id of its own"):
                    second.start()
                until(lambda: second.client.state is ClientState.READY)
                rest = m.Append("configured", "0", "", len(mine) // 4, mine)
                with pytest.raises(ServerUnavailable, match="another engine that lives"):
                    second.client.call("append", rest, CALL_SECONDS)
                assert len(first.client.call("append", rest, CALL_SECONDS).hashes) == 32
                first.end("0")
                first.close()
                until(lambda: second.client.owner("configured") is not None)
                second.start()
                assert second.lookup("0", second.tokens(2)).hashes
            finally:
                second.close()


def is_forgotten_after_a_failed_call(client: Client) -> bool:
    """A call that gets no answer in time makes a client ask at once whether the server still knows it."""
    with contextlib.suppress(ServerUnavailable):
        client.call("noop", m.Empty(), 0.0)
    return client.owner("configured") is None


def test_an_engine_that_comes_back_after_another_one_took_its_name_is_kept_out() -> None:
    """One that was cut off: over the socket its silence is all that the server knows."""
    port = free_port()
    with server_within(port=port):
        socket = WantedTransfer.SOCKET
        first = SmallEngine(port, instance_id="configured", heartbeat=0.2, transfer=socket)
        second = SmallEngine(port, instance_id="configured", transfer=socket)  # in no stall of this machine silent
        with first:
            mine = first.tokens(1)
            assert first.lookup("0", mine).hashes
            first.client.heartbeat_interval_seconds = 60.0  # cut off

            def taken() -> bool:
                try:
                    second.start()
                except RemoteError:
                    return False
                return True

            try:
                until(taken)
                others = second.tokens(2)
                assert second.lookup("0", others).hashes
                until(lambda: is_forgotten_after_a_failed_call(first.client))
                rest = m.Append("configured", "0", "", len(others) // 4, others)
                with pytest.raises(ServerUnavailable, match="another engine that lives"):
                    first.client.call("append", rest, CALL_SECONDS)
                first.close()
                assert len(second.client.call("append", rest, CALL_SECONDS).hashes) == 32
            finally:
                second.close()
