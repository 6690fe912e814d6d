"""What the controllers ask: a policy whose every answer is checked. Where it raises, or names an adapter that is not
there, the default's answer stands in: counted each time, said once. A fault of a policy never stops stores or loads."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lmcache.core.key import Namespace, ObjectKey
from lmcache.telemetry.log_limiter import LogLimiter
from lmcache.telemetry.metrics import L2Metrics
from lmcache.tiering.policies import AdapterInfo, LoadAsConfigured, PrefetchPolicy, StorePolicy, StoreToAll

T = TypeVar("T")

log = logging.getLogger("lmcache.tiering")


class _Unusable(Exception):
    """An answer that does not keep to the contract."""


class CheckedStorePolicy:
    def __init__(self, policy: StorePolicy, adapters: Sequence[AdapterInfo], metrics: L2Metrics) -> None:
        self.drops_from_l1 = policy.drops_from_l1
        self._policy = policy
        self._adapters = tuple(adapters)
        self._faults = _Faults("store", policy, metrics)

    def targets(self, keys: Sequence[ObjectKey]) -> Sequence[Sequence[int]]:
        """For each key the adapters that are to have the object."""
        keys = tuple(keys)  # a copy that the policy cannot change

        def ask() -> Sequence[Sequence[int]]:
            answer = self._policy.targets(keys, self._adapters)
            if not isinstance(answer, list | tuple) or len(answer) != len(keys):
                raise _Unusable(f"targets() must return a list with the adapters of each of {len(keys)} keys")
            checked: object = self  # nothing yet
            for indices in answer:
                if indices is not checked:  # most objects of a batch have the same
                    _check("targets()", indices, len(self._adapters))
                    checked = indices
            return answer

        return self._faults.guard(ask, lambda: StoreToAll().targets(keys, self._adapters))


class CheckedPrefetchPolicy:
    def __init__(self, policy: PrefetchPolicy, adapters: Sequence[AdapterInfo], metrics: L2Metrics) -> None:
        self.retains = policy.retains
        self._policy = policy
        self._adapters = tuple(adapters)
        self._faults = _Faults("prefetch", policy, metrics)

    def order(self, namespaces: Sequence[Namespace]) -> Sequence[int]:
        """In which order the adapters are asked."""
        namespaces = tuple(namespaces)  # as the keys above

        def ask() -> Sequence[int]:
            answer = self._policy.order(namespaces, self._adapters)
            _check("order()", answer, len(self._adapters))
            return answer

        return self._faults.guard(ask, lambda: LoadAsConfigured().order(namespaces, self._adapters))


def _check(method: str, indices: Any, adapters: int) -> None:
    """_Unusable unless these are different numbers of adapters."""
    if not isinstance(indices, list | tuple | range):
        raise _Unusable(f"{method} must give the adapters of an object as a list of indices, got {indices!r:.100}")
    for index in indices:
        if not isinstance(index, int) or not 0 <= index < adapters:
            raise _Unusable(f"{method} named the adapter {index!r:.100}; there are {adapters}, counted from 0")
    if len(indices) > 1 and len(set(indices)) < len(indices):
        raise _Unusable(f"{method} named an adapter twice: {list(indices)!r:.100}")


class _Faults:
    def __init__(self, kind: str, policy: object, metrics: L2Metrics) -> None:
        self._kind = kind
        self._name = type(policy).__name__
        self._counter = metrics.policy_faults.labels(kind)
        self._log_limiter = LogLimiter()

    def guard(self, ask: Callable[[], T], default: Callable[[], T]) -> T:
        try:
            return ask()
        except Exception as error:  # code from outside may raise anything
            self._counter.inc()
            if self._log_limiter.due():
                log.error(
                    "The %s policy %s failed (%s); the default decides whenever that happens (counted in "
                    "lmcache_mp_policy_faults_total, said once)",
                    self._kind,
                    self._name,
                    error if isinstance(error, _Unusable) else traceback.format_exception_only(error)[-1].strip(),
                    exc_info=None if isinstance(error, _Unusable) else error,
                )
            return default()
