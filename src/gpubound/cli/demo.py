"""Build a corpus from your Python's own library, train a small model on it, write a report: the whole path in a few minutes.

gpubound demo                     about 90 seconds on two CPU cores, half a minute on a GPU
gpubound demo --out runs/demo     Ctrl-C leaves a checkpoint that `gpubound demo --resume` goes on from
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import LOCK
from ..monitor.tape import ABOUT, RunTape
from ..train.recipe import STDLIB, TORCH, Recipe
from . import arguments
from .ranks import resume_command

if TYPE_CHECKING:
    import torch

    from ..data import Corpus
    from ..train.loop import Run

PROMPT = 'import sys\n\n\ndef main(argv):\n    """'
TEMPERATURE = 0.5
WRITTEN = 120  # tokens of continuation
FILES = "demo"  # key in run.json of the files that the demo wrote, with their sizes and times; empty until it has ended
REPORT = "report.html"

PASSES = 4  # with more the model memorises the texts
MOST_STEPS = 1000  # under three minutes on two cores without 16-bit units
EVALUATIONS = 10  # held-out losses on the way; the best weights are kept
PATIENCE = 3  # held-out losses without a better one


@dataclass(frozen=True)
class Demo:
    """Train a small model on the source of your Python's standard library and show what it learnt. A GPU also takes torch's.

    Nothing is downloaded. The folder --out gets the corpus, the checkpoints, a line for each step, and report.html.

    Example: gpubound demo --out runs/demo
    """

    out: str = "demo-run"
    """Folder of the run. A finished demo there is replaced; a folder that holds anything else is refused."""
    steps: int | None = None
    """How many optimizer steps. By default 1,000, or fewer if those would pass more than four times over the data."""
    device: str = "auto"
    """auto, require, cpu, cuda or cuda:<index>."""
    resume: bool = False
    """Go on from the checkpoint that an interrupted demo left."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Demo, argv, "demo")
    from ..device import resolve  # torch takes two seconds: options are read first
    from ..distributed import launched
    from .session import finish, run_folder, say, train

    if launched():
        raise ValueError("demo: torchrun started several of it, and it shows one GPU; start it without torchrun.")
    recipe = recipe_for(resolve(options.device), options)
    out = Path(options.out)
    with run_folder(options.out):
        clear(out, options.resume)
        tape = RunTape.create(out, finished=False, **{FILES: {}})  # marks the folder as a demo's
        run = prepare(recipe, options)
        outcome = train(run, "demo", sample_text, tape=tape)
        if run.finished and not outcome.failed:
            if sample := tape.about.get("sample"):
                say(f"\nIt goes on from {PROMPT!r}:\n\n{sample}\n")
            say(f"export: {run.export(out / 'model')} (a Hugging Face folder, weights of step {run.best or run.done:,})")
        finish(tape)
        if not (run.finished or run.diverged):
            say(f"go on with: {resume_command('demo', argv)}")
        elif run.finished:
            tape.tell(**{FILES: list_files(out)})
    return 1 if outcome.failed else 0


def recipe_for(device: "torch.device", options: Demo) -> Recipe:
    """Return a recipe for this machine: two cores do a step of 1,024 tokens of the 1m model in about 0.08 s.

    Batches are small and the optimizer is Muon, because there is little data: in the same time 2,048 tokens a step with AdamW
    came to 2.1 bits a byte of held-out text, 1,024 with AdamW to 1.88, 1,024 with Muon to 1.76.

    A GPU memorises the standard library: 10m came to a held-out loss of 2.43 to 2.54 whatever the batch and the number
    of passes. With torch's source as well the same model comes to 2.06.
    """
    common: dict[str, Any] = {"out": options.out, "device": str(device), "optimizer": "muon", "warmup": 0.05}
    common |= {"validation": 0.03, "steps": MOST_STEPS if options.steps is None else options.steps}
    if device.type == "cuda":
        common |= {"data": (STDLIB, TORCH), "data_bytes": 24_000_000}
        return Recipe(model="10m", vocabulary=4096, seq=512, micro_batch=32, lr=4e-3, **common)
    return Recipe(model="1m", vocabulary=1024, data_bytes=3_000_000, seq=128, micro_batch=8, lr=8e-3, **common)


def prepare(recipe: Recipe, options: Demo) -> "Run":
    """Return the run, with the number of steps that its data is worth."""
    from ..train.data import open_data
    from ..train.prepare import prepare as prepare_run
    from .session import say

    corpora = open_data(recipe, Path(recipe.out), progress=True)
    if options.steps is None:
        recipe, why = with_useful_steps(recipe, corpora[0])
        say(why)
    assert recipe.steps is not None
    eval_every = max(recipe.steps // EVALUATIONS, 20)
    return prepare_run(replace(recipe, eval_every=eval_every, patience=PATIENCE), options.resume, corpora=corpora)


def with_useful_steps(recipe: Recipe, corpus: "Corpus") -> tuple[Recipe, str]:
    """Return the recipe with PASSES over the data, but at most MOST_STEPS, and the reason as a line."""
    tokens, a_step = corpus.tokens * (1 - recipe.validation), recipe.tokens_per_step
    wanted = max(round(PASSES * tokens / a_step), 1)
    steps = min(wanted, MOST_STEPS)
    passes = f"{steps * a_step / tokens:.1f} passes over {tokens / 1e6:.1f}M tokens"
    why = "more would be memorised" if steps == wanted else "more would take longer than a demo should"
    return replace(recipe, steps=steps), f"demo: {steps:,} steps of {a_step:,} tokens, {passes} ({why})"


def clear(out: Path, resume: bool) -> None:
    """Remove the files of a finished demo; run.json, which lists them, last. Raise ValueError if there are other files."""
    present = list_files(out)
    about = RunTape.open(out).about if ABOUT in present else {}
    listed: Any = about.get(FILES)
    is_demo = isinstance(listed, dict)
    if is_demo and resume:
        return
    if is_demo and not about.get("finished"):
        if any((out / "checkpoints").glob("step-*")):
            raise ValueError(f"demo: {out} holds an unfinished demo; go on with --resume, or give another folder with --out.")
        return  # only its corpus, which is used again
    ours = listed | {name: present.get(name) for name in (ABOUT, REPORT)} if is_demo else {}
    others = [name for name, stamp in present.items() if ours.get(name) != stamp]
    if others:
        raise ValueError(f"demo: {out} holds {min(others)!r}, which no demo wrote; give another folder with --out.")
    for name in sorted((name for name in present if not name.endswith("/")), key=ABOUT.__eq__):
        (out / name).unlink()
    for folder in sorted((path for path in out.rglob("*") if path.is_dir()), reverse=True):
        folder.rmdir()


def list_files(out: Path) -> dict[str, list[int]]:
    """Return size and time of every file under `out`, and every empty folder, without the lock. Links are not followed."""
    stamps: dict[str, list[int]] = {}
    for path in out.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            about = path.lstat()
            stamps[str(path.relative_to(out))] = [about.st_size, about.st_mtime_ns]
        elif not any(path.iterdir()):
            stamps[f"{path.relative_to(out)}/"] = []
    return {name: stamp for name, stamp in stamps.items() if name != LOCK}


def sample_text(run: "Run") -> str | None:
    """Return the model's continuation of PROMPT."""
    return run.objective.sample(run.model, run.tokenizer, PROMPT, WRITTEN, run.recipe.seq, TEMPERATURE)
