"""Adapters of an embedding and of the head: PEFT's numbers, gradients and files; tied ones are refused in words."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gpubound as gb
from gpubound.kernels.accumulate import main_gradient
from gpubound.train import Accumulators
from tests.messages import message

from ..place.models import assert_close, batch, place, tiny, tokens, training_run
from .cases import adapted, assert_a_step_trains_them_alone, assert_copies_keep_them, refusal
from .theirs import assert_same_gradients

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
ENDS = ["embed_tokens", "lm_head", "q_proj"]


def with_table(model, **options):
    return adapted(model, **{"targets": ENDS} | options)


def folded(model):
    """A copy without adapters whose weights hold what they add."""
    plain = copy.deepcopy(model)
    gb.lora.remove(plain)
    for key in ("model.embed_tokens", "lm_head", *(f"model.layers.{i}.self_attn.q_proj" for i in range(2))):
        own = model.get_submodule(f"{key}.lora.default")
        delta = own.a @ own.b.t() if key.endswith("tokens") else own.b @ own.a
        with torch.no_grad():
            plain.get_submodule(key).weight += own.scale * delta
    return plain


@pytest.mark.parametrize("order", ["plain", "added first", "placed first"])
def test_it_adds_what_it_says(order):
    model = tiny()
    if order == "placed first":
        place(model, strict=True)
    with_table(model)
    if order == "added first":
        place(model)
    want = folded(model)
    torch.testing.assert_close(model(tokens()).logits, want(tokens()).logits, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, want(tokens()).logits, rtol=1e-4, atol=1e-4)
    assert_close(training_run(model, batch()), training_run(with_table(tiny()), batch()))


def test_begins_as_the_model_was():
    model = tiny()
    want = model(tokens()).logits
    with_table(model, init=True)
    assert torch.equal(model(tokens()).logits, want)
    own = model.model.embed_tokens.lora.default
    assert own.b.std() > 0.5 and not own.a.any()


def test_gradients_in_fp64_and_the_padding_has_none():
    table = nn.Sequential(nn.Embedding(9, 6, padding_idx=2, dtype=torch.float64))
    adapted(table, rank=3, targets=["0"])
    ids = torch.tensor([[1, 2, 1], [8, 2, 0]])
    own = table[0].lora.default

    want = table[0].weight[ids] + own.scale * own.a[ids] @ own.b.t()
    torch.testing.assert_close(table(ids), want)
    g = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0)).double()
    da, db = torch.autograd.grad(table(ids), (own.a, own.b), g)
    wanted_a, wanted_b = torch.autograd.grad(want, (own.a, own.b), g)
    wanted_a[2] = 0
    torch.testing.assert_close(da, wanted_a)
    torch.testing.assert_close(db, wanted_b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_micro_batches_sum_in_main_grad(dtype):
    model = nn.Sequential(nn.Embedding(9, 6, padding_idx=2, dtype=dtype))
    adapted(model, rank=3, targets=["0"])
    ids = torch.tensor([[1, 2, 1], [8, 2, 0]])
    g = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = torch.autograd.grad(model(ids), gb.lora.parameters(model), g)
    sums = Accumulators(model.named_parameters())
    sums.gradient.fill_(float("nan"))
    sums.begin()
    for row, gradient in zip(ids, g):
        model(row).backward(gradient)
    sums.finish()
    for p, truth in zip(gb.lora.parameters(model), want, strict=True):
        assert p.grad is None
        assert (main_gradient(p) - truth).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_off_and_removed(dtype):
    model = tiny(dtype=dtype)
    names, before = list(model.state_dict()), model(tokens()).logits
    with_table(model)
    want = model(tokens()).logits
    assert want.dtype == dtype and not torch.allclose(want, before)
    with gb.lora.disable(model):
        assert torch.equal(model(tokens()).logits, before) and "forward" not in vars(model.model.embed_tokens)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    gb.lora.merge(model)
    assert "forward" not in vars(model.model.embed_tokens)
    assert (model(tokens()).logits - want).norm() <= (1e-5 if dtype == torch.float32 else 5e-2) * want.norm()
    gb.lora.unmerge(model)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(tokens()).logits, want)
    gb.lora.remove(model)
    assert list(model.state_dict()) == names and torch.equal(model(tokens()).logits, before)


def test_ones_that_took_the_place_of_those_switched_off_stay():
    """`disable` ends behind them: the layer's forward is theirs."""
    model = tiny()
    with_table(model)
    with gb.lora.disable(model):
        gb.lora.remove(model)
        with_table(model, name="new")
        want = model(tokens()).logits
    assert torch.equal(model(tokens()).logits, want)


