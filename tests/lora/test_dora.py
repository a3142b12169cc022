"""DoRA: the formula, PEFT's numbers, gradients and files; it is a fallback, and says so."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpubound as gb
from gpubound import trace
from gpubound.kernels.accumulate import main_gradient
from gpubound.kernels.hash_dropout import Drop, kept
from gpubound.layers import linear_product
from gpubound.train import Accumulators
from tests.messages import message

from ..place.models import assert_close, assert_near, batch, place, tiny, tokens, training_run
from .cases import adapted, records, refusal
from .theirs import assert_same_gradients

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def with_dora(model, seed=3, **options):
    """Lengths that are not the weight's own, so that they say something."""
    adapted(model, seed=seed, dora=True, **options)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".m"):
                p.mul_(torch.rand(p.shape, generator=torch.Generator().manual_seed(7)) + 0.5)
    return model


def layer(dtype=torch.float64, outputs=6):
    torch.manual_seed(1)
    return with_dora(nn.Sequential(nn.Linear(8, outputs, dtype=dtype)), rank=3)


def formula(weight, bias, own, x, mask=None):
    """The weight that it stands for; what is dropped from x is dropped from all that was added."""
    a, b, m = own.parameters()
    whole = weight + own.scale * b @ a
    f = (m / whole.detach().norm(dim=1))[:, None]
    if mask is None:
        return F.linear(x, f * weight + own.scale * (f * b) @ a, bias)
    return F.linear(x, weight, bias) + F.linear(x * mask, (f - 1) * weight + own.scale * (f * b) @ a)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (0, 8)], ids=str)
def test_it_is_the_formula(shape):
    model, x = layer(), draw(*shape).requires_grad_()
    own, leaves = model[0].lora.default, [x, *gb.lora.parameters(model)]
    assert len(leaves) == 4
    got, want = model(x), formula(model[0].weight, model[0].bias, own, x)
    torch.testing.assert_close(got, want)
    g = draw(*got.shape, seed=9)
    for one, truth in zip(torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, leaves, g), strict=True):
        torch.testing.assert_close(one, truth)
    with torch.no_grad():
        torch.testing.assert_close(model(x), want)


def test_dropout_has_one_mask_in_forward_and_backward(monkeypatch):
    model, x = layer(), draw(16, 8).requires_grad_()
    own, leaves = model[0].lora.default, [x, *gb.lora.parameters(model)]
    own.dropout.p = 0.25
    seed = torch.tensor([11])
    monkeypatch.setattr("gpubound.lora.dora.drawn", lambda p, device: Drop(p, seed) if p else None)
    mask = kept(Drop(0.25, seed), 16, 8) / 0.75
    assert 0 < (mask == 0).sum() < mask.numel() / 2
    got, want = model(x), formula(model[0].weight, model[0].bias, own, x, mask)
    torch.testing.assert_close(got, want)
    g = draw(*got.shape, seed=9)
    for one, truth in zip(torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, leaves, g), strict=True):
        torch.testing.assert_close(one, truth)
    model.eval()
    torch.testing.assert_close(model(x), formula(model[0].weight, model[0].bias, own, x))


def test_dropout_under_a_checkpoint():
    model, x, found = layer(), draw(16, 8).requires_grad_(), []
    model[0].lora.default.dropout.p = 0.25
    for call in (model, lambda t: checkpoint(model, t, use_reentrant=False)):
        torch.manual_seed(3)
        found.append(torch.autograd.grad(call(x).square().sum(), [x, *gb.lora.parameters(model)]))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_sixteen_bits(how, dtype):
    model, x = layer(torch.float32 if how == "autocast" else dtype), draw(5, 8).float()
    assert {p.dtype for p in gb.lora.parameters(model)} == {torch.float32}
    exact = copy.deepcopy(model).double()
    want = formula(exact[0].weight, exact[0].bias, exact[0].lora.default, x.double())
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        got = model(x if how == "autocast" else x.to(dtype))
    assert got.dtype == dtype and (got.double() - want).norm() <= 2e-2 * want.norm()
    truth = torch.autograd.grad(want.sum(), list(exact[0].lora.default.parameters()))
    for one, two in zip(torch.autograd.grad(got.sum(), gb.lora.parameters(model)), truth, strict=True):
        assert one.dtype == torch.float32 and (one.double() - two).norm() <= 2e-2 * two.norm()


