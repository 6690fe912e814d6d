"""What an adapter that keeps objects in slots of equal size knows of each of them."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.core.key import ObjectKey


class SlotObject:
    """Its slot is free again when it is gone and has no readers."""

    __slots__ = ("frame_bytes", "is_gone", "readers", "slot")

    def __init__(self, slot: int, frame_bytes: int) -> None:
        self.slot = slot
        self.frame_bytes = frame_bytes
        self.readers = 0
        self.is_gone = False


def object_name(key: ObjectKey) -> bytes:
    """The digest of its namespace and its chunk hash: what stands in an entry of the directory."""
    return key.namespace.digest + key.chunk_hash


class SlotKeeper:
    """What such adapters do alike. Belongs to one loop.

    Invariant: a slot is used again only when its object is gone, nobody reads it, and its entry was erased or its
    erasure was tried."""

    _objects: dict[bytes, SlotObject]  # by `object_name`
    _free: list[int]  # the last one is used first

    async def _erase(self, slots: Sequence[int]) -> None:
        """The entries of these in the directory. AdapterError where they stay."""
        raise NotImplementedError

    async def _remove(self, names: Sequence[bytes], *, are_useless: bool = False) -> list[SlotObject]:
        """AdapterError where their entries stay: they are there as before, but for those that nobody can load."""
        removed = {name: held for name in names if (held := self._objects.pop(name, None)) is not None}
        for held in removed.values():
            held.readers += 1  # until its entry is erased
        try:
            # Suffixes first, so that a kill leaves a prefix.
            await self._erase([held.slot for held in reversed(removed.values())])
        except BaseException:
            for name, held in removed.items():
                # Useless: a later start finds that, too, if the slot is not written over until then.
                held.is_gone = are_useless or self._objects.setdefault(name, held) is not held  # stored anew meanwhile
            raise
        else:
            for held in removed.values():
                held.is_gone = True
        finally:
            for held in removed.values():
                self._done_reading(held)
        return list(removed.values())

    def _done_reading(self, held: SlotObject) -> None:
        held.readers -= 1
        if held.is_gone and not held.readers:
            self._free.append(held.slot)
