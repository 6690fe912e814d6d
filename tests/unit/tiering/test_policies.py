"""Policies from outside: how they are selected, what of them is refused, and what a faulty one costs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache.config.load import load
from lmcache.core.key import Namespace, ObjectKey
from lmcache.errors import ConfigError
from lmcache.tiering import policies
from lmcache.tiering.policies import (
    AdapterInfo,
    LoadAsConfigured,
    StoreToAll,
    register_prefetch_policy,
    register_store_policy,
)
from lmcache.tiering.policy_selection import select_prefetch_policy, select_store_policy
from unit.tiering.support import Rig, faulty, keys, namespace, open_rig

GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "write-a-policy.md"
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
(ENTRY_POINTS,) = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)

OTHERS = """
import nowhere_to_be_found
"""


@pytest.fixture(autouse=True)
def _as_at_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a test registers or imports ends with it."""
    monkeypatch.setattr(policies, "STORE_POLICIES", policies.STORE_POLICIES)
    monkeypatch.syspath_prepend(tmp_path)
    store, prefetch, modules = dict(policies.STORE_POLICIES), dict(policies.PREFETCH_POLICIES), set(sys.modules)
    yield
    for names, before in ((policies.STORE_POLICIES, store), (policies.PREFETCH_POLICIES, prefetch)):
        for name in set(names) - set(before):
            del names[name]
    for module in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


def save(folder: Path, text: str, name: str = "tenant_policies") -> Path:
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def install(folder: Path, entry_points: str, package: str = "tenant-policies") -> None:
    """As pip leaves it where Python looks."""
    info = folder / f"{package.replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entry_points)


def stored_and_forgotten(rig: Rig, wanted: Sequence[ObjectKey]) -> None:
    rig.put(wanted)
    assert rig.storage.responsive(20) and rig.storage.flush(20)
    rig.storage.clear("l1")


