"""deploy/: compose.yaml and the Kubernetes manifests hang together, and what they start runs as they say: their command
lines, as their user, without capabilities, on a root file system that cannot be written."""

from __future__ import annotations

import configparser
import ctypes
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache.config.load import Loaded
from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.l2.adapter_config import AdapterConfig
from lmcache.l2.adapters.folder_config import FsNativeConfig
from lmcache.startup import read
from lmcache.stop_signals import CLOSE_SECONDS
from lmcache.testing.processes import LOOPBACK, ManagedProcess, http_json
from polling import until
from process.support import SmallEngine
from services import missing, program
from services.network import Network, in_own_network
from services.redis import VALKEY, Client

DEPLOY = Path(__file__).parents[2] / "deploy"
PROJECT = DEPLOY.parent / "pyproject.toml"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
OBJECTS: dict[tuple[str, str], dict[str, Any]] = {
    (found["kind"], found["metadata"]["name"]): found
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for found in yaml.safe_load_all(path.read_text())
}
PODS = {
    name: OBJECTS[kind, name]["spec"]["template"]
    for kind, name in (("DaemonSet", "lmcache-server"), ("Deployment", "vllm"), ("Deployment", "valkey"))
}
LABELS = {
    name: OBJECTS[kind, name]["spec"]["selector"]["matchLabels"]
    for kind, name in (("DaemonSet", "lmcache-server"), ("Deployment", "vllm"), ("Deployment", "valkey"))
}
SOCKET = "/run/lmcache/engines.sock"
CONFIG_FILE = "/etc/lmcache/server.yaml"
USER = 10001
PASSWORD = "planted-secret"
L1_GB = 0.0625
UNITS = {"g": 1, "Gi": 1, "gb": 1}
MOST_EXPOSED = 20  # in tenths of the level, of which 100 is the worst
CLONE_NEWNS, MS_BIND, MS_REC_PRIVATE = 0x00020000, 0x1000, 0x4000 | 1 << 18


def container(pod: str) -> dict[str, Any]:
    (found,) = PODS[pod]["spec"]["containers"]
    return dict(found)


def gigabytes(text: str) -> float:
    number = text.rstrip("gibGB")
    return float(number) * UNITS[text[len(number) :]]


def arguments_of(which: str, folder: Path) -> list[str]:
    """Of `lmcache`, in either deployment; the config file of the second lies in the folder then."""
    if which == "compose":
        return list(COMPOSE["lmcache"]["command"])
    path = folder / "server.yaml"
    path.write_text(OBJECTS["ConfigMap", "lmcache-server"]["data"]["server.yaml"])
    path.chmod(0o644)
    arguments = container("lmcache-server")["args"]
    assert CONFIG_FILE in arguments
    return [str(path) if argument == CONFIG_FILE else argument for argument in arguments]


def options_of(which: str, folder: Path) -> tuple[Loaded, AdapterConfig]:
    command, *arguments = arguments_of(which, folder)
    assert command == "server"
    loaded, (adapter,) = read(arguments, {})
    return loaded, adapter


def valkey_command(which: str) -> list[str]:
    found = COMPOSE["valkey"]["command"] if which == "compose" else container("valkey")["command"]
    return [part.replace("$$", "$") if which == "compose" else part for part in found]


WAYS = pytest.mark.parametrize("which", ["compose", "kubernetes"])


@WAYS
def test_the_sizes_fit_each_other(which: str, tmp_path: Path) -> None:
    loaded, adapter = options_of(which, tmp_path)
    (_, _, script) = valkey_command(which)
    words = shlex.split(script)
    maxmemory = gigabytes(words[words.index("--maxmemory") + 1])
    assert adapter.max_capacity_gb <= maxmemory * 2 / 3
    if which == "compose":
        limits = {name: gigabytes(COMPOSE[name]["mem_limit"]) for name in ("lmcache", "valkey")}
        assert loaded.config.l1_size_gb < gigabytes(COMPOSE["lmcache"]["shm_size"]) <= limits["lmcache"]
    else:
        limits = {
            name: gigabytes(container(pod)["resources"]["limits"]["memory"])
            for name, pod in (("lmcache", "lmcache-server"), ("valkey", "valkey"))
        }
    assert limits["lmcache"] >= loaded.config.l1_size_gb + 1
    assert limits["valkey"] >= maxmemory * 1.25


