"""The keys of `s3`, and the bucket and URL that its endpoint names."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal
from urllib.parse import quote

from msgspec import Meta

from lmcache.l2.adapter_config import AdapterConfig, NonEmpty, Threads
from lmcache.l2.adapters.remote_names import DEFAULT_PREFIX, Prefix

DEFAULT_BUCKET = "lmcache"  # of an endpoint that names none
MAX_FOLDER_CHARACTERS = 512  # of 1,024 that a name may have

_SCHEME = re.compile(r"([a-z0-9+.-]+)://", re.IGNORECASE)
_AUTHORITY = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
_FOLDER_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=-]*")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_EXPRESS_BUCKET = re.compile(r".+--([a-z0-9]+-az[0-9]+)--x-s3")
# BUCKET.s3.REGION.amazonaws.com and its relatives: dualstack, fips, s3-REGION, s3express-ZONE, accelerate.
_AWS_BUCKET_HOST = re.compile(r".+\.s3(?:express)?(?:[.-][a-z0-9-]+)*\.amazonaws\.com(?:\.cn)?", re.IGNORECASE)

AddressingStyle = Literal["auto", "path", "virtual"]


@dataclass(frozen=True, slots=True)
class S3Location:
    """Which bucket, where, and what comes before the names of objects in it."""

    host: str  # with the port where one was given: the Host header
    port: int  # 0: that of the scheme
    tls: bool
    bucket: str  # "": the host names it, or it is not known yet
    folder: str  # in front of all names in the bucket: "" or with a slash at its end
    is_virtual: bool | None  # whether the host names the bucket; None: to be found out by asking

    @property
    def host_name(self) -> str:
        """Without the port and an address's brackets."""
        name = self.host.rpartition(":")[0] if self.port else self.host
        return name.strip("[]")

    @property
    def bucket_path(self) -> str:
        """Of requests that concern the bucket."""
        return "/" if self.is_virtual or not self.bucket else f"/{quote(self.bucket)}"

    def object_path(self, name: str) -> str:
        """`name`: with the folder."""
        return f"{self.bucket_path.rstrip('/')}/{quote(name)}"

    def resolved(self, *, is_virtual: bool) -> S3Location:
        return replace(self, is_virtual=is_virtual, bucket="" if is_virtual else self.bucket or DEFAULT_BUCKET)

    def __str__(self) -> str:
        bucket = self.bucket_path.rstrip("/")
        return f"{'https' if self.tls else 'http'}://{self.host}{bucket}"


