"""Follow README and docs literally: run the blocks of each page, top to bottom, as a reader would.

python tests/docs/follow.py PAGE...           the quick blocks; one JSON line for each block that was run
python tests/docs/follow.py --slow PAGE...    also those marked as slow; prints what it does
"""

import contextlib
import io
import json
import linecache
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

if __package__:
    from .blocks import PYTHON, Block, blocks, plain
else:  # run as a script, beside it
    sys.path.insert(0, str(Path(__file__).parent))
    from blocks import PYTHON, Block, blocks, plain


def follow(page: Path, slow: bool = False) -> list[dict[str, Any]]:
    """What came of each block of `page`: where it stands, and why it failed ('' if it did not)."""
    names: dict[str, Any] = {"__name__": "__main__"}
    found: list[dict[str, Any]] = []
    printed: str | None = None
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for block in blocks(page):
                if block.runs or (slow and block.mark == "run: slow"):
                    if slow:
                        print(f"--- {block.where}\n{block.text}", flush=True)
                    printed, wrong = _python(block, names) if block.language in PYTHON else _shell(block)
                    found.append({"page": page.name, "where": block.where, "wrong": wrong})
                elif block.mark == "output" and printed is not None:
                    found.append({"page": page.name, "where": block.where, "wrong": _differs(block, printed)})
                else:
                    printed = None
        finally:
            os.chdir(before)
    return found


def _python(block: Block, names: dict[str, Any]) -> tuple[str, str]:
    out = io.StringIO()
    name = f"<{block.where}>"
    linecache.cache[name] = (len(block.text), None, block.text.splitlines(keepends=True), name)  # the ledger shows lines of it
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(block.text, name, "exec"), names)
    except Exception:
        return out.getvalue(), traceback.format_exc(limit=-3)
    return out.getvalue(), ""


def _shell(block: Block) -> tuple[str, str]:
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], capture_output=True, text=True)
    return done.stdout, f"exit code {done.returncode}: {done.stderr[-2000:]}" if done.returncode else ""


def _differs(block: Block, printed: str) -> str:
    """Lines of `...` in the page stand for any number of lines."""
    wanted, got = plain(block.text), plain(printed)
    at = 0
    for number, line in enumerate(wanted):
        if line == "...":
            continue
        free = number > 0 and wanted[number - 1] == "..."
        try:
            at = (got.index(line, at) if free else at if got[at] == line else len(got)) + 1
        except (ValueError, IndexError):
            at = len(got) + 1
        if at > len(got):
            return f"line {number + 1} of the shown output is not what was printed: {line!r}; printed:\n{printed}"
    return ""


def main(argv: list[str]) -> int:
    slow = "--slow" in argv
    failed = 0
    for page in (Path(name).resolve() for name in argv if name != "--slow"):
        for result in follow(page, slow):
            failed += bool(result["wrong"])
            if slow:
                print(f"{'FAILED' if result['wrong'] else 'ok'}  {result['where']}  {result['wrong']}", flush=True)
            else:
                print(json.dumps(result), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
