"""What a bucket's refusals mean, one sentence each."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.request import getproxies_environment, proxy_bypass

from lmcache.errors import ConfigError, LMCacheError, ResourceError
from lmcache.l2.adapters.s3_config import S3Config, S3Location
from lmcache.l2.adapters.s3_requests import Fault

CONNECT_SECONDS = 3.0

_NEEDS = "s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject"
_KEYS = "aws_access_key_id and aws_secret_access_key, or what the AWS default chain finds"
_ELSEWHERE = (
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
)
_KEY_CODES = ("InvalidAccessKeyId", "InvalidToken", "ExpiredToken")
_REGION = re.compile(r"[a-z0-9-]{1,64}")
FULL_CODES = frozenset(("QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage"))


def refusal(config: S3Config, location: S3Location, fault: Fault) -> LMCacheError:
    """Why the bucket cannot be used. Blocks for some seconds where no answer came: it tries to connect itself."""
    if fault.status:
        sentence = _of_answer(config, location, fault)
    else:
        proxy = _proxy_variable(location)
        sentence = "" if proxy else _of_connecting(location, config.authorities)
        sentence = sentence or _of_silence(location, fault, proxy)
    kind = ConfigError if fault.code in ("NoSuchBucket", *_ELSEWHERE) else ResourceError
    return kind(f"{config.where}: {sentence}")


def explained(fault: Fault) -> str:
    """The fault of a request to a bucket that was there at the start, and what the operator can do about it."""
    if fault.code == "NoSuchBucket":
        return f"{fault}: create the bucket again"
    if fault.code in (*_KEY_CODES, "SignatureDoesNotMatch"):
        return f"{fault}: correct {_KEYS}"
    if fault.code == "RequestTimeTooSkewed":
        return f"{fault}: set the clock of this machine"
    return f"{fault}: the credentials need {_NEEDS}" if fault.status == 403 else str(fault)


def _of_answer(config: S3Config, location: S3Location, fault: Fault) -> str:
    if fault.code == "NoSuchBucket":
        return f"there is no bucket at {location}; create it, or correct s3_endpoint."
    if fault.code in _KEY_CODES:
        return f"{location} does not accept the access key ({fault.code}); correct {_KEYS}."
    if fault.code == "SignatureDoesNotMatch":
        return f"{location} finds that the secret key is not that of the access key; correct {_KEYS}."
    if fault.code == "RequestTimeTooSkewed":
        said = _its_time(location, config.authorities)
        return f"the clock of this machine differs from that of {location}{said}; set it, best by NTP."
    if fault.code in _ELSEWHERE or fault.status in (301, 307):
        region = fault.header("x-amz-bucket-region")
        actual = f" is in the region {region}" if _REGION.fullmatch(region) else " is not in that region"
        return f"the bucket at {location}{actual}; s3_region is {config.s3_region!r}: correct it or s3_endpoint."
    if fault.status == 403:
        return f"the credentials may not use the bucket at {location} ({fault}); they need {_NEEDS}."
    if fault.status == 400 and not location.tls:
        return f"{location} answered {fault}; if it speaks TLS only, leave out disable_tls and http://."
    return f"{location} answered {fault} when it was asked to list the bucket; see whether it is an S3 server."


def _of_silence(location: S3Location, fault: Fault, proxy: str) -> str:
    code = fault.code
    if "CREDENTIALS" in code or "AUTH" in code:
        return f"no credentials for {location} were found ({code}); give {_KEYS}."
    if proxy:
        return f"{location} cannot be reached by the proxy that {proxy} names ({code}); correct it, or set NO_PROXY."
    return f"{location} cannot be reached ({code}); see whether it is up, or correct s3_endpoint."


def _proxy_variable(location: S3Location) -> str:
    """The variable of the environment by whose proxy awscrt asks; "" where it asks itself. Its value may have a
    password."""
    scheme = "https" if location.tls else "http"
    if not getproxies_environment().get(scheme) or proxy_bypass(location.host):
        return ""
    return f"{scheme.upper()}_PROXY"


def _of_connecting(location: S3Location, authorities: str) -> str:
    """ "" where a connection can be made. awscrt says less, and of TLS only after half a minute."""
    host = location.host_name
    try:
        with socket.create_connection((host, location.port or (443 if location.tls else 80)), CONNECT_SECONDS) as plain:
            if location.tls:
                context = ssl.create_default_context(cafile=authorities or None)
                context.wrap_socket(plain, server_hostname=host).close()
    except socket.gaierror as error:
        return f"the host {host} has no address ({error.strerror}); correct s3_endpoint."
    except ssl.SSLCertVerificationError as error:
        return f"the certificate of {location} is not trusted ({error.verify_message}); see tls_ca."
    except ssl.SSLError as error:
        return f"{location} does not agree on TLS ({error.reason}); set disable_tls if it speaks plain HTTP."
    except OSError as error:
        reason = error.strerror or "no answer"
        return f"{location} cannot be reached ({reason}); see whether it is up, or correct s3_endpoint."
    return ""


def _its_time(location: S3Location, authorities: str) -> str:
    """Asks the store once more what time it has: awscrt keeps the headers of such a refusal to itself."""
    try:
        with contextlib.closing(_connection(location, authorities)) as connection:
            connection.request("HEAD", "/")
            said = connection.getresponse().headers.get("Date", "")
        return f", which says {parsedate_to_datetime(said).isoformat()}"
    except (OSError, HTTPException, ValueError, OverflowError):
        return ""


def _connection(location: S3Location, authorities: str) -> HTTPConnection:
    port = location.port or None
    if not location.tls:
        return HTTPConnection(location.host_name, port, timeout=CONNECT_SECONDS)
    context = ssl.create_default_context(cafile=authorities or None)
    return HTTPSConnection(location.host_name, port, timeout=CONNECT_SECONDS, context=context)
