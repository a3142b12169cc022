"""distillation: losses and gradients beside the formulas in fp64 (TRL's: tests/peers), packed rows, and whole steps."""

import copy
from importlib import import_module

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.data import train_tokenizer
from gpubound.train import AdamW, TrainStep
from gpubound.train.objectives import chunked_head
from gpubound.train.objectives.distillation import Distillation

from ...messages import message
from ..runs import texts
from .formulas import WORDS, check_captured, check_formula, check_steps, decoder

kernel = import_module("gpubound.kernels.cross_entropy")

KINDS = {"forward": (1.0, 0.0, 1.0), "reverse": (1.0, 1.0, 2.0), "jensen-shannon": (1.0, 0.3, 0.5), "mixed": (0.6, 0.0, 3.0)}


def batch(rows: int = 2, tokens: int = 9, seed: int = 0) -> dict:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (rows, tokens + 1), generator=g)
    labels = ids[:, 1:].clone()
    for row in range(rows):
        labels[row, : 1 + row] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


def packed(examples=(4, 3), seed: int = 0) -> tuple[dict, list[dict]]:
    """One row of these examples and padding, and the same examples alone."""
    g = torch.Generator().manual_seed(seed)
    alone = [{name: torch.randint(WORDS, (1, n), generator=g) for name in ("input_ids", "labels")} for n in examples]
    pad = {"input_ids": torch.zeros(1, 2, dtype=torch.long), "labels": torch.full((1, 2), -100)}
    row = {name: torch.cat([part[name] for part in [*alone, pad]], 1) for name in pad}
    lengths = torch.tensor([*examples, 2])
    row["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    row["segment_ids"] = torch.repeat_interleave(torch.tensor([0, 1, -1]), lengths)[None]
    row["cu_seqlens"] = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32)
    return row, alone


def by_formula(student: nn.Module, teacher: nn.Module, given: dict, alpha: float, beta: float, t: float) -> torch.Tensor:
    """The sum over all labels that count, written out, one token at a time, over whole logits."""
    z, y = (model(given["input_ids"]).flatten(0, 1).double() for model in (student, teacher))
    total = torch.zeros((), dtype=torch.float64)
    for one, other, label in zip(z, y.detach(), given["labels"].flatten().tolist()):
        if label != -100:
            q, p = ((x / t).exp() / (x / t).exp().sum() for x in (one, other))
            m = (1 - beta) * q + beta * p
            first, second = (a * (a / b).log() for a, b in ((p, m if beta else q), (q, m if beta < 1 else p)))
            weights = {0: (1, 0), 1: (0, 1)}.get(beta, (beta, 1 - beta))
            distance = sum(w * each.sum() for w, each in zip(weights, (first, second)))
            total = total + alpha * t * t * distance - (1 - alpha) * (one[label] - one.logsumexp(0))
    return total


