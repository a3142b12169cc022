"""Adapters on whole models: the same numbers placed or not, added before or after placing."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpubound as gb
from gpubound.models import Decoder, DecoderConfig

from ..place.models import assert_close, assert_near, batch, place, tiny, tokens, training_run
from .cases import adapted, adapted_layers, folded, placed, records

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("order", ["plain", "added first", "placed first"])
def test_it_adds_what_it_says(order):
    """Beside a plain model into whose weights the adapters are folded."""
    model = adapted(placed() if order == "placed first" else tiny())
    if order == "added first":
        place(model, strict=True)
    want = folded(model)
    assert_near(model(tokens()).logits, want(tokens()).logits)
    with torch.no_grad():
        assert_near(model(tokens()).logits, want(tokens()).logits)


@pytest.mark.slow
def test_gradients_are_the_same_placed_or_not():
    truth = training_run(adapted(tiny()), batch())
    later = adapted(tiny())
    place(later, strict=True)
    for model in (adapted(placed()), later):
        assert_close(training_run(model, batch()), truth)
    assert all(".lora_" in name for name in truth if name != "loss"), "the base is frozen"


def test_what_calls_the_children_one_by_one_sees_them_too():
    """A call that a placed attention cannot take goes to transformers' forward, which calls q_proj and the others."""
    model = tiny()
    placement = place(model, strict=True)
    adapted(model)
    want = folded(model)
    model.set_attn_implementation("eager")
    assert_near(model(tokens()).logits, want(tokens()).logits)
    assert any("'eager'" in reason for row in placement.rows for reason in row.reasons)


def test_a_plain_model_and_our_own():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    adapted(plain, rank=2)
    x = torch.randn(3, 8)
    torch.testing.assert_close(plain(x), folded(plain)(x))
    ours = Decoder(DecoderConfig(vocabulary=50, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48))
    added = gb.lora.add(ours, 4, init=False)
    assert len(added) == 14 and not any("lm_head" in key for key in added)
    ids = torch.randint(50, (2, 9))
    assert_near(ours(ids), folded(ours)(ids))


def test_targets():
    def ends(added):
        return {key.rpartition(".")[2] for key in added}

    assert ends(gb.lora.add(tiny(), 2)) == set(ALL)
    assert ends(gb.lora.add(tiny(), 2, targets=["q_proj", "mlp.up_proj"])) == {"q_proj", "up_proj"}
    assert ends(gb.lora.add(tiny(), 2, targets="v_proj")) == {"v_proj"}
    assert gb.lora.add(tiny(), 2, targets=r".*layers\.1\..*(q|v)_proj") == [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
    ]


def test_the_head_as_a_target():
    model = adapted(placed(), targets=["lm_head", "q_proj"])
    want = folded(model)
    assert_near(model(**batch()).loss, want(**batch()).loss)


def test_begins_as_the_model_was():
    model = tiny()
    want = model(tokens()).logits
    for init in (True, "gaussian"):
        gb.lora.add(model, 4, init=init, name=f"{init}")
        assert torch.equal(model(tokens()).logits, want)


def test_an_orthogonal_initialisation_adds_nothing():
    """And yet both halves get gradients."""
    layer = nn.Sequential(nn.Linear(24, 10))
    gb.lora.add(layer, 6, init="orthogonal")
    a, b = gb.lora.parameters(layer)
    assert (b @ a).abs().max() < 1e-6 and a.std() > 0.05 and b.std() > 0.05


@pytest.mark.parametrize(
    "options, scale", [({"alpha": 8}, 2), ({"alpha": 8, "rslora": True}, 4), ({"alpha": None}, 1)], ids=str
)
def test_the_scale(options, scale):
    model = adapted(tiny(), **options)
    assert {layer.scaling["default"] for layer in adapted_layers(model)} == {scale}


def of_scale(layer):
    layer.set_scale("default", 3.0)


def another_half(layer):
    layer.lora_A["default"].weight = nn.Parameter(torch.ones_like(layer.lora_A["default"].weight))


@pytest.mark.slow
@pytest.mark.parametrize("change", [of_scale, another_half])
def test_a_change_of_an_adapter_takes_effect_at_the_next_call(change):
    model = adapted(tiny())
    place(model, strict=True)
    for one in (model, copy.deepcopy(model)):
        before = one(tokens()).logits
        for layer in adapted_layers(one):
            change(layer)
        assert_near(one(tokens()).logits, folded(one)(tokens()).logits)
        assert not torch.allclose(one(tokens()).logits, before)


def test_adapters_of_a_16_bit_model_are_in_fp32():
    model = adapted(tiny(dtype=torch.bfloat16))
    assert {p.dtype for p in gb.lora.parameters(model)} == {torch.float32}
    training_run(model, batch())


def test_parameters_are_what_trains():
    model = adapted(tiny())
    adapted(model, rank=2, name="second", targets=["q_proj"])
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in gb.lora.parameters(model)} == {id(p) for p in trained}
    assert [p.shape[0] for p in gb.lora.parameters(model, "second")[::2]] == [2, 2]


def test_switched_off_it_costs_nothing():
    model = tiny()
    before = model(tokens()).logits
    adapted(model)
    after = model(tokens()).logits
    with gb.lora.disable(model):
        assert torch.equal(model(tokens()).logits, before)
    assert torch.equal(model(tokens()).logits, after)
    gb.lora.disable(model)
    assert torch.equal(model(tokens()).logits, before)
    gb.lora.enable(model)
    assert torch.equal(model(tokens()).logits, after)


