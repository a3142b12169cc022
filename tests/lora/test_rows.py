"""Rows of one batch with adapters of their own: beside PEFT, one adapter at a time, and the formula row by row."""

import copy
import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpubound as gb
from gpubound.kernels.lora import drawn, kept
from gpubound.layers import Stacked
from gpubound.lora import per_row
from gpubound.lora.per_row import PerRow
from gpubound.train import Accumulators

from ..place.models import place, tiny, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
NAMES = ["one", "two", "three"]
RANKS, ALPHAS = (4, 2, 3), (8, 3, 1)
IDS = torch.tensor([1, 0, -1, 2, 1, 0])
K = 24


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adapted(model, names=NAMES, **options):
    for i, name in enumerate(names):
        torch.manual_seed(i + 5)
        gb.lora.add(model, RANKS[i], alpha=ALPHAS[i], name=name, init=False, **options)
    return model


# One product, beside the formula


class Projections(nn.Module):
    """q, k and v as one product."""

    def __init__(self, outputs=(16, 8, 8)):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleDict({name: nn.Linear(K, size) for name, size in zip("qkv", outputs)})
        self.stacked = Stacked()

    def forward(self, x):
        return self.stacked.product(x, list(self.layers.values()))


def formula(model, x, ids, mask=None):
    """Row by row, as PEFT writes it, by autograd."""
    found = []
    for row, place_ in zip(range(len(x)), ids.tolist()):
        parts = []
        for layer in model.layers.values():
            y = F.linear(x[row], layer.weight, layer.bias)
            if place_ >= 0 and NAMES[place_] in (adapters := getattr(layer, "lora", {})):
                own = adapters[NAMES[place_]]
                seen = x[row] if mask is None else x[row] * mask[row]
                y = y + own.scale * (seen @ own.a.t()) @ own.b.t()
            parts.append(y)
        found.append(torch.cat(parts, -1))
    return torch.stack(found)


def assert_same(got, want, **tolerance):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **{"rtol": 1e-4, "atol": 1e-5} | tolerance)


def gradients(y, leaves):
    """Those that none of the rows has are zero."""
    made = torch.autograd.grad(y, leaves, draw(*y.shape, seed=9), allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, made)]


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
            torch.testing.assert_close(model(x, adapter_ids=IDS), want, rtol=1e-4, atol=1e-5)


def test_gradients_in_fp64():
    model = adapted(Projections((6, 4)).double())
    x = draw(3, 2, K).double().requires_grad_()
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
        torch.testing.assert_close(model(x, adapter_ids=torch.where(IDS == 2, -1, IDS)), want, rtol=1e-4, atol=1e-5)
    gb.lora.add(model, 3, targets=["k"], name="three", init=False)
    own = model.layers["k"].lora["three"]
    want[..., 16:24] += own.scale * (x @ own.a.t()) @ own.b.t()
    with gb.lora.rows(model, NAMES[:2]):
        torch.testing.assert_close(model(x, adapter_ids=torch.where(IDS == 2, -1, IDS)), want, rtol=1e-4, atol=1e-5)


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
        torch.testing.assert_close(model(x, adapter_ids=IDS), formula(model, x, IDS), rtol=1e-4, atol=1e-5)


def test_adapters_that_drop_differently():
    model, x = Projections(), draw(6, 5, K)
    for i, name in enumerate(NAMES):
        gb.lora.add(model, RANKS[i], alpha=ALPHAS[i], name=name, init=False, dropout=i / 10)
    with gb.lora.rows(model.eval(), NAMES):
        torch.testing.assert_close(model(x, adapter_ids=IDS), formula(model, x, IDS), rtol=1e-4, atol=1e-5)
        differ = (model.train()(x, adapter_ids=IDS) - formula(model, x, IDS)).abs().amax((1, 2)) > 1e-2
        assert differ.tolist() == [i > 0 for i in IDS.tolist()]


def test_micro_batches_with_other_rows_are_one_batch():
    """Into fp32 accumulators: the gradients of all adapters of a weight come from one product."""
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
    launches, launch = [], per_row.lora_gradients
    monkeypatch.setattr(per_row, "lora_gradients", lambda *given: launches.append(given[4].shape) or launch(*given))
    with gb.lora.rows(model, NAMES):
        if accumulated:
            sums = Accumulators(model.named_parameters())
            sums.begin()
        lows = [low for layer in model.layers.values() for low in layer.weight.gpubound.adapters]
        assert [type(low) for low in lows] == [PerRow] * 3
        for low in lows:
            assert low.a.data_ptr() == low.all_a[0].data_ptr() and low.b.data_ptr() == low.all_b[0].data_ptr()
        whole = per_row.join_rows([low.a for low in lows])
        assert whole is not None and whole.shape == (3 * sum(RANKS), K)
        model(x, adapter_ids=IDS).sum().backward()
    assert launches == [(sum(RANKS), K)] * 3


