"""What a body is tried with when it is built: the logits of a prompt and of steps behind it, beside those of the model's own
forward.

Experts are a choice by comparison, and rounding may make another one of it, neither of which is wrong. So the model's forward
takes the experts that the body chose, and how far below the best ones their scores lie is judged by itself (judge.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import GenerateError
from ...models.deepseek_v4.strict import rounded
from ..certify import MISSED_LIMIT
from ..judge import Choices

if TYPE_CHECKING:
    from .body import CompressedBody

STEPS = 4  # behind the prompt
LONGEST = 512  # tokens: windows and stretches that are shorter end within them
# How far logits may lie from the model's own, relative, in the norm. Those of a model in 16 bits round its streams at every
# part, which ours keep in fp32.
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
    with _overheard(body) as choices:
        body.prefill(ids[None, :first], place[first : first + 1])
        steps = (slice(at, at + 1) for at in range(first, tokens))
        ours = torch.cat([body.step(ids[at].int(), place[at].int()).clone() for at in steps])
    with _forced(body, choices):
        own = body.model(input_ids=ids[None], use_cache=False).logits[0, first:].float()
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
    if not choices.missed <= MISSED_LIMIT[body.dtype]:
        raise GenerateError(
            f"decoder: the step chooses experts whose scores lie {choices.missed:.1e} deviations below those that {name} finds "
            f"best (limit {MISSED_LIMIT[body.dtype]:.0e}): it does not compute this model; report it with the model's config."
        )
    return Trial(error, tokens)


@contextmanager
def _overheard(body: "CompressedBody") -> Iterator[Choices]:
    found = Choices()
    for layer in body.layers:
        layer.mixture.overheard = found
    try:
        yield found
    finally:
        for layer in body.layers:
            layer.mixture.overheard = None


@contextmanager
def _forced(body: "CompressedBody", choices: Choices) -> Iterator[None]:
    """The model runs in its dtype, and its routers that choose by scores choose as the body has."""

    def force(number: int) -> Any:
        weights = body.layers[number].mixture.weights

        def hook(router: Any, inputs: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
            assert weights.correction is not None
            scores = weights.score(outputs[0].float())
            ids = choices.judged(number, scores + weights.correction)
            shares = scores.gather(-1, ids)
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) * weights.scale
            return outputs[0], shares.to(outputs[1].dtype), ids

        return hook

    routers = body.reader.routers().items()
    handles = [router.register_forward_hook(force(n)) for n, router in routers if body.layers[n].mixture.weights.table is None]
    handles += rounded(body.model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
