"""The tokens of chunks, from the prompts that engines send: an index knows names alone."""

from __future__ import annotations

import threading
from collections import OrderedDict

from lmcache.core import limits
from lmcache.core.key_batch import ChunkHashes
from lmcache.kv_events.wire import Description, split_tokens


class Descriptions:
    """`note` is for any thread and takes no longer for a long prompt; the rest is for one thread.

    Remembers MAX_CHUNKS_DESCRIBED; the least recently noted are forgotten first. Of prompts that come faster than they
    are taken, those beyond MAX_UNREAD_PROMPT_BYTES are passed over."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._lock = threading.Lock()
        self._waiting: list[tuple[bytes, bytes, bytes]] = []
        self._waiting_bytes = 0
        self._known: OrderedDict[bytes, Description] = OrderedDict()

    def note(self, parent: bytes, hashes: bytes, tokens: bytes) -> None:
        """Chunks one behind the other: the chunk before them (b"" for none), 32 bytes each, and packed tokens, which
        may be more than those of whole chunks."""
        size_bytes = len(hashes) + len(tokens)
        with self._lock:
            if self._waiting_bytes + size_bytes <= limits.MAX_UNREAD_PROMPT_BYTES:
                self._waiting.append((parent, hashes, tokens))
                self._waiting_bytes += size_bytes

    def take(self) -> None:
        """What was noted since is known from here on."""
        with self._lock:
            waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for parent, packed, packed_tokens in waiting:
            hashes = ChunkHashes(packed)
            for chunk_hash, tokens in zip(
                hashes, split_tokens(packed_tokens, self._chunk_tokens, len(hashes)), strict=True
            ):
                if chunk_hash in self._known:
                    self._known.move_to_end(chunk_hash)
                else:
                    self._known[chunk_hash] = Description(parent, tokens)
                parent = chunk_hash
            while len(self._known) > limits.MAX_CHUNKS_DESCRIBED:
                self._known.popitem(last=False)

    def of(self, chunk_hash: bytes) -> Description | None:
        return self._known.get(chunk_hash)
