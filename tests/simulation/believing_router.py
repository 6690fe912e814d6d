"""A router that believes the KV events of one engine, and holds them to what they may say."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, EventPublisher

SERVER = "CPU"  # the medium that stands for the cache server's L1


class BelievingRouter(EventPublisher):
    """Takes the place of vLLM's own publisher."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[str, set[Any]] = {}  # by medium
        self.announced = 0  # blocks of the server, in all
        self.taken_back = 0

    def publish(self, events: Any) -> None:
        for event in events.events:
            self._take(event)

    def _take(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            return
        there = self.blocks.setdefault(event.medium, set())
        blocks = event.block_hashes
        assert len(set(blocks)) == len(blocks), event
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == event.block_size * len(blocks)
            if event.medium == SERVER:
                assert event.parent_block_hash not in blocks
                self.announced += len(blocks)
            there.update(blocks)
        else:
            if event.medium == SERVER:
                self.taken_back += len(blocks)
            there.difference_update(blocks)

    def of_server(self) -> set[Any]:
        return self.blocks.get(SERVER, set())

    def shutdown(self) -> None:
        return
