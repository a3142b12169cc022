"""Training of low-rank adapters: the state that changes when the model itself is frozen, and the base that it belongs to.

A checkpoint holds the adapters and the checksums of the base's files. The base stays in its folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import lora
from ..errors import DataError
from ..layers.embedding_and_head import head_of
from ..layers.linear_product import multiply_by_records
from ..layers.quantized_base import Base
from ..lora.base import FORMATS, InCodes, report_quantised, suited
from ..lora.layers import adapted_layers
from ..models.folder import has_config, read_config, weight_files
from ..models.quantized.scheme import Scheme
from ..models.quantized.schemes import scheme_of
from ..models.storing import Held, allocate, read_parts, stored_state, stored_weights
from ..trace import notice
from .checkpoint import Checkpoint
from .checkpoint.files import checksum
from .fields import Lora
from .objectives import Objective


def frozen_bytes(outline: nn.Module, dtype: torch.dtype, base: str | None, published: Mapping[str, Held]) -> int:
    """Return the bytes of the frozen parameters in `dtype`, in the format `base` or, where they are `published` in codes, in
    these; `outline` has the adapters."""
    frozen = {name: p.numel() for name, p in outline.named_parameters() if not p.requires_grad}
    quantised = 0.0
    adapted = {name: f"{name}.base_layer" for name, _ in adapted_layers(outline)}
    for name, stored in published.items():
        del frozen[f"{adapted.get(name, name)}.weight"]
        quantised += sum(stored)
    if base is not None:
        names = [f"{adapted.get(name, name)}.weight" for name in suited(outline, FORMATS[base])]
        quantised += FORMATS[base].bits / 8 * sum(map(frozen.pop, names))
    return int(quantised) + dtype.itemsize * sum(frozen.values())


def load_quantised(folder: str | Path, family: Any, format: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Load the folder's model with its frozen weights quantised, as `lora.quantize_base` of the loaded model leaves them.

    One weight at a time is on the device in `dtype`. Embedding, norms and head stay so.
    """
    folder, kind = Path(folder), FORMATS[format]
    model: nn.Module = family.unread(folder)
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in suited(model, kind)}
    allocate(model, device, dtype, leave={*layers.values()})
    read_parts(folder, {name: (t, ()) for name, t in stored_state(model).items() if not t.is_meta})
    before = after = 0
    for name, layer in layers.items():
        allocate(layer, device, dtype)
        read_parts(folder, {f"{name}.{key}": (tensor, ()) for key, tensor in layer.named_parameters()})
        before += layer.weight.nbytes
        base = Base(layer, kind)
        after += sum(t.nbytes for t in (layer.weight, *base.buffers()))
    multiply_by_records(model, everywhere=True)
    report_quantised([InCodes([*layers], before, after)], format, head_of(model) is not None)
    return model


def published_scheme(folder: str | Path) -> Scheme | None:
    """Return the scheme of a folder whose weights are quantised; None for other folders, and where there is none."""
    folder = Path(folder)
    return scheme_of(folder, read_config(folder)) if has_config(folder) else None


def published_weights(folder: str | Path, outline: nn.Module, dtype: torch.dtype) -> dict[str, Held]:
    """Return the bytes of a quantised folder's weights in memory, nothing for other folders; `outline` has no adapters."""
    scheme = published_scheme(folder)
    return {} if scheme is None else stored_weights(outline, scheme, dtype)


def check_published(folder: str | Path, adapters: Lora | None) -> None:
    """Raise ValueError if the folder's weights are quantised already, and would be trained or quantised again."""
    if (scheme := published_scheme(folder)) is None:
        return
    if adapters is None:
        raise ValueError(
            f"model: {folder} is quantised ({scheme.name}), and such weights do not train; train adapters, lora: {{rank: 16}}, "
            "or take the model's 16-bit weights."
        )
    if adapters.base is not None:
        raise ValueError(
            f"lora: base: got {adapters.base!r}, but {folder} is quantised already ({scheme.name}) and is read unchanged; "
            "leave base out."
        )


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the part of the model's state that a run may change: without frozen parameters and quantisation scales."""
    state = model.state_dict(keep_vars=True)
    quantised = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Base))
    frozen = {name for name, t in state.items() if isinstance(t, nn.Parameter) and not t.requires_grad}
    return {name: t.detach() for name, t in state.items() if name not in frozen and not name.startswith(quantised)}


@torch.no_grad()
def load_trained_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    wanted = trained_state(model)
    assert wanted.keys() == state.keys(), f"a state of another model: {sorted(wanted.keys() ^ state.keys())[:3]}"
    model.load_state_dict(state, strict=False)


def base_of(folder: str | Path) -> dict[str, int]:
    """Return the checksums of a Hugging Face folder's config and weights, at 2.8 GB/s."""
    files = [Path(folder, "config.json"), *weight_files(Path(folder))]
    return {file.name: checksum(file) for file in files if file.exists()}  # a GGUF file has its config itself


def check_base(folder: str | Path, now: dict[str, int], checkpoint: Checkpoint) -> None:
    """Raise DataError unless `now`, the files of `folder`, is the base that the adapters in `checkpoint` were trained on."""
    was = checkpoint.facts["base"]
    if changed := sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name)):
        raise DataError(
            f"{checkpoint.path}: its adapters were trained on another base than {folder} holds now: {', '.join(changed)} "
            f"changed; put the files of that base back, or begin anew in another --out."
        )


def add(adapters: Lora, model: nn.Module, objective: Objective) -> None:
    """Add the adapters to a model, of which then nothing else trains but a head that the objective has given it."""
    adapters.add(model)
    if objective.trains_head:
        head_of(model).requires_grad_(True)


def merge(model: nn.Module) -> None:
    """Merge the adapters into the weights permanently and print the rounding error; quantised weights are dequantised first."""
    lora.dequantize_base(model)
    dtype = str(next(p for p in model.parameters() if not p.requires_grad).dtype).removeprefix("torch.")
    error = lora.merge(model, for_good=True)
    notice(f"lora: merged into weights in {dtype}, whose rounding took {error:.1%} of what the adapters add.")
