"""What reaches the update: the decoder's gradients against Hugging Face's in fp64, known norms, and memory that was dirty."""

import dataclasses
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from gpubound import trace
from gpubound.models import PRESETS, Decoder, save_hf
from gpubound.train import AdamW, TrainStep

from .conftest import cut, draw, named, small, summed

NARROW = dataclasses.replace(PRESETS["10m"], hidden=64, intermediate=192, vocabulary=512, head_width=16)


@pytest.mark.slow
@pytest.mark.parametrize("config", [PRESETS["10m"], NARROW], ids=["10m", "10m, a quarter as wide"])
def test_the_10m_decoder_has_hugging_faces_gradients(config, tmp_path):
    """All ten layers in fp64, so that the comparison is of the formulas; gains off one, or a missing one would not show."""
    torch.manual_seed(0)
    ours = Decoder(config).double().train()
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs = AutoModelForCausalLM.from_pretrained(save_hf(ours, tmp_path), dtype=torch.float64).train()
    ids = torch.randint(config.vocabulary, (2, 24))
    labels = ids.clone()
    labels[0, :7] = -100
    want = theirs(input_ids=ids, labels=labels).loss
    want.backward()
    ours.loss(ids, labels).backward()
    wanted = dict(theirs.named_parameters())
    assert {name for name, _ in ours.named_parameters()} == wanted.keys() and len(wanted) == 2 + 9 * config.layers
    for name, parameter in ours.named_parameters():
        error = (parameter.grad - wanted[name].grad).norm() / wanted[name].grad.norm()
        assert error <= 1e-6, f"{name}: gradient off by {error:.1e}"


class Known(nn.Module):
    """Parameters whose gradients are the vectors given to it."""

    def __init__(self, sizes: list[int]):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)


def dotted(model, batch):
    """The gradient of Σ w · g is g, to the last bit."""
    return sum((p.float() * g).sum() for p, g in zip(model.parts, batch["vectors"])), batch["items"]


VECTORS = {
    "ones": [np.ones(7), np.ones(1000)],
    "3, 4": [np.array([3.0]), np.array([4.0])],
    "large beside small": [np.full(5000, 1e-3), np.array([1e4]), np.random.default_rng(0).standard_normal(4097)],
    "small": [np.full(100, 1e-12), np.full(65, -3e-13)],
}


@pytest.mark.parametrize("vectors", VECTORS.values(), ids=VECTORS)
@pytest.mark.parametrize("parts", [1, 3])
def test_the_norm_of_known_vectors(vectors, parts, device):
    """In fp64, over all parameters, of the mean over the items of all micro-batches."""
    model = Known([len(v) for v in vectors]).to(device)
    step = TrainStep(model, dotted, AdamW(lr=0.0), accumulate=parts, precision="fp32", graph="off")
    given = [torch.from_numpy(v.astype(np.float32)).to(device) for v in vectors]
    values = step([{"vectors": given, "items": 5 + i} for i in range(parts)]).read()
    items = sum(5 + i for i in range(parts))
    want = np.sqrt(sum((v.cpu().numpy().astype(np.float64) ** 2).sum() for v in given)) * parts / items
    assert values.grad_norm == pytest.approx(want, rel=1e-6) and values.skipped == 0


def test_what_lay_in_the_buffers_does_not_count():
    """Between steps the accumulators and the totals are filled with NaN; fresh memory holds NaN in every test (footing.py)."""
    results = []
    for poisoned in (False, True):
        model = small()
        step = TrainStep(model, summed, AdamW(lr=1e-2), accumulate=2, clip=0.5, precision="bf16", graph="off")
        values = []
        for i in range(4):
            if poisoned:
                for parameter in model.parameters():
                    parameter.main_grad.fill_(float("nan"))
            values.append(step(cut(draw(6, seed=i), 2)).read())
        results.append((values, named(model)))
    (values, weights), (again, weights_again) = results
    assert values == again and values[-1].updates == 4
    assert all(weights[name].equal(weights_again[name]) for name in weights)


def _zero_grad(parameter):
    parameter.grad.zero_()


@pytest.mark.parametrize("when", ["before", "before, accumulated", "after, accumulated"])
def test_a_hook_on_a_parameter_sees_its_gradient_and_may_change_it(when, monkeypatch):
    """Products add to the fp32 sums unseen, and would hand the hook None. What takes the gradients left None to later hooks."""
    monkeypatch.setattr(trace, "fallbacks", Counter())
    hooked = (
        "model.embed_tokens.weight",
        "self_attn.k_proj.weight",
        "mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    )
    ids = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
    batch, ends, before = {"input_ids": ids, "labels": ids}, [], {}
    for hooks in (False, True):
        torch.manual_seed(0)
        model = Decoder(dataclasses.replace(PRESETS["tiny"], tied=False))
        before = named(model)
        chosen = [parameter for name, parameter in model.named_parameters() if hooks and name.endswith(hooked)]

        def hook(these):
            for parameter in these:
                if when == "before":
                    parameter.register_hook(lambda gradient: gradient * 0)
                else:
                    parameter.register_post_accumulate_grad_hook(_zero_grad)

        hook(chosen if when.startswith("before") else [])
        step = TrainStep(model, "causal_lm", partial(torch.optim.SGD, lr=0.1), precision="fp32", accumulate=2)
        hook(chosen if when.startswith("after") else [])
        step([batch, batch])
        ends.append(named(model))
    assert len(chosen) == 3 + 2 * PRESETS["tiny"].layers and trace.fallbacks
    for name, got in ends[1].items():
        torch.testing.assert_close(got, before[name] if name.endswith(hooked) else ends[0][name])
        assert not got.equal(before[name]) or name.endswith(hooked)
