"""README's figures, written from the newest result lines between two markers: `make figures`.

python -m benchmarks.figures            rewrite the block
python -m benchmarks.figures --check    exit code 1 when README does not say what the results say
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from gpubound.cli import guarded

from .gates import figure
from .results import FOLDER, Line, newest, read

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
LEGEND = "Ratios are ours over the peer in the same run: above 1 is better; bold falls short of its gate.\n\n"
OPEN_ROWS = 12  # a longer table is folded, so that README stays a page one reads


def main(argv: Sequence[str], readme: Path = README, folder: Path = FOLDER) -> int:
    if list(argv) not in ([], ["--check"]):
        print("usage: python -m benchmarks.figures [--check]", file=sys.stderr)
        return 2
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        print(f"{readme.name}: wanted one {BEGIN} and after it one {END}; put them where the figures go.", file=sys.stderr)
        return 2
    before, rest = text.split(BEGIN)
    wanted = before + BEGIN + "\n" + block(newest(read(folder)) if folder.exists() else []) + END + rest.split(END)[1]
    if wanted == text:
        return 0
    if argv:
        print(f"{readme.name}'s figures are not those of the results: run `make figures`.", file=sys.stderr)
        return 1
    readme.write_text(wanted, encoding="utf-8")
    return 0


def block(lines: list[Line]) -> str:
    """One table a machine and benchmark: a row a case, a column a peer."""
    if not lines:
        return "No figures yet: `make bench ARGS=kernels` on a GPU writes them.\n"
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.gpu, line.bench), []).append(line)
    return LEGEND + "\n".join(_table(gpu, bench, group) for (gpu, bench), group in groups.items())


def _table(gpu: str, bench: str, lines: list[Line]) -> str:
    peers = list(dict.fromkeys(line.peer_name for line in lines))
    cases: dict[tuple[str, str], dict[str, Line]] = {}
    for line in lines:
        cases.setdefault((line.case, line.unit), {})[line.peer_name] = line
    rows = [f"| {bench} | ours | {' | '.join(f'× {peer}' for peer in peers)} |", "|" + "---|" * (len(peers) + 2)]
    for (case, unit), by_peer in cases.items():
        ours = figure(max(by_peer.values(), key=lambda line: line.date).ours, unit)
        rows.append(f"| {case} | {ours} | {' | '.join(_cell(by_peer.get(peer)) for peer in peers)} |")
    if len(cases) > OPEN_ROWS:
        rows = [f"<details><summary>{bench}: {len(cases)} cases on {gpu}</summary>", "", *rows, "", "</details>"]
    return "\n".join([*rows, "", *_sources(lines), ""])


def _sources(lines: list[Line]) -> list[str]:
    """Every run that a figure is from, the newest first: a table is rarely measured in one go."""
    told = [
        f"{line.gpu}, torch {line.torch}, triton {line.triton}, {line.date[:10]}, commit {line.commit}: `{line.command}`"
        for line in sorted(lines, key=lambda line: line.date, reverse=True)
    ]
    told = list(dict.fromkeys(told))
    return told if len(told) == 1 else [f"- {run}" for run in told]


def _cell(line: Line | None) -> str:
    """The ratio; bold where it falls short of its gate, because a loss is printed too."""
    if line is None:
        return ""
    return f"**{line.ratio:.2f}** (gate {line.gate:.2f})" if line.short else f"{line.ratio:.2f}"


if __name__ == "__main__":
    sys.exit(guarded("figures", main, sys.argv[1:]))
