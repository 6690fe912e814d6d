"""An engine for the soak: everything that an engine's two sides do, in any order, with every loaded byte checked.

Run as a script: `port name seed mode`. It works until a line comes on its input, then leaves properly and prints what
it has done as JSON. Of each kind of request there are few, so that hits, evictions and loads from L2 all happen.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence

from lmcache.client.transfer_mode import WantedTransfer
from lmcache.errors import LMCacheError, RemoteError
from lmcache.protocol import messages as m
from open_calls import calls_in_flight
from process.support import CALL_SECONDS, SmallEngine, unpack_slots

PROMPTS = 40
MAX_CHUNKS = 12
PAYLOAD_BYTES = 28 * 1024
SALTS = ("", "", "one", "two")


class SoakEngine:
    def __init__(self, port: int, name: str, seed: int, mode: str) -> None:
        self._dice = random.Random(seed)
        self._engine = SmallEngine(
            port, instance_id=name, payload_bytes=PAYLOAD_BYTES, heartbeat=0.5, transfer=WantedTransfer(mode)
        ).start(60.0)
        self.did: Counter[str] = Counter()
        self._named = 0

    def work(self, stopped: threading.Event) -> None:
        acts = [self.store, self.store, self.retrieve, self.retrieve, self.retrieve, self.leave, self.abort, self.chat]
        while not stopped.is_set():
            act = self._dice.choice(acts)
            try:
                act()
                self.did[act.__name__] += 1
            except RemoteError as error:  # such as a lookup that its own end has cancelled
                self.did[f"{act.__name__}: {error.code}"] += 1

    def close(self) -> None:
        self.did["calls without an answer"] = calls_in_flight()
        self._engine.close()

    # ---- what requests do --------------------------------------------------------------------------------------------
    def store(self) -> None:
        salt, tokens = self._dice.choice(SALTS), self._prompt()
        self._engine.store(tokens, salt=salt)

    def retrieve(self) -> None:
        salt, tokens, request = self._dice.choice(SALTS), self._prompt(), self._name()
        reply = self._engine.lookup(request, tokens, salt=salt, deadline_seconds=CALL_SECONDS)
        if reply.chunks:
            self.did["chunks hit"] += reply.chunks
            self.did["wrong"] += not self._engine.read(reply, salt=salt)
            if self._dice.random() < 0.7:
                release = m.Release(self._engine.instance_id, reply.lease)
                self._engine.client.call("release", release, CALL_SECONDS)
        self._engine.end(request)

    def leave(self) -> None:
        """Before the answer has come."""
        request = self._name()
        message = m.Lookup(self._engine.instance_id, request, self._dice.choice(SALTS), 0, self._prompt())
        waiting = self._engine.client.submit("lookup", message, CALL_SECONDS)
        self._engine.end(request)
        if self._dice.random() < 0.5:
            waiting.result()
        else:
            waiting.cancel()

    def abort(self) -> None:
        """A store of which some or nothing is written."""
        hashes = self._engine.hashes(self._prompt())
        reply = self._engine.reserve(hashes)
        if reply.reservation:
            self._engine.commit(reply.reservation, bytes(len(unpack_slots(reply.slots))))

    def chat(self) -> None:
        """A session that grows: looked up again and again, each time with what is new."""
        request, engine = self._name(), self._engine
        tokens = self._prompt()
        sent = 0
        for end in sorted(self._dice.sample(range(4, len(tokens), 4), min(3, len(tokens) // 4 - 1))):
            message = m.Lookup(engine.instance_id, request, "", sent // 4, tokens[sent:end])
            engine.client.call("lookup", message, CALL_SECONDS)
            sent = end
        engine.end(request)

    # ---- parts -------------------------------------------------------------------------------------------------------
    def _prompt(self) -> bytes:
        prompt, chunks = self._dice.randrange(PROMPTS), self._dice.randint(1, MAX_CHUNKS)
        return self._engine.tokens(*(1000 * prompt + chunk for chunk in range(chunks)))

    def _name(self) -> str:
        self._named += 1
        return f"request {self._named}"


def main(arguments: Sequence[str]) -> None:
    port, name, seed, mode = arguments
    engine = SoakEngine(int(port), name, int(seed), mode)
    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stopped.set()), daemon=True).start()
    print("ready", flush=True)
    try:
        engine.work(stopped)
        engine.close()
    except LMCacheError as error:
        engine.did[f"ended by {error}"] += 1
    print(json.dumps(engine.did), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