@pytest.mark.parametrize("whole", [False, True], ids=["chunks", "whole logits"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_the_formulas(monkeypatch, kind, whole):
    monkeypatch.setattr(chunked_head, "CHUNK", 7)
    monkeypatch.setattr(kernel, "ELEMENTS", 3 * WORDS)
    (alpha, beta, t), given = KINDS[kind], batch()
    student, teacher = decoder().double(), decoder(1, hidden=32).double()
    objective = Distillation(teacher, alpha=alpha, beta=beta, temperature=t)
    objective.prepare(student, given)
    monkeypatch.setattr(objective, "_why_all_logits", "for the test" if whole else None)
    total, count = objective(student, given, scale=torch.tensor(0.5))
    assert count == 15
    check_formula(student, total, lambda: by_formula(student, teacher, given, *KINDS[kind]), 1e-12, 1e-11)
    assert all(p.grad is None for p in teacher.parameters())


def test_any_upstream_gradient_without_a_scale():
    student, given = decoder().double(), batch()
    objective = Distillation(decoder(1).double())
    (3 * objective(student, given)[0]).backward()
    weight = student.lm_head.weight
    got = weight.grad.clone()
    student.zero_grad()
    objective(student, given, scale=torch.tensor(3.0))[0].backward()
    torch.testing.assert_close(got, weight.grad)


def test_examples_of_a_packed_row_are_isolated_for_the_teacher_too():
    student, teacher = decoder(), decoder(1)
    row, alone = packed()
    objective = Distillation(teacher)
    total, count = objective(student, row)
    want = sum(by_formula(student, teacher, each, 1.0, 0.0, 1.0) for each in alone)
    assert count == 7 and total.item() == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_equal_a_loop_of_plain_torch(accumulate):
    teacher = decoder(1)
    before = copy.deepcopy(teacher.state_dict())

    def mean(model, micro):
        return sum(by_formula(model, teacher, given, 0.5, 0.0, 2.0) for given in micro) / (15 * accumulate)

    objective = Distillation(teacher, alpha=0.5, temperature=2.0)
    check_steps(objective, [batch(seed=seed) for seed in range(2 * accumulate)], accumulate, mean)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert not any(p.requires_grad and p.grad is not None for p in teacher.parameters())


@pytest.mark.slow
def test_adapters_learn_the_teacher_in_its_own_dtype():
    student, teacher = decoder(), decoder(1).bfloat16()
    gb.lora.add(student, rank=4)
    objective = Distillation(teacher)
    before = objective.validate(student, [batch()])
    step = TrainStep(student, objective, AdamW(lr=3e-2), precision="fp32", graph="off")
    for _ in range(30):
        step([batch()])
    after = objective.validate(student, [batch()])
    assert after["held_out"] == after["divergence"] < 0.5 * before["held_out"]
    assert teacher.lm_head.weight.dtype == torch.bfloat16


def test_held_out_values_are_means_of_both_losses():
    student, teacher, given = decoder(), decoder(1), [batch(), batch(3, seed=1)]
    values = Distillation(teacher, alpha=0.25, temperature=2.0).validate(student, given)
    sums = [[by_formula(student, teacher, each, alpha, 0.0, 2.0).item() for each in given] for alpha in (1.0, 0.0)]
    distance, entropy = (sum(each) / 36 for each in sums)
    assert values == {
        "held_out": pytest.approx(0.25 * distance + 0.75 * entropy, rel=1e-5),
        "divergence": pytest.approx(distance / 4, rel=1e-5),
        "cross_entropy": pytest.approx(entropy, rel=1e-5),
    }


def test_what_it_refuses(tmp_path):
    for teacher in (None, 3, ""):
        with pytest.raises(ValueError, check=message("train/objectives/test_distillation:no_teacher", repr(teacher))):
            Distillation(teacher)
    for options in ({"alpha": 1.5}, {"beta": -0.1}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Distillation(decoder(), **options)
    model = decoder()
    with pytest.raises(ValueError, check=message("train/objectives/test_distillation:other_words")):
        TrainStep(model, Distillation(decoder(words=32)), graph="off")
    with pytest.raises(ValueError, check=message("train/objectives/test_distillation:itself")):
        TrainStep(model, Distillation(model), graph="off")
    (tmp_path / "teacher").mkdir()
    train_tokenizer(texts(3), 280).save(tmp_path / "teacher")
    ours, objective = train_tokenizer(texts(12)[6:], 280), Distillation(tmp_path / "teacher")
    with pytest.raises(ValueError, match="another tokenizer"):
        objective.extended(ours)
    with pytest.raises(ValueError, match="280 tokens"):
        objective.extended(train_tokenizer(texts(3), 270))
    with pytest.raises(gb.DataError, match="config"):
        objective.check_files()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_a_captured_step_equals_calls(kind):
    alpha, beta, t = KINDS[kind]

    def make():
        teacher = decoder(1, hidden=32).cuda().bfloat16()
        return decoder(), Distillation(teacher, alpha=alpha, beta=beta, temperature=t)

    check_captured(make, [batch(seed=seed) for seed in range(4)])
