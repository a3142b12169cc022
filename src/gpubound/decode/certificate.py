"""The decoder's certificate: before it is handed out, its tokens and logits have been compared with what defines them.

logits   of a short random sequence, token by token through the kernels and once by way of the prefill, against the model's
         own forward and plain fp32: no further from fp32 than the model itself is, within a margin. A sliding window of at
         most SHORT tokens is passed; the edge of a longer one is not seen here
choices  of experts, where there are any, by themselves (reference.py); logits are compared with fp32 at the same choice
tokens   graphs against the same kernels launched one by one, for the same rows together: equal, for every number of steps a
         launch up to STEPS. Speculative ones against plain steps, where the same kernels compute both
cache    filled with NaN before all of it: what lies beyond the live length is never read. One in 8 bits rounds, and a key that
         lies near the middle of two codes may become either: fp32 rounds its keys and values alike, and ours may lie as much
         further off as a share of what that rounding costs
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import GenerateError
from ..models import Decoder
from ..models.llama.checkpoint import changed_below
from . import reference
from .reference import RoutingTrace, record_routing
from .request import Choice, Request, pad
from .runner import config_value, own_forward
from .step_graphs import SamplingVariant, Stepper

if TYPE_CHECKING:
    from .generate import FastDecoder

TOKENS = 8  # of the sequence whose logits are compared
SHORT = 64  # the longest window that the sequence is made longer for
STEPS = 12  # greedy tokens compared between graphs and single launches

# How far logits may lie from fp32, relative, in the norm. Ours: MARGIN times the model's own distance, and a floor for fp32
# where both are at rounding. The model's own distance has a limit too: beyond it the plain definition is not this model's.
MARGIN = 1.5
FLOOR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LIMIT = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# The same for how far the scores of chosen experts lie below the best ones. With 8 of 32 experts in 12 layers of random weights
# they are 5e-5 in bf16, ours and the model's; a choice whose last expert is always the next best would lie 100 times as far.
MISSED = {torch.float32: 1e-5, torch.float16: 1e-4, torch.bfloat16: 1e-3}
MISSED_LIMIT = {dtype: 10 * floor for dtype, floor in MISSED.items()}
# A cache in 8 bits: the share of its rounding's cost that may come on top. Where ours and fp32's keys differ by d, one in s / d
# gets another code, of those that lie s apart, which costs sqrt(12 d / s) of the rounding. For d of 1e-6, 1e-3 and 5e-3 of a
# key's spread, and s = 2e-2, that is 0.02, 0.8, and in bf16 as if both had been rounded apart: sqrt(2).
AGAIN = {torch.float32: 0.1, torch.float16: 1.0, torch.bfloat16: 1.5}
# That is a mean. Of 4,000 random models with 1,024 cached numbers, in fp32, 25 had one in another code; 11 of them paid more
# than this for it, and one 0.61. So another sequence has its turn: a fault shows in each of them.
SEQUENCES = 3


@dataclass(frozen=True)
class DecoderCertificate:
    tokens_compared: int
    logits_error: float | None  # of our kernels, relative to fp32; None where it was not compared
    model_error: float | None  # of the model's own forward
    seconds: float
    cache_error: float | None = None  # of plain fp32 when a cache in 8 bits rounds its keys and values

    def __str__(self) -> str:
        parts = [f"{self.tokens_compared} greedy tokens equal between graph and single launches"]
        if self.logits_error is not None:
            rounded = "" if self.cache_error is None else f", over a cache that alone makes {self.cache_error:.1e}"
            parts.append(f"logits {self.logits_error:.1e} from fp32 (the model's own forward {self.model_error:.1e}){rounded}")
        return f"verified in {self.seconds:.2f} s: {'; '.join(parts)}; cache beyond the live length poisoned"


@torch.no_grad()
def certify(decoder: "FastDecoder", quick: bool = False) -> DecoderCertificate:
    begun = time.perf_counter()
    body = decoder.body
    config = getattr(decoder.model, "config", None)
    window = config_value(config, "sliding_window") or 0  # as the model says, not as it was bound
    length = min(max(TOKENS, window + 4 if window <= SHORT else 0), decoder.max_length - 1)
    errors: tuple[float | None, ...] = (None, None, None)
    if not quick and body.exact() is not None:
        errors = _compare_logits(decoder, body, length)
    body.poison()
    count = _compare_tokens(decoder, _sequence(body, length)[:TOKENS].tolist())
    if body.device.type == "cuda":
        torch.cuda.synchronize(body.device)
    ours, own, cached = errors
    return DecoderCertificate(count, ours, own, time.perf_counter() - begun, cached)


def _sequence(body: Any, length: int, number: int = 0) -> Tensor:
    return torch.randint(body.vocab, (length,), generator=torch.Generator("cpu").manual_seed(number), device="cpu")


def _compare_logits(decoder: "FastDecoder", body: Any, length: int, number: int = 0) -> tuple[float, float, float | None]:
    """How far from fp32 ours are, the model's own, and what a cache in 8 bits makes of fp32."""
    ids = _sequence(body, length, number).to(body.device)
    with record_routing(body.live.reader.routers()) as choices, own_forward(decoder.model):
        output = decoder.model(ids[None].to(body.live.device))
    own = getattr(output, "logits", output)[0].float().to(ids.device)
    exact = body.exact()
    model_truth = reference.logits(body.live, ids, choices)
    own_missed = choices.missed  # before rounded weights and a rounded cache have judged them too
    whole = model_truth if exact is body.live else reference.logits(exact, ids, choices)
    truth = whole if body.cache.kind is None else reference.logits(exact, ids, choices, body.cache.rounded)
    if not (truth.isfinite().all() and own.isfinite().all()):
        raise GenerateError(
            f"decoder: the model's logits are not finite; first seen in {body.locate(ids)}. Check the weights (a diverged "
            "training run?) and the dtype."
        )
    model_error = _distance(own, model_truth)
    dtype, ways = body.live.dtype, [_all_logits(body, ids, rows) for rows in body.ways()]
    our_error = max(_distance(logits, _truth_of(body, ids, truth, chosen)) for logits, chosen in ways)
    missed = max(choice.missed for _, chosen in ways for choice in chosen)
    _check_choices(missed, own_missed, dtype)
    if not model_error <= LIMIT[dtype]:
        raise GenerateError(
            f"decoder: the model's own logits are {model_error:.1e} from what a model of its shape computes in fp32 (limit "
            f"{LIMIT[dtype]:.0e}): {_not_of_its_shape(decoder.model)}"
        )
    cached = None if body.cache.kind is None else _distance(truth, whole)
    if not our_error <= max(MARGIN * model_error, FLOOR[dtype]) + AGAIN[dtype] * (cached or 0.0):
        if cached is not None and number + 1 < SEQUENCES:
            return _compare_logits(decoder, body, length, number + 1)
        beside = "" if cached is None else f" (and a cache in {body.cache.layout.kind} makes {cached:.1e})"
        raise GenerateError(
            f"decoder: the kernels' logits are {our_error:.1e} from fp32, the model's own only {model_error:.1e}{beside}: they "
            "do not compute this model; pass fused=False, and report it."
        )
    return our_error, model_error, cached


