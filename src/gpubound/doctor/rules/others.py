"""What keeps a step back from outside: other GPUs, a profiler."""

from collections.abc import Iterator

from ...watch.site import Place
from ..claim import Claim, StallRule
from ..evidence import Evidence
from ..prices import Prices

EXPOSED = 5.0  # per cent of a step: the last bucket of gradients is never hidden
LATE = 3.0  # times the median: one rank came late, and the others waited inside the collective


def waits(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    bar = prices.bar
    if bar is None or evidence.tape is None or bar.shares["comm"] < EXPOSED:
        return
    lasted = sorted(work.end - work.start for work in evidence.tape.work if work.kind == "comm")
    said = f"{bar.shares['comm']:.0f} % of the step is communication alone"
    if lasted[-1] > LATE * lasted[len(lasted) // 2]:
        said += f"; the longest took {lasted[-1] / lasted[len(lasted) // 2]:.0f} times the median: a rank comes late"
    ms = prices.scale * bar.ms("comm")
    yield Claim("comm", Place(), len(lasted) / bar.steps, said, ms=ms, certainty="measured")


def profiler(evidence: Evidence, prices: Prices) -> Iterator[Claim]:
    if evidence.about.get("profiler"):
        yield Claim("profiler", evidence.places.get("profiler", Place()), 1, "the script itself records a profile")


RULES = (
    StallRule(
        "waits",
        ("comm",),
        "communication that nothing hides, and ranks that come late",
        f"{EXPOSED:.0f} % of the step",
        "the last bucket of gradients is never hidden",
        waits,
    ),
    StallRule("profiler", ("profiler",), "a profiler left on", "one", "it costs the host some µs an op", profiler),
)
