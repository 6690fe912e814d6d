"""docs/reference/commands.md is what the parsers say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from lmcache.cli.command_tree import WITH_SERVER_OPTIONS, commands
from lmcache.config.spec import flag, options

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "commands.md"


def test_the_reference_page_is_current() -> None:
    script = ROOT / "scripts" / "write_commands_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_has_every_option_of_every_command() -> None:
    """As shell completion knows them."""
    text = PAGE.read_text()
    common = sections(text)["Options of every command"]
    for command in commands():
        section = sections(text)[f"lmcache {command.name}"]
        of_server = {flag(name) for name in options()} if command.name in WITH_SERVER_OPTIONS[1:] else set()
        for option in command.options:
            if not (of_server | {"--config"}) & set(option.flags) or command.name == "server":
                assert all(f"`{name}`" in section + common for name in option.flags), (command.name, option)


def sections(text: str) -> dict[str, str]:
    found = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))
