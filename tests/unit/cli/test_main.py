"""The command line without a server: what it prints, and with which code it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lmcache.cli import main as cli
from lmcache.config import unbuilt
from lmcache.errors import ConfigError, ResourceError
from lmcache.l2.adapter_types import parse_adapter


@pytest.fixture
def http_server() -> Iterator[tuple[str, dict[str, tuple[int, Any]], list[tuple[str, str, Any]]]]:
    """(its URL, answers by path, requests seen)."""
    answers: dict[str, tuple[int, Any]] = {}
    seen: list[tuple[str, str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append((self.command, self.path, json.loads(body) if body else self.headers.get("Authorization")))
            status, answer = answers.get(self.path, (404, {"error": "nothing here"}))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers, seen
    server.shutdown()
    thread.join()
    server.server_close()


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = cli.main(argv)
    except SystemExit as done:  # argparse's --help
        assert isinstance(done.code, int)
        code = done.code
    out, err = capsys.readouterr()
    return code, out, err


def test_help_lists_every_command_and_each_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "--help")
    assert code == 0
    for name in cli.COMMANDS:
        assert f"  {name} " in text
        code, own, err = run(capsys, *name.split(), "--help")
        assert (code, err) == (0, "")
        assert f"lmcache {name}" in own
        assert "SUPPRESS" not in own
    assert run(capsys)[0] == 2


@pytest.mark.parametrize("name", unbuilt.COMMANDS)
def test_what_is_not_built_is_refused_by_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, err = run(capsys, *name.split(), "--any", "thing")
    assert (code, out) == (2, "")
    assert err.startswith(f"lmcache: There is no lmcache {name}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sever"], "'sever' is not a command; did you mean server?"),
        (["zzz"], "lmcache --help lists them"),
        (["kvcache"], "needs one more word: lmcache kvcache clear."),
        (["kvcache", "wipe"], "lmcache kvcache has no 'wipe': lmcache kvcache clear."),
        (["config"], "lmcache config check or lmcache config show or lmcache config adapter."),
        (["config", "adapter", "p2p"], "type cannot be p2p, which is not built yet (--p2p-advertise-url and "),
        (["config", "adapter", "rawblock"], "got 'rawblock'; did you mean raw_block?"),
        (["ping", "--rpc-url", "http://localhost:8080"], "has scheme 'http'; use tcp:// or ipc://."),
        (["ping", "--rpc-url", "tcp://a b:5555"], "has the host 'a b', which is neither a name nor an address."),
        (["ping", "--timeot", "3"], "did you mean --timeout?"),
        (["ping", "--timeout", "soon"], "--timeout must be a number of seconds, got 'soon'."),
        (["ping", "--timeout", "0"], "--timeout must be more than 0 seconds, got 0."),
        (["ping", "router"], "target must be one of kvcache, engine, got 'router'."),
        (["ping", "--url", "ftp://x"], "--url must be like http://HOST:PORT, got 'ftp://x'."),
        (["ping", "--url", "http://x:99999"], "--url must be like"),
        (["--format", "xml", "ping"], "--format must be one of terminal, json, got 'xml'."),
        (["--format", "xml", "server"], "--format must be one of terminal, json, got 'xml'."),
        (
            ["config", "check", "--format", "jsn"],
            "--format must be one of terminal, json, got 'jsn'; did you mean json?",
        ),
        (["server", "--output", "x"], "lmcache server has no results to write"),
        (["--format"], "--format needs a value, and then a command; lmcache --help lists them."),
        (["quota", "set", "tenant", "5GB"], "limit_gb must be a number of GB, got '5GB'; give the number alone."),
        (["quota", "set", "tenant", "-1"], "limit_gb must be at least 0 GB, got -1."),
        (["quota", "set"], "lmcache quota set: cache_salt, limit_gb must be given; lmcache quota set --help says"),
        (["doctor", "--folder"], "lmcache doctor: --folder needs a value."),
        (["tool", "cache-simulator", "--size-gb", "1", "x"], "--size-gb must be a number of GB, got 'x'."),
        (["tool", "cache-simulator", "--policy", "lru"], "got 'lru'; did you mean LRU?"),
        (["kvcache", "clear", "--tier", "l3"], "--tier must be one of l1, l2, all, got 'l3'."),
        (["bench", "l2"], "--l2-adapter"),
        (["bench", "l2", "--l2-adapter", '{"type": "fs_native", "base_pth": "/x"}'], "did you mean base_path?"),
        (["bench", "l2", "--l2-adapter", "{"], "--l2-adapter must be JSON"),
        (["bench", "server", "--rounds", "0"], "--rounds must be at least 1, got 0."),
        (["config", "check", "--l1-size-gb", "4"], "--eviction-policy is required"),
    ],
)
def test_wrong_usage_is_one_sentence_and_code_2(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_all_problems_of_a_command_line_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "ping", "--timeot", "3", "--timeout", "soon", "--ulr", "x")
    assert code == 2
    assert err.splitlines() == [
        "lmcache ping does not take '--timeot'; did you mean --timeout?",
        "lmcache ping does not take '--ulr'; did you mean --url?",
        "lmcache: --timeout must be a number of seconds, got 'soon'.",
    ]
    code, _, err = run(capsys, "config", "check", "--l1-size-gb", "x", "--chunk-size", "0", "--evicton-policy", "LRU")
    assert (code, err.count("\n")) == (2, 3)


def test_errors_may_be_asked_for_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "config", "check", "--l1-size-gb", "x", "--port", "x", "--format", "json")
    assert (code, out) == (2, "")
    assert len(json.loads(err)["problems"]) == 3
    assert json.loads(err)["error"].startswith("--l1-size-gb must be a number of GB, got 'x'. ")
    code, out, err = run(capsys, "--format=json", "ping", "--url", "http://127.0.0.1:1")
    assert (code, out) == (1, "")
    assert "is the server running there?" in json.loads(err)["error"]
    assert json.loads(run(capsys, "--format", "json", "controller")[2])["problems"]
    assert len(json.loads(run(capsys, "--format", "json", "server", "--port", "x")[2])["problems"]) == 3


def test_each_error_is_written_as_a_whole_line() -> None:
    """Where Python does not buffer, the log's lines would come between a line and its end."""
    records, stderr = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps each write apart
    with records, stderr:
        for options in ((), ("--format", "json")):
            command = [sys.executable, "-m", "lmcache.cli.main", *options, "server", "--port", "x"]
            done = subprocess.run(
                command, stderr=stderr.fileno(), env={**os.environ, "PYTHONUNBUFFERED": "1"}, timeout=60
            )
            assert done.returncode == 2
        stderr.close()
        written = list(iter(lambda: records.recv(4096).decode(), ""))
    assert len(written) == 4
    assert all(line.endswith(".\n") for line in written[:3])
    assert written[3].endswith("}\n")


