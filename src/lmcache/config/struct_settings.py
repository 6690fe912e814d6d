"""Reads a JSON object into a msgspec Struct, which declares each key: type, range, default and meaning.

Refusals name the key and what it must be, and tell all that is wrong at once; the same words make the help. msgspec
checks the values; its own messages are not used, as they stop at the first problem and suggest nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin

import msgspec
from msgspec import inspect

from lmcache.config.redact import is_secret, shown
from lmcache.config.values import nearest, range_text, suggestion
from lmcache.core.problems import Problems
from lmcache.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

_KEY_CUTOFF = 0.5  # keys are long, and a part of one is often written for it
_NO_INTERNAL: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Key:
    """A key of a Struct. `expected` reads after "must be", `hint` is the declared type, `nested` the Struct of a key
    whose value is an object with declared keys."""

    name: str
    attribute: str  # the field
    hint: Any
    expected: str
    description: str
    required: bool
    default: Any = None
    default_text: str = ""  # where the default depends on the machine
    choices: tuple[str, ...] = ()
    nested: type[msgspec.Struct] | None = None
    own: type[ReadsItself] | None = None  # the type of a value that is neither a Struct nor plain


class ReadsItself(Protocol):
    """The type of a value that has keys of its own, and which ones, it decides itself."""

    @classmethod
    def read(cls, given: Any, where: str) -> Any:
        """ConfigError tells all that is wrong; ValueError: not even the kind of value that is expected."""
        ...


@functools.cache
def keys_of(kind: type[msgspec.Struct], internal: frozenset[str] = _NO_INTERNAL) -> tuple[Key, ...]:
    """In the order of declaration, a class before what it derives from. `internal`: fields that are no keys.

    What a type does not say is in `Meta(extra={...})`: "expected", to read after "must be", and "default", a text for a
    default that depends on the machine."""
    fields = {field.name: field for field in msgspec.structs.fields(kind) if field.name not in internal}
    declared = [name for owner in kind.__mro__ for name in vars(owner).get("__annotations__", ()) if name in fields]
    return tuple(_key(fields[name]) for name in dict.fromkeys(declared))


def _key(field: msgspec.structs.FieldInfo) -> Key:
    kind, schema, extra = _plain(inspect.type_info(field.type))
    choices = _choices(field.type) if isinstance(kind, inspect.LiteralType) else ()
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return Key(
        name=field.encode_name,
        attribute=field.name,
        hint=field.type,
        expected=extra.get("expected") or _expected(kind, choices),
        description=schema.get("description", ""),
        required=default is msgspec.NODEFAULT,
        default=None if default is msgspec.NODEFAULT else default,
        default_text=extra.get("default", ""),
        choices=choices,
        nested=kind.cls if isinstance(kind, inspect.StructType) else None,
        own=kind.cls if isinstance(kind, inspect.CustomType) else None,
    )


def _plain(kind: inspect.Type) -> tuple[inspect.Type, Mapping[str, Any], Mapping[str, Any]]:
    """The type without None and metadata, its JSON schema, its extra metadata."""
    schema: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    while True:
        if isinstance(kind, inspect.Metadata):
            schema, extra = {**(kind.extra_json_schema or {}), **schema}, {**(kind.extra or {}), **extra}
            kind = kind.type
        elif isinstance(kind, inspect.UnionType) and len(kind.types) == 2 and kind.includes_none:
            kind = next(member for member in kind.types if not isinstance(member, inspect.NoneType))
        else:
            return kind, schema, extra


def _choices(hint: Any) -> tuple[str, ...]:
    """The values of its Literal, in the order of declaration: msgspec sorts them."""
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    return next((found for member in get_args(hint) if (found := _choices(member))), ())


def _expected(kind: inspect.Type, choices: tuple[str, ...]) -> str:
    """ "" for other types: msgspec says itself what they take."""
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(lt=None, multiple_of=None):
            return "a whole number" + range_text(kind.ge, kind.gt, kind.le)
        case inspect.FloatType(lt=None, multiple_of=None):
            return "a number" + range_text(kind.ge, kind.gt, kind.le)
        case inspect.StrType(min_length=None, max_length=None, pattern=None):
            return "a string"
        case inspect.StrType(min_length=1, max_length=None, pattern=None):
            return "a non-empty string"
        case inspect.LiteralType():
            named = ", ".join(filter(None, choices))
            return f"one of {named}, or empty" if "" in choices else f"one of {named}"
        case inspect.DictType(value_type=inspect.AnyType()):
            return "a JSON object"
        case inspect.StructType():
            required = [f'"{field.name}"' for field in kind.fields if field.required]
            keys = f" with the key{'s' * (len(required) > 1)} {' and '.join(required)}" if required else ""
            return f"an object{keys}"
    return ""


def read(
    given: Mapping[str, Any],
    kind: type[T],
    where: str,
    *,
    unbuilt: Mapping[str, str] | None = None,
    **internal: Any,
) -> T:
    """ConfigError tells all that is wrong: each sentence begins with `where`, names the key and says what is allowed.

    `unbuilt`: what to use instead of keys that are documented and not built. `internal`: fields that are no keys. A
    ValueError of the Struct's `__post_init__` is the rest of a sentence about keys that do not fit each other."""
    problems = Problems()
    keys = keys_of(kind, frozenset(internal))
    names = [key.name for key in keys]
    missing = {key.name for key in keys if key.required} - set(given)
    for name in given:
        if name in names:
            continue
        if instead := (unbuilt or {}).get(name):
            problems.add(f'{where}: "{name}" is not built yet; {instead}.')
            continue
        meant = nearest(name, names, cutoff=_KEY_CUTOFF)
        missing.discard(meant)  # nobody has to be asked for it as well
        question = f" (did you mean {meant}?)" if meant else ""
        problems.add(f'{where}: unknown key "{name}"{question}; allowed are {", ".join(sorted(names))}.')
    values: dict[str, Any] = {}
    for key in keys:
        if key.name in missing:
            problems.add(f'{where}: the key "{key.name}" is required.')
        elif key.name in given:
            with problems.collect():
                values[key.attribute] = _value(key, given[key.name], where)
    problems.raise_all()
    try:
        return kind(**values, **internal)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _value(key: Key, given: Any, where: str) -> Any:
    if key.nested is not None and isinstance(given, Mapping):
        return read(given, key.nested, f'{where}, "{key.name}"')
    try:
        if given is None:
            raise msgspec.ValidationError("null")
        return key.own.read(given, where) if key.own is not None else msgspec.convert(given, key.hint)
    except ValueError as error:  # msgspec's ValidationError is one
        got = "" if is_secret(key.name) else f"; got {shown(given)!r}"
        if not key.expected:
            raise ConfigError(f'{where}: "{key.name}" is not valid: {error}{got}.') from None
        meant = suggestion(given, key.choices) if isinstance(given, str) else ""
        raise ConfigError(f'{where}: "{key.name}" must be {key.expected}{meant}{got}.') from None


