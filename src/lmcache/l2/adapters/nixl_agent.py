"""One NIXL agent with one backend: whole frames between memory and files or objects.

What NIXL's plugins do not say, and what follows from it here:
- Which descriptor of a failed transfer failed. Files of a batch that failed are transferred again one by one.
- Whether what a failed post had begun still runs. The agent is then replaced, and the end of the old one waits for it.
- Where a transfer ended. A range that it did not fill is noticed because headers are cleared before a load.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from lmcache.clock import Clock
from lmcache.environment import SYSTEM
from lmcache.errors import AdapterError, ResourceError

log = logging.getLogger("lmcache.l2")

Operation = Literal["READ", "WRITE"]
Descriptor = tuple[int, int, int, str]  # address or offset, bytes, device or file or object, name

# With what it depends on, it would install several GB for GPUs.
INSTALL = "`pip install --no-deps 'nixl>=1.5.1,<2' nixl-cu12` and `pip install numpy`"
BUILDS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
MAX_FILE_BYTES = 1 << 40  # that a descriptor of a file is registered for
FIRST_PAUSE_SECONDS = 20e-6  # between two looks at a transfer; it grows with every look
LAST_PAUSE_SECONDS = 200e-6
PAUSE_GROWTH = 1.05  # the end of a transfer is seen a twentieth of its time and the first pause late at most

# What plugins get where nothing else is given. By itself POSIX prepares for 65,536 transfers, which takes longer than
# the rest of its start, and the others move as many objects at once as the machine has processors, or half of that.
_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "POSIX": {"ios_pool_size": "1024"},
    "OBJ": {"num_threads": "8"},
    "AZURE_BLOB": {"num_threads": "8"},
}
_NEEDS = {
    "GDS": "NVIDIA's driver, nvidia-fs and libcufile",
    "GDS_MT": "NVIDIA's driver, nvidia-fs and libcufile",
    "HF3FS": "a NIXL that was built with 3FS",
}

_numbers = itertools.count()


class Range(NamedTuple):
    """A range of memory."""

    address: int
    size_bytes: int


@dataclass(frozen=True)
class AgentSettings:
    """What an agent is made of. `objects` and `files` are registered once, beside `region`, in which nearly all buffers
    lie; they are then named by their position and by their descriptor. No part of it is ever shown: `params` may hold
    secrets."""

    where: str
    backend: str
    params: Mapping[str, str] = field(repr=False)
    region: Range | None = None
    objects: Sequence[str] = ()
    files: Sequence[int] = ()
    clock: Clock = SYSTEM.clock


def load_bindings(where: str) -> Any:
    """ResourceError where the package is missing or cannot be loaded."""
    installed = [name for name in BUILDS if importlib.util.find_spec(name) is not None]
    # `nixl` chooses among several, and may load torch to do so.
    package = installed[0] if len(installed) == 1 else "nixl"
    try:
        importlib.import_module(package)
        return importlib.import_module(f"{package}._bindings")
    except ImportError as error:
        raise ResourceError(
            f'{where}: the package "nixl" cannot be loaded ({error}); install it with {INSTALL}.'
        ) from None


def refuse_missing_plugin(where: str, backend: str) -> None:
    """ResourceError where this installation of NIXL cannot use a backend. Connects to nothing."""
    bindings = load_bindings(where)
    agent = bindings.nixlAgent(_new_name(), _agent_config(bindings))
    plugins = list(agent.getAvailPlugins())
    try:
        if backend in plugins:
            agent.getPluginParams(backend)
            return
    except faults_of(bindings):  # it is there and cannot be loaded
        pass
    needs = f" It needs {_NEEDS[backend]}." if backend in _NEEDS else ""
    raise ResourceError(
        f'{where}: this installation of NIXL has no usable plugin for "backend" "{backend}".{needs} '
        "Choose another backend, or install what is missing."
    )


class Agent:
    """Belongs to one thread. ResourceError where the backend refuses its settings."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._nixl = load_bindings(settings.where)
        self._faults = faults_of(self._nixl)
        self._agent: Any = None
        self._files = frozenset(settings.files)
        self._borrowed: list[tuple[Any, list[Descriptor]]] = []  # registered for the transfer under way
        self._open()

    def _open(self) -> None:
        nixl, settings = self._nixl, self._settings
        self._name = _new_name()
        agent = nixl.nixlAgent(self._name, _agent_config(nixl))
        try:
            self._backend = agent.createBackend(settings.backend, _params(settings))
            self._agent = agent
            self._register(nixl.DRAM_SEG, [(*settings.region, 0, "")] if settings.region else ())
            self._register(nixl.FILE_SEG, [(0, MAX_FILE_BYTES, fd, "") for fd in settings.files])
            self._register(nixl.OBJ_SEG, [(0, 0, at, name) for at, name in enumerate(settings.objects)])
            for kind, descriptors in self._borrowed:
                self._register(kind, descriptors)
        except self._faults as error:
            self._agent = None
            raise ResourceError(
                f'{settings.where}: the NIXL backend "{settings.backend}" cannot be used with these "backend_params" '
                f"({error}); NIXL's lines above say why."
            ) from None

    @property
    def is_open(self) -> bool:
        """False where a new one did not open in the place of one that failed."""
        return self._agent is not None

    def close(self) -> None:
        """Waits for what a failed transfer left under way."""
        self._agent = None

    # ---- transfers ---------------------------------------------------------------------------------------------------
    def transfer_files(self, operation: Operation, ranges: Sequence[Range], files: Sequence[int]) -> list[bool]:
        """Each range of memory from or to the beginning of a file: whether all of it was transferred. Files that are
        not of the settings are registered for this transfer. Memory is used until this returns and not longer."""
        nixl = self._nixl
        with self._registered(ranges, [fd for fd in files if fd not in self._files]):
            remotes = [(0, size_bytes, fd) for (_, size_bytes), fd in zip(ranges, files, strict=True)]
            if self._transfer(operation, ranges, nixl.FILE_SEG, remotes):
                return [True] * len(ranges)
            if len(ranges) == 1:
                return [False]
            return [
                self._transfer(operation, [single], nixl.FILE_SEG, [remote])
                for single, remote in zip(ranges, remotes, strict=True)
            ]

    def transfer_objects(self, operation: Operation, ranges: Sequence[Range], objects: Sequence[int]) -> list[bool]:
        """Transfers like `transfer_files`, for whole objects by their position in the settings, all of them at once."""
        with self._registered(ranges, ()):
            begun = [
                self._begin(operation, [single], self._nixl.OBJ_SEG, [(0, single.size_bytes, at)])
                for single, at in zip(ranges, objects, strict=True)
            ]
            return [end is not None and end() for end in begun]

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Whether the backend has objects of these names. OSError: it does not say."""
        descriptors = self._nixl.nixlRegDList(self._nixl.OBJ_SEG, [(0, 0, 0, name) for name in names])
        try:
            answers = self._agent.queryMem(descriptors, self._backend)
        except self._faults as error:
            raise OSError(errno.EIO, str(error)) from None
        return [answer is not None for answer in answers]

    def _transfer(self, operation: Operation, ranges: Sequence[Range], kind: Any, remotes: list[Any]) -> bool:
        end = self._begin(operation, ranges, kind, remotes)
        if end is not None and end():
            return True
        self._replace()
        return False

    def _begin(
        self, operation: Operation, ranges: Sequence[Range], kind: Any, remotes: list[Any]
    ) -> Callable[[], bool] | None:
        """What waits for the end and tells whether it was a good one; None where it could not begin."""
        nixl = self._nixl
        code = nixl.NIXL_READ if operation == "READ" else nixl.NIXL_WRITE
        local = nixl.nixlXferDList(nixl.DRAM_SEG, [(*single, 0) for single in ranges])
        try:
            handle = self._agent.createXferReq(
                code, local, nixl.nixlXferDList(kind, remotes), self._name, "", [self._backend]
            )
        except self._faults as error:
            log.debug("NIXL refused a transfer: %s", error)
            return None
        try:
            status = self._agent.postXferReq(handle)
        except self._faults as error:
            log.debug("NIXL could not begin a transfer: %s", error)
            self._release(handle)
            return None
        return partial(self._wait, handle, status)

    def _wait(self, handle: int, status: Any) -> bool:
        try:
            if status == self._nixl.NIXL_IN_PROG:  # what went through the page cache has ended by now
                status = self._agent.getXferStatus(handle)
            status = end_of_transfer(self._nixl, self._agent, handle, status, self._settings.clock)
        except self._faults as error:
            log.debug("NIXL reports a transfer that failed: %s", error)
            return False
        finally:
            self._release(handle)
        return bool(status == self._nixl.NIXL_SUCCESS)

    def _release(self, handle: int) -> None:
        try:
            self._agent.releaseXferReq(handle)
        except self._faults as error:
            log.debug("NIXL keeps the handle of a transfer: %s", error)

    def _replace(self) -> None:
        """Waits for the end of what a failed transfer began."""
        self._agent = None
        self._open()

    # ---- registration ------------------------------------------------------------------------------------------------
    @contextmanager
    def _registered(self, ranges: Sequence[Range], files: Sequence[int]) -> Iterator[None]:
        """For one transfer: memory outside of the region, and files that are not of the settings. AdapterError where
        the backend takes none of it."""
        region = self._settings.region
        outside = [single for single in dict.fromkeys(ranges) if region is None or not _is_inside(single, region)]
        self._borrowed = [
            (self._nixl.DRAM_SEG, [(*single, 0, "") for single in outside]),
            (self._nixl.FILE_SEG, [(0, MAX_FILE_BYTES, fd, "") for fd in dict.fromkeys(files)]),
        ]
        try:
            for kind, descriptors in self._borrowed:
                self._register(kind, descriptors)
            yield
        except self._faults as error:
            raise AdapterError(f"NIXL does not register the memory or the files of a transfer ({error})") from None
        finally:
            for kind, descriptors in self._borrowed:
                self._deregister(kind, descriptors)
            self._borrowed = []

    def _register(self, kind: Any, descriptors: Sequence[Descriptor]) -> None:
        if descriptors:
            self._agent.registerMem(self._nixl.nixlRegDList(kind, list(descriptors)), [self._backend])

    def _deregister(self, kind: Any, descriptors: Sequence[Descriptor]) -> None:
        if not descriptors or self._agent is None:
            return
        try:
            self._agent.deregisterMem(self._nixl.nixlRegDList(kind, list(descriptors)), [self._backend])
        except self._faults as error:
            log.debug("NIXL does not know what a transfer registered: %s", error)


def _is_inside(inner: Range, outer: Range) -> bool:
    return outer.address <= inner.address and (inner.address + inner.size_bytes <= outer.address + outer.size_bytes)


def _new_name() -> str:
    """NIXL tells agents apart by their names."""
    return f"lmcache-{next(_numbers)}"


def end_of_transfer(bindings: Any, agent: Any, handle: int, status: Any, clock: Clock) -> Any:
    """The status in which it ends. Polls on this thread, without the interpreter's lock, at growing distances."""
    pause_seconds = FIRST_PAUSE_SECONDS
    while status == bindings.NIXL_IN_PROG:
        clock.sleep(pause_seconds)
        pause_seconds = min(pause_seconds * PAUSE_GROWTH, LAST_PAUSE_SECONDS)
        status = agent.getXferStatus(handle)
    return status


def faults_of(bindings: Any) -> tuple[type[Exception], ...]:
    """What NIXL raises. Its exceptions have nothing in common but the ends of their names."""
    found = [value for name, value in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error")]
    return (*found, RuntimeError)


def _agent_config(bindings: Any) -> Any:
    """Without threads of its own: each agent belongs to one thread, which polls it."""
    return bindings.nixlAgentConfig(False, False, 0, bindings.NIXL_THREAD_SYNC_NONE)


def _params(settings: AgentSettings) -> dict[str, str]:
    return {**_DEFAULTS.get(settings.backend, {}), **settings.params}
