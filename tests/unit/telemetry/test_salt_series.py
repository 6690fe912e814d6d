"""Lines of cache salts are made again where their figures changed, and what names them once."""

from __future__ import annotations

from lmcache.telemetry.metrics import SALT_LABEL, Metrics
from lmcache.telemetry.salt_series import SaltSeries

SALTS = 100


def test_a_line_is_made_again_when_its_figure_has_changed() -> None:
    lookups = Metrics().service.lookups
    made: list[str] = []

    def shown(salt: str) -> str:
        made.append(salt)
        return salt.upper()

    series = SaltSeries(lookups, SALT_LABEL, shown)
    for number in range(SALTS):
        lookups.labels("model", f"salt-{number}").inc()
    first = series.text()
    assert len(made) == SALTS and series.text() == first and len(made) == SALTS
    lookups.labels("model", "salt-7").inc(2)
    lookups.labels("model", "new").inc()
    wanted = first.replace(
        '{cache_salt="SALT-7",model_name="model"} 1.0', '{cache_salt="SALT-7",model_name="model"} 3.0'
    )
    assert series.text() == wanted + 'lmcache_mp_lookups_total{cache_salt="NEW",model_name="model"} 1.0\n' != first
    assert made[SALTS:] == ["new"]
