"""TrainStep: every mistake by its sentence, before anything runs; batches and models that a loss cannot take."""

import copy
import logging
import pickle
import threading
from functools import partial

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.train import AdamW, TrainStep
from tests import messages
from tests.messages import refusal

from .conftest import draw, named, small, summed

message = partial(messages.refusal, ValueError)


def test_wrong_options():
    wrong = [
        {"accumulate": 0}, {"clip": 0.0}, {"clip": float("nan")}, {"clip": "1"}, {"schedule": "cosine"}, {"model": "gpt2"},
        {"graph": "on"}, {"recompute": "all"}, {"precision": "fp4"}, {"loss": "mse"}, {"optimizer": "sgd"},
    ]  # fmt: skip
    calls = [partial(TrainStep, **{"model": small(), "loss": summed, **options}) for options in wrong]
    messages.refusals("train/step_errors:wrong_options", *calls)


def test_wrong_numbers():
    calls = lambda: AdamW(lr=-1), lambda: AdamW(betas=(0.9, 1.0)), lambda: AdamW(betas=0.9)
    messages.refusals("train/step_errors:wrong_numbers", *calls)


def test_a_refused_model_is_left_as_it_was():
    model = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match="no list of blocks"):
        TrainStep(model, summed, recompute="blocks")
    assert not hasattr(model.weight, "main_grad") and not model._forward_pre_hooks and model.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="no list of blocks"):
        TrainStep(model, summed, precision="fp8")
    assert not hasattr(model.weight, "main_grad") and not model._forward_pre_hooks and model.weight.dtype == torch.float32
    step = TrainStep(model, summed)
    with pytest.raises(ValueError, match="already has a main_grad"):
        TrainStep(model, summed)
    assert len(model._forward_pre_hooks) == 1
    step.close()
    assert not model._forward_pre_hooks


def test_a_closed_step_says_so():
    model = small()
    step = TrainStep(model, summed, precision="fp32", graph="off")
    step(draw(2))
    step.close()
    step.close()
    before = model.mix.weight.detach().clone()
    assert message(lambda: step(draw(2))) == messages.message("train/step_errors:a_closed_step_says_so")
    assert model.mix.weight.equal(before) and not hasattr(model.mix.weight, "main_grad")


def test_one_call_at_a_time():
    """Two threads would sum into one buffer."""
    heard = []

    def counted(model, batch):
        if not heard:
            heard.append("")
            other = threading.Thread(target=lambda: heard.append(message(lambda: step(draw(2)))))
            other.start()
            other.join()
        return summed(model, batch)

    step = TrainStep(small(), counted, precision="fp32", graph="off")
    step(draw(2))
    assert heard[1] == messages.message("train/step_errors:one_call_at_a_time")
    step(draw(2))


@pytest.mark.parametrize("make", [copy.deepcopy, pickle.dumps])
def test_a_step_is_not_copied(make):
    with pytest.raises(TypeError, check=messages.message("train/step_errors:a_step_is_not_copied")):
        make(TrainStep(small(), summed, precision="fp32", graph="off"))


def test_wrong_batches():
    step = TrainStep(small(), summed, accumulate=2, precision="fp32", graph="off")
    wrong = [1, 2, 3], {1, 2}, {"x": torch.ones(1, device="meta")}, {"x": {1}}
    messages.refusals("train/step_errors:wrong_batches", *(partial(step, batch) for batch in wrong))


def test_wrong_losses():
    losses = [
        lambda m, b: summed(m, b)[0],
        lambda m, b: (summed(m, b)[0].detach(), 1),
        lambda m, b: (summed(m, b)[0], torch.ones(2)),
        lambda m, b: (summed(m, b)[0], "3"),
    ]
    steps = [TrainStep(small(), loss, precision="fp32", graph="off") for loss in losses]
    messages.refusals("train/step_errors:wrong_losses", *(partial(step, draw(2)) for step in steps))


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -1e-3, None, "1e-3"], ids=repr)
def test_a_rate_that_is_none(lr):
    model = small()
    step = TrainStep(model, summed, AdamW(lr=1e-2), precision="fp32", graph="off")

    def set_it():
        step.lr = lr

    assert message(set_it) == messages.message("train/step_errors:a_rate_that_is_none", repr(lr))
    assert step.lr == 1e-2 and step(draw(2)).read().lr == 1e-2


