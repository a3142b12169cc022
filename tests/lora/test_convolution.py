"""Adapters of convolutions: PEFT's numbers and files, whatever the layer's form; a network of diffusion trains with them."""

import copy

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound import trace
from gpubound.kernels.accumulate import main_gradient
from gpubound.lora import convolution
from gpubound.train import Accumulators
from tests.messages import message

from ..place.models import assert_near
from . import cases
from .cases import refusal
from .theirs import assert_same_gradients
from .unet import denoising, images, noisy, unet

ALL = "all-linear-and-conv"
FORMS = {
    "3x3": {"kernel_size": 3},
    "padded": {"kernel_size": 3, "padding": 1, "bias": False},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "same": {"kernel_size": 3, "padding": "same"},
    "wide": {"kernel_size": (1, 5), "stride": (1, 2), "padding": (0, 2)},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    "1x1": {"kernel_size": 1},
    "1x1 strided": {"kernel_size": 1, "stride": 2},
    "1x1 padded": {"kernel_size": 1, "padding": 1},
}
LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}


def adapted(model, **options):
    return cases.adapted(model, **{"rank": 2, "alpha": 6, "targets": ALL} | options)


def convolved(form, dtype=torch.float32):
    torch.manual_seed(1)
    return adapted(nn.Sequential(nn.Conv2d(4, 6, **form)).to(dtype))


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def formula(model, x):
    """By the weight that the adapter stands for, in fp64: a convolution is linear in it."""
    layer = copy.deepcopy(model).double()[0]
    own = layer.lora.default
    added = own.scale * torch.einsum("or,rchw->ochw", own.b.flatten(1), own.a)
    leaves = [x.detach().double().requires_grad_(), own.a, own.b]
    y = layer._conv_forward(leaves[0], layer.weight + added, layer.bias)
    return y, leaves


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_it_is_the_formula(form, layout):
    model, x = convolved(form), draw(2, 4, 8, 9).to(memory_format=layout).requires_grad_()
    y, (want, leaves) = model(x), formula(model, x)
    assert_near(y.double(), want)
    g = draw(*y.shape, seed=9)
    got = torch.autograd.grad(y, [x, *gb.lora.parameters(model)], g)
    for gradient, truth in zip(got, torch.autograd.grad(want, leaves, g.double()), strict=True):
        torch.testing.assert_close(gradient.double(), truth, rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        assert_near(model(x).double(), want)


def test_single_pixels_channels_last_are_a_product(monkeypatch):
    rows, linear = [], convolution.linear
    monkeypatch.setattr(convolution, "linear", lambda x, *rest: rows.append(x.shape) or linear(x, *rest))
    model = convolved(FORMS["1x1"])
    for layout in LAYOUTS.values():
        y = model(draw(2, 4, 8, 9).to(memory_format=layout))
        assert y.is_contiguous(memory_format=layout)
    assert rows == [(2, 8, 9, 4)]
    convolved(FORMS["1x1 strided"])(draw(2, 4, 8, 9).to(memory_format=torch.channels_last))
    assert len(rows) == 1


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("form", [FORMS["padded"], FORMS["1x1"]], ids=["3x3", "1x1"])
@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_sixteen_bits(how, form, layout):
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    model, x = convolved(form, dtype), draw(2, 4, 8, 9).to(dtype, memory_format=layout).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = model(x)
    want, leaves = formula(model, x)
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=layout)
    assert {p.dtype for p in gb.lora.parameters(model)} == {torch.float32}
    got = torch.autograd.grad(y, [x, *gb.lora.parameters(model)], torch.ones_like(y))
    for value, truth in zip([y, *got], [want, *torch.autograd.grad(want.sum(), leaves)], strict=True):
        assert (value.double() - truth).norm() <= 2e-2 * truth.norm()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_micro_batches_sum_in_main_grad(layout):
    model = adapted(unet()).to(memory_format=layout)
    parameters = gb.lora.parameters(model)
    (x, time), g = images(samples=4), draw(4, 3, 8, 8, seed=9)
    x = x.to(memory_format=layout)
    want = torch.autograd.grad(model(x, time), parameters, g)
    sums = Accumulators(model.named_parameters())
    sums.gradient.fill_(float("nan"))
    sums.begin()
    for one in range(4):
        model(x[one : one + 1], time[one : one + 1]).backward(g[one : one + 1])
    sums.finish()
    for p, truth in zip(parameters, want, strict=True):
        assert p.grad is None
        torch.testing.assert_close(main_gradient(p), truth, rtol=1e-4, atol=1e-4)


