"""Print a script that completes commands and options in a shell.

gpubound completion bash >> ~/.bashrc
gpubound completion zsh >> ~/.zshrc
gpubound completion fish > ~/.config/fish/completions/gpubound.fish
"""

import io
import re
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Literal

from tyro.conf import Positional

from . import COMMANDS, arguments, summary


@dataclass
class CompletionOptions:
    """Print a script that completes commands and options in a shell.

    Example: gpubound completion bash >> ~/.bashrc
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], Positional]
    """The shell."""


def main(argv: Sequence[str]) -> int:
    shell = arguments(CompletionOptions, argv, "completion").shell
    options = {name: _options(name) for name in COMMANDS if name != "completion"}
    print(_fish(options) if shell == "fish" else _bash(options, zsh=shell == "zsh"))
    return 0


def _options(command: str) -> list[str]:
    """Return the options in a command's help, which is printed without importing torch."""
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):  # of the argument parser, after its answer
        import_module(f".{command}", __package__).main(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text.getvalue())))


def _bash(options: dict[str, list[str]], zsh: bool) -> str:
    cases = [f'    {name}) words="{" ".join(words)}" ;;' for name, words in options.items()]
    lines = [
        *(["autoload -Uz bashcompinit && bashcompinit"] if zsh else []),
        "_gpubound() {",
        '  local words="" word="${COMP_WORDS[COMP_CWORD]}"',
        f'  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(COMMANDS)}"; else case "${{COMP_WORDS[1]}}" in',
        *cases,
        '    completion) words="bash zsh fish" ;;',
        "  esac; fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _gpubound gpubound",  # default: names of files where nothing else fits
    ]
    return "\n".join(lines)


def _fish(options: dict[str, list[str]]) -> str:
    lines = [f"complete -c gpubound -n __fish_use_subcommand -a {name} -d {shlex.quote(summary(name))}" for name in COMMANDS]
    lines.append('complete -c gpubound -n "__fish_seen_subcommand_from completion" -f -a "bash zsh fish"')
    for name, words in options.items():
        lines += [f'complete -c gpubound -n "__fish_seen_subcommand_from {name}" -l {word[2:]}' for word in words]
    return "\n".join(lines)
