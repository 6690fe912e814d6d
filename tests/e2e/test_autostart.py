"""A script with an engine and no server beside it: hits, the right tokens, exit code 0, and nothing left."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import until
from e2e.offline_runs import CHUNK_TOKENS, SCRIPT_SECONDS, SETTINGS, TOKENS, command, results_of, run_script
from lmcache.integration.engine.run_folder import run_folder
from lmcache.testing.processes import ManagedProcess, VllmEngine, free_port, http_json
from lmcache.testing.tiny_models import sample_tokens
from process.owned_place import OwnedPlace


def check_answers(results: dict[str, Any], log: str) -> None:
    cold, *warm = results["answers"]
    assert cold[1] == 0
    for tokens, cached, _ in warm:
        assert tokens == cold[0]
        assert cached == TOKENS // CHUNK_TOKENS * CHUNK_TOKENS, log


def autostart(port: int, server_args: str = "--l1-size-gb 0.25 --http-port 0 --prometheus-port 0") -> dict[str, Any]:
    extra = {
        "lmcache.mp.port": port,
        "lmcache.mp.autostart": True,
        "lmcache.mp.autostart.server_args": server_args,
        "lmcache.mp.load_or_recompute": False,
    }
    return {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_script_with_autostart_hits_and_leaves_nothing(llama: Path, in_process: bool) -> None:
    port = free_port()
    results, log = run_script(
        llama,
        autostart(port),
        VLLM_ENABLE_V1_MULTIPROCESSING="0" if in_process else "1",
    )
    check_answers(results, log)
    assert "unavailable" not in log
    until(lambda: not Path(f"/dev/shm/lmcache-{port}").exists(), 20)
    until(lambda: not list(run_folder().glob(f"*{port}-*")), 20)


@pytest.mark.slow
def test_a_script_that_is_killed_while_it_generates_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    place, http_port = OwnedPlace(), free_port()
    transfer = autostart(place.port, f"--l1-size-gb 0.25 --http-port {http_port} --prometheus-port 0")
    with ManagedProcess(command(llama, transfer), tmp_path / "script.log", SETTINGS) as script:

        def has_stored() -> bool:
            script.check_alive()
            try:
                return bool(http_json(http_port, "GET", "/status")[1]["l1"]["objects"])
            except OSError:
                return False

        until(has_stored, SCRIPT_SECONDS, every=0.01, tell=script.log)
        assert place.servers() and place.files()
        script.kill()
    until(place.is_clean, 30)


@pytest.mark.slow
def test_an_engine_whose_server_cannot_start_answers_uncached_and_says_why(
    llama: Path, computed: list[list[int]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    adapter = json.dumps({"type": "fs_native", "base_path": str(tmp_path / "file")})
    place = OwnedPlace()
    options = f"--l1-size-gb 0.25 --http-port 0 --prometheus-port 0 --l2-adapter '{adapter}'"
    results, log = run_script(llama, autostart(place.port, options), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert [answer[:2] for answer in results["answers"]] == [[tokens, 0] for tokens in computed]
    said = [line for line in log.splitlines() if "runs uncached, as no server could be started" in line]
    assert said and all(str(tmp_path / "file") in line for line in said), log[-3000:]
    assert "Traceback" not in log
    until(lambda: not place.servers() and [left.suffix for left in place.files()] == [".log"])  # which says why
    for left in place.files():
        left.unlink()


@pytest.mark.slow
def test_two_engines_that_start_at_once_share_one_server(llama: Path, tmp_path: Path) -> None:
    place = OwnedPlace()
    scripts = [
        ManagedProcess(command(llama, autostart(place.port)), tmp_path / f"script-{number}.log", SETTINGS)
        for number in range(2)
    ]
    seen: set[int] = set()

    def have_ended() -> bool:
        seen.update(place.servers())
        return not any(script.alive() for script in scripts)

    try:
        until(have_ended, SCRIPT_SECONDS, tell=lambda: [script.log()[-2000:] for script in scripts])
    finally:
        ended = [script.stop() for script in scripts]
    assert ended == [0, 0], [script.log()[-3000:] for script in scripts]
    answers = [results_of(script.log())["answers"] for script in scripts]
    assert len({tuple(tokens) for each in answers for tokens, _, _ in each}) == 1
    for each in answers:
        assert [cached for _, cached, _ in each[1:]] == [TOKENS // CHUNK_TOKENS * CHUNK_TOKENS] * 2
    assert len(seen) == 1, "one server for both"
    until(place.is_clean, 30)


@pytest.mark.slow
def test_replicas_share_the_server_that_one_of_them_starts(llama: Path, tmp_path: Path) -> None:
    place, http_port = OwnedPlace(), free_port()
    options = f"--l1-size-gb 0.25 --http-port {http_port} --prometheus-port 0"
    with VllmEngine(
        llama,
        tmp_path,
        cache_port=place.port,
        extra_config=autostart(place.port, options)["kv_connector_extra_config"],
        extra=["--data-parallel-size", "2"],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONPATH": SETTINGS["PYTHONPATH"]},
    ) as engine:
        engine.wait_ready()
        (pid,) = place.servers()
        chunks = TOKENS // CHUNK_TOKENS
        for replica in (0, 1):
            # A little more than whole chunks, so that our hit ends where one of the engine's own cache does: how many
            # tokens are computed together changes the last bits of what they give.
            prompt = sample_tokens(chunks * CHUNK_TOKENS + 8, seed=replica)
            assert engine.complete(prompt, replica=replica).cached_tokens == 0
            wanted = (replica + 1) * chunks
            until(lambda: http_json(http_port, "GET", "/status")[1]["l1"]["objects"] == wanted)  # noqa: B023
            own = engine.complete(prompt, replica=replica)
            warm = engine.complete(prompt, replica=1 - replica)
            assert warm.cached_tokens == own.cached_tokens == chunks * CHUNK_TOKENS
            assert warm.token_ids == own.token_ids
        assert place.servers() == [pid]
        engine.stop()
    until(place.is_clean, 30)


DYNAMIC = {
    "kv_connector": "LMCacheConnectorV1Dynamic",
    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_connector_v1",
}
PLAIN = {"kv_connector": "LMCacheConnectorV1"}
ALWAYS_LOADED = {"kv_connector_extra_config": {"lmcache.mp.load_or_recompute": False}}


def private_files() -> set[Path]:
    """Of servers that only one engine reaches."""
    return {*run_folder().glob("*.sock"), *Path("/dev/shm").glob("lmcache-dev-shm-*")}


@pytest.mark.parametrize(
    ("connector", "in_process"),
    [
        pytest.param(DYNAMIC, True, marks=pytest.mark.slow),
        pytest.param(DYNAMIC, False, marks=pytest.mark.slow),
        pytest.param(PLAIN, True, marks=pytest.mark.slow),
        (PLAIN, False),
    ],
    ids=["dynamic-in-process", "dynamic", "plain-in-process", "plain"],
)
def test_a_script_with_the_configuration_inside_the_engine_hits_and_leaves_nothing(
    llama: Path, tmp_path: Path, connector: dict[str, str], in_process: bool
) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 0.25\nenable_p2p: false\n")
    before = private_files()
    results, log = run_script(
        llama,
        {**connector, **ALWAYS_LOADED},
        LMCACHE_CONFIG_FILE=str(file),
        VLLM_ENABLE_V1_MULTIPROCESSING="0" if in_process else "1",
    )
    check_answers(results, log)
    assert "unavailable" not in log
    until(lambda: private_files() <= before, 20)


@pytest.mark.slow
def test_disk_and_remote_store_of_its_configuration_are_found_by_the_next_script(llama: Path, tmp_path: Path) -> None:
    """`local_cpu: false`, so that nothing but these has KV for long."""
    disk, remote, file = tmp_path / "disk", tmp_path / "remote", tmp_path / "lmcache.yaml"
    remote.mkdir()
    keys = ["chunk_size: 256", "local_cpu: false", "max_local_cpu_size: 0.25", f"local_disk: file://{disk}"]
    file.write_text("\n".join([*keys, "max_local_disk_size: 1.0", f"remote_url: fs://localhost{remote}", ""]))
    before = private_files()

    def answers() -> list[list[Any]]:
        results, log = run_script(llama, {**DYNAMIC, **ALWAYS_LOADED}, LMCACHE_CONFIG_FILE=str(file))
        print(*(line for line in log.splitlines() if "lmcache" in line.lower()), sep="\n")
        assert not re.search("unavailable|goes on uncached", log)
        until(lambda: private_files() <= before, 20)
        return [answer[:2] for answer in results["answers"]]

    cold, *warm = answers()
    assert cold[1] == 0
    hit = [cold[0], TOKENS // CHUNK_TOKENS * CHUNK_TOKENS]
    assert warm == [hit] * 2
    for folder in (disk, remote):
        assert len(list(folder.rglob("*.data"))) == TOKENS // CHUNK_TOKENS
    assert answers() == [hit] * 3
    shutil.rmtree(disk)
    assert answers() == [hit] * 3, "from the remote store"
