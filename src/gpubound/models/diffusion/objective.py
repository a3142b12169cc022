"""Objectives of diffusion: of masked tokens, and of noise in continuous data with its sampler.

Masked diffusion (LLaDA, Nie et al. 2025): tokens are masked at random, and the model predicts them.

A row gets a rate t, uniform in (0, 1]. Each of its L tokens with a label is replaced by the mask token with probability t,
independently. The loss is the cross-entropy of the masked tokens, times 1 / t, over L. Its mean is an upper bound of a token's
negative log-likelihood:

    -log p(row) <= E over t and masks of (1 / t) · Σ over masked i of -log p(token i | the row with its masks)

Labels are not shifted: the label of a position is its token, and the model must attend in both directions. Tokens with the
label -100, such as the prompts of chats, are never masked.

Diffusion of continuous data, such as embeddings: at time t, from 0 (clean) to 1 (noise), x = √ᾱ · x0 + √(1 - ᾱ) · ε with ε
normal and ᾱ = alpha_bar(t). A model, called as `model(x, time=t)`, predicts one of three targets, from each of which x0 and ε
follow:

    eps   ε
    x0    x0
    v     √ᾱ · ε - √(1 - ᾱ) · x0

In training each row gets a time, uniform in (0, 1]. The loss is the squared error, weighted by min-SNR: an error of x0 is
weighted by its row's ratio of signal to noise, but by at most `most_snr`. Times and ᾱ have one value per row of x, in fp32.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...data import Tokenizer
from ...decode.request import check_count
from ...graph import Captured, capture
from ...layers.embedding_and_head import head_of
from ...train.objectives import Objective
from ...train.objectives.chunked_head import IGNORE
from ...train.objectives.word_loss import WordLoss
from ..language_model import first_row, logits_of
from ..registry import mode

MODES = ("auto", "require", "off")  # of `graph`
MOST = 8  # shapes whose buffers and graph are cached
TARGETS = ("eps", "v", "x0")
OFFSET = 0.008  # a lower bound of the noise near t = 0 (Nichol and Dhariwal 2021)
LEAST = 1e-5  # ᾱ at t = 1, whose root is a divisor in the formula of x0


def check_target(caller: str, target: str) -> None:
    if target not in TARGETS:
        raise ValueError(f"{caller}: target: got {target!r}, wanted one of {', '.join(TARGETS)}.")


def spread_times(rows: int, least: float, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Return a time in (least, 1] for each row: evenly spaced, and rotated by one random number.

    Each time is uniform, and together they cover the range evenly, which lowers the variance of the batch's mean.
    """
    positions = torch.arange(rows, device=device, dtype=torch.float32) / rows
    return 1 - (1 - least) * ((positions + torch.rand(1, device=device, generator=generator, dtype=torch.float32)) % 1)


def alpha_bar(t: Tensor) -> Tensor:
    """Return ᾱ of the cosine schedule: cos²((t + s) / (1 + s) · π / 2), 1 at t = 0."""
    angle, first = (t.float() + OFFSET) / (1 + OFFSET), OFFSET / (1 + OFFSET)
    return ((angle * (math.pi / 2)).cos() / math.cos(first * math.pi / 2)).square().clamp(LEAST, 1.0)


def noise_share(t: Tensor) -> Tensor:
    """Return 1 - ᾱ at time t. Subtracting ᾱ from 1 in fp32 would leave few digits near t = 0.

    With a = (t + s) / (1 + s) · π / 2 and a0 its value at 0: 1 - cos²a / cos²a0 = sin(a - a0) · sin(a + a0) / cos²a0.
    """
    turn = t.float() / (1 + OFFSET) * (math.pi / 2)
    first = OFFSET / (1 + OFFSET) * math.pi / 2
    return (turn.sin() * (turn + 2 * first).sin() / math.cos(first) ** 2).clamp(0.0, 1.0 - LEAST)


