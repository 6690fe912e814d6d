"""The clients that a CURVE server lets in: a folder with a public key each, read again when something changes there.

`NAME.pub` has the key of a client. `NAME.salts` beside it, if it is there, has the cache salts that this client may
name, one a line, `_default` for the empty salt; a client without that file may name every salt. Where the file goes
away under a server, its client has to stay out until `NAME.pub` is written anew: nobody gets every salt by a mistake.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nacl import bindings

from lmcache.core.file_version import version_at
from lmcache.core.key import DEFAULT_SALT
from lmcache.core.limits import MAX_CURVE_CLIENTS, MAX_NAME_BYTES
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError, LMCacheError
from lmcache.transport.curve_keys import (
    PUBLIC_SUFFIX,
    SALTS_SUFFIX,
    read_public_key,
    read_secret_key,
    refuse_open_to_others,
)

log = logging.getLogger("lmcache.transport")

_LOOK_SECONDS = 1.0
_MAX_SALTS_BYTES = 1 << 20


@dataclass(frozen=True)
class CurveClient:
    """`salts`: those that it may name, None for all."""

    name: str
    public_key: bytes
    salts: frozenset[str] | None


@dataclass(frozen=True)
class CurveAccess:
    """What a handshake is checked against."""

    server_secret: bytes
    server_public: bytes
    clients: Mapping[bytes, CurveClient]  # by public key


def read_access(server_key_file: str, clients_folder: str) -> tuple[CurveAccess, list[str]]:
    """What the files say, and a sentence for each client that is left out because of its files. ConfigError where the
    server's own key or the folder cannot be used."""
    secret = read_secret_key(server_key_file)
    try:
        names = sorted(os.listdir(clients_folder))
        refuse_open_to_others(clients_folder, os.stat(clients_folder), secret=False)
    except OSError as error:
        raise ConfigError(
            f"--zmq-curve-client-keys-dir {clients_folder} cannot be read: {error.strerror}; make the folder, and put "
            "the public key of each engine there as NAME.pub."
        ) from None
    keys = [Path(clients_folder, name) for name in names if name.endswith(PUBLIC_SUFFIX) and not name.startswith(".")]
    if len(keys) > MAX_CURVE_CLIENTS:
        raise ConfigError(f"--zmq-curve-client-keys-dir {clients_folder} has more than {MAX_CURVE_CLIENTS} keys.")
    clients: dict[bytes, CurveClient] = {}
    problems = Problems()
    for path in keys:
        with problems.collect():
            client = CurveClient(path.name.removesuffix(PUBLIC_SUFFIX), read_public_key(str(path)), _salts(path))
            if client.public_key in clients:
                raise ConfigError(
                    f"{path} has the key of {clients[client.public_key].name}{PUBLIC_SUFFIX}, too; keep one of them."
                )
            clients[client.public_key] = client
    return CurveAccess(secret, bindings.crypto_scalarmult_base(secret), clients), problems.found


def _salts(public_key: Path) -> frozenset[str] | None:
    """ConfigError for a file that is there and cannot be used: its client is then not let in."""
    path = public_key.with_suffix(SALTS_SUFFIX)
    if os.path.lexists(misnamed := f"{public_key}{SALTS_SUFFIX}"):
        raise ConfigError(f"{misnamed} limits nobody: the salts of {public_key.name} are in {path.name}; rename it.")
    try:
        with open(path, "rb") as file:
            refuse_open_to_others(str(path), os.fstat(file.fileno()), secret=False)
            content = file.read(_MAX_SALTS_BYTES + 1)
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        raise ConfigError(f"{path} is a link that leads nowhere.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    if len(content) > _MAX_SALTS_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_SALTS_BYTES} bytes.")
    try:
        salts = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError:
        raise ConfigError(f"{path} must be text in UTF-8, a cache salt in each line.") from None
    if any(len(salt.encode()) > MAX_NAME_BYTES for salt in salts):
        raise ConfigError(f"{path} has a line of more than {MAX_NAME_BYTES} bytes, which no cache salt has.")
    return frozenset("" if salt == DEFAULT_SALT else salt for salt in salts if salt)


def _told(access: CurveAccess) -> str:
    unlimited = sum(client.salts is None for client in access.clients.values())
    return f"{len(access.clients)} clients, {unlimited} of them without {SALTS_SUFFIX}: with every cache salt"


class CurveWatch:
    """Reads the files again when they change, on a thread of its own."""

    def __init__(
        self, server_key_file: str, clients_folder: str, on_change: Callable[[CurveAccess, CurveAccess], None]
    ) -> None:
        """`on_change`, called on that thread: the access before, and the one in force now. ConfigError where the files
        cannot be used."""
        self._paths = server_key_file, clients_folder
        self._on_change = on_change
        self._limited: dict[str, tuple[int, ...]] = {}  # keys with salts, by path: the version of the key's file
        self._seen = self._signature()
        self.access, problems = self._read()
        self._said: list[str] = []
        self._say(problems)
        log.info("CURVE keys: %s", _told(self.access))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lmcache-curve-keys", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def look(self) -> None:
        """Reads what has changed since the last time. A file that cannot be used takes its client's access."""
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            access, problems = self._read()
        except LMCacheError as error:
            log.error("The CURVE keys stay as they were read before: %s", error)
            return
        self._say(problems)
        if access != self.access:
            log.info("CURVE keys were read again: %s", _told(access))
            before, self.access = self.access, access
            self._on_change(before, access)

    def _read(self) -> tuple[CurveAccess, list[str]]:
        """Reads like `read_access`, without those whose salts have gone."""
        access, problems = read_access(*self._paths)
        limited = {path: version for path, version in self._limited.items() if version_at(path) == version}
        clients = dict(access.clients)
        for key, client in access.clients.items():
            path = str(Path(self._paths[1], client.name + PUBLIC_SUFFIX))
            if client.salts is not None:
                limited[path] = version_at(path)
            elif path in limited:
                del clients[key]
                problems.append(
                    f"{client.name}{SALTS_SUFFIX} has gone: put it back, or write {path} anew for every cache salt."
                )
        problems += [
            f"{path} limits nobody: there is no {path.stem}{PUBLIC_SUFFIX} beside it."
            for path in sorted(Path(self._paths[1]).glob(f"*{SALTS_SUFFIX}"))
            if not path.name.endswith(PUBLIC_SUFFIX + SALTS_SUFFIX) and not path.with_suffix(PUBLIC_SUFFIX).exists()
        ]
        self._limited = limited
        return replace(access, clients=clients), problems

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            try:
                self.look()
            except Exception:  # root of a thread
                log.exception("Looking for changed CURVE keys failed")

    def _say(self, problems: list[str]) -> None:
        for sentence in problems:
            if sentence not in self._said:
                log.error("Keys of clients: %s", sentence)
        self._said = problems

    def _signature(self) -> object:
        """Differs after every change of a file that matters."""
        key_file, folder = self._paths
        try:
            with os.scandir(folder) as entries:
                names = sorted(entry.path for entry in entries if entry.name.endswith((PUBLIC_SUFFIX, SALTS_SUFFIX)))
        except OSError as error:
            return error.errno
        return [(path, version_at(path)) for path in (key_file, folder, *names[: 2 * MAX_CURVE_CLIENTS + 1])]
