"""A script is run on the pretend device, its findings are patched, and it is run again, as `--dry-run --prove` does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gpubound.doctor.finding import Verdict
from gpubound.doctor.fix.prove import Proof, Recorder, SeededJob, SeededRun, compare_runs, run
from gpubound.doctor.fix.repair import Repair, repair, targets
from gpubound.doctor.price.prices import Measurements
from gpubound.doctor.record.located import MarkingLedger
from gpubound.doctor.rules.diagnose import diagnose
from gpubound.watch.pretend import simgpu
from gpubound.watch.pretend_cuda import cuda_is_pretended


class Stepping(Recorder):
    """Records losses, and marks the steps of a ledger but the first, to which the script's start belongs."""

    def __init__(self, ledger: MarkingLedger):
        super().__init__(0, lambda: None)
        self.ledger = ledger

    def stepped(self) -> None:
        super().stepped()
        if len(self.ends) == 1:
            self.ledger.forget()
        else:
            self.ledger.step()


@dataclass
class Patched:
    verdict: Verdict
    repair: Repair
    proof: Proof
    before: MarkingLedger
    after: MarkingLedger

    @property
    def text(self) -> str:
        ((_, after),) = self.repair.changes.values()
        return after.decode()

    @property
    def names(self) -> list[str]:
        return sorted(patch.name for patch in self.repair.patches.values())

    def saved(self, total: str) -> float:
        """How much less of one of the ledger's totals a step has."""
        return (self.before.totals[total] - self.after.totals[total]) / self.before.steps


def patched(folder: Path, text: str, asked: Collection[str] = ()) -> Patched:
    """`text` is the script's. It is given the name train.py in this folder."""
    script = folder / "train.py"
    script.write_text(text)
    before, losses = ran(script, {})
    verdict = diagnose(Measurements("train.py", "pretend", before.rows, before.steps, before.counted))
    made = repair(targets(verdict.findings), asked)
    copies = {}
    for number, (file, (_, data)) in enumerate(made.changes.items()):
        copies[str(file)] = str(folder / f"{number}.patched")
        (folder / f"{number}.patched").write_bytes(data)
    after, others = ran(script, copies)
    proof = compare_runs([SeededRun(1.0, losses)], [SeededRun(1.0, others)], 0.0, timed=False)
    return Patched(verdict, made, proof, before, after)


def ran(script: Path, copies: dict[str, str]) -> tuple[MarkingLedger, tuple[float, ...]]:
    simgpu()
    with cuda_is_pretended(), MarkingLedger(gputrace=False) as ledger:  # whose events' waits the ledger then counts, too
        recorder = Stepping(ledger)
        run(SeededJob(str(script), [], copies, "", dry=True), recorder)
    return ledger, tuple(loss.item() for loss in recorder.losses)
