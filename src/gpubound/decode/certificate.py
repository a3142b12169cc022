"""The decoder's certificate: its logits and tokens are compared with their definition before a caller gets the decoder.

logits   of a short random sequence, token by token through the kernels and once through the prefill, against the model's own
         forward and plain fp32: no further from fp32 than the model itself, within a margin. The sequence passes the edge of a
         sliding window of at most SHORT tokens, and not that of a longer one
experts  are compared separately. Where two experts' scores differ by rounding alone, a computation may choose either, and its
         logits differ completely. So logits are compared with fp32 at the computation's own choice (`RoutingTrace`), and the
         choice by how far the chosen scores are below the best
tokens   of graphs against the same kernels launched step by step, for the same rows together: equal, for every number of steps
a
         launch up to STEPS (ON_CPU). Speculative steps are compared with plain ones, where the same kernels compute both
cache    is filled with NaN first: positions beyond the live length are never read. A cache in 8 bits rounds, and a key near the
         middle of two codes may become either: fp32 rounds its keys and values, too, and ours may be further off by a fraction
         of the cost of that rounding

The fp32 reference also measures what rounded weights cost (`accuracy`), and finds the first layer with a NaN.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import GenerateError
from ..kernels.decode_product import capped_
from ..kernels.dispatch import compile_ahead
from ..layers.quantized_base import Base
from ..models import Decoder
from ..models.decoding import LayerWeights, Linear, Rounding, inputs_rounded, plain_linear, plain_norm
from ..models.llama.checkpoint import changed_below
from ..models.registry import switch
from ..trace import timed
from .request import Choice, Request, pad
from .runner import SamplingVariant, Stepper, config_value, own_forward, random_ids

if TYPE_CHECKING:
    from .generate import FastDecoder
    from .transformer import FusedRunner

PIECE = 512  # tokens that `accuracy` reads at a time, as separate texts


class RoutingTrace:
    """Experts chosen for the tokens of a sequence: `ids` (T, S) by layer, empty for dense layers."""

    def __init__(self) -> None:
        self.ids: dict[int, Tensor] = {}
        self._missed: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self.ids)

    def add(self, number: int, ids: Tensor) -> None:
        """Append the experts of the next tokens, (T, S)."""
        self.ids[number] = torch.cat([self.ids[number], ids]) if number in self.ids else ids.clone()

    def judged(self, number: int, scores: Tensor) -> Tensor:
        """Return the choice in layer `number`, (T, S) int64, and record how far it is below the best by scores (T, E)."""
        ids = self.ids[number].long().to(scores.device)
        chosen, best = scores.gather(-1, ids).sort(-1, descending=True).values, scores.topk(ids.shape[1]).values
        spread = scores.std(-1, correction=0).clamp_min(1e-30)  # 0 if the router is all zeros
        self._missed.append((best - chosen).mean(-1) / spread)
        return ids

    @property
    def missed(self) -> float:
        """Mean distance of the chosen scores from the best ones, in standard deviations of a token's scores."""
        return float(torch.cat([t.cpu() for t in self._missed]).mean()) if self._missed else 0.0


@contextmanager
def record_routing(routers: Mapping[int, Any]) -> Iterator[RoutingTrace]:
    """Record the choices of a model's routers in one forward within the context."""
    trace = RoutingTrace()

    def record(number: int, router: Any, inputs: Any, outputs: Any) -> None:
        if isinstance(outputs, tuple) and len(outputs) == 3:  # in some releases logits alone, or in another order
            trace.add(number, next(ids for ids in outputs if not ids.is_floating_point()))

    with ExitStack() as hooks:
        for number, router in routers.items():
            hooks.enter_context(router.register_forward_hook(partial(record, number)))
        yield trace


@torch.no_grad()
def reference_logits(model: Any, ids: Tensor, choices: RoutingTrace | None = None, rounded: Rounding = None) -> Tensor:
    """Return the fp32 logits (T, V) of one sequence (T,). Weights are converted individually.

    choices  experts to use instead of the router's
    rounded  function that rounds keys and values
    """
    *_, (_, result) = reference_stages(model, ids, choices, rounded)
    return result.to(ids.device)


