"""Findings, and the verdict on a whole run. `Verdict.as_dict()` is the schema of doctor.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import inf
from typing import Any

from ..errors import DataError
from ..formatting import hint
from ..watch.events import KINDS as EVENTS, Cause
from ..watch.source_line import Place, Site

VERSION = 1
CERTAINTIES = ("measured", "replayed", "estimate", "counted")  # the surest first; a counted finding has no price

# The kinds of findings: those of the ledger's events, and these.
KINDS: dict[str, Cause] = EVENTS | {
    "pageable": Cause(
        "copies pageable memory, so the host waits until the copy is done",
        "pin the memory once (DataLoader(pin_memory=True), tensor.pin_memory()) and copy with non_blocking=True",
    ),
    "data": Cause(
        "waits for the next batch",
        "DataLoader(num_workers=4, pin_memory=True, persistent_workers=True), or do the work on the device",
    ),
    "host_work": Cause(
        "works on the host while the GPU has nothing to do",
        "do it before the step: in a DataLoader's workers, or once before the loop; or on the device",
    ),
    "launch_bound": Cause("launches work more slowly than the device does it", EVENTS["launch"].remedy),
    "checkpoint": Cause("writes a checkpoint while the device waits", "copy to pinned memory, and write from another thread"),
    "optimizer": Cause("updates parameters one after another", "build the optimizer with fused=True"),
    "zero_grad": Cause("fills gradients with zeros that backward then adds to", "zero_grad(set_to_none=True), the default"),
    "precision": Cause(
        "multiplies in fp32 without tensor cores",
        'torch.set_float32_matmul_precision("high"), or torch.autocast("cuda", torch.bfloat16)',
    ),
    "attention": Cause(
        "writes all attention scores to memory",
        "let scaled_dot_product_attention choose: 16 bits, no sdpa_kernel(MATH), is_causal=True instead of a dense mask",
    ),
    "comm": Cause(
        "waits for other GPUs", "overlap communication with backward (DistributedDataParallel does), and give ranks equal work"
    ),
    "noop": Cause("converts what is already as it should be", "leave it out, or convert once before the loop"),
    "profiler": Cause("records a profile in every step", "leave the profiler out of runs that are not looked at"),
}
GPU_TIME = frozenset({"precision", "attention", "zero_grad", "clone"})  # kinds that are work of the GPU, not a wait


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause of lost time on a line. All numbers are of one step."""

    kind: str  # one of KINDS
    site: Site | None  # the user's line; None: of the whole script, or not known
    via: Site | None  # a library's line on the way
    node: str  # the autograd node that ran
    built: Site | None  # the forward line that built it
    count: float
    ms: float | None  # what a step would save; None: not priced
    certainty: str  # one of CERTAINTIES
    evidence: str
    fix: str
    patch: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"finding: kind: got {self.kind!r}; {hint(self.kind, KINDS, 'wanted one of')}")
        if self.certainty not in CERTAINTIES:
            raise ValueError(
                f"finding: certainty: got {self.certainty!r}; {hint(self.certainty, CERTAINTIES, 'wanted one of')}"
            )

    @property
    def line(self) -> Site | None:
        """The user's line, or the forward line that built the node."""
        return self.site or self.built

    @property
    def place(self) -> Place:
        """The location as the ledger has it."""
        return Place(self.site, self.via, "", self.node, self.built)

    def as_dict(self) -> dict[str, Any]:
        line = self.line
        return {
            "kind": self.kind,
            "file": line.portable.file if line else None,
            "line": line.line if line else None,
            "count": round(self.count, 3),
            "ms": None if self.ms is None else round(self.ms, 4),
            "certainty": self.certainty,
            "evidence": self.evidence,
            "fix": self.fix,
            "patch": self.patch,
            "node": self.node,
            **{name: _site_dict(getattr(self, name)) for name in _SITES},
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Finding:
        values: dict[str, Any] = {each.name: content[each.name] for each in fields(cls)}
        return cls(**values | {name: values[name] and Site(**values[name]) for name in _SITES})


_SITES = ("site", "via", "built")


def _site_dict(site: Site | None) -> dict[str, Any] | None:
    if site is None:
        return None
    short = site.portable
    return {each.name: getattr(short, each.name) for each in fields(short)}


@dataclass(frozen=True)
class Verdict:
    """Result for a run. A value that could not be measured is None or missing, and `absent` has the reason."""

    script: str
    machine: dict[str, Any]
    step_ms: float | None
    bar: dict[str, dict[str, float]]  # "shares" and "late" of price.idle.Bar, in percent; {} without a tape
    ceiling_ms: float | None  # a step whose host never stalls
    findings: Sequence[Finding]  # the costliest first
    together_ms: float | None  # what a step would save without all of them
    harmless: Sequence[Finding]
    unlocated: Sequence[str]  # a sentence each
    phases: dict[str, Any]
    absent: dict[str, str]
    distortion: float | None  # how much slower the recorded steps were than the timed ones
    counts: dict[str, float] = field(default_factory=dict)  # a step's totals by their names in COUNTS
    ranks: Sequence[dict[str, Any]] = field(default_factory=list)  # of a script on several: each one's step and shares
    device_ms: float | None = None  # a step whose host takes no time: the device's works back to back
    lead_ms: float | None = None  # how far the host is ahead of the device, which is its wait for a step's result
    step: str = ""  # what a step is, in words, if no optimizer makes one
    period: int = 1  # steps after which the loop repeats itself; every window is a multiple of it
    plain_ms: float | None = None  # median of steps that were timed before any sensor was attached
    timed_ms: float | None = None  # median of the timed steps
    rare: dict[str, float] = field(default_factory=dict)  # long steps among the timed ones: fractions, and times the median
    command: str = ""  # the command line, without folders of this machine
    date: str = ""  # when it was measured
    version: int = VERSION

    def as_dict(self) -> dict[str, Any]:
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"version": self.version} | content | {name: [f.as_dict() for f in content[name]] for name in _LISTS}

    @classmethod
    def from_dict(cls, content: Any) -> Verdict:
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION:
            raise DataError(f"a verdict has version {VERSION}, got {version!r}; let this gpubound's doctor write it again.")
        try:
            _check(content)
            lists = {name: [Finding.from_dict(each) for each in content[name]] for name in _LISTS}
            later = {
                each.name for each in fields(cls) if (each.default, each.default_factory) != (MISSING, MISSING)
            } - content.keys()  # than the file
            return cls(**{each.name: content[each.name] for each in fields(cls) if each.name not in later} | lists)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the verdict is damaged ({type(error).__name__}: {error}); write it again.") from error


def _check(content: dict[str, Any]) -> None:
    """Check the values that a gate computes with, so that a damaged file is refused before the script runs."""
    for name in ("machine", "bar", "counts"):
        if not isinstance(content.get(name, {}), dict):
            raise TypeError(f"{name} is {content[name]!r}")
    step, counts = content["step_ms"], content.get("counts", {})
    for name, value in {**counts, "step_ms": 1.0 if step is None else step}.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < inf:
            raise ValueError(f"{name} is {value!r}")
    if step == 0:
        raise ValueError("step_ms is 0")


_LISTS = ("findings", "harmless")
# What `Verdict.counts` may hold, each a total a step. A name that no sensor could count is missing.
COUNTS = {"syncs": "waits for the device", "pageable_bytes": "bytes copied from or to pageable memory"}
