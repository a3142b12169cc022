"""Adapters trained on a base that was quantised when it was published: the gradients of its numbers, and what is refused."""

import copy
from pathlib import Path

import pytest
import torch

import gpubound as gb
from gpubound.layers.quantized_base import Base
from gpubound.lora.base import dequantize_base
from gpubound.models.llama.checkpoint import load_hf
from gpubound.train import AdamW, TrainStep
from gpubound.train.adapters import check_published
from gpubound.train.fields import Lora
from tests.models.quantized.cases import write

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "name", ["gptq", "gptq-act-order", "gptq-8-act-orders", "awq", "fp8-rows", "fp8-blocks", "nf4-plain", "packed-asymmetric"]
)
def test_gradients_of_adapters_are_those_over_the_dequantised_base(tmp_path, name):
    write(tmp_path, name)
    model = load_hf(tmp_path, dtype=torch.float32)
    gb.lora.add(model, rank=4)
    for p in gb.lora.parameters(model):
        torch.nn.init.normal_(p, std=0.05)
    twin = copy.deepcopy(model)
    dequantize_base(twin)
    ids = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0))
    for one in (model, twin):
        one.loss(ids, ids).backward()
    for (key, p), q in zip(model.named_parameters(), twin.parameters()):
        assert (p.grad is None) == (q.grad is None), key
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6 * q.grad.abs().max().item(), msg=key)


@pytest.mark.slow
def test_a_train_step_lowers_the_loss_and_leaves_the_codes(tmp_path):
    write(tmp_path, "gptq-asymmetric")
    model = load_hf(tmp_path, dtype=torch.float32)
    gb.lora.add(model, rank=4)
    before = {n: m._weight.clone() for n, m in model.named_modules() if isinstance(m, Base)}
    assert len(before) == 14
    ids = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0))
    step = TrainStep(model, "causal_lm", AdamW(lr=1e-2), precision="fp32", graph="off")
    losses = [step({"input_ids": ids, "labels": ids}).read().loss for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(m._weight, before[n]) for n, m in model.named_modules() if isinstance(m, Base))


def test_training_or_rounding_quantised_weights_is_refused(tmp_path: Path):
    write(tmp_path, "fp8-blocks")
    with pytest.raises(ValueError, match="do not train"):
        check_published(tmp_path, None)
    with pytest.raises(ValueError, match="quantised already"):
        check_published(tmp_path, Lora(rank=4, base="nf4"))
    check_published(tmp_path, Lora(rank=4))
