"""The keys of `s3`: which bucket under which URL, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lmcache.errors import ConfigError
from lmcache.l2.adapter_types import check, parse_adapter
from lmcache.l2.adapters.s3_config import S3Config

AWS = {"type": "s3", "s3_endpoint": "s3://my-bucket", "s3_region": "us-west-2"}
KEYS = {"aws_access_key_id": "minio", "aws_secret_access_key": "minio123"}
EXPRESS = "kv--usw2-az1--x-s3"


def config(**keys: Any) -> S3Config:
    parsed = parse_adapter({**AWS, **keys}, 0)
    assert isinstance(parsed, S3Config)
    return parsed


def test_every_documented_key_is_read() -> None:
    given = {
        "s3_num_io_threads": 8,
        "s3_prefer_http2": False,
        "s3_enable_s3express": True,
        "s3_endpoint": f"s3://{EXPRESS}",
        "disable_tls": True,
        "max_capacity_gb": 2.5,
        **KEYS,
    }
    parsed = config(**given)
    assert {name: getattr(parsed, name) for name in given} == given
    defaults = config()
    assert (defaults.s3_num_io_threads, defaults.s3_prefer_http2, defaults.s3_enable_s3express) == (64, True, False)
    assert (defaults.disable_tls, defaults.aws_access_key_id, defaults.limit_bytes) == (False, "", None)


@pytest.mark.parametrize(
    ("keys", "url"),
    [
        ({}, "https://my-bucket.s3.us-west-2.amazonaws.com/lmcache"),
        ({"s3_endpoint": "s3://my-bucket/"}, "https://my-bucket.s3.us-west-2.amazonaws.com/lmcache"),
        ({"s3_endpoint": "s3://my-bucket/a/b/"}, "https://my-bucket.s3.us-west-2.amazonaws.com/a/b/lmcache"),
        ({"prefix": "team/kv"}, "https://my-bucket.s3.us-west-2.amazonaws.com/team/kv"),
        ({"disable_tls": True}, "http://my-bucket.s3.us-west-2.amazonaws.com/lmcache"),
        ({"s3_region": "cn-north-1"}, "https://my-bucket.s3.cn-north-1.amazonaws.com.cn/lmcache"),
        ({"s3_addressing_style": "path"}, "https://s3.us-west-2.amazonaws.com/my-bucket/lmcache"),
        ({"s3_endpoint": "s3://my.bucket"}, "https://s3.us-west-2.amazonaws.com/my.bucket/lmcache"),
        ({"s3_endpoint": "s3://my.bucket", "disable_tls": True}, "http://my.bucket.s3.us-west-2.amazonaws.com/lmcache"),
        (
            {"s3_endpoint": f"s3://{EXPRESS}", "s3_enable_s3express": True},
            f"https://{EXPRESS}.s3express-usw2-az1.us-west-2.amazonaws.com/lmcache",
        ),
        (
            {"s3_endpoint": "kv.s3.us-west-2.amazonaws.com/deep"},
            "https://kv.s3.us-west-2.amazonaws.com/deep/lmcache",
        ),
        (
            {"s3_endpoint": f"{EXPRESS}.s3express-usw2-az1.us-west-2.amazonaws.com", "s3_enable_s3express": True},
            f"https://{EXPRESS}.s3express-usw2-az1.us-west-2.amazonaws.com/lmcache",
        ),
        ({"s3_endpoint": "s3.us-west-2.amazonaws.com/kv-1"}, "https://s3.us-west-2.amazonaws.com/kv-1/lmcache"),
        ({"s3_endpoint": "minio.local:9000/kv-1", "disable_tls": True}, "http://minio.local:9000/kv-1/lmcache"),
        ({"s3_endpoint": "http://minio.local:9000/kv-1/x"}, "http://minio.local:9000/kv-1/x/lmcache"),
        ({"s3_endpoint": "HTTPS://minio.local/kv-1"}, "https://minio.local/kv-1/lmcache"),
        ({"s3_endpoint": "[::1]:9000/kv-1"}, "https://[::1]:9000/kv-1/lmcache"),
        (
            {"s3_endpoint": "kv.minio.local:9000", "s3_addressing_style": "virtual"},
            "https://kv.minio.local:9000/lmcache",
        ),
        (
            {"s3_endpoint": "minio.local:9000", "s3_addressing_style": "path"},
            "https://minio.local:9000/lmcache/lmcache",
        ),
    ],
)
def test_where_objects_are(keys: dict[str, Any], url: str) -> None:
    parsed = config(**keys)
    location = parsed.location
    scheme = "https" if location.tls else "http"
    assert f"{scheme}://{location.host}{location.object_path(location.folder + parsed.prefix)}" == url


def test_a_host_alone_may_be_either() -> None:
    location = config(s3_endpoint="minio.local:9000", s3_region="us-east-1", disable_tls=True, **KEYS).location
    assert (location.is_virtual, location.host, location.port, location.tls) == (None, "minio.local:9000", 9000, False)
    assert location.resolved(is_virtual=True).object_path("x") == "/x"
    assert location.resolved(is_virtual=False).object_path("x") == "/lmcache/x"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"s3_endpoint": "s3://"}, "must name a bucket of 3 to 63 letters"),
        ({"s3_endpoint": "s3://b"}, "it names 'b'"),
        ({"s3_endpoint": "gs://bucket"}, "it begins with gs://"),
        ({"s3_endpoint": "https://user:word@host/bucket"}, "neither a user nor a query"),
        ({"s3_endpoint": "https://user:wor/word@host/bucket"}, "neither a user nor a query"),
        ({"s3_endpoint": "s3://user:wor/word@bucket"}, "neither a user nor a query"),
        ({"s3_endpoint": "https://host/bucket?sig=word"}, "neither a user nor a query"),
        ({"s3_endpoint": "https://host/bucket", "disable_tls": True}, "leave out one of both"),
        ({"s3_endpoint": "host:70000/bucket"}, "a port from 1 to 65535; got 'host:70000'"),
        ({"s3_endpoint": "two words/bucket"}, "got 'two words'"),
        ({"s3_endpoint": "/bucket"}, "must name a host"),
        ({"s3_endpoint": "host/bu"}, "it names 'bu'"),
        ({"s3_endpoint": "s3://bucket/../other"}, "has the folder '../other'"),
        ({"s3_endpoint": "s3://bucket/a//b"}, "has the folder 'a//b'"),
        ({"prefix": "a//b"}, '"prefix" must have parts'),
        ({"prefix": "a/../b"}, '"prefix" must have parts'),
        ({"s3_num_io_threads": 0}, '"s3_num_io_threads" must be a whole number from 1 to 1024; got 0'),
        ({"s3_addressing_style": "host"}, "one of auto, path, virtual"),
        ({"aws_access_key_id": "x"}, "belong together"),
        ({"aws_secret_access_key": "word"}, "belong together"),
        ({"s3_enable_s3express": True}, "must be true for directory buckets"),
        ({"s3_endpoint": f"s3://{EXPRESS}"}, "must be true for directory buckets"),
        ({"s3_region": ""}, '"s3_region" must be a non-empty string'),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**keys)
    (sentence,) = caught.value.problems
    assert said in sentence and sentence.startswith("--l2-adapter 1 (s3): ") and sentence.endswith(".")
    assert "word@" not in sentence and "sig=" not in sentence and "word'" not in sentence and "user:" not in sentence


def test_keys_without_effect_are_reported() -> None:
    notes = config(disable_tls=True, s3_prefer_http2=False, tls_ca="/ca.pem").notes()
    assert [note.split('"')[1] for note in notes] == ["s3_prefer_http2", "tls_ca"]
    assert config(s3_prefer_http2=False, tls_ca="/ca.pem").notes() == []


def test_a_configuration_shows_no_secret() -> None:
    shown = repr(config(aws_access_key_id="AKIAPLANTED", aws_secret_access_key="planted-secret"))
    assert "PLANTED" not in shown and "planted" not in shown and "us-west-2" in shown


def test_a_missing_package_is_reported_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "awscrt.s3", None)
    with pytest.raises(Exception, match=r'awscrt cannot be imported .*; install it by `pip install "lmcache\[s3\]"`'):
        check(config())


def test_what_the_guide_shows_is_accepted() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "how-to" / "keep_kv_in_s3.md").read_text()
    shown = [json.loads(text) for text in re.findall(r"--l2-adapter '(.*?)'", guide, re.DOTALL)]
    assert len(shown) == 3
    for specification in shown:
        assert parse_adapter(specification, 0).notes() == []
    rows = re.findall(r"^\| `([^`]+)` \| .* \| `(https://[^`]+)/lmcache/v1/...` \|$", guide, re.MULTILINE)
    assert len(rows) == 5
    for endpoint, url in rows:
        region = "us-west-2" if "us-west-2" in endpoint else "REGION"
        location = config(s3_endpoint=endpoint, s3_region=region, s3_enable_s3express="x-s3" in endpoint).location
        assert f"https://{location.host}{location.object_path(location.folder)}".rstrip("/") == url
