"""Build a corpus from your Python's own library, train a small model on it, write a report: the whole path in a few minutes.

gpubound demo                     about three minutes on two CPU cores, half a minute on a GPU
gpubound demo --out runs/demo     Ctrl-C leaves a checkpoint that `gpubound demo --resume` goes on from
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..device import resolve
from ..train.run import Recipe, Run, prepare
from . import arguments
from .session import finish, say, train

PROMPT = "def main(argv):\n"
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
    recipe = recipe_for(device, options)
    clear(Path(options.out), options.resume)
    run = prepare(recipe, resume=options.resume, progress=True)
    say(str(run.placement))
    tape, whole = train(run, "demo", write)
    if whole:
        say(f"\n{tape.about['sample']}\n")
        say(f"export: {run.export(run.folder / 'model')} (a Hugging Face folder)")
    else:
        again = f"gpubound demo --out {options.out} --resume" + (f" --steps {options.steps}" if options.steps else "")
        say(f"interrupted: {run.checkpoints.folder} holds step {run.done}; go on with: {again}")
    finish(tape)
    return 0


def recipe_for(device: torch.device, options: Demo) -> Recipe:
    """Small enough for the machine at hand: on two cores a step of 2,048 tokens of the CPU's model takes about 0.4 s."""
    common = {"out": options.out, "device": str(device), "vocabulary": 2048, "save_every": 100, "validation": 0.03}
    if device.type == "cuda":
        steps = options.steps or 600
        return Recipe(model="10m", seq=512, micro_batch=32, steps=steps, lr=4e-3, warmup=0.05, **common)
    steps = options.steps or 240
    return Recipe(model="tiny", data_bytes=3_000_000, seq=128, micro_batch=16, steps=steps, lr=1e-2, warmup=0.05, **common)


def clear(out: Path, resume: bool) -> None:
    """A demo begins anew. Only what a demo wrote is removed: a folder that holds anything else is left alone and refused."""
    if resume or not out.exists():
        return
    ours = {"corpus", "checkpoints", "model", "run.json", "steps.jsonl", "report.html"}
    foreign = sorted(p.name for p in out.iterdir() if p.name not in ours)
    if foreign:
        raise ValueError(f"demo: {out} holds {foreign[0]!r}, which no demo wrote; give another folder with --out.")
    if (out / "checkpoints").exists() and not (out / "report.html").exists():
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
        logits = run.model(ids[:, -run.recipe.seq :])[:, -1, : run.tokenizer.vocab_size].float() / 0.7
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    run.model.train()
    return run.tokenizer.decode(ids[0].tolist())
