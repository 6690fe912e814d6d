"""`lmcache completion`: what the scripts offer, asked of the shells themselves."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from lmcache.cli import main as cli
from lmcache.cli.command_tree import commands
from lmcache.config.spec import flag, options
from lmcache.l2.adapter_types import TYPES

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        assert cli.main(["completion", shell, "--output", str(folder / shell)]) == 0
    return folder


def run(shell: str, *words: str) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not on this machine")
    done = subprocess.run([shell, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_tree_has_every_command_and_option() -> None:
    tree = {command.name: command for command in commands()}
    assert list(tree) == list(cli.COMMANDS)
    for command in tree.values():
        assert any("--help" in option.flags for option in command.options)
    server = {word for option in tree["server"].options for word in option.flags}
    assert {flag(name) for name in options()} | {"--config", "--no-l1-use-lazy"} <= server
    (adapter,) = tree["config adapter"].positionals
    assert adapter.choices == tuple(TYPES)


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_of_their_language(scripts: Path, shell: str) -> None:
    run(shell, "-n", str(scripts / shell))


OFFERED = [
    ("be", {"bench"}),
    ("bench ", {"engine", "l2", "server"}),
    ("config adapter raw_", {"raw_block"}),
    ("server --eviction-policy ", {"LRU", "IsolatedLRU", "S3FIFO", "noop"}),
    ("ping --format ", {"terminal", "json"}),
    ("bench engine --workload r", {"random-prefill"}),
    ("server --evic", {"--eviction-policy", "--eviction-ratio", "--eviction-trigger-watermark"}),
]


@pytest.mark.parametrize(("line", "offered"), OFFERED)
def test_bash_offers(scripts: Path, line: str, offered: set[str]) -> None:
    words = ["lmcache", *line.split(" ")]
    script = (
        f"source {scripts / 'bash'}; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _lmcache; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert set(run("bash", "--norc", "-c", script).split()) == offered


def test_bash_completes_values_behind_an_equals_sign_and_lists(scripts: Path) -> None:
    for words, offered in (
        (["ping", "--format", "=", "j"], {"json"}),
        (["ping", "--format", "="], {"terminal", "json"}),
        (["tool", "cache-simulator", "--policy", "LRU", "S"], {"S3FIFO"}),
    ):
        line = shlex.join(["lmcache", *words])
        script = (
            f"source {scripts / 'bash'}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _lmcache; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        assert set(run("bash", "--norc", "-c", script).split()) == offered


@pytest.mark.parametrize(("line", "offered"), OFFERED)
def test_fish_offers(scripts: Path, line: str, offered: set[str]) -> None:
    out = run("fish", "--no-config", "-c", f"source {scripts / 'fish'}; complete -C 'lmcache {line}'")
    assert {row.split("\t")[0] for row in out.splitlines()} == offered


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == 2
    assert "shell must be one of bash, zsh, fish, got 'tcsh'" in capsys.readouterr().err
