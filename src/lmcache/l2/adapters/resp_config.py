"""The keys of `resp`, and what a URL, the environment and files say in place of some of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec
from msgspec import Meta

from lmcache.config.redact import HIDDEN, is_secret
from lmcache.errors import ConfigError, ResourceError
from lmcache.l2.adapter_config import AdapterConfig, NonEmpty, Threads
from lmcache.l2.adapters.remote_names import DEFAULT_PREFIX, Prefix
from lmcache.l2.native_resp import Address

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
MIN_VALUE_BYTES = 4096
MAX_VALUE_BYTES = 512 << 20  # a server's default for proto-max-bulk-len
ENVIRONMENT = "LMCACHE_RESP_"
MAX_SECRET_BYTES = 65_536
SCHEMES = ("redis", "rediss", "unix")


class SentinelConfig(msgspec.Struct, frozen=True):
    """Who knows which server is the master."""

    master: Annotated[str, NonEmpty, Meta(description="name of the master in the configuration of the Sentinels")]
    nodes: Annotated[
        list[str],
        Meta(min_length=1, description="the Sentinels", extra={"expected": 'a list of "host:port", at least one'}),
    ]
    username: Annotated[str, Meta(description="user at the Sentinels")] = ""
    password: Annotated[str, Meta(description="password at the Sentinels")] = ""

    def __post_init__(self) -> None:
        for node in self.nodes:
            parse_address(node, SENTINEL_PORT)

    def __repr__(self) -> str:
        return f"SentinelConfig({self.master!r}, {self.nodes!r})"

    @property
    def addresses(self) -> list[Address]:
        return [parse_address(node, SENTINEL_PORT) for node in self.nodes]


class Credentials(NamedTuple):
    username: str
    password: str

    def __repr__(self) -> str:
        return f"Credentials({self.username!r}, {HIDDEN})"


class RespConfig(AdapterConfig, frozen=True, kw_only=True):
    """Redis or Valkey: one server, one behind Sentinels, or a cluster. Several cache servers may share it."""

    host: Annotated[str, Meta(description="host name or address; with cluster, of any node")] = ""
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65_535)] | None, Meta(description="TCP port, with TLS that for TLS; or give url")
    ] = None
    url: Annotated[
        str,
        Meta(
            description="redis://[user:password@]host[:port][/database], rediss:// for TLS, or unix:///path/of/socket, "
            "in place of host and port"
        ),
    ] = ""
    num_workers: Annotated[
        Threads, Meta(description="threads that move objects, each with a connection to each server")
    ] = 8
    username: Annotated[str, Meta(description="user; also LMCACHE_RESP_USERNAME or LMCACHE_RESP_USERNAME_FILE")] = ""
    password: Annotated[str, Meta(description="password; also LMCACHE_RESP_PASSWORD or LMCACHE_RESP_PASSWORD_FILE")] = (
        ""
    )
    password_file: Annotated[
        str, Meta(description="file with the password, in place of password; read for each connection")
    ] = ""
    database: Annotated[int, Meta(ge=0, le=1 << 20, description="number of the database; a cluster has only 0")] = 0
    prefix: Prefix = DEFAULT_PREFIX
    tls: Annotated[bool, Meta(description="connect with TLS, and check the server's certificate")] = False
    tls_ca: Annotated[str, Meta(description="file of the authorities' certificates; without it, the system's")] = ""
    tls_cert: Annotated[str, Meta(description="file of the client's certificate, where the server asks for one")] = ""
    tls_key: Annotated[str, Meta(description="file of that certificate's key")] = ""
    tls_server_name: Annotated[
        str, Meta(description="name that certificates must have; without it, the host's name or address")
    ] = ""
    cluster: Annotated[bool, Meta(description="the server is one of a cluster, which is found by itself")] = False
    sentinel: Annotated[SentinelConfig | None, Meta(description="Sentinels that know the server, in place of host")] = (
        None
    )
    max_value_bytes: Annotated[
        int,
        Meta(
            ge=MIN_VALUE_BYTES,
            le=MAX_VALUE_BYTES,
            description="an object beyond this, or beyond the server's proto-max-bulk-len, is stored in parts",
        ),
    ] = MAX_VALUE_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        ways = [bool(self.host or self.port), bool(self.url), self.sentinel is not None]
        if ways.count(True) != 1:
            raise ValueError('give "host" and "port", or "url", or "sentinel": one of them says where the server is.')
        if "://" in self.host or "@" in self.host:  # not repeated: it may hold a password
            raise ValueError('"host" must be a host name or an address; a URL is given as "url".')
        if ways[0] and not self.host:
            raise ValueError('the key "host" is required with "port".')
        if ways[0] and self.port is None and not self.host.startswith("/"):
            raise ValueError('the key "port" is required with "host".')
        if self.url:
            parse_url(self.url)
        if self.database and self.url and parse_url(self.url).database is not None:
            raise ValueError('give the database in "url" or as "database", not both.')
        if self.uses_tls and self.sentinel is None and self.address[0].startswith("/"):
            raise ValueError('"tls" is for TCP: leave it out with the path of a socket.')
        if self.cluster and self.sentinel is not None:
            raise ValueError('"cluster" and "sentinel" exclude each other: a cluster promotes its replicas itself.')
        if self.cluster and self.database_number != 0:
            raise ValueError(f'"cluster" has no database {self.database_number}: leave it out or use 0.')
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError('"tls_cert" and "tls_key" belong together: give both or none.')
        if self.password and self.password_file:
            raise ValueError('give "password" or "password_file", not both.')
        if not self.uses_tls and (self.tls_ca or self.tls_cert or self.tls_server_name):
            raise ValueError('"tls_ca", "tls_cert" and "tls_server_name" need "tls": true or a rediss:// URL.')

    def __repr__(self) -> str:
        shown = {
            name: HIDDEN if value and (is_secret(name) or name == "url") else value
            for name, value in ((name, getattr(self, name)) for name in self.__struct_fields__)
        }
        return f"RespConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def uses_tls(self) -> bool:
        return self.tls or self.url.startswith("rediss:")

    @property
    def address(self) -> Address:
        """The address of the server, where no Sentinel says it."""
        if self.url:
            return parse_url(self.url).address
        return (self.host, 0) if self.host.startswith("/") else (self.host, self.port or DEFAULT_PORT)

    @property
    def database_number(self) -> int:
        return (parse_url(self.url).database if self.url else None) or self.database

    def credentials(self, environ: Mapping[str, str] = os.environ) -> Credentials:
        """Keys go before the URL, the URL before the environment. ConfigError or ResourceError."""
        given = parse_url(self.url) if self.url else None
        username = self.username or (given.username if given else "") or self._from_environment("USERNAME", environ)
        password = self.password or (
            self._from_file('"password_file"', self.password_file) if self.password_file else ""
        )
        password = password or (given.password if given else "") or self._from_environment("PASSWORD", environ)
        if username and not password:
            raise ConfigError(f'{self.where}: "username" needs a password: give "password" or LMCACHE_RESP_PASSWORD.')
        return Credentials(username, password)

    def credential_files(self, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
        """The files that the user and the password come from, to be read for each connection; "" where they come from
        elsewhere."""
        given = parse_url(self.url) if self.url else None

        def of_environment(name: str) -> str:
            variable = f"{ENVIRONMENT}{name}"
            return "" if environ.get(variable) else environ.get(f"{variable}_FILE", "")

        username_file = "" if self.username or (given and given.username) else of_environment("USERNAME")
        if self.password or self.password_file:
            return username_file, "" if self.password else self.password_file
        return username_file, "" if given and given.password else of_environment("PASSWORD")

    def _from_environment(self, name: str, environ: Mapping[str, str]) -> str:
        variable = f"{ENVIRONMENT}{name}"
        if environ.get(variable):
            return environ[variable]
        path = environ.get(f"{variable}_FILE")
        return self._from_file(f"{variable}_FILE", path) if path else ""

    def _from_file(self, source: str, path: str) -> str:
        try:
            with open(path, "rb") as file:
                content = file.read(MAX_SECRET_BYTES + 1)
        except OSError as error:
            raise ResourceError(
                f"{self.where}: the file {path} of {source} cannot be read: {error.strerror}; "
                "give the path of a file that this user may read."
            ) from None
        secret = content.rstrip(b"\r\n")
        if not secret or len(content) > MAX_SECRET_BYTES or b"\n" in secret:
            raise ConfigError(f"{self.where}: the file {path} of {source} must hold one line.")
        try:
            return secret.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{self.where}: the file {path} of {source} must hold UTF-8.") from None


class Url(NamedTuple):
    address: Address
    username: str
    password: str
    database: int | None


def parse_url(url: str) -> Url:
    """ValueError that tells the rule without repeating the URL, which may hold a password."""
    rule = '"url" must be redis://[user:password@]host[:port][/database], the same with rediss://, or unix:///path'
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"{rule}; its host or port cannot be read.") from None
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{rule}; its scheme must be one of {', '.join(SCHEMES)}.")
    if parts.netloc.count("@") > 1:  # clients differ in where such a password ends
        raise ValueError(f"{rule}; an @ in a user or password is written %40.")
    if parts.fragment or parts.query:
        raise ValueError(f"{rule}; it takes no options behind ? or #: there are keys for them.")
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix":
        if not parts.path.startswith("/") or parts.hostname:
            raise ValueError(f"{rule}; the path of a socket is absolute, with three slashes.")
        return Url((unquote(parts.path), 0), username, password, None)
    if not parts.hostname:
        raise ValueError(f"{rule}; it names no host.")
    return Url((parts.hostname, port or DEFAULT_PORT), username, password, _database(parts, rule))


def _database(parts: SplitResult, rule: str) -> int | None:
    text = parts.path.strip("/")
    if text and not (text.isascii() and text.isdigit() and len(text) <= 7):
        raise ValueError(f"{rule}; a database is a number.")
    return int(text) if text else None


def parse_address(text: str, default_port: int) -> Address:
    """host, host:port or [address]:port; ValueError, which does not repeat what may hold a password."""
    if "@" in text or "//" in text:
        raise ValueError('"nodes" must be a list of "host:port", without "://" and "@"; users have keys of their own.')
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.path:
        raise ValueError(f'"nodes" must be a list of "host:port"; got {text!r}.')
    return host, port or default_port


def client_options(config: RespConfig) -> dict[str, Any]:
    """What every native client of this adapter is made with. ConfigError or ResourceError."""
    credentials = config.credentials()
    username_file, password_file = config.credential_files()
    return {
        "prefix": config.prefix,
        "username": credentials.username,
        "password": credentials.password,
        "username_file": username_file,
        "password_file": password_file,
        "database": config.database_number,
        "timeout_seconds": config.timeout_seconds,
        "tls": config.uses_tls,
        "tls_ca": config.tls_ca,
        "tls_cert": config.tls_cert,
        "tls_key": config.tls_key,
        "tls_server_name": config.tls_server_name,
    }
