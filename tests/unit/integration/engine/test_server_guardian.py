"""When a server that died is started again; tests/process/test_owned_server.py has the processes."""

from __future__ import annotations

from lmcache.integration.engine.server_guardian import pause_after


def test_pauses_grow_until_a_server_has_run_steadily() -> None:
    pauses = [pause_after(0.1, 0.0)]
    for _ in range(8):
        pauses.append(pause_after(0.1, pauses[-1]))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert pause_after(3600.0, pauses[-1]) == 1