# ---- the guide -------------------------------------------------------------------------------------------------------
def use_the_example(store_policy: str, prefetch_policy: str) -> None:
    (first, front), (second, back) = faulty(), faulty(index=1)
    with open_rig([first, second], store_policy=store_policy, prefetch_policy=prefetch_policy) as rig:
        private, public = keys(20, of=namespace(salt="bank")), keys(20)
        for wanted in (private, public):
            stored_and_forgotten(rig, wanted)
        assert set(front.inner.objects) == {*private, *public}
        assert set(back.inner.objects) == set(public)
        for number in range(4):
            result = rig.fetch(public)
            assert result.chunks == 20 and rig.holds(result, public)
            rig.l1.core.release(result.lease)
            assert rig.resident(public) == 20  # retained
            rig.storage.clear("l1")
            assert (front.calls["load"], back.calls["load"]) == ((number + 2) // 2, (number + 1) // 2)
        result = rig.fetch(private)
        assert result.chunks == 20 and rig.holds(result, private)
        assert rig.sample("policy_faults_total", policy="store") == 0
        assert rig.sample("policy_faults_total", policy="prefetch") == 0


@pytest.mark.parametrize(
    ("store_policy", "prefetch_policy"),
    [
        ("tenant_policies:KeepPrivate", "tenant_policies:InTurns"),
        ("tenant_policies:keep_private", "tenant_policies:in_turns"),
        ("FOLDER/tenant_policies.py:KeepPrivate", "FOLDER/tenant_policies.py:in_turns"),
    ],
)
def test_the_example_by_its_module(tmp_path: Path, store_policy: str, prefetch_policy: str) -> None:
    save(tmp_path, EXAMPLE)
    use_the_example(store_policy.replace("FOLDER", str(tmp_path)), prefetch_policy.replace("FOLDER", str(tmp_path)))


@pytest.mark.parametrize("registers", [False, True])
def test_the_example_by_entry_points(tmp_path: Path, registers: bool) -> None:
    """An entry point names the class, or a module that registers it."""
    save(tmp_path, EXAMPLE)
    tables = re.sub(r'^\[project\.entry-points\."(.*)"\]$', r"[\1]", ENTRY_POINTS, flags=re.MULTILINE).replace('"', "")
    install(tmp_path, re.sub(r":\w+", "", tables) if registers else tables)
    use_the_example("keep_private", "in_turns")


def test_the_flags_of_the_guide_are_accepted(tmp_path: Path) -> None:
    save(tmp_path, EXAMPLE)
    command = next(part for part in GUIDE.read_text().split("\n\n") if "lmcache server" in part)
    config = load(shlex.split(command.replace("\\\n", " "))[2:], {}).config
    assert type(select_store_policy(config.l2_store_policy)).__name__ == "KeepPrivate"
    assert type(select_prefetch_policy(config.l2_prefetch_policy)).__name__ == "InTurns"


# ---- what is refused -------------------------------------------------------------------------------------------------
STORE, PREFETCH = "--l2-store-policy", "--l2-prefetch-policy"
BAD_CLASSES = """
class NeedsArguments:
    def __init__(self, folder): pass
class Raises:
    def __init__(self): raise OSError("no such file: policy.json")
class Empty: pass
class Unsure:
    drops_from_l1 = retains = "yes"
    def targets(self, keys, adapters): return []
    def order(self, namespaces, adapters): return []
class NoMethods:
    drops_from_l1 = retains = True
    targets = order = 7
a_value = 7
def a_function(): return None
"""


@pytest.mark.parametrize("flag", [STORE, PREFETCH])
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("no_such_module:Policy", r"the module 'no_such_module' cannot be imported \(ModuleNotFoundError: No module"),
        ("breaks:Policy", r"the module 'breaks' cannot be imported \(ModuleNotFoundError: No module named 'nowhere_"),
        ("/no/such/file.py:Policy", r"the module '/no/such/file.py' cannot be imported \(FileNotFoundError"),
        ("bad:Emtpy", r"'Emtpy' is neither a class in bad nor registered by it \(did you mean Empty\?\); write it"),
        ("bad:a_value", r"bad:a_value is 7, not a class"),
        ("bad:a_function", r"bad:a_function is <function a_function .*>, not a class"),
        ("bad:NeedsArguments", r"cannot be made \(TypeError: .*folder.*\); a policy is made without arguments"),
        ("bad:Raises", r"cannot be made \(OSError: no such file: policy.json\)"),
        ("bad:Empty", r"Empty has no usable \w+ or \w+ \(AttributeError: .*\); docs/how-to/write-a-policy.md says"),
        ("bad:Unsure", r"of Unsure must be True or False, got 'yes'"),
        ("bad:NoMethods", r"\w+ of NoMethods must be a method"),
        (
            "broken",
            r"broken: the entry point nowhere_to_be_found:P of lmcache\.\w+ cannot be loaded \(ModuleNotFoundErr",
        ),
        ("not_a_class", r"not_a_class is 7, not a class"),
        (
            "unknown",
            r" must be one of default, (skip_l1|retain), an entry point of lmcache.* or MODULE:CLASS; got 'unk",
        ),
    ],
)
def test_what_cannot_be_a_policy_is_refused_in_one_sentence(
    tmp_path: Path, flag: str, value: str, sentence: str
) -> None:
    save(tmp_path, BAD_CLASSES, "bad")
    save(tmp_path, OTHERS, "breaks")
    groups = ("lmcache.store_policies", "lmcache.prefetch_policies")
    points = "broken = nowhere_to_be_found:P\nnot_a_class = bad:a_value\n"
    install(tmp_path, "".join(f"[{group}]\n{points}" for group in groups), "broken")
    select: Any = select_store_policy if flag == STORE else select_prefetch_policy
    with pytest.raises(ConfigError, match=sentence) as refused:
        select(value)
    assert str(refused.value).startswith(flag)
    assert "\n" not in str(refused.value) and str(refused.value).endswith(".")


def test_a_name_belongs_to_one_class() -> None:
    with pytest.raises(ConfigError, match="registered already"):
        register_store_policy("default", type("Other", (StoreToAll,), {}))
    with pytest.raises(ConfigError, match="registered already"):
        register_prefetch_policy("retain", type("Other", (LoadAsConfigured,), {}))
    register_store_policy("default", StoreToAll)


# ---- faulty ones -----------------------------------------------------------------------------------------------------
class Answers:
    """Policies that give a preset answer."""

    drops_from_l1 = retains = False
    answer: Any = None

    def __init__(self) -> None:
        self.asked: list[tuple[int, tuple[str, ...]]] = []

    def targets(self, keys: Sequence[ObjectKey], adapters: Sequence[AdapterInfo]) -> Any:
        self.asked.append((len(keys), tuple(adapter.name for adapter in adapters)))
        return self.answer(len(keys)) if callable(self.answer) else self.answer

    def order(self, namespaces: Sequence[Namespace], adapters: Sequence[AdapterInfo]) -> Any:
        return self.answer(len(namespaces)) if callable(self.answer) else self.answer