def _not_of_its_shape(model: Any) -> str:
    """Why a model's own forward may be another, and what to do. A Decoder has no forward but the one its shape says, and
    fused=False would compute by that as well."""
    if isinstance(model, Decoder) and (changed := changed_below(model)):
        return f"it is a Decoder {changed}, which its weights do not tell; undo it."
    return "it has an option the kernels do not know; pass fused=False."


def _truth_of(body: Any, ids: Tensor, truth: Tensor, chosen: list[RoutingTrace]) -> Tensor:
    """What `_all_logits` approaches: after each token, and after the last one again."""
    rounded = body.cache.rounded
    steps, prefilled = (reference.logits(body.exact(), ids, choices, rounded) if choices else truth for choices in chosen)
    return torch.cat([steps, prefilled[-1:]])


def _check_choices(ours: float, own: float, dtype: torch.dtype) -> None:
    if not own <= MISSED_LIMIT[dtype]:
        raise GenerateError(
            f"decoder: the model's own routers choose experts whose scores lie {own:.1e} deviations below the best in fp32 "
            f"(limit {MISSED_LIMIT[dtype]:.0e}): it has an option the kernels do not know; pass fused=False."
        )
    if not ours <= max(MARGIN * own, MISSED[dtype]):
        raise GenerateError(
            f"decoder: the kernels choose experts whose scores lie {ours:.1e} deviations below the best in fp32, the model "
            f"itself only {own:.1e}: they do not compute this model; pass fused=False, and report it."
        )


