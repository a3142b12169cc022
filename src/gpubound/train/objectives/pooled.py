"""Objectives of whole texts: their classes or values, and embeddings that are close for texts that match.

A text is represented by the state of its last token, which is where a batch of a Corpus has its only label.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...data.formats import MATCHES, group_of, matches_with
from ...distributed import ALONE, Ranks
from ...distributed.ranks import Poll
from ...errors import RankError
from ...kernels import cross_entropy
from ...kernels.cross_entropy import loss_shape
from ...kernels.dispatch import Call
from ...layers.embedding_and_head import head_of
from ...models.language_model import LanguageModel, hidden_of, logits_of, why_not_head
from ...models.registry import mode
from ..offload import drops_out
from . import Objective
from .word_loss import IGNORE, WordLoss, check_arguments, check_tokens


@dataclass(eq=False)
class Classification(WordLoss):
    """Cross-entropy of a text's class, or the squared error of its value.

    classes  the names of the classes, or their number; 1 is a regression. A run gives its model a head of them; None: the
             model has one

    A batch has input_ids (B, T), and as labels one of

        (B, T)  classes, -100 except at each text's last token, or values, nan except there: several texts a row, if packed
        (B,)    a class or a value for each row of a model of transformers, whose forward finds the last token
        (B, N)  0 or 1 for each class, of which a text may have several, also of these models alone
    """

    classes: Any = None

    name: ClassVar[str] = "classification"
    kind: ClassVar[str] = "classes"
    format: ClassVar[str | None] = "classification"
    counts_tokens: ClassVar[bool] = False
    adapts: ClassVar[bool] = True
    trains_head: ClassVar[bool] = True
    _pooled: nn.Module | None = field(init=False, default=None)  # the model whose states were compared with its logits

    def __post_init__(self) -> None:
        names = range(self.classes) if isinstance(self.classes, int) else self.classes
        if names is None:
            self.names: list[str] = []
            return
        if not isinstance(names, Sequence) or isinstance(names, str) or not 0 < len(names) == len(set(names)):
            raise ValueError(
                f"classification: classes: got {self.classes!r}, wanted their number, or a list of their names "
                f"(objective_options: {{classes: [no, yes]}})."
            )
        self.names = [f"LABEL_{name}" if isinstance(name, int) else str(name) for name in names]

    def class_names(self) -> list[str] | None:
        return self.names or None

    def check_files(self) -> None:
        if not self.names:
            raise ValueError("classification: classes: got none, wanted their number or names (objective_options).")

    def adapt(self, model: nn.Module) -> None:
        self.check_files()
        if not isinstance(model, LanguageModel):
            raise ValueError(
                f"classification: got a {type(model).__name__}, wanted a model of gpubound's own; see docs/models.md."
            )
        if model.classes and len(model.classes) != len(self.names):
            raise ValueError(
                f"classification: classes: got {len(self.names)}, and the model has a head of {len(model.classes)}; give "
                f"as many."
            )
        if not model.classes:
            model.classify(self.names)

    def calls(self, model: nn.Module) -> Iterable[Call]:
        head = head_of(model)
        return [("cross_entropy", loss_shape(head.out_features))] if isinstance(head, nn.Linear) else []

    def check_shape(self, labels: Tensor, ids: Tensor) -> None:
        if labels.shape != ids.shape and not (0 < labels.dim() <= 2 and len(labels) == len(ids)):
            raise ValueError(
                f"classification: labels have the shape {tuple(labels.shape)} for input_ids of {tuple(ids.shape)}; wanted one "
                f"class or value a row, one for each class and row, or one a token, -100 or nan but at a text's last."
            )

    def check_values(self, model: nn.Module, ids: Tensor, labels: Tensor) -> None:
        check_tokens(self.name, model, ids, torch.full_like(ids, IGNORE))
        outputs = getattr(head_of(model), "out_features", None)
        if labels.is_floating_point() or outputs is None:
            return
        least, most = torch.stack(torch.aminmax(labels.masked_fill(labels == IGNORE, 0))).tolist()
        if outputs == 1 or least < 0 or most >= outputs:
            wanted = "values in a floating dtype, of its one output" if outputs == 1 else f"classes from 0 to {outputs - 1}"
            raise ValueError(f"classification: labels hold the class {most if least >= 0 else least}, wanted {wanted}.")

    def why_all_logits(self, model: nn.Module, inputs: dict[str, Any]) -> str | None:
        return None

    def prepare(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Check also, where labels are at tokens, that the model's logits are its head's product with one token's state."""
        super().prepare(model, batch)
        inputs, labels = self.split(batch)
        if isinstance(model, LanguageModel) and not self._by_token(model, inputs, labels):
            raise ValueError(
                f"classification: got labels {tuple(labels.shape)} of {labels.dtype}, and {type(model).__name__} has scores at "
                f"each token; wanted labels at tokens, {tuple(inputs['input_ids'].shape)}, -100 or nan but at a text's last."
            )
        if self._pooled is model or not self._by_token(model, inputs, labels):
            return
        why = why_not_head(model, inputs) if isinstance(model, LanguageModel) else _why_not_pooled(model, inputs)
        if why:
            raise ValueError(
                f"classification: labels at tokens need the states of {type(model).__name__}, and {why}; give one label a row."
            )
        self._pooled = model

    def __call__(self, model: Any, batch: Mapping[str, Any], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.prepare(model, batch)
        loss, count, _ = self._losses(model, *self.split(batch))
        extra = model.extra_loss() if isinstance(model, LanguageModel) else None
        loss = loss if extra is None else loss + extra * count
        return loss if scale is None else loss * scale, count

    @torch.no_grad()
    def validate(self, model: Any, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean loss and, of classes, the share that is found."""
        sums, classes = torch.zeros(3, dtype=torch.float64, device="cpu"), False
        for batch in batches:
            self.prepare(model, batch)
            loss, count, right = self._losses(model, *self.split(batch))
            classes = right is not None
            correct = torch.zeros_like(loss) if right is None else right
            sums = sums.to(loss.device) + torch.stack([loss.double(), count.double(), correct.double()])
        loss, count, right = sums.tolist()
        return {"held_out": loss / count} | ({"accuracy": right / count} if classes else {})

    def _by_token(self, model: Any, inputs: dict[str, Any], labels: Tensor) -> bool:
        outputs = getattr(head_of(model), "out_features", None)
        return labels.shape == inputs["input_ids"].shape and (not labels.is_floating_point() or outputs == 1)

    def _losses(self, model: Any, inputs: dict[str, Any], labels: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the sum of the losses, the number of labels that count, and of classes how many are found."""
        if self._by_token(model, inputs, labels):
            scores = head_of(model)(hidden_of(model, inputs)).flatten(0, 1)
            labels = labels.flatten()
        else:
            scores = logits_of(model, inputs)
        if not labels.is_floating_point():
            counted = labels != IGNORE
            loss = cross_entropy(scores, labels, ignore_index=IGNORE, reduction="sum")
            return loss, counted.sum(), ((scores.argmax(-1) == labels) & counted).sum()
        outputs = scores.to(torch.promote_types(scores.dtype, torch.float32))
        counted = ~labels.isnan()
        wanted = labels.nan_to_num().to(outputs.dtype)
        if outputs.shape[-1] == 1:
            error = (outputs.flatten() - wanted.flatten()).masked_fill(~counted.flatten(), 0)
            return error.square().sum(), counted.sum(), None
        each = F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none").mean(-1)
        counted = counted.all(-1)
        return each.masked_fill(~counted, 0).sum(), counted.sum(), None


@torch.no_grad()
def _why_not_pooled(model: Any, inputs: dict[str, Any]) -> str | None:
    """Return None if the logits of a row are the head's product with the state of one of its tokens, else why not."""
    head, row = head_of(model), {"input_ids": inputs["input_ids"][:1]}
    if not isinstance(head, nn.Linear):
        return "it has no linear head named score"
    with mode(model, training=False):
        got, states = logits_of(model, row), head(hidden_of(model, row))[0]
    off = ((states - got).float().norm(dim=-1) / got.float().norm().clamp_min(1e-12)).min().item()
    return (
        None if off <= (1e-3 if got.dtype == torch.float32 else 5e-2) else f"its logits are {off:.1e} from those of any token"
    )


@dataclass(eq=False)
class Contrastive(Objective):
    """InfoNCE: each query is to be closer to its positive than to all other positives and negatives of the micro-batch, by
    cosine.

    temperature  by which cosines are divided
    pooling      what represents a text: the state of its "last" token, or the "mean" of all
    symmetric    average with the same loss of each positive among all queries
    negatives    the number of (hard) negatives of each query
    gather_across_ranks  a query is compared with the positives and negatives of all ranks' micro-batches, as of one that is as
                 many times larger; these need as many rows on each rank. Loss and gradients are those of one process
    chunk        rows that are embedded at once. A micro-batch of more rows is embedded in chunks, and again in backward: it
                 takes the memory of a chunk and the time of a further forward, and loss and gradients are those of the whole.
                 None: all rows at once

    A batch has input_ids (n P, T), n = 2 + negatives: row nk is a query, row nk + 1 its positive, and its negatives follow.
    A text ends at its last label that is not -100, as in batches of a Corpus, and has the tokens of its attention_mask; without
    both it is the whole row.
    """

    temperature: float = 0.05
    pooling: str = "last"
    symmetric: bool = False
    negatives: int = 0
    chunk: int | None = None
    gather_across_ranks: bool = False

    name: ClassVar[str] = "contrastive"
    pack: ClassVar[str | None] = "pairs"
    kind: ClassVar[str] = MATCHES
    counts_tokens: ClassVar[bool] = False
    adapts: ClassVar[bool] = True
    _tried: nn.Module | None = field(init=False, default=None)
    _ranks: Ranks = field(init=False, default=ALONE)
    _poll: Poll = field(init=False, default_factory=lambda: Poll(ALONE))
    _rows: int = field(init=False, default=0)  # of a micro-batch, which all ranks have

    def __post_init__(self) -> None:
        if self.pooling not in ("last", "mean"):
            raise ValueError(f"contrastive: pooling: got {self.pooling!r}, wanted 'last' or 'mean'.")
        if not isinstance(self.temperature, int | float) or not 0 < self.temperature < float("inf"):
            raise ValueError(f"contrastive: temperature: got {self.temperature!r}, wanted a number above 0, such as 0.05.")
        if not isinstance(self.negatives, int) or self.negatives < 0:
            raise ValueError(
                f"contrastive: negatives: got {self.negatives!r}, wanted how many follow each positive, such as 1."
            )
        if self.chunk is not None and (not isinstance(self.chunk, int) or self.chunk < 1):
            raise ValueError(f"contrastive: chunk: got {self.chunk!r}, wanted a number of rows, such as 32, or None.")
        if not isinstance(self.gather_across_ranks, bool):
            raise ValueError(f"contrastive: gather_across_ranks: got {self.gather_across_ranks!r}, wanted true or false.")

    def join(self, ranks: Ranks) -> str | None:
        self._ranks = ranks if self.gather_across_ranks else ALONE
        self._poll = Poll(self._ranks)
        return None if self._ranks.alone else "the loss of each gathers the embeddings of all ranks"

    def why_not_kind(self, kind: str) -> str | None:
        if kind == matches_with(self.negatives):
            return None
        if kind.startswith(MATCHES):
            number = group_of(kind) - 2
            return f"with negatives: {self.negatives}; give objective_options: {{negatives: {number}}}, or other rows"
        return super().why_not_kind(kind)

    def check_model(self, model: nn.Module) -> None:
        check_arguments(self.name, model, ["input_ids"], complete=False)

    def adapt(self, model: nn.Module) -> None:
        """Freeze the head, which embeddings do not reach, unless it is the table of the tokens."""
        if isinstance(model, LanguageModel) and not model.config.tied:
            model.lm_head.weight.requires_grad_(False)

    def prepare(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        if self._tried is not model:
            self.check_batch(model, batch)
            self._rows = len(batch["input_ids"])
            self._ranks.check_same("contrastive: the first micro-batch", {"rows": self._rows})
            self._tried = model

    def check_batch(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        inputs, _ = self.split(batch)
        check_arguments(self.name, model, inputs)
        check_tokens(self.name, model, inputs["input_ids"], torch.full_like(inputs["input_ids"], IGNORE))

    def _check_rows(self, rows: int) -> None:
        """Raise RankError where ranks have different numbers of rows, for which NCCL would wait without an end.

        The hosts exchange the numbers in the background, and only a rank whose number has changed waits for the others'."""
        self._poll.begin(rows)
        if rows == self._rows:
            return
        every = [int(each) for each in self._poll.finish()]
        if len(set(every)) > 1:
            raise RankError(
                f"contrastive: ranks have micro-batches of {', '.join(map(str, every))} rows, wanted as many on every rank, "
                f"because gather_across_ranks compares them; leave a last, smaller micro-batch out (drop_last=True)."
            )
        self._rows = rows

    def split(self, batch: Any) -> tuple[dict[str, Any], Tensor]:
        """Return (the model's arguments, the mask (n P, T) of the texts' tokens)."""
        ids, group = batch.get("input_ids") if isinstance(batch, Mapping) else None, 2 + self.negatives
        if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) % group:
            got = tuple(ids.shape) if isinstance(ids, Tensor) else type(batch).__name__
            rows = f"a multiple of {group} rows, each query, its positive and its negatives" if self.negatives else None
            raise ValueError(
                f"contrastive: a batch must be a dict with input_ids of "
                f"{rows or 'an even number of rows, each query and then its positive'}, got {got}."
            )
        inputs = {key: value for key, value in batch.items() if key not in ("labels", "example")}
        mask = batch["attention_mask"] != 0 if "attention_mask" in batch else torch.ones_like(ids, dtype=torch.bool)
        if "labels" in batch:
            mask = mask & ((batch["labels"] != IGNORE).flip(1).cumsum(1).flip(1) > 0)
        return inputs, mask

    def embeddings(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        """Return the embedding of each row, of length 1, in fp32 or wider."""
        return self._embedded(model, batch)[0]

    def _embedded(self, model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings, and the model's term of the mean loss."""
        inputs, mask = self.split(batch)
        rows, chunk = len(mask), self.chunk or len(mask)
        embeddings, terms = list[Tensor](), list[Tensor]()
        for begin in range(0, rows, chunk):
            part = {
                name: value[begin : begin + chunk] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value
                for name, value in inputs.items()
            }
            passed = (model, part, mask[begin : begin + chunk])
            if chunk < rows and torch.is_grad_enabled():
                again = partial(checkpoint, self._chunk, use_reentrant=False, preserve_rng_state=drops_out(model))
                embedded, term = again(*passed)
            else:
                embedded, term = self._chunk(*passed)
            embeddings.append(embedded)
            terms += [] if term is None else [term * (len(embedded) / rows)]
        complete = torch.cat(embeddings) if len(embeddings) > 1 else embeddings[0]
        return complete, torch.stack(terms).sum() if terms else None

    def _chunk(self, model: Any, inputs: dict[str, Any], mask: Tensor) -> tuple[Tensor, Tensor | None]:
        states = hidden_of(model, inputs)
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        if self.pooling == "mean":
            pooled = states.masked_fill(~mask.unsqueeze(-1), 0).sum(1)  # its length does not matter
        else:
            last = (mask * torch.arange(mask.shape[1], device=mask.device)).amax(1)
            pooled = states.gather(1, last.view(-1, 1, 1).expand(-1, 1, states.shape[-1])).squeeze(1)
        return F.normalize(pooled, dim=-1), model.extra_loss() if isinstance(model, LanguageModel) else None

    def __call__(self, model: Any, batch: Mapping[str, Any], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.prepare(model, batch)
        if not self._ranks.alone:
            self._check_rows(len(batch["input_ids"]))
        embeddings, extra = self._embedded(model, batch)
        loss, _, pairs = self._losses(embeddings, self._ranks)
        loss = loss if extra is None else loss + extra * pairs
        return loss if scale is None else loss * scale, pairs

    @torch.no_grad()
    def validate(self, model: Any, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean loss, and the share of queries that are closest to their own positive of a micro-batch."""
        sums = torch.zeros(3, dtype=torch.float64, device="cpu")
        for batch in batches:
            self.prepare(model, batch)
            values = torch.stack([each.double() for each in self._losses(self.embeddings(model, batch))])
            sums = sums.to(values.device) + values
        loss, right, pairs = sums.tolist()
        return {"held_out": loss / pairs, "accuracy": right / pairs}

    def _losses(self, embeddings: Tensor, ranks: Ranks = ALONE) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of the losses of this rank's queries, how many are closest to their positive, and their number."""
        texts = embeddings.unflatten(0, (-1, 2 + self.negatives))  # P, n, width
        every = texts if ranks.alone else _GatherTexts.apply(texts, ranks).flatten(0, 1)  # of all ranks, by rank
        others = every[:, 1:].transpose(0, 1).flatten(0, 1)  # all positives, then the negatives
        cosines = texts[:, 0] @ others.t()
        own = torch.arange(len(texts), device=texts.device) + ranks.rank * len(texts)
        loss = F.cross_entropy(cosines / self.temperature, own, reduction="sum")
        if self.symmetric:
            among_queries = texts[:, 1] @ every[:, 0].t()
            loss = (loss + F.cross_entropy(among_queries / self.temperature, own, reduction="sum")) / 2
        return loss, (cosines.argmax(1) == own).sum(), torch.full_like(own[:1], len(own)).squeeze()


class _GatherTexts(torch.autograd.Function):
    """The embeddings of all ranks. Backward adds up the gradients that all ranks' losses give those of this rank."""

    @staticmethod
    def forward(ctx, own, ranks):
        ctx.ranks = ranks
        return ranks.gather_tensors(own)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradients):
        gradients = gradients.clone(memory_format=torch.contiguous_format)  # autograd's own must not be written
        ctx.ranks.sum(gradients)
        return gradients[ctx.ranks.rank], None
