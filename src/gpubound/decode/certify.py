"""The decoder's certificate: before it is handed out, its tokens and logits have been compared with what defines them.

logits   of a short random sequence, token by token through the kernels and once by way of the prefill, against the model's
         own forward and plain fp32: no further from fp32 than the model itself is, within a margin. A sliding window of at
         most SHORT tokens is passed; the edge of a longer one is not seen here
tokens   graphs against the same kernels launched one by one: equal, for every number of steps a launch up to STEPS.
         Speculative ones against plain steps, where the same kernels compute both
cache    filled with NaN before all of it: what lies beyond the live length is never read
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import GenerateError
from . import plain
from .fused import FusedBody
from .graphs import Way, run_steps
from .request import Choice, Request, pad

if TYPE_CHECKING:
    from .engine import FastDecoder

TOKENS = 8  # of the sequence whose logits are compared
SHORT = 64  # the longest window that the sequence is made longer for
STEPS = 12  # greedy tokens compared between graphs and single launches

# How far logits may lie from fp32, relative, in the norm. Ours: MARGIN times the model's own distance, and a floor for fp32
# where both are at rounding. The model's own distance has a limit too: beyond it the plain definition is not this model's.
MARGIN = 1.5
FLOOR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LIMIT = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Certificate:
    tokens_compared: int
    logits_error: float | None  # of our kernels, relative to fp32; None where it was not compared
    model_error: float | None  # of the model's own forward
    seconds: float

    def __str__(self) -> str:
        parts = [f"{self.tokens_compared} greedy tokens equal between graph and single launches"]
        if self.logits_error is not None:
            parts.append(f"logits {self.logits_error:.1e} from fp32 (the model's own forward {self.model_error:.1e})")
        return f"verified in {self.seconds:.2f} s: {'; '.join(parts)}; cache beyond the live length poisoned"


@torch.no_grad()
def certify(decoder: "FastDecoder", quick: bool = False) -> Certificate:
    begun = time.perf_counter()
    body = decoder.body
    config = getattr(decoder.model, "config", None)
    window = getattr(config, "sliding_window", None) or 0  # as the model says, not as it was bound
    length = min(max(TOKENS, window + 4 if window <= SHORT else 0), decoder.max_length - 1)
    ids = torch.randint(body.vocab, (length,), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    ours, own = None, None
    if isinstance(body, FusedBody):
        if not quick:
            ours, own = _compare_logits(decoder, body, ids.to(body.device))
        _poison(body)
    count = _compare_tokens(decoder, ids[:TOKENS].tolist())
    if body.device.type == "cuda":
        torch.cuda.synchronize(body.device)
    return Certificate(count, ours, own, time.perf_counter() - begun)


def _compare_logits(decoder: "FastDecoder", body: FusedBody, ids: Tensor) -> tuple[float, float]:
    truth = plain.logits(body.exact(), ids)
    model_truth = truth if body.exact() is body.original else plain.logits(body.original, ids)
    output = decoder.model(ids[None])
    own = getattr(output, "logits", output)[0].float()
    if not (truth.isfinite().all() and own.isfinite().all()):
        raise GenerateError(
            f"decoder: the model's logits are not finite; first seen in {body.locate(ids)}. Check the weights (a diverged "
            "training run?) and the dtype."
        )
    every = {1, body.max_batch} if not body.narrow(body.max_batch) else {1}  # wide batches have products of their own
    model_error = _distance(own, model_truth)
    our_error = max(_distance(_all_logits(body, ids, rows), torch.cat([truth, truth[-1:]])) for rows in every)
    dtype = body.live.dtype
    if not model_error <= LIMIT[dtype]:
        raise GenerateError(
            f"decoder: the model's own logits are {model_error:.1e} from what a model of its shape computes in fp32 (limit "
            f"{LIMIT[dtype]:.0e}): it has an option the kernels do not know; pass fused=False."
        )
    if not our_error <= max(MARGIN * model_error, FLOOR[dtype]):
        raise GenerateError(
            f"decoder: the kernels' logits are {our_error:.1e} from fp32, the model's own only {model_error:.1e}: they do not "
            "compute this model; pass fused=False, and report it."
        )
    return our_error, model_error


def _distance(x: Tensor, truth: Tensor) -> float:
    return ((x - truth).norm() / truth.norm()).item()


def _all_logits(body: FusedBody, ids: Tensor, rows: int) -> Tensor:
    """Of the last of `rows` equal rows, after each token; then after the last one again, the others prefilled."""
    _poison(body)
    found = [_logits_after(body, ids, place, rows) for place in range(len(ids))]
    if len(ids) > 1:
        _poison(body)
        body.prefill(ids[:-1].expand(rows, -1), torch.full((rows,), len(ids) - 1, device=ids.device))
    return torch.stack([*found, _logits_after(body, ids, len(ids) - 1, rows)])


def _logits_after(body: FusedBody, ids: Tensor, place: int, rows: int) -> Tensor:
    token, position = (torch.full((rows,), value, device=ids.device, dtype=torch.int32) for value in (0, place))
    token.copy_(ids[place])
    body.begin(token)
    return body.step(token, position)[-1].clone()


def _poison(body: FusedBody) -> None:
    body.k_cache.fill_(float("nan"))
    body.v_cache.fill_(float("nan"))


def _compare_tokens(decoder: "FastDecoder", prompt: list[int]) -> int:
    """Greedy tokens of a ragged batch by single launches, then by graphs of every size that fits."""
    slots, body, speculator = decoder.slots, decoder.body, decoder.speculator
    rows = min(2, decoder.max_batch)
    singly: Callable[[int, int, Way], None] = partial(run_steps, body, slots)
    lines = 1  # of the block, that a step of it fills
    if speculator:
        rows = rows if speculator.exact(rows) else 1
        singly, lines = (singly, 1) if speculator.exact(rows) else (speculator.run, decoder.width)
    prompts = [prompt, prompt[: max(1, len(prompt) // 2)]][:rows]
    steps = min(STEPS, decoder.max_length - len(prompt))
    request = Request(prompts, steps, Choice())
    ids = pad([p[:-1] for p in prompts], max(1, len(prompt) - 1), body.device)
    lengths = torch.tensor([len(p) - 1 for p in prompts], device=body.device)

    def restart() -> None:
        slots.fill(request, rows, decoder.max_length)
        body.prefill(ids, lengths)
        body.begin(slots.rows.token[:rows])
        if speculator:
            speculator.prefill(ids, lengths)

    def play(launch: Callable[[int, int, Way], None], k: int, lines: int) -> list[list[int]]:
        """The tokens of each row."""
        restart()
        found = []
        for _ in range(steps // k):
            launch(rows, k, Way())
            found.append(slots.emitted(range(k * lines), rows).clone())
        return [[token for token in row if token >= 0] for row in torch.cat(found).t().tolist()]

    want = play(singly, 1, lines)
    for k in (k for k in decoder.ladder if k <= steps):
        got = play(decoder.graphs.launch, k, decoder.width)
        if any(len(row) < steps // k * k or row != full[: len(row)] for row, full in zip(got, want)):
            raise GenerateError(
                f"decoder: greedy tokens of a graph of {k} steps are not those of single launches: {got}, wanted {want}; "
                "please report it with the model's config."
            )
    return steps * rows
