"""`lmcache query`: which chunks of a prompt a running server has, and on which tiers; or the servers of its fleet."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcache.cli import query_fleet
from lmcache.cli.arguments import Arguments
from lmcache.cli.http import DEFAULT_URL, TOKEN_VARIABLE, HttpRefused, answer_of, request
from lmcache.cli.output import Report
from lmcache.errors import ConfigError, ResourceError

_PROMPTS = ("--tokens", "--tokens-file", "--text", "--text-file")
_NO_ENGINE = 409
_NOWHERE = "-"


def _arguments() -> Arguments:
    arguments = Arguments(
        "query",
        "Shows which chunks of a prompt a running server has, and on which tiers, without a lease and without being "
        "counted as a lookup; with --servers, the servers of its fleet and what they have. From another host the "
        f"server's admin token is needed, in {TOKEN_VARIABLE}.",
        [
            "lmcache query --tokens-file prompt.json",
            'lmcache query --model llama --text "Once upon a time" --tokenizer /models/llama',
            "lmcache query --tokens 1,15043,3186 --salt tenant-a --format json",
            "lmcache query --coordinator http://localhost:9300 --model llama --tokens-file prompt.json",
            "lmcache query --servers --coordinator http://localhost:9300",
        ],
    )
    arguments.add_argument("--tokens", default="", metavar="IDS", help="the prompt as token ids: 1,2,3 or a JSON list")
    arguments.add_argument(
        "--tokens-file", default="", metavar="FILE", help="the same in a file, separated by commas or space; - is stdin"
    )
    arguments.add_argument("--text", default="", metavar="TEXT", help="the prompt as text")
    arguments.add_argument("--text-file", default="", metavar="FILE", help="the same in a file; - is stdin")
    arguments.add_argument(
        "--tokenizer",
        default="",
        metavar="FOLDER",
        help="make tokens of the text here, with tokenizer.json of this folder; without it the server does, with "
        "--tokenizer-dir",
    )
    arguments.add_argument(
        "--model", default="", metavar="NAME", help="the model as its engine registered it (default: the only one)"
    )
    arguments.add_argument("--salt", default="", metavar="SALT", help="the cache salt of the requests")
    arguments.add_argument(
        "--instance-id", default="", metavar="ID", help="the engine whose layout counts, where several differ"
    )
    arguments.add_argument("--url", default=DEFAULT_URL, help="the server's HTTP address")
    arguments.add_argument(
        "--coordinator", default="", metavar="URL", help="ask the coordinator of a fleet instead, for all its servers"
    )
    arguments.add_argument(
        "--servers",
        action="store_true",
        help="list the servers of the fleet and their usage, as the server or the coordinator knows them",
    )
    arguments.add_whole("--world-size", 1, "ranks of the model, for --coordinator", minimum=1, maximum=1024)
    arguments.add_number("--timeout", 10.0, "give up after that long", unit="seconds", above=0)
    return arguments


def run(argv: Sequence[str]) -> int:
    arguments = _arguments()
    options = arguments.read(argv)
    if options.coordinator:
        arguments.refuse_unused(options, "--coordinator", "--url", "--instance-id")
    if options.servers:
        of_prompts = "--tokenizer", "--model", "--salt", "--instance-id", "--world-size"
        arguments.refuse_unused(options, "--servers", *_PROMPTS, *of_prompts)
        query_fleet.servers(options).emit(options)
        return 0
    if options.tokens or options.tokens_file:
        arguments.refuse_unused(options, "with tokens", "--tokenizer")
    if not options.coordinator:
        arguments.refuse_unused(options, "without --coordinator", "--world-size")
    body = _prompt(options)
    if options.coordinator:
        report_of(*query_fleet.ask(options, body)).emit(options)
        return 0
    body["model_name"] = options.model or _only_model(options)
    body |= {"cache_salt": options.salt, "instance_id": options.instance_id}
    try:
        answer = request(options.url, "POST", "/cache/lookup", body, timeout_seconds=options.timeout)
    except HttpRefused as error:
        if error.status != _NO_ENGINE:
            raise
        known = _models(options)
        raise ResourceError(
            f"No engine of the model {body['model_name']!r} is registered at {options.url}: "
            + (f"give --model {' or '.join(known)}." if known else "start one; only engines name their objects.")
        ) from None
    with answer_of(options.url):
        report = report_of(body, answer)
    report.emit(options)
    return 0


# ---- the prompt ------------------------------------------------------------------------------------------------------
def _given_prompts(options: argparse.Namespace) -> list[str]:
    return [name for name in _PROMPTS if getattr(options, name[2:].replace("-", "_"))]


def _prompt(options: argparse.Namespace) -> dict[str, Any]:
    """ "tokens" or "text" for the server."""
    given = _given_prompts(options)
    if len(given) != 1:
        raise ConfigError(
            f"lmcache query takes one prompt, got {' and '.join(given) or 'none'}: give one of {', '.join(_PROMPTS)}."
        )
    if options.tokens:
        return {"tokens": token_ids(options.tokens, "--tokens")}
    if options.tokens_file:
        return {"tokens": token_ids(_read("--tokens-file", options.tokens_file), options.tokens_file)}
    text = options.text or _read("--text-file", options.text_file)
    return {"tokens": _tokenized(text, options.tokenizer)} if options.tokenizer else {"text": text}


def _read(flag: str, path: str) -> str:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path} is not text in UTF-8.") from None
    if not text.strip():
        raise ConfigError(f"{flag} {path} is empty.")
    return text


def token_ids(text: str, source: str) -> list[int]:
    """Whole numbers from 0 on, separated by commas or space, in brackets or not."""
    words = [word for word in re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]")) if word]
    wrong = next((word for word in words if not (word.isascii() and word.isdigit())), None)
    if wrong is not None or not words:
        got = "none" if wrong is None else repr(wrong[:40])
        raise ConfigError(f"{source} must have token ids like 1,15043,3186, got {got}; --text takes text.")
    return [int(word) for word in words]


def _tokenized(text: str, folder: str) -> list[int]:
    from lmcache.admin.tokenizers import load_tokenizer

    path = Path(folder) / "tokenizer.json" if Path(folder).is_dir() else Path(folder)
    if not path.is_file():
        raise ConfigError(f"--tokenizer {folder} must be a folder with tokenizer.json, as models bring one.")
    return list(load_tokenizer(path, "--tokenizer").encode(text).ids)


def _only_model(options: argparse.Namespace) -> str:
    known = _models(options)
    if len(known) != 1:
        raise ConfigError(
            f"lmcache query needs --model: the engines at {options.url} have {' and '.join(known)}."
            if known
            else f"No engine is registered at {options.url}, and only engines name their objects: start one first."
        )
    return known[0]


def _models(options: argparse.Namespace) -> list[str]:
    status = request(options.url, "GET", "/status", timeout_seconds=options.timeout)
    with answer_of(options.url):
        return sorted({instance["model_name"] for instance in status["instances"] if instance["model_name"]})


# ---- the answer ------------------------------------------------------------------------------------------------------
def report_of(body: Mapping[str, Any], answer: Mapping[str, Any]) -> Report:
    """The report of the request and the answer of POST /cache/lookup."""
    chunk_tokens, chunks, prefix = answer["chunk_tokens"], answer["chunks"], answer["prefix_chunks"]
    report = Report("Query")
    report.add("model_name", "Model", body["model_name"])
    report.add("cache_salt", "Cache salt", body["cache_salt"], body["cache_salt"] or "(none)")
    if "tokens" in body:
        report.add("tokens", "Tokens", len(body["tokens"]))
    report.add("chunk_tokens", "Tokens a chunk", chunk_tokens)
    report.add("chunks", "Full chunks", len(chunks))
    hit_tokens = prefix * chunk_tokens
    report.add("prefix_chunks", "An engine finds", prefix, f"{prefix} of {len(chunks)} chunks, {hit_tokens} tokens")
    report.metrics["hit_tokens"] = hit_tokens
    tiers = sorted({tier for chunk in chunks for tier in chunk["tiers"]}, key=lambda tier: (tier != "l1", tier))
    counts = {tier: sum(tier in chunk["tiers"] for chunk in chunks) for tier in tiers}
    report.metrics["tiers"] = counts
    for tier, count in counts.items():
        report.text(f"{f'On {tier}:':<30}{f'{count} chunks':>34}")
    ranges = [_range(first, list(group), chunk_tokens) for first, group in _runs(chunks)]
    report.metrics |= {"ranges": ranges, "hashes": [chunk["hash"] for chunk in chunks]}
    if chunks:
        report.section("chunks")
        report.table(("chunks", "tokens", "where"), [_row(part) for part in ranges])
    else:
        report.text(f"The prompt is shorter than a chunk of {chunk_tokens} tokens.")
    partials = [partial for partial in answer.get("partial_chunks", ()) if partial["tiers"]]
    report.metrics["partial_chunks"] = partials
    for partial in partials:
        report.text(f"A partial chunk of {partial['tokens']} tokens is behind them: {', '.join(partial['tiers'])}")
    return report


def _runs(chunks: Sequence[Mapping[str, Any]]) -> Iterable[tuple[int, Iterable[Mapping[str, Any]]]]:
    """(number of the first, chunks) of those in a row that are on the same tiers."""
    first = 0
    for _, group in itertools.groupby(chunks, key=lambda chunk: chunk["tiers"]):
        run = list(group)
        yield first, run
        first += len(run)


def _range(first: int, run: Sequence[Mapping[str, Any]], chunk_tokens: int) -> dict[str, Any]:
    return {
        "first_chunk": first,
        "chunks": len(run),
        "first_token": first * chunk_tokens,
        "tokens": len(run) * chunk_tokens,
        "tiers": run[0]["tiers"],
    }


def _row(part: Mapping[str, Any]) -> tuple[str, str, str]:
    def span(start: int, count: int) -> str:
        return str(start) if count == 1 else f"{start}-{start + count - 1}"

    return (
        span(part["first_chunk"], part["chunks"]),
        span(part["first_token"], part["tokens"]),
        ", ".join(part["tiers"]) or _NOWHERE,
    )
