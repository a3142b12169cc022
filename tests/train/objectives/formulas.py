"""What the tests of objectives share: a small decoder, and their checks beside a formula, a loop of plain torch, and calls."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gpubound as gb
from gpubound.models import Decoder, DecoderConfig
from gpubound.train import AdamW, TrainStep

WORDS = 31


def decoder(seed: int = 0, hidden: int = 16, words: int = WORDS) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(hidden=hidden, intermediate=32, layers=1, heads=2, kv_heads=1, vocabulary=words))
    for p in model.parameters():  # far from uniform, so that losses and slopes differ
        p.data.mul_(4)
    return model


def with_adapters() -> Decoder:
    """A decoder with adapters that change what it computes."""
    model = decoder()
    gb.lora.add(model, rank=2, init="gaussian")
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(1))
    return model


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


def check_steps(objective, batches: list, accumulate: int, mean: Callable[[nn.Module, list], Tensor]) -> None:
    """Hold steps over `accumulate` batches to a loop of plain torch over mean(model, batches). `require` on a CPU checks what
    a capture would: no read of the device, and nothing outside of the state is written."""
    ours, plain, config = decoder(), decoder(), AdamW(lr=1e-2, weight_decay=0.0)
    step = TrainStep(ours, objective, config, accumulate=accumulate, precision="fp32", graph="require")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for first in range(0, len(batches), accumulate):
        micro = batches[first : first + accumulate]
        loss = mean(plain, micro)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert step(micro).read().loss == pytest.approx(loss.item(), rel=1e-5)
    for (name, got), want in zip(ours.named_parameters(), plain.parameters()):
        assert (got - want).abs().max() < 2e-5, name


def check_captured(
    make: Callable[[], tuple[nn.Module, object]], batches: list[dict], precision: str = "fp32", rel=1e-4
) -> list:
    """Hold captured steps on a GPU to the ones that run call by call: losses and, in fp32, weights; later steps wait for
    nothing. make() returns a model and an objective. Return both objectives."""
    weights, losses, objectives = [], [], []
    on_gpu = [[{name: value.cuda() for name, value in batch.items()}] for batch in batches]
    for graph in ("off", "require"):
        model, objective = make()
        step = TrainStep(model.cuda(), objective, AdamW(lr=1e-2), precision=precision, graph=graph)
        results = [step(on_gpu[0])]
        with gb.watch() as ledger:
            results += [step(given) for given in on_gpu[1:]]
        if graph == "require":
            ledger.assert_within(syncs=0, h2d_bytes=0, fallbacks=0)
        losses.append([result.read().loss for result in results])
        weights.append([p.detach().clone() for p in model.parameters() if p.requires_grad])
        objectives.append(objective)
    assert losses[1] == pytest.approx(losses[0], rel=rel, abs=1e-5)
    for got, want in zip(*weights) if precision == "fp32" else ():
        assert (got - want).abs().max() < 1e-3 * want.abs().max() + 1e-6
    return objectives
