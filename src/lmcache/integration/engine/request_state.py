"""The states of one request towards the cache, and the transitions between them.

    IDLE -> LOOKING_UP -> ANSWERED -> LOADING -> IDLE      a hit; preempted, the request is looked up again
                |             |          |
                |             +-> IDLE   +-> RECOMPUTING   computed instead; a load that failed
                +-> LATE -> RECOMPUTING                    the server does not answer
                +-> RECOMPUTING                            the lookup failed

In RECOMPUTING no hit is used any more, but what the engine computes is stored as in every other state. Every state but
LOADING leads to ENDED; a request that ends while it is LOADING is ENDING until the workers have reported.
"""

from __future__ import annotations

import enum


class RequestState(enum.Enum):
    IDLE = "idle"  # nothing is asked, and no answer is held
    LOOKING_UP = "looking up"  # the engine waits for the answer of a lookup
    ANSWERED = "answered"  # an answer is held, with its lease, until the engine has allocated blocks
    LOADING = "loading"  # workers copy the hit into the engine's blocks
    LATE = "late"  # a lookup is under way that nobody waits for; its chunk hashes are still taken
    RECOMPUTING = "recomputing"  # no hit is used any more
    ENDING = "ending"  # the engine has ended the request, and workers still copy
    ENDED = "ended"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is Python code, and states change often


_S = RequestState
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    _S.IDLE: frozenset({_S.LOOKING_UP, _S.ENDED}),
    _S.LOOKING_UP: frozenset({_S.ANSWERED, _S.LATE, _S.RECOMPUTING, _S.IDLE, _S.ENDED}),
    _S.ANSWERED: frozenset({_S.LOADING, _S.IDLE, _S.ENDED}),
    _S.LOADING: frozenset({_S.IDLE, _S.RECOMPUTING, _S.ENDING}),
    _S.LATE: frozenset({_S.RECOMPUTING, _S.IDLE, _S.ENDED}),
    _S.RECOMPUTING: frozenset({_S.IDLE, _S.ENDED}),  # IDLE: by a reset, which gives the request another name
    _S.ENDING: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}


class InvalidTransition(Exception):
    """A transition that is not in the table: a mistake in the connector. The request goes on uncached."""

    def __init__(self, request_id: str, state: RequestState, wanted: RequestState) -> None:
        super().__init__(f"request {request_id} cannot go from {state.value} to {wanted.value}")


class RequestStateMachine:
    """The state of one request. Not thread-safe."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.state = RequestState.IDLE

    def move(self, wanted: RequestState) -> None:
        """InvalidTransition when the table does not allow it; the state is then unchanged."""
        if wanted not in TRANSITIONS[self.state]:
            raise InvalidTransition(self.request_id, self.state, wanted)
        self.state = wanted

    def recompute(self) -> None:
        """After a fault: no hit is used any more. A load that runs still has to end."""
        if self.state not in (RequestState.LOADING, RequestState.ENDING, RequestState.ENDED):
            self.state = RequestState.RECOMPUTING
