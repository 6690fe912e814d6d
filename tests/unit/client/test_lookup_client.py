"""What a session leaves at a server."""

from __future__ import annotations

from typing import Any

from lmcache.client.engine_environment import EngineEnvironment
from lmcache.client.lookup_client import LookupClient, RequestSession
from manual_clock import ManualClock
from unit.integration.vllm.fakes import FakeClient, FakePending, hello


class ReplacedClient(FakeClient):
    """Whose server is replaced by another one just before a lookup is sent."""

    def submit(self, method: str, message: Any, timeout_seconds: float) -> FakePending:
        if method == "lookup":
            self.hello = hello(b"epoch-two-epoch-")
        return super().submit(method, message, timeout_seconds)


def test_a_lookup_that_another_server_got_leaves_no_session_there() -> None:
    clock = ManualClock()
    client = ReplacedClient(clock)
    lookups = LookupClient(client, "i", EngineEnvironment(clock))  # type: ignore[arg-type]
    session = RequestSession("a", "", b"", bytes(4 * 256))
    assert not lookups.lookup(session)
    assert [message.request_id for message in client.messages("end_session")] == ["a"]
    lookups.close()
