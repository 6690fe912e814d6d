"""Reads a YAML file as one mapping; a key given twice is refused, where YAML itself would keep the last."""

from __future__ import annotations

from typing import Any

import yaml

from lmcache.config.values import refuse_duplicates
from lmcache.errors import ConfigError


class _Loader(yaml.SafeLoader):
    pass


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    loader.flatten_mapping(node)
    pairs = [(str(loader.construct_object(key)), loader.construct_object(item, deep=True)) for key, item in node.value]
    return refuse_duplicates(pairs)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def read_yaml(path: str, named_by: str) -> dict[str, Any]:
    """ConfigError: a sentence that begins with `named_by`, which gave the path. An empty file is an empty mapping."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, _Loader)
    except OSError as error:
        raise ConfigError(f"{named_by} {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{named_by} {path} is not UTF-8 text.") from None
    except ValueError as error:
        raise ConfigError(f"{named_by} {path} {error}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{named_by} {path} is not YAML{place}: {getattr(error, 'problem', error)}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{named_by} {path} must hold one mapping of options, such as 'l1_size_gb: 20'.")
    return content