def test_some_are_frozen():
    model, x = adapted(Projections()), draw(6, 5, K)
    for p in gb.lora.parameters(model, "two"):
        p.requires_grad_(False)
    model.layers["k"].lora["one"].a.requires_grad_(False)
    leaves = [p for p in gb.lora.parameters(model) if p.requires_grad]
    want = gradients(formula(model, x, IDS), leaves)
    with gb.lora.rows(model, NAMES):
        assert_same(gradients(model(x, adapter_ids=IDS), leaves), want)


# Whole models, beside PEFT


@pytest.fixture
def theirs(tmp_path):
    """The same adapters in PEFT's model, through its files."""
    peft = pytest.importorskip("peft")
    source = adapted(tiny())
    for name in NAMES:
        gb.lora.save(source, tmp_path / name, name)
    model = peft.PeftModel.from_pretrained(tiny(), tmp_path / "one", adapter_name="one", is_trainable=True)
    for name in NAMES[1:]:
        model.load_adapter(tmp_path / name, name, is_trainable=True)
    return model.eval()


def ours(order="placed first"):
    model = tiny()
    if order == "placed first":
        place(model, strict=True)
    adapted(model)
    if order == "placed last":
        place(model, strict=True)
    return model


def words(ids):
    return [NAMES[i] if i >= 0 else "__base__" for i in ids.tolist()]


def pefts(model, name):
    """PEFT's parameters of one adapter in the order of ours."""
    return {
        key.replace("base_model.model.", "").replace(f".lora_{letter}.{name}.weight", f".lora.{name}.{letter.lower()}"): p
        for key, p in model.named_parameters()
        for letter in "AB"
        if f".lora_{letter}.{name}." in key
    }


@pytest.mark.parametrize("order", ["placed first", "placed last", "plain"])
def test_it_is_pefts_mixed_batch(order, theirs):
    model, ids = ours(order).eval(), tokens(rows=6)
    with gb.lora.rows(model, NAMES), torch.no_grad():
        for given in (IDS, IDS.flip(0), torch.full_like(IDS, -1)):
            want = theirs(ids, adapter_names=words(given)).logits
            torch.testing.assert_close(model(ids, adapter_ids=given).logits, want, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_one_adapter_at_a_time(theirs):
    """PEFT with one adapter on the rows that have it. fp32: sums of at most 72 tokens in another order."""
    model, ids = ours(), tokens(rows=6)
    g = draw(6, 12, 89, seed=9)
    with gb.lora.rows(model, NAMES):
        (model(ids, adapter_ids=IDS).logits * g).sum().backward()
    found = dict(model.named_parameters())
    for place_, name in enumerate(NAMES):
        theirs.base_model.set_adapter(name)
        rows = place_ == IDS
        (theirs(ids[rows]).logits * g[rows]).sum().backward()
        for key, p in pefts(theirs, name).items():
            torch.testing.assert_close(found[key].grad, p.grad, rtol=1e-3, atol=1e-4 * p.grad.abs().max().item(), msg=key)


def labelled(shift=0):
    ids = tokens(rows=6, seed=shift)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels, "adapter_ids": IDS.roll(shift)}


@pytest.mark.parametrize("graph", ["off", "require"])
def test_one_step_trains_all_of_them(graph, theirs):
    """Three steps whose rows have other adapters each time: PEFT's, one adapter at a time, with one torch.optim.AdamW."""
    trained = {name: pefts(theirs, name) for name in NAMES}
    every = [p.requires_grad_() for own in trained.values() for p in own.values()]
    optimizer, want = torch.optim.AdamW(every, lr=1e-2, weight_decay=0.0), []
    for shift in range(3):
        batch, total = labelled(shift), 0.0
        optimizer.zero_grad()
        items = (batch["labels"][:, 1:] != -100).sum()
        for place_ in range(-1, 3):
            rows = batch["adapter_ids"] == place_
            if place_ >= 0:
                theirs.base_model.set_adapter(NAMES[place_])
            names = {"adapter_names": words(batch["adapter_ids"][rows])} if place_ < 0 else {}
            logits = theirs(batch["input_ids"][rows], **names).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"][rows, 1:].flatten(), reduction="sum") / items
            if place_ >= 0:
                loss.backward()
            total += loss.item()
        for p in every:
            p.requires_grad_()
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        want.append(total)
    model = ours().train()
    with gb.lora.rows(model, NAMES):
        step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-2, weight_decay=0.0), precision="fp32", graph=graph)
        got = [step(labelled(shift)).read().loss for shift in range(3)]
        step.close()
    assert got == pytest.approx(want, abs=1e-5)


