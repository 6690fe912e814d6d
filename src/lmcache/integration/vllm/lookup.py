"""One request's question to the server: sent once, answered when it is, given back when it is not needed."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmcache.clock import Clock
from lmcache.core.key import CHUNK_HASH_BYTES
from lmcache.errors import LMCacheError
from lmcache.integration.vllm.identity import content_extras
from lmcache.integration.vllm.notices import Notices
from lmcache.integration.vllm.pulse import Pulse
from lmcache.protocol.messages import Append, AppendReply, EndSession, HelloReply, Lookup, LookupReply, Release

if TYPE_CHECKING:
    from lmcache.client.client import Client
    from lmcache.transport.client import Pending

log = logging.getLogger("lmcache.vllm")

LOOKUP_SECONDS = 30.0  # what L2 gets to bring a prefix into L1
APPEND_SECONDS = 2.0  # blocks may be pinned meanwhile
_GRACE_SECONDS = 1.0  # the server keeps the deadline itself; this is for its answer to travel

_Unsent = tuple[str, str, str, int, bytes, bytes, list[tuple[int, bytes]]]


class Progress(enum.Enum):
    WAITING = "waiting"
    ANSWERED = "answered"
    FAILED = "failed"


@dataclass
class Question:
    """State of one request towards the server. Belongs to the scheduler's thread."""

    request_id: str
    cache_salt: str
    identity: bytes
    tokens: bytes  # u32: the prompt, and of what was decoded as much as somebody asked for
    features: Sequence[Any] = ()  # images, audio ... inside these tokens
    hello: HelloReply | None = None  # the server life that holds the session, as far as is known
    told: HelloReply | None = None  # the last server life that was told of this request
    sent_tokens: int = 0  # how many the session in `hello` has
    unanswered: bool = False  # some lookup may have arrived or not
    pending: Pending[LookupReply] | None = None
    sent_at: float = 0.0
    given_up: bool = False  # nobody waits for `pending`, but its hashes would still be welcome
    reply: LookupReply | None = None
    hashes: bytes = b""
    appending: Pending[AppendReply] | None = None

    @property
    def boot_token(self) -> bytes:
        return self.hello.boot_token if self.hello is not None else b""


