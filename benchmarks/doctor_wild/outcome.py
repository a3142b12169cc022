"""What a run on public scripts measured: one outcome a script, kept as JSON, shown as a table.

python -m benchmarks.doctor_wild.outcome wild-nvidia-h200.json    keep outcomes that were measured on another machine
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.results import FOLDER

from .score import scripts

SAME_STEP, SAME_SAVING, IN_TIME = 0.05, 0.15, 45.0  # the gates: of a step, of a saving, seconds to a verdict
SIGNIFICANT = 0.05  # of a difference of steps, the largest p-value


@dataclass(frozen=True)
class Outcome:
    """Measurements of one script. What was not measured is None or empty; `failed` has the reason if there is no verdict."""

    name: str
    found: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    first: str = ""
    """Kind and line of the first finding."""
    largest: bool | None = None
    """Whether it is the script's largest loss."""
    steps_ms: list[float] = field(default_factory=list)
    """The doctor's step, in each of its runs."""
    plain_ms: list[float] = field(default_factory=list)
    """The same steps of a run of python alone, after each of them."""
    unnamed_ms: float | None = None
    """Of a step, in which the GPU waits for the host and which no finding has."""
    start_s: float | None = None
    """To the first step under the doctor, without waits for the machine, as all of these seconds are."""
    seconds: float | None = None
    """To the verdict, from the script's first step on, in the longest run."""
    proof_s: float | None = None
    """Of all runs of the proof, with their starts and waits."""
    findings: int = 0
    patched: list[str] = field(default_factory=list)
    """The findings that have a patch, and its name."""
    refused: list[str] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    """The part of a step that the patches save, by the prices of each of the doctor's runs that made the same patches."""
    before_ms: list[float] = field(default_factory=list)
    after_ms: list[float] = field(default_factory=list)
    holds: bool | None = None
    """Whether the losses are the same."""
    faster: bool | None = None
    unproven: str = ""
    """Why the patches have no proof."""
    failed: str = ""
    date: str = ""
    commit: str = ""

    @property
    def beside_plain(self) -> float | None:
        """The doctor's step as a multiple of the plain one, by the medians of their runs."""
        return median(self.steps_ms) / median(self.plain_ms) if self.steps_ms and self.plain_ms else None

    @cached_property
    def rank_sums(self) -> list[float]:
        """Of the doctor's runs among all, less what is expected if they do not differ: first the sum itself, then that of every
        other division of the runs into two sides."""
        ms = [*self.steps_ms, *self.plain_ms]
        ranks = [sum(other < each for other in ms) + sum(other == each for other in ms) / 2 for each in ms]
        expected = len(self.steps_ms) * sum(ranks) / len(ms)
        return [sum(side) - expected for side in combinations(ranks, len(self.steps_ms))]

    @property
    def p_value(self) -> float:
        """The p-value of a difference of the doctor's steps from the plain ones: the two-sided exact Wilcoxon rank-sum test.
        With three runs a side it is never below 0.1."""
        return p_value_of([self])

    @property
    def as_plain(self) -> bool | None:
        """Whether the doctor's step is the plain one; None if it differs by more than the gate, but not significantly."""
        if self.beside_plain is None:
            return None
        return abs(self.beside_plain - 1) <= SAME_STEP or (None if self.p_value > SIGNIFICANT else False)

    @property
    def savings(self) -> list[float]:
        """The part of a step that the patches save, as measured in each round."""
        return [1 - after / before for before, after in zip(self.before_ms, self.after_ms)]

    @property
    def saved(self) -> tuple[float, float] | None:
        """The part of a step that the patches save: as expected, and as measured, by the medians of their runs."""
        if not self.expected or not self.savings:
            return None
        return median(self.expected), 1 - median(self.after_ms) / median(self.before_ms)

    @property
    def foreseen(self) -> bool | None:
        """Whether the measured saving is as expected; None if the expected one is between those of rounds, which are apart."""
        if self.saved is None:
            return None
        expected, saving = self.saved
        if saving and abs(expected / saving - 1) <= SAME_SAVING:
            return True
        return None if min(self.savings) <= expected <= max(self.savings) else False


