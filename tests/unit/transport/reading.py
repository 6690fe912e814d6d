"""Feeds a reader of ZMTP as a connection does."""

from __future__ import annotations

from lmcache.transport.zmtp import NO_MESSAGE, RECEIVE_BYTES, MessageReader


def receive(reader: MessageReader, data: bytes) -> list[list[bytes]]:
    """What a connection does with bytes that arrive at once."""
    messages = []
    while data:
        room = reader.frame_room
        if room is None:
            reader.feed(data[:RECEIVE_BYTES])
            data = data[RECEIVE_BYTES:]
        else:
            count = min(len(room), len(data))
            room[:count] = data[:count]
            room.release()
            reader.frame_received(count)
            data = data[count:]
        while (message := reader.next()) is not None:
            if message is not NO_MESSAGE:
                messages.append([bytes(frame) for frame in message])
    return messages
