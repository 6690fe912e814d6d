"""Listings and deletions as servers write them."""

from __future__ import annotations

import pytest

from lmcache.errors import AdapterError
from lmcache.l2.adapters.s3_xml import Listed, delete_body, error_code, list_page, not_deleted

NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
NS = 1_796_342_400_123_000_000  # 2026-12-04T00:00:00.123Z


def listing(*rows: str, more: str = "<IsTruncated>false</IsTruncated>") -> bytes:
    contents = "".join(f"<Contents>{row}</Contents>" for row in rows)
    head = f'<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult {NAMESPACE}><Name>b</Name>'
    return f"{head}{contents}{more}</ListBucketResult>".encode()


def row(name: str, size: object = 8192, time: str = "2026-12-04T00:00:00.123Z") -> str:
    owner = "<Owner><ID>me</ID></Owner>"
    return f"<Key>{name}</Key><LastModified>{time}</LastModified><ETag>&quot;x&quot;</ETag><Size>{size}</Size>{owner}"


def test_a_page_and_the_next_one() -> None:
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>a+b/c=</NextContinuationToken>"
    page = list_page(listing(row("one"), row("two", 1, "2026-12-04T00:00:00Z"), more=more))
    assert page.objects == [Listed("one", 8192, NS), Listed("two", 1, NS - 123_000_000)]
    assert page.next_token == "a+b/c="
    assert list_page(listing()).objects == [] and list_page(listing()).next_token == ""


def test_other_orders_and_prefixes_of_elements() -> None:
    turned = "<Size>8192</Size><LastModified>2026-12-04T00:00:00.123Z</LastModified><Key>one</Key>"
    assert list_page(listing(turned)).objects == [Listed("one", 8192, NS)]
    assert list_page(listing(turned, row("two"))).objects == [Listed("one", 8192, NS), Listed("two", 8192, NS)]
    prefixed = b'<x:ListBucketResult xmlns:x="y"><x:Contents><x:Key>one</x:Key><x:Size>1</x:Size></x:Contents>'
    assert list_page(prefixed + b"</x:ListBucketResult>").objects == [Listed("one", 1, 0)]


def test_names_are_decoded_where_they_are_encoded() -> None:
    assert list_page(listing(row("a%3Ab"))).objects[0].name == "a%3Ab"
    encoded = listing(row("a%3Ab%2541"), more="<EncodingType>url</EncodingType>")
    assert list_page(encoded).objects[0].name == "a:b%41"


@pytest.mark.parametrize("size", ["", "-1", "1e3", "x", "9" * 19])
def test_objects_without_a_size_are_left_out(size: str) -> None:
    assert [listed.name for listed in list_page(listing(row("one", size), row("two"))).objects] == ["two"]


@pytest.mark.parametrize(
    "time",
    ["", "yesterday", "2026-99-99T00:00:00Z", "9999-99-04", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"],
)
def test_objects_without_a_time_are_the_oldest(time: str) -> None:
    assert list_page(listing(row("one", time=time))).objects == [Listed("one", 8192, 0)]


@pytest.mark.parametrize("body", [b"", b"{}", b"<a>", b"<Error></Error>", b"\xff\xfe<\x00a\x00", b"<!DOCTYPE a><a/>"])
def test_what_is_no_listing(body: bytes) -> None:
    with pytest.raises(AdapterError):
        list_page(body)


def test_deletions() -> None:
    assert delete_body(["a", "b&c"]) == (
        b"<Delete><Quiet>true</Quiet><Object><Key>a</Key></Object><Object><Key>b&amp;c</Key></Object></Delete>"
    )
    error = "<Error><Key>a</Key><Code>AccessDenied</Code></Error>"
    assert not_deleted(f"<DeleteResult {NAMESPACE}>{error}</DeleteResult>".encode()) == {"a": "AccessDenied"}
    assert not_deleted(f"<DeleteResult {NAMESPACE}/>".encode()) == {}
    with pytest.raises(AdapterError):
        not_deleted(b"<html></html>")


def test_of_an_error_only_the_code_is_used() -> None:
    assert error_code(b"<Error><Code>SlowDown</Code><StringToSign>secret</StringToSign></Error>") == "SlowDown"
    assert error_code(b"<Error><Code>a b</Code></Error>") == "" == error_code(b"")
