"""SeaweedFS as an S3 server that checks signatures, with TLS and with buckets in host names.

with SeaweedFS(tmp_path) as server:
    server.wait_ready()
    server.make_bucket("cache")
    assert server.call("PUT", "/cache/name", body=b"value").status == 200
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import socket
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from lmcache.testing.processes import LOOPBACK, ManagedProcess, free_port
from polling import until
from services import program
from services.certificates import Certificates

READY_SECONDS = 60.0
WEED = Path(sys.prefix) / "bin" / "weed"
ACCESS_KEY = "AKIALMCACHETEST"
SECRET_KEY = "a-planted-secret-key"
REGION = "us-east-1"
GRPC_OFFSET = 10_000  # every part listens on a second port
LAST_PORT = 32_767  # beyond are those that systems give to connections


class Credentials(NamedTuple):
    access_key: str
    secret_key: str


OWN = Credentials(ACCESS_KEY, SECRET_KEY)


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class SeaweedFS(ManagedProcess):
    """`domain`: buckets are also the hosts BUCKET.DOMAIN."""

    name = "SeaweedFS"

    def __init__(
        self,
        folder: Path,
        *,
        certificates: Certificates | None = None,
        domain: str = "",
        ports: Mapping[str, int] | None = None,
        credentials: Credentials = OWN,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data").mkdir(exist_ok=True)
        self.folder = folder
        self.ports = dict(ports or _free_ports("master", "volume", "filer", "s3"))
        self.credentials = credentials
        self._settings: dict[str, Any] = {
            "certificates": certificates,
            "domain": domain,
            "credentials": credentials,
        }
        self.certificates = certificates
        self.port = self.ports["s3"]
        self.tls_port = self.ports.setdefault("s3.port.https", free_port()) if certificates else 0
        identity = {
            "name": "test",
            "credentials": [{"accessKey": credentials.access_key, "secretKey": credentials.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        reader = {
            "name": "reader",
            "credentials": [{"accessKey": "READER", "secretKey": SECRET_KEY}],
            "actions": ["Read:other"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity, reader]}))
        command = [str(program(WEED, "SeaweedFS")), "server", f"-dir={folder / 'data'}", f"-ip={LOOPBACK}"]
        command += [f"-ip.bind={LOOPBACK}", "-s3", f"-s3.config={folder / 's3.json'}"]
        command += [f"-{part}={port}" if "." in part else f"-{part}.port={port}" for part, port in self.ports.items()]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.localSocket={folder / 's3.sock'}"]
        command += ["-s3.autoCreateBucket=false", "-master.telemetry=false", "-volume.preStopSeconds=0"]
        command += ["-master.volumeSizeLimitMB=512", "-volume.max=20"]
        if certificates is not None:
            command += [f"-s3.cert.file={certificates.server_cert}", f"-s3.key.file={certificates.server_key}"]
        if domain:
            command += [f"-s3.domainName={domain}"]
        super().__init__(command, folder / "server.log")

    def wait_ready(self, timeout_seconds: float = READY_SECONDS) -> None:
        """Until it lists its buckets and has a place for objects."""

        def answers() -> bool:
            self.check_alive()
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.call("GET", "/").status == 200
            return False

        until(answers, timeout_seconds, tell=self.log)

    def make_bucket(self, name: str) -> None:
        """Of at least three letters. When it returns, objects can be stored in it."""
        until(lambda: self.call("PUT", f"/{name}").status in (200, 409), READY_SECONDS, tell=self.log)
        until(lambda: self.call("PUT", f"/{name}/.ready", body=b"x").status == 200, READY_SECONDS, tell=self.log)
        self.call("DELETE", f"/{name}/.ready")

    def restarted(self) -> SeaweedFS:
        """Another one with the same objects on the same ports, after this one has ended."""
        assert not self.alive()
        return SeaweedFS(self.folder, ports=self.ports, **self._settings)

    def stop(self, timeout_seconds: float = 30.0) -> int:
        """At once: asked to, it takes half a minute."""
        if self.alive():
            self.kill()
        for port in self.ports.values():  # sockets that it makes outside of its folder
            for name in (f"seaweedfs-*-{port}.sock", f"seaweedfs-*-{port + GRPC_OFFSET}.sock"):
                for path in Path("/tmp").glob(name):
                    path.unlink(missing_ok=True)
        return super().stop(timeout_seconds)

    def call(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: bytes = b"", **headers: str
    ) -> Answer:
        """One signed request, by a client of the tests' own."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=10.0)
        text = urlencode(sorted((query or {}).items()), quote_via=quote)
        host = f"localhost:{self.port}"  # 127.0.0.1 may be the host of a bucket
        signed = sign(method, host, path, text, body, self.credentials)
        with contextlib.closing(connection):
            connection.request(method, f"{path}?{text}" if text else path, body or None, {**signed, **headers})
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())

    def names(self, bucket: str) -> list[str]:
        """Of all objects in a bucket of at most a thousand."""
        body = self.call("GET", f"/{bucket}", {"list-type": "2"}).body.decode()
        return [part.partition("</Key>")[0] for part in body.split("<Key>")[1:]]


def sign(method: str, host: str, path: str, query: str, body: bytes, credentials: Credentials) -> dict[str, str]:
    """The headers of AWS Signature Version 4."""
    now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now}
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    canonical = f"{method}\n{quote(path)}\n{query}\n{lines}\n{names}\n{digest}"
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    credential = f"Credential={credentials.access_key}/{scope}"
    headers["Authorization"] = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={signature}"
    return headers


def _free_ports(*parts: str) -> dict[str, int]:
    found: dict[str, int] = {}
    while len(found) < len(parts):
        port = free_port()
        if port + GRPC_OFFSET > LAST_PORT:
            port -= GRPC_OFFSET
        if port not in found.values() and _is_free(port) and _is_free(port + GRPC_OFFSET):
            found[parts[len(found)]] = port
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
