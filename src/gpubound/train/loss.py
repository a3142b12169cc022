"""The loss of a causal language model as a sum and a count, so that micro-batches of any fill add up to the right mean.

Where the model can give its last hidden states, the head's product and the loss are one op that never holds all logits
(kernels.linear_cross_entropy): at 32k vocabulary and 16k tokens they would be 1 GB, and their gradient another. Whether
skipping the model's own forward gives the same logits is not believed but tried, once, on one row of the first batch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import cross_entropy, linear_cross_entropy
from ..layers.head import shift
from ..trace import fallback

IGNORE = -100
CHUNK = 4096  # tokens of logits at a time. H200, 16384 tokens, 32768 words: 5.7 ms against 6.6 with 1024, for 0.2 GB more
# Relative error allowed between head(hidden states) and the model's own logits: two roundings to the dtype, and tf32 products.
AGREE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class CausalLM:
    """(model, batch) -> (sum of the losses of all labels that count, their number).

    A batch is a dict as Hugging Face models take it: input_ids, labels (-100 does not count), and what else the model wants.
    Labels are moved by one here, as Hugging Face does: the token at t is predicted from those before it. With `shifted` they
    are the next tokens already, as a gpubound Corpus cuts them.
    """

    def __init__(self, shifted: bool = False) -> None:
        self.shifted = shifted
        self._tried: nn.Module | None = None
        self._whole: str | None = None  # why this model's logits are needed whole

    def prepare(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Find out how this model is best asked. Reads the device once; the step itself never does."""
        if self._tried is not model:
            self._tried, self._whole = model, _why_whole(model, _split(batch)[0])
            if self._whole:
                fallback("causal_lm without whole logits", self._whole)

    def __call__(self, model: Any, batch: Mapping[str, Any], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`scale` multiplies the sum. With it the head's gradient is made in forward, for a backward that begins with 1."""
        self.prepare(model, batch)
        inputs, labels = _split(batch)
        targets = labels if self.shifted else shift(labels, IGNORE)
        count = (targets != IGNORE).sum()
        if self._whole is None:
            head = model.get_output_embeddings()
            total = linear_cross_entropy(
                _hidden(model, inputs), head.weight, targets, head.bias,
                ignore_index=IGNORE, reduction="sum", chunk=CHUNK, grad_scale=scale,
            )  # fmt: skip
            return total, count
        logits = _logits(model, inputs)
        total = cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        return total if scale is None else total * scale, count


def _split(batch: Any) -> tuple[dict[str, Any], Tensor]:
    if not isinstance(batch, Mapping) or "labels" not in batch or "input_ids" not in batch:
        got = f"the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ValueError(
            f"causal_lm: a batch must be a dict with input_ids and labels, got {got}; pass your own loss for other data."
        )
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    labels = batch["labels"]
    if labels.shape != batch["input_ids"].shape:
        raise ValueError(
            f"causal_lm: labels must have the shape of input_ids, {tuple(batch['input_ids'].shape)}, "
            f"got {tuple(labels.shape)}; give one label a token, -100 where there is nothing to learn."
        )
    return inputs, labels


def _arguments(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {**inputs}


def _hidden(model: Any, inputs: dict[str, Any]) -> Tensor:
    arguments = _arguments(model, inputs)
    out = model.base_model(arguments.pop("input_ids"), **arguments)
    return out.last_hidden_state if hasattr(out, "last_hidden_state") else out


def _logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    out = model(**_arguments(model, inputs))
    return out.logits if hasattr(out, "logits") else out


def _why_whole(model: Any, inputs: dict[str, Any]) -> str | None:
    """None when the head applied to the base model's hidden states gives the model's logits, else why not."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear) or getattr(model, "base_model", model) is model:
        return f"{type(model).__name__} does not offer a base model and a linear head (get_output_embeddings)"
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return f"{type(model).__name__} adds a router loss of its own; pass a loss that includes it"
    row = {key: value[:1] if isinstance(value, Tensor) and value.dim() else value for key, value in inputs.items()}
    training = [module for module in model.modules() if module.training]
    model.eval()  # dropout would make the two differ
    try:
        with torch.no_grad():
            want, hidden = _logits(model, row), _hidden(model, row)
            got = nn.functional.linear(hidden, head.weight, head.bias)
    finally:
        for module in training:
            module.training = True
    if got.shape != want.shape:
        return f"its head gives logits of shape {tuple(got.shape)}, its forward {tuple(want.shape)}"
    error = ((got.float() - want.float()).norm() / want.float().norm()).item()
    if not error <= AGREE.get(want.dtype, AGREE[torch.float32]):
        return f"its forward does more than head(hidden states): the logits differ by {error:.1e}"
    return None
