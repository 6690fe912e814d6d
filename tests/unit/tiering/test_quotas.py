"""What the background does under IsolatedLRU, with a real L1."""

from __future__ import annotations

from polling import until
from unit.tiering.support import ENGINE, FOREVER, FRAME_BYTES, Rig, faulty, keys, namespace, open_rig


def held(rig: Rig, salt: str, count: int, seed: int) -> int:
    """Stores that many objects and leases them."""
    chunks = keys(count, seed, of=namespace(salt=salt))
    assert rig.put(chunks, tell=False) == count
    acquired = rig.l1.core.acquire(
        ENGINE, chunks[0].namespace.digest, b"".join(key.chunk_hash for key in chunks), FOREVER
    )
    assert acquired.chunks == count
    return acquired.lease


def two_rounds(rig: Rig) -> None:
    """Until the background has looked at all salts since."""
    passing = keys(1, 99, of=namespace(salt="passing"))
    rig.put(passing, tell=False)
    until(lambda: rig.resident(passing) == 0)


def test_what_somebody_reads_beyond_a_quota_costs_nobody_else_anything() -> None:
    with open_rig(slots=100, l1_policy="IsolatedLRU", eviction_watermark=0.8) as rig:
        rig.l1.core.set_limit("good", 40 * FRAME_BYTES)
        good = keys(40, of=namespace(salt="good"))
        assert rig.put(good, tell=False) == 40
        lease = held(rig, "guest", 55, seed=1)  # L1 is above its watermark, and only `good` could be evicted
        two_rounds(rig)
        assert rig.resident(good) == 40
        rig.l1.core.release(lease)
        until(lambda: rig.l1.core.usage_of("guest") == 0)
        assert rig.resident(good) == 40


def test_what_has_no_quota_reaches_l2() -> None:
    configured, _ = faulty()
    with open_rig([configured], l1_policy="IsolatedLRU") as rig:
        chunks = keys(200, of=namespace(salt="guest"))
        assert rig.put(chunks) == 200
        until(lambda: rig.l1.core.usage_of("guest") == 0)
        result = rig.fetch(chunks)
        assert result.chunks == 200 and rig.holds(result, chunks)
        rig.l1.core.release(result.lease)
        assert rig.l1.core.stats()["salts"] == 0
