"""How good something is at finding stalls: what it found in each script, beside what was planted there."""

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from gpubound.files import write_atomic

from .plant import Script

HARMLESS = 0.005  # of a step. A plant that costs less is a decoy in that model: nobody should name it
PRICED = 0.05  # of a step. Below it, the difference of two timings that are each good to 1 % says too little of a price
SURE = 4.0  # times the noise: a truth that is no larger is no truth to hold a price against


@dataclass(frozen=True)
class Found:
    """One finding of anything that looks for stalls. `ms` is what it says a step loses by it, where it says so."""

    kind: str
    file: str
    line: int
    ms: float | None = None
    harmless: bool = False


@dataclass(frozen=True)
class Sight:
    """All that something says of a script. `step_ms` is how long it says a step takes, where it says so.

    `seconds` is how long it looked. `alone_ms` is how long a step took while nothing looked, `clean_ms` how long one without
    the stall.
    """

    found: list[Found]
    step_ms: float | None = None
    seconds: float | None = None
    alone_ms: float | None = None
    clean_ms: float | None = None


@dataclass
class Outcome:
    """One script, what was planted (kinds and lines, none in a control or a decoy), what was found, what it truly costs."""

    name: str
    script: Script
    found: list[Found]
    step_ms: float | None = None
    true_ms: float | None = None
    expected: frozenset[str] = frozenset()
    """Kinds without a line that are true of the script as it is, such as a launch-bound model's launches."""
    said_step_ms: float | None = None
    seconds: float | None = None
    """How long it was looked at, from the start of the script."""
    model: str = ""
    hidden: bool = False
    """Whether the plant costs nothing in this model, whatever a timing says."""
    same: str = ""
    """Scripts of one such word are equal without their stalls."""
    noise: float = 0.0
    """By how much two timings of one script differ in this model, as a share of a step."""

    @property
    def planted(self) -> bool:
        return bool(self.script.kinds)

    @property
    def stalls(self) -> bool:
        """Whether the plant may cost something in this model; taken for granted where no timing shows that it does not."""
        if not self.planted or self.hidden:
            return False
        unsure = self.true_ms is None or self.step_ms is None or self.noise > HARMLESS
        return unsure or self.true_ms >= HARMLESS * self.step_ms  # type: ignore[operator]

    @property
    def apart(self) -> float:
        """How far what a step is said to take is from what it took alone."""
        return abs(self.said_step_ms / self.step_ms - 1) if self.said_step_ms is not None and self.step_ms else 0.0

    @property
    def by_kind(self) -> bool:
        return any(f.kind in self.script.kinds for f in self.found)

    @property
    def located(self) -> list[Found]:
        """The findings of the right kind on a right line."""
        blamed = self.script.blamed
        return [f for f in self.found if f.kind in self.script.kinds and (Path(f.file).name, f.line) in blamed]

    @property
    def wrong(self) -> list[Found]:
        """The findings that are not true, in a script where nothing that costs anything was planted."""
        return [] if self.stalls else [f for f in self.found if not f.harmless and f.kind not in self.expected]

    @property
    def price_error(self) -> float | None:
        """How far off the price is, of the truth; None where either is unknown, or the truth is too small to be sure of."""
        least = max(PRICED, SURE * self.noise)
        prices = [f.ms for f in self.located if f.ms is not None]
        if not prices or not self.stalls or self.true_ms is None or self.step_ms is None:
            return None
        return abs(sum(prices) - self.true_ms) / self.true_ms if self.true_ms >= least * self.step_ms else None


