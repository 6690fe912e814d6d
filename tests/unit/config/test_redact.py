from __future__ import annotations

import json

import pytest

from lmcache.config.redact import HIDDEN, redacted
from lmcache.config.spec import ServerConfig


def shown(adapter: dict[str, object]) -> dict[str, object]:
    config = ServerConfig(l1_size_gb=1.0, eviction_policy="LRU", l2_adapter=[adapter])
    values = redacted(config)
    json.dumps(values)  # must be JSON as it is
    adapters: list[dict[str, object]] = values["l2_adapter"]
    return adapters[0]


@pytest.mark.parametrize(
    "key",
    [
        "password",
        "aws_secret_access_key",
        "aws_access_key_id",
        "aws_session_token",
        "connection_string",
        "account_key",
        "api_key",
        "key",
        "encryption_key",
        "Authorization",
        "private_key_pem",
        "sas_token",
        "passphrase",
        "client_secret",
    ],
)
def test_values_that_grant_access_are_hidden_at_any_depth(key: str) -> None:
    assert shown({"type": "x", key: "s3cr3t"})[key] == HIDDEN
    assert "s3cr3t" not in json.dumps(shown({"type": "x", "serde": {"deep": [{key: "s3cr3t"}]}}))


def test_users_and_queries_of_urls_are_hidden() -> None:
    adapter = shown(
        {"type": "x", "account_url": "https://me:s3cr3t@host/box?sv=1&sig=s3cr3t", "plain": "https://host/box"}
    )
    assert adapter["account_url"] == f"https://{HIDDEN}@host/box?{HIDDEN}"
    assert adapter["plain"] == "https://host/box"


@pytest.mark.parametrize("password", ["s3 cr3t", "s3@cr3t", "s3:cr3t", "s3/cr3t", "s3\ncr3t"])
def test_an_odd_password_of_a_url_is_hidden(password: str) -> None:
    assert shown({"type": "x", "url": f"redis://me:{password}@host:1/0"})["url"] == f"redis://{HIDDEN}@host:1/0"


def test_what_is_no_secret_is_shown() -> None:
    adapter = {"type": "fs_native", "base_path": "/data", "num_workers": 4, "use_odirect": True, "host": "h", "port": 1}
    assert shown(adapter) == adapter
    config = ServerConfig(l1_size_gb=1.0, eviction_policy="LRU", admin_token_file="/run/token")
    assert redacted(config)["admin_token_file"] == "/run/token"
