"""Precisions of training: the dtype of the weights, fp32 masters, and fp8 products.

In fp8 the linear layers inside the model's blocks are multiplied in 8 bits (layers/fp8.py), except weights that are tied to an
embedding. The head, norms, attention and the residual stream are in bf16; masters, moments and gradient sums are in fp32. The
scales of the 8-bit products are calibrated before the first step and renewed at each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..device import label
from ..kernels.accumulate import drop_record, ensure_record
from ..kernels.quantize import CAPABILITY, MULTIPLE
from ..layers.fp8 import SMALLEST, Fp8, new_states, renew
from ..layers.linear_product import is_sharded, multiply_by_records
from ..trace import fallback
from .offload import find_blocks

if TYPE_CHECKING:
    from .accumulate import FlatLayout, FlatSlot


@dataclass(frozen=True)
class Precision:
    """The dtype of the weights and of the model's arithmetic; gradient sums and moments are fp32 in every precision."""

    dtype: torch.dtype
    masters: torch.dtype | None = None  # fp32 copies of the 16-bit weights, or int16: what fp32 has besides a bf16 weight
    at_random: bool = False  # stochastic rounding of the updated weights instead: 4 bytes a parameter less
    loss_scale: bool = False  # fp16 has too few exponents for small gradients
    fp8: bool = False  # linear products of the blocks in 8 bits: Fp8Weights
    products: str | None = None  # mode of fp32 matrix products on a GPU

    @property
    def split(self) -> bool:
        """True where a master is the bf16 weight and its remainder (kernels/adamw.py)."""
        return self.masters == torch.int16

    def check_rounded(self, optimizer: str) -> None:
        """Raise ValueError for an optimizer that neither rounds at random nor divides weights."""
        if self.at_random:
            raise ValueError(
                f"TrainStep: precision='bf16-pure' rounds at random in AdamW alone, got {optimizer}; take precision='bf16'."
            )
        if self.split:
            raise ValueError(
                f"TrainStep: precision='bf16-split' divides weights in AdamW alone, got {optimizer}; take precision='bf16'."
            )


PRECISIONS = {
    "fp32": Precision(torch.float32, products="ieee"),
    "tf32": Precision(torch.float32, products="tf32"),
    "bf16": Precision(torch.bfloat16, masters=torch.float32),
    "bf16-pure": Precision(torch.bfloat16, at_random=True),
    "bf16-split": Precision(torch.bfloat16, masters=torch.int16),
    "fp16": Precision(torch.float16, masters=torch.float32, loss_scale=True),
    "fp8": Precision(torch.bfloat16, masters=torch.float32, fp8=True),
}


def precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ValueError(f"precision: got {name!r}, wanted one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


def spelled(name: str) -> Tensor:
    """Return a name as a tensor of character codes."""
    return torch.tensor(list(name.encode()), dtype=torch.uint8, device="cpu")


def read(name: Tensor) -> str:
    """Return the name that `spelled` encoded."""
    return bytes(name.tolist()).decode()


class Fp8Weights:
    """The weights of a model that are multiplied in 8 bits, until `release`."""

    def __init__(self, model: nn.Module, layout: "FlatLayout"):
        _check_device(layout.device)
        self.slots = _eligible(model, layout)
        self.states = new_states(len(self.slots), layout.device)
        self.largest = self.states[..., 1].clone()  # the largest magnitudes of a step, contiguous for a reduction over ranks
        self.calibrated = self._calibrating = False
        self._formats = [Fp8(states, lambda: self._calibrating) for states in self.states]
        for slot, format in zip(self.slots, self._formats):
            ensure_record(slot.parameter).format = format
        self._undo = multiply_by_records(model)

    def forget(self) -> None:
        """Drop the rounded weights: those of another micro-batch may be in another graph's memory."""
        for format in self._formats:
            format.forget()

    def look(self) -> None:
        """Copy the largest magnitudes of this rank's micro-batches to `largest`."""
        self.largest.copy_(self.states[..., 1])

    def renew(self) -> None:
        """Compute new scales from `largest`, which may have been reduced over all ranks."""
        self.states[..., 1].copy_(self.largest)
        renew(self.states)

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Measure every tensor before it is rounded while inside; one that is not reached gets its scale in the first step."""
        self.forget()
        self._calibrating = True
        try:
            yield
        finally:
            self._calibrating = False
            self.forget()
        unreached = self.states[..., 0] == 0
        self.states[..., 0].masked_fill_(unreached, SMALLEST)
        self.calibrated = True

    def loaded(self) -> None:
        """Called after the scales were loaded; they are calibrated unless the saved run had none yet."""
        self.calibrated = bool(self.states[..., 0].any())

    def release(self) -> None:
        for slot in self.slots:
            ensure_record(slot.parameter).format = None
            drop_record(slot.parameter)
        self._undo()


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < CAPABILITY:
        raise ValueError(
            f"precision='fp8': {label(device)} has compute capability {capability[0]}.{capability[1]}, "
            f"wanted {CAPABILITY[0]}.{CAPABILITY[1]} or above (Ada, Hopper, Blackwell); take precision='bf16'."
        )


def _eligible(model: nn.Module, layout: "FlatLayout") -> "list[FlatSlot]":
    """Return the trained weights of plain linear layers inside the blocks whose shapes allow fp8 products."""
    try:
        blocks = find_blocks(model)
    except ValueError:
        raise ValueError(
            f"precision='fp8': {type(model).__name__} has no list of blocks of one class (nn.ModuleList, nn.Sequential), "
            f"whose linear layers are multiplied in fp8; take precision='bf16'."
        ) from None
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    inside = {id(m.weight) for block in blocks for m in block.modules() if type(m) is nn.Linear} - tables
    chosen = [slot for slot in layout.slots if id(slot.parameter) in inside]
    fitting = [slot for slot in chosen if not any(side % MULTIPLE for side in slot.parameter.shape)]
    for slot in chosen:
        if slot not in fitting:
            rows, columns = slot.parameter.shape
            fallback("fp8 product", f"{slot.name} is {rows} x {columns}, no multiples of {MULTIPLE}; it is computed in bf16")
    if not fitting:
        raise ValueError(
            f"precision='fp8': no trained linear layer in the blocks of {type(model).__name__} has sides that are multiples "
            f"of {MULTIPLE}; take precision='bf16'."
        )
    return fitting


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> Any:
    """Cast floating-point inputs of the model's forward to `dtype`: fp32 cannot be multiplied with bf16.

    Return the hook's handle. `time` is not cast: bf16 has only 128 values between a half and one.
    """
    return model.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)  # a closure could not be pickled


def _cast(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    if not any(p.dtype == dtype or is_sharded(p) for p in module.parameters()):
        return None  # a copy of the model with this hook that was cast since

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64) else value

    return tuple(map(cast, args)), {k: v if k == "time" else cast(v) for k, v in kwargs.items()}


def explain_dtypes(model: nn.Module, name: str, error: Exception) -> str | None:
    """Return what to do about an error of mixed dtypes, where a frozen parameter has another one than the trained weights."""
    dtype = PRECISIONS[name].dtype
    others = ((key, p) for key, p in model.named_parameters() if p.is_floating_point() and not p.requires_grad)
    frozen = next((f"{key} is frozen and {p.dtype}" for key, p in others if p.dtype != dtype), None)
    if frozen is None or "type" not in str(error):
        return None
    return (
        f"TrainStep: {frozen}, and precision={name!r} computes in {dtype}, which the model does not mix ({error}); "
        f"cast what is frozen to {dtype} before the TrainStep is made, or take the precision of its dtype."
    )


def check_precision(own: Tensor, state: dict[str, Tensor]) -> None:
    """Raise ValueError for a state of another precision: fp16 and bf16 have equal names and shapes, but not loss scales."""
    wanted, got = map(read, (own, state.get("precision", own)))
    if got != wanted and {got, wanted} != {"fp32", "tf32"}:  # they differ only in the products of a GPU
        raise ValueError(
            f"load_state_dict: precision: got {got}, wanted {wanted}; make the TrainStep with precision={got!r} to go on from "
            f"this state."
        )