def test_help_shows_defaults_with_their_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert "(default: 5 seconds)" in run(capsys, "ping", "--help")[1]
    assert "(default: 2 MiB)" in " ".join(run(capsys, "bench", "l2", "--help")[1].split())
    assert "(default: 8192 tokens)" in run(capsys, "demo", "--help")[1]
    assert "(default: LRU S3FIFO)" in " ".join(run(capsys, "tool", "cache-simulator", "--help")[1].split())


def test_no_server_is_one_sentence_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["ping"], ["kvcache", "clear"], ["describe"]):
        code, out, err = run(capsys, *command, "--url", "http://127.0.0.1:1")
        assert (code, out) == (1, "")
        assert (
            err == "lmcache: nothing answers at http://127.0.0.1:1 (Connection refused): is the server running there?\n"
        )


def test_ping(capsys: pytest.CaptureFixture[str], http_server: Any) -> None:
    url, answers, _ = http_server
    answers["/healthcheck"] = (200, {"status": "healthy"})
    code, out, _ = run(capsys, "ping", "--url", url)
    assert code == 0
    assert "OK" in out
    code, out, _ = run(capsys, "--format", "json", "ping", "kvcache", "--url", url)
    result = json.loads(out)
    assert (code, result["title"], result["metrics"]["status"]) == (0, "Ping", "OK")
    assert result["metrics"]["round_trip_ms"] > 0
    assert run(capsys, "ping", "-q", "--url", url) == (0, "", "")
    assert run(capsys, "--quiet", "ping", "--url", url) == (0, "", "")
    answers["/healthcheck"] = (503, {"status": "unhealthy", "reason": "The storage loop did not answer."})
    code, out, err = run(capsys, "ping", "--url", url)
    assert (code, out) == (1, "")
    assert "The storage loop did not answer." in err


