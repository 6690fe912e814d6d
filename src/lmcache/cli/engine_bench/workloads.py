"""What is asked: the workloads by their names, made from a seed, so that the same settings send the same prompts."""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back parent face level office door health "
    "person art war history party result change morning reason research girl guy moment air teacher force education "
    "foot boy age policy music mind market death sense plan cost value field town road tree film river table street "
    "bank land light voice sound paper space ground form event letter picture stone glass rock ship bird fish horse "
    "dog cat rain snow wind fire gold iron wood oil salt sugar bread milk meat fruit green blue red black white brown "
    "small large long short high low old new good bad great early late young hard soft hot cold warm dark clear full "
    "open free true real whole strong simple local public private common final main major single double first last "
    "next same other many few more most some any each every both all half one two three four five six seven eight "
    "nine ten go come take make give find keep hold bring write read run move live stand lose pay meet set learn lead "
    "grow walk win teach buy send build stay fall cut reach sell raise pass serve call"
)
_WORDS = _TEXT.split()  # 256: a byte chooses one
_FIRST_ID = 3  # ids below are special tokens in most vocabularies
_KEPT_PIECES = 64
_ZIPF_EXPONENT = 1.0


@dataclass(frozen=True)
class Piece:
    """A part of a prompt: pieces of one name are the same text. `tokens` is its length in words or token ids."""

    name: str
    tokens: int


@dataclass(frozen=True)
class Turn:
    question: Piece
    label: str  # figures are given for each label


@dataclass(frozen=True)
class Session:
    """Turns that follow each other: each sends the opening, and all questions and answers before it."""

    opening: tuple[Piece, ...]
    turns: tuple[Turn, ...]
    due_seconds: float = 0.0  # when it was asked in a recorded trace


Stages = Sequence[Sequence[Session]]  # a stage begins when the one before it has ended


@dataclass(frozen=True)
class Shape:
    """The shape of a workload; 0 for what it does not have. `prefixes`: how many different openings; `prompt_tokens`:
    the length of each, or of a whole prompt."""

    requests: int
    prefixes: int
    prompt_tokens: int
    question_tokens: int
    turns: int
    output_tokens: int


@functools.lru_cache(maxsize=_KEPT_PIECES)
def text_of(piece: Piece) -> str:
    """Returns as many words as the piece has tokens, each a token or so in the usual vocabularies."""
    numbers = random.Random(piece.name).randbytes(piece.tokens)
    return " ".join(map(_WORDS.__getitem__, numbers))


@functools.lru_cache(maxsize=_KEPT_PIECES)
def ids_of(piece: Piece, vocabulary: int) -> tuple[int, ...]:
    """The same as token ids below `vocabulary`."""
    numbers = struct.unpack(f"<{piece.tokens}I", random.Random(piece.name).randbytes(4 * piece.tokens))
    return tuple(_FIRST_ID + number % (vocabulary - _FIRST_ID) for number in numbers)


def long_document_questions(shape: Shape, seed: int) -> Stages:
    """Each document is asked about once, then others in a random order: what comes again could be cached."""
    order = random.Random(f"{seed} order")
    documents = min(shape.prefixes, shape.requests)

    def ask(number: int, document: int, label: str) -> Session:
        opening = Piece(f"{seed} document {document}", shape.prompt_tokens)
        return Session((opening,), (Turn(Piece(f"{seed} question {number}", shape.question_tokens), label),))

    first = [ask(number, number, "first question") for number in range(documents)]
    later = [ask(number, order.randrange(documents), "later question") for number in range(documents, shape.requests)]
    return [first, later]


def multi_round_chat(shape: Shape, seed: int) -> Stages:
    """Conversations, each of several turns behind one of the system prompts; as many as give that many requests."""
    sessions = []
    for number in range(-(-shape.requests // shape.turns)):
        opening = Piece(f"{seed} system {number % shape.prefixes}", shape.prompt_tokens)
        questions = (
            Piece(f"{seed} conversation {number} turn {turn}", shape.question_tokens) for turn in range(shape.turns)
        )
        turns = tuple(Turn(question, f"turn {turn}") for turn, question in enumerate(questions, 1))
        sessions.append(Session((opening,), turns[: shape.requests - number * shape.turns]))
    return [sessions]


def random_prefill(shape: Shape, seed: int) -> Stages:
    """Prompts that share nothing."""
    return [
        [
            Session((), (Turn(Piece(f"{seed} prompt {number}", shape.prompt_tokens), "prefill"),))
            for number in range(shape.requests)
        ]
    ]


def shared_prefix_agents(shape: Shape, seed: int) -> Stages:
    """Agents with a long prompt each, and a short task behind it; how often each is asked follows Zipf's law."""
    choice = random.Random(f"{seed} order")
    weights = [1 / rank**_ZIPF_EXPONENT for rank in range(1, shape.prefixes + 1)]
    seen: set[int] = set()
    sessions = []
    for number, agent in enumerate(choice.choices(range(shape.prefixes), weights, k=shape.requests)):
        label = "prefix seen before" if agent in seen else "first of its prefix"
        seen.add(agent)
        opening = Piece(f"{seed} agent {agent}", shape.prompt_tokens)
        sessions.append(Session((opening,), (Turn(Piece(f"{seed} task {number}", shape.question_tokens), label),)))
    return [sessions]


@dataclass(frozen=True)
class Workload:
    make: Callable[[Shape, int], Stages]
    shape: Shape  # unless options say otherwise
    about: str


WORKLOADS: Mapping[str, Workload] = {
    "long-doc-qa": Workload(
        long_document_questions,
        Shape(40, 10, 8000, 64, 0, 64),
        "questions about long documents, each asked about again",
    ),
    "multi-round-chat": Workload(
        multi_round_chat, Shape(50, 1, 1000, 128, 5, 128), "conversations of several turns behind a system prompt"
    ),
    "random-prefill": Workload(
        random_prefill, Shape(50, 0, 8000, 0, 0, 1), "prompts that share nothing, one token each"
    ),
    "shared-prefix": Workload(
        shared_prefix_agents, Shape(100, 10, 4000, 256, 0, 128), "agents with a long prompt each, and short tasks"
    ),
}
TRACE = "trace"
TRACE_OUTPUT_TOKENS = 16


def of_trace(paths: Sequence[str], requests: int) -> Stages:
    """The prompts of a recorded trace, at most `requests` where that is above 0: they share what they shared then. Of
    a trace only hashes are known, and each stands for a piece of its own."""
    from lmcache.core.key_batch import ChunkHashes
    from lmcache.simulation.trace import read_trace

    lookups = [lookup for lookup in read_trace(paths) if lookup.chunks]
    begun = lookups[0].seconds if lookups else 0.0
    sessions = []
    for lookup in lookups[: requests or None]:
        pieces = [
            Piece(f"{lookup.cache_salt} {chunk.hex()}", lookup.chunk_tokens) for chunk in ChunkHashes(lookup.hashes)
        ]
        label = "hit when recorded" if lookup.hit_chunks else "missed when recorded"
        sessions.append(Session(tuple(pieces[:-1]), (Turn(pieces[-1], label),), lookup.seconds - begun))
    return [sessions]
