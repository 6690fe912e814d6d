"""Files of CURVE keys: what they hold, who may write them, and what happens when they change."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import zmq

from lmcache.cli.main import main
from lmcache.errors import ConfigError
from lmcache.transport.curve_clients import CurveAccess, CurveWatch, read_access
from lmcache.transport.curve_keys import CurveFiles, read_public_key, read_secret_key, z85_decode, z85_encode


def keygen(folder: Path, name: str) -> Path:
    assert main(["keygen", name, "--folder", str(folder), "-q"]) == 0
    return folder / name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the key of a server and a folder of clients that has a.pub."""
    keygen(tmp_path, "server")
    (tmp_path / "clients").mkdir(mode=0o755)
    keygen(tmp_path / "clients", "a")
    return tmp_path


def access_of(folder: Path) -> tuple[CurveAccess, list[str]]:
    return read_access(str(folder / "server.key"), str(folder / "clients"))


def salts_of(folder: Path) -> dict[str, frozenset[str] | None]:
    return {client.name: client.salts for client in access_of(folder)[0].clients.values()}


def test_keygen_makes_a_pair_and_never_writes_over_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keygen(tmp_path, "engine")
    secret = (tmp_path / "engine.key").read_text()
    assert os.stat(tmp_path / "engine.key").st_mode & 0o777 == 0o600
    public = zmq.curve_public(secret.strip().encode())
    assert (tmp_path / "engine.pub").read_text().strip().encode() == public
    assert main(["keygen", "engine", "--folder", str(tmp_path)]) == 1
    assert (tmp_path / "engine.key").read_text() == secret
    (tmp_path / "engine.key").unlink()
    assert main(["keygen", "engine", "--folder", str(tmp_path)]) == 1  # half a pair is made of nothing
    assert not (tmp_path / "engine.key").exists()
    assert main(["keygen", "../engine"]) == 2
    assert "File exists" in capsys.readouterr().err


def test_z85_is_that_of_zmq() -> None:
    for _ in range(50):
        public, secret = zmq.curve_keypair()
        for text in (public.decode(), secret.decode()):
            assert z85_encode(z85_decode(text)) == text
    with pytest.raises(ValueError, match="beyond 32 bits"):
        z85_decode("#####")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622, 0o444])
def test_a_secret_that_others_can_read_is_refused(folder: Path, mode: int) -> None:
    os.chmod(folder / "server.key", mode)
    with pytest.raises(ConfigError, match="must be readable by its owner alone"):
        read_secret_key(str(folder / "server.key"))


def test_what_others_can_write_lets_nobody_in(folder: Path) -> None:
    os.chmod(folder / "clients" / "a.pub", 0o666)
    access, problems = access_of(folder)
    assert not access.clients
    assert "must not be writable by others" in problems[0]
    os.chmod(folder / "clients", 0o777)
    with pytest.raises(ConfigError, match="must not be writable by others"):
        access_of(folder)


def test_a_file_of_another_user_is_refused(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    os.chown(folder / "clients" / "a.pub", 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        read_public_key(str(folder / "clients" / "a.pub"))


@pytest.mark.parametrize("content", ["", "short", "x" * 41, "\N{SNOWMAN}" * 40, "~" * 40, "#" * 40])
def test_what_is_no_key_is_refused(folder: Path, content: str) -> None:
    (folder / "server.key").write_text(content)
    with pytest.raises(ConfigError, match="CURVE key"):
        read_secret_key(str(folder / "server.key"))
    for path in (folder / "missing", folder / "clients"):
        with pytest.raises(ConfigError, match="The CURVE key"):
            CurveFiles(str(path), str(path)).read()


def test_salts_beside_a_key_are_all_that_it_may_use(folder: Path) -> None:
    assert salts_of(folder) == {"a": None}
    salts = folder / "clients" / "a.salts"
    salts.write_text("tenant-1\n\n  tenant-2  \n_default\n")
    assert salts_of(folder) == {"a": frozenset({"tenant-1", "tenant-2", ""})}
    salts.write_text("")
    assert salts_of(folder) == {"a": frozenset()}


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * 513])
def test_salts_that_cannot_be_read_let_the_client_in_nowhere(folder: Path, content: bytes) -> None:
    (folder / "clients" / "a.salts").write_bytes(content)
    assert salts_of(folder) == {}
    (folder / "clients" / "a.salts").unlink()
    (folder / "clients" / "a.salts").mkdir()
    assert salts_of(folder) == {}


