"""TLS of the HTTP listener. A certificate that is replaced is used from the next connection on."""

from __future__ import annotations

import logging
import ssl
import threading

from lmcache.core.file_version import version_at
from lmcache.errors import ConfigError

logger = logging.getLogger("lmcache.http")


def server_context(cert: str, key: str) -> ssl.SSLContext | None:
    """None without a certificate: plain HTTP. ConfigError where the files are not one of a server."""
    if not cert and not key:
        return None
    if not cert or not key:
        raise ConfigError("--http-tls-cert and --http-tls-key belong together: give both or none.")
    return _Renewing(cert, key).context


def _load(cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"--http-tls-cert {cert} and --http-tls-key {key} are no certificate in PEM and its key, without a "
            f"password: {error.reason or error}."
        ) from None
    except OSError as error:
        raise ConfigError(f"--http-tls-cert {cert} or --http-tls-key {key} cannot be read: {error.strerror}.") from None
    return context


def _no_password() -> str:
    """Instead of a question on the terminal."""
    return ""


class _Renewing:
    """Gives each connection the certificate that the files have now."""

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self._lock = threading.Lock()
        self._version = self._versions()
        self._newest = self.context = _load(cert, key)
        self.context.sni_callback = self._choose

    def _versions(self) -> tuple[tuple[int, ...], ...]:
        return version_at(self._cert), version_at(self._key)

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in each handshake, whether a name is given or not."""
        with self._lock:
            versions = self._versions()
            if versions != self._version:
                self._version = versions
                try:
                    self._newest = _load(self._cert, self._key)
                    logger.info("The certificate was read again from %s", self._cert)
                except ConfigError as error:  # between two replacements, maybe: the next connection tries again
                    logger.warning("The certificate stays as it was: %s", error)
            connection.context = self._newest
