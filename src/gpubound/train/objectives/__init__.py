"""Training objectives: the loss of a run, and its values on held-out data.

Each is a class in a separate file and a line in OBJECTIVES, for `objective:` of a recipe and `loss=` of a TrainStep.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...data import Tokenizer
from ...distributed import Ranks
from ...formatting import hint
from ...kernels.dispatch import Call

OBJECTIVES = {
    "causal_lm": (".word_loss", "CausalLM"),
    "next_token": (".word_loss", "NextToken"),
    "dpo": (".preference", "Preference"),
    "policy": (".policy", "Policy"),
    "distillation": (".distillation", "Distillation"),
    "classification": (".pooled", "Classification"),
    "contrastive": (".pooled", "Contrastive"),
    "masked_diffusion": ("gpubound.models.diffusion.objective", "MaskedDiffusion"),
    "diffusion": ("gpubound.models.diffusion.objective", "MaskedDiffusion"),
}
"""(module, class) by name; imported on first use"""

OF_KIND = {"texts": "next_token", "preferences": "dpo", "matches": "contrastive", "classes": "classification"}
"""An objective for each kind of documents in a corpus."""


class Objective:
    """(model, batch) -> (sum of the losses of all items that count, their number), both on the device.

    A subclass is a dataclass; its fields are its options, which a recipe gives as `objective_options`. A batch holds device
    tensors, so nothing here may wait for the device but `prepare` and `validate`.
    """

    of_corpus: ClassVar[bool] = True  # whether it takes batches of a Corpus
    counts_tokens: ClassVar[bool] = True  # False: its items are others, such as pairs
    labels: ClassVar[str] = "next"  # of such batches: each position's "next" token, or its "own"
    pack: ClassVar[str | None] = None  # the packing that it needs, such as "pairs"; None: the recipe's
    packs: ClassVar[tuple[str, ...]] = ()  # others that it also takes; auto is the first, where the model can read such rows
    kind: ClassVar[str] = "texts"  # what a corpus for it holds: see data/formats.py
    format: ClassVar[str | None] = None  # of rows, unless the recipe names one
    adapts: ClassVar[bool] = False  # whether `adapt` changes the model
    trains_head: ClassVar[bool] = False  # also where adapters train, and all else is frozen

    def __call__(self, model: Any, batch: Any, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum times `scale`, and the number of items. Training always gives a scale: gradients that are computed in
        forward include it, and backward begins with 1."""
        raise NotImplementedError

    def extended(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return a run's tokenizer with the tokens that this objective adds to it. Called before the model is built."""
        return tokenizer

    def why_not_kind(self, kind: str) -> str | None:
        """Return what it wants, and what to do, where it does not take a corpus of this kind."""
        if kind == self.kind:
            return None
        fits = next((name for begin, name in OF_KIND.items() if kind.startswith(begin)), None)
        return f"which wants {self.kind}; give {f'objective: {fits}' if fits else 'another objective'}, or other data"

    def class_names(self) -> list[str] | None:
        """Return the names that labels of a run's rows may have in place of numbers."""
        return None

    def check_files(self) -> None:
        """Raise the errors of options that a run needs, and of their files, that show without reading much. Called before a run
        builds anything."""

    def adapt(self, model: Any) -> None:
        """Give a run's model what the objective trains, such as another head. Called when the model is built."""

    def check_model(self, model: Any) -> None:
        """Raise ValueError for a model that the objective cannot call. Called before the model is changed."""

    def join(self, ranks: Ranks) -> str | None:
        """Take the ranks that share each step. Return why the loss of a micro-batch needs all of them, None where it needs one.
        Called before the first step."""
        return None

    def load(self, model: Any) -> None:
        """Load what the objective needs besides the model, such as a teacher, onto its device. Raise ValueError if it does not
        fit the model. Called before the model is changed."""

    def check_batch(self, model: Any, batch: Any) -> None:
        """Raise ValueError for a batch that the model cannot take. Called for the first batch of each signature, outside of the
        step: it may wait for the device."""

    def calls(self, model: Any) -> Iterable[Call]:
        """Return the kernels that the loss is known to call, so that they are compiled in parallel with the others."""
        return ()

    def prepare(self, model: Any, batch: Any) -> None:
        """Called before the step is captured; it may read the device."""

    def written(self) -> list[Tensor]:
        """Return the tensors besides the loss that a call writes, such as figures of a step."""
        return []

    def needs_reference(self, model: Any) -> bool:
        """Return whether batches need `reference`, what `reference_values` gives for the model before it is trained."""
        return False

    def reference_values(self, model: Any, batch: Any) -> Tensor:
        """Return the value of each row (B,)."""
        raise NotImplementedError

    def validate(self, model: Any, batches: Iterable[Any]) -> dict[str, float]:
        """Return the values on held-out data. The best weights have the lowest `held_out`: by default, the mean loss."""
        total, count = torch.zeros(2, dtype=torch.float64, device="cpu")
        for batch in batches:
            loss, items = self(model, batch)
            total, count = total.to(loss.device) + loss.double(), count.to(loss.device) + items.double()
        return {"held_out": (total / count).item()}

    def sample(
        self, model: Any, tokenizer: Tokenizer, prompt: str, tokens: int, context: int, temperature: float
    ) -> str | None:
        """Return the model's continuation of `prompt`, for a report, from up to `context` tokens; None if it writes no text."""
        return None


def objective_class(name: str) -> type[Objective]:
    module, kind = OBJECTIVES[name]
    return getattr(import_module(module, __name__), kind)


def objective_named(name: str, options: Mapping[str, Any]) -> Objective:
    """Return the objective of a run on a Corpus, with its options."""
    of_corpus = {known: kind for known in OBJECTIVES if (kind := objective_class(known)).of_corpus}
    if name not in of_corpus:
        raise ValueError(f"recipe: objective: got {name!r}, wanted one of {', '.join(of_corpus)}.")
    kind = of_corpus[name]
    known = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    for key in options:
        if key not in known:
            why = hint(key, known, "its options are")
            raise ValueError(f"recipe: objective_options: {key!r} is no option of {name}; {why}")
    return kind(**options)
