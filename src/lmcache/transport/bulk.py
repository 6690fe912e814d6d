"""A large answer that ZMQ sends from where it lies."""

from __future__ import annotations

from typing import Any

import zmq


class Bulk:
    """The payload of an answer, encoded already. `payload` must not change until it is `sent`."""

    def __init__(self, payload: bytearray) -> None:
        self.size_bytes = len(payload)
        self.payload = payload
        self._tracker: Any = None

    def frame(self) -> zmq.Frame:
        """For the message loop, once."""
        frame = zmq.Frame(self.payload, copy=False, track=True)
        self._tracker = frame.tracker
        return frame

    @property
    def sent(self) -> bool:
        """ZMQ needs the payload no more, which may now change: it is in the network's hands, or the peer has gone."""
        return self._tracker is not None and bool(self._tracker.done)
