from __future__ import annotations

from pathlib import Path

import pytest

from lmcache.integration.vllm.settings import ConnectorSettings

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_starts_and_hits_are_compared_within_a_run() -> None:
    from autostart import AUTOSTART, BY_HAND, DYNAMIC, PLAIN, Script, figures

    scripts = {
        BY_HAND: [Script(10.0, 0.020), Script(30.0, 0.040), Script(20.0, 0.030)],
        AUTOSTART: [Script(11.0, 0.020), Script(31.0, 0.040), Script(29.0, 0.030)],
        DYNAMIC: [Script(12.0, 0.021), Script(32.0, 0.042), Script(22.0, 0.060)],
        PLAIN: [Script(10.5, 0.040), Script(30.5, 0.080), Script(20.5, 0.030)],
    }
    results = {result.name: (round(result.value, 6), result.ok) for result in figures(scripts, 8192)}
    assert results == {
        "start of an engine with a server by hand": (20.0, True),
        "hit of 8192 tokens, a server by hand": (30.0, True),
        "start: autostart adds": (1.0, True),
        "start: LMCacheConnectorV1Dynamic adds": (2.0, False),
        "hit: LMCacheConnectorV1Dynamic": (1.05, True),
        "start: LMCacheConnectorV1 adds": (0.5, True),
        "hit: LMCacheConnectorV1": (2.0, False),
    }


@pytest.mark.engine
def test_each_case_is_what_a_user_would_write() -> None:
    from autostart import AUTOSTART, BY_HAND, DYNAMIC, PLAIN, transfers
    from lmcache.integration.vllm.lmcache_connector_v1 import in_process_settings

    extra = {name: transfer["kv_connector_extra_config"] for name, transfer in transfers(5555).items()}
    by_hand, started = ConnectorSettings.read(extra[BY_HAND]), ConnectorSettings.read(extra[AUTOSTART])
    assert by_hand.url.endswith(":5555") and by_hand.autostart is None
    assert started.autostart is not None and started.url == started.autostart.url != by_hand.url
    for name in (DYNAMIC, PLAIN):
        settings = in_process_settings(extra[name], {}, "engine")
        assert settings.autostart is not None and settings.url.startswith("ipc://")
    assert not any(ConnectorSettings.read(settings).load_or_recompute for settings in extra.values())
