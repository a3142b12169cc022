"""A whole training run, from a recipe to a model on disk. `gpubound train` and `gpubound demo` put a screen around it."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..device import resolve
from ..errors import DataError
from ..feed.corpus import Corpus
from ..feed.tokenizer import Tokenizer, python_stdlib_texts, train_tokenizer
from ..models import PRESETS, Decoder, load_hf, save_hf
from ..place import Placement, place
from ..trace import notice
from .checkpoint import Checkpoint, Checkpoints
from .loop import Record, Stop, run_steps
from .loss import CausalLM
from .optimizer import AdamW
from .schedule import Schedule
from .step import TrainStep

STDLIB = "stdlib"
EVALUATION_BATCHES = 16  # enough that the held-out loss moves less than 1 % from which batches they are


@dataclass(frozen=True)
class Recipe:
    """Everything that a run depends on. The same recipe on the same machine gives the same weights, bit for bit."""

    out: str = "runs/train"
    """folder of the run: tape, checkpoints, corpus, report"""
    model: str = "10m"
    """a preset (tiny, 10m, 135m, 350m, 1b, 8b), or a Hugging Face folder to go on from"""
    data: tuple[str, ...] = (STDLIB,)
    """text files or folders (txt, jsonl, parquet, HF datasets), a built corpus, or 'stdlib': this Python's own source"""
    data_bytes: int | None = None
    """with 'stdlib': stop reading after this many bytes"""
    tokenizer: str | None = None
    """a tokenizer.json or HF folder; without one a byte-level BPE is trained on the data"""
    vocabulary: int = 8192
    """size of that BPE"""
    seq: int = 512
    micro_batch: int = 8
    accumulate: int = 1
    steps: int = 1000
    lr: float = 3e-3
    schedule: str = "cosine"
    warmup: float = 0.02
    """below 1 a fraction of the steps"""
    final: float = 0.1
    """the rate at the end, as a fraction of lr"""
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: str = "auto"
    """auto: bf16 on a GPU, fp32 on the CPU; or fp32, tf32, bf16, bf16-pure, fp16"""
    graph: str = "auto"
    recompute: str = "none"
    validation: float = 0.02
    """fraction of the documents held out"""
    evaluate_every: int = 0
    """steps between held-out losses; 0: only at the end"""
    save_every: int = 0
    """steps between checkpoints; 0: only at the end"""
    keep: int = 3
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("seq", "micro_batch", "accumulate", "steps", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"recipe: {name} must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.validation < 1:
            raise ValueError(
                f"recipe: validation must lie between 0 and 1, got {self.validation}; 0.02 holds out 2 % of the documents."
            )


@dataclass
class Run:
    """A recipe made ready: everything built, nothing trained yet. `go` trains."""

    recipe: Recipe
    folder: Path
    device: torch.device
    tokenizer: Tokenizer
    training: Corpus
    held_out: Corpus
    model: Decoder
    placement: Placement
    step: TrainStep
    feed: Any
    checkpoints: Checkpoints
    done: int = 0
    evaluations: dict[int, float] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.micro_batch * self.recipe.accumulate * self.recipe.seq

    def go(self, on_record: Callable[[Record], None], stop: Stop | None = None) -> int:
        """Train to the last step, or until `stop` is asked; saves either way. Returns the last step done."""
        last = self.recipe.steps
        self.done = run_steps(self.step, _forever(self.feed), self.done + 1, last, on_record, self._after, stop)
        self.save(wait=True)
        if not (stop and stop.asked):
            self.evaluations[self.done] = self.evaluate()
        return self.done

    def _after(self, number: int) -> None:
        self.done = number
        every = self.recipe.evaluate_every
        if every and number % every == 0:
            self.evaluations[number] = self.evaluate()
        if self.recipe.save_every and number % self.recipe.save_every == 0:
            self.save()

    def save(self, wait: bool = False) -> None:
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"step.{k}": v for k, v in self.step.state_dict().items()} | _random_state(self.device)
        facts = {"recipe": dataclasses.asdict(self.recipe), "feed": self.feed.state_dict(), "evaluations": self.evaluations}
        score = self.evaluations.get(self.done)
        self.checkpoints.save(self.done, tensors, facts, score=score, wait=wait)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where `checkpoint` was taken, bit for bit."""
        tensors = checkpoint.tensors(self.device)
        part = lambda prefix: {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}  # noqa: E731
        self.model.load_state_dict(part("model."))
        self.step.load_state_dict(part("step."))
        self.feed.load_state_dict(checkpoint.facts["feed"])
        torch.set_rng_state(tensors["random.cpu"].cpu())
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"].cpu(), self.device)
        self.evaluations = {int(k): v for k, v in checkpoint.facts["evaluations"].items()}
        self.done = checkpoint.step

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the first held-out batches, always the same ones."""
        self.model.eval()
        loss, totals = CausalLM(shifted=True), torch.zeros(2, dtype=torch.float64, device=self.device)
        feed = self.held_out.batches(self.recipe.seq, self.recipe.micro_batch, self.device, shuffle=False)
        for _, batch in zip(range(EVALUATION_BATCHES), feed):
            total, items = loss(self.model, batch)
            totals += torch.stack([total.double(), items.double()])
        self.model.train()
        return (totals[0] / totals[1]).item()

    def export(self, path: str | Path) -> Path:
        """The model and its tokenizer as a Hugging Face folder."""
        self.tokenizer.save(save_hf(self.model, path))
        return Path(path)


