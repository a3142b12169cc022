"""Everything that README and the docs show of the results, written from their newest lines: `make figures`.

python -m benchmarks.figures            write docs/figures.md, README's pictures, and what stands between README's markers
python -m benchmarks.figures --check    write nothing; exit code 1 when one of them does not say what the results say
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gpubound.cli import guarded

from . import curves, scaling
from .bars import TRAINER, Bar, described, panels, picture
from .gates import figure
from .results import FOLDER, Line, newest, read
from .svg import THEMES
from .tables import page
from .wanted import unmeasured

ROOT = Path(__file__).parents[1]
PAGE, PICTURE, CURVES = "docs/figures.md", "docs/images/speed-{theme}.svg", "docs/images/decoding-{theme}.svg"
SCALING = "docs/images/scaling-{theme}.svg"
MARKERS = {name: (f"<!-- {name} -->\n", f"<!-- /{name} -->") for name in ("figures", "trainer", "scaling")}


def main(argv: Sequence[str], root: Path = ROOT, folder: Path = FOLDER) -> int:
    if list(argv) not in ([], ["--check"]):
        print("usage: python -m benchmarks.figures [--check]", file=sys.stderr)
        return 2
    lines = newest(read(folder)) if folder.exists() else []
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    for begin, end in MARKERS.values():
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            print(f"README.md: wanted one line {begin.strip()} and after it one {end}; put them back.", file=sys.stderr)
            return 2
    here = one_gpu(lines)
    drawn, many = curves.curves(here), scaling.panels(here)
    missing = unmeasured(lines) if folder == FOLDER else []
    readme_words = {"figures": shown(lines, len(missing)), "trainer": trainer(lines), "scaling": shown_scaling(many)}
    wanted = {readme: _between(text, readme_words), root / PAGE: page(lines, shown_curves(drawn), missing)}
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


def _between(text: str, blocks: dict[str, str]) -> str:
    for name, words in blocks.items():
        begin, end = MARKERS[name]
        before, rest = text.split(begin)
        text = before + begin + words + end + rest.split(end)[1]
    return text


def one_gpu(lines: Sequence[Line]) -> list[Line]:
    """The lines of the GPU with the most cases: bars of two machines do not belong side by side."""
    counts = Counter(line.gpu for line in lines)
    return [line for line in lines if line.gpu == counts.most_common(1)[0][0]]


def shown(lines: Sequence[Line], missing: int = 0) -> str:
    """README's picture, in the reader's light or dark, and the sentence below it."""
    here = one_gpu(lines)
    found = panels(here)
    if not found:
        return "No figures yet: `make bench ARGS=train` on a GPU measures the first.\n"
    gated = [line for line in here if line.gate is not None]
    holding = sum(not line.short for line in gated)
    dates = sorted(line.date[:10] for line in here)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    hold = f"We publish {len(gated) + missing} targets; {holding} are met"
    return (
        f"{_in_both_themes(PICTURE, found)}\n"
        f"Measured on one {here[0].gpu}, {when}; each ratio is from one run of both. {hold}.\n"
        f"[All figures]({PAGE}), misses first.\n"
    )


def shown_scaling(found: Sequence[tuple[str, list[Bar]]]) -> str:
    """README's picture of several GPUs."""
    return _in_both_themes(SCALING, found) if found else ""


def _in_both_themes(file: str, found: Sequence[tuple[str, list[Bar]]]) -> str:
    dark, light = (file.format(theme=theme) for theme in ("dark", "light"))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{described(found)}"></picture>\n'
    )


def shown_curves(drawn: Sequence[curves.Curves]) -> dict[str, str]:
    """The picture by the bench whose tables it belongs to."""
    if not drawn:
        return {}
    files = [f"{CURVES.format(theme=theme).removeprefix('docs/')}#only-{theme}" for theme in THEMES]
    return {"decode": "".join(f"![{curves.told(drawn)}]({file})\n" for file in files)}


def trainer(lines: Sequence[Line]) -> str:
    """What one line in a Hugging Face Trainer script brought, once `gpubound bench trainer` has measured it."""
    wanted = ("trainer", TRAINER, "trainer", "tok/s")
    found = [line for line in one_gpu(lines) if (line.bench, line.case, line.peer_name, line.unit) == wanted]
    return "".join(
        f"On one {line.gpu} (350M parameters, bf16 autocast) it brought {figure(line.peer, line.unit)} → "
        f"{figure(line.ours, line.unit)},\n{line.ratio:.2f} x, with no other change: `{line.command}`, {line.date[:10]}.\n"
        for line in found[-1:]
    )


if __name__ == "__main__":
    sys.exit(guarded("figures", main, sys.argv[1:]))
