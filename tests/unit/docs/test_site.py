"""The site of the documents builds without a broken link, has every page, and quotes what the program really says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.program_sentences import sentences

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
LONGEST_LINES = 250  # of a page that is read; the reference is made
SAID = re.compile(r"`([^`\n]*[a-z] [^`\n]*)`")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict", "--config-file", "mkdocs.yml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What a build reads."""
    shutil.copytree(DOCS, tmp_path / "docs")
    for name in ("mkdocs.yml", "ARCHITECTURE.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_the_site_builds(copy: Path) -> None:
    done = build(copy)
    assert done.returncode == 0 and "No issues found" in done.stdout + done.stderr, done.stdout + done.stderr
    glossary = (copy / "build" / "site" / "glossary.html").read_text()
    terms = re.findall(
        r"^\| ([^|]+) \|", (ROOT / "ARCHITECTURE.md").read_text().partition("[end:terms]")[0], re.MULTILINE
    )
    assert len(terms) > 20 and all(f"<td>{term}</td>" in glossary for term in terms if term not in ("term", "---"))
    for page in (copy / "build" / "site").rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|link rel="stylesheet")[^>]+(?:src|href)="(https?:)', page.read_text())
        assert not fetched, page


@pytest.mark.parametrize("link", ["[x](nowhere.md)", "[x](glossary.md#nowhere)"])
def test_a_broken_link_ends_the_build(copy: Path, link: str) -> None:
    with (copy / "docs" / "index.md").open("a") as page:
        page.write(f"\n{link}\n")
    assert build(copy).returncode != 0


def _pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in _pages(part)]


def test_every_page_has_its_place() -> None:
    pages = _pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(pages) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_pages_are_short() -> None:
    read = [path for path in DOCS.rglob("*.md") if path.parent.name != "reference"]
    assert {path.name for path in read if len(path.read_text().splitlines()) > LONGEST_LINES} == set()


def test_troubleshooting_quotes_what_the_program_says() -> None:
    """The first column of its tables of sentences."""
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = [found for row in re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE) for found in SAID.findall(row)]
    said = sentences()
    assert len(quoted) > 35
    assert [quote for quote in quoted if not any(quote in sentence for sentence in said)] == []