def transfer_of(command: Sequence[str]) -> dict[str, Any]:
    return dict(json.loads(command[command.index("--kv-transfer-config") + 1]))


@WAYS
def test_engines_find_the_server(which: str, tmp_path: Path) -> None:
    loaded, _ = options_of(which, tmp_path)
    command = COMPOSE["vllm"]["command"] if which == "compose" else container("vllm")["args"]
    transfer = transfer_of(command)
    settings = ConnectorSettings.read(transfer["kv_connector_extra_config"])
    assert transfer["kv_connector"] == "LMCacheMPConnector"
    assert settings.url == loaded.config.host == f"ipc://{SOCKET}"


def test_compose_shares_memory_socket_and_user() -> None:
    server, engine = COMPOSE["lmcache"], COMPOSE["vllm"]
    assert (server["ipc"], engine["ipc"]) == ("shareable", "service:lmcache")
    assert "run:/run/lmcache" in server["volumes"] and "run:/run/lmcache" in engine["volumes"]
    assert {service["user"] for service in COMPOSE.values()} == {f"{USER}:{USER}"}
    for service in COMPOSE.values():
        assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"]
        assert all(port.startswith(f"{LOOPBACK}:") for port in service.get("ports", ()))


def test_kubernetes_shares_memory_socket_and_user() -> None:
    for pod in ("lmcache-server", "vllm"):
        spec = PODS[pod]["spec"]
        paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
        mounts = {mount["mountPath"]: paths.get(mount["name"]) for mount in container(pod)["volumeMounts"]}
        assert (mounts["/dev/shm"], mounts["/run/lmcache"]) == ("/dev/shm/lmcache", "/run/lmcache")
    for pod, template in PODS.items():
        spec = template["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert template["metadata"]["labels"] == LABELS[pod]
        for each in [*spec["containers"], *spec.get("initContainers", ())]:
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
            assert "memory" in each["resources"]["limits"]
            assert each["securityContext"]["allowPrivilegeEscalation"] is False
            assert each["securityContext"]["capabilities"]["drop"] == ["ALL"]
        security = container(pod)["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"], security["runAsGroup"]) == (True, USER, USER)
    (policy,) = [found["spec"] for (kind, _), found in OBJECTS.items() if kind == "NetworkPolicy"]
    (source,) = policy["ingress"][0]["from"]
    assert source["podSelector"]["matchLabels"] == LABELS["lmcache-server"]
    assert policy["podSelector"]["matchLabels"] == LABELS["valkey"]


def service_section() -> configparser.SectionProxy:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(DEPLOY / "systemd" / "lmcache.service")
    return unit["Service"]


def test_the_service_takes_its_configuration_and_may_write_where_it_points() -> None:
    service = service_section()
    program_path, *arguments = shlex.split(service["ExecStart"])
    assert arguments == ["server", "--config", "/etc/lmcache/server.yaml"]
    assert shlex.split(service["ExecStartPre"]) == [program_path, "config", "check", *arguments[1:]]
    loaded, (adapter,) = read(["--config", str(DEPLOY / "systemd" / "server.yaml")], {})
    writable = {f"/run/{service['RuntimeDirectory']}", f"/var/lib/{service['StateDirectory']}"}
    assert isinstance(adapter, FsNativeConfig)
    assert Path(loaded.config.host.removeprefix("ipc://")).parent.as_posix() in writable
    assert Path(adapter.base_path).parent.as_posix() in writable
    assert service["ReadWritePaths"] == "/dev/shm"
    assert (service["NoNewPrivileges"], service["CapabilityBoundingSet"]) == ("true", "")


