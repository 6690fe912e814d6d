"""Asks an OpenAI-compatible server and times its streamed answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.cli.engine_bench.http_stream import Endpoint, RequestFailed
from lmcache.cli.engine_bench.workloads import Session, ids_of, text_of
from lmcache.errors import ConfigError

APIS = ("completions", "chat")
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_SAID = 160  # characters of what the server says
_BAD_REQUEST = 400
_MOST_TOKENS = 1 << 40
_NO_SUCH_JSON = "what came is not JSON as the OpenAI API has it"


@dataclass
class Outcome:
    """What became of one request. Times are seconds since it began, connecting included; where `error` is not empty
    they are those of what came before."""

    label: str
    sent_seconds: float = 0.0  # since the run began
    late_seconds: float = 0.0  # sent after it was due
    error: str = ""
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None
    total_seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between events of the stream that have tokens
    prompt_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Asking:
    """How requests are made. `vocabulary`: prompts are token ids below it; 0: text."""

    model: str
    api: str
    output_tokens: int
    vocabulary: int
    ignore_eos: bool


class Asker:
    def __init__(self, endpoint: Endpoint, asking: Asking) -> None:
        self._endpoint = endpoint
        self._asking = asking
        self._wants_usage = True

    async def ask(self, session: Session, turn: int, answers: Sequence[str], outcome: Outcome) -> None:
        """Fills `outcome`; what fails is in its `error`. `answers`: those of the turns before."""
        body = self._body(session, turn, answers)
        try:
            try:
                await self._stream(body, outcome)
            except RequestFailed as failed:
                if not (failed.status == _BAD_REQUEST and self._wants_usage and "stream_options" in failed.kind):
                    raise
                self._wants_usage = False  # an old server
                del body["stream_options"]
                await self._stream(body, outcome)
        except RequestFailed as failed:
            outcome.error = failed.kind

    async def _stream(self, body: dict[str, Any], outcome: Outcome) -> None:
        clock = asyncio.get_running_loop().time
        payload = json.dumps(body).encode()
        begun = clock()
        try:
            async with self._endpoint.connected() as connection:
                status = await connection.send("POST", _PATHS[self._asking.api], payload)
                if status != 200:
                    raise RequestFailed(said(status, await connection.whole()), status)
                ended = False
                async for data in connection.events():
                    if data == b"[DONE]":
                        ended = True
                        break
                    ended = self._taken(data, clock() - begun, outcome) or ended
                if not ended:
                    raise RequestFailed("the stream ended early")
        finally:
            outcome.total_seconds = clock() - begun

    def _taken(self, data: bytes, seconds: float, outcome: Outcome) -> bool:
        """Does what `_take` does. RequestFailed for an event of another form."""
        try:
            return self._take(_decoded(data), seconds, outcome)
        except (TypeError, AttributeError, ValueError):
            raise RequestFailed(_NO_SUCH_JSON) from None

    def _take(self, event: dict[str, Any], seconds: float, outcome: Outcome) -> bool:
        """Whether the event says that the answer is complete. Raises whatever comes of values of other types."""
        if event.get("error"):
            raise RequestFailed(f"the stream ended with an error: {_message(event)[:_SAID]}")
        ended = False
        for choice in event.get("choices") or ():
            ended = ended or choice.get("finish_reason") is not None
            text, has_tokens = self._text(choice)
            outcome.text += text
            if has_tokens:
                if outcome.first_token_seconds is None:
                    outcome.first_token_seconds = seconds
                else:
                    outcome.gaps.append(seconds - (outcome.last_token_seconds or 0.0))
                outcome.last_token_seconds = seconds
                outcome.output_tokens += 1
        if usage := event.get("usage"):
            outcome.prompt_tokens = _count(usage.get("prompt_tokens"))
            outcome.output_tokens = _count(usage.get("completion_tokens")) or outcome.output_tokens
            outcome.cached_tokens = _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        return ended

    def _text(self, choice: dict[str, Any]) -> tuple[str, bool]:
        """What it adds to the answer, and whether it has a token. One may decode to no text, and a last event may have
        none."""
        if self._asking.api == "completions":
            text = choice.get("text") or ""
            return text, bool(text) or choice.get("finish_reason") is None
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
        return text, bool(text or thought)

    def _body(self, session: Session, turn: int, answers: Sequence[str]) -> dict[str, Any]:
        asking = self._asking
        body: dict[str, Any] = {
            "model": asking.model,
            "max_tokens": asking.output_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self._wants_usage:
            body["stream_options"] = {"include_usage": True}
        if asking.ignore_eos:
            body["ignore_eos"] = True
        if asking.vocabulary:
            pieces = [*session.opening, session.turns[turn].question]
            body["prompt"] = [number for piece in pieces for number in ids_of(piece, asking.vocabulary)]
            return body
        opening = " ".join(text_of(piece) for piece in session.opening)
        questions = [text_of(asked.question) for asked in session.turns[: turn + 1]]
        if opening:
            questions[0] = f"{opening}\n\n{questions[0]}"
        if asking.api == "chat":
            messages = [{"role": "user", "content": questions[0]}]
            for answer, question in zip(answers, questions[1:], strict=True):
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
            body["messages"] = messages
        else:
            parts = [part for pair in zip(questions, answers, strict=False) for part in pair]
            body["prompt"] = "\n\n".join([*parts, questions[-1]])
        return body


async def models(endpoint: Endpoint) -> list[str]:
    """Those of GET /v1/models. ConfigError where the answer has none."""
    async with endpoint.connected() as connection:
        status = await connection.send("GET", "/v1/models")
        answer = await connection.whole()
    if status != 200:
        raise RequestFailed(said(status, answer), status)
    found = _decoded(answer).get("data")
    names = [model.get("id") for model in found if isinstance(model, dict)] if isinstance(found, list) else []
    if not (names := [name for name in names if isinstance(name, str) and name]):
        raise ConfigError(f"{endpoint.url} tells no model at /v1/models: give --model.")
    return names


def said(status: int, body: bytes) -> str:
    """A status, and what the server says to it."""
    try:
        message = _message(json.loads(body))
    except (ValueError, RecursionError):
        message = body.decode(errors="replace")
    return " ".join(f"HTTP {status}: {message}"[:_SAID].split())


def _message(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestFailed(_NO_SUCH_JSON)
    return found


def _count(value: object) -> int | None:
    """A number of tokens. ValueError where it is none."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST_TOKENS):
        raise ValueError
    return value
