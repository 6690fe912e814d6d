"""The stub that type checkers read is that of the extension beside it."""

from __future__ import annotations

import ast
import enum
import inspect
from pathlib import Path

from lmcache import _native

STUB = Path(str(_native.__file__)).with_name("_native.pyi")
STATEMENTS_WITH_NAMES = (ast.ClassDef, ast.FunctionDef)


def names_in_stub() -> set[str]:
    """Functions, constants, and classes with their members, as `name` and `Class.name`."""
    names: set[str] = set()
    for statement in ast.parse(STUB.read_text()).body:
        names |= names_of(statement)
        if isinstance(statement, ast.ClassDef):
            for member in statement.body:
                names |= {f"{statement.name}.{name}" for name in names_of(member)}
    return names


def names_of(statement: ast.stmt) -> set[str]:
    if isinstance(statement, STATEMENTS_WITH_NAMES):
        return {statement.name}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return set()


def names_in_extension() -> set[str]:
    names = {name for name in vars(_native) if not name.startswith("__")}
    for name, offered in inspect.getmembers(_native, inspect.isclass):
        members = offered.__members__ if issubclass(offered, enum.Enum) else vars(offered)
        names |= {f"{name}.{member}" for member in members if not member.startswith("__")}
    return names


def test_the_stub_names_what_the_extension_offers() -> None:
    assert {name for name in names_in_stub() if "__" not in name} == names_in_extension()


def test_the_stub_has_the_sentences_of_the_extension() -> None:
    functions = {s.name: s for s in ast.parse(STUB.read_text()).body if isinstance(s, ast.FunctionDef)}
    assert len(functions) > 10
    for name, function in functions.items():
        signature, _, sentence = (getattr(_native, name).__doc__ or "").partition("\n")
        assert signature.startswith(f"{name}(")
        assert ast.get_docstring(function) == (inspect.cleandoc(sentence) or None), name
