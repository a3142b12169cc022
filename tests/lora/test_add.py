"""gb.lora.add: what it adds, learns and refuses, and what a merge leaves."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.lora import layers
from gpubound.models import Decoder, DecoderConfig, load_hf, save_hf
from tests.messages import message, refusals

from ..place.models import assert_close, assert_near, batch, place, tiny, tokens, training_run
from .cases import adapted, adapted_layers, folded, placed, records, refusal

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


def test_refused_in_words():
    model, on_k = tiny(), {"targets": ["k_proj"]}
    wrong = [
        {"targets": ["q_prj"]}, {"targets": ["model.norm"]}, on_k | {"rank": 21}, on_k | {"rank": 0}, {"dropout": 1.0},
        {"init": "pissa"}, {"init": "orthogonal", "rank": 3, "targets": r".*layers\.0.*k_proj"},
        {"init": "orthogonal", "targets": ["embed_tokens"]}, {"targets": []}, {"targets": ["q_proj", 3]},
        {"targets": "q_proj("}, on_k | {"rank": True}, {"alpha": "16"}, on_k | {"rank": "4"}, {"alpha": True},
        {"alpha": float("nan")}, {"alpha": 0.0}, {"dropout": "0.1"}, {"name": "train"}, {"name": 5}, {"name": "a.b"},
    ]  # fmt: skip
    refusals("lora/add_refused:refused_in_words", *(partial(gb.lora.add, model, **{"rank": 4} | options) for options in wrong))
    assert all(p.requires_grad for p in model.parameters()) and not any(records(model)), "nothing is changed"


@pytest.mark.parametrize("call", [lambda it: gb.lora.add(it, 4), lambda it: gb.lora.load(it, "x"), gb.lora.merge])
def test_what_is_no_model_is_refused(call):
    """A placement, or a step, in the place of its model."""
    assert refusal(lambda: call(object())).endswith(": model must be a torch.nn.Module, got a object; pass the model itself.")


def test_a_double_add_is_refused():
    model = adapted(tiny(), targets=["v_proj"])
    assert "'default'" in refusal(lambda: gb.lora.add(model, 4))
    assert len(gb.lora.parameters(model)) == 2 * len(model.model.layers)


def test_an_unknown_name_is_refused():
    model = tiny()
    assert refusal(lambda: gb.lora.disable(model, "x")) == message("lora/add_refused:an_unknown_name_is_refus")
    adapted(model)
    assert refusal(lambda: gb.lora.remove(model, "x")) == message("lora/add_refused:an_unknown_name_is_refus.2")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_model_of_pefts_is_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    assert "PeftModel" in refusal(lambda: gb.lora.add(model, 4, name="second"))


def test_what_torch_reads_without_calling_it_is_refused():
    """In eval mode torch's encoder layer gives its weights to one fused op: an adapter would be missed."""
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 4))
    assert gb.lora.add(model, 2) == ["1"]
    assert refusal(lambda: gb.lora.add(model, 2, targets=["linear1"])) == message("lora/add_refused:what_torch_reads_without")


def test_all_linear_says_what_it_leaves_out():
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Other(8, 8))
    with gb.strict(), pytest.raises(gb.FallbackError, check=message("lora/add_refused:all_linear_says_what_it")):
        gb.lora.add(model, 2)
    assert gb.lora.add(model, 2) == ["0"]


def test_a_model_of_layers_that_take_no_adapter_says_which_do():
    refusals(
        "lora/add_refused:a_model_of_layers_that_t", lambda: gb.lora.add(nn.Sequential(nn.Conv1d(4, 4, 1), nn.ReLU()), rank=2)
    )


def weights(model):
    values = {key: value.clone() for key, value in model.state_dict().items() if ".lora_" not in key}
    return {key.replace(".base_layer", ""): value for key, value in values.items()}


