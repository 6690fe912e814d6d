"""What a Struct of settings accepts, and how it refuses: shown on keys that an adapter for a remote store may have."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from lmcache.config.struct_settings import keys_of, read
from lmcache.errors import ConfigError

WHERE = "--store"


class Tls(msgspec.Struct):
    ca_file: str
    verify: bool = True


class Store(msgspec.Struct, kw_only=True):
    host: Annotated[str, Meta(min_length=1, description="where it is")]
    port: Annotated[int, Meta(ge=1, le=65_535)] = 6379
    password: Annotated[str, Meta(max_length=64)] = msgspec.field(
        default_factory=lambda: os.environ.get("TEST_PASSWORD", "")
    )
    mode: Literal["single", "cluster"] = "single"
    tier: Literal["", "hot"] = ""
    tls: Tls | None = None
    ratio: Annotated[float, Meta(gt=0)] | None = None
    workers: Annotated[int, Meta(ge=2)] = 2
    names: list[str] = []
    number: int = 0

    def __post_init__(self) -> None:
        if self.mode == "cluster" and self.tls is None:
            raise ValueError('"mode" "cluster" needs "tls".')


def parsed(**given: Any) -> Store:
    return read(given, Store, WHERE, unbuilt={"serde": "leave it out"}, number=7)


def refusals(**given: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parsed(**given)
    return list(caught.value.problems)


def test_what_is_given_is_typed_and_the_rest_is_at_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PASSWORD", "from outside")
    store = parsed(host="h", tls={"ca_file": "/ca"}, ratio=1)
    assert (store.port, store.mode, store.ratio, store.number) == (6379, "single", 1.0, 7)
    assert store.tls == Tls("/ca") and store.password == "from outside"
    assert parsed(host="h", password="own").password == "own"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"port": 0}, '"port" must be a whole number from 1 to 65535; got 0.'),
        ({"port": True}, '"port" must be a whole number from 1 to 65535; got True.'),
        ({"port": 5.0}, '"port" must be a whole number from 1 to 65535; got 5.0.'),
        ({"workers": 1}, '"workers" must be a whole number of at least 2; got 1.'),
        ({"ratio": 0}, '"ratio" must be a number above 0; got 0.'),
        ({"ratio": None}, '"ratio" must be a number above 0; got None.'),
        ({"host": ""}, "\"host\" must be a non-empty string; got ''."),
        ({"mode": "singel"}, "\"mode\" must be one of single, cluster (did you mean single?); got 'singel'."),
        ({"tier": "Hot"}, "\"tier\" must be one of hot, or empty (did you mean hot?); got 'Hot'."),
        ({"tls": True}, '"tls" must be an object with the key "ca_file"; got True.'),
        ({"tls": {}}, '"tls": the key "ca_file" is required.'),
        ({"tls": {"ca_file": 1}}, '"tls": "ca_file" must be a string; got 1.'),
        ({"mode": "cluster"}, '"mode" "cluster" needs "tls".'),
        ({"serde": {}}, '"serde" is not built yet; leave it out.'),
        ({"hots": "h"}, 'unknown key "hots" (did you mean host?); allowed are host, mode, names, password, port, '),
        ({"number": 8}, 'unknown key "number"'),
        ({"names": ["a", 1]}, "\"names\" is not valid: Expected `str`, got `int` - at `$[1]`; got ['a', 1]."),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(given: dict[str, Any], sentence: str) -> None:
    (refusal,) = refusals(**{"host": "h", **given})
    assert refusal.startswith(WHERE) and sentence in refusal


def test_a_secret_is_not_repeated() -> None:
    (refusal,) = refusals(host="h", password="x" * 65)
    assert "xxx" not in refusal and '"password" is not valid: Expected `str` of length <= 64.' in refusal


def test_all_that_is_wrong_is_reported_at_once() -> None:
    assert len(refusals(hots="h", port=0, tls={"verify": 1, "x": 2})) == 5


def test_keys_are_described_for_help() -> None:
    keys = {key.name: key for key in keys_of(Store, frozenset({"number"}))}
    assert list(keys) == ["host", "port", "password", "mode", "tier", "tls", "ratio", "workers", "names"]
    assert (keys["host"].required, keys["host"].description) == (True, "where it is")
    assert (keys["port"].required, keys["port"].default) == (False, 6379)
    assert keys["mode"].choices == ("single", "cluster")
    assert keys["tls"].nested is Tls