def test_micro_batches_sum_in_main_grad():
    model, x, g = layer(torch.float32), draw(16, 8).float(), draw(16, 6, seed=9).float()
    parameters = gb.lora.parameters(model)
    want = torch.autograd.grad(model(x), parameters, g)
    sums = Accumulators(model.named_parameters())
    sums.gradient.fill_(float("nan"))
    sums.begin()
    for rows, gradient in zip(x.split(4), g.split(4)):
        model(rows).backward(gradient)
    sums.finish()
    for p, truth in zip(parameters, want, strict=True):
        assert p.grad is None
        assert_near(main_gradient(p), truth)


def test_begins_as_the_model_was():
    model = tiny()
    want = model(tokens()).logits
    gb.lora.add(model, 4, dora=True)
    assert_near(model(tokens()).logits, want)
    q = model.model.layers[0].self_attn.q_proj
    torch.testing.assert_close(q.lora.default.m, q.weight.norm(dim=1))
    gb.lora.add(model, 4, dora=True, init=False, name="noise")
    torch.testing.assert_close(q.lora.noise.m, (q.weight + q.lora.noise.b @ q.lora.noise.a).norm(dim=1))


def test_gradients_are_the_same_placed_or_not():
    truth = training_run(with_dora(tiny()), batch())
    for order in (lambda m: [place(m), with_dora(m)], lambda m: [with_dora(m), place(m)]):
        order(model := tiny())
        assert_close(training_run(model, batch()), truth)
    assert {name.rpartition(".")[2] for name in truth if name != "loss"} == {"a", "b", "m"}


def test_beside_plain_ones_on_one_product():
    """q with DoRA, k with a plain one, v with both: each adds to its own columns."""
    model, plain = tiny(), tiny()
    place(model)
    for other in (model, plain):
        with_dora(other, targets=["q_proj", "v_proj"])
        adapted(other, name="plain", targets=["k_proj", "v_proj"])
    assert_close(training_run(model, batch()), training_run(plain, batch()))


def test_merged_there_and_back():
    model = with_dora(tiny())
    adapted(model, seed=5, name="plain", targets=["q_proj"])
    weights, want = {key: value.clone() for key, value in model.state_dict().items()}, model(tokens()).logits
    for names in ([None], ["default", "plain"]):
        for name in names:
            assert gb.lora.merge(model, name) < 1e-6
            assert_near(model(tokens()).logits, want)
        assert not any(records(model))
        assert_near(model(tokens()).logits, want)
        gb.lora.unmerge(model)
        assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_others_are_not_merged_under_it():
    """They would change the weight whose rows it lengthens."""
    model = with_dora(tiny())
    adapted(model, seed=5, name="plain", targets=["q_proj"])
    want = model(tokens()).logits
    assert refusal(lambda: gb.lora.merge(model, "plain")) == message("lora/dora:others_are_not_merged_un")
    assert torch.equal(model(tokens()).logits, want)
    with gb.lora.disable(model, "default"), pytest.raises(ValueError, check=message("lora/dora:others_are_not_merged_un.2")):
        gb.lora.merge(model)


def test_it_does_not_begin_over_what_is_merged():
    model = adapted(tiny(), targets=["q_proj"])
    gb.lora.merge(model)
    assert refusal(lambda: gb.lora.add(model, 2, dora=True, name="late")) == message("lora/dora:it_does_not_begin_over_w")


def test_a_copy_has_its_own():
    model = with_dora(tiny())
    other, want = copy.deepcopy(model), model(tokens()).logits
    torch.testing.assert_close(other(tokens()).logits, want)
    with torch.no_grad():
        for p in gb.lora.parameters(other):
            p.mul_(2)
    assert not torch.allclose(other(tokens()).logits, want)
    torch.testing.assert_close(model(tokens()).logits, want)


