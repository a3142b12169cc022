"""The recipe of a run: every option in one place, validated before anything is read or built."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..formatting import hint, shown
from .fields import Lora

if TYPE_CHECKING:  # a command reads its options before it imports torch
    import torch
    from torch import nn

    from ..data.tokenizer import Tokenizer
    from ..distributed import Ranks
    from .adamw import AdamW, Muon
    from .objectives import Objective
    from .schedule import Schedule
    from .step import TrainStep

STDLIB, TORCH = "stdlib", "torch-source"
SOURCES = (STDLIB, TORCH)  # data that has a name and no path

PHASED = (
    "data", "data_weights", "data_bytes", "text_key", "format", "chat_template", "train_on", "pack", "overlong", "buckets",
    "objective", "objective_options", "seq", "micro_batch", "accumulate", "steps", "epochs", "optimizer", "lr", "schedule",
    "warmup", "decay", "final", "weight_decay", "betas", "eps", "clip", "validation", "eval_data", "eval_every",
    "evals_per_epoch", "eval_batches", "patience", "save_every", "saves_per_epoch",
)  # fmt: skip
"""Keys that a phase may set. The others belong to the model or the whole run."""

KINDS = {
    "pretraining": ("pretraining", 3e-3, 0.1),
    "full fine-tuning": ("full fine-tuning", 2e-5, 0.0),
    "adapters": ("low-rank adapters", 2e-4, 0.0),
}
"""(name, learning rate, weight decay) of each kind of run."""

STEPS = 1000  # without steps and epochs
EITHER = {"steps": "epochs", "eval_every": "evals_per_epoch", "save_every": "saves_per_epoch"}
"""Pairs of keys of which one is given. Where a phase or an option gives one, the recipe's value of the other is dropped."""