def test_systemd_finds_the_service_hardly_exposed() -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze")
    unit = DEPLOY / "systemd" / "lmcache.service"
    command = [analyze, "security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSED:.0f}", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Overall exposure level" in done.stdout, done.stderr
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_the_image_is_checked_as_its_service_is() -> None:
    server = (DEPLOY / "Dockerfile").read_text().split("AS server\n")[1].split("\nFROM ")[0]
    (line,) = [line for line in server.splitlines() if line.startswith("HEALTHCHECK ")]
    options, _, command = line.removeprefix("HEALTHCHECK ").partition(" CMD ")
    compose = COMPOSE["lmcache"]["healthcheck"]
    assert ["CMD", *json.loads(command)] == compose["test"]
    times = dict(option.removeprefix("--").split("=") for option in options.split())
    assert times == {name.replace("_", "-"): value for name, value in compose.items() if name != "test"}


def test_extras_of_the_image_are_ones_of_the_package() -> None:
    said = [re.findall(r"EXTRAS=([\w,]+)", (DEPLOY / name).read_text()) for name in ("Dockerfile", "README.md")]
    extras = {extra for texts in said for text in texts for extra in text.split(",")}
    assert {"s3", "dashboard", "otlp", "curve", "text"} <= extras
    declared = PROJECT.read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert extras <= set(re.findall(r"^([\w-]+) = ", declared, re.MULTILINE))


def test_what_stops_a_server_waits_for_it_to_drain(tmp_path: Path) -> None:
    """Its own limit, 10 s beyond --drain-timeout-seconds, comes first: it tells in the log what was lost."""
    loaded = {which: options_of(which, tmp_path)[0] for which in ("compose", "kubernetes")}
    loaded["systemd"] = read(["--config", str(DEPLOY / "systemd" / "server.yaml")], {})[0]
    waits_seconds = {
        "compose": int(COMPOSE["lmcache"]["stop_grace_period"].removesuffix("s")),
        "kubernetes": PODS["lmcache-server"]["spec"]["terminationGracePeriodSeconds"],
        "systemd": int(service_section()["TimeoutStopSec"]),
    }
    for which, seconds in waits_seconds.items():
        assert seconds > loaded[which].config.drain_timeout_seconds + CLOSE_SECONDS, which


def test_the_kustomization_names_every_file() -> None:
    folder = DEPLOY / "kubernetes"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    manifests = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == manifests
    used = {container(pod)["image"] for pod in PODS}
    assert {image["name"] for image in kustomization["images"]} == used - {container("valkey")["image"]}


# ---- what they start -------------------------------------------------------------------------------------------------
def own_mounts(folder: Path) -> None:
    """Of this thread and of what it starts: /dev/shm, /run with the secrets, and names of hosts."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None):
        missing("The right to mount", installed=False)

    def bind(source: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        assert libc.mount(str(source).encode(), str(target).encode(), None, MS_BIND, None) == 0

    # The interpreter may lie in a home folder that nobody else may enter.
    interpreter = Path(sys.base_prefix)
    for parent in reversed(interpreter.parents):
        if not parent.stat().st_mode & 0o001:
            bind(interpreter, folder / "python")
            assert libc.mount(b"tmpfs", str(parent).encode(), b"tmpfs", 0, b"mode=0755") == 0
            bind(folder / "python", interpreter)
            break
    (folder / "hosts").write_text(f"{LOOPBACK} localhost valkey\n")
    (folder / "hosts").chmod(0o644)
    assert libc.mount(str(folder / "hosts").encode(), b"/etc/hosts", None, MS_BIND, None) == 0
    for place in (b"/dev/shm", b"/run"):
        assert libc.mount(b"tmpfs", place, b"tmpfs", 0, f"uid={USER},gid={USER},mode=0755".encode()) == 0
    for path in ("/run/secrets/valkey_password", "/run/secrets/valkey/password", "/run/secrets/lmcache/password"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(PASSWORD + "\n")
        shutil.chown(path, USER, USER)
        Path(path).chmod(0o400)
    Path("/run/lmcache").mkdir(mode=0o700)
    shutil.chown("/run/lmcache", USER, USER)
    Path("/run/server").mkdir()


def confined(command: Sequence[str], *, own_tmp: bool = False) -> list[str]:
    """As the deployments confine it. `own_tmp`: with a /tmp in memory."""
    tmp = "mount -t tmpfs tmpfs /tmp\n" if own_tmp else ""
    limits = f"--reuid={USER} --regid={USER} --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
    script = f'{tmp}mount -o remount,bind,ro /\nexec setpriv {limits} -- "$@"'
    return ["unshare", "--mount", "sh", "-euc", script, "-", *command]


def small(argument: str) -> str:
    """This machine has not their memory."""
    return f"--l1-size-gb={L1_GB}" if argument.startswith("--l1-size-gb=") else argument


@contextmanager
def running(which: str, folder: Path) -> Iterator[ManagedProcess]:
    """Valkey and the server, each as the deployment starts it."""
    folder.chmod(0o755)
    valkey_programs = program(VALKEY, "Valkey").parent
    arguments = [small(argument) for argument in arguments_of(which, Path("/run/server"))]
    if which == "kubernetes":
        path = Path("/run/server/server.yaml")
        path.write_text(path.read_text().replace("l1_size_gb: 60", f"l1_size_gb: {L1_GB}"))
    environment = {"PATH": f"{valkey_programs}:/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.update(COMPOSE["lmcache"]["environment"] if which == "compose" else {})
    command = confined([sys.executable, "-m", "lmcache.cli.main", *arguments])
    with ManagedProcess(confined(valkey_command(which), own_tmp=True), folder / "valkey.log", environment) as valkey:

        def answers() -> bool:
            valkey.check_alive()
            try:
                with Client((LOOPBACK, 6379), PASSWORD) as client:
                    return bool(client.call("PING") == b"PONG")
            except OSError:
                return False

        until(answers, 30, tell=valkey.log)
        checked = [*command]
        checked[checked.index("server") : checked.index("server") + 1] = ["config", "check"]
        subprocess.run(checked, env=environment, check=True, timeout=60, stdout=subprocess.DEVNULL)
        with ManagedProcess(command, folder / "server.log", environment) as server:
            probes = container("lmcache-server")
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                server.wait_until_ready(8080, probes[probe]["httpGet"]["path"], 60)
            yield server
            assert server.stop() == 0, server.log()
            assert "Traceback" not in server.log()


@WAYS
def test_it_runs_confined_and_engines_hit(which: str, tmp_path: Path) -> None:
    program(VALKEY, "Valkey")

    def test(network: Network) -> None:
        own_mounts(tmp_path)
        if subprocess.run(confined([sys.executable, "-c", "import lmcache"], own_tmp=True), timeout=60).returncode:
            pytest.skip(f"user {USER} cannot reach this checkout, or it lies in /tmp")
        with running(which, tmp_path) as server, SmallEngine(f"ipc://{SOCKET}") as engine:
            assert {int(number) for number in status_of(server, "Uid")} == {USER}
            assert status_of(server, "CapEff") == status_of(server, "CapBnd") == ["0" * 16]
            mounts = [line.split()[4:6] for line in Path(f"/proc/{server.pid}/mountinfo").read_text().splitlines()]
            assert [options.split(",")[0] for where, options in mounts if where == "/"] == ["ro"]
            tokens = engine.tokens(1, 2, 3)
            assert engine.client.memory is not None and engine.store(tokens) == 3
            until(lambda: http_json(8080, "GET", "/status")[1]["l2"]["adapters"][0]["objects"] == 3)
            assert http_json(8080, "POST", "/cache/clear", {"tier": "l1"})[0] == 200
            found = engine.lookup("again", tokens)
            assert found.chunks == 3 and engine.read(found)
            ping = confined([sys.executable, "-m", "lmcache.cli.main", *COMPOSE["lmcache"]["healthcheck"]["test"][2:]])
            subprocess.run(ping, check=True, timeout=60, stdout=subprocess.DEVNULL)
            seen = server.log() + json.dumps(http_json(8080, "GET", "/config")[1])
            assert PASSWORD not in seen
        # What a pod leaves is for the next one.
        left = [path.name for path in Path("/dev/shm").iterdir()]
        assert bool(left) is (which == "kubernetes")

    in_own_network(test)


def status_of(server: ManagedProcess, field: str) -> list[str]:
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return line.split()[1:]