def roots(alpha_bar_B: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return √ᾱ and √(1 - ᾱ) of each row, in at least fp32, in a shape that broadcasts over `like`."""
    rows = alpha_bar_B.to(torch.promote_types(like.dtype, torch.float32)).view(-1, *[1] * (like.dim() - 1))
    return rows.sqrt(), (1 - rows).sqrt()


def noised(x0: Tensor, noise: Tensor, alpha_bar_B: Tensor) -> Tensor:
    signal, sigma = roots(alpha_bar_B, x0)
    return signal * x0 + sigma * noise


def target_of(target: str, x0: Tensor, noise: Tensor, alpha_bar_B: Tensor) -> Tensor:
    """Return the target of the model's prediction."""
    if target == "v":
        signal, sigma = roots(alpha_bar_B, x0)
        return signal * noise - sigma * x0
    return noise if target == "eps" else x0


def min_snr(target: str, alpha_bar_B: Tensor, most: float, noise_B: Tensor | None = None) -> Tensor:
    """Return the weight of each row's squared error: that of an error in x0, ᾱ / (1 - ᾱ), but no more than `most` (min-SNR,
    Hang et al. 2023), in units of the target. So the three targets have one loss.

    noise_B: 1 - ᾱ with more digits (noise_share), for a large `most`
    """
    signal, noise = alpha_bar_B, 1 - alpha_bar_B if noise_B is None else noise_B
    # an error of ε is the ratio's root times one of x0, one of v 1 / √(1 - ᾱ)
    capped = torch.minimum(signal, most * noise)
    return capped / {"eps": signal, "v": torch.ones_like(noise), "x0": noise.clamp_min(torch.finfo(noise.dtype).tiny)}[target]


def parts_of(target: str, x: Tensor, predicted: Tensor, alpha_bar_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return x0 and ε that follow from a prediction for x."""
    signal, sigma = roots(alpha_bar_B, x)
    if target == "eps":
        return (x - sigma * predicted) / signal, predicted
    if target == "v":
        return signal * x - sigma * predicted, sigma * x + signal * predicted
    return predicted, (x - signal * predicted) / sigma.clamp_min(math.sqrt(LEAST))


def ddim_step(target: str, x: Tensor, predicted: Tensor, now_B: Tensor, next_B: Tensor) -> Tensor:
    """Return x at the ᾱ `next_B`, from x and its prediction at `now_B`: the same x0 and ε (DDIM, Song et al. 2020)."""
    x0, noise = parts_of(target, x, predicted, now_B)
    return noised(x0, noise, next_B)


NOISE_SEED = 0x5EED  # of the times and the noise in validation


@dataclass(eq=False)
class NoisePrediction(Objective):
    """Objective of a denoiser. A batch is a clean tensor (B, ...), or a dict with it as x and the model's other arguments."""

    target: str = "eps"  # or v, or x0
    most_snr: float = 5.0  # the largest weight of an error in x0
    levels: int = 8  # times per row in validation

    of_corpus: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_target("noise_prediction", self.target)
        if not 0 < self.most_snr < float("inf"):
            raise ValueError(f"noise_prediction: most_snr: got {self.most_snr!r}, wanted a finite number above 0.")
        if not isinstance(self.levels, int) or self.levels < 1:
            raise ValueError(f"noise_prediction: levels: got {self.levels!r}, wanted a whole number of at least 1.")

    def __call__(self, model: Any, batch: Any, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x0, others = _split(batch)
        total = self._error(model, x0, others, spread_times(len(x0), 0.0, x0.device), torch.randn_like(x0))
        return total if scale is None else total * scale, torch.full((), x0.numel(), device=x0.device)

    @torch.no_grad()
    def validate(self, model: Any, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean weighted error, at times that cover the range evenly, with noise from a fixed seed."""
        totals, count, generator = [], 0, None
        for batch in batches:
            x0, others = _split(batch)
            generator = generator or torch.Generator(x0.device).manual_seed(NOISE_SEED)
            for _ in range(self.levels):
                times = spread_times(len(x0), 0.0, x0.device, generator)
                noise = torch.randn(x0.shape, device=x0.device, dtype=x0.dtype, generator=generator)
                totals.append(self._error(model, x0, others, times, noise))
                count += x0.numel()
        return {"held_out": (torch.stack(totals).double().sum() / count).item()}

    def _error(self, model: Any, x0: Tensor, others: dict[str, Any], times: Tensor, noise: Tensor) -> Tensor:
        """Return Σ weight · (prediction - target)², in at least fp32."""
        share = alpha_bar(times)
        x = noised(x0, noise, share)
        predicted, target = model(x.to(x0.dtype), time=times, **others), target_of(self.target, x0, noise, share)
        if predicted.shape != target.shape:
            raise ValueError(
                f"noise_prediction: {type(model).__name__} predicts {tuple(predicted.shape)} for x {tuple(target.shape)}; it "
                f"must give one value for each of x's."
            )
        weights = min_snr(self.target, share, self.most_snr, noise_share(times))
        return (weights * (predicted.to(x.dtype) - target.to(x.dtype)).square().flatten(1).sum(1)).sum()


def _split(batch: Any) -> tuple[Tensor, dict[str, Any]]:
    arguments = batch if isinstance(batch, Mapping) else {"x": batch}
    x0 = arguments.get("x")
    if not isinstance(x0, Tensor) or not x0.is_floating_point() or x0.dim() < 2:
        got = f"{x0.dtype} {tuple(x0.shape)}" if isinstance(x0, Tensor) else f"a {type(x0).__name__}"
        raise ValueError(f"noise_prediction: x must be a floating-point tensor (B, ...) of clean rows, got {got}.")
    return x0, {key: value for key, value in arguments.items() if key != "x"}


class NoiseSampler:
    """Draw data from `model(x, time=t)` by DDIM, with the model's current weights.

    A step reads its number from the device, so that it is captured once per shape; the host reads nothing between steps.

    target   what the model predicts: eps, v or x0
    graph    "auto": the step is captured on a GPU. "require": captured, or GraphError. "off": called
    """

    def __init__(self, model: nn.Module, target: str = "eps", graph: str = "auto") -> None:
        check_target("NoiseSampler", target)
        if graph not in MODES:
            raise ValueError(f"NoiseSampler: graph: got {graph!r}, wanted one of {', '.join(MODES)}.")
        self.model, self.target, self.graph = model, target, graph
        self._loops: dict[tuple, DdimLoop] = {}

    @torch.no_grad()
    def generate(self, noise: Tensor, steps: int = 50, **others: Any) -> Tensor:
        """Return data from normal `noise` (B, ...) in `steps` steps, from t = 1 to 0. `others` are arguments of the model."""
        check_count("steps", steps)
        if not noise.is_floating_point() or noise.dim() < 2:
            raise ValueError(
                f"generate: noise: got {noise.dtype} {tuple(noise.shape)}, wanted a floating-point tensor (B, ...)."
            )
        with mode(self.model, training=False):
            if self.graph == "off" or (self.graph == "auto" and not noise.is_cuda):
                loop = DdimLoop(self, noise, steps, others)
                for _ in range(steps):
                    loop.step()
                return loop.x.to(noise.dtype)
            return self._captured(noise, steps, others)

    def _captured(self, noise: Tensor, steps: int, others: dict[str, Any]) -> Tensor:
        arguments = [(name, value.data_ptr() if isinstance(value, Tensor) else value) for name, value in others.items()]
        key = (tuple(noise.shape), noise.dtype, noise.device, steps, tuple(arguments))
        if key not in self._loops:
            if len(self._loops) == MOST:
                del self._loops[next(iter(self._loops))]
            self._loops[key] = DdimLoop(self, noise, steps, others)
        loop = self._loops[key]
        loop.begin(noise)
        loop.graph = loop.graph or capture(loop.step, state=[self.model, loop.x, loop.number, loop.times])
        for _ in range(steps):
            loop.graph()
        return loop.x.to(noise.dtype, copy=True)


class DdimLoop:
    """Data between noise and the result, and one step."""

    def __init__(self, sampler: NoiseSampler, noise: Tensor, steps: int, others: dict[str, Any]) -> None:
        self.sampler, self.steps, self.others, self.dtype = sampler, steps, others, noise.dtype
        self.times = torch.linspace(1, 0, steps + 1, device=noise.device, dtype=torch.float32)
        self.number = torch.zeros(1, device=noise.device, dtype=torch.int64)
        self.x = noise.to(torch.promote_types(noise.dtype, torch.float32), copy=True)
        self.graph: Captured | None = None

    def begin(self, noise: Tensor) -> None:
        self.x.copy_(noise)
        self.number.zero_()

    @torch.no_grad()
    def step(self) -> None:
        at = self.number.clamp(max=self.steps - 1)  # a capture's warm-up steps go beyond the last
        now, later = (self.times[index].expand(len(self.x)) for index in (at, at + 1))
        predicted = self.sampler.model(self.x.to(self.dtype), time=now, **self.others).to(self.x.dtype)
        self.x.copy_(ddim_step(self.sampler.target, self.x, predicted, alpha_bar(now), alpha_bar(later)))
        self.number.add_(1)


SEED = 0x5EED  # of the masks in validation, the same for every run and evaluation


@dataclass(eq=False)
class MaskedDiffusion(WordLoss):
    """Objective of a masked diffusion model.

    A batch is a dict: input_ids, labels (the token's id, or -100 for a token that is never masked), and other arguments of the
    model. A model with config.time also gets t of each row.
    """

    mask_token: int | None = None  # id; None: a run uses its tokenizer's, and adds one if it has none
    least: float = 1e-3  # lower bound of t: near 0 the weight 1 / t of a rarely masked token has no finite variance
    levels: int = 8  # masks per row in validation

    name: ClassVar[str] = "masked_diffusion"
    labels: ClassVar[str] = "own"
    weighted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.least < 1:
            raise ValueError(f"masked_diffusion: least: got {self.least!r}, wanted a rate from 0 up to, not including, 1.")
        if not isinstance(self.levels, int) or self.levels < 1:
            raise ValueError(f"masked_diffusion: levels: got {self.levels!r}, wanted a whole number of at least 1.")

    def extended(self, tokenizer: Tokenizer) -> Tokenizer:
        masking = tokenizer.with_mask(self.mask_token)
        self.mask_token = masking.mask
        return masking

    def __call__(self, model: Any, batch: Mapping[str, Any], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.prepare(model, batch)
        inputs, labels = self.split(batch)
        rate_B = spread_times(len(labels), self.least, labels.device)
        masked = (labels != IGNORE) & (torch.rand(labels.shape, device=labels.device, dtype=torch.float32) < rate_B[:, None])
        return self._masked_loss(model, inputs, labels, masked, rate_B, scale), (labels != IGNORE).sum()

    @torch.no_grad()
    def validate(self, model: Any, batches: Iterable[Any]) -> dict[str, float]:
        """Return the bound in nats per token, and as a perplexity.

        Each row is masked `levels` times: exactly k of its L tokens with a label, k spread evenly over 1 to L, with the weight
        L / k. It is the same bound, with less variance and without a lower bound of the rate.
        """
        totals, counts, generator = [], [], None
        for batch in batches:
            self.prepare(model, batch)
            inputs, labels = self.split(batch)
            generator = generator or torch.Generator(labels.device).manual_seed(SEED)
            for level in range(self.levels):
                masked, share_B = spread_masks(labels != IGNORE, level, self.levels, generator)
                totals.append(self._masked_loss(model, inputs, labels, masked, share_B, None))
                counts.append((labels != IGNORE).sum())
        bound = (torch.stack(totals).double().sum() / torch.stack(counts).sum()).item()
        return {"held_out": bound, "perplexity": math.exp(min(bound, 700.0))}

    def _masked_loss(
        self, model: Any, inputs: dict[str, Any], labels: Tensor, masked: Tensor, rate_B: Tensor, scale: Tensor | None
    ) -> Tensor:
        """Return the sum of the masked tokens' losses, each divided by its row's rate."""
        assert self.mask_token is not None  # by `check`
        ids = inputs["input_ids"].masked_fill(masked, self.mask_token)
        weights = rate_B.reciprocal()[:, None].expand(labels.shape)
        inputs = inputs | time_argument(model, rate_B) | {"input_ids": ids}
        return self.total(model, inputs, labels.masked_fill(~masked, IGNORE), scale, weights)

    def trial(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        ids = inputs["input_ids"]
        return inputs | time_argument(model, torch.full(ids.shape[:1], 0.5, device=ids.device, dtype=torch.float32))

    def check(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> None:
        ids, head = inputs["input_ids"], head_of(model)
        if self.mask_token is None:
            raise ValueError(
                "masked_diffusion: mask_token: got None, wanted the id of the token that hides another; give it, as in "
                "MaskedDiffusion(mask_token=tokenizer.with_mask().mask)."
            )
        words = getattr(head, "out_features", None)
        if self.mask_token < 0 or (words is not None and self.mask_token >= words):
            raise ValueError(
                f"masked_diffusion: mask_token: got {self.mask_token}, but {type(model).__name__} has the ids 0 to "
                f"{(words or 0) - 1}; make the model one token larger, or name a token that no text holds."
            )
        if ((labels != IGNORE) & (labels != ids)).any():
            raise ValueError(
                "masked_diffusion: labels must be the tokens in their own places, or -100, got others; give input_ids as the "
                "labels, unshifted (of a Corpus: labels='own')."
            )
        if is_causal(model, inputs, self.mask_token):
            raise ValueError(
                f"masked_diffusion: {type(model).__name__} is causal, but a masked token must attend to later ones; train "
                f"one with causal=False, such as diffusion-tiny."
            )


def spread_masks(counts: Tensor, level: int, levels: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a mask of some tokens of `counts` (B, T), and their share of each row (B,), in one of `levels` parts of (0, 1]."""
    rows = torch.arange(len(counts), device=counts.device)
    share = (level + (rows + 0.5) / len(counts)) / levels
    number = counts.sum(1)
    k = (share * number).ceil().clamp(min=1)
    place = torch.rand(counts.shape, device=counts.device, generator=generator, dtype=torch.float32).masked_fill(~counts, 2.0)
    rank = place.argsort(1).argsort(1)
    return (rank < k[:, None]) & counts, k / number.clamp(min=1)


@torch.no_grad()
def is_causal(model: Any, inputs: dict[str, Any], other: int) -> bool:
    """Return config.causal, or compute it: a causal model's first logits do not change with the later tokens.

    other  a token id to replace later tokens by. Synchronises with the device.
    """
    declared = getattr(getattr(model, "config", None), "causal", None)
    row = first_row(inputs)
    if isinstance(declared, bool) or row["input_ids"].shape[1] < 2:
        return declared is True
    changed = row["input_ids"].clone()
    changed[:, 1:] = torch.where(changed[:, 1:] == other, 0, other)
    with mode(model, training=False):
        one, two = logits_of(model, row), logits_of(model, row | {"input_ids": changed})
    return torch.equal(one[:, 0], two[:, 0])


def time_argument(model: Any, time_B: Tensor) -> dict[str, Tensor]:
    """Return the keyword argument with the diffusion time of each row; empty if the model takes none."""
    return {"time": time_B} if getattr(getattr(model, "config", None), "time", "none") != "none" else {}