class S3Config(AdapterConfig, frozen=True, kw_only=True):
    """One object each in a bucket of S3 or of a server that speaks its protocol. Needs the package awscrt."""

    s3_endpoint: Annotated[
        str,
        NonEmpty,
        Meta(
            description="s3://BUCKET for AWS, or HOST[:PORT]/BUCKET for other servers, each with /FOLDER behind it "
            "where names are to begin with one; a host alone names its bucket itself, or has one that is called lmcache"
        ),
    ]
    s3_region: Annotated[
        str, NonEmpty, Meta(description="region of the bucket; servers other than AWS mostly take any")
    ]
    s3_num_io_threads: Annotated[
        Threads, Meta(description="threads that move bytes, and connections (25 at least)")
    ] = 64
    s3_prefer_http2: Annotated[bool, Meta(description="offer HTTP/2 when TLS is negotiated")] = True
    s3_enable_s3express: Annotated[
        bool, Meta(description="sign for S3 Express One Zone, which directory buckets need")
    ] = False
    s3_addressing_style: Annotated[
        AddressingStyle,
        Meta(description="where URLs have the bucket: in their path or in the host; auto goes by s3_endpoint"),
    ] = "auto"
    prefix: Prefix = DEFAULT_PREFIX
    disable_tls: Annotated[bool, Meta(description="speak HTTP without TLS")] = False
    tls_ca: Annotated[
        str, Meta(description="PEM file of authorities to trust instead of the system's; else AWS_CA_BUNDLE")
    ] = ""
    aws_access_key_id: Annotated[
        str, Meta(description="access key; without it the AWS default chain: environment, profile, instance role")
    ] = ""
    aws_secret_access_key: Annotated[str, Meta(description="its secret key")] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.aws_access_key_id) != bool(self.aws_secret_access_key):
            raise ValueError(
                '"aws_access_key_id" and "aws_secret_access_key" belong together: give both, or neither for the AWS '
                "default chain."
            )
        if any(_FOLDER_PART.fullmatch(part) is None for part in self.prefix.split("/")):
            raise ValueError(
                f'"prefix" must have parts between slashes that begin with a letter or digit; got {self.prefix!r}.'
            )
        _ = self.location  # refuses what names none

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def location(self) -> S3Location:
        """ValueError where the keys name no bucket or contradict each other."""
        scheme, rest = _split_scheme(self.s3_endpoint)
        if scheme == "s3":
            return self._of_aws(rest)
        if scheme == "https" and self.disable_tls:
            raise ValueError('"s3_endpoint" begins with https:// while "disable_tls" is true: leave out one of both.')
        host, _, path = rest.partition("/")
        port = _port_of(host)
        tls = scheme != "http" and not self.disable_tls
        names_bucket = self.s3_addressing_style == "virtual" or (
            self.s3_addressing_style == "auto" and _AWS_BUCKET_HOST.fullmatch(host.partition(":")[0]) is not None
        )
        if names_bucket:
            return S3Location(host, port, tls, "", _folder(path), is_virtual=True)
        bucket, _, prefix = path.partition("/")
        if bucket or self.s3_addressing_style == "path":
            return S3Location(host, port, tls, _bucket(bucket or DEFAULT_BUCKET), _folder(prefix), is_virtual=False)
        return S3Location(host, port, tls, "", "", is_virtual=None)

    def _of_aws(self, rest: str) -> S3Location:
        bucket, _, prefix = rest.partition("/")
        _bucket(bucket)
        domain = "amazonaws.com.cn" if self.s3_region.startswith("cn-") else "amazonaws.com"
        express = _EXPRESS_BUCKET.fullmatch(bucket)
        if bool(express) != self.s3_enable_s3express:
            raise ValueError(
                f'"s3_enable_s3express" must be true for directory buckets, whose names end in --ZONE--x-s3, and only '
                f"for them; the bucket is {bucket!r}."
            )
        tls = not self.disable_tls
        if express:
            host = f"{bucket}.s3express-{express[1]}.{self.s3_region}.{domain}"
            return S3Location(host, 0, tls, "", _folder(prefix), is_virtual=True)
        # No certificate of AWS covers a bucket with a dot as a part of a host.
        in_path = self.s3_addressing_style == "path" or (self.s3_addressing_style == "auto" and tls and "." in bucket)
        if in_path:
            return S3Location(f"s3.{self.s3_region}.{domain}", 0, tls, bucket, _folder(prefix), is_virtual=False)
        return S3Location(f"{bucket}.s3.{self.s3_region}.{domain}", 0, tls, "", _folder(prefix), is_virtual=True)

    @property
    def authorities(self) -> str:
        """A PEM file; "" for those of the system."""
        return self.tls_ca or os.environ.get("AWS_CA_BUNDLE", "")

    def idle_keys(self) -> dict[str, str]:
        if self.location.tls:
            return {}
        reason = "it concerns TLS, which is off"
        return {"s3_prefer_http2": reason, "tls_ca": reason}


def _split_scheme(endpoint: str) -> tuple[str, str]:
    """The scheme in lower case, "" where there is none, and what follows it."""
    match = _SCHEME.match(endpoint)
    scheme = match[1].lower() if match else ""
    rest = endpoint[match.end() :] if match else endpoint
    if scheme not in ("", "s3", "http", "https"):
        raise ValueError(
            f'"s3_endpoint" must begin with s3://, http://, https:// or a host; it begins with {scheme}://.'
        )
    if not {"@", "?", "#"}.isdisjoint(rest):  # wherever they are: a secret key may have slashes
        raise ValueError(
            '"s3_endpoint" must have neither a user nor a query; credentials are "aws_access_key_id" and '
            '"aws_secret_access_key".'
        )
    return scheme, rest.rstrip("/")


def _port_of(authority: str) -> int:
    """0 where there is none."""
    match = _AUTHORITY.fullmatch(authority)
    port = int(match[1] or 0) if match else -1
    if match is None or port > 65_535 or (match[1] and not port):
        raise ValueError(f'"s3_endpoint" must name a host, or a host and a port from 1 to 65535; got {authority!r}.')
    return port


def _bucket(name: str) -> str:
    if _BUCKET.fullmatch(name) is None:
        raise ValueError(
            f'"s3_endpoint" must name a bucket of 3 to 63 letters, digits, dots and hyphens; it names {name!r}.'
        )
    return name


def _folder(path: str) -> str:
    parts = path.split("/") if path else []
    if len(path) > MAX_FOLDER_CHARACTERS or any(_FOLDER_PART.fullmatch(part) is None for part in parts):
        raise ValueError(
            f'"s3_endpoint" has the folder {path!r} behind the bucket: its parts must begin with a letter or digit and '
            f"have only letters, digits and . _ : = -, and it at most {MAX_FOLDER_CHARACTERS} characters."
        )
    return f"{path}/" if path else ""