def test_rows_of_one_leave_the_others_as_they_are():
    """Bit for bit: their gradients are sums of zeros, and AdamW's moments begin at zero."""
    model = ours().train()
    before = {name: [p.clone() for p in gb.lora.parameters(model, name)] for name in NAMES}
    with gb.lora.rows(model, NAMES):
        step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-2, weight_decay=0.0), precision="fp32", graph="off")
        for _ in range(2):
            step(labelled() | {"adapter_ids": torch.where(IDS == 1, 1, -1)})
        step.close()
    same = {name: all(map(torch.equal, before[name], gb.lora.parameters(model, name))) for name in NAMES}
    assert same == {"one": True, "two": False, "three": True}


@pytest.mark.parametrize("recompute", ["none", "cheap", "blocks"])
def test_recomputing_is_the_same(recompute):
    found = []
    for how in ("none", recompute):
        model = ours().train()
        with gb.lora.rows(model, NAMES):
            step = gb.TrainStep(model, "causal_lm", "adamw", precision="fp32", graph="off", recompute=how, accumulate=2)
            step([labelled(), labelled(1)])
            found.append([p.clone() for p in gb.lora.parameters(model)])
            step.close()
    assert_same(*found)


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
        with pytest.raises(RuntimeError, match="run backward before the model's next call"):
            gradients(first, leaves)
        ids = IDS.clone()
        second = outer(x, adapter_ids=ids)
        ids.copy_(IDS.flip(0))
        with pytest.raises(RuntimeError, match="run backward before the model's next call"):
            gradients(second, leaves)


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
        torch.testing.assert_close(compiled(x, adapter_ids=IDS.flip(0)), formula(model, x, IDS.flip(0)), rtol=1e-4, atol=1e-5)


# Calls and states


def test_generation_takes_the_ids_that_are_set():
    model, ids = ours().eval(), tokens(rows=6)
    with gb.lora.rows(model, NAMES) as rows:
        rows.ids = IDS
        got = model.generate(ids, max_new_tokens=4, do_sample=False)
        torch.testing.assert_close(model(ids).logits, model(ids, adapter_ids=IDS).logits)
        assert not torch.allclose(model(ids).logits, model(ids, adapter_ids=IDS.flip(0)).logits, atol=1e-2)
    for place_ in range(-1, 3):
        gb.lora.disable(model)
        if place_ >= 0:
            gb.lora.enable(model, NAMES[place_])
        own = place_ == IDS
        assert torch.equal(got[own], model.generate(ids[own], max_new_tokens=4, do_sample=False))


def test_closed_all_are_added_to_all_rows_again():
    model, ids = ours(), tokens(rows=6)
    want = model(ids).logits
    rows = gb.lora.rows(model, NAMES)
    assert not torch.allclose(model(ids, adapter_ids=IDS).logits, want, atol=1e-2)
    rows.close()
    torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="adapter_ids"):
        adapted(Projections())(draw(6, 5, K), adapter_ids=IDS)


def test_switched_off_meanwhile():
    model, x = adapted(Projections()), draw(6, 5, K)
    with gb.lora.rows(model, NAMES):
        with gb.lora.disable(model, "two"):
            want = formula(model, x, torch.where(IDS == 1, -1, IDS))
            torch.testing.assert_close(model(x, adapter_ids=IDS), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(x, adapter_ids=IDS), formula(model, x, IDS), rtol=1e-4, atol=1e-5)


