"""Azurite: Azure's blob storage on this machine.

with Azurite(tmp_path) as server:
    server.wait_ready()
    server.make_container("cache")
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import shutil
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path

from lmcache.testing.processes import LOOPBACK, ManagedProcess, free_port
from polling import until
from services import FOLDER, missing, program

READY_SECONDS = 60.0
AZURITE = FOLDER / "node" / "node_modules" / ".bin" / "azurite-blob"
ACCOUNT = "devstoreaccount1"  # the one account and its key, which are the same everywhere
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VERSION = "2021-08-06"


class Azurite(ManagedProcess):
    name = "Azurite"

    def __init__(self, folder: Path, port: int | None = None) -> None:
        node = shutil.which("node")
        if node is None:
            missing("Node.js")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port or free_port()
        command = [node, str(program(AZURITE, "Azurite")), "--blobHost", LOOPBACK, "--blobPort", str(self.port)]
        # A client may speak a version of the protocol that is younger than the server.
        command += ["--location", str(folder / "data"), "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        super().__init__(command, folder / "azurite.log")

    @property
    def connection_string(self) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint=http://{LOOPBACK}:{self.port}/{ACCOUNT};"
        )

    def wait_ready(self) -> None:
        def answers() -> bool:
            self.check_alive()
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.call("GET", "?comp=list") == 200
            return False

        until(answers, READY_SECONDS)

    def restart(self) -> Azurite:
        """Another one with the same port and content, in the place of one that has ended."""
        return Azurite(self.folder, self.port)

    def make_container(self, name: str) -> None:
        status = self.call("PUT", f"/{name}?restype=container")
        assert status == 201, f"a container was answered with {status}"

    def put_blob(self, path: str, body: bytes) -> int:
        return self.call("PUT", path, body, {"x-ms-blob-type": "BlockBlob"})

    def call(self, method: str, path: str, body: bytes = b"", more: Mapping[str, str] | None = None) -> int:
        """The status of a request, signed as the account. `more`: headers that begin with x-ms-."""
        headers = dict(sorted({**(more or {}), "x-ms-date": formatdate(usegmt=True), "x-ms-version": VERSION}.items()))
        place, _, query = path.partition("?")
        resource = f"/{ACCOUNT}/{ACCOUNT}{place}" + "".join(
            "\n" + pair.replace("=", ":") for pair in sorted(query.split("&")) if pair
        )
        length = str(len(body) or "")
        lines = [method, "", "", length, *[""] * 8, *(f"{name}:{value}" for name, value in headers.items()), resource]
        digest = hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=10.0)
        try:
            headers["Content-Length"] = str(len(body))
            connection.request(method, f"/{ACCOUNT}{path}", body, headers)
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()