def test_dropout_has_the_share_it_should():
    model = convolved(FORMS["3x3"])
    own = model[0].lora.default
    own.dropout.p = 0.25
    x = torch.ones(1, 4, 30, 30)
    model.eval()
    plain = model(x) - nn.Conv2d.forward(model[0], x)
    model.train()
    torch.manual_seed(0)
    found = torch.stack([model(x) - nn.Conv2d.forward(model[0], x) for _ in range(20)])
    assert not torch.allclose(found[0], found[1])
    torch.testing.assert_close(found.mean((0, 3, 4)), plain.mean((2, 3)), rtol=0.05, atol=0.05)


# --- the whole network ---


def merged_by_hand(model):
    plain = copy.deepcopy(model)
    added = {}
    for key, own in plain.named_modules():
        if key.endswith("lora.default"):
            shape = (len(own.b), *own.a.shape[1:])
            added[key] = own.scale * torch.einsum("or,r...->o...", own.b.flatten(1), own.a).view(shape)
    gb.lora.remove(plain)
    with torch.no_grad():
        for key, delta in added.items():
            plain.get_submodule(key.removesuffix(".lora.default")).weight += delta
    return plain


def test_targets():
    def ends(model):
        return {key.partition(".lora.")[0].rpartition(".")[2] for key, _ in model.named_parameters() if ".lora." in key}

    linear = {"to_q", "to_k", "to_v", "to_out", "time_proj"}
    convolutions = {"conv_in", "down", "conv1", "conv2", "shortcut", "up", "conv_out"}
    assert ends(adapted(unet(), targets="all-linear")) == linear
    assert ends(adapted(unet())) == linear | convolutions
    assert ends(adapted(unet(), targets=["conv1", "to_q"])) == {"conv1", "to_q"}
    assert ends(adapted(unet(), targets=r"middle\..*conv\d")) == {"conv1", "conv2"}


def test_merged_off_and_removed():
    model = unet()
    names, before = list(model.state_dict()), model(*images())
    adapted(model)
    want = model(*images())
    assert_near(want, merged_by_hand(model)(*images()))
    with gb.lora.disable(model):
        assert torch.equal(model(*images()), before)
        assert not any("forward" in vars(m) for m in model.modules() if isinstance(m, nn.Conv2d)), "off, it costs nothing"
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    assert gb.lora.merge(model) < 1e-6
    assert not any("forward" in vars(m) for m in model.modules() if isinstance(m, nn.Conv2d))
    assert_near(model(*images()), want)
    gb.lora.unmerge(model)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(*images()), want)
    gb.lora.remove(model)
    assert list(model.state_dict()) == names and torch.equal(model(*images()), before)
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_copy_has_adapters_of_its_own():
    model = adapted(unet())
    want, other = model(*images()), copy.deepcopy(model)
    torch.testing.assert_close(other(*images()), want)
    with torch.no_grad():
        for p in gb.lora.parameters(other):
            p.zero_()
    assert not torch.allclose(other(*images()), want)
    torch.testing.assert_close(model(*images()), want)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_trains_them_alone(accumulate, layout):
    """Against autograd and torch's AdamW, by losses and weights."""
    ours = adapted(unet()).to(memory_format=layout)
    frozen, theirs = copy.deepcopy(ours.state_dict()), copy.deepcopy(ours)
    optimizer = torch.optim.AdamW(gb.lora.parameters(theirs), lr=1e-2, weight_decay=0.0)
    step = gb.TrainStep(
        ours, denoising, gb.AdamW(lr=1e-2, weight_decay=0.0), accumulate=accumulate, clip=None, precision="fp32", graph="off"
    )
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        total, count = denoising(theirs, noisy())
        (total / count).backward()
        optimizer.step()
        losses.append(step([[t.chunk(accumulate)[i] for t in noisy()] for i in range(accumulate)]).read().loss)
        assert losses[-1] == pytest.approx((total / count).item(), rel=1e-4)
    step.close()
    assert losses[-1] < 0.9 * losses[0]
    for name, value in ours.state_dict().items():
        assert torch.equal(value, frozen[name]) != (".lora." in name), name


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_captured_is_eager_bit_for_bit(dropout):
    found = []
    for graph in ("off", "require"):
        model = adapted(unet(), dropout=dropout).train()
        torch.manual_seed(5)
        step = gb.TrainStep(model, denoising, gb.AdamW(lr=1e-2), precision="fp32", graph=graph)
        found.append([step(noisy()).read().loss for _ in range(3)])
        step.close()
    assert found[0] == found[1] and len(set(found[0])) == 3


