"""Models of the family against plain torch, loss and every gradient; causal ones see nothing ahead, the others do."""

import pytest
import torch
import torch.nn.functional as F

import gpubound as gb
from gpubound.models.richards import RichardsConfig, RichardsDecoder

from . import plain

SHAPE = {"hidden": 24, "intermediate": 20, "layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": 40}
MODELS = {
    "plain": {},
    "tied, without positions": {"tied": True, "rope": False},
    "bidirectional": {"causal": False},
    "richards": {"mlp": "richards_glu", "attention": "poly"},
    "dynamic tanh": {"norm": "dyt", "alpha": 0.8},
    "experts": {"mlp": "moe", "experts": 5, "slots": 2, "balance": 0.0},
    "polynomial": {"attention": "poly", "soft_clip": 3.0, "gates": True, "window": 4},
    "polynomial, bidirectional": {"attention": "poly", "degree": 1, "soft_clip": 0.0, "causal": False},
    "recurrent": {"attention": "rg_lru"},
}


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch):
    """On a CPU the doors take the reference here: the kernels' own tests hold the interpreter to it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def made(dtype=torch.float64, **options) -> RichardsDecoder:
    torch.manual_seed(0)
    model = RichardsDecoder(RichardsConfig(**SHAPE | options), dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():  # gains at 1 and scores near 0 would hide what reads them
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


def inputs(model, rows=2, tokens=9):
    return torch.randint(model.config.vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_plain_torch(name):
    model = made(**MODELS[name])
    ids = inputs(model)
    labels = ids.roll(3, 1)
    for way in (model, lambda ids: plain.logits(model, ids)):
        model.zero_grad()
        got = way(ids)
        F.cross_entropy(got.flatten(0, 1), labels.flatten()).backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        if way is model:
            ours, our_grads = got, grads
    assert (ours - got).norm() < 1e-6 * got.norm()  # angles are fp32
    for n, grad in grads.items():
        assert grad.abs().max() > 0, n
        assert (our_grads[n] - grad).norm() < 1e-5 * grad.norm(), n


@pytest.mark.parametrize("name", MODELS)
def test_a_token_sees_what_it_may(name):
    model = made(**MODELS[name]).eval()
    ids = inputs(model)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 40
    with torch.no_grad():
        same = (model(ids) - model(changed)).abs().amax((0, 2)) == 0
    assert same[:5].all() == model.config.causal and not same[5:].any()


@pytest.mark.parametrize("kind", [gb.Decoder, RichardsDecoder])
def test_a_config_of_another_class(kind):
    with pytest.raises(ValueError, match="config: got str"):
        kind("10m")


@pytest.mark.parametrize(
    "options,named",
    [
        ({"attention": "sofmax"}, "attention: got 'sofmax'; did you mean 'softmax'"),
        ({"attention": "rg_lru", "causal": False}, "causal: got False, but rg_lru"),
        ({"attention": "rg_lru", "qk_norm": True}, "qk_norm: got True, but none of rg_lru, swiglu, rms .* softmax and poly"),
        ({"attention": "poly", "degree": 2}, "degree, soft_clip and window: got 2, 8.0 and 0"),
        ({"heads": 3}, "heads 3 is not a multiple of kv_heads 2"),
        ({"head_width": 3}, "heads are 3 wide, .* give rope=False"),
    ],
)
def test_configs_that_make_no_sense(options, named):
    with pytest.raises(ValueError, match=f"^RichardsConfig: {named}"):
        RichardsConfig(**SHAPE | options)
