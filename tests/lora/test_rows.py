"""Rows of one batch with adapters of their own: one product beside the formula row by row, and what is refused."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpubound as gb
from gpubound.graph.reachable import Reachable
from gpubound.kernels import lora as lora_ops
from gpubound.kernels.accumulate import join_rows
from gpubound.kernels.lora import drawn, kept
from gpubound.layers import linear_product
from gpubound.lora.adapter import RoutedLowRank
from gpubound.lora.layers import read
from gpubound.train import Accumulators
from tests.messages import message

from ..place.models import assert_near
from .cases import refusal
from .mixed import ALPHAS, IDS, NAMES, RANKS, K, Projections, adapted, assert_same, draw, formula, gradients


@pytest.mark.parametrize("interpret", ["0", "1"], ids=["definitions", "kernels"])
@pytest.mark.parametrize("shape", [(6, 5, K), (6, K), (6, 2, 2, K)], ids=str)
@pytest.mark.parametrize("outputs", [(16, 8, 8), (8,)], ids=["q, k and v", "one weight"])
def test_it_is_the_formula_row_by_row(outputs, shape, interpret, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    model, x = adapted(Projections(outputs)), draw(*shape).requires_grad_()
    leaves = [x, *gb.lora.parameters(model)]
    want = formula(model, x, IDS)
    with gb.lora.rows(model, NAMES):
        got = model(x, adapter_ids=IDS)
        assert_same([got, *gradients(got, leaves)], [want, *gradients(want, leaves)])
        with torch.no_grad():
            assert_near(model(x, adapter_ids=IDS), want)


@pytest.mark.parametrize("others", [(), (4,)], ids=["alike", "of other ranks"])
def test_rows_of_many_tokens_multiply_by_their_own_ranks_alone(others, monkeypatch):
    """Where all adapters have as many ranks; their product is told so, forward and back."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    told, product = [], linear_product.lora_product
    monkeypatch.setattr(linear_product, "lora_product", lambda *given, rows: told.append(rows) or product(*given, rows=rows))
    model, ids = Projections((16, 16)), torch.tensor([1, 0])
    for name, rank in zip(NAMES, (16, 16, *others)):
        gb.lora.add(model, rank, name=name, init=False)
    x = draw(2, 64, K).requires_grad_()
    leaves = [x, *(p for p in gb.lora.parameters(model) if 4 not in p.shape)]
    want = formula(model, x, ids)
    with gb.lora.rows(model, NAMES[: 2 + len(others)]):
        got = model(x, adapter_ids=ids)
        assert_same([got, *gradients(got, leaves)], [want, *gradients(want, leaves)])
    assert [rows and rows[1:] for rows in told] == [None if others else (16, 2)] * 2


def test_a_captured_step_does_not_hold_a_call_to_its_numbers():
    """They are another tensor in every call beside it. What `ids` was set to is held: it is copied into."""
    model, x = adapted(Projections()), draw(6, 5, K)
    with gb.lora.rows(model, NAMES) as rows:
        model(x, adapter_ids=IDS)
        assert all(tensor is not IDS for _, tensor in Reachable(model, None).tensors)
        rows.ids = IDS
        assert any(tensor is rows.ids for _, tensor in Reachable(model, None).tensors)


@pytest.mark.slow
def test_gradients_in_fp64():
    model = adapted(Projections((6, 4)).double())
    x = draw(3, 1, K).double().requires_grad_()
    with gb.lora.rows(model, NAMES):
        run = lambda *_: model(x, adapter_ids=IDS[:3])  # noqa: E731
        assert torch.autograd.gradcheck(run, (x, *gb.lora.parameters(model)))


