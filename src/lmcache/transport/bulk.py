"""A large answer that ZMQ sends from where it lies."""

from __future__ import annotations

from typing import Any

import zmq


class Bulk:
    """The payload of an answer, encoded already. `payload` must not change any more."""

    def __init__(self, payload: bytearray) -> None:
        self.size_bytes = len(payload)
        self._payload: bytearray | None = payload
        self._tracker: Any = None

    def frame(self) -> zmq.Frame:
        """For the message loop, once: from now on only ZMQ holds the payload."""
        frame = zmq.Frame(self._payload, copy=False, track=True)
        self._payload, self._tracker = None, frame.tracker
        return frame

    @property
    def sent(self) -> bool:
        """ZMQ needs the payload no more: the machine's network stack has it, or the peer has gone."""
        return self._tracker is not None and bool(self._tracker.done)
