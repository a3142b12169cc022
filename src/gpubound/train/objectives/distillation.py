"""Knowledge distillation: a model learns the next-token distribution of a frozen teacher (chunked_head.py has the losses).

The teacher reads the same batch in the same step, without gradients, in its own dtype; it is no part of the model, so neither
optimizer nor checkpoints hold it. Both must have the same tokens. Logits of both exist for a few thousand tokens at a time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...data import Tokenizer
from ...kernels.dispatch import Call
from ...layers.embedding_and_head import head_of
from ...models.folder import read_config
from ...models.language_model import FIELDS, UNPACKED, first_row, hidden_of, logits_of, why_not_head, why_not_isolated
from ...models.registry import family_of, mode
from ...place import place
from ...trace import fallback
from .chunked_head import IGNORE, DistillationLoss, Head, head_losses, logits_loss, student_loss
from .word_loss import WordLoss, check_arguments


@dataclass(eq=False)
class Distillation(WordLoss):
    """alpha τ² D + (1 - alpha) CE, where D is the divergence from the teacher's distribution and CE the labels' cross-entropy.

    teacher      a model, which is put into eval mode; or a Hugging Face folder, loaded in the dtype of its files and placed
    alpha        the divergence's share: 1 learns from the teacher alone
    beta         which divergence: 0 is KL(teacher || student), 1 is KL(student || teacher), 0.5 Jensen-Shannon
    temperature  τ, by which the logits of both are divided in D

    A batch is that of next_token: labels are the next tokens already, and -100 where neither counts.
    """

    teacher: Any = field(default=None, repr=False)
    _: KW_ONLY
    alpha: float = 1.0
    beta: float = 0.0
    temperature: float = 1.0

    name: ClassVar[str] = "distillation"
    _teacher_tried: nn.Module | None = field(init=False, default=None)  # the student with which the teacher was tried
    _teacher_isolates: nn.Module | None = field(init=False, default=None)
    _why_teachers_logits: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.teacher, nn.Module | str | Path) or not (isinstance(self.teacher, nn.Module) or self.teacher):
            raise ValueError(
                f"distillation: teacher: got {self.teacher!r}, wanted a model, or the Hugging Face folder of one "
                f"(objective_options: {{teacher: path}})."
            )
        for name in ("alpha", "beta"):
            if not isinstance(value := getattr(self, name), int | float) or not 0 <= value <= 1:
                raise ValueError(f"distillation: {name}: got {value!r}, wanted a number from 0 to 1.")
        if not isinstance(self.temperature, int | float) or not 0 < self.temperature < float("inf"):
            raise ValueError(f"distillation: temperature: got {self.temperature!r}, wanted a number above 0, such as 2.")
        self.formula = DistillationLoss(self.alpha, self.beta, self.temperature)

    def check_files(self) -> None:
        if not isinstance(self.teacher, nn.Module):
            read_config(Path(self.teacher))

    def extended(self, tokenizer: Tokenizer) -> Tokenizer:
        """Check that the teacher's folder has the run's tokens: its logits would speak of others."""
        if isinstance(self.teacher, nn.Module):
            return tokenizer
        theirs = Tokenizer.load(self.teacher)
        difference = tokenizer.difference(theirs)
        if difference is not None or theirs.vocab_size != tokenizer.vocab_size:
            why = f"has {theirs.vocab_size:,} tokens, the run {tokenizer.vocab_size:,}"
            if difference is not None:
                number, ours, token = difference
                why = f"has another tokenizer than the run: its token {number:,} is {token!r}, the run's {ours!r}"
            raise ValueError(
                f"distillation: teacher: {self.teacher} {why}; give a teacher of the model's own family, or begin with a model "
                f"that has the teacher's tokenizer."
            )
        return tokenizer

    def calls(self, model: nn.Module) -> Iterable[Call]:
        head = head_of(model)
        return [self.formula.call(head.out_features)] if isinstance(head, nn.Linear) else ()

    def load(self, model: nn.Module) -> None:
        device = next(model.parameters()).device
        if not isinstance(self.teacher, nn.Module):
            self.teacher = family_of(str(self.teacher)).load(self.teacher, device).requires_grad_(False)
            place(self.teacher, device)
        teacher, trained = self.teacher.eval(), {id(p) for p in model.parameters() if p.requires_grad}
        shared = [name for name, p in teacher.named_parameters() if id(p) in trained]
        if teacher is model or shared:
            raise ValueError(
                f"distillation: teacher: its {shared[0] if shared else 'weights'} would train with the model; give a copy "
                f"(copy.deepcopy), which stays unchanged."
            )
        elsewhere = next((p.device for p in teacher.parameters() if p.device != device), device)
        if elsewhere != device:
            raise ValueError(f"distillation: teacher: it is on {elsewhere}, the model on {device}; move it there first.")
        ours, theirs = (getattr(head_of(each), "out_features", None) for each in (model, teacher))
        if ours is not None and theirs is not None:
            _check_words(ours, theirs)

    def prepare(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        if not isinstance(self.teacher, nn.Module):
            self.load(model)
        super().prepare(model, batch)
        teacher, packed = self.teacher, isinstance(batch, Mapping) and bool(FIELDS & batch.keys())
        if self._teacher_tried is model and (self._teacher_isolates is model or not packed):
            return
        inputs, _ = self.split(batch)
        check_arguments(f"{self.name}: the teacher", teacher, inputs)
        if packed and self._teacher_isolates is not model:
            if why := why_not_isolated(teacher, inputs):
                raise ValueError(
                    f"{self.name}: the teacher, a {type(teacher).__name__}, cannot read packed rows (segment_ids): {why}. Take "
                    f"unpacked batches ({UNPACKED})."
                )
            self._teacher_isolates = model
        if self._teacher_tried is not model:
            self._why_teachers_logits = why_not_head(teacher, inputs)
            if self._why_teachers_logits:
                fallback(f"{self.name} without the teacher's whole logits", self._why_teachers_logits)
            if self._why_all_logits or self._why_teachers_logits:  # else `load` has compared the heads
                row, words = first_row(inputs), list[int]()
                for each in (model, teacher):
                    with torch.no_grad(), mode(each, training=False):
                        words.append(logits_of(each, row).shape[-1])
                _check_words(*words)
            self._teacher_tried = model

    def __call__(self, model: Any, batch: Mapping[str, Any], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.prepare(model, batch)
        inputs, labels = self.split(batch)
        student, teacher, flat = self._outputs(model, inputs, labels)
        if isinstance(student, Head):
            loss = student_loss(student, teacher, flat, self.formula, scale)
        else:
            loss = logits_loss(student, teacher, flat, self.formula, scale)
        return loss, (labels != IGNORE).sum()

    @torch.no_grad()
    def validate(self, model: Any, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean loss, and the two of which it is made: the divergence without τ², and the labels' cross-entropy."""
        sums = torch.zeros(3, dtype=torch.float64, device="cpu")
        for batch in batches:
            self.prepare(model, batch)
            inputs, labels = self.split(batch)
            student, teacher, flat = self._outputs(model, inputs, labels)
            if isinstance(student, Head):
                distance, entropy = head_losses(student, teacher, flat, self.formula)
            else:
                distance, entropy = (each.double().sum() for each in self.formula.losses(student, teacher, flat))
            sums = sums.to(flat.device) + torch.stack([distance, entropy, (flat != IGNORE).sum().double()])
        total = sums.tolist()
        mean, label_loss = total[0] / total[2], total[1] / total[2]
        held_out = self.alpha * mean + (1 - self.alpha) * label_loss
        return {"held_out": held_out, "divergence": mean / self.temperature**2, "cross_entropy": label_loss}

    def _outputs(self, model: Any, inputs: dict[str, Any], labels: Tensor) -> tuple[Any, Any, Tensor]:
        """Return (student, teacher, labels): the heads and their inputs, or the logits (N, V) of both."""
        teacher, flat = self.teacher, labels.flatten().long()
        with torch.no_grad():
            if self._why_all_logits is None and self._why_teachers_logits is None:
                theirs: Any = Head.of(hidden_of(teacher, inputs), head_of(teacher), labels)
            else:
                theirs = logits_of(teacher, inputs).flatten(0, -2)
        if isinstance(theirs, Head):
            return Head.of(hidden_of(model, inputs), head_of(model), labels), theirs, flat
        logits = logits_of(model, inputs)
        self._check_positions(model, logits, labels)
        return logits.flatten(0, -2), theirs, flat


def _check_words(student: int, teacher: int) -> None:
    if student != teacher:
        raise ValueError(
            f"distillation: teacher: its logits are of {teacher:,} tokens, the model's of {student:,}, and each token needs "
            f"both; give a teacher with the model's vocabulary."
        )
