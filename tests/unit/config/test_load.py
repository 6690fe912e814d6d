"""How flags, environment and file become one configuration, and every sentence with which that is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lmcache.config.help import server_help
from lmcache.config.load import load
from lmcache.config.notes import L2Traits, notes
from lmcache.config.spec import ServerConfig, flag, options, variable
from lmcache.core.address import REACHED_HOST_PATTERN
from lmcache.errors import ConfigError

REQUIRED = ["--l1-size-gb", "4", "--eviction-policy", "LRU"]
ADAPTER = '{"type": "fs_native", "base_path": "/data"}'

DOCUMENTED_DEFAULTS = {
    "host": "localhost",
    "port": 5555,
    "chunk_size": 256,
    "max_workers": 1,
    "max_gpu_workers": 1,
    "max_cpu_workers": 1,
    "hash_algorithm": "blake3",
    "engine_type": "default",
    "runtime_plugin_locations": [],
    "runtime_plugin_config": {},
    "lookup_hash_log_dir": "",
    "lookup_hash_log_rotation_interval": 21600,
    "lookup_hash_log_rotation_max_size": 104857600,
    "lookup_hash_log_max_files": 100,
    "http_host": "0.0.0.0",
    "http_port": 8080,
    "l1_use_lazy": True,
    "l1_align_bytes": 4096,
    "l1_write_ttl_seconds": 600,
    "l1_read_ttl_seconds": 300,
    "eviction_trigger_watermark": 0.8,
    "eviction_ratio": 0.2,
    "l2_store_policy": "default",
    "l2_prefetch_policy": "default",
    "l2_prefetch_max_in_flight": 8,
    "l2_adapter": [],
    "disable_observability": False,
    "disable_metrics": False,
    "disable_logging": False,
    "enable_tracing": False,
    "event_bus_queue_size": 10000,
    "otlp_endpoint": "",
    "prometheus_port": 9090,
    "metrics_sample_rate": 0.01,
}

DOCUMENTED_COMMAND = """
--host 0.0.0.0 --port 6555 --chunk-size 512 --max-workers 4 --max-gpu-workers 2 --hash-algorithm blake3
--engine-type default --lookup-hash-log-dir /data/lookups --lookup-hash-log-rotation-interval 21600
--lookup-hash-log-rotation-max-size 104857600 --lookup-hash-log-max-files 100 --l1-size-gb 100 --l1-use-lazy
--l1-init-size-gb 20 --l1-align-bytes 4096 --l1-write-ttl-seconds 600 --l1-read-ttl-seconds 300
--eviction-policy noop --l2-store-policy skip_l1 --eviction-trigger-watermark 0.9 --eviction-ratio 0.1
--l2-prefetch-policy default --l2-prefetch-max-in-flight 8 --prometheus-port 9090 --metrics-sample-rate 0.01
"""


def problems(argv: list[str], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(argv, environ or {})
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def refusal(argv: list[str], environ: dict[str, str] | None = None) -> str:
    (sentence,) = problems(argv, environ)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))
    return sentence


def test_documented_defaults() -> None:
    config = load(REQUIRED, {}).config
    assert {name: getattr(config, name) for name in DOCUMENTED_DEFAULTS} == DOCUMENTED_DEFAULTS
    assert config.l1_size_gb == 4
    assert config.l1_init_size_gb == 4  # 20, but never more than L1
    assert load(["--l1-size-gb", "100", "--eviction-policy", "LRU"], {}).config.l1_init_size_gb == 20
    assert config.shm_name == "lmcache-5555"


def test_the_documented_complete_command_is_understood_up_to_what_is_not_built() -> None:
    config = load([*DOCUMENTED_COMMAND.split(), "--l2-adapter", ADAPTER], {}).config
    assert (config.max_gpu_workers, config.max_cpu_workers) == (2, 4)
    assert config.l2_adapter == [{"type": "fs_native", "base_path": "/data"}]


def test_every_option_has_a_flag_a_variable_a_key_and_help(tmp_path: Path) -> None:
    text = server_help(100)
    for name in (field.name for field in dataclasses.fields(ServerConfig)):
        assert flag(name) + " " in text or flag(name) + "\n" in text
        option, default = options()[name]
        if default is dataclasses.MISSING or default is None:
            continue
        shown = default if isinstance(default, (str, list, dict)) else str(default)
        if isinstance(shown, str):
            assert getattr(load(REQUIRED, {variable(name): shown}).config, name) is not None
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"{name}: {str(default).lower() if isinstance(default, bool) else repr(default)}\n")
        assert getattr(load([*REQUIRED, "--config", str(file)], {}).config, name) is not None
        assert option.group


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("l1-size-gb: 1\neviction_policy: LRU\nport: 1001\nchunk_size: 16\nhttp_port: 1003\n")
    environ = {"LMCACHE_PORT": "2001", "LMCACHE_CHUNK_SIZE": "32", "LMCACHE_CONFIG": str(file)}
    loaded = load(["--port=3001"], environ)
    config = loaded.config
    assert (config.port, config.chunk_size, config.http_port, config.prometheus_port) == (3001, 32, 1003, 9090)
    assert loaded.sources["port"] == "--port"
    assert loaded.sources["chunk_size"] == "LMCACHE_CHUNK_SIZE"
    assert loaded.sources["http_port"] == f"http_port in {file}"
    assert "prometheus_port" not in loaded.sources


def test_switches() -> None:
    assert load([*REQUIRED, "--no-l1-use-lazy"], {}).config.l1_use_lazy is False
    assert load([*REQUIRED, "--no-l1-use-lazy", "--l1-use-lazy"], {}).config.l1_use_lazy is True
    assert load([*REQUIRED, "--l1-use-lazy=false"], {}).config.l1_use_lazy is False
    assert load(REQUIRED, {"LMCACHE_DISABLE_METRICS": "1"}).config.disable_metrics is True
    assert load([*REQUIRED, "--no-disable-metrics"], {"LMCACHE_DISABLE_METRICS": "1"}).config.disable_metrics is False
    assert "true or false" in refusal(REQUIRED, {"LMCACHE_DISABLE_METRICS": "maybe"})


def test_adapters_keep_their_order_from_every_source(tmp_path: Path) -> None:
    flags = [*REQUIRED, "--l2-adapter", '{"type": "a"}', '--l2-adapter={"type": "b"}']
    assert [spec["type"] for spec in load(flags, {}).config.l2_adapter] == ["a", "b"]
    several = {"LMCACHE_L2_ADAPTER": '[{"type": "a"}, {"type": "b"}]'}
    assert [spec["type"] for spec in load(REQUIRED, several).config.l2_adapter] == ["a", "b"]
    file = tmp_path / "server.yaml"
    file.write_text("l2_adapter:\n  - type: a\n    max_size_gb: 1\n  - type: b\n")
    config = load([*REQUIRED, "--config", str(file)], {}).config
    assert config.l2_adapter == [{"type": "a", "max_size_gb": 1}, {"type": "b"}]


def test_an_instance_id_may_be_forced_empty() -> None:
    assert load([*REQUIRED, "--service-instance-id="], {}).config.service_instance_id == ""
    first, second = (load(REQUIRED, {}).config.service_instance_id for _ in range(2))
    assert first and second and first != second


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--chunk-size", "0"], "--chunk-size must be at least 1 token, got 0."),
        (["--chunk-size", "2.5"], "--chunk-size must be a whole number of tokens, got '2.5'."),
        (["--chunk-size", "many"], "--chunk-size must be a whole number of tokens, got 'many'."),
        (["--chunk-size"], "--chunk-size needs a value."),
        (["--port", "70000"], "--port must be at most 65535, got 70000."),
        (["--port", "--host=h"], "--port needs a value."),
        (["--evicton-policy", "LRU"], "did you mean --eviction-policy?"),
        (["--l1-size", "4"], "did you mean --l1-size-gb?"),
        (["--no-port"], "--no-port is not an option"),
        (["stray"], "'stray' is not expected"),
        (["-p", "1"], "'-p' is not expected"),
        (["--eviction-policy", "lru"], "must be one of LRU, IsolatedLRU, S3FIFO, noop, got 'lru'; did you mean LRU?"),
        (["--engine-type", "blend"], "cannot be blend, which is not built yet"),
        (["--hash-algorithm", "sha512"], "must be one of blake3, sha256_cbor, builtin"),
        (["--eviction-ratio", "1.5"], "--eviction-ratio must be at most 1, got 1.5."),
        (["--eviction-trigger-watermark", "0"], "must be more than 0, got 0."),
        (["--l1-size-gb", "nan"], "--l1-size-gb must be a number of GB, got 'nan'."),
        (["--l1-size-gb", "20GB"], "--l1-size-gb must be a number of GB, got '20GB'; give the number alone."),
        (["--chunk-size", "256 tokens"], "must be a whole number of tokens, got '256 tokens'; give the number alone."),
        (["--qqqq", "1"], "--qqqq is not an option of lmcache server; lmcache server --help lists them."),
        (["--p2p-advertise-url", "h"], "--p2p-advertise-url must be HOST:PORT with a port from 1 to 65535, got 'h'"),
        (["--p2p-peers", "127.0.0.1:1"], "--p2p-peers needs --p2p-advertise-url, where other servers reach this one"),
        (["--p2p-advertise-url", "h:1", "--p2p-peers", "a:1,b"], "--p2p-peers must be HOST:PORT"),
        (["--p2p-advertise-url", "0.0.0.0:1"], "--p2p-advertise-url 0.0.0.0:1 is no address that others reach this"),
        (["--p2p-advertise-url", "10.0.0.1:1"], "--p2p-advertise-url 10.0.0.1:1 lets other hosts read KV"),
        (
            ["--p2p-advertise-url", "127.0.0.1:1", "--p2p-listen-url", "0.0.0.0:1"],
            "--p2p-listen-url 0.0.0.0:1 lets other hosts read KV",
        ),
        (
            ["--p2p-advertise-url", "127.0.0.1:1", "--p2p-transfer-engine", "mooncake_te"],
            "--p2p-transfer-engine mooncake_te lets whoever reaches its ports on this machine read and change KV",
        ),
        (
            ["--p2p-advertise-url", "10.0.0.1:1", "--p2p-token-file", "t", "--p2p-transfer-engine", "nixl"],
            "--p2p-transfer-engine nixl lets whoever reaches its ports on this machine read and change KV",
        ),
        (
            ["--p2p-transfer-engine", "ucx"],
            "--p2p-transfer-engine must be one of auto, tcp, nixl, mooncake_te, got 'ucx'",
        ),
        (["--coordinator-event-transport=nats"], "--coordinator-event-transport must be one of http, valkey, kafka"),
        (["--instance-id=a/b"], "--instance-id must be at most 512 characters without slashes"),
        (["--controller-port=9000"], "--controller-port is not an option of lmcache server: `lmcache coordinator` is"),
        (["--max-local-cpu-size", "5"], "--max-local-cpu-size configures LMCache inside an engine, not a server: --l1"),
        (["--l1-size-gb", "-1"], "--l1-size-gb must be more than 0 GB, got -1."),
        (["--l1-size-gb", "0.000001"], "holds no object"),
        (["--l1-align-bytes", "5000"], "--l1-align-bytes must be a power of two, got 5000."),
        (["--l1-align-bytes", "512"], "must be at least 4096 bytes, got 512."),
        (["--l2-adapter", "{'type': 'fs'}"], "--l2-adapter must be JSON, but at line 1, column 2"),
        (["--l2-adapter", '{"typ": "fs"}'], '--l2-adapter must have the key "type"'),
        (["--l2-adapter", '{"type": "fs", "type": "s3"}'], "--l2-adapter has the key 'type' twice."),
        (["--l2-adapter", "3"], "--l2-adapter must be a JSON object"),
        (["--l2-store-policy", "skip_l1"], "--l2-store-policy skip_l1 needs an --l2-adapter"),
        (["--l2-store-policy", "skip-l1", "--l2-adapter", ADAPTER], "did you mean skip_l1?"),
        (["--metrics-sample-rate", "1.5"], "--metrics-sample-rate must be"),
        (["--zmq-curve-server-key-file", "k"], "--zmq-curve-client-keys-dir need each other: give both or none"),
        (["--http-port", "5555"], "--port and --http-port are both 5555"),
        (["--prometheus-port", "8080"], "--http-port and --prometheus-port are both 8080"),
        (["--shm-name", "../etc/passwd"], "--shm-name must be"),
        (["--host", "http://localhost"], "--host must be a host name, an address, or ipc:// and a path"),
        (["--host", "ipc://x"], "--host ipc://x must name the path of a socket from the root on"),
        (["--http-host", ""], "--http-host must be a host name or an address"),
        (["--lookup-hash-log-dir", "/l", "--disable-logging"], "which --disable-logging turns off"),
        (["--lookup-hash-log-dir", "/l", "--disable-observability"], "which --disable-observability turns off"),
    ],
)
def test_what_is_refused_and_how(argv: list[str], said: str) -> None:
    assert said in refusal([*REQUIRED, *argv])


def test_required_options_are_named_with_all_their_forms() -> None:
    sentence = refusal(["--eviction-policy", "LRU"])
    assert "--l1-size-gb" in sentence
    assert "LMCACHE_L1_SIZE_GB" in sentence
    assert "--eviction-policy is required" in refusal(["--l1-size-gb", "4"])


def test_what_is_not_built_may_be_given_its_default() -> None:
    config = load([*REQUIRED, "--no-enable-tracing", "--runtime-plugin-config", "{}"], {}).config
    assert config.runtime_plugin_config == {}


def test_environment_is_checked_like_flags() -> None:
    assert refusal(REQUIRED, {"LMCACHE_PORT": "x"}) == "LMCACHE_PORT must be a whole number, got 'x'."
    assert refusal(REQUIRED, {"LMCACHE_CHUNK_SIZE": ""}).startswith("LMCACHE_CHUNK_SIZE must be")
    assert "did you mean LMCACHE_EVICTION_POLICY?" in refusal(REQUIRED, {"LMCACHE_EVICTON_POLICY": "LRU"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LMCACHE_L1_SIZE", "LMCACHE_L1_SIZE_GB"),
        ("LMCACHE_LOGLEVEL", "LMCACHE_LOG_LEVEL"),
        ("LMCACHE_CONFG", "LMCACHE_CONFIG"),
        ("LMCACHE_HTTP_PROT", "LMCACHE_HTTP_PORT"),
        ("LMCACHE_L2_ADAPTERS", "LMCACHE_L2_ADAPTER"),
    ],
)
def test_a_slip_in_the_name_of_a_variable_is_refused(name: str, meant: str) -> None:
    assert refusal(REQUIRED, {name: "1"}) == f"{name} in the environment is not an option; did you mean {meant}?"


UNREACHED = (
    "[::1]",
    "::",
    "::0",
    "0:0:0:0:0:0:0:0",
    "::%eth0",
    "::ffff:0.0.0.0",
    "0.0.0.0",
    "0",
    "1:2:3",
    "10.0.0.300",
)
NO_HOSTS = ("1.2.3.4%x", " 10.0.0.1", "http://10.0.0.1", "a" * 300)
WITH_PORT = ("10.0.0.1:8080", "10.0.0.1:", "cafe:", "node:80", "[::1]:80")


@pytest.mark.parametrize("host", [*UNREACHED, *NO_HOSTS, *WITH_PORT])
def test_an_address_that_nobody_reaches_is_refused_as_it_was_given(host: str, tmp_path: Path) -> None:
    name, file = "coordinator_advertise_ip", tmp_path / "server.yaml"
    file.write_text(f"{name}: {host!r}")
    ending = f"got {host!r}" + "; leave the port out: it is that of --http-port" * (host in WITH_PORT)
    rule = f"must be a host name or an address that others reach, of at most 253 characters, {ending}."
    assert refusal([*REQUIRED, f"{flag(name)}={host}"]) == f"{flag(name)} {rule}"
    assert refusal(REQUIRED, {variable(name): host}) == f"{variable(name)} {rule}"
    assert refusal([*REQUIRED, "--config", str(file)]) == f"{name} in {file} {rule}"


@pytest.mark.parametrize(
    "host", ["", "10.0.0.1", "127.0.0.1", "node-a.", "fe80::1%eth0", "::ffff:10.0.0.1", "::1", "cafe"]
)
def test_an_address_that_others_reach_is_taken(host: str) -> None:
    assert load([*REQUIRED, f"--coordinator-advertise-ip={host}"], {}).config.coordinator_advertise_ip == host
    assert not host or re.match(REACHED_HOST_PATTERN, host)  # by the coordinator as well


def test_environment_of_others_is_left_alone() -> None:
    environ = {
        "LMCACHE_LOG_LEVEL": "DEBUG",
        "LMCACHE_ADMIN_TOKEN": "0123456789abcdef",
        "LMCACHE_USE_UPSTREAM_MP": "1",
        "LMCACHE_REQUEST_TELEMETRY_TYPE": "fastapi",
        "LMCACHE_TRACK_USAGE": "false",
        # what Kubernetes sets in every pod beside a service that is called lmcache
        "LMCACHE_PORT": "tcp://10.0.0.7:5555",
        "LMCACHE_PORT_5555_TCP": "tcp://10.0.0.7:5555",
        "LMCACHE_PORT_5555_TCP_PORT": "5555",
        "LMCACHE_SERVICE_HOST": "10.0.0.7",
        "LMCACHE_SERVICE_PORT": "5555",
        "LMCACHE_SERVICE_PORT_HTTP": "8080",
    }
    loaded = load(REQUIRED, environ)
    assert loaded.sources.keys() == {"l1_size_gb", "eviction_policy"}
    assert list(loaded.ignored) == ["LMCACHE_TRACK_USAGE"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("evicton_policy: LRU", "evicton_policy in {file} is not an option; did you mean eviction_policy?"),
        ("local_cpu: true", "local_cpu in {file} configures LMCache inside an engine, not a server: --l1-size-gb is"),
        ("remote_url: redis://h", "remote_url in {file} configures LMCache inside an engine, not a server: several"),
        ("p2p_listen_url: h:1", "--p2p-listen-url needs --p2p-advertise-url"),
        (
            "chunk_size: 20GB",
            "chunk_size in {file} must be a whole number of tokens, got '20GB'; give the number alone.",
        ),
        ("port: '80'\nport: 81", "has the key 'port' twice."),
        ("http-port: 80\nhttp_port: 81", "gives http_port twice"),
        ("port:", "port in {file} has no value."),
        ("port: 80.5", "port in {file} must be a whole number, got 80.5."),
        ("port: true", "port in {file} must be a whole number, got True."),
        ("host: 7", "host in {file} must be text"),
        ("l1_use_lazy: 3", "l1_use_lazy in {file} must be true or false, got 3."),
        (f"l2_adapter: [{ADAPTER}, {{typ: x}}]", 'l2_adapter 2 in {file} must have the key "type"'),
        ("- port", "must hold one mapping"),
        ("a: [", "is not YAML at line"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    assert said.format(file=file) in refusal([*REQUIRED, "--config", str(file)])


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refusal([*REQUIRED, "--config", str(tmp_path / "none.yaml")])
    assert problems(REQUIRED, {"LMCACHE_CONFIG": "/nonexistent"}) == [
        "LMCACHE_CONFIG /nonexistent cannot be read: No such file or directory."
    ]
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal([*REQUIRED, "--config", str(tmp_path / "binary")])


def test_free_ports_may_be_asked_for_everywhere() -> None:
    config = load([*REQUIRED, "--port", "0", "--http-port", "0", "--prometheus-port", "0"], {}).config
    assert config.shm_name.startswith("lmcache-")
    assert config.shm_name != "lmcache-0"


def test_sizes_in_bytes_are_whole_frames() -> None:
    config = load(["--l1-size-gb", "0.1", "--eviction-policy", "LRU"], {}).config
    assert config.l1_size_bytes % 4096 == 0
    assert 0 <= 0.1 * (1 << 30) - config.l1_size_bytes < 4096
    assert config.l1_init_size_bytes == config.l1_size_bytes


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("http_port: many\nlocal_disk: /x\nevicton_ratio: 0.5\nport: 1\nport-: 2\n")
    found = problems(
        [
            "--l1-size-gb",
            "20GB",
            "--chunk-sise",
            "256",
            "stray",
            "--max-workers",
            "--host",
            "a b",
            "--config",
            str(file),
        ],
        {"LMCACHE_METRICS_SAMPLE_RATE": "2", "LMCACHE_EVICTON_POLICY": "LRU", "LMCACHE_LOG_LEVEL": "INFO"},
    )
    assert [sentence.split(" ")[0] for sentence in found] == [
        "--chunk-sise",
        "--max-workers",
        "LMCACHE_EVICTON_POLICY",
        "local_disk",
        "evicton_ratio",
        "port-",
        "http_port",
        "LMCACHE_METRICS_SAMPLE_RATE",
        "--l1-size-gb",
        "--host",
    ]  # neither --eviction-policy, which was meant, nor --l1-size-gb is asked for as well
    assert all(sentence.endswith((".", "?")) for sentence in found)


def test_stray_words_and_lists_are_reported_one_by_one() -> None:
    found = problems([*REQUIRED, "--l2-adapter", '{"typ": 1}', ADAPTER, "{", "--port=x"])
    assert [sentence[:20] for sentence in found] == [
        "--l2-adapter 1 must ",
        "--l2-adapter 3 must ",
        "--port must be a who",
    ]
    assert len(problems(["a", "b", *REQUIRED])) == 2


def test_what_a_file_that_cannot_be_read_may_hold_is_not_asked_for() -> None:
    (sentence,) = problems(["--config", "/nonexistent/server.yaml"])
    assert "No such file" in sentence


TRACING = ("--enable-tracing", "--otlp-endpoint", "http://localhost:4317")
VERIFIES = L2Traits(verifies_loads=True)


def notes_on(*argv: str, environ: dict[str, str] | None = None, l2: L2Traits = VERIFIES) -> list[str]:
    return notes(load([*REQUIRED, *argv], environ or {}), environ or {}, l2)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-gpu-workers", "2"], "--max-gpu-workers has no effect: engines copy with threads of their own."),
        (["--engine-type", "default"], "--engine-type has no effect: default is the only type that is built."),
        (
            ["--max-cpu-workers", "2"],
            "--max-cpu-workers has no effect: its threads verify what L2 gave back, and there",
        ),
        (["--max-workers", "4"], "--max-workers has no effect: its threads verify what L2 gave back"),
        (
            ["--max-workers", "4", "--max-cpu-workers", "2", "--l2-adapter", ADAPTER],
            "--max-workers has no effect: --max-cpu",
        ),
        (["--no-l1-use-lazy", "--l1-init-size-gb", "2"], "--l1-init-size-gb has no effect: without --l1-use-lazy"),
        (
            ["--eviction-policy", "noop", "--eviction-ratio", "0.5"],
            "--eviction-ratio has no effect: --eviction-policy noop",
        ),
        (["--eviction-policy", "noop", "--eviction-trigger-watermark=1"], "--eviction-trigger-watermark has no effect"),
        (["--quota-file", "/q"], "--quota-file has no effect: --eviction-policy LRU knows no quotas; use IsolatedLRU."),
        (["--disable-metrics", "--prometheus-port", "1"], "--prometheus-port has no effect: metrics are off."),
        (
            ["--disable-observability", "--metrics-sample-rate", "1"],
            "--metrics-sample-rate has no effect: metrics are off.",
        ),
        (["--disable-metrics", "--service-instance-id", "me"], "--service-instance-id has no effect: metrics are off."),
        (
            ["--disable-observability", "--disable-logging"],
            "--disable-logging has no effect: --disable-observability cov",
        ),
        (["--disable-observability", *TRACING], "--enable-tracing has no effect: --disable-observability covers it."),
        (["--disable-observability", *TRACING], "--otlp-endpoint has no effect: --disable-observability covers it."),
        (
            ["--disable-observability", "--trace-sample-rate", "0.5"],
            "--trace-sample-rate has no effect: --disable-observability covers it.",
        ),
        (
            ["--disable-metrics", "--otlp-endpoint", "http://localhost:4317"],
            "--otlp-endpoint has no effect: metrics are off, and there is no --enable-tracing.",
        ),
        (["--trace-sample-rate", "0.5"], "--trace-sample-rate has no effect: there is no --enable-tracing."),
        (
            ["--runtime-plugin-config", '{"a": 1}'],
            "--runtime-plugin-config has no effect: there is no --runtime-plugin-l",
        ),
        (
            ["--disable-http", "--audit-log", "/a"],
            "--audit-log has no effect: nothing can be changed: there is neither",
        ),
        (
            ["--event-bus-queue-size", "5"],
            "--event-bus-queue-size has no effect: there is neither --lookup-hash-log-dir",
        ),
        (
            ["--coordinator-advertise-ip", "h"],
            "--coordinator-advertise-ip has no effect: there is no --coordinator-url.",
        ),
        (["--instance-id", "a"], "--instance-id has no effect: there is neither --coordinator-url nor --kv-events-en"),
        (
            ["--p2p-advertise-url", "127.0.0.1:1", "--p2p-token-file", "t", "--p2p-without-token"],
            "--p2p-without-token has no effect: peers need the token of --p2p-token-file.",
        ),
        (
            ["--coordinator-url", "http://c:1", "--disable-http"],
            "With --disable-http the coordinator cannot reach this server: no pin, quota, deletion, prefetch or move "
            "of the fleet gets here.",
        ),
        (["--coordinator-heartbeat-interval", "9"], "--coordinator-heartbeat-interval has no effect: there is no --co"),
        (["--no-coordinator-event-reporting"], "event-reporting has no effect: there is no --coordinator-url."),
        (["--coordinator-event-flush-interval", "9"], "--coordinator-event-flush-interval has no effect: there is no"),
        (["--coordinator-event-transport", "valkey"], "--coordinator-event-transport has no effect: there is no --co"),
        (["--coordinator-valkey-url", "redis://h:1"], "--coordinator-valkey-url has no effect: there is no --coordin"),
        (
            ["--coordinator-url", "http://c:1", "--no-coordinator-event-reporting", "--coordinator-valkey-url", "u"],
            "--coordinator-valkey-url has no effect: the coordinator is told nothing (--no-coordinator-event-rep",
        ),
        (
            ["--coordinator-url", "http://c:1", "--coordinator-valkey-stream", "s"],
            "--coordinator-valkey-stream has no effect: --coordinator-event-transport is not valkey.",
        ),
        (["--coordinator-kafka-config-file", "/f"], "--coordinator-kafka-config-file has no effect: there is no --co"),
        (
            ["--coordinator-url", "http://c:1", "--coordinator-kafka-topic", "t"],
            "--coordinator-kafka-topic has no effect: --coordinator-event-transport is not kafka.",
        ),
        (["--lookup-hash-log-max-files", "5"], "--lookup-hash-log-max-files has no effect"),
        (["--lookup-hash-log-rotation-interval", "5"], "--lookup-hash-log-rotation-interval has no effect"),
        (["--lookup-hash-log-rotation-max-size", "5000"], "--lookup-hash-log-rotation-max-size has no effect"),
        (["--l2-store-policy", "a:B"], "--l2-store-policy has no effect: there is no --l2-adapter."),
        (["--host", "ipc:///run/l", "--port", "7"], "--port has no effect: a server at the path of a socket takes no"),
        (["--l2-prefetch-policy", "retain"], "--l2-prefetch-policy has no effect: there is no --l2-adapter."),
        (["--l2-prefetch-max-in-flight", "5"], "--l2-prefetch-max-in-flight has no effect: there is no --l2-adapter."),
        (["--eviction-policy", "noop"], "nothing ever leaves L1"),
        (
            ["--eviction-policy", "IsolatedLRU", "--l1-persist"],
            "--l1-persist without --quota-file starts without quotas",
        ),
        (["--hash-algorithm", "builtin"], "--hash-algorithm builtin without PYTHONHASHSEED"),
    ],
)
def test_what_has_no_effect_says_so(argv: list[str], said: str) -> None:
    found = notes_on(*argv)
    assert any(said in sentence for sentence in found), found
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in found)


def test_notes_are_only_about_what_was_given() -> None:
    assert notes_on() == []
    assert (
        notes_on("--max-gpu-workers", "1", "--lookup-hash-log-max-files", "100", "--l2-prefetch-policy", "default")
        == []
    )
    assert notes_on("--max-workers", "2", "--l2-adapter", ADAPTER) == []
    assert notes_on(*TRACING, "--event-bus-queue-size", "5", "--trace-sample-rate", "0.5") == []
    assert notes_on(*TRACING, "--disable-metrics", "--service-instance-id", "me") == []
    assert notes_on("--lookup-hash-log-dir", "/l", "--event-bus-queue-size", "5") == []
    (note,) = notes_on("--max-workers", "2", "--l2-adapter", ADAPTER, l2=L2Traits())
    assert "every --l2-adapter verifies on its own threads" in note
    assert notes_on("--hash-algorithm", "builtin", environ={"PYTHONHASHSEED": "0"}) == []
    assert notes_on("--host", "ipc:///run/l") == []
    assert notes_on("--instance-id", "a", "--kv-events-endpoint", "ipc:///run/e") == []
    token = ("--p2p-advertise-url", "10.0.0.1:1", "--p2p-token-file", "t", "--p2p-without-token")
    assert notes_on(*token, "--p2p-transfer-engine", "nixl") == []
    buffer = ("--eviction-policy", "noop", "--l2-store-policy", "skip_l1", "--eviction-trigger-watermark", "0.9")
    l2 = L2Traits(verifies_loads=True, drops_from_l1=True)
    assert notes_on(*buffer, "--eviction-ratio", "0.1", "--l2-adapter", ADAPTER, l2=l2) == []


def test_variables_that_are_no_options_are_named() -> None:
    environ = {
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_CONFIG_FILE": "/x.yaml",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_SERVICE_PORT": "5555",
    }
    assert notes_on(environ=environ) == [
        "LMCACHE_LOCAL_CPU in the environment is not an option of this server (--l1-size-gb is how much memory this "
        "server takes).",
        "LMCACHE_CONFIG_FILE in the environment is not an option of this server (--config or LMCACHE_CONFIG names the "
        "file of a server).",
        "LMCACHE_TRACK_USAGE in the environment is not an option of this server.",
    ]


def test_a_path_takes_no_port_and_names_the_memory() -> None:
    config = load([*REQUIRED, "--host", "ipc:///run/lmcache/a b.sock", "--http-port", "5555"], {}).config
    assert config.shm_name == "lmcache-run-lmcache-a-b.sock"
