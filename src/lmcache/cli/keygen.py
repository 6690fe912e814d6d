"""`lmcache keygen`: a new pair of CURVE keys, as two files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from lmcache.cli.arguments import Arguments
from lmcache.cli.output import Report
from lmcache.errors import ConfigError, ResourceError
from lmcache.transport.curve_keys import PUBLIC_SUFFIX, SECRET_SUFFIX

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def run(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "keygen",
        "Makes a pair of CURVE keys: NAME.key, which stays where it is used, and NAME.pub, which the other side is "
        "given: a server's to its engines, an engine's to the --zmq-curve-client-keys-dir of its server.",
    )
    arguments.add_argument("name", help="of the server or engine; its files begin with it")
    arguments.add_argument("--folder", default=".", help="where the files are made")
    options = arguments.read(argv)
    if not _NAME.fullmatch(options.name):
        raise ConfigError(
            "lmcache keygen takes a name of at most 100 letters, digits, dots, dashes and underscores, beginning with "
            f"a letter or digit, got {options.name!r}."
        )
    secret, public = (Path(options.folder, options.name + suffix) for suffix in (SECRET_SUFFIX, PUBLIC_SUFFIX))
    _make(secret, public)
    report = Report("CURVE keys")
    report.add("secret_key_file", "Secret key", str(secret))
    report.add("public_key_file", "Public key", str(public))
    report.emit(options)
    return 0


def _make(secret: Path, public: Path) -> None:
    """Both files or none, and never over others: an engine that is running may have been given them."""
    import zmq  # slow

    if not zmq.has("curve"):
        raise ResourceError("The libzmq of this environment was built without CURVE: install pyzmq from its wheel.")
    public_text, secret_text = zmq.curve_keypair()
    made: list[Path] = []
    try:
        for path, text, mode in ((secret, secret_text, 0o600), (public, public_text, 0o644)):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            made.append(path)
            with open(fd, "wb") as file:
                file.write(text + b"\n")
                file.flush()
                os.fsync(fd)
    except OSError as error:
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink()
        raise ResourceError(f"The key file {error.filename or secret} cannot be made: {error.strerror}.") from None
