"""`lmcache completion`: scripts that make a shell complete commands, options, their values and paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache.cli.arguments import Arguments
from lmcache.cli.command_tree import Command, Option, Value, commands
from lmcache.cli.output import write
from lmcache.config.values import Choice

_ABOUT_LETTERS = 80


def run(argv: Sequence[str]) -> int:
    arguments = Arguments(
        "completion",
        "Prints a script that makes a shell complete commands, their options and the values of these. It belongs to "
        "this version: print it again after an update.",
        [
            "lmcache completion bash > ~/.local/share/bash-completion/completions/lmcache",
            'lmcache completion zsh > "${fpath[1]}/_lmcache"',
            "lmcache completion fish > ~/.config/fish/completions/lmcache.fish",
            "source <(lmcache completion bash)",
        ],
    )
    arguments.add_value("shell", Choice(tuple(_SHELLS)), "whose script")
    options = arguments.read(argv)
    write(_SHELLS[options.shell](commands()), options)
    return 0


def _about(text: str) -> str:
    """The first words."""
    return text if len(text) <= _ABOUT_LETTERS else text[: _ABOUT_LETTERS - 3].rsplit(" ", 1)[0] + " ..."


def _first_words(tree: Sequence[Command]) -> dict[str, list[str]]:
    """The second words by the first; none for a command of one word."""
    found: dict[str, list[str]] = {}
    for command in tree:
        first, _, second = command.name.partition(" ")
        found.setdefault(first, []).extend([second] if second else [])
    return found


# ---- bash ------------------------------------------------------------------------------------------------------------
_BASH = """# bash completion of lmcache; made by `lmcache completion bash`
_lmcache() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} command= word words= paths=
    local index option=
    if [[ $cur == = ]]; then  # --option=
        cur=
    elif [[ $prev == = ]]; then
        prev=${{COMP_WORDS[COMP_CWORD - 2]}}
    fi
    for ((index = 1; index < COMP_CWORD; index++)); do
        word=${{COMP_WORDS[index]}}
        [[ $word == -* ]] && option=$word
        case $command in
            "") command=$word ;;
            {nested}) [[ $word == -* ]] || {{ command="$command $word"; continue; }} ;;
        esac
    done
    case $command in
        "") words='{firsts}' ;;
{seconds}{branches}    esac
    if [[ $paths ]]; then
        compopt -o default 2> /dev/null
        COMPREPLY=()
    else
        COMPREPLY=($(compgen -W "$words" -- "$cur"))
    fi
}}
complete -F _lmcache lmcache
"""


def _bash(tree: Sequence[Command]) -> str:
    firsts = _first_words(tree)
    nested = {first: seconds for first, seconds in firsts.items() if seconds}
    seconds = "".join(f"        {first}) words='{' '.join(words)}' ;;\n" for first, words in nested.items())
    return _BASH.format(
        nested="|".join(nested),
        firsts=" ".join([*firsts, "--help", "--version"]),
        seconds=seconds,
        branches="".join(map(_bash_branch, tree)),
    )


def _bash_branch(command: Command) -> str:
    lines = [f"        '{command.name}')", "            case $prev in"]
    for option in command.options:
        if option.value is not None:
            lines.append(f"                {'|'.join(option.flags)}) {_bash_value(option.value)} ;;")
    flags = " ".join(flag for option in command.options for flag in option.flags)
    words = " ".join(choice for value in command.positionals for choice in value.choices)
    lines += ["                *)", f"                    words='{f'{flags} {words}'.strip()}'"]
    if any(value.is_path for value in command.positionals):
        lines.append("                    [[ $cur == -* ]] || paths=1")
    for option in command.options:
        if option.value is not None and option.value.repeats:
            again = f"[[ $cur != -* && $option == {option.flags[0]} ]]"
            lines.append(f"                    {again} && {{ paths=; {_bash_value(option.value)}; }}")
    return "\n".join([*lines, "                    ;;", "            esac", "            ;;"]) + "\n"


def _bash_value(value: Value) -> str:
    return "paths=1" if value.is_path else f"words='{' '.join(value.choices)}'"


# ---- zsh -------------------------------------------------------------------------------------------------------------
_ZSH = """#compdef lmcache
# zsh completion of lmcache; made by `lmcache completion zsh`
_lmcache() {{
    local -a firsts seconds
    local command=${{words[2]}}
    if ((CURRENT == 2)); then
        firsts=(
{firsts}        )
        _describe command firsts
        return
    fi
    case $command in
{seconds}    esac
    if ((${{#seconds}})); then
        if ((CURRENT == 3)); then
            _describe command seconds
            return
        fi
        command="$command ${{words[3]}}"
        shift words
        ((CURRENT--))
    fi
    shift words
    ((CURRENT--))
    case $command in
{branches}    esac
}}
if [[ ${{funcstack[1]}} == _lmcache ]]; then
    _lmcache "$@"
else
    compdef _lmcache lmcache
fi
"""


def _zsh(tree: Sequence[Command]) -> str:
    abouts = {command.name: _zsh_text(command.about) for command in tree}
    firsts, seconds = "", ""
    for first, words in _first_words(tree).items():
        firsts += f"            '{first}:{abouts.get(first) or ', '.join(words)}'\n"
        if words:
            described = " ".join(f"'{word}:{abouts[f'{first} {word}']}'" for word in words)
            seconds += f"        {first}) seconds=({described}) ;;\n"
    return _ZSH.format(firsts=firsts, seconds=seconds, branches="".join(map(_zsh_branch, tree)))


def _zsh_branch(command: Command) -> str:
    lines = [f"        '{command.name}')", "            _arguments -s \\"]
    for option in command.options:
        for flag in option.flags:
            value = "" if option.value is None else f":value:{_zsh_action(option.value)}"
            repeated = "*" if option.value is not None and option.value.repeats else ""
            lines.append(f"                '{repeated}{flag}[{_zsh_text(option.about)}]{value}' \\")
    for number, positional in enumerate(command.positionals, 1):
        place = "*" if positional.repeats else str(number)
        lines.append(f"                '{place}:value:{_zsh_action(positional)}' \\")
    lines[-1] = lines[-1].removesuffix(" \\")
    return "\n".join([*lines, "            ;;"]) + "\n"


def _zsh_action(value: Value) -> str:
    if value.is_path:
        return "_files"
    return f"({' '.join(value.choices)})" if value.choices else " "


def _zsh_text(text: str) -> str:
    """Inside single quotes; colons and brackets mean something to _arguments."""
    return _about(text).replace("'", r"'\''").replace("[", "(").replace("]", ")").replace(":", ";")


# ---- fish ------------------------------------------------------------------------------------------------------------
_FISH = """# fish completion of lmcache; made by `lmcache completion fish`
function __lmcache_at
    set -l words (commandline -opc)[2..-1]
    set -l command
    test (count $words) -ge 1; and set command $words[1]
    contains -- "$command" {nested}; and test (count $words) -ge 2; and set command "$command $words[2]"
    test "$command" = "$argv"
end
complete -c lmcache -f
{lines}"""


def _fish(tree: Sequence[Command]) -> str:
    firsts = _first_words(tree)
    abouts = {command.name: _fish_text(command.about) for command in tree}
    lines = []
    for first, words in firsts.items():
        about = abouts.get(first) or ", ".join(words)
        lines.append(f"complete -c lmcache -n '__lmcache_at' -a {first} -d '{about}'")
        for word in words:
            lines.append(f"complete -c lmcache -n '__lmcache_at {first}' -a {word} -d '{abouts[f'{first} {word}']}'")
    for command in tree:
        at = f"complete -c lmcache -n '__lmcache_at {command.name}'"
        lines += [_fish_option(at, option) for option in command.options]
        lines += [f"{at} {_fish_value(value)}" for value in command.positionals if value.choices or value.is_path]
    nested = " ".join(first for first, words in firsts.items() if words)
    return _FISH.format(nested=nested, lines="\n".join(lines) + "\n")


def _fish_option(at: str, option: Option) -> str:
    names = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
    value = "" if option.value is None else f" {'-r' if option.value.is_path else '-x'} {_fish_value(option.value)}"
    return f"{at} {names} -d '{_fish_text(option.about)}'{value.rstrip()}"


def _fish_text(text: str) -> str:
    """Inside single quotes."""
    return _about(text).replace("\\", "\\\\").replace("'", "\\'")


def _fish_value(value: Value) -> str:
    if value.is_path:
        return "-F"
    return f"-a '{' '.join(value.choices)}'" if value.choices else ""


_SHELLS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
