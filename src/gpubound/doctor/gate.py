"""A gate for CI: budgets for a verdict, a baseline that it must not fall behind, and allowed stalls.

A missing measurement never passes: a budget without one is not met.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from ..errors import DataError
from ..files import read_json, reading, regular
from ..formatting import hint
from ..watch.guard import STALLS, allow_comments
from .finding import COUNTS, KINDS, Finding, Verdict

OK, FAILED, SCRIPT_FAILED, NOT_MEASURED = 0, 1, 2, 3  # exit codes
REGRESS = 3.0  # per cent of a step, where a baseline is given alone: timings on another day differ by 1 or 2


@dataclass(frozen=True)
class Budgets:
    """Upper limits for a step. None: no limit. The names are those of the command's options."""

    max_syncs_per_step: float | None = None
    max_idle_pct: float | None = None
    max_host_late_ms: float | None = None
    max_pageable_mb: float | None = None
    max_regress_pct: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            wrong = isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0
            if value is not None and wrong:
                raise ValueError(f"{_option(each.name)}: got {value!r}, wanted a number from 0 up: the most that is allowed.")


@dataclass(frozen=True)
class Allowance:
    """A stall that may stay, and the reason. It names a line's code rather than its number, so that code can move."""

    kind: str
    file: str
    code: str
    why: str

    def covers(self, finding: Finding) -> bool:
        line = finding.line
        if line is None or finding.kind != self.kind:
            return False
        return line.portable.file == self.file and line.code.split() == self.code.split()

    def __str__(self) -> str:
        return f"{self.kind} at {self.file}: {self.code}"


@dataclass
class Passage:
    """Result of the gate: its exit code, and a line for each budget."""

    failed: list[str] = field(default_factory=list)
    not_measured: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    allowed: list[Finding] = field(default_factory=list)

    @property
    def code(self) -> int:
        return FAILED if self.failed else NOT_MEASURED if self.not_measured else OK

    def lines(self) -> list[str]:
        sorts = (("FAILED", self.failed), ("NOT MEASURED", self.not_measured), ("ok", self.passed))
        return [f"{word}: {line}" for word, lines in sorts for line in lines]

    def compare(self, what: str, value: float | None, limit: float, why: str) -> None:
        """Compare one figure with its limit."""
        if value is None:
            self.not_measured.append(f"{what}: {why}")
        else:
            (self.passed if value <= limit else self.failed).append(f"{what}: {value:.3g}, allowed {limit:.3g}")


def gate(verdict: Verdict, budgets: Budgets, baseline: Verdict | None = None, allowances: Sequence[Allowance] = ()) -> Passage:
    """Compare a verdict with budgets and a baseline."""
    if budgets.max_regress_pct is not None and baseline is None:
        raise ValueError("--max-regress-pct: got no --baseline to compare with; give the doctor.json of a good run.")
    passage = Passage()
    _allow(verdict, allowances, passage)
    why = "; ".join(f"{name}: {reason}" for name, reason in verdict.absent.items()) or "the run did not say why"
    for option, value in _figures(verdict, passage.allowed).items():
        if (limit := getattr(budgets, option)) is not None:
            passage.compare(_option(option), value, limit, f"was not measured ({why})")
    if baseline is not None:
        _compare(verdict, baseline, budgets.max_regress_pct, passage, why)
    return passage


def _figures(verdict: Verdict, allowed: list[Finding]) -> dict[str, float | None]:
    """Return a step's figures by the names of the budgets, without allowed findings. Pageable bytes are of all copies."""
    free = sum(finding.ms or 0.0 for finding in allowed)
    waits = sum(finding.count for finding in allowed if finding.kind in STALLS)  # their waits are those that syncs counts
    syncs, pageable = (verdict.counts.get(name) for name in ("syncs", "pageable_bytes"))
    shares, step = verdict.bar.get("shares"), verdict.step_ms
    late = idle = None
    if shares and step:
        late = max(shares["host_late"] * step / 100 - free, 0.0)
        idle = max(sum(shares[name] for name in ("host_late", "device_side", "unlocated")) - 100 * free / step, 0.0)
    return {
        "max_syncs_per_step": None if syncs is None else max(syncs - waits, 0.0),
        "max_idle_pct": idle,
        "max_host_late_ms": late,
        "max_pageable_mb": None if pageable is None else pageable / 1e6,
    }


