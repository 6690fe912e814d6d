"""The coordinator's process: binds, serves, and leaves a checkpoint behind."""

from __future__ import annotations

import contextlib
import logging
import sys

from lmcache import __version__
from lmcache.core.address import http_url, is_loopback, listening_host
from lmcache.core.limits import MAX_FLEET_CONNECTIONS
from lmcache.environment import SYSTEM, Environment
from lmcache.errors import ConfigError
from lmcache.fleet import saved_file
from lmcache.fleet.app import Pages, build_app
from lmcache.fleet.fleet import Fleet
from lmcache.fleet.settings import CoordinatorSettings
from lmcache.http.access import AdminToken
from lmcache.http.listener import HttpThread, limited_sockets
from lmcache.stop_signals import StopSignals
from lmcache.telemetry.line_writer import LineWriter
from lmcache.telemetry.logs import count_faults
from lmcache.telemetry.metrics import CoordinatorMetrics
from lmcache.transport.listening import raise_descriptor_limit

log = logging.getLogger("lmcache.fleet")

_ANNOUNCE_SECONDS = 1.0
_OWN_DESCRIPTORS = 200  # beside connections to it: files, event logs, requests to servers, what is closed in a moment


class CoordinatorProcess:
    """Binds at construction: ConfigError or ResourceError where it cannot start."""

    def __init__(
        self, settings: CoordinatorSettings, environment: Environment = SYSTEM, pages: Pages | None = None
    ) -> None:
        self.settings = settings
        token = AdminToken(settings.admin_token_file)
        paths = (settings.checkpoint_path, "--checkpoint-path"), (settings.metadata_path, "--metadata-path")
        given = [(path, flag) for path, flag in paths if path]
        for path, flag in given:
            saved_file.refuse_unusable(path, flag)
        if len(given) == 2:
            saved_file.refuse_shared(*given[0], *given[1])
        host = listening_host(settings.host)
        if "/" in host:
            raise ConfigError(f"--host must be a host name or an address, got {settings.host!r}.")
        places = _connection_places()
        with contextlib.ExitStack() as closers:
            ports = [(settings.port, "--port or --host"), (settings.controller_port, "--controller-port or --host")]
            sockets = limited_sockets(host, ports, places)
            for listening in sockets:
                closers.callback(listening.close)
            self.port, self.controller_port = (int(listening.getsockname()[1]) for listening in sockets)
            self.fleet = Fleet(settings, token, environment)
            closers.pop_all()
        self._closers = contextlib.ExitStack()
        metrics = None if settings.disable_metrics else CoordinatorMetrics()
        if metrics is not None:
            faults = metrics.internal_faults
            self._closers.callback(count_faults(lambda name: faults.labels(name).inc()))
        app = build_app(self.fleet, token, metrics, pages)
        self._http = HttpThread(
            *(app, sockets),
            keep_alive_seconds=settings.timeout_keep_alive,
            connections=places,
            ended=app.state.close,
        )
        if not settings.admin_token_file and not is_loopback(host):
            log.warning(
                "Without --admin-token-file only this host may ask: servers of other hosts cannot join, although "
                "--host is %s",
                settings.host,
            )

    def start(self) -> None:
        self._closers.callback(self._http.close)
        self._closers.callback(self.fleet.stop)
        self.fleet.start()
        self._closers.callback(self._http.stop)
        self._http.start()

    def stop(self) -> None:
        """Idempotent."""
        self._closers.close()

    def run(self, signals: StopSignals) -> int:
        """Serves until a signal asks for the end; the exit code."""
        try:
            self.start()
            if sys.stdout:  # None: started with 1>&-
                out = LineWriter(sys.stdout.fileno())
                out.write(self.ready_line() + "\n")
                out.drain(_ANNOUNCE_SECONDS)
            signals.stop_requested.wait()
        finally:
            self.stop()
        log.info("Stopped")
        return 0

    def ready_line(self) -> str:
        urls = [http_url(self.settings.host, port) for port in (self.port, self.controller_port)]
        return (
            f"LMCache {__version__} coordinator is ready: servers and operators at {urls[0]}, controller at {urls[1]}"
        )


def _connection_places() -> int:
    """As many as there are descriptors for, so that the host that has most loses its oldest connection before there is
    no descriptor left, for a checkpoint among others."""
    descriptors = raise_descriptor_limit()
    places = min(MAX_FLEET_CONNECTIONS, max(descriptors - _OWN_DESCRIPTORS, descriptors // 2))
    if places < MAX_FLEET_CONNECTIONS:
        log.warning(
            "There are places for %d connections, not for %d, as this process may have %d file descriptors: for a "
            "large fleet raise its hard limit to %d (ulimit -Hn, LimitNOFILE of systemd)",
            *(places, MAX_FLEET_CONNECTIONS, descriptors, MAX_FLEET_CONNECTIONS + _OWN_DESCRIPTORS),
        )
    return places
