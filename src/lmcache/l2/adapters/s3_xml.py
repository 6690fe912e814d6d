"""The XML that S3 servers answer with, and the one request that has some (Amazon S3 API reference, 2006-03-01)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from lmcache.errors import AdapterError
from lmcache.l2.adapters.scan_order import MAX_TIME_NS

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,12}))?Z?", re.ASCII)
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")


class Listed(NamedTuple):
    name: str
    size_bytes: int
    modified_ns: int  # since 1970


@dataclass(frozen=True, slots=True)
class ListPage:
    objects: list[Listed]
    next_token: str  # "" on the last page


def error_code(body: bytes) -> str:
    """The code of an error answer; "" where it has none. Nothing else of it is used: a server may quote what was
    signed."""
    match = _CODE.search(body[:4096])
    return match[1].decode() if match else ""


def is_list_page(body: bytes) -> bool:
    try:
        return _local(_parsed(body).tag) == "ListBucketResult"
    except AdapterError:
        return False


def list_page(body: bytes) -> ListPage:
    """A page of ListObjectsV2. AdapterError where it is none."""
    # A tree is made of what is not an object only: of a thousand objects it costs more than finding their fields.
    head, *parts = body.split(b"<Contents>")
    rows = [_row(part) for part in parts]
    rest = head + b"".join(part.partition(b"</Contents>")[2] for part in parts)
    root = _parsed(rest)
    if _local(root.tag) != "ListBucketResult":
        raise AdapterError(f"the server answered a listing with {_local(root.tag)[:64]!r}")
    token, truncated, encoded = "", False, False
    for child in root:
        match _local(child.tag):
            case "NextContinuationToken":
                token = child.text or ""
            case "IsTruncated":
                truncated = (child.text or "").strip().lower() == "true"
            case "EncodingType":
                encoded = child.text == "url"
            case "Contents":  # with a name space's prefix
                rows.append(tuple(_text_of(child, name) for name in ("Key", "LastModified", "Size")))
    if truncated and not token:
        raise AdapterError("the server answered a listing that goes on without saying where")
    objects = [
        Listed(unquote(key) if encoded and "%" in key else key, int(size), _ns_of(modified))
        for key, modified, size in rows
        if key and size.isascii() and size.isdigit() and len(size) <= 18
    ]
    return ListPage(objects, token if truncated else "")


def _row(part: bytes) -> tuple[str, ...]:
    """Key, time and size of what begins behind <Contents>."""
    text = part.partition(b"</Contents>")[0].decode(errors="replace")
    return tuple(text.partition(f"<{name}>")[2].partition("</")[0].strip() for name in ("Key", "LastModified", "Size"))


def _text_of(element: ElementTree.Element, name: str) -> str:
    return next((field.text or "" for field in element if _local(field.tag) == name), "")


def delete_body(names: Sequence[str]) -> bytes:
    objects = "".join(f"<Object><Key>{escape(name)}</Key></Object>" for name in names)
    return f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()


def not_deleted(body: bytes) -> dict[str, str]:
    """The code of each name that DeleteObjects could not delete."""
    root = _parsed(body)
    if _local(root.tag) != "DeleteResult":
        raise AdapterError(f"the server answered a deletion with {_local(root.tag)[:64]!r}")
    faults = {}
    for child in root:
        if _local(child.tag) == "Error":
            fields = {_local(field.tag): field.text or "" for field in child}
            faults[fields.get("Key", "")] = fields.get("Code", "")
    return faults


def _parsed(body: bytes) -> ElementTree.Element:
    # No answer of S3 has a document type; entities that expand without end need one.
    if b"<!DOCTYPE" in body or b"<!ENTITY" in body or b"\x00" in body:
        raise AdapterError("the server answered with a document type, which S3 does not have")
    try:
        return ElementTree.fromstring(body)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise AdapterError(f"the server answered with something else than XML ({error})") from None


def _local(tag: str) -> str:
    """Without its name space."""
    return tag.rpartition("}")[2]


@lru_cache(maxsize=1024)  # a page has few different seconds
def _ns_of(text: str) -> int:
    """0 where it is no time."""
    match = _TIME.fullmatch(text)
    if match is None:
        return 0
    try:
        seconds = int(datetime.fromisoformat(match[1]).replace(tzinfo=timezone.utc).timestamp())
    except (ValueError, OverflowError):
        return 0
    ns = seconds * 1_000_000_000 + int((match[2] or "").ljust(9, "0")[:9])
    return ns if 0 <= ns <= MAX_TIME_NS else 0  # servers write times that they do not have as the year 1