def reference_stages(
    model: Any, ids: Tensor, choices: RoutingTrace | None = None, rounded: Rounding = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and output of every module, in order; the last are the logits."""
    shape, home = model.shape, model.embed.device
    kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer, of which later layers share some
    tables = {home: model.tables(ids.shape[0])}
    x = model.embed[ids.to(home)].float() * shape.embedded
    if model.positions is not None:
        x = x + model.positions[: len(ids)].float()
    before = x
    yield "model.embed_tokens", x
    inputs = None if model.layer_inputs is None else model.layer_inputs.define(ids.to(home), x)
    numbers, joined = itertools.count(), False
    for layer in model.layers:  # not by enumerate, which keeps the last one, in fp32, while the next one is made
        number = next(numbers)
        device = layer.attention.norms()[0].device  # the layer's; matrices in host memory are copied to it by parts
        x = x.to(device)
        if device not in tables:
            tables[device] = [(cos.to(device), sin.to(device)) for cos, sin in tables[home]]
        update = layer.attention.define(before if joined else x, tables[device], rounded, kept, number)
        before, x, joined = x, x + update, layer.attention.joined
        yield f"model.layers.{number}.self_attn", x
        x = x + layer.mlp.define(before if layer.mlp.parallel else x, number, choices)
        yield f"model.layers.{number}.mlp", x
        if layer.extra is not None and inputs is not None:
            x = x + layer.extra.define(x, inputs[:, number].to(device))
            yield f"model.layers.{number}.layer_input", x
        if layer.factor is not None:
            x = x * layer.factor.float()
        del layer
    x = plain_norm(x.to(home), model.norm)
    yield "model.norm", x
    logits = plain_linear(x, model.head)
    yield "lm_head", capped_(logits * shape.logit_scale, shape.logit_cap)


class ExactPart:
    """A part of a layer with the values that its rounded weights represent, while it is computed."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part.weights, name)

    def define(self, *arguments: Any) -> Tensor:
        return self._part.exact().define(*arguments)


class RoundedModel:
    """The values of a runner's rounded weights in fp32, layer by layer, with the attributes of a WeightView."""

    def __init__(self, body: "FusedRunner") -> None:
        live = body.live
        self.body, self.shape, self.embed, self.norm, self.positions = body, live.shape, live.embed, live.norm, live.positions
        self.layer_inputs = live.layer_inputs

    @property
    def layers(self) -> Iterator[LayerWeights]:
        for layer, live in zip(self.body.layers, self.body.live.layers):
            extra = None if layer.extra is None else ExactPart(layer.extra)
            yield live._replace(attention=ExactPart(layer.attention), mlp=ExactPart(layer.mlp), extra=extra)

    @property
    def head(self) -> Linear:
        return self.body.head.exact()[0]

    def tables(self, length: int) -> list[tuple[Tensor, Tensor]]:
        return self.body.live.tables(length)


def first_not_finite(model: Any, ids: Tensor) -> str:
    """Return the name of the module that first computes a NaN or infinity for a sequence."""
    with torch.no_grad():
        for name, value in reference_stages(model, ids):
            if not value.isfinite().all():
                return name
    return "none in fp32: the 16-bit range was left"


@dataclass(frozen=True)
class Accuracy:
    kind: str
    tokens: int  # whose next token was predicted
    kl_mean: float  # nats a token, of the rounded model's predictions from the original's
    kl_max: float
    same_best: float  # share of tokens where both would choose the same next one
    perplexity: float
    original_perplexity: float

    def __str__(self) -> str:
        return (
            f"over {self.tokens} tokens: KL {self.kl_mean:.1e} nats a token (at most {self.kl_max:.1e}), "
            f"{self.same_best:.1%} of the best tokens the same, "
            f"perplexity {self.perplexity:.4g} (the original's {self.original_perplexity:.4g})"
        )


@torch.no_grad()
def accuracy(body: Any, ids: Sequence[int] | Tensor) -> Accuracy:
    """Return the cost of rounding weights, or keys and values, on a text: the rounded model against the original.

    Both are computed in plain fp32, so that they differ by the rounding alone. The decoder's table shows the result.
    """
    ids = torch.as_tensor(ids, device=body.device).long()
    if ids.dim() != 1 or len(ids) < 2:
        raise ValueError(f"accuracy: ids: got {tuple(ids.shape)}, wanted the ids of one text of at least two tokens.")
    if int(ids.min()) < 0 or int(ids.max()) >= body.vocab:
        raise ValueError(
            f"accuracy: ids: got {int(ids.min())} to {int(ids.max())}, wanted them in the vocabulary of {body.vocab}."
        )
    exact = body.exact()
    pieces = [ids[start : start + PIECE + 1] for start in range(0, len(ids) - 1, PIECE)]
    rows = torch.cat([_compare(body, exact, piece) for piece in pieces])
    divergence, same, loss, original_loss = rows.double().unbind(1)
    body.measured = Accuracy(
        body.rounds,
        len(rows),
        divergence.mean().item(),
        divergence.max().item(),
        same.mean().item(),
        loss.mean().exp().item(),
        original_loss.mean().exp().item(),
    )
    return body.measured


def _compare(body: Any, exact: Any, ids: Tensor) -> Tensor:
    """Return (T - 1, 4): divergence, same best, and both losses of every next token."""
    original = reference_logits(body.live, ids[:-1]).log_softmax(-1)
    rounded = reference_logits(exact, ids[:-1], rounded=body.cache.rounded).log_softmax(-1)
    divergence = (original.exp() * (original - rounded)).sum(-1)
    losses = [-x.gather(-1, ids[1:, None])[:, 0] for x in (rounded, original)]
    return torch.stack([divergence, (original.argmax(-1) == rounded.argmax(-1)).float(), *losses], 1)


TOKENS = 8  # of the sequence whose logits are compared
SHORT = 64  # the longest window that the sequence is made longer for
STEPS = 12  # greedy tokens compared between graphs and single launches
ON_CPU = 2  # the same without a GPU, where a graph is its launches

# Limits of the relative distance of logits from fp32, in the norm. Ours: MARGIN times the model's own distance, with a floor
# for fp32, where both are rounding. The model's own distance has a limit, too: beyond it the reference is not this model's.
MARGIN = 1.5
FLOOR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LIMIT = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Products of packed levels round x to 16 bits of the largest of 16 or 32 columns: 2e-5 of normal numbers each, 2^8 times fp32's
# rounding and an eighth of fp16's. What a model makes of it is computed where ours are beyond these limits: two small layers of
# Llama 4e-5, four of Gemma 4, whose scores have no factor, 2e-4 (int8) and 4e-4 (int4).
# Limits of the distance of chosen experts' scores from the best. With 8 of 32 experts in 12 layers of random weights it is
# 5e-5 in bf16, ours and the model's; a choice whose last expert is always the next best would be 100 times as far.
MISSED = {torch.float32: 1e-5, torch.float16: 1e-4, torch.bfloat16: 1e-3}
MISSED_LIMIT = {dtype: 10 * floor for dtype, floor in MISSED.items()}
# A cache in 8 bits: the fraction of its rounding's cost that is allowed on top. Where ours and fp32's keys differ by d, one in
# s / d gets another code, where codes are s apart, which costs sqrt(12 d / s) of the rounding. For d of 1e-6, 1e-3 and 5e-3 of
# a key's spread, and s = 2e-2, that is 0.02, 0.8, and in bf16 as if both had been rounded separately: sqrt(2).
AGAIN = {torch.float32: 0.1, torch.float16: 1.0, torch.bfloat16: 1.5}
# That is a mean. Of 4,000 random models with 1,024 cached values, in fp32, 25 had one in another code; it cost 11 of them more
# than this, and one 0.61. So up to SEQUENCES sequences are tried: a fault shows in each of them.
SEQUENCES = 3


@dataclass(frozen=True)
class DecoderCertificate:
    tokens_compared: int
    logits_error: float | None  # of our kernels, relative to fp32; None where they were not compared
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
    config: Any = getattr(decoder.model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    window = config_value(text, "sliding_window") or 0  # as the model says, not as it was bound
    length = min(max(TOKENS, window + 4 if window <= SHORT else 0), decoder.max_length - 1)
    errors: tuple[float | None, ...] = (None, None, None)
    ready = _compile_step(decoder, body, min(length, TOKENS))
    if not quick and body.exact() is not None:
        with timed("comparison of logits with fp32"):
            errors = _compare_logits(decoder, body, length, ready)
    ready()
    body.poison()
    with timed("comparison of tokens by graphs with those by launches"):
        count = _compare_tokens(decoder, random_ids(body.vocab, length, body.device)[:TOKENS].tolist())
        if body.device.type == "cuda":
            torch.cuda.synchronize(body.device)
    ours, own, cached = errors
    return DecoderCertificate(count, ours, own, time.perf_counter() - begun, cached)


def _compile_step(decoder: "FastDecoder", body: Any, length: int) -> Callable[[], Any]:
    """Begin to compile the kernels of a row's step, token and prompt while others run. Return a function that waits for them.

    Only where no result of a kernel is an index for torch, as experts and pages are. The prompt has the certificate's length,
    which the gated activation's kernel depends on.
    """
    if not body.launches_alike:
        return lambda: None
    prompt, single = [0] * length, Stepper(body, decoder.slots)
    ids = torch.zeros(1, device=body.device, dtype=torch.int64)

    def step() -> None:
        _all_logits(body, ids, 1)
        _play(decoder, [prompt], 1, partial(single.run, 1, 1), single.tokens, 1, 1)

    with timed("names of a step's kernels"), body.fewer_layers():  # all 24 of 350m took 0.4 to 0.6 s, with a filled cache too
        return compile_ahead(step, body.device)


def _compare_logits(
    decoder: "FastDecoder", body: Any, length: int, ready: Callable[[], Any], number: int = 0
) -> tuple[float, float, float | None]:
    """Return the distances from fp32 of our logits, of the model's, and of fp32 with a cache in 8 bits."""
    ids = random_ids(body.vocab, length, body.device, number)
    exactly = switch((base, {"rounds_inputs": False}) for base in decoder.model.modules() if isinstance(base, Base))
    try:
        with record_routing(body.live.reader.routers()) as choices, own_forward(decoder.model):
            output = decoder.model(ids[None].to(body.live.original.device))
    finally:
        exactly()
    own = getattr(output, "logits", output)[0].float().to(ids.device)
    exact = body.exact()
    model_truth = reference_logits(body.live, ids, choices)
    own_missed = choices.missed  # before rounded weights and a rounded cache add theirs
    unrounded = model_truth if exact is body.live else reference_logits(exact, ids, choices)
    truth = unrounded if body.cache.kind is None else reference_logits(exact, ids, choices, body.cache.rounded)
    if not (truth.isfinite().all() and own.isfinite().all()):
        raise GenerateError(
            f"decoder: the model's logits are not finite; first seen in {body.locate(ids)}. Check the weights (a diverged "
            "training run?) and the dtype."
        )
    model_error = _distance(own, model_truth)
    with timed("wait for kernels"):
        ready()
    with timed(f"logits by the kernels, of {len(body.row_counts())} numbers of rows"):
        dtype, runs = body.live.dtype, [_all_logits(body, ids, rows) for rows in body.row_counts()]
    our_error = max(_distance(logits, _truth_of(body, ids, truth, chosen)) for logits, chosen in runs)
    missed = max(choice.missed for _, chosen in runs for choice in chosen)
    _check_choices(missed, own_missed, dtype)
    if not model_error <= LIMIT[dtype]:
        why = "it has an option the kernels do not know; pass fused=False."
        # A Decoder has no forward but its shape's, and fused=False would compute that as well.
        if isinstance(decoder.model, Decoder) and (changed := changed_below(decoder.model)):
            why = f"it is a Decoder {changed}, which its weights do not tell; undo it."
        raise GenerateError(
            f"decoder: the model's own logits are {model_error:.1e} from what a model of its shape computes in fp32 (limit "
            f"{LIMIT[dtype]:.0e}): {why}"
        )
    cached = None if body.cache.kind is None else _distance(truth, unrounded)
    limit = max(MARGIN * model_error, FLOOR[dtype]) + AGAIN[dtype] * (cached or 0.0)
    if our_error > limit and (exact is not body.live or body.live.coded):  # packed levels
        with inputs_rounded():
            limit += MARGIN * _distance(reference_logits(exact, ids, choices, body.cache.rounded), truth)
    if not our_error <= limit:
        if cached is not None and number + 1 < SEQUENCES:
            return _compare_logits(decoder, body, length, ready, number + 1)
        rounding = "" if cached is None else f" (and a cache in {body.cache.layout.kind} makes {cached:.1e})"
        raise GenerateError(
            f"decoder: the kernels' logits are {our_error:.1e} from fp32, the model's own only {model_error:.1e}{rounding}: "
            "they do not compute this model; pass fused=False, and report it."
        )
    return our_error, model_error, cached


def _truth_of(body: Any, ids: Tensor, truth: Tensor, chosen: list[RoutingTrace]) -> Tensor:
    """Return the fp32 logits for `_all_logits`: after each token, and after the last one again."""
    rounded = body.cache.rounded
    steps, prefilled = (reference_logits(body.exact(), ids, choices, rounded) if choices else truth for choices in chosen)
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
    """Return the logits of the last of `rows` equal rows, and the experts that were chosen.

    The logits are those after each token, and once more those after the last token, with the others prefilled.
    """
    body.poison()
    body.reserve([0] * (rows - 1) + [len(ids)])  # only this row's logits are read: the pages may not suffice for all rows
    with body.trace_routing() as stepped:
        logits = [_logits_after(body, ids, position, rows) for position in range(len(ids))]
    with body.trace_routing() as prefilled:
        if len(ids) > 1:
            body.poison()
            body.prefill(ids[:-1].expand(rows, -1), torch.full((rows,), len(ids) - 1, device=ids.device))
        logits.append(_logits_after(body, ids, len(ids) - 1, rows))
    return torch.stack(logits), [stepped, prefilled]


def _logits_after(body: Any, ids: Tensor, position: int, rows: int) -> Tensor:
    token, positions = (torch.full((rows,), value, device=ids.device, dtype=torch.int32) for value in (0, position))
    token.copy_(ids[position])
    body.begin(token)
    return body.step(token, positions)[-1].clone()


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
    steps = min(STEPS if body.device.type == "cuda" else ON_CPU, decoder.max_length - len(prompt))
    want = []
    for lane in body.lanes(rows):
        # All prompts are prefilled: for one alone, another kernel may compute other keys.
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
    """Return the tokens of the first `rows` prompts by launches of k steps, each of which brings at most `tokens` tokens."""
    body, longest = decoder.body, max(map(len, prompts))
    ids = pad([p[:-1] for p in prompts], max(1, longest - 1), body.device)
    lengths = torch.tensor([len(p) - 1 for p in prompts], device=body.device)
    decoder.begin(Request(prompts, steps, Choice()), ids, lengths, body.prefill)
    emitted = []
    for _ in range(steps // k):
        launch(SamplingVariant())
        emitted.append(decoder.slots.emitted[: k * tokens, :rows].clone())
    return [[token for token in row if token >= 0] for row in torch.cat(emitted).t().tolist()]
