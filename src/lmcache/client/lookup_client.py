"""One request's session at the server: lookups, appends, leases and its end. Waits only as long as it is asked to."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from lmcache.client.content_extras import ContentSpan, content_extras
from lmcache.client.engine_environment import EngineEnvironment
from lmcache.client.release_outbox import ReleaseOutbox
from lmcache.client.server_probe import ServerProbe
from lmcache.core.chunking import TOKEN_BYTES
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.core.key_batch import NO_HASHES, ChunkHashes
from lmcache.errors import LMCacheError
from lmcache.protocol.messages import Append, AppendReply, EndSession, HelloReply, Lookup, LookupReply, Release, Source

if TYPE_CHECKING:
    from lmcache.client.client import Client
    from lmcache.transport.connection import Pending

log = logging.getLogger("lmcache.client")

ReplyT = TypeVar("ReplyT", LookupReply, AppendReply)

LOOKUP_SECONDS = 30.0
APPEND_SECONDS = 2.0  # blocks may be pinned meanwhile
_GRACE_SECONDS = 1.0

_Lacking = tuple[str, str, str, int, bytes, bytes, list[tuple[int, bytes]]]


class Progress(enum.Enum):
    WAITING = "waiting"
    ANSWERED = "answered"
    FAILED = "failed"


class PartialChunk(NamedTuple):
    """The first `tokens` tokens behind the last full chunk, stored under a name of their own."""

    chunk_hash: bytes
    tokens: int


@dataclass
class RequestSession:
    """A request as the server knows it. Belongs to one thread."""

    request_id: str
    cache_salt: str
    identity: bytes
    tokens: bytes  # u32: the prompt, and of what was decoded as much as somebody asked for
    contents: Sequence[ContentSpan] = ()  # images, audio ... inside these tokens
    last_server: HelloReply | None = None  # the last one that got tokens of this request
    sent_tokens: int | None = None  # how many of the tokens that server has; None: not known
    unconfirmed: bool = False  # some call may have arrived or not
    lookup: Pending[LookupReply] | None = None  # under way
    looked_up_at: float = 0.0  # when the last lookup was sent; 0.0: none was
    append: Pending[AppendReply] | None = None  # under way
    appended_at: float = 0.0  # when the last append was sent
    answer: LookupReply | None = None  # its lease is held
    resumed: bool = False  # the engine had blocks for it before: it waits again because it was preempted
    trace_parent: str = ""  # W3C Trace Context; "" for none
    source: Source | None = None  # that computed the beginning of this request
    hashes: ChunkHashes = NO_HASHES  # of the leading full chunks, as far as they are known
    partial_unit_tokens: int = 0  # what follows them is named, too, as far as it is whole units; 0: it is not
    partial: PartialChunk | None = None  # behind all of `hashes`

    @property
    def server(self) -> HelloReply | None:
        """The server that holds the session, and by whose chunks `answer` and `hashes` count."""
        return self.last_server if self.sent_tokens is not None else None

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def hit_tokens(self) -> int:
        """How many tokens the held answer covers; 0 where it has more chunks than there are names."""
        if self.answer is None or self.server is None:
            return 0
        beyond_names = self.answer.chunks - len(self.hashes)
        if beyond_names <= 0:
            return self.answer.chunks * self.server.chunk_tokens
        if beyond_names > 1 or self.partial is None:
            return 0
        return len(self.hashes) * self.server.chunk_tokens + self.partial.tokens

    @property
    def full_hit_chunks(self) -> int:
        """How many chunks the held answer covers, without a partial chunk."""
        return min(self.answer.chunks, len(self.hashes)) if self.answer is not None else 0

    def partial_tokens(self, chunk_tokens: int) -> int:
        """How many tokens behind the last full chunk are named as a partial one: of a prompt that another engine hands
        over, at most those that it says it stores, as others would be waited for in vain."""
        rest_tokens = self.token_count % chunk_tokens
        if self.source is not None:
            stored_tokens = self.source.tokens - (self.token_count - rest_tokens)
            rest_tokens = max(0, min(rest_tokens, stored_tokens))
        return rest_tokens - rest_tokens % self.partial_unit_tokens if self.partial_unit_tokens else 0

    def take_names(self, known: ChunkHashes, packed: bytes, partial_tokens: int, chunk_tokens: int) -> None:
        """Takes the names of an answer: full chunks behind the `known` ones, a partial one if it has some tokens."""
        self.partial = None
        if partial_tokens and packed:
            packed, partial_hash = packed[:-CHUNK_HASH_BYTES], packed[-CHUNK_HASH_BYTES:]
            if partial_tokens == self.partial_tokens(chunk_tokens):  # else the request has got more tokens since
                self.partial = PartialChunk(partial_hash, partial_tokens)
        self.hashes = ChunkHashes(known.packed + packed)

    def forget_names(self) -> None:
        self.hashes, self.partial = NO_HASHES, None


class LookupClient:
    """Sends the calls of sessions and takes their answers. For one thread."""

    def __init__(self, client: Client, instance_id: str, environment: EngineEnvironment) -> None:
        self.client = client
        self.instance_id = instance_id
        self.suspended = False  # nothing is asked
        self._clock = environment.clock
        self._probe = ServerProbe(client, environment.clock)
        self._outbox = ReleaseOutbox(client, environment)

    # ---- lookups -----------------------------------------------------------------------------------------------------
    def lookup(
        self,
        session: RequestSession,
        *,
        recompute: bool = False,
        deadline_seconds: float = LOOKUP_SECONDS,
        grace_seconds: float = _GRACE_SECONDS,
    ) -> bool:
        """Sends the lookup, with the tokens unless this server has them. False: no server to ask.

        `recompute`: what L1 does not have is computed. `deadline_seconds`: what L2 gets to bring it into L1; the server
        keeps it itself, and `grace_seconds` are for its answer to travel.
        """
        hello = self._server_to_ask()
        if hello is None:
            return False
        source = session.source
        if source is not None and session.resumed and session.looked_up_at > 0.0:  # it was waited for already
            source = msgspec.structs.replace(source, wait_seconds=0.0)
        ends = deadline_seconds, recompute, session.resumed, session.trace_parent, source
        message = Lookup(*self._lacking(session, hello), *ends, session.partial_tokens(hello.chunk_tokens))
        try:
            pending = self.client.submit("lookup", message, deadline_seconds + grace_seconds)
        except LMCacheError as error:
            log.debug("No lookup for request %s: %s", session.request_id, error)
            return False
        if not self._note_sent(session, hello):
            return False
        session.lookup, session.append, session.looked_up_at = pending, None, self._clock.monotonic()
        session.answer = None
        session.forget_names()
        return True

    def take_answer(self, session: RequestSession, wait_seconds: float = 0.0) -> Progress:
        """The answer of the lookup that is under way, if it is there or comes within `wait_seconds`."""
        pending = session.lookup
        if pending is None:
            return Progress.ANSWERED if session.answer is not None else Progress.FAILED
        if not _is_there(pending, wait_seconds):
            return Progress.WAITING
        session.lookup = None
        reply = _reply(session, pending, "The lookup of request %s failed: %s")
        if reply is None:
            return Progress.FAILED
        self._probe.heard()
        server = session.server
        if server is None or server is not self.client.hello or len(reply.hashes) % CHUNK_HASH_BYTES:
            session.sent_tokens = None  # leased by a server that is no more, or no answer to a lookup
            return Progress.FAILED
        session.answer = reply
        session.take_names(NO_HASHES, reply.hashes, reply.partial_tokens, server.chunk_tokens)
        return Progress.ANSWERED

    def server_answers(self, session: RequestSession) -> bool:
        """Whether the answer of the call that is under way is worth waiting for: the server still answers at all."""
        if session.lookup is None and session.append is None:
            return True
        return self._probe.check(session.looked_up_at if session.lookup is not None else session.appended_at)

    # ---- appends -----------------------------------------------------------------------------------------------------
    def append(self, session: RequestSession) -> bool:
        """Sends the tokens that the session lacks, to learn the hashes of the chunks they fill. False: cannot be."""
        hello = self._server_to_ask()
        if hello is None or (session.last_server is not None and session.server is not hello):
            return False
        message = Append(*self._lacking(session, hello), session.partial_tokens(hello.chunk_tokens))
        try:
            pending = self.client.submit("append", message, APPEND_SECONDS)
        except LMCacheError as error:
            log.debug("Nothing more of request %s is stored: %s", session.request_id, error)
            return False
        if not self._note_sent(session, hello):
            return False
        session.append, session.appended_at = pending, self._clock.monotonic()
        return True

    def take_hashes(self, session: RequestSession, wait_seconds: float = 0.0) -> Progress:
        """The hashes of the append that is under way, if they are there or come within `wait_seconds`."""
        pending = session.append
        if pending is None:
            return Progress.ANSWERED
        if not _is_there(pending, wait_seconds):
            return Progress.WAITING
        session.append = None
        reply = _reply(session, pending, "Nothing more of request %s is stored: %s")
        if reply is None:
            return Progress.FAILED
        known = session.hashes[: reply.first_chunk]
        fits = len(known) == reply.first_chunk and not len(reply.hashes) % CHUNK_HASH_BYTES
        server = session.server
        if server is None or server is not self.client.hello or not fits:
            return Progress.FAILED
        session.take_names(known, reply.hashes, reply.partial_tokens, server.chunk_tokens)
        return Progress.ANSWERED

    # ---- the end of leases and sessions ------------------------------------------------------------------------------
    def give_back(self, session: RequestSession, *, recomputed: bool = False) -> None:
        """Releases the lease of the answer that is held, if any. `recomputed`: computing is expected to be faster."""
        answer, session.answer = session.answer, None
        if answer is not None and answer.lease:
            self.release(answer.lease, session.server, recomputed=recomputed)

    def release(
        self,
        lease: int,
        server: HelloReply | None,
        unreadable_chunks: Iterable[int] = (),
        *,
        recomputed: bool = False,
        loaded_tokens: int = 0,
        prefill_seconds: float = 0.0,
    ) -> None:
        """`server`: the one that leased. The next one gives the same numbers to other leases. The rest as in
        `Release`."""
        if server is self.client.hello:
            unreadable = sorted(unreadable_chunks)
            message = Release(self.instance_id, lease, unreadable, recomputed, loaded_tokens, prefill_seconds)
            self._outbox.send("release", message)

    def end(self, session: RequestSession) -> None:
        """The request is over: the server forgets its tokens and every lease."""
        session.answer = None
        if session.last_server is not None and session.last_server is self.client.hello:
            message = EndSession(self.instance_id, session.request_id)
            self._outbox.send("end_session", message, twice=_is_unconfirmed(session))

    def renamed(self, session: RequestSession, identity: bytes) -> RequestSession:
        """The same request under another name, not asked yet. What its session holds goes with the next lookup, or
        with the end of the request."""
        self.give_back(session)
        return replace(
            session,
            identity=identity,
            sent_tokens=None,
            unconfirmed=_is_unconfirmed(session),
            lookup=None,
            append=None,
            hashes=NO_HASHES,
            partial=None,
        )

    def close(self) -> None:
        self._outbox.close()
        self.client.close()

    # ---- parts -------------------------------------------------------------------------------------------------------
    def _server_to_ask(self) -> HelloReply | None:
        return None if self._probe.silent or self.suspended else self.client.hello

    def _lacking(self, session: RequestSession, hello: HelloReply) -> _Lacking:
        """What `Lookup` and `Append` begin with: the request, and what its session at this server lacks."""
        first_token = (session.sent_tokens or 0) if session.server is hello else 0
        return (
            self.instance_id,
            session.request_id,
            session.cache_salt,
            first_token,
            session.tokens[TOKEN_BYTES * first_token :],
            session.identity,
            content_extras(session.contents, hello.chunk_tokens, first_token),
        )

    def _note_sent(self, session: RequestSession, hello: HelloReply) -> bool:
        """False when another server was met in between: which of them was asked is unknown, and it is to forget it."""
        session.last_server = self.client.hello
        if session.last_server is hello:
            session.sent_tokens = session.token_count
            return True
        session.sent_tokens = None
        self.end(session)
        return False


def _is_there(pending: Pending[LookupReply] | Pending[AppendReply], wait_seconds: float) -> bool:
    return pending.wait(wait_seconds) if wait_seconds > 0 else pending.done()


def _reply(session: RequestSession, pending: Pending[ReplyT], failure: str) -> ReplyT | None:
    """None for a call that failed, which is logged."""
    try:
        return pending.result()
    except LMCacheError as error:
        log.debug(failure, session.request_id, error)
        session.sent_tokens = None  # whether the session got the tokens is unknown: a next call sends them again
        session.unconfirmed = True
        return None


def _is_unconfirmed(session: RequestSession) -> bool:
    return session.unconfirmed or session.lookup is not None or session.append is not None
