"""causal_lm: the loss, gradients and updates of a plain Hugging Face step, the logits never whole where the model allows it."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from gpubound import trace
from gpubound.errors import FallbackError
from gpubound.kernels import accumulate
from gpubound.place import place
from gpubound.train import AdamW, TrainStep
from gpubound.train.objectives.word_loss import CausalLM, NextToken
from tests.messages import message, refusals

from ..conftest import Small, small

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 97, "max_position_embeddings": 64,
}  # fmt: skip


def llama(tied: bool = False, **options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied, **options)).train()


def batch(seed: int, rows: int = 2, ignored: int = 5) -> dict:
    ids = torch.randint(97, (rows, 16), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def usual_step(model, batches, optimizer, clip):
    """What transformers' Trainer does: every micro-batch divided by the labels that all of them count."""
    items = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
    total = 0.0
    for b in batches:
        loss = model(**b, num_items_in_batch=items).loss
        loss.backward()
        total += loss.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    return total, norm.item(), items.item(), gradients


def test_cudnn_compiles_nothing_for_the_first_check():
    """Its shapes are those of one row, and another forward's; in training it is what the user chose."""
    model, enabled = llama(), list[bool]()
    model.model.layers[0].register_forward_hook(lambda *_: enabled.append(torch.backends.cuda.cudnn_sdp_enabled()))
    TrainStep(model, "causal_lm", precision="fp32", graph="off")([batch(0)])
    assert enabled == [False, False, True]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_hugging_face_training(tied):
    theirs = llama(tied)
    ours = copy.deepcopy(theirs)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    config = AdamW(lr=1e-3, decays=lambda name, parameter: True)
    step = TrainStep(ours, "causal_lm", config, accumulate=2, clip=0.8, precision="fp32", graph="off")
    for i in range(3):
        batches = [batch(2 * i, rows=3), batch(2 * i + 1, rows=1, ignored=11)]
        loss, norm, items, gradients = usual_step(theirs, batches, optimizer, 0.8)
        values = step(batches).read()
        assert (values.loss, values.grad_norm) == pytest.approx((loss, norm), rel=1e-5)
        assert values.tokens == items == 15 * 4 - 4 - 10
        for name, p in ours.named_parameters():
            got, want = p.main_grad / items * min(1.0, 0.8 / norm), gradients[name]
            assert (got - want).norm() <= 1e-5 * want.norm(), name
    for (name, p), want in zip(ours.named_parameters(), theirs.parameters()):
        assert (p - want).norm() <= 1e-5 * want.norm(), name


def test_bf16_beside_hugging_face():
    """The same in bf16: loss and norm within bf16's own rounding of the fp32 step."""
    theirs = llama()
    ours = copy.deepcopy(theirs)
    loss, norm, _, _ = usual_step(theirs, [batch(0)], torch.optim.AdamW(theirs.parameters()), 1.0)
    values = TrainStep(ours, "causal_lm", clip=1.0, graph="off")(batch(0)).read()
    assert values.loss == pytest.approx(loss, rel=2e-3)
    assert values.grad_norm == pytest.approx(norm, rel=1e-2)


def total_and_gradients(model, loss=None):
    total, count = (loss or CausalLM())(model, batch(0))
    total.backward()
    return total.item(), count.item(), [p.grad for p in model.parameters()]


def test_both_ways_to_the_loss_agree(monkeypatch):
    direct = total_and_gradients(llama())
    whole = CausalLM()
    model = llama()
    whole.prepare(model, batch(0))
    monkeypatch.setattr(whole, "_why_all_logits", "for the test")
    around = total_and_gradients(model, whole)
    assert around[:2] == (pytest.approx(direct[0], rel=1e-6), direct[1])
    assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(direct[2], around[2]))


def test_labels_that_are_the_next_tokens_already():
    b = batch(0)
    moved = {**b, "labels": torch.cat([b["labels"][:, 1:], torch.full((2, 1), -100)], 1)}
    want, count = CausalLM()(llama(), b)
    got, same = NextToken()(llama(), moved)
    assert got.item() == want.item() and same == count
    step = TrainStep(llama(), "next_token", precision="fp32", graph="off")
    assert step(moved).read().loss == pytest.approx((want / count).item(), rel=1e-6)


def test_placed_model_delivers_by_products(monkeypatch):
    """q, k, v and gate, up stay neighbours in the flat buffers: one product fills the gradients of each group."""
    plain, placed = llama(), llama()
    place(placed, device="cpu")
    shapes, add = [], accumulate.add_product

    def counted(main, *rest):
        shapes.append(tuple(main.shape))
        add(main, *rest)

    monkeypatch.setattr(accumulate, "add_product", counted)
    steps = [TrainStep(model, "causal_lm", precision="fp32", graph="off", accumulate=2) for model in (plain, placed)]
    values = [step([batch(0), batch(1)]).read() for step in steps]
    assert shapes == [(32, 48), (96, 32), (32, 32), (64, 32)] * 4  # down, gate and up, o, q k v; two layers, two micro-batches
    assert (values[0].loss, values[0].grad_norm) == pytest.approx((values[1].loss, values[1].grad_norm), rel=1e-5)
    for (name, p), want in zip(placed.named_parameters(), plain.named_parameters()):
        assert (p.main_grad - want[1].main_grad).norm() <= 1e-5 * want[1].main_grad.norm(), name


