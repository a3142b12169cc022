"""Reference check of a runner when it is built: its logits after a prefill and some steps, against the model's forward.

Experts and indexer entries are chosen by comparing scores, so rounding may change the choice, and either choice is valid. The
model's forward therefore uses the runner's choices, and a separate check bounds the difference between the chosen scores and
the best ones (reference.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....decode.certificate import MISSED_LIMIT
from ....decode.reference import RoutingTrace
from ....errors import GenerateError
from ....layers.offload_forward import visiting
from ..modules import rounded

if TYPE_CHECKING:
    from .body import CompressedBody

STEPS = 4  # after the prefill
LONGEST = 512  # tokens: the check covers windows and entries of up to this length
# Largest relative error of the logits, in the norm. A 16-bit model rounds its streams after every attention and MLP; the runner
# keeps them in fp32.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}


@dataclass(frozen=True)
class Trial:
    error: float
    tokens: int

    def row(self) -> tuple[str, str, str]:
        return "trial", f"logits within {self.error:.1e} of the model's own", f"{self.tokens} tokens, the last {STEPS} in steps"


@torch.no_grad()
def try_body(body: "CompressedBody") -> Trial:
    reaches = [layer.attention.reach + STEPS for layer in body.layers]
    tokens = min(max([STEPS, *(reach for reach in reaches if reach <= LONGEST)]), body.max_length)
    first = max(0, tokens - STEPS)
    ids = torch.randint(body.vocab, (tokens,), generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(body.device)
    place = torch.arange(tokens, device=body.device)
    with _overheard(body) as (choices, entries):
        body.prefill(ids[None, :first], place[first : first + 1])
        steps = (slice(at, at + 1) for at in range(first, tokens))
        ours = torch.cat([body.step(ids[at].int(), place[at].int()).clone() for at in steps])
    with _forced(body, choices, entries), visiting(body.reader.trunk.layers, body.device):
        given = {"input_ids": ids[None].to(body.model.device), "use_cache": False, "logits_to_keep": tokens - first}
        own = body.model(**given).logits[0].float().to(body.device)
    if not own.isfinite().all():
        raise GenerateError(
            f"decoder: the model's logits are not finite; first seen in {body.locate(ids)}. Check the weights (a diverged "
            "training run?) and the dtype."
        )
    error, name = ((ours - own).norm() / own.norm()).item(), type(body.model).__name__
    if not error <= TOLERANCE[body.dtype]:
        raise GenerateError(
            f"decoder: logits are {error:.1e} from those of {name} itself (limit {TOLERANCE[body.dtype]:.0e}): the step does "
            "not compute this model; report it with the model's config."
        )
    for what, missed in (("experts", choices.missed), ("entries", entries.missed)):
        if not missed <= MISSED_LIMIT[body.dtype]:
            raise GenerateError(
                f"decoder: the step chooses {what} whose scores lie {missed:.1e} deviations below those that {name} finds best "
                f"(limit {MISSED_LIMIT[body.dtype]:.0e}): it does not compute this model; report it with the model's config."
            )
    return Trial(error, tokens)


@contextmanager
def _overheard(body: "CompressedBody") -> Iterator[tuple[RoutingTrace, "Entered"]]:
    """Record the experts and entries that the runner chooses within the context."""
    found, entries = RoutingTrace(), Entered()
    indexes = {number: layer.attention.index for number, layer in enumerate(body.layers) if layer.attention.index is not None}
    for layer in body.layers:
        layer.mixture.routing_trace = found
    for number, index in indexes.items():
        index.routing_trace = partial(entries.add, number)
    try:
        yield found, entries
    finally:
        for layer in body.layers:
            layer.mixture.routing_trace = None
        for index in indexes.values():
            index.routing_trace = None


class Entered(RoutingTrace):
    """Chosen entries of a sequence's tokens: `ids` (T, K), padded with -1."""

    def judged(self, number: int, scores: Tensor) -> Tensor:
        """Return the chosen entries and record how far their scores are below the best.

        `scores` (T, S) are -inf for entries that a token may not attend to.
        """
        ids = self.ids[number].long().to(scores.device)
        if not (entries := scores.shape[1]):
            return ids
        seen, there, at = scores.isfinite(), ids >= 0, ids.clamp(0, entries - 1)
        count, low = seen.sum(-1, keepdim=True).clamp_min(1), scores.masked_fill(~seen, 0.0)
        spread = (low - low.sum(-1, keepdim=True) / count).masked_fill(~seen, 0.0).square().sum(-1).div(count[:, 0]).sqrt()
        best, chosen = scores.topk(min(ids.shape[1], entries)).values, low.gather(-1, at).masked_fill(~there, 0.0)
        short = best.masked_fill(best.isinf(), 0.0).sum(-1) - chosen.sum(-1)
        unseen = there & ~seen.gather(-1, at) | (ids >= entries)
        wrong = unseen.any(-1) | (there.sum(-1) != best.isfinite().sum(-1))
        self._missed.append((short / count[:, 0] / spread.clamp_min(1e-30)).masked_fill(wrong, float("inf")))
        return at.masked_fill(~there, -1)


@contextmanager
def _forced(body: "CompressedBody", choices: RoutingTrace, entries: Entered) -> Iterator[None]:
    """Make the model's routers and indexers return the runner's choices within the context. The model keeps its dtype."""

    def force(number: int) -> Any:
        weights = body.layers[number].mixture.weights

        def hook(router: Any, inputs: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
            assert weights.correction is not None
            scores = weights.score(outputs[0].float())
            ids = choices.judged(number, scores + weights.correction.to(scores.device))
            shares = scores.gather(-1, ids)
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) * weights.scale
            return outputs[0], shares.to(outputs[1].dtype), ids

        return hook

    def entered(number: int) -> tuple[Any, Any]:
        scores: list[Tensor] = []
        index = body.layers[number].attention.index
        assert index is not None
        rate = index.entries.weights.rate

        def keep(scorer: Any, inputs: Any, output: Tensor) -> None:
            scores.append(output[0].float())

        def hook(indexer: Any, inputs: Any, output: Tensor) -> Tensor:
            (found,) = scores
            closed = (torch.arange(len(found), device=found.device) + 1) // rate
            beyond = torch.arange(found.shape[1], device=found.device) >= closed[:, None]
            return entries.judged(number, found.masked_fill(beyond, float("-inf")))[None]

        return keep, hook

    routers = body.reader.routers().items()
    handles = [router.register_forward_hook(force(n)) for n, router in routers if body.layers[n].mixture.weights.table is None]
    for number, indexer in body.reader.indexers().items():
        keep, hook = entered(number)
        handles += [indexer.scorer.register_forward_hook(keep), indexer.register_forward_hook(hook)]
    handles += rounded(body.model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