@pytest.mark.parametrize("graph", ["off", "require"])
def test_what_is_trained_may_not_change_unseen(graph):
    """Frozen, unfrozen or replaced behind the step's back: it would go on moving, or never move."""
    model = small(tied=False)
    model.mix.bias.requires_grad_(False)
    step = TrainStep(model, summed, precision="fp32", graph=graph)
    step(draw(2))
    before = named(model)
    made = "since this TrainStep was made, which trains the parameters it found then;"
    close = "or close() this step and make a new one."

    model.mix.weight.requires_grad_(False)
    assert message(lambda: step(draw(2))) == messages.message("train/step_errors:what_is_trained_may_not", made, close)
    model.mix.weight.requires_grad_(True)
    model.mix.bias.requires_grad_(True)
    assert message(lambda: step(draw(2))) == messages.message("train/step_errors:what_is_trained_may_not.2", made, close)
    model.mix.bias.requires_grad_(False)
    kept = model.head.weight
    model.head.weight = torch.nn.Parameter(kept.detach().clone())
    assert message(lambda: step(draw(2))) == messages.message("train/step_errors:what_is_trained_may_not.3", made, close)
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    model.head.weight = kept
    step(draw(2))
    assert not kept.equal(before["head.weight"])


@pytest.mark.parametrize("graph", ["off", "require"])
def test_what_is_added_is_not_left_untrained_unseen(graph):
    model = small(tied=False)
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    step = TrainStep(model, summed, precision="fp32", graph=graph)
    step(draw(2))
    made = "was added since this TrainStep was made, which trains the parameters it found then;"
    freeze = "freeze it with requires_grad_(False), or close() this step and make a new one."

    model.blocks.append(torch.nn.Linear(2, 2, bias=False))
    assert message(lambda: step(draw(2))) == f"parameters: blocks.1.weight {made} {freeze}"
    model.blocks[1].requires_grad_(False)  # an evaluation's head, perhaps: it does not train
    step(draw(2))
    model.blocks[1].requires_grad_(True)
    assert message(lambda: step(draw(2))).startswith("parameters: blocks.1.weight was unfrozen since")
    model.blocks[1].requires_grad_(False)
    model.blocks[1] = torch.nn.Linear(2, 2, bias=False)
    assert message(lambda: step(draw(2))) == f"parameters: blocks.1.weight {made} {freeze}"
    del model.blocks[1]
    step(draw(2))
    model.mix.gain = torch.nn.Parameter(torch.ones(1))
    assert message(lambda: step(draw(2))) == f"parameters: mix.gain {made} {freeze}"


def test_what_is_taken_out_is_not_trained_on_unseen():
    model = small(tied=False)
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)])
    step = TrainStep(model, summed, precision="fp32", graph="off")
    step(draw(2))
    del model.blocks[1]  # it does not train
    step(draw(2))
    block = model.blocks.pop(0)
    assert message(lambda: step(draw(2))) == messages.message("train/step_errors:what_is_taken_out_is_not")
    model.blocks.append(block)
    step(draw(2))


def test_a_parameter_without_elements_is_no_change():
    """It trains, though there is nothing of it in the flat buffers."""
    model = small()
    model.empty = torch.nn.Parameter(torch.ones(0, 3))
    step = TrainStep(model, summed, precision="fp32", graph="off")
    step(draw(2))
    model.empty.requires_grad_(False)
    assert message(lambda: step(draw(2))).startswith("parameters: empty was frozen since this TrainStep was made")


@pytest.mark.parametrize("here, there", [("bf16", "fp16"), ("fp16", "bf16")])
def test_state_of_another_precision(here, there):
    """Their tensors have the same names and shapes; fp16's loss scale would be multiplied in and never taken out again."""
    state = TrainStep(small(), summed, precision=there, graph="off").state_dict()
    step = TrainStep(small(), summed, precision=here, graph="off")
    before = {name: t.clone() for name, t in step.state_dict().items()}
    assert message(lambda: step.load_state_dict(state)) == (
        messages.message("train/step_errors:state_of_another_precisi", there, here, repr(there))
    )
    assert all(t.equal(before[name]) for name, t in step.state_dict().items())


