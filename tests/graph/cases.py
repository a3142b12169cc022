"""Small functions to capture, and the sentence that an error must read."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpubound.errors import GraphError
from gpubound.graph import memory
from tests.messages import refusal


def drawn(*shape: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def perceptron(device: torch.device | str = "cpu", dropout: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 1))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=index))
    return model.to(device)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def said(call: Callable, *arguments) -> str:
    """The sentence of the GraphError that the call raises."""
    return refusal(GraphError, lambda: call(*arguments))


def contents(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Copies of everything that training changes."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for index, state in enumerate(optimizer.state.values() if optimizer else ()):
        found |= {f"{index}.{key}": value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    return found


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[key], others[key]) for key in some)


def elsewhere(monkeypatch) -> None:
    """Treat all copies of a state as on another device than the state, as when a GPU has no room for them."""
    monkeypatch.setattr(memory.CopyBudget, "fits", lambda budget, live, pending=0: False)
    monkeypatch.setattr(memory, "on_two_devices", lambda one, other: True)
