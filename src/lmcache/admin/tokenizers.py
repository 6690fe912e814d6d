"""Tokens of a text, by the tokenizer of a model in --tokenizer-dir."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmcache.core.file_version import file_version
from lmcache.errors import ConfigError

_FILE = "tokenizer.json"
_KEPT = 4


class Tokenizers:
    """Thread-safe. A file that is replaced is read again."""

    def __init__(self, folder: Callable[[], str]) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._loaded: dict[Path, tuple[tuple[int, ...], Any]] = {}  # by file: its version, the tokenizer

    def encode(self, model_name: str, text: str) -> Sequence[int]:
        """With the special tokens that an engine adds to a prompt. ConfigError where there is no tokenizer. Other
        threads run meanwhile: of the package's methods only those for batches release the interpreter."""
        path = self._path(model_name)
        with self._lock:
            version = file_version(path.stat())
            known = self._loaded.get(path)
            if known is None or known[0] != version:
                known = (version, load_tokenizer(path, "--tokenizer-dir"))
                while len(self._loaded) >= _KEPT:
                    del self._loaded[next(iter(self._loaded))]
                self._loaded[path] = known
        ids: Sequence[int] = known[1].encode_batch([text])[0].ids
        return ids

    def _path(self, model_name: str) -> Path:
        if not self._folder():
            raise ConfigError("Text needs a tokenizer: start the server with --tokenizer-dir, or send tokens.")
        folder = Path(self._folder()).resolve()
        for path in ((folder / model_name / _FILE), folder / _FILE):
            try:
                path = path.resolve()
                if path.is_relative_to(folder) and path.is_file():
                    return path
            except (OSError, ValueError):  # a name that no file can have
                continue
        raise ConfigError(f"--tokenizer-dir has neither {model_name}/{_FILE} nor {_FILE}.")


def load_tokenizer(path: Path, flag: str) -> Any:
    """What the package tokenizers makes of the file, for whole prompts, as engines do: many a file asks for a cut
    or padding. ConfigError names `flag`, which says where the file is."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("Text needs the package tokenizers: pip install 'lmcache[text]', or send tokens.") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    except Exception as error:  # what the package raises has no other type
        raise ConfigError(f"{path.name} of {flag} cannot be read: {error}.") from None
