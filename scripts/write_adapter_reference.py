"""Writes docs/reference/adapters.md and serdes.md from the keys that adapters and serdes declare. --check: fails where
one is not current."""

from __future__ import annotations

import sys

from lmcache.cli.adapter_help import about, adapter_keys, default_text, is_common
from lmcache.config import unbuilt
from lmcache.config.struct_settings import Key, keys_of
from lmcache.l2.adapter_config import AdapterConfig
from lmcache.l2.adapter_types import TYPES
from lmcache.serde import registry
from lmcache.serde.base import SerdeConfig
from reference_pages import key_table, write_or_check

BEGINNING = """# L2 adapters

What `--l2-adapter` takes: a JSON object with the `type` and the keys below. Several are looked up in their order.
`lmcache config adapter TYPE` shows the same for one type, `lmcache config check` says what is wrong with one or could
be meant otherwise.

This page is made from the sources by `scripts/write_adapter_reference.py`.
"""

SERDES = """# Serdes

What the key `serde` of an L2 adapter takes: a JSON object with the `type` and the keys below, or a list of them in the
order of storing, such as `[{"type": "exponent"}, {"type": "plugin", "factory": "my_serdes:Sealed"}]`. L1 is never
encoded.

A serde costs processor time and saves bytes on the way. It is worth it where the backend is slower than about 2 GB/s
(S3, Redis, sockets, slow disks) or small; above that it makes loads slower. Objects of another serde are other objects:
after a change they are misses, and leave the backend as eviction finds them unused.

`exponent` and `zstd` change no answer. The lossy types do (docs/measurements.md): take `fp8` where another wording is
fine, and `cachegen` only after a trial with the model that is served.

This page is made from the sources by `scripts/write_adapter_reference.py`.
"""


def serde_page() -> str:
    parts = [SERDES]
    for name, serde in registry.TYPES.items():
        config: type[SerdeConfig] = serde.config
        own = [key for key in keys_of(config) if key.name not in SerdeConfig.__struct_fields__]
        parts += [f"## `{name}`\n", f"{' '.join((config.__doc__ or '').split())}\n", table(own)]
    parts += ["## Not built yet\n", "These types of the documents are refused by name.\n"]
    parts.append("\n".join(f"- `{name}`: {instead}" for name, instead in unbuilt.SERDES.items()) + "\n")
    return "\n".join(parts)


def page() -> str:
    parts = [BEGINNING, "## Every adapter\n", table(adapter_keys(AdapterConfig))]
    for name, adapter in TYPES.items():
        own = [key for key in adapter_keys(adapter.config) if not is_common(key)]
        parts += [f"## `{name}`\n", f"{about(adapter.config)}\n", table(own)]
    parts += ["## Not built yet\n", "These types of the documents are refused by name.\n"]
    parts.append("\n".join(f"- `{name}`: {instead}" for name, instead in unbuilt.ADAPTERS.items()) + "\n")
    return "\n".join(parts)


def table(keys: list[Key]) -> str:
    return key_table((f"`{key.name}`", key.expected, default_text(key), key.description) for key in keys)


if __name__ == "__main__":
    sys.exit(write_or_check({"adapters.md": page(), "serdes.md": serde_page()}))
