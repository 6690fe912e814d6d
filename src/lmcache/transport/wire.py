"""The frames of a call and of its answer (docs/formats/wire.md).

call:   [call id, 8 bytes little-endian][method, ascii][payload, msgpack]
answer: [call id][status: b"ok" or an error code][payload; for an error a msgpack string: one sentence]
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

CALL_FRAMES: Final = 3
CALL_ID_BYTES: Final = 8
MAX_METHOD_BYTES: Final = 64
MAX_SENTENCE_CHARACTERS: Final = 500

STATUS_OK: Final = b"ok"

# The error codes that the transport itself answers with; the rest belongs to the handlers.
BAD_REQUEST: Final = "bad_request"
UNKNOWN_METHOD: Final = "unknown_method"
TOO_MANY: Final = "too_many"
SHUTTING_DOWN: Final = "shutting_down"
INTERNAL: Final = "internal"

_call_id = struct.Struct("<Q")
pack_call_id = _call_id.pack
_encoder = msgspec.msgpack.Encoder()
encode_payload = _encoder.encode
_sentence_decoder = msgspec.msgpack.Decoder(str)


def unpack_call_id(frame: bytes) -> int:
    return int(_call_id.unpack(frame)[0])


def encode_sentence(sentence: str) -> bytes:
    return encode_payload(sentence[:MAX_SENTENCE_CHARACTERS])


def decode_sentence(payload: bytes) -> str:
    try:
        return _sentence_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "the server gave no reason"


def decoder_of(message_type: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(message_type)