@dataclass
class Score:
    """All outcomes of the corpus."""

    outcomes: list[Outcome] = field(default_factory=list)

    def judged(self) -> "Score":
        """The same outcomes, each with its noise: that of its model's scripts, or how far apart its own two timings are.

        A host of microseconds a launch is not steady: an H200's took 9.0 to 12.7 ms for the same launch-bound step, from one
        run of it to the next, while a GPU-bound step stays within 0.5 %.
        """
        apart: dict[str, list[float]] = {}
        clean: dict[tuple[str, str], list[float]] = {}
        for outcome in self.outcomes:
            if outcome.said_step_ms is not None:
                apart.setdefault(outcome.model, []).append(outcome.apart)
            if outcome.true_ms is not None and outcome.step_ms is not None:
                clean.setdefault((outcome.model, outcome.same), []).append(outcome.step_ms - outcome.true_ms)
        noise = {model: max(statistics.median(some), _scatter(clean, model)) for model, some in apart.items()}
        return Score([replace(outcome, noise=max(noise.get(outcome.model, 0.0), outcome.apart)) for outcome in self.outcomes])

    @property
    def stalls(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.stalls]

    @property
    def calm(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.stalls]

    @property
    def recall_by_kind(self) -> float | None:
        return _percent(outcome.by_kind for outcome in self.stalls)

    @property
    def recall(self) -> float | None:
        """Per cent of the stalls that were found with their kind and line."""
        return _percent(bool(outcome.located) for outcome in self.stalls)

    @property
    def precision(self) -> float | None:
        """Per cent of the scripts without a stall in which nothing was found."""
        return _percent(not outcome.wrong for outcome in self.calm)

    @property
    def price_error(self) -> float | None:
        """The median, in per cent of the truth."""
        errors = [outcome.price_error for outcome in self.outcomes if outcome.price_error is not None]
        return 100 * statistics.median(errors) if errors else None

    @property
    def overhead(self) -> float | None:
        """How much longer a step is said to be than it was timed alone, the median in per cent; never below 0."""
        pairs = ((outcome.said_step_ms, outcome.step_ms) for outcome in self.outcomes)
        more = [100 * (said / alone - 1) for said, alone in pairs if said is not None and alone is not None]
        return max(statistics.median(more), 0.0) if more else None

    @property
    def seconds(self) -> float | None:
        """The median time that a script was looked at."""
        seconds = [outcome.seconds for outcome in self.outcomes if outcome.seconds is not None]
        return statistics.median(seconds) if seconds else None

    def by_kind(self) -> list[str]:
        """A line for each kind of stall: in how many of its scripts it was found, and how far off its prices are."""
        kinds: dict[str, list[Outcome]] = {}
        for outcome in self.stalls:
            kinds.setdefault(outcome.name.partition("/")[0], []).append(outcome)
        lines = []
        for kind, some in sorted(kinds.items()):
            errors = [outcome.price_error for outcome in some if outcome.price_error is not None]
            price = f", price {statistics.median(errors):.0%} off in {len(errors)}" if errors else ""
            lines.append(f"{kind:24} found in {sum(bool(outcome.located) for outcome in some)} of {len(some)}{price}")
        return lines

    def table(self) -> list[str]:
        """A line for each script that was not judged rightly."""
        lines = []
        for outcome in self.outcomes:
            if outcome.stalls and not outcome.located:
                found = ", ".join(f"{f.kind} at {Path(f.file).name}:{f.line}" for f in outcome.found) or "nothing"
                wanted = ", ".join(f"{file}:{line}" for file, line in sorted(outcome.script.blamed))
                lines.append(f"MISSED  {outcome.name}: wanted {outcome.script.kinds[0]} at {wanted}, found {found}")
            lines += [f"WRONG   {outcome.name}: {f.kind} at {Path(f.file).name}:{f.line}" for f in outcome.wrong]
        return lines


def write_outcomes(file: Path, outcomes: Iterable[Outcome]) -> None:
    """A line of JSON each. Only names of files are kept of where they lie."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for outcome in outcomes:
        row = asdict(outcome) | {"expected": sorted(outcome.expected)}
        row["script"] = {"kinds": outcome.script.kinds, "blamed": sorted(outcome.script.blamed)}
        row["found"] = [asdict(found) | {"file": Path(found.file).name} for found in outcome.found]
        rows.append(json.dumps(row))
    write_atomic(file, "\n".join([*rows, ""]))


def read_outcomes(file: Path) -> list[Outcome]:
    """What was kept; nothing, where no run came before."""
    outcomes = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        row = json.loads(text)
        kinds, blamed = row["script"]["kinds"], frozenset((name, line) for name, line in row["script"]["blamed"])
        found = [Found(**each) for each in row["found"]]
        known = {
            "script": Script(Path("train.py"), tuple(kinds), blamed),
            "found": found,
            "expected": frozenset(row["expected"]),
        }
        outcomes.append(Outcome(**row | known))
    return outcomes


def _scatter(clean: Mapping[tuple[str, str], list[float]], model: str) -> float:
    """How far the timings of equal scripts are from their median, as a rule: the root of the mean square."""
    groups = [times for (owner, _), times in clean.items() if owner == model and len(times) > 1]
    off = [ms / statistics.median(times) - 1 for times in groups for ms in times]
    return statistics.fmean(share**2 for share in off) ** 0.5 if off else 0.0


def _percent(hits: Iterable[bool]) -> float | None:
    marks = list(hits)
    return 100 * sum(marks) / len(marks) if marks else None
