"""Access over HTTP: this host, and whoever has the admin token, may change a server's state and read keys and salts."""

from __future__ import annotations

import hmac
import logging
import threading
import urllib.parse

from starlette.requests import Request

from lmcache.core.address import is_loopback
from lmcache.core.file_version import version_at
from lmcache.core.secret_file import read_secret
from lmcache.errors import ConfigError

logger = logging.getLogger("lmcache.http")

_FORWARDED = ("forwarded", "via", "x-real-ip")
_FORWARDED_PREFIXES = (
    "x-forwarded-",
    "x-envoy-",
)  # proxies beside a container tell no address, and connect by loopback
_MAX_SHOWN_HEADERS = 5


def read_token(path: str) -> str:
    """The token in a file, "" without a file. ConfigError when the file has none."""
    return read_secret(path, "--admin-token-file")


class AdminToken:
    """The token in a file, read again whenever the file is another one. While it cannot be read, or has no token, no
    token is taken: who removes the file takes it away from everybody. Thread-safe."""

    def __init__(self, path: str) -> None:
        """ConfigError when the file has none."""
        self._path = path
        self._lock = threading.Lock()
        self._version = version_at(path)
        self._token = read_token(path)

    def __call__(self) -> str:
        if not self._path:
            return ""
        with self._lock:
            version = version_at(self._path)
            if version != self._version:
                self._version = version
                try:
                    self._token = read_token(self._path)
                    logger.info("The admin token was read again from %s", self._path)
                except ConfigError as error:
                    self._token = ""
                    logger.warning("No admin token is taken until its file is mended: %s", error)
            return self._token


def why_refused(request: Request, token: str) -> str:
    """ "" when the request may change state, else the sentence to answer with."""
    if given := _given_token(request):
        if _is_token(given, token):
            return ""
        return "The admin token is not the one in --admin-token-file there."
    if _from_this_host(request):
        return ""
    if token:
        return (
            "From another host this needs the admin token: lmcache takes it from LMCACHE_ADMIN_TOKEN, others send it "
            "as the header 'Authorization: Bearer TOKEN'."
        )
    return "From another host this needs an admin token, and --admin-token-file names none there."


def may_read_salts(request: Request, token: str) -> bool:
    """Whether cache salts are shown, not their digests. Without a token the name by which this host was asked counts,
    too: a page of another site can have its own name lead here, and its reads then look local."""
    if why_refused(request, token):
        return False
    return bool(_given_token(request)) or _asked_by_this_hosts_name(request)


def has_token(request: Request, token: str) -> bool:
    """Whether the request came with the admin token."""
    return _is_token(_given_token(request), token)


def why_reading_is_refused(request: Request, token: str) -> str:
    """The same for what names keys, tokens or salts: see `may_read_salts`."""
    if may_read_salts(request, token):
        return ""
    return why_refused(request, token) or (
        "This is answered on this host by the names localhost, 127.0.0.1 and [::1] alone, or with the admin token."
    )


def caller_of(request: Request) -> str:
    """For the audit: the address, what it says of others behind it, and whether the token was used."""
    host = request.client.host if request.client is not None else "an unknown address"
    forwarded = [f"{name}: {request.headers[name][:200]}" for name in _forwarded(request)[:_MAX_SHOWN_HEADERS]]
    return ", ".join([host, *forwarded, *(["with the admin token"] if _given_token(request) else [])])


def _forwarded(request: Request) -> list[str]:
    """The headers that a proxy has set, in their order."""
    names = dict.fromkeys(request.headers.keys())
    return [name for name in names if name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES)]


def _given_token(request: Request) -> str:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def _is_token(given: str, token: str) -> bool:
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())


def _from_this_host(request: Request) -> bool:
    """Whether the client is on loopback, no proxy for others, and no page of another site in a local browser."""
    if request.client is None or not is_loopback(request.client.host):
        return False
    if _forwarded(request):
        return False
    origin = request.headers.get("origin")
    return origin is None or _names_loopback(origin)


def _asked_by_this_hosts_name(request: Request) -> bool:
    """Looks at the header as it was sent: where that is no host name, `request.url` has this server's address."""
    name = request.headers.get("host")
    if name is None:  # no browser leaves it out
        return True
    return "@" not in name and _names_loopback(f"//{name}")


def _names_loopback(url: str) -> bool:
    try:
        return is_loopback(urllib.parse.urlsplit(url).hostname or "")
    except ValueError:
        return False
