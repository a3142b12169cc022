"""Batches and models that a named loss cannot take: refused in the first step, with the fact that explains them."""

import logging

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.train import TrainStep

from .conftest import draw, small, summed

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
    with pytest.raises(ValueError) as error:
        step(tokens(**changes))
    assert all(fact in str(error.value) for fact in facts), str(error.value)
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