def raising(count: int) -> Any:
    raise KeyError("tenant")


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def raising_mutely(count: int) -> Any:
    raise Mute


def answering(answer: Any) -> str:
    """The name of a policy that answers so."""
    kind = type("Preset", (Answers,), {"answer": staticmethod(answer) if callable(answer) else answer})
    for names in (policies.STORE_POLICIES, policies.PREFETCH_POLICIES):
        names["preset"] = kind
    return "preset"


@pytest.mark.parametrize(
    "answer",
    [
        raising,
        raising_mutely,
        None,
        lambda count: [[0]] * (count - 1),
        lambda count: [[2]] * count,
        lambda count: [[-1]] * count,
        lambda count: [["0"]] * count,
        lambda count: [[0, 0]] * count,
        lambda count: [None] * count,
        lambda count: [[0]] * (count - 1) + [[5]],
        lambda count: iter([[0]] * count),
    ],
)
def test_a_faulty_store_policy_is_replaced_by_the_default(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    (first, front), (second, back) = faulty(), faulty(index=1)
    with open_rig([first, second], store_policy=answering(answer)) as rig:
        for seed in range(3):
            rig.put(keys(20, seed))
            assert rig.storage.responsive(20)
        assert rig.storage.flush(20)
        assert len(front.inner.objects) == len(back.inner.objects) == 60
        assert rig.sample("policy_faults_total", policy="store") == 3
    assert sum("The store policy Preset failed" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("answer", [raising, raising_mutely, None, [0, 2], [0, 0], [True, "x"], {0: 1}, "01"])
def test_a_faulty_prefetch_policy_is_replaced_by_the_default(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    (first, front), (second, back) = faulty(), faulty(index=1)
    with open_rig([first, second], prefetch_policy=answering(answer)) as rig:
        stored_and_forgotten(rig, keys(20))
        for _ in range(3):
            result = rig.fetch(keys(20))
            assert result.chunks == 20 and rig.holds(result, keys(20))
            rig.l1.core.release(result.lease)
        assert (front.calls["load"], back.calls["load"]) == (3, 0)
        assert rig.sample("policy_faults_total", policy="prefetch") == 3
    assert sum("The prefetch policy Preset failed" in record.message for record in caplog.records) == 1


class Consumes(Answers):
    """Takes apart what it is given."""

    def targets(self, keys: Any, adapters: Any) -> Any:
        answer = [[0] for _ in keys]
        while keys:
            keys.pop()
        return answer

    def order(self, namespaces: Any, adapters: Any) -> Any:
        namespaces.clear()
        return [0]


def test_a_policy_cannot_change_what_it_is_asked_about(caplog: pytest.LogCaptureFixture) -> None:
    for names in (policies.STORE_POLICIES, policies.PREFETCH_POLICIES):
        names["consumes"] = Consumes
    (first, front), (second, back) = faulty(), faulty(index=1)
    with open_rig([first, second], store_policy="consumes", prefetch_policy="consumes") as rig:
        stored_and_forgotten(rig, keys(20))
        assert len(front.inner.objects) == len(back.inner.objects) == 20
        result = rig.fetch(keys(20))
        assert result.chunks == 20 and rig.holds(result, keys(20))
        rig.l1.core.release(result.lease)
    assert not [record for record in caplog.records if "Storage loop" in record.message]


def test_a_policy_that_fails_now_and_then_decides_the_rest() -> None:
    (first, front), (second, back) = faulty(), faulty(index=1)
    calls: list[int] = []

    def answer(count: int) -> Any:
        calls.append(count)
        if len(calls) == 2:
            raise RuntimeError("once")
        return [(1,)] * count

    with open_rig([first, second], store_policy=answering(answer)) as rig:
        for seed in range(3):
            rig.put(keys(20, seed))
            assert rig.storage.responsive(20)
        assert rig.storage.flush(20)
        assert set(front.inner.objects) == set(keys(20, 1))
        assert len(back.inner.objects) == 60
    assert calls == [20, 20, 20]  # a commit at a time


def test_objects_without_an_adapter_stay_in_l1_alone() -> None:
    configured, adapter = faulty()
    name = answering(lambda count: [()] * count)
    policies.STORE_POLICIES[name].drops_from_l1 = True
    with open_rig([configured], store_policy=name) as rig:
        rig.put(keys(20))
        assert rig.storage.flush(20) and rig.storage.responsive(20)
        assert rig.resident(keys(20)) == 20 and adapter.calls["store"] == 0
        assert rig.storage.status()["store"]["unstored_objects"] == 0
