"""The processes of an engine come to one name for it, however its workers were started."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest

from lmcache.integration.vllm.engine_process import instance_name, scheduler_process_id


def _name_of_engine(answers: Any) -> None:
    answers.put(instance_name(scheduler_process_id(in_scheduler=False, executor="mp", workers=2)))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_started_in_any_way_name_their_engine(method: str):
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    worker = context.Process(target=_name_of_engine, args=(answers,))
    worker.start()
    assert answers.get() == instance_name(os.getpid())
    worker.join()


def test_processes_of_an_engine_agree_on_its_name():
    mine = instance_name(os.getpid())
    assert mine == instance_name(scheduler_process_id(in_scheduler=False, executor="uni", workers=1))
    assert mine == instance_name(scheduler_process_id(in_scheduler=True, executor="", workers=4))
    child = os.fork()
    if child == 0:
        named = instance_name(scheduler_process_id(in_scheduler=False, executor="mp", workers=2))
        os._exit(0 if named == mine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert mine != instance_name(os.getppid())
