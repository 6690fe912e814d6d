"""The text of `lmcache server --help`, made from the options."""

from __future__ import annotations

import dataclasses
import textwrap

from lmcache.config.spec import Option, flag, options
from lmcache.config.values import Switch

_INDENT = 4
_OTHERS = (
    ("File", "--config FILE", "YAML with the options above as keys."),
    ("Output", "--quiet, -q", "do not print the line that says that the server is ready."),
    ("Errors", "--format {terminal,json}", "how refused options are printed on stderr. Default: terminal."),
)
_END = """
Every option can also come from the environment (--l1-size-gb as LMCACHE_L1_SIZE_GB) and from the file of --config
(l1_size_gb: 20). Flags win over the environment, the environment over the file. LMCACHE_LOG_LEVEL is DEBUG, INFO
(default), WARNING or ERROR. Exit codes: 0 stopped as asked; 1 the machine refused, or something hung at the end; 2 the
options were refused; 128 and its number for a second signal, which ends the server at once; the same signal again
within 0.5 s is no second one.
"""


def server_help(width: int) -> str:
    """`width` in columns; lines are wrapped to it."""
    width = max(60, min(width, 120))
    required = " ".join(
        _usage(name, option, default) for name, (option, default) in options().items() if default is dataclasses.MISSING
    )
    lines = [f"Usage: lmcache server {required} [options]", ""]
    lines.append("Starts the cache server and serves until SIGTERM, SIGINT or SIGHUP.")
    group = ""
    for name, (option, default) in options().items():
        if option.group != group:
            group = option.group
            lines += ["", f"{group}:"]
        lines.append("  " + _usage(name, option, default))
        lines += textwrap.wrap(
            _explanation(option, default), width, initial_indent=" " * _INDENT * 2, subsequent_indent=" " * _INDENT * 2
        )
    for title, usage, about in _OTHERS:
        lines += ["", f"{title}:", f"  {usage}", " " * _INDENT * 2 + about]
    return "\n".join(lines) + "\n" + _END


def _usage(name: str, option: Option, default: object) -> str:
    if isinstance(option.kind, Switch):
        return f"{flag(name)} / --no-{flag(name)[2:]}" if default is True else flag(name)
    return f"{flag(name)} {option.kind.placeholder}"


def _explanation(option: Option, default: object) -> str:
    if option.unbuilt:
        return f"{option.help}. Not built yet: {option.unbuilt}."
    if default is dataclasses.MISSING:
        return f"{option.help}. Required."
    return f"{option.help}. Default: {option.default_text or option.kind.show(default)}."
