"""`lmcache`: finds the command, runs it, and turns every error into one sentence and an exit code."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from lmcache.config import unbuilt
from lmcache.errors import ConfigError, LMCacheError
from lmcache.telemetry.logs import LEVEL_VARIABLE, configure_logs, level_from

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

# Command -> (module with run(argv) -> exit code, what it does). A module is imported only when its command is run.
COMMANDS: dict[str, tuple[str, str]] = {
    "server": ("lmcache.cli.server", "start the cache server"),
    "coordinator": ("lmcache.cli.coordinator", "start the coordinator of many servers"),
    "config check": ("lmcache.cli.config", "check server options without starting anything"),
    "config show": ("lmcache.cli.config", "print the server options that result from flags, environment and file"),
    "config adapter": ("lmcache.cli.adapter_help", "the types of L2 adapters, and the keys of one"),
    "completion": ("lmcache.cli.completion", "what makes bash, zsh or fish complete these commands"),
    "keygen": ("lmcache.cli.keygen", "make a pair of CURVE keys for a server or an engine"),
    "ping": ("lmcache.cli.ping", "is a server (or an engine) alive?"),
    "describe": ("lmcache.cli.describe", "what a running server, or an engine, holds and does"),
    "top": ("lmcache.cli.top", "what a running server does, live"),
    "query": ("lmcache.cli.query", "which chunks of a prompt a running server has, and where"),
    "kvcache clear": ("lmcache.cli.kvcache", "remove what a running server has cached"),
    "quota set": ("lmcache.cli.quota", "set how much of L1 a cache salt may keep"),
    "quota get": ("lmcache.cli.quota", "the quota of one cache salt, and what it takes"),
    "quota list": ("lmcache.cli.quota", "all quotas"),
    "quota delete": ("lmcache.cli.quota", "remove the quota of a cache salt"),
    "tool cache-simulator": ("lmcache.cli.cache_simulator", "hit rate against size, for each eviction policy"),
    "trace record": ("lmcache.cli.trace", "keep the lookups of a server, hashes only"),
    "trace info": ("lmcache.cli.trace", "what a trace has"),
    "trace replay": ("lmcache.cli.trace", "ask a real server of other options for the prompts of a trace"),
    "doctor": ("lmcache.cli.doctor", "can this machine run the server and its engines well?"),
    "demo": ("lmcache.cli.demo", "a real vLLM on CPU, cold against cached, in one table"),
    "bench engine": ("lmcache.cli.bench_engine", "measure an OpenAI-compatible engine under a workload"),
    "bench server": ("lmcache.cli.bench_server", "measure calls and copies against a server"),
    "bench l2": ("lmcache.cli.bench_l2", "measure one L2 adapter beside plain reads and writes"),
}

_GLOBAL_WITH_VALUE = ("--format", "--output")
_GLOBAL = ("--quiet", "-q")


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    return guarded(lambda: dispatch(words), as_json=_asks_for_json(words))


def _asks_for_json(words: list[str]) -> bool:
    """Decided from the raw words, because errors of parsing are printed in this form as well."""
    return "--format=json" in words or ("--format", "json") in itertools.pairwise(words)


def guarded(command: Callable[[], int], environ: Mapping[str, str] = os.environ, *, as_json: bool = False) -> int:
    """The root of every command: turns each exception into an exit code; the stack is printed at DEBUG only."""

    def failed(error: Exception, exit_code: int) -> int:
        return _failed(error, exit_code, environ, as_json)

    try:
        level_from(environ)
        return command()
    except ConfigError as error:
        return failed(error, EXIT_USAGE)
    except LMCacheError as error:
        return failed(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of stdout has closed it
        return EXIT_FAILED
    except Exception as error:
        return failed(error, EXIT_FAILED)


def _failed(error: Exception, exit_code: int, environ: Mapping[str, str], as_json: bool) -> int:
    """A line for each problem, or one JSON object with all of them, on stderr."""
    if environ.get(LEVEL_VARIABLE, "").upper() == "DEBUG":
        import traceback

        traceback.print_exception(error)
    if isinstance(error, LMCacheError):
        problems = [_sentence(problem) for problem in error.problems]
    else:
        about = f"unexpected {type(error).__name__}: {' '.join(str(error).split())}"
        problems = [_sentence(f"{about} ({LEVEL_VARIABLE}=DEBUG shows where)")]
    if as_json:
        import json

        _say(json.dumps({"error": " ".join(problems), "problems": problems}))
        return exit_code
    from lmcache.cli.output import printable

    for problem in map(printable, problems):
        _say(problem if problem.startswith("lmcache ") else f"lmcache: {problem}")
    return exit_code


def _say(line: str) -> None:
    """One write: print() writes the newline by itself where stderr is unbuffered, and a log line may come between."""
    if sys.stderr:  # None: started with 2>&-
        sys.stderr.write(line + "\n")


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "?")) else text + "."


def dispatch(argv: list[str]) -> int:
    leading, rest = _split_global(argv)
    if not rest or rest[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return EXIT_OK if rest else EXIT_USAGE
    if rest[0] in ("--version", "-V"):
        from lmcache import __version__

        print(f"lmcache {__version__}")
        return EXIT_OK
    words = _command_words(rest)
    if not words:
        print(_help(rest[0] + " "), end="")
        return EXIT_OK
    if words not in (["server"], ["coordinator"]):  # a command reports by itself; logs are shown at DEBUG only
        configure_logs("DEBUG" if level_from(os.environ) == "DEBUG" else "CRITICAL")
    # The first argument tells a module that serves several commands which one it is.
    run: Callable[[Sequence[str]], int] = module_of(" ".join(words)).run
    return run([*words[1:], *rest[len(words) :], *leading])


def module_of(command: str) -> ModuleType:
    """ConfigError where a part of the package that the command needs was left out."""
    try:
        return importlib.import_module(COMMANDS[command][0])
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("lmcache."):
            raise
        raise ConfigError(
            f"lmcache {command} needs {error.name}, which is not installed here; install the whole package."
        ) from None


def _split_global(argv: list[str]) -> tuple[list[str], list[str]]:
    """Moves options that precede the command behind it, where every command reads them."""
    leading: list[str] = []
    rest = list(argv)
    while rest:
        name = rest[0].partition("=")[0]
        if name in _GLOBAL_WITH_VALUE and "=" not in rest[0]:
            if len(rest) == 1:
                raise ConfigError(f"{name} needs a value, and then a command; lmcache --help lists them.")
            leading += rest[:2]
            del rest[:2]
        elif name in (*_GLOBAL_WITH_VALUE, *_GLOBAL):
            leading.append(rest.pop(0))
        else:
            break
    return leading, rest


def _command_words(rest: list[str]) -> list[str]:
    """The one or two leading words of `rest` that name a command; none for `lmcache WORD --help`."""
    for count in (2, 1):
        words = rest[:count]
        name = " ".join(words)
        if len(words) == count and name in COMMANDS:
            return words
        if len(words) == count and name in unbuilt.COMMANDS:
            raise ConfigError(f"There is no lmcache {name}: {unbuilt.COMMANDS[name]}.")
    inside = [name for name in COMMANDS if name.startswith(rest[0] + " ")]
    if inside:
        if len(rest) > 1 and rest[1] in ("-h", "--help"):
            return []
        asked = f"lmcache {rest[0]} has no {rest[1]!r}" if len(rest) > 1 else f"lmcache {rest[0]} needs one more word"
        raise ConfigError(f"{asked}: {' or '.join('lmcache ' + name for name in inside)}.")
    from lmcache.config.values import did_you_mean

    guess = did_you_mean(rest[0], sorted({name.split()[0] for name in (*COMMANDS, *unbuilt.COMMANDS)}))
    raise ConfigError(f"{rest[0]!r} is not a command{guess or '; lmcache --help lists them.'}")


def _help(beginning: str = "") -> str:
    """Lists the commands whose name starts with `beginning`."""
    lines = [
        f"Usage: lmcache {beginning}COMMAND [options]",
        "",
        "A KV cache server for LLM inference engines.",
        "",
        "Commands:",
    ]
    lines += [f"  {name:<22}{text}" for name, (_, text) in COMMANDS.items() if name.startswith(beginning)]
    lines += [
        "",
        "Options of every command (lmcache server has no results, and no --output):",
        "  --help                    what the command takes, with defaults and units",
        "  --format {terminal,json}  how results and errors are printed (default: terminal)",
        "  --output FILE             write results to a file instead",
        "  --quiet, -q               print no results; the exit code tells",
        "  --version                 print the version",
        "",
        f"Exit codes: 0 done, 1 failed, 2 wrong usage. {LEVEL_VARIABLE}=DEBUG shows where a fault came from.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
