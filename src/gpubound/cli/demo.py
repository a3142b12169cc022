"""Build a corpus from your Python's own library, train a small model on it, write a report: the whole path in a few minutes.

gpubound demo                     about three minutes on two CPU cores, half a minute on a GPU
gpubound demo --out runs/demo     Ctrl-C leaves a checkpoint that `gpubound demo --resume` goes on from
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..device import resolve
from ..monitor.tape import ABOUT, STEPS, Tape
from ..train.prepare import prepare
from ..train.recipe import Recipe
from ..train.run import Run
from . import arguments
from .session import disk_of, finish, say, train

PROMPT = 'import sys\n\n\ndef main(argv):\n    """'
TEMPERATURE = 0.5
WRITTEN = 120  # tokens of continuation


@dataclass(frozen=True)
class Demo:
    """Train a small model on the source of your Python's standard library and show what it learnt.

    Nothing is downloaded. The folder --out gets the corpus, checkpoints, a line a step and report.html.

    Example: gpubound demo --out runs/demo
    """

    out: str = "demo-run"
    """Folder of the run. A finished demo there is replaced."""
    steps: int | None = None
    """Optimizer steps; by default what takes about two minutes on two CPU cores, or half a minute on a GPU."""
    device: str = "auto"
    """auto, require, cpu, cuda or cuda:<index>."""
    resume: bool = False
    """Go on from the checkpoint that an interrupted demo left."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Demo, argv, "demo")
    device = resolve(options.device)
    clear(Path(options.out), options.resume)
    with disk_of(options.out):
        run = prepare(recipe_for(device, options), resume=options.resume)
        tape = train(run, "demo", write)
        if run.finished:
            say(f"\nIt goes on from {PROMPT!r}:\n\n{tape.about['sample']}\n")
            say(f"export: {run.export(run.folder / 'model')} (a Hugging Face folder)")
        else:
            again = f"gpubound demo --out {options.out} --resume" + (f" --steps {options.steps}" if options.steps else "")
            say(f"go on with: {again}")
        finish(tape)
    return 0


def recipe_for(device: torch.device, options: Demo) -> Recipe:
    """Small enough for the machine at hand: two cores do a step of 1,024 tokens of the 1m model in about 0.08 s.

    Small batches and Muon, because little data is seen: in the same time 2,048 tokens a step with AdamW came to 2.1 bits a
    byte of held-out text, 1,024 with AdamW to 1.88, 1,024 with Muon to 1.76.
    """
    common: dict[str, Any] = {"out": options.out, "device": str(device), "optimizer": "muon", "warmup": 0.05}
    common |= {"evaluate_every": 200, "validation": 0.03}
    if device.type == "cuda":
        steps = options.steps or 1000
        return Recipe(model="10m", vocabulary=4096, seq=512, micro_batch=32, steps=steps, lr=4e-3, **common)
    steps = options.steps or 1200
    return Recipe(model="1m", vocabulary=1024, data_bytes=3_000_000, seq=128, micro_batch=8, steps=steps, lr=8e-3, **common)


def clear(out: Path, resume: bool) -> None:
    """A demo begins anew. Only what a demo wrote is removed: a folder that holds anything else is left alone and refused."""
    if resume or not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"demo: {out} is a file; give a folder with --out.")
    ours = {"corpus", "checkpoints", "model", ABOUT, STEPS, "report.html"}
    foreign = sorted(p.name for p in out.iterdir() if p.name not in ours)
    if foreign:
        raise ValueError(f"demo: {out} holds {foreign[0]!r}, which no demo wrote; give another folder with --out.")
    if (out / ABOUT).exists() and not Tape.open(out).about.get("finished") and list((out / "checkpoints").glob("step-*")):
        raise ValueError(f"demo: {out} holds an unfinished demo; go on with --resume, or give another folder with --out.")
    for path in out.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@torch.no_grad()
def write(run: Run) -> str:
    """What the model writes after PROMPT. It reads the whole text anew for each token: short, and no cache to explain."""
    run.model.eval()
    generator = torch.Generator(run.device).manual_seed(0)
    ids = torch.tensor([run.tokenizer.encode(PROMPT)], device=run.device)
    for _ in range(WRITTEN):
        logits = run.model(ids[:, -run.recipe.seq :])[:, -1, : run.tokenizer.vocab_size].float() / TEMPERATURE
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    run.model.train()
    return run.tokenizer.decode(ids[0].tolist())
