"""Models of the family against plain torch, loss and every gradient; causal ones see nothing ahead, the others do."""

import pytest
import torch
import torch.nn.functional as F

import gpubound as gb
from gpubound.models.richards import RichardsConfig, RichardsDecoder
from tests.messages import message

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
    "told the time": {"causal": False, "time": "film"},
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
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocabulary, (rows, tokens), generator=generator)
    time = torch.rand(rows, generator=generator) if model.config.time == "film" else None
    return ids, time


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_plain_torch(name):
    model = made(**MODELS[name])
    ids, time = inputs(model)
    labels = ids.roll(3, 1)
    for way in (model, lambda ids, time: plain.logits(model, ids, time)):
        model.zero_grad()
        got = way(ids, time=time)
        F.cross_entropy(got.flatten(0, 1), labels.flatten()).backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        if way is model:
            ours, our_grads = got, grads
    close = 1e-6 if time is None else 1e-4  # angles are fp32: those of positions up to 9, those of times up to 1000
    assert (ours - got).norm() < close * got.norm()
    for n, grad in grads.items():
        assert grad.abs().max() > 0, n
        assert (our_grads[n] - grad).norm() < 10 * close * grad.norm(), n


@pytest.mark.parametrize("name", MODELS)
def test_a_token_sees_what_it_may(name):
    model = made(**MODELS[name]).eval()
    ids, time = inputs(model)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 40
    with torch.no_grad():
        same = (model(ids, time=time) - model(changed, time=time)).abs().amax((0, 2)) == 0
    assert same[:5].all() == model.config.causal and not same[5:].any()


def test_times_near_each_other_look_different():
    """The angles of a bare t are below a radian: 0.500 and 0.501 would differ by a thousandth."""
    embedding = made(time="film", causal=False).model.time
    a, b = embedding(torch.tensor([0.5, 0.501])).detach()
    assert (a - b).norm() > 0.1 * a.norm()


def test_an_untrained_model_depends_on_the_time():
    model = made(time="film", causal=False)
    with torch.no_grad():
        x = torch.randn(2, 8, model.config.hidden, generator=torch.Generator().manual_seed(0))
        a, b = (model.model.run(x, time=torch.full((2,), t)) for t in (0.1, 0.9))
    assert (a - b).norm() > 1e-4 * a.norm()  # 3e-6 with the deviation of the other weights


@pytest.mark.parametrize("kind", [gb.Decoder, RichardsDecoder])
def test_a_config_of_another_class(kind):
    with pytest.raises(ValueError, match="config: got str"):
        kind("10m")


@pytest.mark.parametrize(
    "options,named",
    [
        ({"attention": "sofmax"}, "attention: got 'sofmax'; did you mean 'softmax'"),
        ({"time": "flim"}, "time: got 'flim'; did you mean 'film'"),
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


@pytest.mark.parametrize("name", ["layers.0", "layers.0.self_attn", "layers.0.input_layernorm", "norm"])
def test_hooks_run_in_blocks_that_are_told_the_time(name):
    model, seen = made(time="film", causal=False), []
    ids, time = inputs(model)
    want = model(ids, time=time)
    model.model.get_submodule(name).register_forward_hook(lambda module, *_: seen.append(module))
    torch.testing.assert_close(model(ids, time=time), want)
    assert seen == [model.model.get_submodule(name)]


def test_times_that_are_missing_or_misplaced():
    told, plain_model = made(time="film", causal=False), made()
    ids, time = inputs(told)
    for model, given, said in (
        (told, None, "RichardsDecoder: time: got none; wanted times from 0 to 1, (2,)."),
        (told, time[:1], "RichardsDecoder: time: got shape (1,), wanted one a row, (2,)."),
        (plain_model, time, "RichardsDecoder: time: got some; this model is not told the time."),
    ):
        with pytest.raises(ValueError) as error:
            model(ids, time=given)
        assert str(error.value) == said


def test_a_bidirectional_model_does_not_learn_the_next_token():
    ids, _ = inputs(made())
    with pytest.raises(ValueError) as error:
        gb.TrainStep(made(torch.float32, causal=False), "causal_lm", precision="fp32")([{"input_ids": ids, "labels": ids}])
    assert str(error.value) == message("models/richards/model:a_bidirectional_model_do")