def test_fp32_and_tf32_share_their_states():
    state = TrainStep(small(), summed, precision="tf32", graph="off").state_dict()
    state["m.embed.weight"].fill_(0.5)
    other = TrainStep(small(), summed, precision="fp32", graph="off")
    other.load_state_dict(state)
    assert other.state_dict()["m.embed.weight"].eq(0.5).all()


def test_state_of_another_model():
    step = TrainStep(small(), summed, precision="fp32", graph="off")
    other = TrainStep(small(words=14), summed, precision="fp32", graph="off")
    with pytest.raises(ValueError, check=messages.message("train/step_errors:state_of_another_model")):
        step.load_state_dict(other.state_dict())
    state = step.state_dict() | {"m.more": torch.ones(1)}
    assert message(lambda: step.load_state_dict(state)) == messages.message("train/step_errors:state_of_another_model.2")


def test_a_model_that_was_saved_in_a_step_trains(tmp_path):
    """It had come back with the step's accumulators: products delivered to these, and grad stayed None."""
    model, batch = small(), draw(4)
    TrainStep(model, summed, precision="bf16", graph="off")([batch])
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
    assert not any(hasattr(p, "main_grad") for p in again.parameters())
    torch.save(dict(model.named_parameters()), tmp_path / "weights.pt")
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in torch.load(tmp_path / "weights.pt").items())
    assert TrainStep(again, summed, precision="fp32", graph="off")([batch]).read().updates == 1


WORDS = 40


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return gb.Decoder(gb.DecoderConfig(hidden=16, intermediate=32, layers=1, heads=2, kv_heads=1, vocabulary=WORDS))


def tokens(**changes) -> dict:
    ids = torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids} | changes


def put(value: int) -> torch.Tensor:
    ids = tokens()["input_ids"].clone()
    ids[1, 3] = value
    return ids


