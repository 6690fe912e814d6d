"""A large answer that is sent from where it lies."""

from __future__ import annotations


class Bulk:
    """The payload of an answer, encoded already. `payload` must not change until it is `sent`."""

    def __init__(self, payload: bytearray) -> None:
        self.size_bytes = len(payload)
        self.payload = payload
        self.sent = False  # it is in the network's hands or copied, or the peer has gone
