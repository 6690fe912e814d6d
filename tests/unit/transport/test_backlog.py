from lmcache.transport.backlog import Backlog


def test_who_holds_some_for_longest_is_surplus() -> None:
    backlog: Backlog[str] = Backlog(100)
    backlog.set("first", 10)
    backlog.set("second", 60)
    assert backlog.surplus() is None
    backlog.set("third", 40)
    assert (backlog.size_bytes, backlog.surplus()) == (110, "first")
    backlog.set("first", 0)
    assert backlog.surplus() is None
    backlog.set("first", 1)  # begins anew
    assert backlog.surplus() == "second"
    for holder in ("first", "second", "third", "nobody"):
        backlog.set(holder, 0)
    assert (backlog.size_bytes, backlog.surplus()) == (0, None)
