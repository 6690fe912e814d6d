"""Classes that somebody else wrote, found by the names in an adapter's specification."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import msgspec

from lmcache.config import struct_settings
from lmcache.config.values import suggestion
from lmcache.errors import ConfigError, LMCacheError


def import_module(subject: str, module_path: str) -> ModuleType:
    """A dotted name as in `import`, or the path of a .py file. ConfigError begins with `subject`, and says what Python
    said."""
    try:
        if not module_path.endswith(".py"):
            return importlib.import_module(module_path)
        path = os.path.realpath(module_path)
        name = f"lmcache_outside_{os.path.basename(path)[:-3]}_{hashlib.sha256(path.encode()).hexdigest()[:16]}"
        if name in sys.modules:
            return sys.modules[name]
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        sys.modules[name] = module
        return module
    except (Exception, SystemExit) as error:  # code from outside may raise anything while it is imported
        raise ConfigError(
            f"{subject} {module_path!r} cannot be imported ({type(error).__name__}: {error}); it must be "
            "a module that Python finds where the server runs, or the path of a .py file."
        ) from error


def construct(where: str, module: ModuleType, class_name: str, parameters: Mapping[str, Any], config_class: str) -> Any:
    """`class_name(**parameters)`; with a configuration class `class_name(config)`. Its config is read as those of this
    package's adapters where the class is a msgspec Struct; else it comes from `from_dict(parameters)` if the class has
    that, and from `config_class(**parameters)` otherwise."""
    kind = attribute(where, module, "class_name", class_name)
    try:
        if not config_class:
            return kind(**parameters)
        configuration = attribute(where, module, "config_class_name", config_class)
        if isinstance(configuration, type) and issubclass(configuration, msgspec.Struct):
            return kind(struct_settings.read(parameters, configuration, f'{where}, "adapter_params"'))
        from_dict = getattr(configuration, "from_dict", None)
        return kind(from_dict(dict(parameters)) if from_dict else configuration(**parameters))
    except LMCacheError:
        raise
    except Exception as error:  # code from outside may raise anything
        raise ConfigError(
            f'{where}: {class_name} cannot be made from "adapter_params" with the keys '
            f"{', '.join(parameters) or '(none)'} ({type(error).__name__}: {error})."
        ) from error


def need_methods(where: str, adapter: object, names: tuple[str, ...], guide: str) -> None:
    missing = [name for name in names if not callable(getattr(adapter, name, None))]
    if missing:
        raise ConfigError(f"{where}: {type(adapter).__name__} lacks {', '.join(missing)}; {guide} says what it needs.")


def attribute(where: str, module: ModuleType, key: str, name: str) -> Any:
    """The class of that name. ConfigError names `key` and the nearest class that there is."""
    found = getattr(module, name, None)
    if not callable(found):
        classes = [candidate for candidate, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(
            f'{where}: "{key}" {name!r} is not a class in {module.__name__}{suggestion(name, classes)}; '
            "write it as in the module."
        )
    return found