@pytest.mark.parametrize("make", [tiny, placed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_there_and_back(dtype, make):
    model = make(dtype=dtype)
    adapted(model)
    adapted(model, seed=5, name="second", targets=["q_proj"])
    before, want = weights(model), model(tokens()).logits
    error = gb.lora.merge(model)
    assert not any(layers.read(layer).adapters for layer in adapted_layers(model)), "nothing is left to multiply"
    got = model(tokens()).logits
    limit = 1e-5 if dtype == torch.float32 else 5e-2
    assert (got - want).norm() <= limit * want.norm()
    gb.lora.unmerge(model)
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())
    assert torch.equal(model(tokens()).logits, want)
    assert error < 1e-6 if dtype == torch.float32 else 1e-4 < error < 1e-1


def test_the_error_is_measured():
    """Half of bf16's last bit, added to ones, is lost whole."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.bfloat16))
    gb.lora.add(model, 1)
    with torch.no_grad():
        model[0].base_layer.weight.fill_(1.0)
        model[0].lora_A["default"].weight.fill_(2.0**-9)
        model[0].lora_B["default"].weight.fill_(1.0)
    assert gb.lora.merge(model) == 1.0
    assert gb.lora.merge(model) == 0.0, "nothing is left to merge"


def test_one_after_the_other():
    model = adapted(tiny())
    adapted(model, seed=5, name="second")
    before, want = weights(model), model(tokens()).logits
    gb.lora.merge(model, "second")
    assert_near(model(tokens()).logits, want)
    gb.lora.merge(model)
    assert_near(model(tokens()).logits, want)
    gb.lora.unmerge(model)
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())


def test_a_copy_is_unmerged_on_its_own():
    model = adapted(tiny())
    before = weights(model)
    gb.lora.merge(model)
    other = copy.deepcopy(model)
    gb.lora.unmerge(other)
    assert all(torch.equal(value, before[key]) for key, value in weights(other).items())
    assert not torch.equal(weights(model)["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])


def test_what_would_be_lost_is_refused():
    model = adapted(tiny(), targets=["v_proj"])
    gb.lora.merge(model)
    name = "model.layers.0.self_attn.v_proj"
    assert refusal(lambda: gb.lora.remove(model)) == message("lora/merge:what_would_be_lost_is_re", name)
    assert refusal(lambda: gb.lora.disable(model)) == message("lora/merge:what_would_be_lost_is_re.2", name)
    with torch.no_grad():
        model.get_submodule(name).base_layer.weight.mul_(2)
    assert refusal(lambda: gb.lora.unmerge(model)) == message("lora/merge:what_would_be_lost_is_re.3", name)


def test_a_models_own_files_have_no_place_for_adapters(tmp_path):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocabulary=50, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    adapted(model)
    refusals("lora/merge:a_models_own_files_have", lambda: save_hf(model, tmp_path))
    with gb.lora.disable(model):
        save_hf(model, tmp_path)
    assert all(torch.equal(t, before[name]) for name, t in load_hf(tmp_path).state_dict().items())
    gb.lora.merge(model)
    save_hf(model, tmp_path / "merged")
    ids = torch.arange(12)[None]
    torch.testing.assert_close(load_hf(tmp_path / "merged")(ids), model(ids))


def test_for_good():
    """What is on becomes part of the weights and is gone; what is off stays as it was."""
    model = adapted(tiny())
    adapted(model, seed=4, name="off", targets=["q_proj"])
    adapted(model, seed=5, name="before", targets=["v_proj"])
    gb.lora.disable(model, "off")
    want = model(tokens()).logits
    gb.lora.merge(model, "before")
    assert gb.lora.merge(model, for_good=True) < 1e-3
    assert_near(model(tokens()).logits, want)
    assert len(gb.lora.parameters(model)) == 2 * len(model.model.layers), "of the one that is off"
    assert not any(records(model)) and not any("default" in name for name in model.state_dict())
    merged = weights(model)
    gb.lora.unmerge(model)
    assert all(torch.equal(value, merged[key]) for key, value in weights(model).items())
    gb.lora.enable(model, "off")
    assert not torch.allclose(model(tokens()).logits, want)
