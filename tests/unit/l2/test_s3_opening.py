"""How a bucket is opened: what a refusal means in one sentence, credentials, hosts, proxies."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache.errors import ConfigError, LMCacheError, ResourceError
from lmcache.l2.adapter import Adapter
from lmcache.testing.contract_run import RecordingInventory
from lmcache.testing.processes import LOOPBACK
from services import need_package
from services.certificates import Certificates
from support.s3_run import run, stored
from support.s3_stub import Handler, S3Stub

need_package("awscrt")


@pytest.fixture
def stub() -> Iterator[S3Stub]:
    with S3Stub() as stub:
        yield stub


def refused(stub: S3Stub, **more: Any) -> LMCacheError:
    async def nothing(*_: object) -> None:
        raise AssertionError("it was not to open")

    with pytest.raises(LMCacheError) as caught:
        run(stub, nothing, **more)
    sentence = str(caught.value)
    assert sentence.startswith("--l2-adapter 1 (s3): ") and sentence.endswith(".") and "\n" not in sentence
    assert "planted" not in sentence.lower()
    return caught.value


@pytest.mark.parametrize(
    ("status", "code", "headers", "kind", "said"),
    [
        (404, "NoSuchBucket", {}, ConfigError, "there is no bucket at http://127.0.0.1:"),
        (403, "InvalidAccessKeyId", {}, ResourceError, "does not accept the access key"),
        (403, "SignatureDoesNotMatch", {}, ResourceError, "the secret key is not that of the access key"),
        (400, "ExpiredToken", {}, ResourceError, "does not accept the access key (ExpiredToken)"),
        (403, "AccessDenied", {}, ResourceError, "they need s3:ListBucket, s3:GetObject"),
        (
            403,
            "RequestTimeTooSkewed",
            {"Date": "Mon, 16 Nov 2026 01:02:03 GMT"},
            ResourceError,
            "/bucket, which says 2026-11-16T01:02:03+00:00; set it",
        ),
        (
            403,
            "RequestTimeTooSkewed",
            {"Date": f"Mon, 16 Nov {'9' * 30} 01:02:03 GMT"},
            ResourceError,
            "/bucket; set it",
        ),
        (
            301,
            "PermanentRedirect",
            {"x_amz_bucket_region": "eu-1"},
            ConfigError,
            "is in the region eu-1; s3_region is 'r'",
        ),
        (301, "PermanentRedirect", {"x_amz_bucket_region": "eu-1; planted" * 99}, ConfigError, "is not in that region"),
        (400, "AuthorizationHeaderMalformed", {}, ConfigError, "is not in that region"),
        (400, "", {}, ResourceError, "if it speaks TLS only, leave out disable_tls"),
        (418, "Teapot", {}, ResourceError, "answered Teapot (418)"),
    ],
)
def test_why_a_bucket_is_refused(
    stub: S3Stub, status: int, code: str, headers: dict[str, str], kind: type[Exception], said: str
) -> None:
    stub.fault = lambda handler: handler.refuse(status, code, **headers)
    error = refused(stub)
    assert said in str(error) and isinstance(error, kind)


def test_credentials_of_the_default_chain(stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    none = {"aws_access_key_id": "", "aws_secret_access_key": ""}
    assert "no credentials for http" in str(refused(stub, **none)) and not stub.requests

    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        signed: list[str] = []

        def listen(handler: Handler) -> bool:
            signed.append(handler.headers["Authorization"])
            return False

        stub.fault = listen
        await stored(adapter, 1)
        assert "Credential=FROMENVIRONMENT/" in signed[0]

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FROMENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "word")
    run(stub, test, **none)


def test_a_directory_bucket_is_asked_for_a_session(stub: S3Stub) -> None:
    session = (
        "<SessionToken>token</SessionToken><SecretAccessKey>word</SecretAccessKey><AccessKeyId>OFSESSION</AccessKeyId>"
    )
    body = f"<CreateSessionResult><Credentials>{session}<Expiration>2036-01-02T03:04:05Z</Expiration></Credentials>"
    signed: list[tuple[str, str]] = []

    def listen(handler: Handler) -> bool:
        if "session" in handler.path:
            return handler.answer(200, f"{body}</CreateSessionResult>".encode())
        signed.append((handler.headers["Authorization"], handler.headers["X-Amz-S3session-Token"]))
        return False

    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        await stored(adapter, 1)

    stub.fault = listen
    run(stub, test, s3_enable_s3express=True)
    assert all("Credential=OFSESSION/" in authorization and token == "token" for authorization, token in signed)


def test_servers_that_are_not_there(stub: S3Stub) -> None:
    assert "cannot be reached" in str(refused(stub, endpoint="http://127.0.0.1:1/bucket"))
    assert "the host nowhere.invalid has no address" in str(refused(stub, endpoint="http://nowhere.invalid/bucket"))
    assert "disable_tls" in str(refused(stub, endpoint=stub.endpoint.replace("http:", "https:")))
    assert "tls_ca" in str(refused(stub, endpoint=stub.endpoint.replace("http:", "https:"), tls_ca="/nowhere/ca.pem"))


@pytest.mark.parametrize(
    "body",
    [
        b"<html><body>Welcome</body></html>",
        b"not xml",
        b"",
        b"<!DOCTYPE x [<!ENTITY a 'aaaa'>]><ListBucketResult>&a;</ListBucketResult>",
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
    ],
)
def test_what_is_no_listing_is_refused(stub: S3Stub, body: bytes) -> None:
    stub.fault = lambda handler: handler.answer(200, body)
    assert isinstance(refused(stub), ResourceError)


def test_a_host_without_a_bucket_is_asked(stub: S3Stub) -> None:
    async def test(adapter: Adapter, _: RecordingInventory) -> None:
        await stored(adapter, 1)

    root = stub.endpoint.removesuffix("/bucket")
    run(stub, test, root)  # "/" answers with a listing of a bucket: the host names it
    assert stub.requests[-1][1].startswith("/lmcache/v1/")
    body = b"<ListAllMyBucketsResult></ListAllMyBucketsResult>"
    stub.fault = lambda handler: handler.path.startswith("/?") and handler.answer(200, body)
    run(stub, test, root)
    assert stub.requests[-1][1].startswith("/lmcache/lmcache/v1/")


def test_a_host_that_is_busy_is_not_taken_for_another_kind(stub: S3Stub) -> None:
    stub.fault = lambda handler: handler.path.startswith("/?") and handler.refuse(503, "SlowDown")
    assert "answered SlowDown (503)" in str(refused(stub, endpoint=stub.endpoint.removesuffix("/bucket")))


def test_a_proxy_that_is_not_there(stub: S3Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows hosts that this machine does not."""
    monkeypatch.setenv("HTTP_PROXY", "http://user:planted-word@127.0.0.1:1")
    assert "by the proxy that HTTP_PROXY names" in str(refused(stub, endpoint="http://nowhere.invalid/bucket"))
    monkeypatch.setenv("NO_PROXY", "nowhere.invalid")
    assert "has no address" in str(refused(stub, endpoint="http://nowhere.invalid/bucket"))