def built_type(
    given: Mapping[str, Any],
    built: Sequence[str],
    unbuilt: Mapping[str, str],
    of: str,
    where: str,
    *,
    key: str = "",
    meant: Callable[[str, Sequence[str]], str] = suggestion,
) -> str:
    """The value of "type" in `given`: the name of a built type `of` something. `key`: the key that `given` is the value
    of. `meant(name, built)` reads after an unknown name."""
    name, names = given.get("type"), ", ".join(built)
    if not isinstance(name, str):
        of_key = f', "{key}"' if key else ""
        raise ConfigError(f'{where}{of_key}: the key "type" is required and must be one of {names}.')
    if name in unbuilt:
        raise ConfigError(f'{where}: the {of} type "{name}" is not built yet ({unbuilt[name]}); built are {names}.')
    if name not in built:
        raise ConfigError(f'{where}: unknown {of} type "{name}"{meant(name, built)}; built are {names}.')
    return name


def refuse_nul(given: Mapping[str, Any], where: str) -> None:
    """No path, address or name can have this character, and the operating system's own refusal names no key."""
    problems = Problems()
    for name, value in given.items():
        if _has_nul(value):
            problems.add(f'{where}: "{name}" must not have the character NUL (\\u0000) in it.')
    problems.raise_all()


def _has_nul(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_nul, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_nul, value))
    return isinstance(value, str) and "\0" in value
