"""Lines of the peak memory of our process in each phase of a case."""

from collections.abc import Mapping

from gpubound.measure.memory_phases import Peak

from .harness import Bench

GIB = 2**30

Peaks = Mapping[str, Peak]
"""by phase"""
Limit = tuple[str, float, float | None]
"""name, bytes, and the wanted ratio of these to what is reserved; None: not judged"""


def keep_phases(
    bench: Bench,
    case: str,
    peaks: Peaks,
    limits: Mapping[str, Limit] | None = None,
    peers: Mapping[str, Peaks] | None = None,
    predicted: Mapping[str, int] | None = None,
) -> None:
    """Keep a line for each phase: what torch's allocator reserved of the GPU at most, beside what it allocated, the phase's
    limit, what each peer reserved, and what was predicted."""
    for phase, peak in peaks.items():
        beside, gates = {"allocated": float(peak.allocated)}, dict[str, float]()
        if phase in (limits or {}):
            name, size, gate = limits[phase]
            beside = {name: size} | beside
            gates = {} if gate is None else {name: gate}
        beside |= {name: float(theirs[phase].reserved) for name, theirs in (peers or {}).items() if phase in theirs}
        if phase in (predicted or {}):
            beside["predicted"] = float(predicted[phase])
        bench.figure(f"{case} memory, {phase}", "GiB", peak.reserved / GIB, {n: b / GIB for n, b in beside.items()}, gates)


def peaks_in(facts: Mapping[str, Mapping[str, int]]) -> dict[str, Peak]:
    """Return the peaks that another process has written as JSON."""
    return {phase: Peak(**peak) for phase, peak in facts.items()}
