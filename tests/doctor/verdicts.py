"""Verdicts to report: a loop with an item and a wait for data, on a tape whose true times are known."""

from __future__ import annotations

from gpubound.doctor.finding import Finding, Verdict
from gpubound.doctor.price.idle import idle_times
from gpubound.doctor.price.prices import Measurements, Replay
from gpubound.doctor.record.tape import Tape
from gpubound.watch.events import Place, Site

from .tapes import Synthetic

ITEM = Site("train.py", 88, "step", "if loss.item() > best:", 88)
CLIP = Site("train.py", 90, "step", "clip_grad_norm_(parameters, 1.0)", 90)
TORCH = Site("/venv/lib/torch/nn/utils/clip_grad.py", 41, "clip_grad_norm_", "if total_norm.isnan():", 41)


def looped(steps: int = 4, data: float = 300.0) -> tuple[Tape, dict[int, Place]]:
    """(the tape, whose calls are which line's)."""
    loop = Synthetic()
    for _ in range(steps):
        loop.doing("data", data, "loader").copy("h2d", pageable=True, bytes=1 << 16)
        loop.launch(run=60, times=12).item().think(25).launch(run=20, times=10).item()
        loop.doing("gc", 40, "gc").launch(run=15, times=6).step()
    tape = loop.tape()
    waits = [n for n, call in enumerate(tape.calls) if call.kind == "sync"]
    located = {n: Place(ITEM if nth % 2 == 0 else CLIP, None if nth % 2 == 0 else TORCH) for nth, n in enumerate(waits)}
    return tape, located


def judged(tape: Tape, located: dict[int, Place]) -> Verdict:
    """What a judge would say of it, its prices by the replay."""
    replay, bar = Replay(tape), idle_times(tape)

    def saved(site: Site) -> float:
        return replay.saved(n for n, place in located.items() if place.site == site)

    spans = [n for n, span in enumerate(tape.spans) if span.kind == "data"]
    data = replay.saved(spans=spans)
    findings = [
        Finding("data", Site("train.py", 61, "<module>", "for batch in loader:", 61), None, "", None, 1, data, "replayed",
                "the host waited 0.3 ms a step for the loader", "DataLoader(num_workers=4, pin_memory=True)"),
        Finding("sync", ITEM, None, "", None, 1, saved(ITEM), "replayed", "item() 1 a step", "keep best on the device",
                "--- a/train.py\n+++ b/train.py\n-if loss.item() > best:\n+if step % 50 == 0 and loss.item() > best:\n"),
        Finding("sync", CLIP, TORCH, "", None, 1, saved(CLIP), "replayed", "1 a step", "pass error_if_nonfinite=False"),
    ]  # fmt: skip
    findings.sort(key=lambda finding: -(finding.ms or 0))
    read = Site("train.py", 102, "<module>", "print(loss.item())", 102)
    return Verdict(
        script="train.py --cfg small",
        machine={"device": "NVIDIA H200", "torch": "2.11"},
        step_ms=replay.step_ms,
        bar={"shares": bar.shares, "late": bar.late},
        ceiling_ms=replay.ceiling(),
        findings=findings,
        together_ms=replay.saved(located, spans),
        harmless=[Finding("sync", read, None, "", None, 0.25, 0.0, "replayed", "", "leave it")],
        unlocated=[],
        phases={"timing": {"steps": 20, "seconds": 1.5}},
        absent={"gputrace": "not on this build"},
        distortion=1.4,
    )


def measured(tape: Tape, located: dict[int, Place], named_lines: dict[str, Place] | None = None) -> Measurements:
    return Measurements("train.py", "a GPU", tape=tape, located=located, named_lines=named_lines or {})