def of_either(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return `keys`, and as switched off the keys that one of `keys` is in place of."""
    others = {b for pair in EITHER.items() for a, b in (pair, pair[::-1]) if keys.get(a) and not keys.get(b)}
    return {key: None if key in ("steps", "epochs") else 0 for key in others} | dict(keys)


@dataclass(frozen=True)
class Recipe:
    """All options of a run. The same recipe on the same machine gives the same weights, bit for bit."""

    out: str = "runs/train"
    """Folder of the run: tape, checkpoints, corpus, report."""
    model: str = "10m"
    """A preset (see --list), a preset's name with -tiny added to try a recipe, or a Hugging Face folder to train further."""
    lora: dict[str, Any] = field(default_factory=dict)
    """Train low-rank adapters over the frozen model of a Hugging Face folder: their rank, alpha, targets, dropout, rslora, init
    and base, as gpubound.lora.add takes them. Only in a config file. Without it every weight is trained."""
    data: tuple[str, ...] = ()
    """Texts, source code, json, jsonl, parquet, folders of them, HF datasets; a built corpus; 'stdlib' or 'torch-source', the
    source of this Python or of its torch. Without data a preset trains on 'stdlib'; a model folder needs data."""
    data_weights: tuple[float, ...] = ()
    """Weight of each path in data: with 2.25 an epoch has each of its documents twice, and a quarter of them once more. Each
    path then has its own held-out loss. In a config file also data: [{path: a.jsonl, weight: 2}, b.jsonl]."""
    data_bytes: int | None = None
    """Read at most this many bytes of 'stdlib', of 'torch-source', and of each dataset of the hub, which is then read as a
    stream: nothing else of it is downloaded or stored."""
    text_key: str | None = None
    """Key of a jsonl row, or column of a table, that holds the text or chat; without it the row's format is detected."""
    format: str | None = None
    """Of rows with the keys of several: text, messages, sharegpt, alpaca, completion, preference, matches or classification."""
    chat_template: str | None = None
    """How chats are written, instead of the tokenizer's template: a file, or chatml, llama3, gemma, mistral, zephyr, alpaca."""
    train_on: str = "assistant"
    """What of a chat is learnt: assistant (all its answers), last (the last one), or all; of prompts with completions these."""
    tokenizer: str | None = None
    """A tokenizer.json or HF folder; without one the model folder's own, or a byte-level BPE trained on the data."""
    vocabulary: int = 8192
    """Number of tokens of the BPE that is trained on the data."""
    objective: str = "next_token"
    """What is minimised: next_token, dpo (pairs of answers), distillation (a teacher's distribution), classification (of
    texts), contrastive (embeddings of matching texts), or diffusion, which fills masked tokens and wants a model that is not
    causal."""
    objective_options: dict[str, Any] = field(default_factory=dict)
    """The objective's own options, where it has any. Only in a config file."""
    seq: int = 512
    """Tokens in a row."""
    pack: str = "auto"
    """How rows are made: stream (texts end to end, cut at every seq tokens), examples (several whole chats or documents a row,
    which do not see each other), none (one a row, padded), documents (as examples, longer ones in pieces), pairs (of
    preferences, an answer a row), packed_pairs (several whole pairs a row), or auto: packed_pairs for dpo, where seq and
    micro_batch then count an answer a row; examples where the data says what of it is learnt, as chats do; else stream."""
    overlong: str = "truncate"
    """What happens to an example that is longer than a row: truncate, truncate_left (its beginning is left out), or drop."""
    buckets: int = 0
    """With pack none or pairs: rows of this many lengths up to seq, those that leave the least padding; a batch has one of
    them, and the step is captured once for each. 0: every row has seq tokens."""
    micro_batch: int = 8
    """Rows that the model computes at once."""
    accumulate: int = 1
    """Micro-batches in an optimizer step, of all GPUs together: four on two GPUs are two each."""
    steps: int | None = None
    """Optimizer steps. By default 1000, or those of epochs."""
    epochs: float | None = None
    """Passes over the data, in place of steps. Each visits the rows in another order."""
    optimizer: str = "adamw"
    """adamw, adamw8bit (moments in 8 bits), or muon (for the matrices; adamw for everything else)."""
    lr: float | None = None
    """The highest learning rate. By default 3e-3 for a preset, 2e-5 for all weights of a model folder, 2e-4 for adapters."""
    schedule: str = "cosine"
    """constant, linear, cosine or wsd."""
    warmup: float = 0.02
    """Steps in which the rate rises from 0; a number below 1 is a fraction of all steps."""
    decay: float = 0.2
    """For wsd: the fraction of the steps, at the end, in which the rate falls."""
    final: float = 0.1
    """The learning rate at the end, as a fraction of lr."""
    weight_decay: float | None = None
    """Weight decay of the matrices; gains and biases do not decay. By default 0.1 for a preset, 0 for a model folder."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the moments. With the default, usual for language models, the second averages over 20 steps."""
    eps: float = 1e-8
    """AdamW's term in the denominator."""
    clip: float | None = 1.0
    """The largest global gradient norm; 0 or none does not clip."""
    precision: str = "auto"
    """auto: bf16 on a GPU that has units for it, else fp32; or fp32, tf32, bf16, bf16-pure, bf16-split, fp16,
    fp8."""
    graph: str = "auto"
    """Run the step as CUDA graphs: auto (where it can be), require, or off."""
    recompute: str = "cheap"
    """What backward computes again to save memory: cheap (norms and activations), none, blocks (all but each block's input),
    or a number of blocks."""
    overlap: bool = False
    """Compute weight gradients on a second stream; small models gain (135m, one row at a time: 3 %)."""
    update_in_backward: bool = False
    """Move each block's weights within backward, and hold no gradient of the whole model: for accumulate 1 and clip 0."""
    offload_optimizer: bool = False
    """Hold moments and masters in pinned host memory, from which they pass through the GPU as they are updated: with adamw or
    adamw8bit on one GPU. The less of them there is (bf16-split, adamw8bit), the shorter a step."""
    ema: float = 0.0
    """Decay of a moving average of the weights, such as 0.999. The average is then evaluated and exported. 0: no average."""
    validation: float = 0.02
    """Fraction of the documents that is held out from training: drawn from all of them, the same ones for every seed. 0: no
    held-out loss."""
    eval_data: tuple[str, ...] = ()
    """Files, folders or built corpora for the held-out loss; nothing is held out of data then. Of several each has its own
    loss, and held_out is their mean."""
    eval_every: int = 0
    """Steps between two held-out losses; 0: only at the end. The weights with the best one are kept and exported."""
    evals_per_epoch: float = 0.0
    """Held-out losses an epoch, in place of eval_every; 0.5: one every two epochs."""
    eval_batches: int = 0
    """Micro-batches of a held-out loss; 0: all there are, or as many as hold 131,072 tokens."""
    patience: int = 0
    """Stop after this many held-out losses in a row without a better one, and return to the best weights; 0: never."""
    save_every: int = 0
    """Steps between two checkpoints; 0: only at the end."""
    saves_per_epoch: float = 0.0
    """Checkpoints an epoch, in place of save_every."""
    keep: int = 3
    """How many of the newest checkpoints are kept; the best one is kept as well."""
    device: str = "auto"
    """auto, require, cpu, cuda or cuda:<index>."""
    parallel: str = "auto"
    """How several GPUs share a run: ddp (each holds the whole model), fsdp (each holds a part of every weight), or auto: ddp
    where its weights, gradient and moments leave a fifth of a GPU's memory for the rest. A line says which, and why."""
    seed: int = 0
    """Seed of the first weights and of the order of the data."""
    phases: tuple[dict[str, Any], ...] = ()
    """Phases, trained one after the other, each with a name and its own data, steps, lr and so on. Only in a config file."""

    def __post_init__(self) -> None:
        from .recipe_checks import check

        _, lr, weight_decay = self.kind
        filled: dict[str, Any] = {"lr": lr if self.lr is None else self.lr}
        filled["weight_decay"] = weight_decay if self.weight_decay is None else self.weight_decay
        filled["steps"] = STEPS if self.steps is None and self.epochs is None else self.steps
        filled["clip"] = None if self.clip == 0 else self.clip
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        if not self.data and not self.trains_further:
            object.__setattr__(self, "data", (STDLIB,))
        check(self)

    @property
    def trains_further(self) -> bool:
        """True if the model is a folder, with pretrained weights."""
        from ..models.registry import is_named

        return isinstance(self.model, str) and not is_named(self.model) and Path(self.model).is_dir()

    @property
    def kind(self) -> tuple[str, float, float]:
        """(name, default learning rate, default weight decay) of this kind of run."""
        return KINDS["adapters" if self.lora else "full fine-tuning" if self.trains_further else "pretraining"]

    @property
    def adapters(self) -> Lora | None:
        """The adapters that are trained instead of the model's weights."""
        return Lora.of(self.lora) if self.lora else None

    @property
    def rates(self) -> "Schedule":
        from .schedule import MOST_STEPS, Schedule

        steps = self.steps or MOST_STEPS  # before the data has told how many the epochs are
        return Schedule(self.schedule, steps=steps, warmup=self.warmup, final=self.final, decay=self.decay)

    @property
    def numbers(self) -> "AdamW | Muon":
        """The optimizer's settings."""
        from .adamw import AdamW, AdamW8bit, Muon

        assert self.lr is not None and self.weight_decay is not None  # filled in by __post_init__
        adamw = AdamW(self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)
        if self.optimizer not in ("adamw", "adamw8bit", "muon"):
            raise ValueError(f"recipe: optimizer must be adamw, adamw8bit or muon, got {self.optimizer!r}.")
        if self.optimizer == "adamw8bit":
            return AdamW8bit(**vars(adamw))
        return adamw if self.optimizer == "adamw" else Muon(self.lr, weight_decay=self.weight_decay, rest=adamw)

    def precision_on(self, device: "torch.device") -> str:
        """Return the precision on a device: 'auto' depends on it."""
        from ..device import fast_bf16

        if self.precision != "auto":
            return self.precision
        return "bf16" if device.type == "cuda" and fast_bf16(device) else "fp32"

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch * self.accumulate * self.seq

    def new_objective(self, tokenizer: "Tokenizer | None" = None) -> "Objective":
        """Return a new objective; one that is used needs the run's tokenizer."""
        from .objectives import objective_named

        objective = objective_named(self.objective, self.objective_options)
        if tokenizer is not None:
            objective.extended(tokenizer)
        return objective

    def extended(self, tokenizer: "Tokenizer") -> "Tokenizer":
        """Return `tokenizer` with the tokens that the objectives of all phases add to it."""
        for _, own in self.stages():
            tokenizer = own.new_objective().extended(tokenizer)
        return tokenizer

    def make_step(
        self,
        model: "nn.Module",
        objective: "Objective",
        device: "torch.device",
        ranks: "Ranks | None" = None,
        exact: bool = False,
    ) -> "TrainStep":
        """Return this rank's part of the optimizer step. exact: as in TrainStep"""
        from ..distributed import ALONE
        from .step import TrainStep

        ranks = ranks or ALONE
        return TrainStep(
            model,
            objective,
            self.numbers,
            accumulate=ranks.share(self.accumulate),
            clip=self.clip,
            precision=self.precision_on(device),
            graph=self.graph,
            schedule=self.rates,
            recompute=self.recompute,
            ranks=ranks,
            overlap=self.overlap,
            update_in_backward=self.update_in_backward,
            offload_optimizer=self.offload_optimizer,
            exact=exact,
            seed=self.seed,
        )

    def stages(self) -> list[tuple[str, "Recipe"]]:
        """Return (name, recipe) of each phase; a recipe without phases is the only one."""
        if not self.phases:
            return [("", self)]
        for phase in self.phases:
            if not isinstance(phase, dict):
                raise ValueError(f"recipe: a phase must have keys and values such as 'steps: 2000', got {shown(phase)}.")
        names = [str(phase.get("name", f"phase-{number}")) for number, phase in enumerate(self.phases, 1)]
        if wrong := [name for name in names if not re.fullmatch(r"[\w-]+", name)]:
            raise ValueError(f"recipe: phase {wrong[0]!r}: wanted a name of letters, digits, - and _; it names a folder.")
        if len(set(names)) < len(names):
            raise ValueError(f"recipe: phases need names that differ, got {', '.join(names)}.")
        return [(name, self._with(name, phase)) for name, phase in zip(names, self.phases)]

    def _with(self, name: str, phase: dict[str, Any]) -> "Recipe":
        own = {key: value for key, value in phase.items() if key != "name"}
        if "objective" in own:  # the run's options belong to another objective
            own.setdefault("objective_options", {})
        if "data" in own:
            own.setdefault("data_weights", ())
        own = of_either(own)
        for key in own.keys() - set(PHASED):
            why = "is the whole run's, not a phase's."
            if key not in {f.name for f in fields(Recipe)}:
                why = f"is unknown; {hint(key, ('name', *PHASED), 'the keys are')}"
            raise ValueError(f"recipe: phase {name}: {shown(key)} {why}")
        try:
            return replace(self, phases=(), **own)
        except ValueError as error:
            raise ValueError(f"recipe: phase {name}: {str(error).removeprefix('recipe: ')}") from error


def check_out(model: str | None, out: str) -> None:
    """Refuse a run in its model's folder, which would be taken for the run, and where its report cannot be written."""
    from ..pages import check_page

    if model and Path(model).is_dir() and Path(out).is_dir() and Path(out).samefile(model):
        raise ValueError(f"out: {out} holds the model that the run begins with; give another folder with --out.")
    if (page := Path(out) / "report.html").exists():
        check_page(page)


def check_model(name: str) -> None:
    from ..models.registry import family_of, is_named, presets

    if is_named(name):
        return
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(
            f"model: got {name!r}, wanted one of {', '.join(presets())} (with -tiny added: a small one like it), "
            f"or a Hugging Face folder."
        )
    if not (folder / "config.json").is_file() and not family_of(name).reads(folder):  # known before the data is tokenised
        raise ValueError(f"model: {name} holds no config.json; give a Hugging Face folder.")
