"""Declares every option of `lmcache server`: flags, LMCACHE_ variables, YAML keys, help and checks come from here."""

from __future__ import annotations

import dataclasses
import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcache.config import unbuilt
from lmcache.config.values import Choice, JsonObject, Kind, Listed, Number, Policy, ReachedHost, Switch, Text, Whole
from lmcache.core.address import socket_path
from lmcache.core.limits import FRAME_ALIGN_BYTES, GIB, MAX_TOKENS_PER_SESSION

_METADATA_KEY = "option"


@dataclass(frozen=True)
class Option:
    """An option beside its name and default.

    `default_text` replaces the default in help where it depends on something else. `unbuilt` is what to use instead of
    an option that is documented and not built yet (config/unbuilt.py): any value but the default is refused with it.
    """

    kind: Kind
    help: str
    group: str = ""
    default_text: str = ""
    unbuilt: str = ""


def _about(kind: Kind, help: str, *, default_text: str = "") -> dict[str, Option]:
    return {_METADATA_KEY: Option(kind, help, default_text=default_text)}


def _option(kind: Kind, default: object, help: str, *, default_text: str = "") -> Any:
    metadata = _about(kind, help, default_text=default_text)
    return field(metadata=metadata) if default is dataclasses.MISSING else field(default=default, metadata=metadata)


_REQUIRED = dataclasses.MISSING
_PORT = Whole(minimum=0, maximum=65535, shown_as="PORT")
_GB = "GB"
_LONGEST_SECONDS = 366 * 86_400
_FRACTION = Number(above=0, maximum=1, shown_as="FRACTION")
_ADAPTER_EXAMPLE = '{"type": "fs_native", "base_path": "/data/lmcache"}'

STORE_POLICY_ENTRY_POINTS = "lmcache.store_policies"
PREFETCH_POLICY_ENTRY_POINTS = "lmcache.prefetch_policies"

ADAPTER_KIND = JsonObject(required_key="type", example=_ADAPTER_EXAMPLE)

