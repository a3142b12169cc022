"""The page of all commands: what each prints with --help."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

SOURCE = Path(__file__).parents[1] / "src"
START = """# Command line

Every command with its options, as `gpubound COMMAND --help` prints them. The keys of a config file are the options of
`gpubound train` and `gpubound rl`, with `_` for `-`. [Troubleshooting](troubleshooting.md) has the exit codes.

`gpubound completion bash >> ~/.bashrc` (or zsh, fish) completes commands and options.
"""
PRINT = """
from contextlib import suppress

from gpubound import cli

for name in cli.COMMANDS:
    print(f"\\f{name}")
    with suppress(SystemExit):
        cli.main([name, "--help"])
"""


def on_files(files: "Files", config: "MkDocsConfig") -> None:
    from mkdocs.structure.files import File  # comes with the docs extra

    files.append(File.generated(config, "cli.md", content=page()))


def page() -> str:
    """Return the page as Markdown, a section a command."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "COLUMNS": "96", "NO_COLOR": "1"}
    printed = subprocess.run([sys.executable, "-c", PRINT], env=environment, capture_output=True, text=True, check=True).stdout
    sections = [START]
    for section in printed.split("\f")[1:]:
        name, _, text = section.partition("\n")
        text = re.sub(r"\n{3,}", "\n\n", text.strip())
        sections.append(f"## gpubound {name}\n\n```text\n{text}\n```\n")
    return "\n".join(sections)