class NanoGPT(nn.Module):
    """A model of one's own: its forward takes (idx, targets), or other arguments that a test gives it."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, idx, targets=None):
        return self.head(self.table(idx))


class WithIds(NanoGPT):
    def forward(self, input_ids):
        return self.head(self.table(input_ids))


@pytest.mark.parametrize(
    "changes, facts",
    [
        ({"labels": put(WORDS)}, ["labels", "40", "vocabulary of 40"]),
        ({"labels": put(-1)}, ["labels", "-1", "-100"]),
        ({"input_ids": put(WORDS + 2)}, ["input_ids", "42", "vocabulary of 40"]),
        ({"input_ids": put(-3)}, ["input_ids", "-3"]),
        ({"input_ids": put(1).float()}, ["input_ids", "torch.float32", "torch.int64"]),
        ({"labels": put(1).float()}, ["labels", "torch.float32"]),
        ({"labels": None}, ["labels", "NoneType"]),
        ({"labels": [1, 2]}, ["labels", "list"]),
        ({"input_ids": torch.empty(0, 8, dtype=torch.int64), "labels": torch.empty(0, 8, dtype=torch.int64)}, ["(0, 8)"]),
        ({"colour": torch.ones(2)}, ["colour", "Decoder.forward", "input_ids"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and isinstance(value[0], str) else None,
)
def test_a_batch_that_the_model_cannot_take(changes, facts, request):
    """By turns to both losses, and in a step with graphs and one without."""
    number = request.node.callspec.indices["changes"]
    loss, graph = ("causal_lm", "next_token")[number % 2], ("require", "off")[number // 2 % 2]
    step = TrainStep(decoder(), loss, precision="fp32", graph=graph)
    said = refusal(ValueError, lambda: step(tokens(**changes)))
    assert all(fact in said for fact in facts), said
    assert step(tokens()).read().updates == 1, "nothing has moved, and a right batch trains"


def test_each_signature_is_checked_and_a_steady_step_is_not(monkeypatch):
    step = TrainStep(decoder(), "next_token", precision="fp32", graph="off")
    step(tokens())
    short = {name: t[:, :5] for name, t in tokens(labels=put(WORDS)).items()}
    with pytest.raises(ValueError, match="vocabulary of 40"):
        step(short)
    monkeypatch.setattr("gpubound.train.objectives.word_loss.check_tokens", lambda *_: pytest.fail("a steady step"))
    step(tokens())


def test_ids_outside_the_vocabulary_in_a_later_batch_on_a_cpu():
    step = TrainStep(decoder(), "next_token", precision="fp32", graph="off")
    step(tokens())
    with pytest.raises(ValueError, match="input_ids hold the token 41, outside"):
        step(tokens(input_ids=put(41)))
    with pytest.raises(IndexError):  # an error of the model's own stays what it is
        TrainStep(small(), lambda model, batch: [][1], precision="fp32", graph="off")(draw(1))


def test_labels_are_checked_against_the_logits_where_a_model_names_no_head():
    with pytest.raises(ValueError, match="vocabulary of 40"):
        TrainStep(WithIds(), "next_token", precision="fp32", graph="off")(tokens(labels=put(WORDS)))


def test_a_model_whose_forward_takes_other_arguments():
    model = NanoGPT()
    with pytest.raises(ValueError) as error:
        TrainStep(model, "causal_lm")
    assert all(
        fact in str(error.value) for fact in ("causal_lm", "input_ids", "NanoGPT", "(idx, targets)", "(loss.sum(), count)")
    )
    assert not hasattr(model.head.weight, "main_grad") and model.head.weight.dtype == torch.float32, "it was not touched"
    model.__class__ = type("Needs", (WithIds,), {"forward": lambda self, input_ids, kind: self.head(self.table(input_ids))})
    with pytest.raises(ValueError, match="needs kind"):
        TrainStep(model, "next_token", precision="fp32")(tokens())


def spoiled(model, batch):
    total, items = summed(model, batch)
    return total * float("nan"), items


@pytest.mark.parametrize("precision, limit", [("fp32", 3), ("fp16", 10)])
def test_a_run_of_skipped_steps_is_reported_at_once_and_once(monkeypatch, precision, limit):
    said = []
    monkeypatch.setattr("gpubound.train.step.say", lambda text, level: said.append((text, level)))
    step = TrainStep(small(), spoiled, precision=precision, graph="off")
    for number in range(1, limit + 6):
        step(draw(2))
        assert len(said) == (number > limit), f"after {number} steps: a report is read one step late"
    ((text, level),) = said
    assert f"{limit} steps" in text and "loss" in text and level == logging.WARNING


def test_the_likely_reason_is_named_where_the_labels_show_it(monkeypatch):
    said = []
    monkeypatch.setattr("gpubound.train.step.say", lambda text, level: said.append(text))
    step = TrainStep(decoder(), "next_token", precision="fp32", graph="off")
    step(tokens())
    for _ in range(5):
        step(tokens(labels=put(WORDS)))  # the same signature as the first batch, which was right
    assert len(said) == 1 and "labels hold the token 40, outside" in said[0]


def test_steps_that_are_skipped_now_and_then_are_not_reported(monkeypatch):
    monkeypatch.setattr("gpubound.train.step.say", lambda text, level: pytest.fail(text))
    step = TrainStep(small(), lambda model, batch: (summed if batch[2] else spoiled)(model, batch[:2]), precision="fp32")
    for number in range(12):
        step((*draw(2), number % 3 == 2))


@pytest.mark.parametrize("items, sentence", [(0, "counted 0 items"), (-8, "counted -8 items"), (None, "all labels are -100")])
def test_steps_without_an_item_that_counts_are_reported_once(monkeypatch, items, sentence):
    """They move no weight and are not skipped: 30 of them said nothing."""
    said = []
    monkeypatch.setattr("gpubound.train.step.say", lambda text, level: said.append(text))
    if items is None:
        step, batch = TrainStep(decoder(), "next_token", precision="fp32"), tokens(labels=torch.full((2, 8), -100))
    else:
        step, batch = TrainStep(small(), lambda model, batch: (summed(model, batch)[0], items), precision="fp32"), draw(2)
    for number in range(1, 7):
        assert step(batch).read().updates == 0
        assert len(said) == (number > 3), f"after {number} steps: a report is read one step late"
    assert sentence in said[0]


def test_one_text_without_its_row_is_refused():
    ids = torch.tensor([1, 2, 3])
    assert "wanted (rows, tokens)" in message(lambda: TrainStep(decoder(), "causal_lm")({"input_ids": ids, "labels": ids}))


@pytest.mark.parametrize("name", ["overlap", "update_in_backward", "offload_optimizer", "exact"])
def test_a_text_is_no_flag(name):
    """exact="false" was true."""
    assert f"{name} must be True or False, got 'false'." in message(lambda: TrainStep(small(), summed, **{name: "false"}))