@pytest.fixture
def reasons(monkeypatch):
    """Why a model was asked for whole logits."""
    said = []
    monkeypatch.setattr("gpubound.train.objectives.word_loss.fallback", lambda what, why: said.append(why))
    return said


@pytest.mark.parametrize(
    "kind, config",
    [(GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=4.0)), (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=8))],
)
def test_a_model_that_changes_its_logits_is_found_out(kind, config, reasons):
    """Granite divides them: head(hidden states) would train another model, so its own forward is asked. Gemma 2 caps them at
    30; those of fresh weights are below 1, where the cap changes less than rounding does."""
    torch.manual_seed(0)
    model = kind(config).train()
    total, count, _ = total_and_gradients(model)
    assert total / count == pytest.approx(model(**batch(0)).loss.item(), rel=1e-6)
    assert len(reasons) == 1 and "the logits differ by" in reasons[0]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_head_of_zeros_is_tried_all_the_same(tied):
    """It gives equal logits whatever the forward does, and 0 / 0 of an error."""
    model = llama(tied)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    step = TrainStep(
        model, "causal_lm", AdamW(lr=1e-2, decays=lambda name, parameter: True), precision="fp32", graph="off", clip=1.0
    )
    with trace.strict():
        for i in range(3):
            loss, *_ = usual_step(other, [batch(i)], optimizer, 1.0)
            assert step(batch(i)).read().loss == pytest.approx(loss, rel=1e-5)


def _hook(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: 2 * output)


def _subclass(model):
    model.lm_head.__class__ = type("Twice", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})


def _patch(model):
    model.lm_head.forward = lambda x: 2 * nn.functional.linear(x, model.lm_head.weight)


def _product(self, input_ids, use_cache=None):
    return self.model(input_ids, use_cache=use_cache).last_hidden_state @ (2 * self.lm_head.weight).t()


def _scaled_input(model):
    model.__class__ = type("Scaled", (LlamaForCausalLM,), {"forward": _scaled})


def _scaled(self, input_ids, use_cache=None):
    return self.lm_head(2 * self.model(input_ids, use_cache=use_cache).last_hidden_state)


@pytest.mark.parametrize(
    "change, why",
    [
        (_hook, "its head carries hooks"),
        (_subclass, "its head (get_output_embeddings) is a tests.Twice, not a plain nn.Linear"),
        (_patch, "its head (get_output_embeddings) is a torch.Linear, not a plain nn.Linear"),
        (_scaled_input, "its forward does more than head(hidden states): the head's inputs differ by 1.0e+00"),
    ],
)
def test_what_is_not_the_heads_product_alone_is_asked_whole(reasons, change, why):
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    want, count, _ = total_and_gradients(copy.deepcopy(model))
    with torch.no_grad():
        model.lm_head.weight.div_(2)
    change(model)
    total, same, _ = total_and_gradients(model)
    assert reasons == [why]
    assert (total, same) == (pytest.approx(want, rel=1e-5), count)


def test_a_head_that_the_forward_steps_past_is_asked_whole(reasons):
    model = llama()
    model.__class__ = type("Around", (LlamaForCausalLM,), {"forward": _product})
    total, *_ = total_and_gradients(model)
    logits = _product(model, batch(0)["input_ids"])[:, :-1].flatten(0, 1)
    want = nn.functional.cross_entropy(logits, batch(0)["labels"][:, 1:].flatten(), reduction="sum")
    assert reasons == [message("train/objectives/causal_lm:a_head_that_the_forward")]
    assert total == pytest.approx(want.item(), rel=1e-6)


def test_dropout_does_not_confuse_the_trial_and_stays_on(monkeypatch):
    monkeypatch.setattr("gpubound.train.objectives.word_loss.fallback", lambda what, why: pytest.fail(why))
    model = llama(attention_dropout=0.5)
    model.model.layers[1].eval()
    CausalLM().prepare(model, batch(0))
    assert model.training and model.model.layers[0].self_attn.training
    assert not model.model.layers[1].training and not model.model.layers[1].mlp.training


def test_a_plain_module_falls_back_aloud():
    class Plain(Small):
        def forward(self, input_ids):
            return super().forward(input_ids)

    torch.manual_seed(0)
    model = Plain(words=97)
    with trace.strict(), pytest.raises(FallbackError) as error:
        CausalLM().prepare(model, batch(0))
    assert str(error.value) == message("train/objectives/causal_lm:a_plain_module_falls_bac")
    b = batch(0)
    total, count = CausalLM()(model, b)
    want = nn.functional.cross_entropy(model(b["input_ids"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())
    assert (total / count).item() == pytest.approx(want.item(), rel=1e-6)


def test_wrong_batches():
    ids = torch.ones(2, 3)
    wrong = torch.ones(2), {"input_ids": ids}, {"input_ids": ids, "labels": torch.ones(2, 2)}
    refusals("train/objectives/causal_lm:wrong_batches", *(partial(CausalLM(), small(), batch) for batch in wrong))
