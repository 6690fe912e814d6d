"""The keys of `mooncake_store`: which are ours, which go on to Mooncake, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache.errors import ConfigError
from lmcache.l2.adapter_types import parse_adapter
from lmcache.l2.adapters.mooncake_config import MooncakeConfig

DOCUMENTED = {
    "type": "mooncake_store",
    "num_workers": 4,
    "local_hostname": "node01",
    "metadata_server": "http://localhost:8080/metadata",
    "master_server_addr": "localhost:50051",
    "protocol": "tcp",
    "local_buffer_size": "3221225472",
    "global_segment_size": "3221225472",
}


def config(**keys: Any) -> MooncakeConfig:
    parsed = parse_adapter({**DOCUMENTED, **keys}, 0)
    assert isinstance(parsed, MooncakeConfig)
    return parsed


def test_the_documented_line_is_read_and_goes_to_setup() -> None:
    read = config()
    ours = ("type", "num_workers")
    assert read.setup_keys == {name: value for name, value in DOCUMENTED.items() if name not in ours}
    assert read.num_workers == 4
    assert read.services == {"master_server_addr": ("localhost", 50051), "metadata_server": ("localhost", 8080)}
    assert {**DOCUMENTED, "prefix": "lmcache"}.items() <= read.as_json().items()


def test_every_other_key_goes_to_setup_as_it_is() -> None:
    read = config(tenant_id="a", enable_ssd_offload=True, client_http_port=9300, something_new="x", max_capacity_gb=1)
    given = {"tenant_id": "a", "enable_ssd_offload": "true", "client_http_port": "9300", "something_new": "x"}
    assert given.items() <= read.setup_keys.items()
    assert not {"max_capacity_gb", "num_workers", "type", "prefix", "timeout_seconds"} & set(read.setup_keys)
    assert read.as_json()["enable_ssd_offload"] is True and "forwarded" not in read.as_json()


def test_a_key_that_mooncake_may_not_know_is_said() -> None:
    notes = " ".join(config(num_worker=3, tenant_id="a").notes())
    assert '"num_worker" goes to Mooncake\'s setup, which is not known to have such a key' in notes
    assert "num_workers" in notes and "tenant_id" not in notes
    assert "listens on all addresses" in notes


def test_rdma_devices_have_no_effect_on_tcp() -> None:
    assert any('"rdma_devices" has no effect' in note for note in config(rdma_devices="mlx5_0").notes())
    assert not any("has no effect" in note for note in config(rdma_devices="mlx5_0", protocol="rdma").notes())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"protocol": "udp"}, '"protocol" must be one of tcp, rdma'),
        ({"num_workers": 0}, '"num_workers" must be a whole number from 1 to 1024'),
        ({"global_segment_size": []}, '"global_segment_size" must be bytes, a whole number or a string'),
        (
            {"tenant_id": {"a": 1}},
            '"tenant_id" goes to Mooncake\'s setup and must be a string, a number, true or false',
        ),
        ({"serde": {"type": "none of ours"}}, "unknown serde type"),
        ({"local_hostname": ""}, '"local_hostname" must be a non-empty string'),
    ],
)
def test_wrong_values_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**keys)
    message = str(caught.value)
    assert message.startswith("--l2-adapter 1 (mooncake_store)") and said in message and message.endswith(".")


def test_what_grants_access_is_not_shown() -> None:
    text = repr(config(auth_token="planted-secret", metadata_server="redis://user:planted-secret@host:6379"))
    assert "planted-secret" not in text