def test_adapters_of_some_layers_and_of_none():
    """A row whose adapter has nothing on a layer has the layer alone; an adapter that is not named is added to all rows."""
    model, x = Projections(), draw(6, 5, K)
    adapted(model, NAMES[:1], targets=["q", "v"])
    gb.lora.add(model, 2, targets=["v"], name="two", init=False)
    want = formula(model, x, torch.where(IDS == 2, -1, IDS))
    with gb.lora.rows(model, NAMES[:2]):
        assert_near(model(x, adapter_ids=torch.where(IDS == 2, -1, IDS)), want)
    gb.lora.add(model, 3, targets=["k"], name="three", init=False)
    layer = model.layers["k"]
    a, b = layer.lora_A["three"].weight, layer.lora_B["three"].weight
    want[..., 16:24] += layer.scaling["three"] * (x @ a.t()) @ b.t()
    with gb.lora.rows(model, NAMES[:2]):
        assert_near(model(x, adapter_ids=torch.where(IDS == 2, -1, IDS)), want)


@pytest.mark.parametrize("interpret", ["0", "1"], ids=["definitions", "kernels"])
def test_dropout(interpret, monkeypatch):
    """One mask over x, whatever adapter a row has."""
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    model, x = adapted(Projections(), dropout=0.25), draw(6, 5, K).requires_grad_()
    leaves = [x, *gb.lora.parameters(model)]
    torch.manual_seed(3)
    mask = kept(drawn(0.25, x.device), 30, K).view(6, 5, K) / 0.75
    want = formula(model, x, IDS, mask)
    with gb.lora.rows(model, NAMES):
        torch.manual_seed(3)
        got = model(x, adapter_ids=IDS)
        assert_same([got, *gradients(got, leaves)], [want, *gradients(want, leaves)])
        model.eval()
        assert_near(model(x, adapter_ids=IDS), formula(model, x, IDS))


def test_adapters_that_drop_differently():
    model, x = Projections(), draw(6, 5, K)
    for i, name in enumerate(NAMES):
        gb.lora.add(model, RANKS[i], alpha=ALPHAS[i], name=name, init=False, dropout=i / 10)
    with gb.lora.rows(model.eval(), NAMES):
        assert_near(model(x, adapter_ids=IDS), formula(model, x, IDS))
        differ = (model.train()(x, adapter_ids=IDS) - formula(model, x, IDS)).abs().amax((1, 2)) > 1e-2
        assert differ.tolist() == [i > 0 for i in IDS.tolist()]


@pytest.mark.parametrize("interpret", ["0", "1"], ids=["definitions", "kernels"])
def test_micro_batches_with_other_rows_are_one_batch(interpret, monkeypatch):
    """Into fp32 accumulators: the gradients of all adapters of a weight come from one product."""
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    model, x, g = adapted(Projections()), draw(6, 5, K), draw(6, 5, 32, seed=9)
    leaves = gb.lora.parameters(model)
    want = torch.autograd.grad(formula(model, x, IDS), leaves, g)
    with gb.lora.rows(model, NAMES):
        sums = Accumulators(model.named_parameters())
        for micro in (6, 2):
            sums.gradient.fill_(float("nan"))  # a delivery that adds where it should write shows
            sums.begin()
            for rows, ids, gradient in zip(x.split(micro), IDS.split(micro), g.split(micro)):
                model(rows, adapter_ids=ids).backward(gradient)
            sums.finish()
            assert_same([p.main_grad for p in leaves], want)
    assert all(p.grad is None for p in leaves)


@pytest.mark.parametrize("accumulated", [False, True])
def test_all_adapters_of_a_weight_are_one_matrix(accumulated, monkeypatch):
    """In memory, and so are their accumulators: nothing is copied together, and one launch a weight gives all gradients."""
    model, x = adapted(Projections()), draw(6, 5, K)
    launches, launch = [], lora_ops.lora_gradients
    monkeypatch.setattr(lora_ops, "lora_gradients", lambda *given: launches.append(given[4].shape) or launch(*given))
    with gb.lora.rows(model, NAMES):
        if accumulated:
            sums = Accumulators(model.named_parameters())
            sums.begin()
        lows = [low for layer in model.layers.values() for low in read(layer).adapters]
        assert [type(low) for low in lows] == [RoutedLowRank] * 3
        for low in lows:
            assert low.a.data_ptr() == low.all_a[0].data_ptr() and low.b.data_ptr() == low.all_b[0].data_ptr()
        whole = join_rows([low.a for low in lows])
        assert whole is not None and whole.shape == (3 * sum(RANKS), K)
        model(x, adapter_ids=IDS).sum().backward()
    assert launches == [(sum(RANKS), K)] * 3


