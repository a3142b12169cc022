"""policy: values and gradients of each variant beside its formula in fp64, packed rows, figures, and whole steps."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.models import language_model
from gpubound.train import AdamW, TrainStep
from gpubound.train.objectives.policy import VARIANTS, Policy
from gpubound.watch.pretend import simgpu

from .formulas import WORDS, check_captured, check_formula, decoder, with_adapters
from .test_preference import packed

ROWS, TOKENS = 6, 10


def batch(old: bool = False, seed: int = 0) -> dict:
    """Answers of different lengths after prompts of different lengths, and log-probabilities near those of another model."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=g)
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : 1 + row // 2] = -100
        labels[row, TOKENS - row % 3 :] = -100
    given = {"input_ids": ids[:, :-1].contiguous(), "labels": labels}
    given["advantages"] = torch.tensor([1.0, -0.5, 2.0, -1.5, 0.0, 0.7])
    near = decoder()(given["input_ids"]).log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1).detach()
    for name in ("sampler_logprobs", "reference_logprobs", *(["old_logprobs"] if old else [])):
        given[name] = (near + 0.3 * torch.randn(near.shape, generator=g)).masked_fill(labels == -100, torch.nan)
    return given


def by_formula(
    model: nn.Module, given: dict, variant: str, kl: float, entropy: float, truncate: float | None, temperature: float = 1.0
) -> torch.Tensor:
    """The sum, written out from the papers, one token at a time, over whole logits."""
    average, low, high, by_answer = VARIANTS[variant]
    scores = (model(given["input_ids"]).double() / temperature).log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for row, labels in enumerate(given["labels"]):
        counted = [(t, label) for t, label in enumerate(labels.tolist()) if label != -100]
        own = {name: given[name][row].double() for name in given if name.endswith("logprobs")}
        advantage, part = given["advantages"][row].double(), 0
        logs = {t: scores[row, t, label] for t, label in counted}
        old = {t: own["old_logprobs"][t] if "old_logprobs" in own else logs[t].detach() for t in logs}
        mean = sum(logs[t] - old[t] for t in logs) / len(logs)
        for t in logs:
            ratio = torch.exp(mean if by_answer else logs[t] - old[t])
            if variant == "reinforce":
                loss = -advantage * logs[t]
            else:
                loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            if truncate is not None:
                loss = loss * torch.exp(old[t] - own["sampler_logprobs"][t]).clamp(max=truncate)
            d = own["reference_logprobs"][t] - logs[t]
            loss = loss + kl * (torch.exp(d) - d - 1) + entropy * (scores[row, t].exp() * scores[row, t]).sum()
            part = part + loss
        total = total + part * {"token": 1, "answer": 1 / len(logs), "constant": 1 / 16}[average]
    return total


def test_the_heads_trial_holds_the_logits_of_few_tokens(monkeypatch):
    """Those of a row of 1,920 tokens of 152k words, three times, would be 1.6 GiB."""
    model, seen, logits_of = decoder(), [], language_model.logits_of
    monkeypatch.setattr(
        language_model, "logits_of", lambda model, row: (seen.append(row["input_ids"].shape[1]), logits_of(model, row))[1]
    )
    ids = torch.randint(WORDS, (2, 600))
    bounds = torch.tensor([0, 200, 450, 600, 600, 1000, 1200, 1200, 1200], dtype=torch.int32)
    segments = torch.tensor([0] * 200 + [1] * 250 + [2] * 150).expand(2, 600)
    row = {"input_ids": ids, "position_ids": torch.arange(600).expand(2, 600), "segment_ids": segments, "cu_seqlens": bounds}
    assert language_model.why_not_head(model, {"input_ids": ids}) is None
    assert language_model.why_not_head(model, row) is None
    assert seen == [language_model.TOKENS] * 2


