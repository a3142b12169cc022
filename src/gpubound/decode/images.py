"""Prompts with images or sounds: the model's own forward reads them, and its keys and values go to the decoder's cache.

A step then goes on as after a text: in the models of models/registry.py's WRAPPERS, an image's or a sound's tokens take
positions like those of a text.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.rope import apart
from ..models.decoding import AttentionWeights
from ..models.registry import cache_word, is_wrapper
from .runner import own_forward

TEXT = {"input_ids", "attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "length"}


def image_inputs(prompts: Any) -> dict[str, Any]:
    """Return a processor's output if it holds more than text, else nothing."""
    others = isinstance(prompts, Mapping) and any(value is not None for name, value in prompts.items() if name not in TEXT)
    return {name: value for name, value in prompts.items() if value is not None} if others else {}


def check_images(inputs: Mapping[str, Any], model: Any, body: Any, prompts: list[list[int]]) -> None:
    """Raise a ValueError for images that this decoder cannot read."""
    name = min(inputs.keys() - TEXT)
    why = None
    if not is_wrapper(model):
        why = f"{type(model).__name__} is none of the models of images or sounds and text that a decoder knows"
    elif body.path:
        why = f"the fused kernels do not decode it: {body.path}"
    elif len(body.spans) > 1 or body.peers:
        why = "several devices share it"
    elif not all(isinstance(layer.attention, AttentionWeights) for layer in body.live.layers):
        why = f"{type(model).__name__} has layers that keep a state or latents instead of keys and values"
    elif not body.live.reader.image_positions:
        why = f"{type(model).__name__} gives an image's tokens positions of a grid"
    if why is not None:
        raise ValueError(f"generate: prompts: got {name}, wanted text alone, because {why}; call the model's own generate.")
    ids = inputs["input_ids"]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != len(prompts):
        raise ValueError(
            f"generate: prompts: got {name} for {len(prompts)} sequences, wanted a processor's output with return_tensors='pt' "
            "and one sequence for each row of it; pass n=1."
        )
    names = (f"{part}_token_{end}" for part in ("image", "video", "audio") for end in ("id", "index"))
    others = {getattr(model.config, name, None) for name in names}
    if last := [number for number, prompt in enumerate(prompts) if prompt[-1] in others]:
        raise ValueError(f"generate: prompt {last[0]} ends with an image or a sound, wanted text after it, such as a question.")


def image_prefill(model: nn.Module, body: Any, inputs: Mapping[str, Any]) -> Callable[[Tensor, Tensor], None]:
    """Return the prefill of prompts with images, in the place of `body.prefill`."""
    return partial(_prefill, model, body, inputs)


@torch.no_grad()
def _prefill(model: Any, body: Any, inputs: Mapping[str, Any], ids: Tensor, lengths: Tensor) -> None:
    from transformers import DynamicCache

    inputs = {name: value.to(body.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    mask, count = inputs.get("attention_mask"), inputs["input_ids"].shape[1]
    if mask is None:
        mask = torch.ones_like(inputs["input_ids"])
    first = mask.argmax(1)  # of the row's own tokens: padding is before or after them
    positions = (torch.arange(count, device=body.device) - first[:, None]).clamp_min(0)
    cache: Any = DynamicCache()  # without a config, whose windows would drop keys that a step reads
    with own_forward(model, " on a prompt with images"):
        model(**inputs, position_ids=positions, use_cache=True, logits_to_keep=1, **{cache_word(type(model).forward): cache})
    at = (torch.arange(count, device=body.device) + first[:, None]) % count  # the row's tokens at the left
    width = int(mask.sum(1).max())
    body.cache.ends = mask.sum(1)
    try:
        for number, (layer, weights) in enumerate(zip(cache.layers, body.live.layers)):
            pairs = weights.attention.interleaved
            keys = apart(layer.keys, pairs) if pairs else layer.keys
            moved = (t.transpose(1, 2).take_along_dim(at[:, :width, None, None], 1) for t in (keys, layer.values))
            body.cache.extend(number, 0, *moved)
    finally:
        body.cache.ends = None
    if body.host:
        body.host.finite = width
