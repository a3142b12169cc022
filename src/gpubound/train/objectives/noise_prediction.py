"""Continuous diffusion, for embeddings and other dense data: noise is added at a random time, and the model finds it.

Each row gets a time t, uniform in (0, 1]. The model is called as `model(x, time=t)` with the noised x and predicts the noise
(eps), the clean data (x0) or v (layers/diffusion_schedule.py). The loss is the squared error, weighed by min-SNR: an error of
x0 counts by the ratio of signal to noise of its row, but for no more than `most_snr`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...layers.diffusion_schedule import alpha_bar, check_target, min_snr, noise_share, noised, spread_times, target_of
from . import Objective

SEED = 0x5EED  # of the times and the noise that validation draws


@dataclass(eq=False)
class NoisePrediction(Objective):
    """A batch is a tensor of clean rows (B, ...), or a dict with it as x; what else is in it goes to the model by name."""

    target: str = "eps"  # or v, or x0
    most_snr: float = 5.0  # the largest weight of an error in x0
    levels: int = 8  # how many times validation draws for each row

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
        """The mean weighted error, at times that cover the range evenly, with noise from a seed of its own."""
        totals, count, generator = [], 0, None
        for batch in batches:
            x0, others = _split(batch)
            generator = generator or torch.Generator(x0.device).manual_seed(SEED)
            for _ in range(self.levels):
                times = spread_times(len(x0), 0.0, x0.device, generator)
                noise = torch.randn(x0.shape, device=x0.device, dtype=x0.dtype, generator=generator)
                totals.append(self._error(model, x0, others, times, noise))
                count += x0.numel()
        return {"held_out": (torch.stack(totals).double().sum() / count).item()}

    def _error(self, model: Any, x0: Tensor, others: dict[str, Any], times: Tensor, noise: Tensor) -> Tensor:
        """Σ weight · (prediction - target)², in fp32 or wider."""
        share = alpha_bar(times)
        x = noised(x0, noise, share)
        predicted, wanted = model(x.to(x0.dtype), time=times, **others), target_of(self.target, x0, noise, share)
        if predicted.shape != wanted.shape:
            raise ValueError(
                f"noise_prediction: {type(model).__name__} predicts {tuple(predicted.shape)} for x {tuple(wanted.shape)}; it "
                f"must give one value for each of x's."
            )
        weights = min_snr(self.target, share, self.most_snr, noise_share(times))
        return (weights * (predicted.to(x.dtype) - wanted.to(x.dtype)).square().flatten(1).sum(1)).sum()


def _split(batch: Any) -> tuple[Tensor, dict[str, Any]]:
    given = batch if isinstance(batch, Mapping) else {"x": batch}
    x0 = given.get("x")
    if not isinstance(x0, Tensor) or not x0.is_floating_point() or x0.dim() < 2:
        got = f"{x0.dtype} {tuple(x0.shape)}" if isinstance(x0, Tensor) else f"a {type(x0).__name__}"
        raise ValueError(f"noise_prediction: x must be a floating-point tensor (B, ...) of clean rows, got {got}.")
    return x0, {key: value for key, value in given.items() if key != "x"}