def test_salts_under_a_name_that_limits_nobody_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "clients" / "a.pub.salts").write_text("tenant")
    access, problems = access_of(folder)
    assert not access.clients
    assert "a.pub.salts limits nobody: the salts of a.pub are in a.salts; rename it." in problems[0]
    (folder / "clients" / "a.pub.salts").rename(folder / "clients" / "aa.salts")
    assert access_of(folder)[1] == []  # perhaps of a key that was taken away: no reason to refuse a start
    logging.getLogger("lmcache").propagate = True
    with caplog.at_level("ERROR", logger="lmcache.transport"):
        CurveWatch(str(folder / "server.key"), str(folder / "clients"), lambda before, access: None)
    assert "aa.salts limits nobody: there is no aa.pub beside it." in caplog.text


def test_salts_that_lead_nowhere_let_the_client_in_nowhere(folder: Path) -> None:
    (folder / "clients" / "a.salts").symlink_to(folder / "nothing")
    access, problems = access_of(folder)
    assert not access.clients
    assert "a.salts is a link that leads nowhere" in problems[0]


def test_who_loses_its_salts_does_not_get_all_of_them(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    salts, key = folder / "clients" / "a.salts", folder / "clients" / "a.pub"
    salts.write_text("tenant")
    watch = CurveWatch(str(folder / "server.key"), str(folder / "clients"), lambda before, access: None)

    def salts_in_force() -> dict[str, frozenset[str] | None]:
        watch.look()
        return {client.name: client.salts for client in watch.access.clients.values()}

    logging.getLogger("lmcache").propagate = True
    salts.unlink()
    with caplog.at_level("ERROR", logger="lmcache.transport"):
        assert salts_in_force() == {}
    assert "a.salts has gone: put it back" in caplog.text
    keygen(folder / "clients", "b")
    assert salts_in_force() == {"b": None}
    salts.write_bytes(b"\xff")
    assert salts_in_force() == {"b": None}
    salts.unlink()
    assert salts_in_force() == {"b": None}
    salts.write_text("tenant")
    assert salts_in_force() == {"a": frozenset({"tenant"}), "b": None}
    salts.unlink()
    key.write_text(key.read_text())
    assert salts_in_force() == {"a": None, "b": None}


def test_one_key_under_two_names_is_refused_for_the_second(folder: Path) -> None:
    (folder / "clients" / "b.pub").write_text((folder / "clients" / "a.pub").read_text())
    access, problems = access_of(folder)
    assert [client.name for client in access.clients.values()] == ["a"]
    assert "keep one of them" in problems[0]


def test_changes_are_seen_and_a_folder_that_cannot_be_read_changes_nothing(folder: Path) -> None:
    seen: list[list[str]] = []
    watch = CurveWatch(
        str(folder / "server.key"),
        str(folder / "clients"),
        lambda _, access: seen.append(sorted(client.name for client in access.clients.values())),
    )
    watch.look()
    assert seen == []
    keygen(folder / "clients", "b")
    watch.look()
    (folder / "clients" / "a.pub").unlink()
    watch.look()
    assert seen == [["a", "b"], ["b"]]
    (folder / "clients").rename(folder / "elsewhere")
    watch.look()
    assert seen[2:] == []
    (folder / "elsewhere").rename(folder / "clients")
    (folder / "clients" / "b.salts").write_text("tenant")
    watch.look()
    assert [client.salts for client in watch.access.clients.values()] == [frozenset({"tenant"})]
