"""The pages at `/` for browsers, and the files that they are made of.

With the extra `lmcache[dashboard]` a server's page is the dashboard, whose charts uPlot draws; without it a table of
figures. A coordinator's page shows its fleet. Nothing comes from elsewhere, no file has code of another one in it, and
the policy below holds browsers to that.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

logger = logging.getLogger("lmcache.admin")

FOLDER = Path(__file__).with_name("dashboard")

# The package that carries uPlot, and its two files: their names here, where they are in the package, and the SHA-256 of
# uPlot 1.6.31 as its author published it. What has another digest is not given to browsers.
CHART_PACKAGE = "youplot"
_CHART_FILES = (
    ("uplot.js", "vendor/uplot.iife.min.js", "2d27e8ad3d228164525ce213f9dc716f39b4e3aee0cc773fb3491c96cf4921a2"),
    ("uplot.css", "vendor/uplot.min.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
)

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",
}
_FILE_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "public, max-age=31536000, immutable"}
_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_BASE = "{{files}}"  # in a page: the folder of its files, which changes with them


class DashboardFiles:
    """Read once. `page` is a file of the folder, `without_charts` what is there in its place where uPlot is not."""

    def __init__(self, page: str = "dashboard.html", without_charts: str = "figures.html") -> None:
        charts = _chart_files()
        own = {path.name: path.read_bytes() for path in sorted(FOLDER.glob("*")) if path.suffix in _MEDIA_TYPES}
        self._files = {**own, **charts}
        path = FOLDER / (page if charts else without_charts)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self._version = _digest(b"".join([text.encode(), *self._files.values()]))[:16]
        self._page = text.replace(_BASE, f"dashboard/{self._version}")

    def page(self) -> Response | None:
        """None where it is not installed."""
        return HTMLResponse(self._page, headers=_PAGE_HEADERS) if self._page else None

    def route(self) -> Route:
        return Route("/dashboard/{version}/{name}", self._file)

    async def _file(self, request: Request) -> Response:
        version, name = request.path_params["version"], request.path_params["name"]
        if version != self._version or name not in self._files:
            raise HTTPException(404, "The dashboard has no such file; load its page again.")
        return Response(self._files[name], headers=_FILE_HEADERS, media_type=_MEDIA_TYPES[Path(name).suffix])


def _chart_files() -> dict[str, bytes]:
    """Those of uPlot, {} where they are not installed. Nothing of the package that carries them runs."""
    package = importlib.util.find_spec(CHART_PACKAGE)
    if package is None or not package.submodule_search_locations:
        return {}
    folder = Path(package.submodule_search_locations[0])
    files = {}
    for name, path, digest in _CHART_FILES:
        try:
            content = (folder / path).read_bytes()
        except OSError as error:
            logger.warning("The dashboard has no charts: %s cannot be read: %s", folder / path, error.strerror)
            return {}
        if _digest(content) != digest:
            logger.warning("The dashboard has no charts: %s is not that of uPlot 1.6.31", folder / path)
            return {}
        files[name] = content
    return files


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
