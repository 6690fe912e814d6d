"""Quotas in a file: what may stand there, and what happens where it cannot be read or written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache._native import L1Core
from lmcache.core.limits import GIB
from lmcache.core.salt_limits import SaltLimits
from lmcache.errors import LMCacheError
from lmcache.l1 import quota_file
from lmcache.l1.quota import Quotas
from lmcache.l1.quota_file import QuotaFile

UNIT = 1 << 20


def quotas(path: Path) -> Quotas:
    core = L1Core(16 * UNIT, 0, UNIT, "IsolatedLRU")
    core.set_committed(16 * UNIT)
    return Quotas(core, SaltLimits(), enforced=True, file=QuotaFile(str(path)))


def limits(path: Path) -> dict[str, int]:
    return {quota.cache_salt: quota.limit_bytes for quota in quotas(path).all()}


def test_every_change_is_in_the_file_when_it_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "quotas.json"
    first = quotas(path)
    assert not path.exists()
    first.put("", 3 * UNIT)
    first.put("tenant/ä", 5)
    assert limits(path) == {"": 3 * UNIT, "tenant/ä": 5}
    first.delete("")
    assert limits(path) == {"tenant/ä": 5}
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["quotas.json"]


def test_what_an_operator_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "quotas.json"
    path.write_text('{"tenant": 1.5, "_default": 2, "nothing": 0}')
    assert limits(path) == {"": 2 * GIB, "tenant": GIB * 3 // 2, "nothing": 0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "Expecting value"),
        ('{"a": 1', "Expecting ',' delimiter"),
        ("[1]", "it is not an object"),
        ('{"a": "1"}', 'the limit of "a" is not a number'),
        ('{"a": true}', 'the limit of "a" is not a number'),
        ('{"a": -1}', 'the limit of "a" is not a number'),
        ('{"a": NaN}', 'the limit of "a" is not a number'),
        ('{"": 1}', "a salt has 1 to 512 bytes"),
        (f'{{"{"x" * 513}": 1}}', "a salt has 1 to 512 bytes"),
        ('{"a": 1, "b": 1, "c": 1}', "it has more than 2 salts"),
        ("[" * 100_000, "must hold a JSON object"),
        ("\x00\ud800", "it is not UTF-8 text"),
    ],
)
def test_what_is_no_quota_file_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, words: str
) -> None:
    monkeypatch.setattr(quota_file, "MAX_QUOTAS", 2)
    path = tmp_path / "quotas.json"
    path.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(LMCacheError) as caught:
        quotas(path)
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_bytes() == content.encode(errors="surrogatepass")


def test_places_where_no_file_can_be_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(LMCacheError, match="its folder is missing"):
        quotas(tmp_path / "no" / "quotas.json")
    with pytest.raises(LMCacheError, match="Is a directory"):
        quotas(tmp_path)


def test_a_change_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    path = tmp_path / "quotas.json"
    held = quotas(path)
    held.put("a", UNIT)
    (tmp_path / "quotas.json.new").mkdir()  # root may write anywhere else
    for change in (lambda: held.put("a", 2 * UNIT), lambda: held.put("b", UNIT), lambda: held.delete("a")):
        with pytest.raises(LMCacheError, match="The quota was not changed"):
            change()  # type: ignore[no-untyped-call]
    assert {quota.cache_salt: quota.limit_bytes for quota in held.all()} == limits(path) == {"a": UNIT}


# ---- symbolic links --------------------------------------------------------------------------------------------------
def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    """As deployments mount configuration: FILE -> ..data/FILE, ..data -> a folder by date."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "quotas.json").write_text('{"a": 1}')
    (tmp_path / "..data").symlink_to("..2026")
    path = tmp_path / "quotas.json"
    path.symlink_to("..data/quotas.json")
    held = quotas(path)
    held.put("b", UNIT)
    assert path.is_symlink() and os.readlink(path) == "..data/quotas.json"
    assert limits(path) == limits(tmp_path / "..2026" / "quotas.json") == {"a": GIB, "b": UNIT}
    assert os.listdir(tmp_path / "..2026") == ["quotas.json"]
    (tmp_path / "..2027").mkdir()  # a new version is mounted
    (tmp_path / "..2027" / "quotas.json").write_text('{"c": 1}')
    (tmp_path / "..new").symlink_to("..2027")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert limits(path) == {"c": GIB}


def test_a_link_to_nothing_yet_is_the_file_that_will_be_there(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    path = tmp_path / "quotas.json"
    path.symlink_to("volume/quotas.json")
    quotas(path).put("a", UNIT)
    assert path.is_symlink() and limits(tmp_path / "volume" / "quotas.json") == {"a": UNIT}
    path.unlink()
    path.symlink_to("missing/quotas.json")
    with pytest.raises(LMCacheError, match="its folder is missing"):
        quotas(path)


def test_a_link_beside_the_file_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    path = tmp_path / "quotas.json"
    (tmp_path / "quotas.json.new").symlink_to(precious)
    quotas(path).put("a", UNIT)
    assert precious.read_text() == "as it was"
    assert limits(path) == {"a": UNIT} and not path.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to give a link away")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("{}")
    path = tmp_path / "quotas.json"
    held = quotas(path)
    path.symlink_to("precious")
    os.chown(path, 12345, 12345, follow_symlinks=False)
    with pytest.raises(LMCacheError, match="it is a symbolic link of another user"):
        quotas(path)
    with pytest.raises(LMCacheError, match="it is a symbolic link of another user"):
        held.put("a", UNIT)
    assert (tmp_path / "precious").read_text() == "{}"