def test_ping_of_a_coordinator(capsys: pytest.CaptureFixture[str], http_server: Any) -> None:
    url, answers, seen = http_server
    answers["/healthcheck"] = (404, {"error": "There is nothing at /healthcheck."})
    assert run(capsys, "ping", "--url", url) == (1, "", "lmcache: There is nothing at /healthcheck.\n")
    answers["/healthz"] = (200, {"status": "healthy"})
    code, out, _ = run(capsys, "ping", "--url", url)
    assert code == 0 and "OK" in out
    assert [path for _, path, _ in seen] == ["/healthcheck", "/healthz"] * 2
    answers["/healthcheck"] = (503, {"reason": "The storage loop did not answer."})
    assert run(capsys, "ping", "--url", url)[0] == 1


def test_ping_of_an_engine(
    capsys: pytest.CaptureFixture[str], http_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_ADMIN_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("OPENAI_API_KEY", "engine-key")
    url, answers, seen = http_server
    answers["/health"] = (200, "")
    assert run(capsys, "ping", "engine", "--url", url)[0] == 0
    assert seen[-1][1:] == ("/health", "Bearer engine-key")


def test_clear(capsys: pytest.CaptureFixture[str], http_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, answers, seen = http_server
    answers["/cache/clear"] = (200, {"objects": 3, "bytes": 3 << 20})
    code, out, _ = run(capsys, "kvcache", "clear", "--url", url)
    assert code == 0
    assert "3.0 MiB" in out
    assert seen[-1] == ("POST", "/cache/clear", {"tier": "l1"})
    run(capsys, "kvcache", "clear", "--url", url, "--tier", "all")
    assert seen[-1][2] == {"tier": "all"}
    answers["/cache/clear"] = (403, {"error": "From another host this needs an admin token."})
    assert run(capsys, "kvcache", "clear", "--url", url)[::2] == (
        1,
        "lmcache: From another host this needs an admin token.\n",
    )


def test_the_admin_token_comes_from_the_environment(
    capsys: pytest.CaptureFixture[str], http_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answers, seen = http_server
    answers["/healthcheck"] = (200, {})
    monkeypatch.setenv("LMCACHE_ADMIN_TOKEN", "0123456789abcdef")
    assert run(capsys, "ping", "--url", url)[0] == 0
    assert seen[-1][2] == "Bearer 0123456789abcdef"


def test_results_can_be_written_to_a_file(capsys: pytest.CaptureFixture[str], http_server: Any, tmp_path: Any) -> None:
    url, answers, _ = http_server
    answers["/healthcheck"] = (200, {})
    path = tmp_path / "ping.json"
    assert run(capsys, "ping", "--url", url, "--format", "json", "--output", str(path)) == (0, "", "")
    assert json.loads(path.read_text())["metrics"]["status"] == "OK"
    code, _, err = run(capsys, "ping", "--url", url, "--output", str(tmp_path / "none" / "x"))
    assert code == 1
    assert "--output" in err


def test_config_check_and_show(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    import yaml

    from lmcache.config.load import load

    options = ["--l1-size-gb", "4", "--eviction-policy", "LRU", "--service-instance-id", "me"]
    options += ["--l2-adapter", '{"type": "fs_native", "base_path": "%s"}' % (tmp_path / "l2")]
    options += ["--http-host", "127.0.0.1"]
    assert run(capsys, "config", "check", *options)[0] == 0
    code, out, _ = run(capsys, "config", "check", *options, "--format", "json", "--max-gpu-workers", "2")
    assert code == 0
    assert "--max-gpu-workers has no effect" in json.loads(out)["metrics"]["notes"][0]
    assert run(capsys, "config", "check", *options, "--l2-adapter", '{"type": "s3"}')[0] == 2

    code, out, _ = run(capsys, "config", "show", *options)
    assert code == 0
    assert "chunk_size: 256" in out
    (adapter,) = yaml.safe_load(out)["l2_adapter"]
    assert (adapter["type"], adapter["base_path"]) == ("fs_native", str(tmp_path / "l2"))
    assert (adapter["num_workers"], adapter["persist_enabled"]) == (4, True)  # complete
    assert not (tmp_path / "l2").exists()  # nothing was made
    path = tmp_path / "server.yaml"
    path.write_text(out)
    shown, given = (load(argv, {}).config for argv in (["--config", str(path)], options))  # it is a --config file
    assert dataclasses.replace(shown, l2_adapter=[]) == dataclasses.replace(given, l2_adapter=[])
    assert parse_adapter(shown.l2_adapter[0], 0) == parse_adapter(given.l2_adapter[0], 0)

    code, out, _ = run(capsys, "config", "show", *options, "--format", "json")
    values = json.loads(out)["metrics"]
    assert values["l1_size_gb"] == {"value": 4.0, "source": "--l1-size-gb"}
    assert values["chunk_size"] == {"value": 256, "source": "default"}


def test_config_show_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--l1-size-gb", "4", "--eviction-policy", "LRU", "--port", "0"]
    first, second = (run(capsys, "config", "show", *options)[1] for _ in range(2))
    assert first == second
    assert "# service_instance_id: a new one at each start" in first and "# shm_name: a new one" in first
    values = json.loads(run(capsys, "config", "show", *options, "--format", "json")[1])["metrics"]
    assert values["service_instance_id"] == {"value": None, "source": "default"}


def test_config_show_hides_what_grants_access_to_an_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    adapter = {"type": "plugin", "module_path": "m", "class_name": "C", "adapter_params": {"password": "hush", "n": 1}}
    options = ["--l1-size-gb", "4", "--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)]
    out = run(capsys, "config", "show", *options)[1]
    assert "hush" not in out and "password: '[hidden]'" in out and "n: 1" in out


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (ConfigError("No such key."), 2, "lmcache: No such key.\n"),
        (ResourceError("The port is in use"), 1, "lmcache: The port is in use.\n"),
        (
            ValueError("odd\nvalue"),
            1,
            "lmcache: unexpected ValueError: odd value (LMCACHE_LOG_LEVEL=DEBUG shows where).\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_every_fault_becomes_a_code_and_at_most_one_sentence(
    capsys: pytest.CaptureFixture[str], fault: BaseException, code: int, said: str
) -> None:
    def fail() -> int:
        raise fault

    assert cli.guarded(fail, {}) == code
    assert capsys.readouterr().err == said


def test_debug_shows_where_a_fault_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ResourceError("The port is in use.")

    assert cli.guarded(fail, {"LMCACHE_LOG_LEVEL": "DEBUG"}) == 1
    assert "Traceback" in capsys.readouterr().err
    assert cli.guarded(lambda: 0, {"LMCACHE_LOG_LEVEL": "LOUD"}) == 2


def test_short_commands_import_little() -> None:
    code = (
        "import sys; from lmcache.cli.main import main; main(['--help']); main(['server', '--help']);"
        "print([name for name in ('zmq', 'msgspec', 'starlette', 'uvicorn', 'prometheus_client', 'yaml', 'asyncio',"
        " 'lmcache._native') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m lmcache.cli.main server --help | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith("Usage: lmcache server")
    assert "Traceback" not in done.stderr


def test_a_command_whose_part_is_not_installed_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache simulator is optional: its folder may be left out."""
    for module in [name for name in sys.modules if name.startswith(("lmcache.simulation", "lmcache.cli.cache_sim"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "lmcache.simulation", None)
    code, out, err = run(capsys, "tool", "cache-simulator")
    assert (code, out) == (2, "")
    assert "lmcache tool cache-simulator needs lmcache.simulation" in err and "install the whole package." in err
    assert run(capsys, "config", "adapter")[0] == 0
