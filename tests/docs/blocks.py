"""The fenced blocks of README and docs, and what is said about each in an HTML comment on the line before it.

(no comment)            Python is run, page by page, top to bottom, in one namespace. Of shell blocks only `gpubound` lines are
                        looked at: they must parse.
<!-- not run: WHY -->   Python is compiled only.
<!-- run -->            a shell block that is run, in the page's own temporary folder
<!-- run: slow -->      the same, by `make docs-check` alone
<!-- run: install -->   the same, in a fresh clone with an empty environment
<!-- output -->         what the block before it prints, but for the digits and the width of columns
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *ROOT.glob("examples/skills/*/SKILL.md"),
)
PYTHON, SHELL = ("python", "py"), ("sh", "bash", "console")
MARKS = ("run", "run: slow", "run: install", "output")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of its first line of text
    language: str
    text: str
    mark: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether the quick check runs it."""
        return (self.language in PYTHON and not self.mark) or (self.language in SHELL and self.mark == "run")


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        fence = re.fullmatch(r"( *)(`{3,})(\w*).*", lines[at])
        if not fence:
            at += 1
            continue
        end = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == fence[2])
        indent = len(fence[1])
        said = re.fullmatch(r"<!-- (.+) -->", lines[at - 1].strip()) if at else None
        text = "\n".join(line[indent:] for line in lines[at + 1 : end]) + "\n"
        found.append(Block(page, at + 2, fence[3], text, said[1] if said else ""))
        at = end + 1
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks and comments."""
    text = re.sub(r"^( *)(`{3,})\w*.*?^ *\2 *$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def plain(output: str) -> list[str]:
    """Printed lines without what differs from machine to machine: digits, and the room that they take."""
    lines = [re.sub(r"[-=─━]{2,}", "--", re.sub(r"\d[\d.,e+-]*", "#", line)) for line in output.strip().splitlines()]
    return [re.sub(r"\s+", " ", line).strip() for line in lines]


def commands(block: Block) -> list[str]:
    """The command lines of a shell block, comments taken off, continued lines joined."""
    joined = block.text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")).strip() for line in joined.splitlines())
    return [line for line in lines if line]
