"""Deletion of single objects by request: what cannot be asked for is not said to be gone."""

from __future__ import annotations

import pytest

from lmcache.errors import AdapterError
from unit.tiering.support import faulty, keys, open_rig


def test_what_an_adapter_does_not_say_is_not_taken_for_gone() -> None:
    (first, broken), (second, well) = faulty(), faulty(index=1)
    with open_rig([first, second]) as rig:
        wanted = keys(4)
        rig.put(wanted)
        assert rig.storage.flush(20)
        # As if another server had stored them.
        rig.storage.call_soon(lambda: rig.storage.runners[0].lost(wanted))
        broken.raises = AdapterError("no connection")
        with pytest.raises(AdapterError, match=r"cannot be asked what is there: 4 objects were deleted"):
            rig.storage.delete(wanted, "all", force=False)
        assert len(broken.inner.objects) == 4 and not well.inner.objects and not rig.resident(wanted)
        broken.raises = None
        assert rig.storage.delete([*wanted, *keys(2, seed=1)], "all", force=False) == (4, 0, 2)
        assert not broken.inner.objects
