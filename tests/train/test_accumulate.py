"""fp32 gradient sums, exact over micro-batches whoever computes the gradient; and what reaches the update, beside fp64."""

import dataclasses
import doctest
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from gpubound import trace
from gpubound.errors import GraphError
from gpubound.kernels.accumulate import open_sums, record_of, weight_gradients
from gpubound.models import PRESETS, Decoder, save_hf
from gpubound.train import Accumulators, AdamW, TrainStep, accumulate
from tests.messages import message, refusal

from .conftest import cut, draw, named, small, summed


def gradients_in_fp64(model, batch) -> dict[str, torch.Tensor]:
    """Of the sum of the losses, by plain autograd."""
    twin = small(tied=model.head.weight is model.embed.weight).double()
    twin.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    summed(twin, batch)[0].backward()
    return {name: p.grad for name, p in twin.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 8, 16])
def test_micro_batches_are_one_big_batch(parts, tied):
    model, batch = small(tied=tied), draw(16)
    sums = Accumulators(model.named_parameters())
    for part in cut(batch, parts):
        summed(model, part)[0].backward()
    want = gradients_in_fp64(model, batch)
    for name, p in model.named_parameters():
        assert p.grad is None
        assert (p.main_grad.double() - want[name]).norm() <= 1e-6 * want[name].norm(), name
    total = torch.stack([g.norm() for g in want.values()]).norm()
    assert torch.linalg.vector_norm(sums.gradient).item() == pytest.approx(total.item(), rel=1e-6), "the padding is not zero"


def test_sparse_gradients_are_summed():
    ids = torch.tensor([1, 3, 3, 0])
    table = torch.nn.Embedding(5, 4, sparse=True)
    sums = Accumulators(table.named_parameters())
    sums.zero()
    for _ in range(2):
        table(ids).sum().backward()
    wanted = 2.0 * torch.bincount(ids, minlength=5).float()[:, None].expand(5, 4)
    assert table.weight.main_grad.equal(wanted)


def test_a_gradient_from_before_does_not_count():
    model = small()
    summed(model, draw(2))[0].backward()
    Accumulators(model.named_parameters())
    assert all(p.grad is None and p.main_grad.eq(0).all() for p in model.parameters())


def test_errors():
    model = small()
    Accumulators(model.named_parameters())
    assert refusal(ValueError, lambda: Accumulators(model.named_parameters())) == message("train/accumulate:errors")


def test_docstring():
    assert doctest.testmod(accumulate).failed == 0


def test_a_begun_sum_is_written_by_its_first_delivery_and_zeroed_where_there_is_none():
    """What is left of the last window, here NaN, must not reach the new sum: by product, tie, hook or an unused weight."""
    from gpubound.layers import fused_linear, linear

    torch.manual_seed(0)
    q, k, tied, hooked, unused = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(5))
    named = [("q", q), ("k", k), ("tied", tied), ("hooked", hooked), ("unused", unused)]
    x = torch.randn(3, 4)
    sums = Accumulators(named)
    for window in range(2):
        sums.gradient.fill_(float("nan"))
        sums.begin()
        for _ in range(2):
            y = fused_linear(x, [q, k]).sum() + linear(linear(x, tied), tied).sum() + (x @ hooked).sum()
            y.backward()
        sums.finish()
        fresh = [p.detach().clone().requires_grad_() for _, p in named]
        a, b, c, d, _ = fresh
        (2 * ((x @ a.t()).sum() + (x @ b.t()).sum() + (x @ c.t() @ c.t()).sum() + (x @ d).sum())).backward()
        for (name, parameter), want in zip(named, fresh):
            wanted = torch.zeros(4, 4) if want.grad is None else want.grad
            torch.testing.assert_close(parameter.main_grad, wanted, msg=f"{name} in window {window}")
    sums.release()


def test_joined_accumulators_of_which_one_has_begun_already():
    buffer = torch.full((6, 3), float("nan"))
    weights = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(3)]
    for i, weight in enumerate(weights):
        weight.main_grad = buffer[2 * i : 2 * i + 2]
    open_sums([weights[0], weights[2]])
    buffer[2:4] = 1.0
    g, x = torch.randn(5, 6), torch.randn(5, 3)
    assert weight_gradients(weights, g, x) == (None, None, None)
    want = g.t() @ x
    want[2:4] += 1.0
    torch.testing.assert_close(buffer, want)


def test_a_backward_that_broke_off_leaves_nothing_to_the_next_sum():
    """What its hooks had taken waited for its end, which never came."""
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    sums = Accumulators([("first", first), ("second", second)])

    def broken(gradient):
        raise RuntimeError("a test says so")

    x = first * 2.0
    x.register_hook(broken)  # behind it lies first; second's gradient is taken before
    with pytest.raises(RuntimeError, match="a test says so"):
        (second.sum() + (x + second).sum()).backward()
    sums.zero()
    (first.sum() + 3 * second.sum()).backward()
    assert first.main_grad.tolist() == [1.0] * 3 and second.main_grad.tolist() == [3.0] * 3


@pytest.mark.parametrize("recorded", [True, False], ids=["opened inside the graph", "opened outside of it"])
def test_a_sum_opened_on_the_other_side_of_a_graphs_border_is_refused(recorded, monkeypatch):
    """A graph bakes in that a delivery writes: opened outside of it, every replay would write over the sum."""
    from gpubound.kernels import accumulate as kernels

    weight = torch.nn.Parameter(torch.ones(2, 3))
    weight.main_grad = torch.zeros(2, 3)
    monkeypatch.setattr(kernels, "_recording", lambda weight: recorded)
    open_sums([weight])
    monkeypatch.setattr(kernels, "_recording", lambda weight: not recorded)
    with pytest.raises(GraphError, check=message("train/accumulate:a_sum_opened_on_the_othe")):
        weight_gradients([weight], torch.ones(5, 2), torch.ones(5, 3))
    assert not weight.main_grad.any()


def test_release_leaves_no_record():
    model = small()
    sums = Accumulators(model.named_parameters())
    sums.begin()
    assert all(record_of(p).opening is not None for p in model.parameters())
    sums.zero()
    assert all(record_of(p).opening is None for p in model.parameters())
    sums.release()
    assert all(record_of(p) is None for p in model.parameters())


def test_a_backward_calls_few_functions_for_each_parameter():
    """Of plain modules, whose gradients autograd makes: a hook and a look at the accumulator, however a sum begins."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
    sums = Accumulators(model.named_parameters())
    root, counts = str(Path(accumulate.__file__).parents[1]), {}
    calls = []

    def profile(frame, event, argument):
        calls.extend([frame] if event == "call" else [])

    for begin in (sums.begin, sums.zero):
        calls.clear()
        begin()
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            model(torch.ones(1, 2)).sum().backward()
            sums.finish()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        counts[begin.__name__] = sum(frame.f_code.co_filename.startswith(root) for frame in calls) / 40
    assert max(counts.values()) < 4, counts


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