def test_one_of_two_is_switched_off():
    model = adapted(tiny())
    one = model(tokens()).logits
    adapted(model, seed=4, name="second")
    both = model(tokens()).logits
    assert not torch.allclose(one, both)
    with gb.lora.disable(model, "second"):
        assert torch.equal(model(tokens()).logits, one)
        with gb.lora.disable(model):
            pass
        assert torch.equal(model(tokens()).logits, one), "what was off stays off"
    assert torch.equal(model(tokens()).logits, both)


@pytest.mark.parametrize("silent", [gb.lora.disable, gb.lora.merge])
@pytest.mark.parametrize("make", [tiny, placed])
def test_one_that_is_off_or_merged_adds_again_after_others_were_removed(make, silent):
    model = make()
    adapted(model, name="stays", targets=["q_proj", "o_proj"])
    want = model(tokens()).logits
    adapted(model, name="goes")
    silent(model, "stays")
    gb.lora.remove(model, "goes")
    gb.lora.unmerge(model)
    gb.lora.enable(model)
    torch.testing.assert_close(model(tokens()).logits, want)


def test_removed_without_a_trace():
    model = tiny()
    names, want = list(model.state_dict()), model(tokens()).logits
    adapted(model)
    adapted(model, name="second", targets=["q_proj"])
    gb.lora.remove(model, "default")
    assert len(gb.lora.parameters(model)) == 2 * len(model.model.layers)
    gb.lora.remove(model)
    assert list(model.state_dict()) == names and torch.equal(model(tokens()).logits, want) and not any(records(model))
    assert not any("forward" in vars(m) for m in model.modules())
    adapted(model)


@pytest.mark.parametrize("make", [tiny, placed])
def test_copies_and_pickles_keep_them(make):
    model, file = adapted(make()), io.BytesIO()
    want = model(tokens()).logits
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_near(other(tokens()).logits, want)
        with torch.no_grad():
            for p in gb.lora.parameters(other):
                p.zero_()
        assert not torch.allclose(other(tokens()).logits, want)
        torch.testing.assert_close(model(tokens()).logits, want, msg="the copy's adapters are its own")


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_state_is_what_is_added(assign):
    model, other = adapted(tiny()), adapted(tiny(), seed=8)
    want = other(tokens()).logits
    model.load_state_dict(other.state_dict(), assign=assign)
    torch.testing.assert_close(model(tokens()).logits, want)


def test_a_step_trains_them_alone():
    """Three steps have the losses that autograd and torch's AdamW have, and write nothing but adapters."""
    ours = adapted(placed())
    before, theirs = copy.deepcopy(ours.state_dict()), copy.deepcopy(ours)
    optimizer = torch.optim.AdamW(gb.lora.parameters(theirs), lr=1e-2, weight_decay=0.0)
    config = gb.AdamW(lr=1e-2, weight_decay=0.0)
    step = gb.TrainStep(ours, "causal_lm", config, clip=None, precision="fp32", graph="off")
    for _ in range(3):
        optimizer.zero_grad()
        loss = theirs(**batch()).loss
        loss.backward()
        optimizer.step()
        assert step(batch()).read().loss == pytest.approx(loss.item(), rel=1e-5)
    step.close()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, before[name]) != (".lora_" in name), name


def losses(**options):
    model = adapted(placed().train(), dropout=0.25)
    torch.manual_seed(5)
    step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-2), **{"precision": "fp32", "graph": "off"} | options)
    found = [step([batch()] * options.get("accumulate", 1)).read().loss for _ in range(3)]
    step.close()
    return found


@pytest.mark.slow
def test_captured_and_recomputed_bit_for_bit():
    """Dropout's masks, too: a new one at each replay, the same where a block is computed again."""
    want = losses(accumulate=2)
    assert len(set(want)) == 3
    for options in ({"graph": "require"}, {"recompute": "blocks"}, {"graph": "require", "recompute": "blocks"}):
        assert losses(accumulate=2, **options) == want


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_sixteen_bits(precision):
    assert losses(precision=precision) == pytest.approx(losses(), rel=2e-2)


@pytest.mark.slow
def test_a_decoder_follows_what_is_switched():
    """Graphs that were captured without the adapters are of no use once they are on again."""
    model = adapted(tiny()).eval()
    gb.lora.merge(model)
    want = model.generate(tokens(1, 5), max_new_tokens=4, do_sample=False)[0, 5:].tolist()
    decoder = gb.decoder(model, max_length=16)
    assert decoder.generate(tokens(1, 5), max_new_tokens=4).sequences[0].tokens == want
    gb.lora.unmerge(model)
    for fast in (decoder, gb.decoder(model, max_length=16), gb.decoder(model, max_length=16, fused=False)):
        assert fast.generate(tokens(1, 5), max_new_tokens=4).sequences[0].tokens == want
        with gb.lora.disable(model):
            off = model.generate(tokens(1, 5), max_new_tokens=4, do_sample=False)[0, 5:].tolist()
            assert fast.generate(tokens(1, 5), max_new_tokens=4).sequences[0].tokens == off != want


def test_what_no_product_of_ours_sees_is_not_adapted_unseen():
    model = adapted(tiny(), targets=["q_proj"])
    x = torch.randn(2, 32)
    layer = model.model.layers[0].self_attn.q_proj
    assert not torch.equal(layer(x), F.linear(x, layer.weight))