def prepare(recipe: Recipe, resume: bool = False, progress: bool = True) -> Run:
    """Build what the recipe names; with `resume`, go on from the newest whole checkpoint in its folder."""
    folder, device = Path(recipe.out), resolve(recipe.device)
    torch.manual_seed(recipe.seed)
    corpus = open_data(recipe, folder, progress)
    training, held_out = corpus.split(recipe.validation)
    model = build_model(recipe, corpus, device)
    feed = training.batches(recipe.seq, recipe.micro_batch, device, seed=recipe.seed)
    placement = place(model, device)
    step = TrainStep(
        model,
        CausalLM(shifted=True),
        AdamW(recipe.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay),
        accumulate=recipe.accumulate,
        clip=recipe.clip,
        precision=recipe.precision if recipe.precision != "auto" else "bf16" if device.type == "cuda" else "fp32",
        graph=recipe.graph,
        schedule=Schedule(recipe.schedule, steps=recipe.steps, warmup=recipe.warmup, final=recipe.final),
        recompute=recipe.recompute,
        seed=recipe.seed,
    )
    checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.keep)
    run = Run(recipe, folder, device, corpus.tokenizer(), training, held_out, model.train(), placement, step, feed, checkpoints)
    found = checkpoints.latest()
    if resume and found is None:
        notice(f"resume: {checkpoints.folder} holds no whole checkpoint; starting from the beginning.")
    if found is not None and not resume:
        raise ValueError(
            f"{checkpoints.folder} already holds step {found.step} of a run; "
            f"pass --resume to go on with it, or another --out to begin anew."
        )
    if found is not None:
        check_same(found, recipe)
        run.restore(found)
    return run


def check_same(found: Checkpoint, recipe: Recipe) -> None:
    """Only what does not change the numbers may differ between a run and its resumption."""
    free = {"out", "keep", "save_every", "evaluate_every", "device", "graph"}
    old, new = found.facts["recipe"], json.loads(json.dumps(dataclasses.asdict(recipe)))
    changed = [f"{k} was {old[k]!r}, is {new[k]!r}" for k in new if k not in free and old.get(k) != new[k]]
    if changed:
        raise ValueError(
            f"resume: the recipe has changed: {'; '.join(changed)}. Give the old values, or begin anew in another --out."
        )


def open_data(recipe: Recipe, folder: Path, progress: bool) -> Corpus:
    """The corpus: opened when `data` is one, else built into the run's folder (once: a built one is found again)."""
    if len(recipe.data) == 1 and (Path(recipe.data[0]) / "corpus.json").exists():
        return Corpus.open(recipe.data[0])
    texts: Any = list(recipe.data)
    if recipe.data == (STDLIB,):
        texts = list(python_stdlib_texts(recipe.data_bytes))
    built = folder / "corpus"
    if recipe.tokenizer:
        tokenizer = Tokenizer.load(recipe.tokenizer)
    elif (built / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(built)
    else:
        from ..feed.text import documents

        tokenizer = train_tokenizer(documents(texts), recipe.vocabulary, progress=False)
    return Corpus.build(texts, tokenizer, built, progress=progress)


def build_model(recipe: Recipe, corpus: Corpus, device: torch.device) -> Decoder:
    if recipe.model in PRESETS:
        config = dataclasses.replace(
            PRESETS[recipe.model], vocabulary=_padded(corpus.vocab_size), positions=max(recipe.seq, 4096)
        )
        with torch.device(device):
            return Decoder(config)
    if not Path(recipe.model).is_dir():
        raise ValueError(f"model: got {recipe.model!r}, wanted one of {', '.join(PRESETS)}, or a Hugging Face folder.")
    model = load_hf(recipe.model, device)
    if corpus.vocab_size > model.config.vocabulary:
        raise DataError(
            f"{recipe.model} knows {model.config.vocabulary} tokens, the corpus has {corpus.vocab_size}; "
            f"build the corpus with the model's own tokenizer (--tokenizer {recipe.model})."
        )
    return model


def _padded(vocabulary: int) -> int:
    """Rows of the head, rounded up to a multiple of 64: tensor cores want it, and ids beyond the tokenizer's never occur."""
    return -(-vocabulary // 64) * 64


def _forever(feed: Any) -> Iterator[Any]:
    while True:
        yield from feed


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(device)
    return state
