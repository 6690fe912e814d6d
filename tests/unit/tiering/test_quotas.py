"""What the background does under IsolatedLRU, with a real L1."""

from __future__ import annotations

from polling import until
from unit.tiering.support import ENGINE, FOREVER, FRAME_BYTES, Rig, faulty, keys, namespace, rig


def held(it: Rig, salt: str, count: int, seed: int) -> int:
    """Stores that many objects and leases them."""
    chunks = keys(count, seed, of=namespace(salt=salt))
    assert it.put(chunks, tell=False) == count
    lease, found, _ = it.l1.core.acquire(
        ENGINE, chunks[0].namespace.digest, b"".join(key.chunk_hash for key in chunks), FOREVER
    )
    assert found == count
    return lease


def two_rounds(it: Rig) -> None:
    """Until the background has looked at all salts since."""
    passing = keys(1, 99, of=namespace(salt="passing"))
    it.put(passing, tell=False)
    until(lambda: it.resident(passing) == 0)


def test_what_somebody_reads_beyond_a_quota_costs_nobody_else_anything() -> None:
    with rig(slots=100, l1_policy="IsolatedLRU", eviction_watermark=0.8) as it:
        it.l1.core.set_limit("good", 40 * FRAME_BYTES)
        good = keys(40, of=namespace(salt="good"))
        assert it.put(good, tell=False) == 40
        lease = held(it, "guest", 55, seed=1)  # L1 is above its watermark, and only `good` could be evicted
        two_rounds(it)
        assert it.resident(good) == 40
        it.l1.core.release(lease)
        until(lambda: it.l1.core.usage_of("guest") == 0)
        assert it.resident(good) == 40


def test_what_has_no_quota_reaches_l2() -> None:
    configured, _ = faulty()
    with rig([configured], l1_policy="IsolatedLRU") as it:
        chunks = keys(200, of=namespace(salt="guest"))
        assert it.put(chunks) == 200
        until(lambda: it.l1.core.usage_of("guest") == 0)
        result = it.fetch(chunks)
        assert result.chunks == 200 and it.holds(result, chunks)
        it.l1.core.release(result.lease)
        assert it.l1.core.stats()["salts"] == 0