def _distance(x: Tensor, truth: Tensor) -> float:
    return ((x - truth).norm() / truth.norm()).item()


def _all_logits(body: Any, ids: Tensor, rows: int) -> tuple[Tensor, list[RoutingTrace]]:
    """Of the last of `rows` equal rows, after each token; then after the last one again, the others prefilled. And the experts
    that were chosen on either way."""
    body.poison()
    limits = torch.zeros(rows, device=ids.device, dtype=torch.int32)
    limits[-1] = len(ids)  # whose logits are read: there may not be pages for all of them
    body.reserve(limits)
    with body.trace_routing() as singly:
        found = [_logits_after(body, ids, place, rows) for place in range(len(ids))]
    with body.trace_routing() as prefilled:
        if len(ids) > 1:
            body.poison()
            body.prefill(ids[:-1].expand(rows, -1), torch.full((rows,), len(ids) - 1, device=ids.device))
        found.append(_logits_after(body, ids, len(ids) - 1, rows))
    return torch.stack(found), [singly, prefilled]


def _logits_after(body: Any, ids: Tensor, place: int, rows: int) -> Tensor:
    token, position = (torch.full((rows,), value, device=ids.device, dtype=torch.int32) for value in (0, place))
    token.copy_(ids[place])
    body.begin(token)
    return body.step(token, position)[-1].clone()


def _compare_tokens(decoder: "FastDecoder", prompt: list[int]) -> int:
    """Compare the greedy tokens of a ragged batch by single launches with those of graphs of every size; return their number.

    Single launches take the rows of one lane (`ModelRunner.lanes`) at a time, as graphs do: two rows of a model in bf16 use
    tensor cores and one row does not, so close logits could change places.
    """
    body, stepper = decoder.body, decoder.stepper
    rows = min(2, decoder.max_batch)
    rows = rows if stepper.exact(rows) else 1
    single = Stepper(body, decoder.slots) if stepper.exact(rows) else stepper
    prompts = [prompt, prompt[: max(1, len(prompt) // 2)]][:rows]
    steps = min(STEPS, decoder.max_length - len(prompt))
    want = []
    for lane in body.lanes(rows):
        # The others stand behind it: a prompt alone may be a product of another kernel than two, and leave other keys.
        order = [*prompts[lane.start :], *prompts[: lane.start]]
        want += _play(decoder, order, steps, partial(single.run, len(lane), 1), single.tokens, len(lane), 1)
    for k in (k for k in decoder.ladder if k <= steps):
        got = _play(decoder, prompts, steps, partial(decoder.graphs.launch, rows, k), stepper.tokens, rows, k)
        if any(len(row) < steps // k * k or row != full[: len(row)] for row, full in zip(got, want)):
            raise GenerateError(
                f"decoder: greedy tokens of a graph of {k} steps are not those of single launches: {got}, wanted {want}; "
                "please report it with the model's config."
            )
    return steps * rows


def _play(
    decoder: "FastDecoder",
    prompts: list[list[int]],
    steps: int,
    launch: Callable[[SamplingVariant], None],
    tokens: int,
    rows: int,
    k: int,
) -> list[list[int]]:
    """The tokens of the first `rows` of these prompts by launches of k steps, each of which brings so many tokens at most."""
    body, longest = decoder.body, max(map(len, prompts))
    ids = pad([p[:-1] for p in prompts], max(1, longest - 1), body.device)
    lengths = torch.tensor([len(p) - 1 for p in prompts], device=body.device)
    decoder.begin(Request(prompts, steps, Choice()), ids, lengths, body.prefill)
    found = []
    for _ in range(steps // k):
        launch(SamplingVariant())
        found.append(decoder.slots.emitted[: k * tokens, :rows].clone())
    return [[token for token in row if token >= 0] for row in torch.cat(found).t().tolist()]
