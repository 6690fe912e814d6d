"""`lmcache config adapter`: the types of L2 adapters, and the keys of one."""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from lmcache.cli.arguments import Arguments
from lmcache.cli.output import Report, write
from lmcache.config import unbuilt
from lmcache.config.struct_settings import Key, keys_of
from lmcache.config.values import Choice
from lmcache.l2.adapter_config import INTERNAL, AdapterConfig
from lmcache.l2.adapter_types import TYPES


def run(argv: Sequence[str]) -> int:
    arguments = Arguments("config adapter", "Lists the types of L2 adapters, or the keys of one, for --l2-adapter.")
    types = Choice(tuple(TYPES), unbuilt=unbuilt.ADAPTERS)
    arguments.add_value("type", types, "the adapter type", nargs="?", default=None)
    options = arguments.read(argv[1:])
    if options.format == "json":
        report = Report("Adapters")
        report.metrics = {
            name: {"about": about(adapter.config), "keys": [_as_json(key) for key in adapter_keys(adapter.config)]}
            for name, adapter in TYPES.items()
            if options.type in (None, name)
        }
        report.emit(options)
    elif options.type is None:
        write("".join(f"{name:<20}{about(adapter.config)}\n" for name, adapter in TYPES.items()), options)
    else:
        width = max(60, min(shutil.get_terminal_size().columns, 120))
        write(adapter_help(options.type, width), options)
    return 0


def adapter_keys(config: type[AdapterConfig]) -> list[Key]:
    """Those of the type first, then those of every type; in each part what is required comes first. `type` itself is
    left out, and what is inside an object follows it under a dotted name."""
    found: list[Key] = []
    for outer in sorted(keys_of(config, INTERNAL), key=lambda key: (is_common(key), not key.required)):
        if outer.name != "type":
            found.append(outer)
        if outer.nested is not None:
            found += [dataclasses.replace(key, name=f"{outer.name}.{key.name}") for key in keys_of(outer.nested)]
    return found


def is_common(key: Key) -> bool:
    """Whether every adapter has it."""
    return key.name.partition(".")[0] in AdapterConfig.__struct_fields__


def about(config: type[AdapterConfig]) -> str:
    return " ".join((config.__doc__ or "").split())


def default_text(key: Key) -> str:
    if key.required:
        return "required"
    return key.default_text or ("none" if key.default is None else json.dumps(key.default))


def adapter_help(name: str, width: int) -> str:
    """`width` in columns; lines are wrapped to it."""
    config = TYPES[name].config
    keys = adapter_keys(config)
    required = "".join(f', "{key.name}": ...' for key in keys if key.required and not is_common(key))
    lines = [f"""Usage: --l2-adapter '{{"type": "{name}"{required}}}'""", "", *textwrap.wrap(about(config), width)]
    for title, common in (("Keys", False), ("Keys of every adapter", True)):
        lines += ["", f"{title}:"]
        for key in keys:
            if is_common(key) is common:
                default = "Required" if key.required else f"Default: {default_text(key)}"
                text = f"{key.description}; {key.expected}. {default}."
                lines.append(f"  {key.name}")
                lines += textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"


def _as_json(key: Key) -> dict[str, Any]:
    return {
        "name": key.name,
        "must_be": key.expected,
        "required": key.required,
        "default": key.default,
        "about": key.description,
    }