def test_it_is_a_counted_fallback():
    model = with_dora(tiny())
    with gb.strict(), pytest.raises(gb.FallbackError, check=message("lora/dora:it_is_a_counted_fallback")):
        model(tokens())
    trace.fallbacks.clear()
    model(tokens())
    assert sum(trace.fallbacks.values()) == len(gb.lora.parameters(model)) // 3


def test_a_decoder_runs_the_model_as_it_is():
    model = with_dora(tiny(), targets=["q_proj"]).eval()
    with gb.strict(), pytest.raises(gb.FallbackError, check=message("lora/dora:a_decoder_runs_the_model")):
        gb.decoder(model, max_length=16)
    want = model.generate(tokens(1, 5), max_new_tokens=4, do_sample=False)[0, 5:].tolist()
    assert gb.decoder(model, max_length=16).generate(tokens(1, 5), max_new_tokens=4).sequences[0].tokens == want


def test_compiled_code_sees_it():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer(torch.float32)[0]

        def forward(self, x):
            return linear_product.linear(x, self.layer.weight, self.layer.bias)

    calls, x = Calls(), draw(5, 8).float()
    got = torch.compile(calls, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, formula(calls.layer.weight, calls.layer.bias, calls.layer.lora.default, x))


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_captured_is_eager_bit_for_bit(dropout):
    found = []
    for graph in ("off", "require"):
        model = tiny().train()
        place(model)
        with_dora(model, dropout=dropout)
        torch.manual_seed(5)
        step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-2), precision="fp32", graph=graph)
        found.append([step(batch()).read().loss for _ in range(3)])
        step.close()
    assert found[0] == found[1] and len(set(found[0])) == 3


# --- PEFT ---


def theirs_with_dora(**options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, "use_dora": True}
    model = peft.get_peft_model(tiny(), peft.LoraConfig(**config | options))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "magnitude" in name:
                p.mul_(torch.rand(p.shape, generator=torch.Generator().manual_seed(7)) + 0.5)
    return model


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 2}}], ids=str)
def test_what_peft_saves_is_loaded_with_its_gradients(tmp_path, options, placed):
    theirs, ours = theirs_with_dora(**options), tiny()
    theirs.save_pretrained(tmp_path)
    if placed:
        place(ours)
    gb.lora.load(ours, tmp_path)
    assert_near(ours(tokens()).logits, theirs(tokens()).logits)
    for model in (ours, theirs):
        model(**batch()).loss.backward()
    assert_same_gradients(ours, theirs)
    torch.testing.assert_close(theirs.merge_and_unload()(tokens()).logits, ours(tokens()).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"targets": ["q_proj", "up_proj"], "rslora": True, "dropout": 0.1}], ids=str)
def test_peft_loads_what_is_saved_here(tmp_path, options):
    peft = pytest.importorskip("peft")
    model = with_dora(tiny(), **options).eval()
    gb.lora.save(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(tiny(), tmp_path)
    assert_near(theirs(tokens()).logits, model(tokens()).logits)
    assert sum("lora_" in name for name, _ in theirs.named_parameters()) == len(gb.lora.parameters(model))
    again = tiny().eval()
    gb.lora.load(again, tmp_path)
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


# --- what is refused ---


def test_other_layers_are_refused():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Linear(4, 4))
    assert refusal(lambda: gb.lora.add(model, 2, targets=["0"], dora=True)) == message("lora/dora:other_layers_are_refused")


def test_a_file_of_the_other_sort_is_refused(tmp_path):
    gb.lora.save(with_dora(tiny(), targets=["v_proj"]), tmp_path)
    with pytest.raises(gb.DataError, check=message("lora/dora:a_file_of_the_other_sort")):
        gb.lora.load(adapted(tiny(), targets=["v_proj"]), tmp_path)


def test_two_sorts_in_one_file_are_refused(tmp_path):
    model = adapted(tiny(), targets=["q_proj"])
    with_dora(model, targets=["v_proj"])
    with pytest.raises(ValueError, match="in rslora, dora or dropout"):
        gb.lora.save(model, tmp_path)


def test_rows_cannot_choose_from_them():
    model = with_dora(tiny(), targets=["v_proj"])
    assert refusal(lambda: gb.lora.rows(model, ["default"])) == message("lora/dora:rows_cannot_choose_from")