def test_copies_and_pickles_keep_them():
    assert_copies_keep_them(with_table(tiny()))


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("targets", [["embed_tokens", "q_proj"], ["lm_head", "q_proj"]], ids=str)
def test_a_step_trains_them_alone(placed, targets):
    ours = with_table(tiny(), targets=targets)
    if placed:
        place(ours)
    assert_a_step_trains_them_alone(ours)


def test_an_adapted_head_gives_whole_logits():
    model = with_table(tiny())
    step = gb.TrainStep(model, "causal_lm", gb.AdamW(), precision="fp32", graph="off")
    with gb.strict(), pytest.raises(gb.FallbackError, check=message("lora/table:an_adapted_head_gives_wh")):
        step(batch())
    step.close()


def test_captured_is_eager_bit_for_bit():
    found = []
    for graph in ("off", "require"):
        model = tiny().train()
        place(model, strict=True)
        with_table(model)
        torch.manual_seed(5)
        step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-2), precision="fp32", graph=graph)
        found.append([step(batch()).read().loss for _ in range(3)])
        step.close()
    assert found[0] == found[1] and len(set(found[0])) == 3


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_a_decoder_follows_them(target):
    """By kernels once they are merged, and before by whatever can."""
    model = with_table(tiny(), targets=[target]).eval()
    want = model.generate(tokens(1, 5), max_new_tokens=4, do_sample=False)[0, 5:].tolist()
    if target == "embed_tokens":
        with gb.strict(), pytest.raises(gb.FallbackError, check=message("lora/table:a_decoder_follows_them")):
            gb.decoder(model, max_length=16)
    assert gb.decoder(model, max_length=16).generate(tokens(1, 5), max_new_tokens=4).sequences[0].tokens == want
    gb.lora.merge(model)
    with gb.strict():
        assert gb.decoder(model, max_length=16).generate(tokens(1, 5), max_new_tokens=4).sequences[0].tokens == want


# --- PEFT ---


def theirs_with_table(**options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ENDS, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(tiny(), peft.LoraConfig(**config | options))


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.*:UserWarning")
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "rank_pattern": {"embed_tokens": 2}}], ids=str)
def test_what_peft_saves_is_loaded_with_its_gradients(tmp_path, options):
    theirs, ours = theirs_with_table(**options), tiny()
    theirs.save_pretrained(tmp_path)
    assert any(key.endswith("base_layer.weight") for key in load_file(tmp_path / "adapter_model.safetensors"))
    gb.lora.load(ours, tmp_path)
    torch.testing.assert_close(ours(tokens()).logits, theirs(tokens()).logits, rtol=1e-4, atol=1e-4)
    for model in (ours, theirs):
        model(**batch()).loss.backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"rslora": True}], ids=str)
def test_peft_loads_what_is_saved_here(tmp_path, options):
    peft = pytest.importorskip("peft")
    model = with_table(tiny(), **options)
    gb.lora.save(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(tiny(), tmp_path)
    torch.testing.assert_close(theirs(tokens()).logits, model(tokens()).logits, rtol=1e-4, atol=1e-4)
    assert sum("lora_" in name for name, _ in theirs.named_parameters()) == len(gb.lora.parameters(model))


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.*:UserWarning")
def test_a_file_with_another_base_is_refused(tmp_path):
    theirs_with_table().save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.embed_tokens.base_layer.weight"][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(gb.DataError) as error:
        gb.lora.load(tiny(), tmp_path)
    assert str(error.value) == message("lora/table:a_file_with_another_base", file)


# --- what is refused ---


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_tied_ones_are_refused(target):
    assert refusal(lambda: gb.lora.add(tiny("llama tied"), 2, targets=[target])) == (
        message("lora/table:tied_ones_are_refused")
    )
    assert len(gb.lora.add(tiny("llama tied"), 2)) == 14, "the others go on"


def test_rows_that_change_as_they_are_read_are_refused():
    model = nn.Sequential(nn.Embedding(8, 8, max_norm=1.0), nn.Embedding(8, 8, sparse=True))
    for name in ("0", "1"):
        assert message("lora/table:rows_that_change_as_they", name).within(
            refusal(lambda name=name: gb.lora.add(model, 2, targets=[name]))
        )
