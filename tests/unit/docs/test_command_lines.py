"""Each `lmcache ...` line of the documents is one that the real parsers take."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmcache import startup
from lmcache.cli import main
from lmcache.cli.arguments import Arguments

ROOT = Path(__file__).parents[3]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "deploy" / "README.md"]
TABLE = "documented-commands.md"  # of other documents' lines, which a test of its own runs
REQUIRED = {"--l1-size-gb": "1", "--eviction-policy": "LRU"}  # where a page says `lmcache server ...`
PLACEHOLDERS = {"TYPE": "fs_native", "SALT": "tenant", "GB": "1", "FOLDER": "/tmp", "URL": "http://localhost:8080"}
_SHOWS_HELP = ("--help", "-h", "--version")
_BLOCK = re.compile(r"^```\w*\n(.*?)^```|((?:^    [^\n]*\n)+)", re.MULTILINE | re.DOTALL)
_BEGINNING = re.compile(r"(?:[A-Z_]+=\S+ )*lmcache ")
_INLINE = re.compile(r"`(lmcache [^`]+)`", re.DOTALL)


@dataclass(frozen=True)
class Line:
    page: str
    text: str
    whole: bool  # in a block, to be typed as it is; else a mention, which may leave arguments out

    @property
    def words(self) -> list[str]:
        words = [word for word in shlex.split(self.text, comments=True) if word not in ("...", "…", "&")]
        words = words[: words.index(">")] if ">" in words else words
        while "=" in words[0]:
            del words[0]
        assert words.pop(0) == "lmcache"
        return [PLACEHOLDERS.get(word, word) for word in words]


def whole_lines(block: str, beginning: re.Pattern[str] = _BEGINNING) -> Iterator[str]:
    """Commands of a block that begin so, those over several lines too."""
    begun = ""
    for line in block.splitlines():
        line = line.removeprefix("    ")
        if not begun and not beginning.match(line):
            continue
        begun += line
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        try:
            shlex.split(begun, comments=True)
        except ValueError:  # a quotation goes on
            begun += "\n"
            continue
        yield begun
        begun = ""
    assert not begun, begun


def lines_of(page: Path) -> Iterator[Line]:
    text, name = page.read_text(), str(page.relative_to(ROOT))
    for fenced, indented in _BLOCK.findall(text):
        for line in whole_lines(fenced or indented):
            yield Line(name, line, whole=True)
    for mention in _INLINE.findall(_BLOCK.sub("", text)):
        yield Line(name, " ".join(mention.split()), whole=False)


LINES = [line for page in PAGES if page.name != TABLE for line in lines_of(page)]


class Taken(Exception):
    """A parser has taken the line; its command does not begin."""


@pytest.fixture
def parsers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("read", "read_own"):
        read = getattr(Arguments, name)

        def read_and_stop(self: Arguments, argv: list[str], read: Any = read) -> None:
            read(self, argv)
            raise Taken

        monkeypatch.setattr(Arguments, name, read_and_stop)


def test_there_are_lines() -> None:
    assert len([line for line in LINES if line.whole]) > 25 and len(LINES) > 60


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.page}: {line.text[:60]}")
def test_the_parser_takes_it(line: Line, parsers_alone: None) -> None:
    words = line.words
    command = " ".join(words[:2]) if " ".join(words[:2]) in main.COMMANDS else words[0]
    assert command in main.COMMANDS or words[0] in _SHOWS_HELP or words == ["bench"], f"{line.page}: {line.text}"
    arguments = words[len(command.split()) :]
    if any(word in words for word in _SHOWS_HELP) or not (line.whole or arguments):
        return
    if command in ("server", "config check", "config show"):
        config_file = "--config" in arguments
        leaves_out = config_file or not line.whole or "..." in line.text
        missing = [word for flag, value in REQUIRED.items() if flag not in arguments for word in (flag, value)]
        assert leaves_out or not missing, f"{line.page}: a server needs {missing}: {line.text}"
        startup.read([*missing, *([] if config_file else arguments)], {})
        return
    with pytest.raises(Taken):
        main.dispatch(words)
