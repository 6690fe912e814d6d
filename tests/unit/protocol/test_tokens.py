import struct
from typing import Any

import pytest

from lmcache.protocol.tokens import pack_tokens


def test_tokens_are_little_endian_uint32() -> None:
    assert pack_tokens([0, 1, 0xFFFF_FFFF]) == struct.pack("<3I", 0, 1, 0xFFFF_FFFF)
    assert pack_tokens(iter(range(3))) == struct.pack("<3I", 0, 1, 2)
    assert pack_tokens([]) == b""


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], ["1"], [1.5], [None]])
def test_what_is_no_token_id_is_refused(tokens: Any) -> None:
    with pytest.raises((OverflowError, TypeError)):
        pack_tokens(tokens)