@contextmanager
def tls_listener(certificates: Certificates) -> Iterator[tuple[int, list[tuple[str | None, bytes]]]]:
    """One that would speak either protocol: its port, and of each connection what was agreed on and how it begins. It
    hangs up then."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server_cert, certificates.server_key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    seen: list[tuple[str | None, bytes]] = []

    def serve() -> None:
        while True:
            accepted, _ = listener.accept()
            accepted.settimeout(5.0)
            with accepted:
                if stopped.is_set():
                    return
                with context.wrap_socket(accepted, server_side=True) as connection:
                    beginning = connection.recv(16)
                    seen.append((connection.selected_alpn_protocol(), beginning))

    stopped = threading.Event()
    with socket.create_server((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        try:
            yield port, seen
        finally:
            stopped.set()
            socket.create_connection((LOOPBACK, port)).close()
            thread.join()


@pytest.mark.parametrize(
    ("prefer_http2", "protocol", "beginning"), [(True, "h2", b"PRI * HTTP/2.0"), (False, "http/1.1", b"GET /bucket?")]
)
def test_http2_is_spoken_where_it_is_preferred_and_the_server_can(
    tmp_path: Path, prefer_http2: bool, protocol: str, beginning: bytes
) -> None:
    async def nothing(*_: object) -> None:
        raise AssertionError("it was not to open")

    certificates = Certificates(tmp_path)
    with tls_listener(certificates) as (port, seen), S3Stub() as stub:
        endpoint = f"https://{LOOPBACK}:{port}/bucket"
        with pytest.raises(ResourceError, match="cannot be reached"):
            run(stub, nothing, endpoint, s3_prefer_http2=prefer_http2, tls_ca=str(certificates.ca))
    spoken = [(agreed, began) for agreed, began in seen if began]  # some end with the check of the certificate
    assert spoken and {agreed for agreed, _ in spoken} == {protocol}
    assert all(began.startswith(beginning) for _, began in spoken), spoken