def test_copies_and_pickles_keep_them():
    model, x = adapted(Projections()), draw(6, 5, K)
    want = formula(model, x, IDS)
    with gb.lora.rows(model, NAMES):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            torch.testing.assert_close(other(x, adapter_ids=IDS), want, rtol=1e-4, atol=1e-5)
            with torch.no_grad():
                for p in gb.lora.parameters(other):
                    p.zero_()
            assert not torch.allclose(other(x, adapter_ids=IDS), want)
        torch.testing.assert_close(model(x, adapter_ids=IDS), want, rtol=1e-4, atol=1e-5)


def test_beside_a_training_step_that_was_made_before():
    """Its parameters stay in its buffers, and are copied together for the products."""
    model, x = adapted(Projections()), draw(6, 5, K)
    loss = lambda model, batch: (model(**batch).square().sum(), 6)  # noqa: E731
    step = gb.TrainStep(model, loss, "adamw", precision="fp32", graph="off")
    step({"x": x})
    with gb.lora.rows(model, NAMES):
        torch.testing.assert_close(model(x, adapter_ids=IDS), formula(model, x, IDS), rtol=1e-4, atol=1e-5)
        step({"x": x, "adapter_ids": IDS})
    step({"x": x})
    step.close()


def refusal(call):
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def test_what_is_refused():
    model, x = adapted(Projections()), draw(6, 5, K)
    start = partial(gb.lora.rows, model)
    assert refusal(lambda: start("one")) == (
        "lora.rows: names must be different names of adapters, such as ['first', 'second'], got 'one'."
    )
    assert refusal(lambda: start(["one", "four"])) == (
        "lora.rows: the model has no adapter named 'four', only 'one', 'three', 'two'."
    )
    with gb.lora.disable(model, "one"):
        assert refusal(lambda: start(NAMES)) == (
            "lora.rows: the adapter 'one' of layers.q is switched off; call gb.lora.enable first."
        )
    gb.lora.merge(model, "one")
    assert refusal(lambda: start(NAMES)) == "lora.rows: the adapter 'one' of layers.q is merged; call gb.lora.unmerge first."
    gb.lora.unmerge(model)
    with start(NAMES) as rows:
        assert refusal(lambda: start(NAMES)) == (
            "lora.rows: the adapter 'one' of layers.q is one that rows choose from already; call close() of what gb.lora.rows "
            "returned first."
        )
        for call in (gb.lora.merge, gb.lora.remove):
            assert refusal(lambda call=call: call(model)) == (
                f"lora.{call.__name__}: rows of a batch choose from the adapters of layers.q; call close() of "
                f"what gb.lora.rows returned first."
            )
        assert refusal(lambda: model(x)) == (
            "lora.rows: the call has no adapter_ids; give one number a row, places in ['one', 'two', 'three'] or -1, or set "
            "`ids` of what gb.lora.rows returned."
        )
        assert refusal(lambda: model(x, adapter_ids=[0, 1])) == (
            "lora.rows: adapter_ids must be an int32 or int64 tensor (rows,), got a list; give one number for each row of the "
            "batch, -1 for the model without adapters."
        )
        for wrong in (3, -2):
            assert refusal(lambda wrong=wrong: setattr(rows, "ids", torch.tensor([0, wrong]))) == (
                f"lora.rows: adapter_ids must be from -1 to 2, places in ['one', 'two', 'three'] or -1 for none of them, got "
                f"{wrong}."
            )
        assert refusal(lambda: model(x, adapter_ids=IDS[:3])) == (
            "lora.rows: adapter_ids are 3, and an adapted layer has an x of (6, 5, 24), whose first dimension must be the "
            "batch's rows; give one for each, and adapt no layers that see rows merged or gathered."
        )
        assert "x of (30, 24)" in refusal(lambda: model(x.flatten(0, 1), adapter_ids=IDS))
        assert refusal(lambda: model.layers["q"](x)) == (
            "lora.rows: an adapted layer was called beside the model; call the model with adapter_ids, or set `ids` of what "
            "gb.lora.rows returned."
        )
    images = nn.Sequential(nn.Conv2d(4, 8, 3))
    gb.lora.add(images, 2, targets=["0"])
    assert refusal(lambda: gb.lora.rows(images, ["default"])) == (
        "lora.rows: the adapter 'default' of 0 is of an nn.Conv2d, and rows choose from adapters of nn.Linear alone."
    )
    experts = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(K, 8)])})
    gb.lora.add(experts, 2)
    assert refusal(lambda: gb.lora.rows(experts, ["default"])) == (
        "lora.rows: the adapter 'default' of experts.0 sees rows that a router has gathered, and whose they are is not known "
        "there; adapt other layers."
    )