class Asker:
    """Sends questions and settles them. For one thread; never waits longer than it is told to."""

    def __init__(self, client: Client, instance_id: str, clock: Clock) -> None:
        self.client = client
        self.instance_id = instance_id
        self.suspended = False  # nothing is asked
        self._clock = clock
        self._pulse = Pulse(client, clock)
        self._notices = Notices(client, clock)

    def ask(self, question: Question, *, recompute: bool = False) -> bool:
        """Sends the lookup, with the tokens unless this server has them. False: no server to ask.

        `recompute`: what L1 does not have is computed.
        """
        hello = self.client.hello
        if hello is None or self._pulse.silent or self.suspended:
            return False
        message = Lookup(*self._unsent(question, hello), LOOKUP_SECONDS, recompute)
        try:
            pending = self.client.submit("lookup", message, LOOKUP_SECONDS + _GRACE_SECONDS)
        except LMCacheError as error:
            log.debug("No lookup for request %s: %s", question.request_id, error)
            return False
        question.told = self.client.hello
        if question.told is not hello:  # another server took over in between: which of them was asked is unknown
            return False
        question.hello, question.pending, question.appending = hello, pending, None
        question.sent_tokens = len(question.tokens) // 4
        question.sent_at = self._clock.monotonic()
        question.given_up, question.reply, question.hashes = False, None, b""
        return True

    def _unsent(self, question: Question, hello: HelloReply) -> _Unsent:
        """What `Lookup` and `Append` begin with: the request, and what its session at this server lacks."""
        known = question.hello is hello
        first_token = question.sent_tokens if known else 0
        return (
            self.instance_id,
            question.request_id,
            question.cache_salt,
            first_token,
            question.tokens[4 * first_token :],
            question.identity,
            content_extras(question.features, hello.chunk_tokens, first_token),
        )

    def settle(self, question: Question, wait_seconds: float = 0.0) -> Progress:
        """Takes the answer if it is there or comes within `wait_seconds`."""
        pending = question.pending
        if pending is None:
            return Progress.ANSWERED if question.reply is not None else Progress.FAILED
        if not (pending.wait(wait_seconds) if wait_seconds > 0 else pending.done()):
            if question.given_up:
                return Progress.FAILED
            if self._pulse.check(question.sent_at):
                return Progress.WAITING
            log.warning("The LMCache server does not answer: request %s goes on uncached", question.request_id)
            question.given_up = question.unanswered = True
            return Progress.FAILED
        question.pending = None
        try:
            reply = pending.result()
        except LMCacheError as error:
            log.debug("The lookup of request %s failed: %s", question.request_id, error)
            question.hello = None  # whether the session got the tokens is unknown: a next time sends them again
            question.unanswered = True
            return Progress.FAILED
        self._pulse.heard()
        if question.hello is not self.client.hello:
            question.hello = None  # leased by a server that is no more
            return Progress.FAILED
        question.hashes = reply.hashes
        question.reply = reply
        if question.given_up:
            self.give_back(question)
            return Progress.FAILED
        return Progress.ANSWERED

    def append(self, question: Question) -> bool:
        """Sends the tokens that the session lacks, to learn the hashes of the chunks they fill. False: cannot be."""
        hello = self.client.hello
        if hello is None or self._pulse.silent or self.suspended:
            return False
        if question.hello is not hello and question.told is not None:
            return False
        message = Append(*self._unsent(question, hello))
        try:
            pending = self.client.submit("append", message, APPEND_SECONDS)
        except LMCacheError as error:
            log.debug("Nothing more of request %s is stored: %s", question.request_id, error)
            return False
        question.told = self.client.hello
        if question.told is not hello:
            return False
        question.hello, question.appending = hello, pending
        question.sent_tokens = len(question.tokens) // 4
        return True

    def settle_append(self, question: Question, wait_seconds: float = 0.0) -> Progress:
        """Takes the hashes if they are there or come within `wait_seconds`."""
        pending = question.appending
        if pending is None:
            return Progress.ANSWERED
        if not (pending.wait(wait_seconds) if wait_seconds > 0 else pending.done()):
            return Progress.WAITING
        question.appending = None
        try:
            reply = pending.result()
        except LMCacheError as error:
            log.debug("Nothing more of request %s is stored: %s", question.request_id, error)
            question.hello = None  # what its session has is unknown
            question.unanswered = True
            return Progress.FAILED
        first_byte = reply.first_chunk * CHUNK_HASH_BYTES
        if question.hello is not self.client.hello or len(question.hashes) < first_byte:
            return Progress.FAILED
        question.hashes = question.hashes[:first_byte] + reply.hashes
        return Progress.ANSWERED

    def give_back(self, question: Question, *, recomputed: bool = False) -> None:
        """Releases the lease of the answer that is held, if any. `recomputed`: computing is expected to be faster."""
        reply, question.reply = question.reply, None
        if reply is not None and reply.lease:
            self.release(reply.lease, question.hello, recomputed=recomputed)

    def release(
        self,
        lease: int,
        of: HelloReply | None,
        unreadable_chunks: Iterable[int] = (),
        *,
        recomputed: bool = False,
    ) -> None:
        """`of`: the server life that leased. The next one gives the same numbers to other leases."""
        if of is not self.client.hello:
            return
        self._notices.send("release", Release(self.instance_id, lease, sorted(unreadable_chunks), recomputed))

    def end(self, question: Question) -> None:
        """The request is over: the server forgets its tokens and every lease."""
        question.reply = None
        if question.told is not None and question.told is self.client.hello:
            message = EndSession(self.instance_id, question.request_id)
            unanswered = question.unanswered or question.pending is not None or question.appending is not None
            self._notices.send("end_session", message, twice=unanswered)

    def renamed(self, question: Question, identity: bytes) -> Question:
        """The same request under another name, not asked yet. What its session holds goes with the next question, or
        with the end of the request."""
        self.give_back(question)
        unanswered = question.unanswered or question.pending is not None or question.appending is not None
        return replace(
            question,
            identity=identity,
            hello=None,
            sent_tokens=0,
            unanswered=unanswered,
            pending=None,
            appending=None,
            given_up=False,
            hashes=b"",
        )

    def close(self) -> None:
        self._notices.close()
        self.client.close()
