"""What a server asks of its engines when it speaks CURVE: keys from files, read again when they change."""

from __future__ import annotations

from collections.abc import Callable

from lmcache.transport.curve import CurveSession
from lmcache.transport.curve_clients import CurveAccess, CurveClient, CurveWatch


class CurveGate:
    """ConfigError at construction where the files cannot be used."""

    def __init__(
        self,
        server_key_file: str,
        clients_folder: str,
        random_bytes: Callable[[int], bytes],
        on_change: Callable[[CurveAccess, CurveAccess], None] = lambda before, after: None,
    ) -> None:
        """`on_change`: the access before and after a change of the files; on the thread that noticed it."""
        self._random_bytes = random_bytes
        self._on_change = on_change
        self._watch = CurveWatch(server_key_file, clients_folder, self._changed)
        self._end_revoked: Callable[[Callable[[CurveClient], bool]], None] | None = None

    def session(self) -> CurveSession:
        """For a connection."""
        return CurveSession(lambda: self._watch.access, self._random_bytes)

    def start(self, end_revoked: Callable[[Callable[[CurveClient], bool]], None]) -> None:
        """`end_revoked` ends the connections of clients for which its argument is false."""
        self._end_revoked = end_revoked
        self._watch.start()

    def stop(self) -> None:
        self._watch.stop()

    def look(self) -> None:
        """Reads what has changed, without waiting for the thread that does it every second."""
        self._watch.look()

    def _changed(self, before: CurveAccess, access: CurveAccess) -> None:
        if self._end_revoked is not None:
            self._end_revoked(lambda client: access.clients.get(client.public_key) == client)
        self._on_change(before, access)
