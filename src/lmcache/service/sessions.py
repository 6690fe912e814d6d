"""The sessions of all instances: found, begun, bounded, forgotten."""

from __future__ import annotations

from collections.abc import Callable

from lmcache.core import limits
from lmcache.core.chunking import ChunkHasher
from lmcache.errors import RemoteError
from lmcache.protocol.messages import Append, ErrorCode, Lookup
from lmcache.service.checks import check_name
from lmcache.service.registry import Instance
from lmcache.service.session import Session, TokenChain


class Sessions:
    """Invariant: `size_bytes` is that of the sessions which instances hold. Only an idle session is forgotten."""

    def __init__(self, hasher: ChunkHasher, settle: Callable[[Instance, Session], None]) -> None:
        """`settle` makes a session idle: ends whatever its last lookup holds or waits for."""
        self._hasher = hasher
        self._settle = settle
        self.size_bytes = 0

    def add_tokens(self, instance: Instance, message: Lookup | Append) -> tuple[Session, int]:
        """The request's session with the message's tokens in it, and the first chunk whose hash is new."""
        session = instance.sessions.get(message.request_id)
        if session is not None and session.chain.continues(message):
            chain = session.chain
        elif message.first_token == 0:
            chain = TokenChain(self._hasher, message.cache_salt, message.identity)
        else:
            raise RemoteError(ErrorCode.UNKNOWN_SESSION, "The request has no session; send its tokens from 0.")
        size_before = session.chain.size_bytes if session is not None else 0
        first_chunk = chain.extend(message.first_token, message.tokens, message.extras)
        if session is None:
            check_name("request id", message.request_id)
            session = Session(message.request_id, chain)
        else:
            session.chain = chain
            del instance.sessions[message.request_id]
        instance.sessions[message.request_id] = session  # the latest used
        self.size_bytes += chain.size_bytes - size_before
        self._keep_within_limits(instance, session)
        return session, first_chunk

    def end(self, instance: Instance, session: Session) -> None:
        self._settle(instance, session)
        self.forget(instance, session)

    def forget(self, instance: Instance, session: Session) -> None:
        assert session.idle
        del instance.sessions[session.request_id]
        self.size_bytes -= session.chain.size_bytes

    def _keep_within_limits(self, instance: Instance, latest: Session) -> None:
        """Forgets what this instance has used least recently; if that is not enough, what it has just sent."""
        while len(instance.sessions) > limits.MAX_SESSIONS_PER_INSTANCE or self.size_bytes > limits.MAX_SESSION_BYTES:
            victim = next((session for session in instance.sessions.values() if session.idle), latest)
            if victim is latest:
                self.end(instance, latest)
                raise RemoteError(ErrorCode.TOO_MANY, "Too many requests are open; end some before you begin others.")
            self.forget(instance, victim)
