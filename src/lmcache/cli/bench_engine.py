"""`lmcache bench engine`: measures any OpenAI-compatible server under workloads that reuse prompts, or do not."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache.cli.arguments import Arguments
from lmcache.cli.engine_bench.completion_client import APIS, Asker, Asking, Outcome, models
from lmcache.cli.engine_bench.figures import (
    comparison,
    each_request,
    read_result,
    report_of,
    summary,
)
from lmcache.cli.engine_bench.http_stream import Endpoint, RequestFailed
from lmcache.cli.engine_bench.load_generator import Load, Measured, Pace, end
from lmcache.cli.engine_bench.workloads import (
    TRACE,
    TRACE_OUTPUT_TOKENS,
    WORKLOADS,
    Piece,
    Session,
    Shape,
    Stages,
    Turn,
    of_trace,
)
from lmcache.cli.http import ENGINE_KEY_VARIABLE, ENGINE_URL
from lmcache.cli.output import write_file
from lmcache.config.values import Choice, Number, Whole
from lmcache.errors import ConfigError, ServerUnavailable

_CONCURRENCY = 8
_OPEN_CONCURRENCY = 256  # where requests begin at their own times
_INTERRUPTED = 130


def run(argv: Sequence[str]) -> int:
    arguments = _arguments()
    options = arguments.read(argv[1:])
    if options.compare:
        return _compare(options)
    shape = _shape(options)
    stages = _stages(options, shape)
    endpoint = Endpoint(options.url, options.timeout, _headers(options))
    try:
        model, measured = asyncio.run(_measure(endpoint, options, shape, stages))
    except RequestFailed as failed:
        raise ServerUnavailable(
            f"{options.url} cannot be measured, its first request failed: {failed.kind}. Is an engine running there, "
            f"and are --model, --api and the key in {ENGINE_KEY_VARIABLE} right?"
        ) from None
    figures = summary(measured)
    result = {
        "settings": _settings(options, model, shape),
        "figures": figures,
        "requests": each_request(measured.outcomes),
    }
    report = report_of(result)
    if options.save:
        write_file(options.save, report.render("json"), "--save")
    report.emit(options)
    if options.plot and figures["completed"]:
        _plot(options, {"": result})
    if measured.interrupted:
        return _INTERRUPTED
    return 1 if measured.stopped or figures["failed"] else 0


def _arguments() -> Arguments:
    arguments = Arguments(
        "bench engine",
        "Sends a workload to any OpenAI-compatible server and prints time to first token, time between tokens, "
        "throughput and cached tokens. The same settings and seed send the same prompts, so a second run hits what "
        "the first one stored; another --seed begins anew. Workloads: "
        + "; ".join(f"{name}: {workload.about}" for name, workload in WORKLOADS.items())
        + f"; {TRACE}: the prompts of a file of lmcache trace record, made up, that share what they shared then.",
        [
            "lmcache bench engine --workload long-doc-qa --prefixes 20 --requests 100 --save with.json",
            "lmcache bench engine --workload multi-round-chat --concurrency 16 --turns 8",
            "lmcache bench engine --workload random-prefill --rate 2 --timeout 60",
            "lmcache bench engine --workload trace --trace monday.jsonl --speed 1",
            "lmcache bench engine --compare without.json with.json --plot plots",
        ],
    )
    arguments.add_value("--workload", Choice((*WORKLOADS, TRACE)), "what is asked", default="long-doc-qa")
    arguments.add_argument("--url", default=ENGINE_URL, help="HTTP address of the engine")
    arguments.add_argument("--model", default="", metavar="NAME", help="default: the first of GET /v1/models")
    arguments.add_value(
        "--api", Choice(APIS), "the path of requests: /v1/completions or /v1/chat/completions", default="completions"
    )
    arguments.add_argument(
        "--api-key-file", default="", metavar="FILE", help=f"default: the key in {ENGINE_KEY_VARIABLE}"
    )
    for name, help in (
        ("requests", "how many are sent; of a trace: at most"),
        ("prefixes", "how many different documents, system prompts or agents there are"),
        ("prompt-tokens", "length of each of these, or of a random prompt"),
        ("question-tokens", "length of what differs behind it"),
        ("turns", "requests of a conversation"),
        ("output-tokens", "length of answers, at most"),
    ):
        arguments.add_value(f"--{name}", Whole(minimum=1), f"{help} (default: {_defaults(name)})", default=None)
    arguments.add_argument(
        "--trace", nargs="+", default=[], metavar="FILE", help="files of --workload trace, or folders"
    )
    arguments.add_value(
        "--concurrency",
        Whole(minimum=1, maximum=4096),
        f"requests under way at once, at most (default: {_CONCURRENCY}; with --rate or --speed {_OPEN_CONCURRENCY})",
        default=None,
    )
    arguments.add_value(
        "--rate",
        Number("requests a second", minimum=0, shown_as="PER_SECOND"),
        "send at random (Poisson) times instead; 0: the next begins when one ends",
        default=0.0,
    )
    arguments.add_number("--speed", 0.0, "send a trace at so many times the recorded pace", minimum=0)
    arguments.add_whole("--seed", 1, "of prompts, order and times", minimum=0)
    arguments.add_whole("--token-ids", 0, "send token ids below that number instead of words (vLLM, SGLang)", minimum=0)
    arguments.add_argument("--ignore-eos", action="store_true", help="answers have full length (vLLM, SGLang)")
    arguments.add_number(
        "--timeout", 120.0, "a request fails when nothing comes for that long", unit="seconds", above=0
    )
    arguments.add_number("--max-seconds", 3600.0, "the run ends after that long", unit="seconds", above=0)
    arguments.add_argument("--save", default="", metavar="FILE", help="keep the result as JSON, for --compare")
    arguments.add_argument("--plot", default="", metavar="FOLDER", help="draw times to first token as SVG files")
    arguments.add_argument(
        "--compare", nargs=2, default=[], metavar="FILE", help="measure nothing: show two saved results side by side"
    )
    return arguments


def _defaults(option: str) -> str:
    """Those of the workloads, for help."""
    values = {name: getattr(workload.shape, option.replace("-", "_")) for name, workload in WORKLOADS.items()}
    return ", ".join(f"{name} {value}" for name, value in values.items() if value)


# ---- what is asked ---------------------------------------------------------------------------------------------------
def _shape(options: argparse.Namespace) -> Shape:
    """ConfigError for options that do not go together."""
    given = {name: value for name in _shape_names() if (value := getattr(options, name)) is not None}
    if (options.workload == TRACE) != bool(options.trace):
        raise ConfigError("--workload trace and --trace FILE need each other: give both or none.")
    if options.speed and options.workload != TRACE:
        raise ConfigError("--speed is the pace of a recorded trace: give --rate, or --workload trace.")
    if options.speed and options.rate:
        raise ConfigError("--speed keeps recorded times and --rate makes up others: give one of them.")
    usual = (
        Shape(0, 0, 0, 0, 0, TRACE_OUTPUT_TOKENS) if options.workload == TRACE else WORKLOADS[options.workload].shape
    )
    allowed = {"requests"} | {name for name, value in dataclasses.asdict(usual).items() if value}
    if others := sorted(given.keys() - allowed):
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ConfigError(f"--workload {options.workload} has no use for {flags}: leave out what it does not have.")
    shape = dataclasses.replace(usual, **given)
    if options.token_ids and (options.api == "chat" or shape.turns > 1):
        raise ConfigError("--token-ids needs --api completions and requests of one turn; leave it out to send words.")
    return shape


def _shape_names() -> list[str]:
    return [field.name for field in dataclasses.fields(Shape)]


def _stages(options: argparse.Namespace, shape: Shape) -> Stages:
    if options.workload != TRACE:
        return WORKLOADS[options.workload].make(shape, options.seed)
    stages = of_trace(options.trace, shape.requests)
    if not any(stages):
        raise ConfigError("The trace has no lookup of a full chunk.")
    return stages


def _headers(options: argparse.Namespace) -> dict[str, str]:
    key = os.environ.get(ENGINE_KEY_VARIABLE, "")
    if options.api_key_file:
        try:
            key = Path(options.api_key_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ConfigError(f"--api-key-file {options.api_key_file} cannot be read: {reason}.") from None
    key = key.strip()
    if not key.isprintable() or not key.isascii():
        raise ConfigError(f"The key in {options.api_key_file or ENGINE_KEY_VARIABLE} must be one line of ASCII.")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _settings(options: argparse.Namespace, model: str, shape: Shape) -> dict[str, Any]:
    kept = ("workload", "url", "api", "rate", "speed", "seed", "token_ids", "ignore_eos", "trace")
    return {
        **{name: getattr(options, name) for name in kept},
        "model": model,
        "concurrency": _concurrency(options),
        **dataclasses.asdict(shape),
    }


def _concurrency(options: argparse.Namespace) -> int:
    return int(options.concurrency or (_OPEN_CONCURRENCY if options.rate or options.speed else _CONCURRENCY))


# ---- measuring -------------------------------------------------------------------------------------------------------
async def _measure(
    endpoint: Endpoint, options: argparse.Namespace, shape: Shape, stages: Stages
) -> tuple[str, Measured]:
    """The model, and what came of it. RequestFailed where not even a short request is answered."""
    asking = asyncio.ensure_future(_first_answer(endpoint, options, shape))
    try:
        if not (await asyncio.wait({asking}, timeout=options.max_seconds))[0]:
            raise RequestFailed(f"its answer took longer than --max-seconds {options.max_seconds:g}")
    finally:
        await end(asking)
    model, asker = asking.result()
    pace = Pace(_concurrency(options), options.rate, options.speed, options.max_seconds, options.seed)
    shows = sys.stderr.isatty() and not options.quiet
    measured = await Load(asker, pace, _show_progress if shows else _show_nothing).run(stages)
    if shows:
        print(file=sys.stderr)
    return model, measured


async def _first_answer(endpoint: Endpoint, options: argparse.Namespace, shape: Shape) -> tuple[str, Asker]:
    """The model, and what asks it. RequestFailed where a short request is not answered."""
    model = options.model or (await models(endpoint))[0]
    asker = Asker(endpoint, Asking(model, options.api, shape.output_tokens, options.token_ids, options.ignore_eos))
    outcome = Outcome("")
    await asker.ask(Session((), (Turn(Piece(f"{options.seed} first", 4), ""),)), 0, [], outcome)
    if outcome.error:
        raise RequestFailed(outcome.error)
    return model, asker


def _show_progress(done: int, planned: int) -> None:
    print(f"\r{done} of {planned} requests", end="", file=sys.stderr, flush=True)


def _show_nothing(done: int, planned: int) -> None:
    pass


# ---- results ---------------------------------------------------------------------------------------------------------
def _compare(options: argparse.Namespace) -> int:
    results = [read_result(path) for path in options.compare]
    comparison(options.compare, results).emit(options)
    if options.plot:
        stems = [Path(path).stem for path in options.compare]
        names = stems if len(set(stems)) > 1 else [f"{number} {stem}" for number, stem in enumerate(stems, 1)]
        _plot(options, dict(zip(names, results, strict=True)))
    return 0


def _plot(options: argparse.Namespace, runs: dict[str, Any]) -> None:
    from lmcache.cli.engine_bench.plots import draw_all

    files = draw_all(options.plot, runs)
    if not options.quiet:
        print(f"lmcache: plots are in {' and '.join(map(str, files))}", file=sys.stderr)
