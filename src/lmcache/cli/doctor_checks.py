"""Checks of the machine for `lmcache doctor`. Each checks one thing, changes nothing, and names the remedy."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lmcache.cli.output import bytes_text
from lmcache.cli.tested_engines import judge, known_engines
from lmcache.core.limits import GIB, MIB
from lmcache.memory.header import HEADER_BYTES, is_ours
from lmcache.memory.memory_limit import MemoryProbe

OK, NOTE, PROBLEM = "ok", "note", "problem"
DIRECTORY = Path("/dev/shm")
_BLOCK_BYTES = 4096
_TIMEX_BYTES = 512  # struct timex and to spare; zeros only ask
_ENGINE_SECONDS = 180.0
_COLLAPSING_KERNEL = (6, 1)  # MADV_COLLAPSE of shared memory
_WANTED_FILES = 4096
_WANTED_FREE_BYTES = GIB
_WANTED_FREE_FILES = 10_000
_CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_WANTED_MEMLOCK_BYTES = 64 * MIB


@dataclass(frozen=True)
class Verdict:
    """`remedy` is "" where nothing needs to be done; `details` are what was found, one by one."""

    name: str
    level: str
    found: str
    remedy: str = ""
    details: tuple[str, ...] = ()


# ---- memory ----------------------------------------------------------------------------------------------------------
def shared_memory(wanted_bytes: int, folder: Path = DIRECTORY, probe: MemoryProbe | None = None) -> Verdict:
    """Whether an L1 of that size fits; 0: whether there is room worth using at all."""
    name = "shared memory"
    container = "in Docker with --ipc=host or --shm-size, in Kubernetes with an emptyDir of medium Memory at /dev/shm"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, MIB)
        memory_limits = list((probe or MemoryProbe()).available_limits(folder))
    except OSError as error:
        return Verdict(
            name, PROBLEM, f"{folder} cannot be used: {error.strerror}", f"give this process one: {container}."
        )
    found = "room for " + ", ".join(
        f"{bytes_text(max(0, limit.available_bytes))} by {limit.source}" for limit in memory_limits
    )
    tightest = min(memory_limits, key=lambda limit: limit.available_bytes)
    if tightest.available_bytes >= (wanted_bytes or GIB):
        return Verdict(name, OK, found)
    in_container = f"; {container}" if tightest.source == str(folder) else ""
    remedy = f"{tightest.remedy}, or choose a smaller --l1-size-gb{in_container}."
    if wanted_bytes:
        return Verdict(name, PROBLEM, f"{found}: less than the {bytes_text(wanted_bytes)} asked for", remedy)
    return Verdict(name, NOTE, f"{found}: too little to be of use", remedy)


def left_behind(folder: Path = DIRECTORY) -> Verdict:
    """Shared memory of dead servers. The next server of that name takes it over, or an operator removes it."""
    dead: list[tuple[int, Path]] = []
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(file)
                if is_ours(os.pread(file, HEADER_BYTES, 0)) and not _locked(status):
                    dead.append((status.st_blocks * 512, path))
            finally:
                os.close(file)
    if not dead:
        return Verdict("dead servers", OK, "none left memory behind")
    dead.sort(key=lambda file: -file[0])
    total = bytes_text(sum(size_bytes for size_bytes, _ in dead))
    files = "1 file seems" if len(dead) == 1 else f"{len(dead)} files seem"
    return Verdict(
        "dead servers",
        NOTE,
        f"{files} to belong to no running server: {total} in {folder}",
        "a server that is started with the same --shm-name takes its file over; else remove it with rm.",
        tuple(f"{path} ({bytes_text(size_bytes)})" for size_bytes, path in dead),
    )


def large_pages(folder: Path = Path("/sys/kernel/mm/transparent_hugepage"), release: str = "") -> Verdict:
    """Whether the kernel gives L1 pages of 2 MiB when it asks; loads are about twice as fast with them. `release`: of
    the kernel, this one's unless given."""
    name, release = "large pages", release or os.uname().release
    try:
        shared = (folder / "shmem_enabled").read_text()
    except OSError as error:
        return Verdict(name, NOTE, f"this kernel has none for shared memory ({error.strerror})", "use another kernel.")
    if "[deny]" in shared:
        remedy = f"echo never > {folder}/shmem_enabled: a server asks for them itself."
        return Verdict(name, NOTE, "the kernel denies them to shared memory", remedy)
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None or tuple(map(int, numbers.groups())) < _COLLAPSING_KERNEL:
        return Verdict(name, NOTE, f"Linux {release} does not give them when asked", "use Linux 6.1 or newer.")
    return Verdict(name, OK, f"Linux {release} gives them when asked")


def _locked(status: os.stat_result) -> bool:
    """Reads /proc/locks instead of trying the lock, which a server that starts now would find taken."""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(" FLOCK " in line and f" {device} " in line for line in Path("/proc/locks").read_text().splitlines())


def locked_memory() -> Verdict:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Verdict("memlock", OK, "unlimited")
    if soft >= _WANTED_MEMLOCK_BYTES:
        return Verdict("memlock", OK, bytes_text(soft))
    return Verdict(
        "memlock",
        NOTE,
        f"{bytes_text(soft)}: engines that pin L1 for DMA or RDMA may be refused",
        "ulimit -l unlimited; in Docker --ulimit memlock=-1; in systemd LimitMEMLOCK=infinity.",
    )


def open_files() -> Verdict:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _WANTED_FILES:
        return Verdict("open files", OK, f"up to {soft}")
    return Verdict("open files", NOTE, f"up to {soft}", f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}.")


