"""What looks at a script of the corpus for stalls, by name."""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from gpubound.watch.pretend import simgpu

from . import by_doctor, by_ledger, by_others
from .crew import turn
from .score import Found, Sight

DRY = ["--size", "tiny", "--steps", "6"]
ENDLESS = ["--steps", "1000000"]  # such a run is ended when enough was seen
WATCHED = ["--steps", "12"]  # these eyes watch a script to its end

# The script, whether on the pretend device, a turn alone on the GPU, and the script without its stall where that is timed.
Eye = Callable[[Path, bool, AbstractContextManager, Path | None], Sight]


def only_found(findings: Callable[[Path, Sequence[str]], list[Found]]) -> Eye:
    """The eye of what says nothing but its findings. It needs no turn, for nothing is timed."""

    def look(script: Path, dry: bool, alone: AbstractContextManager, clean: Path | None) -> Sight:
        return Sight(findings(script, DRY if dry else WATCHED))

    return look


def doctor(script: Path, dry: bool, alone: AbstractContextManager, clean: Path | None) -> Sight:
    return by_doctor.look(script, DRY if dry else ENDLESS, alone, dry, clean)


DOCTOR = "doctor"
EYES: dict[str, Eye] = {
    DOCTOR: doctor,
    "ledger": only_found(by_ledger.findings),
    "torch-preflight": only_found(by_others.torch_preflight),
    "torchfix": only_found(by_others.torchfix),
    "sync_debug_mode": only_found(by_others.sync_debug_mode),
}


def look(lock: Path, eye: str, script: Path, clean: Path | None, dry: bool) -> Sight:
    """In a process of the crew, with what the last script left behind put away."""
    gc.collect()
    torch.set_float32_matmul_precision("highest")
    if dry:
        torch.set_num_threads(1)
        simgpu()
    else:
        torch.cuda.init()
        torch.cuda.empty_cache()
    began = perf_counter()
    sight = EYES[eye](script, dry, turn(lock), clean)
    return replace(sight, seconds=perf_counter() - began) if sight.seconds is None else sight