def test_in_bf16():
    losses = []
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        step = gb.TrainStep(adapted(unet().to(dtype)), denoising, gb.AdamW(lr=1e-2), precision=precision, graph="off")
        losses.append([step(noisy()).read().loss for _ in range(3)])
        step.close()
    assert losses[1] == pytest.approx(losses[0], rel=3e-2)


# --- PEFT ---

ENDS = ["conv1", "conv2", "shortcut", "down", "up", "to_q", "to_v", "time_proj"]


def peft_unet(**options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    config = {"r": 2, "lora_alpha": 6, "target_modules": ENDS, "init_lora_weights": False}
    return peft.get_peft_model(unet(), peft.LoraConfig(**config | options))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "rank_pattern": {"conv1": 1}, "lora_dropout": 0.1}], ids=str)
def test_what_peft_saves_is_loaded_with_its_gradients(tmp_path, options):
    theirs, ours = peft_unet(**options).eval(), unet().eval()
    theirs.save_pretrained(tmp_path)
    gb.lora.load(ours, tmp_path)
    got, want = ours(*images()), theirs(*images())
    assert_near(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"targets": ENDS, "rslora": True}], ids=str)
def test_peft_loads_what_is_saved_here(tmp_path, options):
    peft = pytest.importorskip("peft")
    model = adapted(unet(), **options)
    gb.lora.save(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(unet(), tmp_path)
    assert_near(theirs(*images()), model(*images()))
    assert sum("lora_" in name for name, _ in theirs.named_parameters()) == len(gb.lora.parameters(model))
    torch.testing.assert_close(theirs.merge_and_unload()(*images()), model(*images()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["dilated", "circular"])
def test_a_file_that_peft_computes_otherwise_is_said(tmp_path, form):
    """PEFT gives a the stride and the padding alone; merged, it is right there, too."""
    peft = pytest.importorskip("peft")
    model, x = convolved(FORMS[form]), draw(2, 4, 8, 9)
    said = r"0 (has dilation \(2, 2\)|pads by 'circular'), which PEFT leaves out"
    with gb.strict(), pytest.raises(gb.FallbackError, match=said):
        gb.lora.save(model, tmp_path)
    trace.fallbacks.clear()
    gb.lora.save(model, tmp_path)
    assert len(trace.fallbacks) == 1
    base = copy.deepcopy(model)
    gb.lora.remove(base)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).merge_and_unload()
    assert_near(theirs(x), model(x))
    gb.lora.load(base, tmp_path)
    torch.testing.assert_close(base(x), model(x))


# --- what is refused ---


def test_groups_are_refused_by_name():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3))
    assert refusal(lambda: gb.lora.add(model, 2, targets=["0"])) == message("lora/convolution:groups_are_refused_by_na")
    with gb.strict(), pytest.raises(gb.FallbackError, match="0 has groups = 2"):
        gb.lora.add(model, 2, targets=ALL)
    assert gb.lora.add(model, 2, targets=ALL) == ["1"]


def test_other_convolutions_are_refused_by_name():
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3))
    assert message("lora/convolution:other_convolutions_are_r").within(refusal(lambda: gb.lora.add(model, 2, targets=["0"])))
    assert message("lora/convolution:other_convolutions_are_r.2").within(refusal(lambda: gb.lora.add(model, 2, targets=["1"])))


def test_a_rank_above_the_matrix_is_refused():
    model = nn.Sequential(nn.Conv2d(4, 60, 3), nn.Conv2d(60, 60, 3))
    assert refusal(lambda: gb.lora.add(model, 37, targets=["0"])) == message("lora/convolution:a_rank_above_the_matrix")
    trace.fallbacks.clear()
    assert gb.lora.add(model, 37, targets=ALL) == ["1"]
    assert list(trace.fallbacks) == [
        (f"lora.add: {ALL}", "0 has a weight of 60 x 4 x 3 x 3, too small for rank 37, so it gets no adapter")
    ]