# ---- processor and kernel --------------------------------------------------------------------------------------------
def native_core() -> Verdict:
    try:
        from lmcache import _native
    except ImportError as error:
        return Verdict(
            "native core",
            PROBLEM,
            f"it does not load: {error}",
            "install the package again for this Python: pip install .",
        )
    features = [name for name, present in _native.cpu_features().items() if present]
    found = f"copies by {_native.copy_path()}; the CPU has {', '.join(features) or 'no vector features'}"
    if _native.copy_path() == "portable":
        return Verdict(
            "native core", NOTE, found, "copies run at a fraction of the speed; use a CPU with AVX2 or NEON."
        )
    return Verdict("native core", OK, found)


def io_uring() -> Verdict:
    from lmcache import _native

    number = _native.io_uring_refusal()
    if not number:
        return Verdict("io_uring", OK, "available")
    reason = "this kernel has none" if number == errno.ENOSYS else f"the kernel refuses it ({os.strerror(number)})"
    return Verdict(
        "io_uring",
        NOTE,
        f"{reason}; L2 adapters use threads instead",
        "sysctl kernel.io_uring_disabled=0, and a container profile that allows io_uring_setup.",
    )


# ---- folders ---------------------------------------------------------------------------------------------------------
def folder(path: Path) -> Verdict:
    """Whether L2 can write there, and with O_DIRECT."""
    name = f"folder {path}"
    try:
        disk = os.statvfs(path)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".lmcache-doctor-") as file:
            direct = _direct_io(Path(file.name))
    except OSError as error:
        return Verdict(
            name, PROBLEM, f"cannot be written: {error.strerror}", "choose another folder or its permissions."
        )
    found = f"{_filesystem(path)}, {bytes_text(disk.f_bavail * disk.f_frsize)} free"
    if short := _short_of(disk):
        return Verdict(name, NOTE, f"{found}: {short}", "remove what nobody needs, or choose another folder.")
    if direct:
        return Verdict(
            name, NOTE, f"{found}, writable, no O_DIRECT ({direct})", 'leave "use_odirect" at false for this folder.'
        )
    return Verdict(name, OK, f"{found}, writable, O_DIRECT works")


def _short_of(disk: os.statvfs_result) -> str:
    """ "" or what the file system has hardly any more of. Some count no files."""
    if disk.f_bavail * disk.f_frsize < _WANTED_FREE_BYTES:
        return "too little to be of use"
    if disk.f_files and disk.f_favail < _WANTED_FREE_FILES:
        return f"room for {disk.f_favail} files, and each object is one"
    return ""


def _direct_io(path: Path) -> str:
    """ "" when a block written past the page cache reads back the same, else why not."""
    with mmap.mmap(-1, _BLOCK_BYTES) as block:  # mapped memory begins on a page: aligned as O_DIRECT wants it
        block[:] = os.urandom(_BLOCK_BYTES)
        written = block[:]
        try:
            file = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            return error.strerror or str(error)
        try:
            os.pwritev(file, [block], 0)
            block[:] = bytes(_BLOCK_BYTES)
            os.preadv(file, [block], 0)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            os.close(file)
        return "" if block[:] == written else "what was written reads back different"


def _filesystem(path: Path) -> str:
    """The type of the file system that holds `path`."""
    inside = path.resolve()
    best, kind = -1, "unknown file system"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        mount = Path(fields[4].replace("\\040", " "))
        if inside.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), fields[fields.index("-") + 1]
    return kind


# ---- around ----------------------------------------------------------------------------------------------------------
def clock(state: int | None = None) -> Verdict:
    """Whether something keeps this clock right. `state`: what adjtimex(2) says, asked unless given."""
    if state is None:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state == _CLOCK_UNSYNCHRONISED:
        return Verdict(
            "clock",
            NOTE,
            f"nothing keeps it right; it says {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC",
            "run chrony or systemd-timesyncd: S3 refuses requests of a clock that is 15 minutes off, certificates of "
            "one before or behind their time.",
        )
    return Verdict("clock", OK, "kept right" if state >= 0 else "the kernel does not tell")


def port(number: int, flag: str) -> Verdict:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", number))
            probe.listen(1)
    except OSError as error:
        reason = "in use, perhaps by a server that runs already" if error.errno == errno.EADDRINUSE else error.strerror
        return Verdict(f"port {number}", NOTE, f"{reason} ({flag})", f"give a second server another {flag}.")
    return Verdict(f"port {number}", OK, f"free ({flag})")


def engine(import_it: bool) -> list[Verdict]:
    """The version of vLLM and, in a process of its own as it takes seconds, whether the connector can be imported."""
    from importlib import metadata

    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return [Verdict("vLLM", NOTE, "not installed for this Python; the server does not need it, engines do")]
    known, finding = judge(version, known_engines())
    remedy = "" if known else "use one of those, or see that the connector below loads and test it."
    verdicts = [Verdict("vLLM", OK if known else NOTE, f"{version}: {finding}", remedy)]
    if import_it:
        verdicts.append(_connector())
    return verdicts


def _connector() -> Verdict:
    code = "from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_ENGINE_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Verdict(
            "connector", PROBLEM, f"importing it took more than {_ENGINE_SECONDS:.0f} s", "look at this host's load."
        )
    if done.returncode == 0:
        return Verdict("connector", OK, "LMCacheMPConnector loads")
    message = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Verdict(
        "connector",
        PROBLEM,
        f"it does not load: {message}",
        "install lmcache for the same Python as vLLM and see the message.",
    )