def p_value_of(outcomes: Sequence[Outcome]) -> float:
    """Return the p-value of a difference of the doctor's steps from the plain ones, of several scripts together: the two-sided
    exact rank-sum test by strata (van Elteren's, with equal weights)."""
    found, sums = 0.0, Counter({0.0: 1})
    for each in outcomes:
        found += each.rank_sums[0]
        ways, before, sums = Counter(each.rank_sums), sums, Counter()
        for (left, count), (right, times) in product(before.items(), ways.items()):
            sums[left + right] += count * times
    return sum(count for each, count in sums.items() if abs(each) >= abs(found)) / sums.total()


HEAD = (
    "script",
    "stalls found",
    "wrong",
    "first finding",
    "step / plain (spread)",
    "saving: expected / measured (spread)",
    "patched",
    "proven",
    "seconds: start, verdict, proof",
)


def row(each: Outcome) -> list[str]:
    if each.failed:
        return [each.name, each.failed, *[""] * (len(HEAD) - 2)]
    return [
        each.name,
        f"{len(each.found)} of {len(each.found) + len(each.missed)}",
        f"{len(each.wrong)} of {each.findings}",
        f"{each.first}{'' if each.largest is not False else ' (not the largest)'}",
        step_of(each),
        saving_of(each),
        f"{len(each.patched)} of {each.findings}",
        "" if each.holds is None else ("losses differ" if not each.holds else "yes" if each.faster else "losses the same"),
        ", ".join("-" if s is None else f"{s:.0f}" for s in (each.start_s, each.seconds, each.proof_s)),
    ]  # fmt: skip


def step_of(each: Outcome) -> str:
    """Return the doctor's step beside the plain one, with the range of the runs of both, and their ratio."""
    if each.beside_plain is None:
        return f"{median(each.steps_ms):.2f} ms" if each.steps_ms else ""
    judged = _judged(each.as_plain, f"not decided, p = {each.p_value:.2f}")
    return f"{_of_runs(each.steps_ms)} / {_of_runs(each.plain_ms)} ms = {each.beside_plain:.3f}: {judged}"


def saving_of(each: Outcome) -> str:
    """Return the expected saving beside the measured one, with the range of the runs of both, and their ratio."""
    expected = _of_runs([100 * saving for saving in each.expected], 1) if each.expected else ""
    if each.saved is None:
        return f"{expected} %" if expected else ""
    measured = f"{100 * each.saved[1]:.1f} ({_range([100 * saving for saving in each.savings], 1)})"
    ratio = f" = {each.saved[0] / each.saved[1]:.2f}" if each.saved[1] > 0 else ""
    return f"{expected} / {measured} %{ratio}: {_judged(each.foreseen, 'between rounds')}"


def _judged(same: bool | None, scattered: str) -> str:
    return scattered if same is None else "yes" if same else "no"


def _of_runs(values: Sequence[float], digits: int = 2) -> str:
    return f"{median(values):.{digits}f} ({_range(values, digits)})"