GROUPS: dict[str, str] = {  # title by the first option of the group
    "host": "Engines",
    "http_host": "HTTP and metrics listeners",
    "l1_size_gb": "L1: shared memory",
    "eviction_policy": "L1 eviction",
    "l2_adapter": "L2: slower tiers",
    "p2p_advertise_url": "Peers: other servers",
    "disable_observability": "Observability",
    "lookup_hash_log_dir": "Lookup log",
    "drain_timeout_seconds": "The end of the server",
    "runtime_plugin_locations": "Runtime plugins",
    "instance_id": "Many servers",
    "kv_events_endpoint": "KV events of this server",
    "admin_token_file": "Security",
}


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The configuration of one server, complete: what depends on other options is filled in at construction."""

    host: str = _option(Text("HOST"), "localhost", "address that engines connect to: a host, or ipc:// and a path")
    port: int = _option(_PORT, 5555, "port that engines connect to; 0 takes a free one, ipc:// has none")
    chunk_size: int = _option(
        Whole(unit="tokens", minimum=1, maximum=MAX_TOKENS_PER_SESSION),
        256,
        "tokens per chunk, the unit of caching; prompts shorter than one chunk are never cached",
    )
    max_workers: int = _option(
        Whole(unit="threads", minimum=1, maximum=256),
        1,
        "threads that --max-gpu-workers and --max-cpu-workers default to",
    )
    max_gpu_workers: int | None = _option(
        Whole(unit="threads", minimum=1, maximum=256),
        None,
        "no effect: engines copy with threads of their own",
        default_text="--max-workers",
    )
    max_cpu_workers: int | None = _option(
        Whole(unit="threads", minimum=1, maximum=256),
        None,
        "threads that verify what was loaded from L2; fs and fs_native verify on their own threads",
        default_text="--max-workers",
    )
    hash_algorithm: str = _option(
        Choice(("blake3", "sha256_cbor", "builtin")),
        "blake3",
        "how chunks are named; builtin depends on PYTHONHASHSEED, the others on nothing",
    )
    engine_type: str = _option(
        Choice(("default",), unbuilt=unbuilt.OPTION_VALUES["engine_type"]), "default", "how KV is reused"
    )

    http_host: str = _option(Text("HOST"), "0.0.0.0", "address of the HTTP and Prometheus listeners")
    http_port: int = _option(_PORT, 8080, "port of health, status, metrics and administration; 0 takes a free one")
    prometheus_port: int = _option(_PORT, 9090, "port of a listener that has /metrics only; 0 takes a free one")
    disable_http: bool = _option(Switch(), False, "neither of the two listeners: engines alone reach this server")

    l1_size_gb: float = _option(Number(unit=_GB, above=0, maximum=1 << 20), _REQUIRED, "size of L1; 1 GB is 2^30 bytes")
    l1_use_lazy: bool = _option(Switch(), True, "take memory for L1 as it fills, rather than all of it at the start")
    l1_init_size_gb: float = _option(
        Number(unit=_GB, above=0, maximum=1 << 20),
        20.0,
        "what a lazy L1 takes at the start, never more than --l1-size-gb",
    )
    l1_align_bytes: int = _option(
        Whole(unit="bytes", minimum=FRAME_ALIGN_BYTES, maximum=GIB, power_of_two=True),
        4096,
        "alignment of objects in L1; raise it to the block size of a file system used with O_DIRECT",
    )
    l1_write_ttl_seconds: float = _option(
        Number(unit="seconds", above=0, maximum=_LONGEST_SECONDS),
        600.0,
        "how long an engine may be silent before what it was writing is quarantined",
    )
    l1_read_ttl_seconds: float = _option(
        Number(unit="seconds", above=0, maximum=_LONGEST_SECONDS),
        300.0,
        "how long an engine may be silent before what it was reading may be evicted",
    )
    shm_name: str = _option(
        Text("NAME"),
        "",
        "name of the shared memory under /dev/shm",
        default_text="lmcache-PORT, or lmcache-PATH for ipc://",
    )
    l1_persist: bool = _option(
        Switch(),
        False,
        "leave L1 in place at the end, also after a crash, for the next server with the same settings to go on with; "
        "costs 8 bytes of memory for every --l1-align-bytes",
    )
    l1_use_hugepages: bool = _option(Switch(), False, "take L1 from the huge pages of a mounted hugetlbfs")
    l1_numa: str = _option(
        Text("PLACEMENT"),
        "",
        "NUMA nodes of L1: interleave (round all nodes), interleave:NODES or bind:NODES, such as bind:0-1",
        default_text="where the kernel takes it",
    )

    eviction_policy: str = _option(
        Choice(("LRU", "IsolatedLRU", "S3FIFO", "noop")),
        _REQUIRED,
        "which objects leave a full L1: the least recently used; with IsolatedLRU, those of cache salts above their "
        "quota, which is 0 until `lmcache quota set` raises it; with S3FIFO, those never used again before others; "
        "with noop, none",
    )
    quota_file: str = _option(
        Text("FILE"),
        "",
        'JSON file of the quotas of cache salts in GB, such as {"tenant": 1.5, "_default": 2}: read at the start, '
        "replaced with every change",
        default_text="none: quotas are forgotten with the server",
    )
    eviction_trigger_watermark: float = _option(_FRACTION, 0.8, "used fraction of L1 at which eviction starts")
    eviction_ratio: float = _option(_FRACTION, 0.2, "fraction of the used bytes that one eviction frees")

    l2_adapter: list[dict[str, Any]] = field(
        default_factory=list,
        metadata=_about(
            Listed(ADAPTER_KIND),
            f"a slower tier; repeat it for more, the order is the order of lookups; such as '{_ADAPTER_EXAMPLE}'; "
            "`lmcache config adapter` lists the types and their keys",
        ),
    )
    l2_store_policy: str = _option(
        Policy(("default", "skip_l1"), STORE_POLICY_ENTRY_POINTS),
        "default",
        "default stores to every adapter and keeps L1; skip_l1 drops from L1 what is stored, and keeps what is not as "
        "long as there is room; or a class of your own",
    )
    l2_prefetch_policy: str = _option(
        Policy(("default", "retain"), PREFETCH_POLICY_ENTRY_POINTS),
        "default",
        "what L2 gave back leaves L1 after its use (default) or stays (retain); or a class of your own",
    )
    l2_prefetch_max_in_flight: int = _option(
        Whole(unit="requests", minimum=1, maximum=4096), 8, "how many requests may wait for one L2 adapter at once"
    )

    p2p_advertise_url: str = _option(
        Text("HOST:PORT"),
        "",
        "where other servers reach this one: it loads from its peers what it lacks, and they from it",
        default_text="none: no peers",
    )
    p2p_listen_url: str = _option(
        Text("HOST:PORT"),
        "",
        "where this server listens for its peers, where that is another address",
        default_text="--p2p-advertise-url",
    )
    p2p_peers: list[str] = field(
        default_factory=list,
        metadata=_about(
            Listed(Text("HOST:PORT,...")),
            "the --p2p-advertise-url of other servers, with commas between; this one's own is passed over, so that all "
            "may have the same list",
        ),
    )
    p2p_lookup_timeout: float = _option(
        Number(unit="seconds", above=0, maximum=3600),
        30.0,
        "how long a peer may take to say what it has before it is left alone; requests wait 0.02 s of that at most, "
        "unless they name the peer",
    )
    p2p_load_timeout: float = _option(
        Number(unit="seconds", above=0, maximum=3600),
        30.0,
        "how long a load from peers may take at most; from one of them 2 s and what its size takes at an eighth of the "
        "measured rate, if that is less",
    )
    p2p_transfer_engine: str = _option(
        Choice(("auto", "tcp", "nixl", "mooncake_te")),
        "auto",
        "how frames come: auto copies them out of the memory of a peer on this host, and takes TCP for others; nixl "
        "and mooncake_te read, by that library, from the memory of peers that have the same value",
    )
    p2p_token_file: str = _option(
        Text("FILE"),
        "",
        "file with the secret that all peers share; read for each connection, never sent",
        default_text="none: peers on this host alone",
    )
    p2p_without_token: bool = _option(
        Switch(),
        False,
        "let whoever reaches the port of --p2p-listen-url, or those of --p2p-transfer-engine, read all KV, on any "
        "interface",
    )

    disable_observability: bool = _option(Switch(), False, "no metrics, no spans, no lookup log, and --disable-logging")
    disable_metrics: bool = _option(Switch(), False, "no metrics and no Prometheus listener")
    disable_logging: bool = _option(
        Switch(), False, "no lookup log; warnings and errors only, unless LMCACHE_LOG_LEVEL asks for more"
    )
    enable_tracing: bool = _option(Switch(), False, "spans of requests, to --otlp-endpoint")
    trace_sample_rate: float = _option(
        Number(minimum=0, maximum=1, shown_as="FRACTION"),
        1.0,
        "fraction of the requests that are traced; those that come with a trace are traced as it is",
    )
    otlp_endpoint: str = _option(
        Text("URL"),
        "",
        "OTLP gRPC receiver of metrics, and of spans, such as http://localhost:4317; needs lmcache[otlp]",
        default_text="none",
    )
    log_format: str = _option(Choice(("text", "json")), "text", "json writes an object a line")
    event_bus_queue_size: int = _option(
        Whole(unit="events", minimum=1, maximum=10_000_000),
        10_000,
        "events kept for the log of lookups, and spans for --otlp-endpoint; more are dropped, counted",
    )
    metrics_sample_rate: float = _option(
        Number(minimum=0, maximum=1, shown_as="FRACTION"),
        0.01,
        "fraction of the objects in the histograms of ages in L1; 0 leaves them empty",
    )
    service_instance_id: str | None = _option(
        Text("ID"), None, 'names this server in its metrics; "" for none', default_text="a random UUID"
    )

    lookup_hash_log_dir: str = _option(
        Text("FOLDER"), "", "write the chunk hashes of lookups there", default_text="off"
    )
    lookup_hash_log_rotation_interval: int = _option(
        Whole(unit="seconds", minimum=1, maximum=_LONGEST_SECONDS), 21_600, "begin a new file after that long"
    )
    lookup_hash_log_rotation_max_size: int = _option(
        Whole(unit="bytes", minimum=1024, maximum=1 << 40), 104_857_600, "begin a new file beyond that size"
    )
    lookup_hash_log_max_files: int = _option(
        Whole(unit="files", minimum=1, maximum=1_000_000), 100, "delete the oldest beyond that many"
    )

    drain_timeout_seconds: float = _option(
        Number(unit="seconds", minimum=1, maximum=3600),
        10.0,
        "how long a server that is told to stop writes what is queued for L2, while it refuses new work; it ends 10 s "
        "later at the latest",
    )

    runtime_plugin_locations: list[str] = field(
        default_factory=list,
        metadata=_about(
            Listed(Text("PATH")), "scripts (.py, .sh), or folders of them at any depth, that run beside the server"
        ),
    )
    runtime_plugin_config: dict[str, Any] = field(
        default_factory=dict,
        metadata=_about(JsonObject(), "what they get in LMCACHE_RUNTIME_PLUGIN_EXTRA_CONFIG, as JSON"),
    )

    instance_id: str = _option(
        Text("ID"), "", "names this server among others of a fleet", default_text="the host's name and --port"
    )
    coordinator_url: str = _option(
        Text("URL"),
        "",
        "the coordinator of the fleet that this server joins, such as http://coordinator:9300; it gets the token of "
        "--admin-token-file",
        default_text="none: this server is alone",
    )
    coordinator_advertise_ip: str = _option(
        ReachedHost("ADDRESS"),
        "",
        "where the coordinator and other servers reach this one",
        default_text="the address from which this machine reaches the coordinator",
    )
    coordinator_heartbeat_interval: float = _option(
        Number(unit="seconds", minimum=0.1, maximum=3600),
        5.0,
        "how often the coordinator is told that this server lives",
    )
    coordinator_event_reporting: bool = _option(
        Switch(), True, "tell the coordinator which objects come and go here, so that they are found"
    )
    coordinator_event_flush_interval: float = _option(
        Number(unit="seconds", minimum=0.01, maximum=3600), 1.0, "how often it is told"
    )
    coordinator_event_transport: str = _option(
        Choice(("http", "valkey", "kafka")),
        "http",
        "how it is told: by requests, or by a stream of Valkey or Redis or a topic of Kafka, read when it can",
    )
    coordinator_valkey_url: str = _option(
        Text("URL"),
        "",
        "where that stream is: redis://[USER@]HOST:PORT[/DATABASE], rediss:// for TLS, or unix:///PATH",
        default_text="required by --coordinator-event-transport valkey",
    )
    coordinator_valkey_stream: str = _option(Text("NAME"), "lmcache-cache-events", "name of that stream")
    coordinator_valkey_password_file: str = _option(
        Text("FILE"), "", "file with the password there; read for each connection", default_text="none"
    )
    coordinator_kafka_bootstrap_servers: str = _option(
        Text("HOST:PORT,..."),
        "",
        "brokers of Kafka with that topic",
        default_text="required by --coordinator-event-transport kafka",
    )
    coordinator_kafka_topic: str = _option(Text("NAME"), "lmcache-cache-events", "name of that topic")
    coordinator_kafka_config_file: str = _option(
        Text("FILE"),
        "",
        "file with properties of the client (librdkafka), name=value a line, for TLS and a login",
        default_text="none",
    )

    kv_events_endpoint: str = _option(
        Text("ENDPOINT"),
        "",
        "publish what this server stores and evicts there, as vLLM publishes its KV events: tcp://*:5557 or "
        "ipc:///PATH, to which subscribers connect, or tcp://HOST:PORT of a subscriber that listens",
        default_text="none: nothing is published",
    )
    kv_events_replay_endpoint: str = _option(
        Text("ENDPOINT"),
        "",
        "where subscribers ask for events that they missed: tcp://*:PORT, an address of this host or ipc:///PATH",
        default_text="none: what is missed stays so",
    )
    kv_events_topic: str = _option(
        Text("TOPIC"),
        "kv@{instance}@{model}",
        "topic of these events; {instance} is --instance-id, {model} the model whose chunks they name",
    )

    admin_token_file: str = _option(
        Text("FILE"),
        "",
        "file with the token that lets other hosts change state and see cache salts over HTTP",
        default_text="none: only this host may",
    )
    audit_log: str = _option(
        Text("FILE"),
        "",
        "append a line of JSON there for each change that is asked for over HTTP or by an engine",
        default_text="none",
    )
    tokenizer_dir: str = _option(
        Text("FOLDER"),
        "",
        "folder with tokenizer.json, or MODEL/tokenizer.json, for prefetches and lookups of text over HTTP",
        default_text="none: those take tokens alone",
    )
    zmq_curve_server_key_file: str = _option(
        Text("FILE"),
        "",
        "secret CURVE key of this server, from `lmcache keygen`: engines must then have a key of "
        "--zmq-curve-client-keys-dir, and all that they send and get is encrypted",
        default_text="none: whoever can connect is served",
    )
    zmq_curve_client_keys_dir: str = _option(
        Text("FOLDER"),
        "",
        "public CURVE keys of engines, NAME.pub each, and the cache salts that one may use in NAME.salts; read again "
        "when they change",
        default_text="none",
    )
    http_tls_cert: str = _option(
        Text("FILE"),
        "",
        "certificate for HTTPS, in PEM; read again when it is replaced",
        default_text="none: plain HTTP",
    )
    http_tls_key: str = _option(Text("FILE"), "", "key of that certificate, without a password", default_text="none")

    def __post_init__(self) -> None:
        def fill(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if self.max_gpu_workers is None:
            fill("max_gpu_workers", self.max_workers)
        if self.max_cpu_workers is None:
            fill("max_cpu_workers", self.max_workers)
        if not self.shm_name:
            fill("shm_name", self._default_shm_name())
        if self.service_instance_id is None:
            fill("service_instance_id", str(uuid.uuid4()))
        if not self.instance_id:
            fill("instance_id", self._default_instance_id())
        fill("l1_init_size_gb", min(self.l1_init_size_gb, self.l1_size_gb))

    def random_names(self) -> set[str]:
        """Options whose default is random for each server."""
        unnamed = {"instance_id"} if not self.port or socket_path(self.host) else set()
        return (
            {"service_instance_id"}
            | unnamed
            | ({"shm_name"} if not self.port and not socket_path(self.host) else set())
        )

    def _default_instance_id(self) -> str:
        """The same for the next server there."""
        path = socket_path(self.host)
        if path or not self.port:
            return f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}"
        return f"{socket.gethostname()}-{self.port}"

    def _default_shm_name(self) -> str:
        """Derived from the address, so that the next server there finds the memory that this one leaves."""
        path = socket_path(self.host)
        if path:
            return "lmcache" + re.sub(r"[^A-Za-z0-9._-]", "-", path)
        return f"lmcache-{self.port}" if self.port else f"lmcache-{uuid.uuid4().hex[:12]}"

    @property
    def l1_size_bytes(self) -> int:
        """Rounded down to whole frames."""
        return int(self.l1_size_gb * GIB) // self.l1_align_bytes * self.l1_align_bytes

    @property
    def l1_init_size_bytes(self) -> int:
        """What is reserved when the server reports that it is ready."""
        if not self.l1_use_lazy:
            return self.l1_size_bytes
        return int(self.l1_init_size_gb * GIB) // self.l1_align_bytes * self.l1_align_bytes

    @property
    def p2p_addresses(self) -> list[str]:
        """Each address of --p2p-peers."""
        return [address.strip() for value in self.p2p_peers for address in value.split(",") if address.strip()]

    @property
    def metrics_enabled(self) -> bool:
        return not (self.disable_observability or self.disable_metrics)


def options() -> Mapping[str, tuple[Option, object]]:
    """Each option by its name with underscores, and its default; `dataclasses.MISSING` where it is required."""
    found: dict[str, tuple[Option, object]] = {}
    group = ""
    for declared in dataclasses.fields(ServerConfig):
        group = GROUPS.get(declared.name, group)
        default = (
            declared.default_factory() if declared.default_factory is not dataclasses.MISSING else declared.default
        )
        option = dataclasses.replace(
            declared.metadata[_METADATA_KEY], group=group, unbuilt=unbuilt.OPTIONS.get(declared.name, "")
        )
        found[declared.name] = (option, default)
    return found


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "LMCACHE_" + name.upper()
