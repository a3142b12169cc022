"""The check of an objective beside its formula: the loss and the gradients of all weights."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn


def check_formula(
    model: nn.Module, total: Tensor, formula: Callable[[], Tensor], loss_error: float, gradient_error: float
) -> None:
    """Hold `total`, computed with a scale of 0.5, and its gradients to half of the formula's. Errors are relative."""
    total.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    want = 0.5 * formula()
    want.backward()
    assert total.item() == pytest.approx(want.item(), rel=loss_error)
    for got, p in zip(gradients, model.parameters()):
        assert p.grad.norm() > 0 and (got - p.grad).norm() <= gradient_error * p.grad.norm()