def _range(values: Sequence[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of a table in Markdown, padded so that it can be read as it is."""
    rows = [list(HEAD), *map(row, outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    padded = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(each, widths)) + " |" for each in rows]
    return [padded[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *padded[1:]]


def sums(outcomes: Iterable[Outcome]) -> list[str]:
    """Return a line for each gate that could be measured."""
    ran = [each for each in outcomes if not each.failed]
    found, missed, wrong = (sum(len(getattr(each, name)) for each in ran) for name in ("found", "missed", "wrong"))
    findings, patched = sum(each.findings for each in ran), sum(len(each.patched) for each in ran)
    lines = [
        f"stalls found: {found} of {found + missed} (wanted 95 %)",
        f"wrong findings: {wrong} of {findings} (at most 5 %)",
        f"findings patched without asking: {patched} of {findings} (wanted 60 %)",
    ]
    gates: dict[str, list[bool | None]] = {
        "the first finding is the largest loss (wanted 90 %)": [each.largest for each in ran],
        "step within 5 % of the plain one": [None if each.beside_plain is None else each.as_plain is True for each in ran],
        "saving within 15 % of the expected one": [each.foreseen for each in ran],
        "losses of the patched script are the same": [each.holds for each in ran],
        "patched script is faster": [each.faster for each in ran],
        f"verdict within {IN_TIME:.0f} s of the first step": [
            None if each.seconds is None else each.seconds <= IN_TIME for each in ran
        ],
    }  # fmt: skip
    for gate, each in gates.items():
        measured = [holds for holds in each if holds is not None]
        if measured:
            lines.append(f"{gate}: {sum(measured)} of {len(measured)} scripts")
    if timed := [each for each in ran if each.beside_plain is not None]:
        ratio = geometric_mean(each.beside_plain or 0.0 for each in timed)
        lines.append(
            f"step as a multiple of the plain one, geometric mean of {len(timed)}: {ratio:.3f} (p = {p_value_of(timed):.3f})"
        )
    for what, scattered in {
        "step further from the plain one, not significantly": [
            f"{each.name} (p = {each.p_value:.2f})" for each in ran if each.beside_plain is not None and each.as_plain is None
        ],
        "expected saving between those of rounds": [
            each.name for each in ran if each.saved is not None and each.foreseen is None
        ],
    }.items():
        if scattered:
            lines.append(f"{what}: {', '.join(scattered)}")
    return lines


def write(file: Path, about: Mapping[str, Any], outcomes: Iterable[Outcome]) -> None:
    """Write outcomes, in the order of `scripts.yaml`. Those that the file has of other scripts, or that failed now, stay."""
    made = {"date": about["date"][:10], "commit": about["commit"]}
    new = {each.name: each if each.date else replace(each, **made) for each in outcomes}
    old = {each.name: each for each in read(file)[1]} if file.exists() else {}
    kept = old | {name: each for name, each in new.items() if not each.failed or old.get(name, each).failed}
    order = [*scripts(), *kept]
    file.parent.mkdir(parents=True, exist_ok=True)
    peers = (read(file)[0].get("peers", {}) if file.exists() else {}) | about.get("peers", {})
    content = {**about, "peers": peers, "scripts": [asdict(kept[name]) for name in dict.fromkeys(order) if name in kept]}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> tuple[dict[str, Any], list[Outcome]]:
    """Return the facts about the run, and its outcomes."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return content, [Outcome(**each) for each in content.pop("scripts")]


def section(folder: Path) -> str:
    """Return a section of the figures for each file of results that `write` has left in the folder."""
    return "".join(_section(*read(file)) for file in sorted(folder.glob("wild-*.json")))


def _section(about: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    lines = ["", f"## The doctor on public scripts, {about['gpu']}", "", INTRODUCTION, "", *table(outcomes), ""]
    lines += [f"- {line}" for line in sums(outcomes)]
    if peers := about.get("peers"):
        lines += ["", "| another tool, on the same scripts | stalls named | wrong |", "|---|---|---|"]
        lines += [f"| {name} | {each['found']} of {each['stalls']} | {each['wrong']} |" for name, each in peers.items()]
    runs = ", ".join(sorted({f"{each.date} at commit {each.commit}" for each in outcomes}))
    return "\n".join([*lines, "", f"- {about['gpu']}, torch {about['torch']}, {runs}: `{about['command']}`", ""])


INTRODUCTION = """\
Scripts that were not written for the doctor, run unmodified ([where they are from](doctor.md#exit-codes-and-accuracy)).
Step: the doctor's beside the same steps of python alone, each the median of runs in turns (least to most), and whether they are
within 5 %; or not decided, if they are further apart and a rank-sum test has p above 0.05, as it has with three runs a side.
Saving: what the patches that need no asking save of a step, by the prices of their findings, beside what they save
in alternating runs, and whether that is within 15 %. Proven: the losses are the same and the step is shorter. Seconds: to the
first step, from there to the verdict, and of the proof."""


def main(argv: list[str]) -> int:
    """Merge files that were written on other machines into the results of this folder."""
    for path in map(Path, argv):
        about, outcomes = read(path)
        write(FOLDER / path.name, about, outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
