"""Checks of a server's options for `lmcache doctor`: what a start with them would meet on this machine."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache.cli.doctor_checks import NOTE, OK, PROBLEM, Verdict
from lmcache.config.spec import ServerConfig
from lmcache.errors import LMCacheError
from lmcache.l2.adapter_config import AdapterConfig

_REMEDIES = "`lmcache config check` takes the same options and says the same."


@dataclass(frozen=True)
class Configured:
    """What the options of a server are, as far as they could be read."""

    config: ServerConfig | None
    adapters: Sequence[AdapterConfig]
    verdict: Verdict


def configured(server_options: Sequence[str], environ: Mapping[str, str]) -> Configured:
    """Reads and checks them as `lmcache server` does before it takes anything: files, keys, certificates, the backends
    of adapters."""
    from lmcache.startup import open_secrets, plan, read

    config: ServerConfig | None = None
    adapters: Sequence[AdapterConfig] = ()
    try:
        loaded, adapters = read(server_options, environ)
        config = loaded.config
        planned = plan(server_options, environ)
        planned.discard()
    except LMCacheError as error:
        count = f"{len(error.problems)} {'problem' if len(error.problems) == 1 else 'problems'}"
        verdict = Verdict("options", PROBLEM, f"a server would not start: {count}", _REMEDIES, tuple(error.problems))
        return Configured(config, adapters, verdict)
    own = open_secrets(config)  # `secrets` says more of these
    if notes := tuple(note for note in planned.notes if note not in own):
        found = "a server would start, and perhaps do something else than is meant"
        return Configured(config, adapters, Verdict("options", NOTE, found, _REMEDIES, notes))
    return Configured(config, adapters, Verdict("options", OK, "a server would start"))


def secrets(config: ServerConfig, adapters: Sequence[AdapterConfig]) -> Iterator[Verdict]:
    """Files that must be read by nobody else. The CURVE key is refused at the start where others can."""
    files = {"--admin-token-file": config.admin_token_file, "--http-tls-key": config.http_tls_key}
    for adapter in adapters:
        for key in ("password_file", "tls_key"):
            files[f'{adapter.where}: "{key}"'] = str(getattr(adapter, key, ""))
    for name, path in files.items():
        if path and os.path.exists(path):
            yield _secret(name, Path(path))


def _secret(name: str, path: Path) -> Verdict:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o007:
        return Verdict(
            name, PROBLEM, f"everybody on this machine can use {path} (mode {mode:04o})", f"chmod 600 {path}."
        )
    if mode & 0o070:
        return Verdict(
            name, NOTE, f"a group can use {path} (mode {mode:04o})", f"chmod 600 {path}, unless that is meant."
        )
    return Verdict(name, OK, f"{path} is closed to others")


def folders(adapters: Sequence[AdapterConfig]) -> list[Path]:
    """Those of adapters that are there; a server makes the others."""
    return [Path(adapter.folder) for adapter in adapters if adapter.folder and os.path.isdir(adapter.folder)]