def test_some_are_frozen():
    model, x = adapted(Projections()), draw(6, 5, K)
    for p in gb.lora.parameters(model, "two"):
        p.requires_grad_(False)
    model.layers["k"].lora_A["one"].requires_grad_(False)
    leaves = [p for p in gb.lora.parameters(model) if p.requires_grad]
    want = gradients(formula(model, x, IDS), leaves)
    with gb.lora.rows(model, NAMES):
        assert_same(gradients(model(x, adapter_ids=IDS), leaves), want)


def test_under_a_checkpoint():
    model, x = adapted(Projections()), draw(6, 5, K).requires_grad_()
    leaves = [x, *gb.lora.parameters(model)]
    want = gradients(formula(model, x, IDS), leaves)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    outer = Wrapped()
    with gb.lora.rows(outer, NAMES):
        assert_same(gradients(outer(x, adapter_ids=IDS), leaves), want)
        first = outer(x, adapter_ids=IDS)
        outer(x, adapter_ids=IDS.flip(0))
        with pytest.raises(RuntimeError, check=message("lora/rows:under_a_checkpoint")):
            gradients(first, leaves)
        ids = IDS.clone()
        second = outer(x, adapter_ids=ids)
        ids.copy_(IDS.flip(0))
        with pytest.raises(RuntimeError, check=message("lora/rows:under_a_checkpoint.2")):
            gradients(second, leaves)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks at it
def test_compiled_code_sees_them():
    model, x = adapted(Projections((8,))), draw(6, 5, K).requires_grad_()
    model.forward = partial(lambda self, x: self.layers["q"](x), model)
    leaves = [x, *gb.lora.parameters(model)]
    want = formula(model, x, IDS)
    with gb.lora.rows(model, NAMES):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        got = compiled(x, adapter_ids=IDS)
        assert_same([got, *gradients(got, leaves)], [want, *gradients(want, leaves)])
        assert_near(compiled(x, adapter_ids=IDS.flip(0)), formula(model, x, IDS.flip(0)))


# Calls and states


def test_switched_off_meanwhile():
    model, x = adapted(Projections()), draw(6, 5, K)
    with gb.lora.rows(model, NAMES):
        with gb.lora.disable(model, "two"):
            want = formula(model, x, torch.where(IDS == 1, -1, IDS))
            assert_near(model(x, adapter_ids=IDS), want)
        assert_near(model(x, adapter_ids=IDS), formula(model, x, IDS))


def test_copies_and_pickles_keep_them():
    model, x = adapted(Projections()), draw(6, 5, K)
    want = formula(model, x, IDS)
    with gb.lora.rows(model, NAMES):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert_near(other(x, adapter_ids=IDS), want)
            with torch.no_grad():
                for p in gb.lora.parameters(other):
                    p.zero_()
            assert not torch.allclose(other(x, adapter_ids=IDS), want)
        assert_near(model(x, adapter_ids=IDS), want)


def test_beside_a_training_step_that_was_made_before():
    """Its parameters stay in its buffers, and are copied together for the products."""
    model, x = adapted(Projections()), draw(6, 5, K)
    loss = lambda model, batch: (model(**batch).square().sum(), 6)  # noqa: E731
    step = gb.TrainStep(model, loss, "adamw", precision="fp32", graph="off")
    step({"x": x})
    with gb.lora.rows(model, NAMES):
        assert_near(model(x, adapter_ids=IDS), formula(model, x, IDS))
        step({"x": x, "adapter_ids": IDS})
    step({"x": x})
    step.close()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_a_call_that_broke(error):
    model, x = adapted(Projections()), draw(6, 5, K)

    def broken(*_):
        raise error

    with gb.lora.rows(model, NAMES):
        hook = model.register_forward_pre_hook(broken)
        with pytest.raises(error):
            model(x, adapter_ids=IDS)
        hook.remove()
        other = IDS.flip(0)
        assert_near(model(x, adapter_ids=other), formula(model, x, other))


