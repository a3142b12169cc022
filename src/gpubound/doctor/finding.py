"""Findings, and the verdict on a whole run. `Verdict.as_dict()` is the schema of doctor.json.

**The contract.** `version` is 1. Within a version, fields may be added and new kinds may appear; no field is removed, renamed
or given another meaning. Ignore fields that you do not know. All times are milliseconds of one step, all counts are of one
step. A number that was not measured is `null` or missing, and `absent` has the reason: never read it as 0. Files are relative
to the folder in which the doctor ran, or to the parent of their package.

**Kinds.** Waits and copies: `sync`, `h2d` (to the GPU), `d2h` (from it), `pageable`, `repeat`, `data`, `gc`, `checkpoint`,
`compile`, `alloc`, `free`, `retry`, `pin`. Work: `launch`, `launch_bound` (its line is the loop's first), `host_work`,
`cpu_op`, `clone`, `noop`, `optimizer`, `zero_grad`, `precision`, `attention`, `comm`, `profiler`, `fallback`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from math import inf
from typing import Any

from ..errors import DataError
from ..formatting import hint
from ..watch.events import KINDS as EVENTS, Cause, Site

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
    """A cause of lost time on a line, and an entry of `findings` and `harmless` in doctor.json. All numbers are of one step.

    kind              one of the kinds above
    file, line        in doctor.json: the user's line; in backward the line that built the node; null if no line is known
    site, via, built  that line, the library's line that was reached from it, and the forward line of a node, each with `file`,
                      `line`, `end`, `function` and `code`, or null
    node              the autograd node that ran, or empty
    count             times a step; 1 for `host_work`
    ms                how much shorter a step would be without it; null if it has no price
    certainty         `measured`, `replayed`, `estimate` or `counted`, the surest first; `counted` has no price
    evidence, fix     what was measured, and what to write instead
    patch             a diff, or empty; `gpubound fix` makes it from the file
    """

    kind: str
    site: Site | None
    via: Site | None
    node: str
    built: Site | None
    count: float
    ms: float | None
    certainty: str
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
            **{name: (site := getattr(self, name)) and asdict(site.portable) for name in _SITES},
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Finding:
        values: dict[str, Any] = {each.name: content[each.name] for each in fields(cls)}
        return cls(**values | {name: values[name] and Site(**values[name]) for name in _SITES})


GROWTH = 0.7  # four workers make batches 2.3 to 3.5 times as fast as one, 4 to this power: vae and mnist on an H200, 4 runs
_SITES = ("site", "via", "built")


@dataclass(frozen=True)
class Verdict:
    """Result for a run: the object that `gpubound doctor --json` prints, and that is written to `.doctor/doctor.json`.

    version             of this contract
    script, command     the script, and the command line, without values of secrets and folders of this machine
    date                when it was measured
    machine             `device` and versions
    step_ms             mean of the timed steps, of both sorts; null without a GPU
    plain_ms, timed_ms  medians of steps before any sensor was attached (null if a period is longer than they are), and of
                        those timed after the survey; more than 5 % apart, the script's steps changed meanwhile
    spread              how far step_ms is known, as a fraction of it: twice its standard error by windows of whole periods, or
                        half the difference of the two sorts
    ceiling_ms          a step whose host never stalls, but still launches each kernel
    device_ms           a step whose host takes no time, as in a CUDA graph: the GPU's work back to back
    together_ms         how much shorter a step would be without all findings
    bar                 `shares` of the step in per cent (busy, host_late, device_side, comm, unlocated), and `late`: what the
                        host did while late; empty without a recording
    findings            causes of 0.5 % of a step or more, or without a price; the costliest first
    harmless            causes of less
    unlocated           a sentence for each wait without a line
    counts              `syncs` and `pageable_bytes` of a step, where they could be counted
    step                what a step is where no optimizer makes one, such as "a call of backward()"; else empty
    period              steps after which the loop repeats itself; counts are means over whole periods
    loader              if steps wait for a DataLoader: its `workers`, the `ms` that one needs for a step, and the ms a step
                        that it takes to start them in each epoch, `starting`, if it does; else empty
    rare                long steps: `steps` and `time`, the fractions that they are and take, and `times` the median; or empty
    phases              steps and seconds of each phase; `drained`: of the timed ones the first, which took old batches
    absent              what was not measured, with the reason
    distortion          how many times as long a recorded step took as a timed one
    ranks               each rank's step and shares
    lead_ms             how far the host was ahead of the device, from a training run's own log
    """

    script: str
    machine: dict[str, Any]
    step_ms: float | None
    bar: dict[str, dict[str, float]]
    ceiling_ms: float | None
    findings: Sequence[Finding]
    together_ms: float | None
    harmless: Sequence[Finding]
    unlocated: Sequence[str]
    phases: dict[str, Any]
    absent: dict[str, str]
    distortion: float | None
    counts: dict[str, float] = field(default_factory=dict)
    ranks: Sequence[dict[str, Any]] = field(default_factory=list)
    device_ms: float | None = None
    lead_ms: float | None = None
    step: str = ""
    period: int = 1
    plain_ms: float | None = None
    timed_ms: float | None = None
    spread: float | None = None
    rare: dict[str, float] = field(default_factory=dict)
    loader: dict[str, float] = field(default_factory=dict)
    command: str = ""
    date: str = ""
    version: int = VERSION

    def loaded_ms(self, workers: int) -> float:
        """Return how long a step takes at least with this many workers, if its DataLoader is what it waits for; else 0."""
        if not self.loader:
            return 0.0
        have = max(self.loader["workers"], 1)
        more = max(workers / have, 1.0) ** GROWTH
        return self.loader["ms"] / max(min(workers, have), 1) / more + self.loader.get("starting", 0.0)

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
            values = {
                each.name: content[each.name]
                for each in fields(cls)
                if each.name in content or (each.default, each.default_factory) == (MISSING, MISSING)  # else a later field
            }
            return cls(**values | lists)
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
