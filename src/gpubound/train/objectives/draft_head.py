"""Training of a draft head (models/draft_head.py): it learns the next-token distribution of the model that it drafts for.

The model reads the batch without gradients, and the head guesses several tokens from each position, the later ones from its own
output, as it does while it drafts. Each guess is compared with the model's distribution over the tokens that the head may
draft. Logits of both exist for a few thousand tokens at a time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.dispatch import Call
from ...layers.embedding_and_head import head_of
from ...layers.packed_attention import Segments
from ...models.draft_head import DraftHead, hidden_states_of
from ...models.language_model import FIELDS, why_not_head
from ...models.registry import mode
from . import Objective
from .chunked_head import CHUNK, IGNORE, DistillationLoss, Head, student_loss
from .word_loss import check_tokens

INPUTS = ("input_ids", "labels", "position_ids", *sorted(FIELDS))


@dataclass(eq=False)
class DraftLoss(Objective):
    """KL(model || head) of `tokens` guesses from each position, their sum over positions and guesses.

    model   that the head drafts for; its weights are read as they are at each step, and get no gradient
    tokens  guesses from a position

    A batch has input_ids, and perhaps the fields of packed rows. Of labels, the next tokens, only -100 is read: nothing is
    learnt there.
    """

    model: Any = field(repr=False)
    tokens: int = 3

    of_corpus: ClassVar[bool] = False
    name: ClassVar[str] = "draft_head"
    formula: ClassVar[DistillationLoss] = DistillationLoss()
    _tried: nn.Module | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"{self.name}: model: got {type(self.model).__name__}, wanted the model that the head drafts for.")
        if not isinstance(self.tokens, int) or isinstance(self.tokens, bool) or not 1 <= self.tokens <= 15:
            raise ValueError(f"{self.name}: tokens: got {self.tokens!r}, wanted a number of guesses from 1 to 15, such as 3.")

    def check_model(self, model: nn.Module) -> None:
        if not isinstance(model, DraftHead):
            raise ValueError(f"{self.name}: got {type(model).__name__} to train, wanted a gb.DraftHead.")
        model.check_model(self.model)

    def calls(self, model: Any) -> Iterable[Call]:
        return [self.formula.call(model.lm_head.out_features)]

    def check_batch(self, model: Any, batch: Any) -> None:
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            raise ValueError(f"{self.name}: a batch must be a dict with input_ids, got a {type(batch).__name__}.")
        if other := sorted(batch.keys() - {*INPUTS}):
            raise ValueError(f"{self.name}: batch[{other[0]!r}]: it reads {', '.join(INPUTS)}; leave {other[0]} out.")
        check_tokens(self.name, self.model, batch["input_ids"], torch.full_like(batch["input_ids"], IGNORE, dtype=torch.int64))
        if batch["input_ids"].shape[1] < self.tokens + 1:
            raise ValueError(
                f"{self.name}: input_ids have {batch['input_ids'].shape[1]} tokens a row, wanted more than the {self.tokens} "
                f"that are guessed; give longer rows."
            )
        if self._tried is not self.model:
            if why := why_not_head(self.model, {"input_ids": batch["input_ids"]}):
                raise ValueError(f"{self.name}: model: its distribution is not that of its head and last hidden state: {why}.")
            self._tried = self.model

    def __call__(self, model: Any, batch: Mapping[str, Any], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        student, teacher, labels = self._outputs(model, batch)
        return student_loss(student, teacher, labels, self.formula, scale), (labels != IGNORE).sum()

    @torch.no_grad()
    def validate(self, model: Any, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean loss, and the fraction of guesses that are the model's likeliest token: `agreed`."""
        sums = torch.zeros(3, dtype=torch.float64, device="cpu")
        for batch in batches:
            student, teacher, labels = self._outputs(model, batch)
            loss = student_loss(student, teacher, labels, self.formula)
            counted, agreed = labels != IGNORE, torch.zeros((), dtype=torch.int64, device=labels.device)
            for first in range(0, len(labels), CHUNK):
                last = min(first + CHUNK, len(labels))
                best, wanted = (each.logits(first, last).argmax(-1) for each in (student, teacher))
                agreed += ((best == wanted) & counted[first:last]).sum()
            sums = sums.to(loss.device) + torch.stack([loss.double(), agreed.double(), counted.sum().double()])
        loss, agreed, count = sums.tolist()
        return {"held_out": loss / count, "agreed": agreed / count}

    def _outputs(self, model: Any, batch: Mapping[str, Any]) -> tuple[Head, Head, Tensor]:
        """Return (student, teacher, labels) of all guesses: both heads with their inputs, and 0 or -100."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        ids = inputs["input_ids"]
        segments = Segments.of(ids, inputs.get("segment_ids"), inputs.get("cu_seqlens"))
        head: Any = head_of(self.model)
        with torch.no_grad(), mode(self.model, training=False):
            states, last = hidden_states_of(self.model, inputs, model.layers)
        later = F.pad(ids, (0, self.tokens))
        if model.embed_tokens is None:
            embedded = F.embedding(later, model.table(self.model).detach())
        else:
            embedded = model.embed_tokens(later)
        outputs = model(states, embedded, inputs.get("position_ids"), None if segments is None else segments.mask())
        counts = torch.ones_like(ids, dtype=torch.bool) if "labels" not in batch else batch["labels"] != IGNORE
        if segments is not None:
            counts = counts & (segments.segment_ids >= 0)
        teachers, labels = [], []
        for guess in range(1, self.tokens + 1):  # from position t, of the model's distribution after position t + guess
            valid = F.pad(counts[:, guess:], (0, guess))
            if segments is not None:
                valid = valid & (F.pad(segments.segment_ids[:, guess:], (0, guess), value=-1) == segments.segment_ids)
            teachers.append(F.pad(last[:, guess:], (0, 0, 0, guess)))
            labels.append(torch.where(valid, 0, IGNORE))
        flat, x = torch.cat(labels), torch.cat(outputs)
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        if len(model.d2t) < len(weight):
            weight = weight.index_select(0, model.targets)
            bias = None if bias is None else bias.index_select(0, model.targets)
        teacher = torch.cat(teachers).masked_fill((flat == IGNORE).unsqueeze(-1), 0)
        return Head.of(x, model.lm_head, flat), Head(teacher.flatten(0, 1), weight, bias), flat.flatten().long()