def test_what_is_refused():
    model, x = adapted(Projections()), draw(6, 5, K)
    start = partial(gb.lora.rows, model)
    assert refusal(lambda: start("one")) == message("lora/rows:what_is_refused")
    for names in (3, None, [["one"]], [1, 2]):
        assert refusal(lambda: start(names)) == (  # noqa: B023
            message("lora/rows:what_is_refused.2", repr(names))
        )
    assert refusal(lambda: start(["one", "four"])) == message("lora/rows:what_is_refused.3")
    with gb.lora.disable(model, "one"):
        assert refusal(lambda: start(NAMES)) == message("lora/rows:what_is_refused.4")
    gb.lora.merge(model, "one")
    assert refusal(lambda: start(NAMES)) == message("lora/rows:what_is_refused.5")
    gb.lora.unmerge(model)
    with start(NAMES) as rows:
        assert refusal(lambda: start(NAMES)) == message("lora/rows:what_is_refused.6")
        for call in (gb.lora.merge, gb.lora.remove):
            assert refusal(lambda call=call: call(model)) == message("lora/rows:what_is_refused.7", call.__name__)
        assert refusal(lambda: model(x)) == message("lora/rows:what_is_refused.8")
        assert refusal(lambda: model(x, adapter_ids=[0, 1])) == message("lora/rows:what_is_refused.9")
        for wrong in (3, -2):
            assert refusal(lambda wrong=wrong: setattr(rows, "ids", torch.tensor([0, wrong]))) == (
                message("lora/rows:what_is_refused.10", wrong)
            )
        assert refusal(lambda: model(x, adapter_ids=IDS[:3])) == message("lora/rows:what_is_refused.11")
        assert "x of (30, 24)" in refusal(lambda: model(x.flatten(0, 1), adapter_ids=IDS))
        assert refusal(lambda: model.layers["q"](x)) == message("lora/rows:what_is_refused.12")
    images = nn.Sequential(nn.Conv2d(4, 8, 3))
    gb.lora.add(images, 2, targets=["0"])
    assert refusal(lambda: gb.lora.rows(images, ["default"])) == message("lora/rows:what_is_refused.13")
    experts = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(K, 8)])})
    gb.lora.add(experts, 2)
    assert refusal(lambda: gb.lora.rows(experts, ["default"])) == message("lora/rows:what_is_refused.14")


# On the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("tokens_", [1, 100, 1024])
def test_a_captured_step_takes_other_ids_at_each_replay(tokens_):
    """Beside one adapter at a time on the rows that have it, in bf16; a number that is no place adds nothing."""
    torch.manual_seed(0)
    model = adapted(nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).to("cuda", torch.bfloat16))
    x = draw(6, tokens_, 256).to("cuda", torch.bfloat16).requires_grad_()
    leaves, ids = [x, *gb.lora.parameters(model)], IDS.cuda()

    def run(ids):
        y = model(x, adapter_ids=ids)
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    with gb.lora.rows(model, NAMES):
        for _ in range(2):
            run(ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(ids)
        for other in (IDS, IDS.flip(0), torch.where(IDS == 2, 77, IDS)):
            ids.copy_(other)
            graph.replay()
            assert all(map(torch.equal, captured, run(ids)))
        got = [t.clone() for t in captured]
    sums = [torch.zeros_like(t, dtype=torch.float32) for t in captured]
    for row, place_ in enumerate(torch.where(IDS == 2, -1, IDS).tolist()):
        with gb.lora.disable(model):
            if place_ >= 0:
                gb.lora.enable(model, NAMES[place_])
            one = x[row : row + 1].detach().requires_grad_()
            y = model(one)
            theirs = torch.autograd.grad(y, [one, *leaves[1:]], torch.ones_like(y), allow_unused=True)
            gb.lora.disable(model)
        sums[0][row], sums[1][row] = y[0].detach(), theirs[0][0]
        for total, gradient in zip(sums[2:], theirs[1:]):
            total += 0 if gradient is None else gradient
    for a, b in zip(got, sums):
        assert (a.float() - b).norm() <= 2e-2 * b.norm()
