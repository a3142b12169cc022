"""One adapted linear layer, forward and backward, beside PEFT's and beside the floor: the frozen product and dX.

Captured forms are told apart from eager ones, which a user of a loop without graphs waits for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpubound.errors import MeasureError
from gpubound.layers import linear
from gpubound.lora.adapter import LowRank

from .harness import CAPTURED, WAITED_FOR, Bench, release
from .results import FLOOR

ALPHA_OVER_RANK = 2.0


@dataclass(frozen=True)
class Linear:
    """Its shape, and the multiple of the floor that it may take: gate and moonshot."""

    batch: int
    seq: int
    width: int
    rank: int
    most: tuple[float, float]

    def __str__(self) -> str:
        return f"linear {self.batch}x{self.seq}x{self.width} r{self.rank}"


LINEARS = (
    Linear(4, 512, 768, 16, (1.9, 1.5)),
    Linear(8, 256, 1024, 32, (1.8, 1.5)),
    Linear(2, 1024, 2048, 16, (1.35, 1.2)),
    Linear(8, 1024, 4096, 16, (1.12, 1.06)),
    Linear(8, 1024, 4096, 64, (1.12, 1.06)),
)
TINY = (Linear(2, 8, 32, 4, (1.9, 1.5)),)
PEERS = ("peft", "peft-compile")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of adapters


class Drawn:
    """One draw of weight, adapter, input and upstream gradient, which everyone computes with."""

    def __init__(self, shape: Linear, device: torch.device, adapters: torch.dtype):
        self.shape, g = shape, torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def draw(*size: int, std: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
            return (torch.randn(*size, device=device, generator=g) * std).to(dtype)

        self.weight = draw(shape.width, shape.width, std=shape.width**-0.5)
        self.a = draw(shape.rank, shape.width, std=shape.width**-0.5, dtype=adapters).requires_grad_()
        self.b = draw(shape.width, shape.rank, std=shape.rank**-0.5, dtype=adapters).requires_grad_()
        self.x = draw(shape.batch, shape.seq, shape.width).requires_grad_()
        self.g = draw(shape.batch, shape.seq, shape.width)

    def ours(self) -> tuple[Tensor, ...]:
        y = linear(self.x, self.weight, adapters=[LowRank(self.a, self.b, ALPHA_OVER_RANK)])
        return y, *torch.autograd.grad(y, [self.x, self.a, self.b], self.g)

    def ours_summed(self) -> Callable[[], tuple[Tensor, ...]]:
        """As the trainer calls it: gradients of the adapter are added to fp32 accumulators, which begin at zero."""
        a, b = self.a.detach().requires_grad_(), self.b.detach().requires_grad_()
        for p in (a, b):
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)  # type: ignore[attr-defined]

        def run() -> tuple[Tensor, ...]:
            y = linear(self.x, self.weight, adapters=[LowRank(a, b, ALPHA_OVER_RANK)])
            (dx,) = torch.autograd.grad(y, [self.x], self.g)
            return y, dx, a.main_grad, b.main_grad  # type: ignore[attr-defined]

        return run

    def peft(self, compiled: bool = False) -> Callable[[], tuple[Tensor, ...]]:
        layer, trained = self._layer()
        call = torch.compile(layer, dynamic=False) if compiled else layer

        def run() -> tuple[Tensor, ...]:
            y = call(self.x)
            return y, *torch.autograd.grad(y, [self.x, *trained], self.g)

        return run

    def floor(self) -> tuple[Tensor, ...]:
        x, g = (t.detach().view(-1, self.shape.width) for t in (self.x, self.g))
        return x @ self.weight.t(), g @ self.weight

    def _layer(self) -> tuple[nn.Module, list[nn.Parameter]]:
        """PEFT's layer of these very tensors."""
        from peft import LoraConfig, get_peft_model

        base = nn.Linear(self.shape.width, self.shape.width, bias=False, device="meta")
        base.weight = nn.Parameter(self.weight, requires_grad=False)
        config = LoraConfig(r=self.shape.rank, lora_alpha=ALPHA_OVER_RANK * self.shape.rank, target_modules=["0"])
        layer = get_peft_model(nn.Sequential(base), config).base_model.model[0]  # type: ignore[union-attr, index]
        halves = layer.lora_A["default"], layer.lora_B["default"]
        for half, value in zip(halves, (self.a, self.b)):
            half.weight = nn.Parameter(value.detach().clone())
        return layer, [half.weight for half in halves]


def measure_linear(bench: Bench, shape: Linear, dtype: str, peers: Sequence[str]) -> None:
    """Captured, beside the floor; then eager. fp32 adapters have accumulators, as in the trainer; bf16 ones give gradients."""
    name, adapters = f"{shape}, {dtype} adapters", DTYPES[dtype]
    drawn = Drawn(shape, bench.device, adapters)
    theirs = {peer: drawn.peft(compiled="compile" in peer) for peer in peers}
    gate, moonshot = ({FLOOR: 1 / most} for most in shape.most)
    for words, clock in (("", CAPTURED), (", eager", WAITED_FOR)):
        works = {"ours": drawn.ours_summed() if adapters == torch.float32 else drawn.ours, **theirs}
        beside_floor = {} if words else {"floor": drawn.floor, "gates": gate, "moonshots": moonshot}
        try:
            bench.case(name + words, works, unit="us", amount=1, clock=clock, **beside_floor)
        except MeasureError as error:
            bench.unmeasured.append(f"{name}{words}: {error}")
    release(bench.device)