def _compare(now: Verdict, before: Verdict, most: float | None, passage: Passage, why: str) -> None:
    device, device_before = (str(verdict.machine.get("device") or "no GPU") for verdict in (now, before))
    if device != device_before:
        passage.not_measured.append(f"--baseline: it was measured on {device_before}, this run on {device}; make one here")
        return
    if before.step_ms is None and not before.counts:
        passage.not_measured.append("--baseline: it has neither a timed step nor counts; make a new one")
    elif before.step_ms is None and most is not None:
        passage.not_measured.append(
            "--max-regress-pct: the baseline has no timed step; make one on a GPU, or leave the option out"
        )
    if before.step_ms is not None:
        slower = None if now.step_ms is None else 100 * (now.step_ms / before.step_ms - 1)
        passage.compare("--max-regress-pct", slower, REGRESS if most is None else most, f"no step was timed ({why})")
    for name, count in before.counts.items():
        what = f"--baseline: {COUNTS.get(name, name)} a step"
        passage.compare(what, now.counts.get(name), count, f"was not counted ({why})")


def _allow(verdict: Verdict, allowances: Sequence[Allowance], passage: Passage) -> None:
    """Add the findings that the list or a comment on their line allows; an entry that matches no finding is a failure."""
    every = [*verdict.findings, *verdict.harmless]
    for entry in allowances:
        if not any(entry.covers(finding) for finding in every):
            passage.failed.append(f"allow-list: {entry}: was not seen any more; take the entry out")
    for finding in every:
        comments = list(_comments(finding))
        passage.failed += [problem for _, problem in comments if problem and problem not in passage.failed]
        by_comment = any(kind == finding.kind and not problem for kind, problem in comments)
        if by_comment or any(entry.covers(finding) for entry in allowances):
            passage.allowed.append(finding)


def _comments(finding: Finding) -> Iterator[tuple[str, str]]:
    """Yield (kind, mistake) for each kind that a comment on the statement's lines allows."""
    if (site := finding.line) is None:
        return
    for number, kinds, reason in allow_comments(site):
        where = f"{site.portable.file}:{number}"
        for kind in kinds:
            if kind not in KINDS:
                yield kind, f"{where}: allow({kind}): {hint(kind, KINDS, 'the kinds are')}"
            else:
                yield kind, "" if reason else f"{where}: allow({kind}) has no reason; write the reason after it"


def read_allowances(path: Path) -> list[Allowance]:
    """Read an allow-list: TOML, with kind, file, code and why in each [[allow]]."""
    try:
        with reading(path):
            content = tomllib.loads(regular(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is no TOML ({error}); wanted [[allow]] entries with kind, file, code and why.") from error
    entries, wanted = content.get("allow", []), [each.name for each in fields(Allowance)]
    if set(content) - {"allow"} or not isinstance(entries, list):
        raise DataError(f"{path}: got {', '.join(content)}, wanted [[allow]] entries with kind, file, code and why.")
    for number, entry in enumerate(entries, 1):
        texts = isinstance(entry, dict) and all(isinstance(text, str) and text.strip() for text in entry.values())
        if not texts or sorted(entry) != sorted(wanted):
            raise DataError(f"{path}: entry {number}: wanted texts for kind, file, code and why, got {entry!r}.")
        if entry["kind"] not in KINDS:
            raise DataError(f"{path}: entry {number}: kind: {hint(entry['kind'], KINDS, 'the kinds are')}")
    return [Allowance(**entry) for entry in entries]


def read_baseline(path: Path) -> Verdict:
    """Read the doctor.json of an earlier run."""
    content = read_json(path, "give the doctor.json of an earlier run")
    try:
        return Verdict.from_dict(content)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