@pytest.mark.parametrize("whole", [False, True], ids=["head and loss as one", "whole logits"])
@pytest.mark.parametrize("old", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_the_formulas(monkeypatch, variant, old, whole):
    model, given = decoder(seed=0).double(), batch(old)
    for numbers in ((0.0, 0.0, None, 1.0), (0.1, 0.0, 1.2, 0.8), (0.05, 0.02, 2.0, 1.5))[1 - whole :: 1 + whole]:
        options = dict(zip(("kl", "entropy", "truncate", "temperature"), numbers))
        objective = Policy(variant, max_tokens=16, **options)
        objective.prepare(model, given)
        monkeypatch.setattr(objective, "_why_all_logits", "for the test" if whole else None)
        total, items = objective(model, given, scale=torch.tensor(0.5))
        assert items == ((given["labels"] != -100).sum() if objective.average == "token" else ROWS)
        check_formula(model, total, partial(by_formula, model, given, variant, **options), 1e-5, 1e-5)
        model.zero_grad()
        with torch.no_grad():
            assert objective(model, given)[0].item() == pytest.approx(2 * total.item(), rel=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_rows_have_the_loss_and_gradients_of_padded_ones(variant):
    model, given = decoder().double(), batch(old=True)
    per_token = {name: given[name] for name in given if name.endswith("logprobs")}
    per_token["advantages"] = given["advantages"].unsqueeze(1).expand(ROWS, TOKENS)
    rows = packed(given)
    for name, values in per_token.items():
        rows[name] = torch.zeros(rows["labels"].shape)
        for number in range(ROWS):
            row, segment = divmod(number, 4)
            at = (rows["segment_ids"][row] == segment).nonzero().flatten()
            rows[name][row, at] = values[number, : len(at)]
    objective = Policy(variant, kl=0.05, entropy=0.02, max_tokens=16)
    total, _ = objective(model, rows, scale=torch.tensor(0.5))
    check_formula(model, total, partial(by_formula, model, given, variant, 0.05, 0.02, 2.0), 1e-5, 1e-5)


def test_figures_are_means_over_the_tokens_of_a_step():
    model, given = decoder(), batch(old=True)
    objective = Policy("grpo", kl=0.1, truncate=1.2)
    step = TrainStep(model, objective, AdamW(lr=0.0), accumulate=2, precision="fp32", graph="require")
    counted = given["labels"] != -100
    logprob = objective.logprobs(model, given)
    for _ in range(2):  # the second one replays where graphs exist
        step([given, given])
        figures = objective.take_figures()
        gap = (given["old_logprobs"] - given["sampler_logprobs"])[counted]
        assert figures["tokens"] == 2 * counted.sum() and figures["largest_gap"] == pytest.approx(gap.abs().max().item())
        assert figures["gap"] == pytest.approx(gap.abs().mean().item(), rel=1e-5)
        assert figures["entropy"] == pytest.approx(-logprob[counted].mean().item(), rel=1e-5)
        assert figures["truncated"] == pytest.approx((gap.exp() > 1.2).float().mean().item())
        d = (given["reference_logprobs"] - logprob)[counted]
        assert figures["kl"] == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-4)
        ratio = (logprob - given["old_logprobs"]).exp()
        out = ((ratio > 1.2) & (given["advantages"][:, None] > 0)) | ((ratio < 0.8) & (given["advantages"][:, None] < 0))
        assert figures["clipped"] == pytest.approx(out[counted].float().mean().item())


@pytest.mark.slow
def test_steps_raise_the_probability_of_what_has_an_advantage():
    given = batch()
    for variant in VARIANTS:
        model = decoder()
        objective = Policy(variant, max_tokens=16, truncate=None)
        before = objective.logprobs(model, given).sum(1)
        step = TrainStep(model, objective, AdamW(lr=3e-3, weight_decay=0.0), precision="fp32", graph="off")
        for _ in range(8):
            assert math.isfinite(step([given]).read().loss)
        gained = objective.logprobs(model, given).sum(1) - before
        assert gained[2] > 0.1 and gained[3] < -0.1, variant


def test_the_reference_of_adapters_is_the_model_without_them():
    model, base, given = with_adapters(), decoder(), batch()
    reference = Policy().logprobs(base, given)
    del given["reference_logprobs"]
    total, _ = Policy(kl=0.5)(model, given)
    assert total.item() == pytest.approx(Policy(kl=0.5)(model, given | {"reference_logprobs": reference})[0].item(), rel=1e-5)
    with pytest.raises(ValueError, match="kl"):
        Policy(kl=0.5)(base, given)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"variant": "ppo"}, "variant"),
        ({"variant": "dr_grpo"}, "max_tokens"),
        ({"average": "row"}, "average"),
        ({"kl": -1.0}, "kl"),
        ({"clip": float("nan")}, "clip"),
    ],
)
def test_options_without_meaning_are_refused(options, name):
    with pytest.raises(ValueError, match=name):
        Policy(**options)


def test_batches_without_advantages_or_of_other_shapes_are_refused():
    model, given = decoder(), batch()
    for change in ({"advantages": None}, {"advantages": torch.ones(ROWS, 3)}, {"sampler_logprobs": torch.ones(ROWS, 3)}):
        with pytest.raises(ValueError, match=next(iter(change))):
            Policy()(model, given | change)


@pytest.mark.parametrize(("variant", "entropy"), [("grpo", 0.0), ("gspo", 0.02)])
def test_a_step_never_waits_for_the_device(variant, entropy):
    if torch.cuda.is_available():
        pytest.skip("the pretend device contends with a real one")
    device = simgpu()
    model, given = decoder().to(device), [{name: value.to(device) for name, value in batch(True).items()}]
    step = TrainStep(model, Policy(variant, kl=0.1, entropy=entropy), AdamW(lr=1e-3), precision="fp32", graph="off")
    step(given)
    with gb.watch() as ledger:
        step(given)
    assert (ledger.totals["syncs"], ledger.totals["h2d_copies"]) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("entropy", [0.0, 0.02])
def test_on_a_gpu_a_captured_step_equals_calls(entropy):
    batches = [batch(True, seed) for seed in range(4)]
    calls, captured = check_captured(lambda: (decoder(), Policy("grpo", kl=0.1, entropy=entropy)), batches)
    assert captured.take_figures() == pytest.approx(calls.take_figures(), rel=1e-2, abs=1e-4)
