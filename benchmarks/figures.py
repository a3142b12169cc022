"""Everything that README and the docs show of the results, written from their newest lines: `make figures`.

python -m benchmarks.figures            write docs/figures.md, the pictures, and the text between README's markers
python -m benchmarks.figures --check    write nothing; exit code 1 when one of them differs from the results
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gpubound.cli import guarded

from . import curves, scaling
from .bars import described, panels, picture
from .doctor_wild import outcome
from .results import FOLDER, Line, newest, read
from .svg import THEMES
from .tables import page
from .wanted import unmeasured

ROOT = Path(__file__).parents[1]
PAGE, PICTURE, CURVES = "docs/figures.md", "docs/images/speed-{theme}.svg", "docs/images/decoding-{theme}.svg"
SCALING = "docs/images/scaling-{theme}.svg"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"


def main(argv: Sequence[str], root: Path = ROOT, folder: Path = FOLDER) -> int:
    if list(argv) not in ([], ["--check"]):
        print("usage: python -m benchmarks.figures [--check]", file=sys.stderr)
        return 2
    lines = newest(read(folder)) if folder.exists() else []
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        print(f"README.md: wanted one line {BEGIN.strip()} and after it one {END}; restore them.", file=sys.stderr)
        return 2
    here = one_gpu(lines)
    drawn, many = curves.curves(here), scaling.panels(here)
    missing = unmeasured(lines) if folder == FOLDER else []
    before, rest = text.split(BEGIN)
    wanted = {
        readme: before + BEGIN + shown(lines) + END + rest.split(END)[1],
        root / PAGE: page(lines, shown_curves(drawn), missing) + outcome.section(folder),
    }
    for theme in THEMES:
        wanted[root / PICTURE.format(theme=theme)] = picture(panels(here), theme)
        if drawn:
            wanted[root / CURVES.format(theme=theme)] = curves.picture(drawn, theme)
        if many:
            wanted[root / SCALING.format(theme=theme)] = picture(many, theme)
    stale = [path for path, words in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != words]
    if stale and argv:
        names = ", ".join(str(path.relative_to(root)) for path in stale)
        print(f"not what the results say: {names}; run `make figures`.", file=sys.stderr)
        return 1
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    return 0


def one_gpu(lines: Sequence[Line]) -> list[Line]:
    """The lines of the GPU with the most cases: bars of two machines do not belong side by side."""
    counts = Counter(line.gpu for line in lines)
    return [line for line in lines if line.gpu == counts.most_common(1)[0][0]]


def shown(lines: Sequence[Line]) -> str:
    """Return README's picture, in the reader's light or dark, and the sentence below it."""
    here = one_gpu(lines)
    bars = panels(here)
    if not bars:
        return "No figures yet: `make bench ARGS=train` on a GPU measures the first.\n"
    dates = sorted(line.date[:10] for line in here)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    dark, light = (PICTURE.format(theme=theme) for theme in ("dark", "light"))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{described(bars)}"></picture>\n\n'
        f"Measured on one {here[0].gpu}, {when}; each ratio is from one run of both. [All figures]({PAGE}), misses first.\n"
    )


def shown_curves(drawn: Sequence[curves.Curves]) -> dict[str, str]:
    """The picture by the bench whose tables it belongs to."""
    if not drawn:
        return {}
    files = [f"{CURVES.format(theme=theme).removeprefix('docs/')}#only-{theme}" for theme in THEMES]
    return {"decode": "".join(f"![{curves.told(drawn)}]({file})\n" for file in files)}


if __name__ == "__main__":
    sys.exit(guarded("figures", main, sys.argv[1:]))
