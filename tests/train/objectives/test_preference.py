"""dpo: values and gradients of each loss beside the formula in fp64, the reference of adapters, and whole steps."""

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.train import AdamW, TrainStep
from gpubound.train.objectives.preference import LOSSES, Preference

from .formulas import WORDS, check_captured, check_formula, check_steps, decoder, with_adapters


def batch(pairs: int = 3, tokens: int = 10, seed: int = 0, reference: bool = True) -> dict:
    """Pairs with prompts and answers of different lengths, padded."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (2 * pairs, tokens + 1), generator=g)
    labels = ids[:, 1:].clone()
    for row in range(2 * pairs):
        labels[row, : 1 + row // 2] = -100
        labels[row, tokens - row % 3 :] = -100
    given = {"input_ids": ids[:, :-1].contiguous(), "labels": labels}
    return given | ({"reference": -30 + 3 * torch.randn(2 * pairs, generator=g)} if reference else {})


def by_formula(model: nn.Module, given: dict, loss: str, beta: float, smoothing: float) -> torch.Tensor:
    """The sum over all pairs, written out from the papers, one pair at a time, over whole logits."""
    scores = model(given["input_ids"]).double().log_softmax(-1)
    sums, lengths = [], []
    for row, labels in enumerate(given["labels"]):
        counted = [(t, label) for t, label in enumerate(labels.tolist()) if label != -100]
        sums.append(sum(scores[row, t, label] for t, label in counted))
        lengths.append(len(counted))
    ratios = [total - ref for total, ref in zip(sums, given["reference"].double())]
    if loss == "ipo":
        ratios = [ratio / length for ratio, length in zip(ratios, lengths)]
    z = torch.stack(ratios).detach().mean().clamp(min=0)
    total = torch.zeros((), dtype=torch.float64)
    for chosen, rejected in zip(ratios[0::2], ratios[1::2]):
        h = beta * (chosen - rejected)
        if loss == "sigmoid":
            total = total - (1 - smoothing) * torch.log(1 / (1 + torch.exp(-h))) - smoothing * torch.log(1 / (1 + torch.exp(h)))
        elif loss == "hinge":
            total = total + torch.relu(1 - h)
        elif loss == "ipo":
            total = total + (chosen - rejected - 0.5 / beta) ** 2
        else:
            total = total + 0.5 * (1 - 1 / (1 + torch.exp(-beta * (chosen - z))))
            total = total + 0.5 * (1 - 1 / (1 + torch.exp(-beta * (z - rejected))))
    return total


@pytest.mark.parametrize("whole", [False, True], ids=["head and loss as one", "whole logits"])
@pytest.mark.parametrize(("loss", "smoothing"), [(name, 0.0) for name in LOSSES] + [("sigmoid", 0.2)])
def test_loss_and_gradients_are_the_formulas(monkeypatch, loss, smoothing, whole):
    model, given = decoder().double(), batch()
    objective = Preference(beta=0.3, loss=loss, label_smoothing=smoothing)
    objective.prepare(model, given)
    monkeypatch.setattr(objective, "_why_all_logits", "for the test" if whole else None)
    total, pairs = objective(model, given, scale=torch.tensor(0.5))
    assert pairs == 3
    check_formula(model, total, lambda: by_formula(model, given, loss, 0.3, smoothing), 1e-5, 1e-5)


def packed(given: dict) -> dict:
    """The same pairs in two rows, the second with room for one more pair than it has, each answer without its padding."""
    lengths = [max(t for t, label in enumerate(row.tolist()) if label != -100) + 1 for row in given["labels"]]
    first, second = sum(lengths[:4]), sum(lengths[4:])
    rows = {name: torch.full((2, first), fill) for name, fill in (("input_ids", 0), ("labels", -100), ("position_ids", 0))}
    rows["segment_ids"], starts = torch.full((2, first), -1), []
    for row, numbers in enumerate((range(4), range(4, 6))):
        begin = 0
        for segment, number in enumerate(numbers):
            place = slice(begin, begin + lengths[number])
            for name in ("input_ids", "labels"):
                rows[name][row, place] = given[name][number, : lengths[number]]
            rows["position_ids"][row, place], rows["segment_ids"][row, place] = torch.arange(lengths[number]), segment
            starts.append(row * first + begin)
            begin += lengths[number]
    ends = [first + second] + [2 * first] * 2  # of the padding, and of the places for more
    rows["cu_seqlens"] = torch.tensor([*starts, *ends], dtype=torch.int32)
    if "reference" in given:
        rows["reference"] = torch.cat([given["reference"], torch.full((2,), 7.0)])
    return rows


@pytest.mark.parametrize(("loss", "smoothing"), [(name, 0.0) for name in LOSSES] + [("sigmoid", 0.2)])
def test_packed_pairs_have_the_loss_and_gradients_of_rows(loss, smoothing):
    model, given = decoder().double(), batch()
    total, pairs = Preference(beta=0.3, loss=loss, label_smoothing=smoothing)(model, packed(given), scale=torch.tensor(0.5))
    assert pairs == 3
    check_formula(model, total, lambda: by_formula(model, given, loss, 0.3, smoothing), 1e-5, 1e-5)
    objective = Preference(beta=0.3, loss=loss, label_smoothing=smoothing)
    assert objective.validate(model, [packed(given)]) == pytest.approx(objective.validate(model, [given]), rel=1e-5)


@pytest.mark.slow
def test_packed_pairs_train_adapters_in_a_step_that_can_be_captured():
    losses = []
    for pairs in (batch(reference=False), packed(batch(reference=False))):
        model = decoder()
        gb.lora.add(model, rank=2)
        step = TrainStep(model, Preference(beta=0.5), AdamW(lr=2e-2), precision="fp32", graph="require")
        losses.append([step([pairs]).read().loss for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[0][-1] < losses[0][0]


def test_the_reference_of_adapters_is_the_model_without_them():
    model, base = with_adapters(), decoder()
    given, objective = batch(reference=False), Preference()
    total, _ = objective(model, given)
    with_field = given | {"reference": Preference().reference_values(base, given)}
    assert total.item() == pytest.approx(Preference()(model, with_field)[0].item(), rel=1e-5)
    assert abs(total.item() / 3 - 0.6931) > 1e-3, "the adapters change nothing"
    total.backward()
    assert all(p.grad is not None for p in gb.lora.parameters(model))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_equal_a_loop_of_plain_torch(accumulate):
    def mean(model, micro):
        return sum(by_formula(model, given, "sigmoid", 0.2, 0.0) for given in micro) / (2 * accumulate)

    check_steps(Preference(beta=0.2), [batch(pairs=2, seed=seed) for seed in range(2 * accumulate)], accumulate, mean)


@pytest.mark.slow
def test_training_widens_the_margin_of_the_pairs():
    model = decoder()
    gb.lora.add(model, rank=4)
    given = batch(pairs=4, reference=False)
    objective = Preference(beta=0.5)
    before = objective.validate(model, [given])
    assert before["held_out"] == pytest.approx(0.693147, abs=1e-5) and before["margin"] == pytest.approx(0, abs=1e-5)
    step = TrainStep(model, objective, AdamW(lr=2e-2), precision="fp32", graph="off")
    for _ in range(20):
        step([given])
    after = objective.validate(model, [given])
    assert after["held_out"] < 0.5 and after["accuracy"] == 1 and after["margin"] > 0.5


def test_what_it_refuses():
    model, given = decoder(), batch(reference=False)
    with pytest.raises(ValueError, match="reference"):
        Preference()(model, given)
    gb.lora.add(model, rank=2, init=False)
    model.lm_head.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="lm_head"):
        Preference()(model, given)
    odd = {key: value[:5] for key, value in batch().items()}
    with pytest.raises(ValueError, match=r"\(5, 10\).*even"):
        Preference()(decoder(), odd)
    for options in ({"loss": "ppo"}, {"beta": 0.0}, {"label_smoothing": 0.5}, {"label_smoothing": 0.1, "loss": "ipo"}):
        with pytest.raises(ValueError, match=next(reversed(options)) if len(options) == 1 else "label_smoothing"):
            Preference(**options)


@pytest.mark.gpu
@pytest.mark.parametrize("adapters", [True, False])
def test_on_a_gpu_a_captured_step_equals_calls(adapters):
    """The reference of adapters is in the graph, too. bf16 weights, so gradients differ by the order of sums alone."""

    def make():
        model = decoder()
        if adapters:
            gb.lora.add(model, rank=2)
        return model, Preference(beta=0.2)

    check_captured(make, [batch(pairs=2, seed=seed, reference=not adapters) for seed in range(4)])
