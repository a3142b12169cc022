"""Follow README and docs in an empty environment: `make docs-check`. Needs a package index, and some minutes.

A clone of this tree, as it is committed, is installed as README says, without extras; then README and the quick start are
followed, slow blocks too; then [hf] is installed, and every other page is followed.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from blocks import PAGES, ROOT, Block, blocks

FIRST = ("README.md", "index.md")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="docs-check-") as folder:
        clone, environment = Path(folder, "clone"), Path(folder, "venv")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        venv.create(environment, with_pip=True)
        names = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        names |= {
            "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_QUIET": "1",
        }

        def run(*command: str) -> None:
            print("$", *command, flush=True)
            subprocess.run(command, cwd=clone, env=names, check=True)

        for block in installs(clone):
            run("bash", "-euo", "pipefail", "-c", block.text)
        follow = str(clone / "tests/docs/follow.py")
        pages = [str(clone / page.relative_to(ROOT)) for page in PAGES]
        first = [page for page in pages if Path(page).name in FIRST]
        run("python", follow, "--slow", *first)
        run("pip", "install", "--quiet", "-e", ".[hf]")
        for page in sorted(set(pages) - set(first)):  # each in a process of its own, as a reader would begin
            run("python", follow, "--slow", page)
    print("README and docs were followed to the end.")
    return 0


def installs(clone: Path) -> list[Block]:
    """How README and the home page say that the package is installed."""
    found = [b for name in ("README.md", "docs/index.md") for b in blocks(clone / name) if b.mark == "run: install"]
    assert len(found) == 2, "README and docs/index.md each have one block marked <!-- run: install -->"
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        print(f"docs-check: {error}", file=sys.stderr)
        sys.exit(1)
