"""In which numbers a model is trained: what the weights are kept in, whether anything finer stands behind them, and fp8.

In fp8 the linear layers inside the model's blocks are multiplied in 8 bits (layers/fp8.py), but for what is tied to an
embedding. The head, norms, attention and the residual stream stay in bf16. What is kept from step to step stays in fp32:
masters, moments and gradient sums. The scales of 8 bits are found before the first step and renewed at each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..device import label
from ..kernels.quantize import CAPABILITY, MULTIPLE
from ..kernels.tensor_state import drop_record, made_record
from ..layers.fp8 import SMALLEST, Fp8, new_states, renew
from ..layers.fused_weights import multiply_by_records
from ..layers.linear_product import is_sharded
from ..trace import fallback
from .flat_buffers import FlatLayout, FlatSlot
from .recompute import find_blocks


@dataclass(frozen=True)
class Precision:
    """`dtype` is the weights' and what the model computes in; gradients are summed and moments kept in fp32 in all of them."""

    dtype: torch.dtype
    masters: bool = False  # fp32 weights behind the 16-bit ones: small updates are not lost
    at_random: bool = False  # round the updated weight up or down at random instead: right on average, 4 bytes a parameter less
    loss_scale: bool = False  # fp16 has too few exponents for small gradients
    fp8: bool = False  # the blocks' linear products in 8 bits: Fp8Weights
    products: str | None = None  # how a GPU multiplies fp32 matrices

    def check_not_at_random(self, optimizer: str) -> None:
        if self.at_random:
            raise ValueError(
                f"TrainStep: precision='bf16-pure' rounds at random in AdamW alone, got {optimizer}; take precision='bf16'."
            )


PRECISIONS = {
    "fp32": Precision(torch.float32, products="ieee"),
    "tf32": Precision(torch.float32, products="tf32"),
    "bf16": Precision(torch.bfloat16, masters=True),
    "bf16-pure": Precision(torch.bfloat16, at_random=True),
    "fp16": Precision(torch.float16, masters=True, loss_scale=True),
    "fp8": Precision(torch.bfloat16, masters=True, fp8=True),
}


def precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ValueError(f"precision: got {name!r}, wanted one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


def spelled(name: str) -> Tensor:
    """A name among the tensors of a state, letter by letter."""
    return torch.tensor(list(name.encode()), dtype=torch.uint8, device="cpu")


def read(name: Tensor) -> str:
    return bytes(name.tolist()).decode()


class Fp8Weights:
    """The weights of one model that are multiplied in 8 bits, until `release`."""

    def __init__(self, model: nn.Module, layout: FlatLayout):
        _check_device(layout.device)
        self.slots = _eligible(model, layout)
        self.states = new_states(len(self.slots), layout.device)
        self.seen = self.states[..., 1].clone()  # the largest magnitudes of a step, side by side for a sum over ranks
        self.calibrated = self._calibrating = False
        self._formats = [Fp8(states, lambda: self._calibrating) for states in self.states]
        for slot, format in zip(self.slots, self._formats):
            made_record(slot.parameter).format = format
        self._undo = multiply_by_records(model)

    def forget(self) -> None:
        """Let the rounded weights go: a micro-batch may not read what another one made, which may be another graph's memory."""
        for format in self._formats:
            format.forget()

    def look(self) -> None:
        """Read off what this process's micro-batches have seen."""
        self.seen.copy_(self.states[..., 1])

    def renew(self) -> None:
        """New scales from `seen`, which by now may be all ranks'."""
        self.states[..., 1].copy_(self.seen)
        renew(self.states)

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Inside, every tensor is measured before it is rounded; what is not reached has its scale from the first step on."""
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
        """The scales are those of another run now, unless that had none yet."""
        self.calibrated = bool(self.states[..., 0].any())

    def release(self) -> None:
        for slot in self.slots:
            made_record(slot.parameter).format = None
            drop_record(slot.parameter)
        self._undo()


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and (there := torch.cuda.get_device_capability(device)) < CAPABILITY:
        raise ValueError(
            f"precision='fp8': {label(device)} has compute capability {there[0]}.{there[1]}, "
            f"wanted {CAPABILITY[0]}.{CAPABILITY[1]} or above (Ada, Hopper, Blackwell); take precision='bf16'."
        )


def _eligible(model: nn.Module, layout: FlatLayout) -> list[FlatSlot]:
    """The trained weights of plain linear layers inside the blocks, whose sides fp8 products can take."""
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
    """Give the model's forward its floating-point inputs in the weights' dtype: there is no product of fp32 with bf16. But for
    `time`, of which bf16 would leave a denoiser 128 values between a half and one."""
    return model.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)  # no closure: the model can be pickled


def _cast(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    if not any(p.dtype == dtype or is_sharded(p) for p in module.parameters()):
        return None  # a copy of the model, which has this hook too, and was cast since

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64) else value

    return tuple(map(cast, args)), {k: v if k == "time" else cast(v) for k, v in kwargs.items()}


def check_precision(own: Tensor, state: dict[str, Tensor]) -> None:
    """Names and shapes do not tell fp16 from bf16, but fp16's loss scale would reach a step that divides by none."""
    wanted, got = map(read, (own, state.get("precision", own)))
    if got != wanted and {got, wanted} != {"fp32", "tf32"}:  # these two differ in how a GPU multiplies alone
        raise ValueError(
            f"load_state_dict: precision: got {got}, wanted {wanted}; make the TrainStep with precision={got!r} to go on from "
            f"this state."
        )
