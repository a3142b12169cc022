"""Adapters of experts: each expert's own pair, PEFT's numbers, gradients and files; what has another form is refused."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import gpubound as gb
from gpubound.kernels.accumulate import main_gradient
from gpubound.lora import experts
from gpubound.train import Accumulators
from tests.messages import message

from ..models.test_mixtral import KINDS, SIZES
from ..place.models import assert_close, assert_near, batch, place, tokens, training_run
from .cases import (
    adapted,
    assert_a_step_trains_them_alone,
    assert_copies_keep_them,
    assert_it_adds_what_it_says,
    refusal,
)
from .theirs import assert_same_gradients

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match:RuntimeWarning"),  # it says so of modules
    pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match:RuntimeWarning"),
]
STACKS = ["gate_up_proj", "down_proj"]
NAME = "model.layers.0.mlp.experts"


def sparse(kind="mixtral", dtype=torch.float32):
    config, own = KINDS[kind]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(**SIZES | own)).to(dtype)


def with_experts(model, **options):
    return adapted(model, **{"targets": [*STACKS, "q_proj"]} | options)


def folded(model):
    """A copy without adapters whose weights hold what they add, expert by expert."""
    plain = copy.deepcopy(model)
    gb.lora.remove(plain)
    for number in range(2):
        for name in STACKS:
            own = model.get_submodule(f"model.layers.{number}.mlp.experts.{name}_lora.default")
            weight = getattr(plain.model.layers[number].mlp.experts, name)
            with torch.no_grad():
                for expert in range(len(weight)):
                    weight[expert] += own.scale * own.b[expert] @ own.a[expert]
        own = model.get_submodule(f"model.layers.{number}.self_attn.q_proj.lora.default")
        with torch.no_grad():
            plain.model.layers[number].self_attn.q_proj.weight += own.scale * own.b @ own.a
    return plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["plain", "added first", "placed first"])
def test_it_adds_what_it_says(order, kind):
    model = sparse(kind)
    assert_it_adds_what_it_says(model, order, with_experts, folded)
    assert_close(training_run(model, batch()), training_run(with_experts(sparse(kind)), batch()))


@pytest.mark.parametrize("rank", [1, 4, 8, 11])
def test_one_slot_after_another(rank):
    """Over a module of experts alone: an expert that nobody asks for, one that all ask for, and gradients."""
    module = sparse().model.layers[0].mlp.experts
    added = adapted(torch.nn.ModuleDict({"experts": module}), rank=rank, targets=STACKS)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(7, 32, generator=g).requires_grad_()
    chosen = torch.tensor([[0, 3], [3, 5], [3, 0], [7, 3], [1, 3], [3, 7], [0, 3]])
    shares = torch.rand(7, 2, generator=g).requires_grad_()
    up, down = module.gate_up_proj_lora.default, module.down_proj_lora.default

    def expert(row, e):
        gate_up = (module.gate_up_proj[e] + up.scale * up.b[e] @ up.a[e]) @ row
        gate, rest = gate_up.chunk(2)
        return (module.down_proj[e] + down.scale * down.b[e] @ down.a[e]) @ (F.silu(gate) * rest)

    want = torch.stack([sum(shares[i, j] * expert(x[i], chosen[i, j]) for j in range(2)) for i in range(7)])
    got = module(x, chosen, shares)
    assert_near(got, want)
    leaves = [x, shares, *gb.lora.parameters(added)]
    dy = torch.randn(7, 32, generator=g)
    for one, truth in zip(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True):
        torch.testing.assert_close(one, truth, rtol=1e-4, atol=1e-4)
    assert not torch.autograd.grad(module(x, chosen, shares), up.a, dy)[0][2].any(), "nobody asked for expert 2"


def test_a_smaller_base_says_that_they_stay(capsys):
    model = sparse()
    gb.lora.quantize_base(model, "int8")
    assert re.search(r"in int8: .*; the head and the experts, [\d.]+ kB, stay as they are\.\n", capsys.readouterr().err)


def test_begins_as_the_model_was():
    model = sparse()
    want = model(tokens()).logits
    for init in (True, "gaussian"):
        with_experts(model, init=init, name=f"{init}")
        assert_near(model(tokens()).logits, want)
    own = model.model.layers[0].mlp.experts.down_proj_lora["True"]
    assert 0.9 / 40**0.5 < own.a.abs().max() <= 1 / 40**0.5, "as an nn.Linear of 40 inputs"


def test_micro_batches_sum_in_main_grad():
    model = with_experts(sparse())
    parameters, found = gb.lora.parameters(model), []
    sums = Accumulators(model.named_parameters())
    for micro in (2, 1):
        sums.gradient.fill_(float("nan"))
        sums.begin()
        for ids in tokens().split(micro):
            model(ids).logits.square().sum().backward()
        sums.finish()
        assert all(p.grad is None for p in parameters)
        found.append([main_gradient(p).clone() for p in parameters])
    for one, two in zip(*found, strict=True):
        assert (one - two).norm() <= 1e-4 * two.norm()


@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_sixteen_bits(how):
    model = with_experts(sparse(dtype=torch.bfloat16 if how == "bf16" else torch.float32))
    assert {p.dtype for p in gb.lora.parameters(model)} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        got = training_run(model, batch())
    want = training_run(copy.deepcopy(model).float(), batch())
    assert got["loss"].item() == pytest.approx(want["loss"].item(), rel=2e-2)


def test_merged_off_and_removed():
    model = sparse()
    names, before = list(model.state_dict()), model(tokens()).logits
    with_experts(model)
    want = model(tokens()).logits
    module = model.model.layers[0].mlp.experts
    with gb.lora.disable(model):
        assert torch.equal(model(tokens()).logits, before) and "forward" not in vars(module)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    assert gb.lora.merge(model) < 1e-6
    assert "forward" not in vars(module)
    assert_near(model(tokens()).logits, want)
    gb.lora.unmerge(model)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(tokens()).logits, want)
    gb.lora.remove(model)
    assert list(model.state_dict()) == names and torch.equal(model(tokens()).logits, before)
    assert not any("forward" in vars(m) for m in model.modules())
    with_experts(model)


def test_one_of_the_two_alone_and_two_names():
    model = adapted(sparse(), targets=["down_proj"])
    one = model(tokens()).logits
    assert len(gb.lora.parameters(model)) == 4
    adapted(model, seed=5, targets=STACKS, name="second", rank=2)
    assert not torch.allclose(model(tokens()).logits, one)
    gb.lora.remove(model, "second")
    assert torch.equal(model(tokens()).logits, one)


def test_copies_and_pickles_keep_them():
    assert_copies_keep_them(with_experts(sparse()))


def test_a_step_trains_them_alone():
    ours = with_experts(sparse())
    place(ours, strict=True)
    assert_a_step_trains_them_alone(ours)


def test_the_fused_decoder_refuses_what_it_does_not_see():
    model = adapted(sparse(), targets=["down_proj"]).eval()
    with gb.strict(), pytest.raises(gb.FallbackError, check=message("lora/experts:the_fused_decoder_refuse")):
        gb.decoder(model, max_length=16)
    gb.lora.merge(model)
    with gb.strict():
        gb.decoder(model, max_length=16)


# --- PEFT ---


def theirs_with_experts(kind="mixtral", **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    config = {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM",
        "target_parameters": [f"mlp.experts.{name}" for name in STACKS],
    }  # fmt: skip
    return peft.get_peft_model(sparse(kind), peft.LoraConfig(**config | options))


PEFTS = {
    "both": {},
    "one": {"target_parameters": ["gate_up_proj"]},
    "the other": {"target_parameters": ["mlp.experts.down_proj"], "use_rslora": True},
    "ranks": {"rank_pattern": {"down_proj": 2}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", PEFTS.values(), ids=PEFTS)
def test_what_peft_saves_is_loaded_with_its_gradients(tmp_path, options, kind):
    theirs, ours = theirs_with_experts(kind, **options), sparse(kind)
    theirs.save_pretrained(tmp_path)
    gb.lora.load(ours, tmp_path)
    assert_near(ours(tokens()).logits, theirs(tokens()).logits)
    for model in (ours, theirs):
        model(**batch()).loss.backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", [[*STACKS, "q_proj"], STACKS, ["down_proj"], r".*layers\.1\..*gate_up_proj"], ids=str)
def test_peft_loads_what_is_saved_here(tmp_path, targets, kind):
    peft = pytest.importorskip("peft")
    model = with_experts(sparse(kind), targets=targets)
    gb.lora.save(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(sparse(kind), tmp_path)
    assert_near(theirs(tokens()).logits, model(tokens()).logits)
    assert sum("lora_" in name for name, _ in theirs.named_parameters()) == len(gb.lora.parameters(model))
    again = sparse(kind)
    gb.lora.load(again, tmp_path)
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_several_ranks_in_one_file(tmp_path):
    peft = pytest.importorskip("peft")
    model = adapted(sparse(), targets=["gate_up_proj", "q_proj"])
    adapted(model, rank=2, alpha=3, targets=["down_proj"])
    gb.lora.save(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(sparse(), tmp_path)
    assert_near(theirs(tokens()).logits, model(tokens()).logits)


# --- what is refused ---


def test_dropout_is_refused():
    assert refusal(lambda: gb.lora.add(sparse(), 2, targets=STACKS, dropout=0.1)) == (
        message("lora/experts:dropout_is_refused", NAME)
    )


def test_a_rank_above_the_matrix_is_refused():
    assert refusal(lambda: gb.lora.add(sparse(), 33, targets=STACKS)) == message("lora/experts:a_rank_above_the_matrix", NAME)


def test_all_linear_leaves_them_alone():
    assert not any("experts" in key for key in gb.lora.add(sparse(), 2))


@pytest.mark.parametrize("word", ["is_transposed", "has_bias", "has_post_expert_norm", "_is_expert_parallel"])
def test_experts_of_another_form_are_refused(word):
    model = sparse()
    setattr(model.model.layers[0].mlp.experts, word, True)
    assert refusal(lambda: gb.lora.add(model, 2, targets=STACKS)) == (
        message("lora/experts:experts_of_another_form", NAME, word.strip("_"))
    )


def test_the_order_of_slots_is_undone():
    """One expert for each token, in falling order: y's rows stay in the order of x's."""
    module = sparse().model.layers[0].mlp.experts
    x, chosen = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), torch.arange(7, -1, -1)[:, None]
    want = module(x, chosen, torch.ones(8, 1))
    got = experts.ExpertAdapters.adapted(module, x, chosen, torch.ones(8, 1))
    assert_near(got, want)


def test_rows_cannot_choose_from_them():
    model = adapted(sparse(), targets=["down_proj"])
    assert refusal(lambda: gb.lora.rows(model, ["default"])) == message("lora/experts:rows_cannot_choose_from", NAME)
