"""The keys of `resp`: where the server is, who we are there, and that a secret is never shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache.errors import ConfigError, ResourceError
from lmcache.l2.adapter_types import build, parse_adapter
from lmcache.l2.adapters.resp_config import RespConfig, parse_url

HERE = {"type": "resp", "host": "127.0.0.1", "port": 6379}
SECRET = "hunter2:with/odd@signs"


def config(**keys: Any) -> RespConfig:
    parsed = parse_adapter({"type": "resp", **keys}, 0)
    assert isinstance(parsed, RespConfig)
    return parsed


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**keys)
    message = str(caught.value)
    assert message.startswith("--l2-adapter 1 (resp)") and message.endswith(".") and "\n" not in message
    assert SECRET not in message
    return message


def test_the_documented_keys_are_read() -> None:
    read = parse_adapter({**HERE, "num_workers": 4, "username": "u", "password": "p", "max_capacity_gb": 1}, 0)
    assert isinstance(read, RespConfig)
    assert read.address == ("127.0.0.1", 6379) and read.num_workers == 4 and read.limit_bytes == 1 << 30
    assert read.credentials({}) == ("u", "p") and not read.uses_tls
    read = config(host="h", port=1)
    assert (read.num_workers, read.database_number, read.prefix) == (8, 0, "lmcache")
    assert read.credentials({}) == ("", "")


@pytest.mark.parametrize(
    ("url", "address", "user", "password", "database", "tls"),
    [
        ("redis://h", ("h", 6379), "", "", 0, False),
        ("redis://h:1/7", ("h", 1), "", "", 7, False),
        ("rediss://u:p%40%2F@[::1]:2/", ("::1", 2), "u", "p@/", 0, True),
        ("redis://:p@h", ("h", 6379), "", "p", 0, False),
        ("unix:///run/redis.sock", ("/run/redis.sock", 0), "", "", 0, False),
    ],
)
def test_urls(url: str, address: tuple[str, int], user: str, password: str, database: int, tls: bool) -> None:
    read = config(url=url)
    assert (read.address, read.database_number, read.uses_tls) == (address, database, tls)
    assert read.credentials({}) == (user, password)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, '"host" and "port", or "url"'),
        ({"host": "h"}, '"port" is required'),
        ({"port": 1}, '"host" is required'),
        ({"host": "h", "port": 1, "url": "redis://h"}, "one of them"),
        ({"host": "h", "port": 0}, '"port" must be a whole number from 1 to 65535'),
        ({"url": "http://h"}, "scheme must be one of redis, rediss, unix"),
        ({"url": "redis://"}, "names no host"),
        ({"url": f"redis://:{SECRET}@h:99999"}, "cannot be read"),
        ({"url": "redis://:hunter2@x@h"}, "written %40"),
        ({"url": f"redis://:{SECRET}@h"}, "cannot be read"),
        ({"url": "redis://h/x"}, "a database is a number"),
        ({"url": "redis://h?db=1"}, "no options"),
        ({"url": "unix://relative/path"}, "three slashes"),
        ({"host": "h", "port": 1, "cluster": True, "database": 1}, "no database 1"),
        ({"url": "redis://h/2", "cluster": True}, "no database 2"),
        ({"url": "redis://h/0", "database": 3}, "not both"),
        ({"url": "unix:///run/redis.sock", "tls": True}, '"tls" is for TCP'),
        ({"host": "/run/redis.sock", "tls": True}, '"tls" is for TCP'),
        ({"host": "h", "port": 1, "tls": True, "tls_cert": "x"}, "belong together"),
        ({"host": "h", "port": 1, "tls_ca": "x"}, 'need "tls": true'),
        ({"host": "h", "port": 1, "password": SECRET, "password_file": "x"}, "not both"),
        ({"host": "h", "port": 1, "password": 3}, '"password" must be a string'),
        ({"host": "h", "port": 1, "prefix": "a b"}, '"prefix" must be 1 to 128 letters'),
        ({"host": "h", "port": 1, "max_value_bytes": 10}, "max_value_bytes"),
        ({"sentinel": {"master": "kv", "nodes": []}}, '"nodes" must be a list of "host:port"'),
        ({"sentinel": {"master": "kv", "nodes": ["h:x"]}}, "'h:x'"),
        ({"sentinel": {"nodes": ["h:1"]}}, '"master" is required'),
        ({"sentinel": {"master": "kv", "nodes": ["h:1"]}, "cluster": True}, "exclude each other"),
        ({"host": "h", "port": 1, "pasword": SECRET}, "did you mean password?"),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(keys: dict[str, Any], words: str) -> None:
    assert words in refusal(**keys)


def test_where_the_password_comes_from(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(f"{SECRET}\n")
    file = str(tmp_path / "file")
    here = {"host": "h", "port": 1}
    assert config(**here).credentials({"LMCACHE_RESP_PASSWORD": "e"}).password == "e"
    assert config(**here).credentials({"LMCACHE_RESP_PASSWORD_FILE": file}).password == SECRET
    assert config(**here, password_file=file).credentials({"LMCACHE_RESP_PASSWORD": "e"}).password == SECRET
    assert config(**here, password="k").credentials({"LMCACHE_RESP_PASSWORD": "e"}).password == "k"
    assert config(url="redis://:u@h").credentials({"LMCACHE_RESP_PASSWORD": "e"}).password == "u"
    environ = {"LMCACHE_RESP_USERNAME": "name", "LMCACHE_RESP_PASSWORD": "e"}
    assert config(**here).credentials(environ) == ("name", "e")
    (tmp_path / "name").write_text("filed")
    environ = {"LMCACHE_RESP_USERNAME_FILE": str(tmp_path / "name"), "LMCACHE_RESP_PASSWORD": "e"}
    assert config(**here).credentials(environ) == ("filed", "e")


def test_which_files_are_read_again() -> None:
    environ = {"LMCACHE_RESP_USERNAME_FILE": "/u", "LMCACHE_RESP_PASSWORD_FILE": "/p"}
    here = {"host": "h", "port": 1}
    assert config(**here).credential_files({}) == ("", "")
    assert config(**here).credential_files(environ) == ("/u", "/p")
    assert config(**here, password_file="/k").credential_files(environ) == ("/u", "/k")
    assert config(**here, username="u", password="k").credential_files(environ) == ("", "")
    assert config(url="redis://u:p@h").credential_files(environ) == ("", "")
    assert config(url="redis://u:p@h", password_file="/k").credential_files(environ) == ("", "/k")
    assert config(**here).credential_files({**environ, "LMCACHE_RESP_PASSWORD": "e"}) == ("/u", "")


def test_a_password_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    here = {"host": "h", "port": 1}
    with pytest.raises(ResourceError, match="cannot be read: No such file"):
        config(**here, password_file=str(tmp_path / "none")).credentials({})
    for content in (b"", b"\n", b"two\nlines", b"\xff\xfe", bytes(70_000)):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ConfigError, match="must hold"):
            config(**here, password_file=str(tmp_path / "file")).credentials({})
    with pytest.raises(ConfigError, match='"username" needs a password'):
        config(**here, username="u").credentials({})


def test_no_secret_is_shown() -> None:
    sentinel = {"master": "kv", "nodes": ["h:1"], "password": SECRET}
    for keys in ({**HERE, "password": SECRET}, {"type": "resp", "sentinel": sentinel}):
        read = parse_adapter(keys, 0)
        assert SECRET not in repr(read) and SECRET not in str(read) and "resp" in repr(read)
    read = config(url="redis://user:hunter2@h")
    assert "hunter2" not in repr(read)
    assert "hunter2" not in repr(read.credentials({}))
    assert parse_url("redis://user:hunter2@h").password == "hunter2"


@pytest.mark.parametrize(
    "keys",
    [
        {"host": f"redis://user:{SECRET}@h", "port": 1},
        {"host": f"user:{SECRET}@h", "port": 1},
        {"sentinel": {"master": "kv", "nodes": [f"redis://user:{SECRET}@h:1"]}},
        {"sentinel": {"master": "kv", "nodes": [f"user:{SECRET}@h:1"]}},
    ],
)
def test_a_password_at_the_wrong_place_is_refused_and_not_repeated(keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r'"(host|nodes)" must be') as refusal:
        config(**keys)
    assert SECRET not in str(refusal.value)


def test_building_touches_nothing() -> None:
    assert build(parse_adapter({**HERE, "port": 1}, 0)).adapter.status()["servers"] == 0
