"""classification and contrastive: losses and gradients beside the formulas, transformers' models, packed rows, whole steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpubound as gb
from gpubound import Decoder
from gpubound.train import AdamW, TrainStep
from gpubound.train.objectives.pooled import Classification, Contrastive

from . import formulas
from .formulas import WORDS, check_captured

CLASSES = 3
LENGTHS = (4, 3, 5)


def decoder(classes: int = CLASSES) -> nn.Module:
    model = formulas.decoder()
    if classes:
        model.classify([str(n) for n in range(classes)])
        model.lm_head.weight.data.mul_(4)
    return model


@pytest.fixture(scope="module")
def placed():
    """A LlamaForSequenceClassification of transformers, placed."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=WORDS, num_labels=CLASSES, pad_token_id=0)
    model = transformers.LlamaForSequenceClassification(config)
    model.score.weight.data.mul_(20)
    gb.place(model, "cpu")
    return model


def texts(seed: int = 0) -> tuple[list[torch.Tensor], list[int]]:
    """Texts without the token 0, which pads, and their classes."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(1, WORDS, (n,), generator=g) for n in LENGTHS], torch.randint(CLASSES, (3,), generator=g).tolist()


def packed(seed: int = 0) -> dict:
    """Two rows: two texts, and one with padding."""
    rows, classes = texts(seed)
    ids = torch.stack([torch.cat(rows[:2]), F.pad(rows[2], (0, 2))])
    labels = torch.full_like(ids, -100)
    labels[0, 3], labels[0, 6], labels[1, 4] = (torch.tensor(each) for each in classes)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1]])
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1]])
    bounds = torch.tensor([0, 4, 7, 12, 14], dtype=torch.int32)
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "segment_ids": segments, "cu_seqlens": bounds}


def scores_of(model: nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    """The logits of each text alone, at its last token."""
    out = [model(row[None]) for row in rows]
    return torch.stack([one[0, -1] if torch.is_tensor(one) else one.logits[0] for one in out])


@pytest.mark.parametrize("whose", ["ours", "transformers"])
def test_classes_of_packed_rows_are_those_of_each_text_alone(whose, request):
    model = decoder() if whose == "ours" else request.getfixturevalue("placed").eval()
    rows, classes = texts()
    model.zero_grad()
    total, count = Classification()(model, packed(), scale=torch.tensor(0.5))
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    want = sum(scores.logsumexp(0) - scores[label] for scores, label in zip(scores_of(model, rows), classes))
    (0.5 * want).backward()
    assert count == 3 and total.item() == pytest.approx(0.5 * want.item(), rel=1e-5)
    for name, p in model.named_parameters():
        assert p.grad.norm() > 0 and (gradients[name] - p.grad).norm() <= 2e-5 * p.grad.norm(), name
    values, found = Classification().validate(model, [packed(), packed(1)]), 0
    for seed in (0, 1):
        rows, classes = texts(seed)
        found += (scores_of(model, rows).argmax(1) == torch.tensor(classes)).sum().item()
    assert values["accuracy"] == pytest.approx(found / 6)


def test_padded_rows_take_the_models_own_forward(placed):
    placed.eval()
    rows, classes = texts()
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask, labels = (ids != 0).long(), torch.tensor(classes)
    want = placed(input_ids=ids, attention_mask=mask, labels=labels).loss
    total, count = Classification()(placed, {"input_ids": ids, "attention_mask": mask, "labels": labels})
    assert total.item() == pytest.approx(3 * want.item(), rel=1e-5) and count == 3
    several = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]])
    placed.config.problem_type = "multi_label_classification"
    want = placed(input_ids=ids, attention_mask=mask, labels=several.float()).loss
    total, count = Classification()(placed, {"input_ids": ids, "attention_mask": mask, "labels": several.float()})
    placed.config.problem_type = None
    assert total.item() == pytest.approx(3 * want.item(), rel=1e-5) and count == 3


def test_a_regression_is_the_squared_error_of_the_last_token():
    model, rows = decoder(classes=1).double(), texts()[0]
    wanted = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    batch = packed()
    labels = torch.full(batch["labels"].shape, float("nan"), dtype=torch.float64)
    labels[batch["labels"] != -100] = wanted
    total, count = Classification()(model, batch | {"labels": labels})
    total.backward()
    got = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    want = (scores_of(model, rows).squeeze(1) - wanted).square().sum()
    want.backward()
    assert count == 3 and total.item() == pytest.approx(want.item(), rel=1e-10)
    torch.testing.assert_close(got, model.model.embed_tokens.weight.grad)
    assert Classification().validate(model, [batch | {"labels": labels}]) == {"held_out": pytest.approx(want.item() / 3)}


@pytest.mark.slow
def test_steps_learn_the_classes_of_packed_rows(placed):
    """`require` on a CPU checks what a capture would."""
    step = TrainStep(placed.train(), Classification(), AdamW(lr=1e-2), precision="fp32", graph="require")
    losses = [step([packed()]).read() for _ in range(30)]
    assert losses[0].tokens == 3 and losses[-1].loss < 0.1 * losses[0].loss
    assert Classification().validate(placed, [packed()])["accuracy"] == 1
    step.close()


def pairs(seed: int = 0) -> dict:
    g = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(WORDS, (6, 7), generator=g), torch.full((6, 7), -100)
    for row, length in enumerate((4, 7, 3, 5, 6, 2)):
        ids[row, length:], labels[row, length - 1] = 0, 0
    return {"input_ids": ids, "labels": labels, "example": torch.arange(6) // 2}


def matches(seed: int = 0, negatives: int = 2) -> dict:
    """Three queries, each with its positive and negatives."""
    g = torch.Generator().manual_seed(seed)
    rows = 3 * (2 + negatives)
    ids, labels = torch.randint(1, WORDS, (rows, 7), generator=g), torch.full((rows, 7), -100)
    for row, length in enumerate(torch.randint(2, 8, (rows,), generator=g).tolist()):
        ids[row, length:], labels[row, length - 1] = 0, 0
    return {"input_ids": ids, "labels": labels, "example": torch.arange(rows) // (2 + negatives)}


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("pooling", "negatives"), [("last", 0), ("mean", 0), ("last", 2)])
def test_contrastive_is_info_nce_of_cosines(pooling, negatives, symmetric):
    """Beside the formula in fp64: each query among all positives and negatives of the micro-batch."""
    model, batch = decoder(classes=0).double(), matches(negatives=negatives)
    total, count = Contrastive(0.1, pooling, symmetric, negatives=negatives)(model, batch, scale=torch.tensor(2.0))
    total.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    embedded = []
    for row, labels in zip(batch["input_ids"], batch["labels"]):
        states = model.model(row[None, : labels.argmax() + 1])[0]
        state = states[-1] if pooling == "last" else states.mean(0)
        embedded.append(state / state.norm())
    queries, *texts = (embedded[start :: 2 + negatives] for start in range(2 + negatives))
    want = torch.zeros((), dtype=torch.float64)
    for number, query in enumerate(queries):
        scores = torch.stack([query @ text / 0.1 for kind in texts for text in kind])
        want = want + scores.logsumexp(0) - scores[number]
        if symmetric:
            scores = torch.stack([texts[0][number] @ each / 0.1 for each in queries])
            want = want + scores.logsumexp(0) - scores[number]
    want = want if symmetric else 2 * want
    want.backward()
    assert count == 3 and total.item() == pytest.approx(want.item(), rel=1e-10)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_mask_says_what_labels_do(pooling):
    model, batch, objective = decoder(classes=0).double(), pairs(), Contrastive(0.1, pooling)
    mask = torch.arange(7) < torch.tensor([[4], [7], [3], [5], [6], [2]])
    masked = {"input_ids": batch["input_ids"], "attention_mask": mask}
    torch.testing.assert_close(objective.embeddings(model, batch), objective.embeddings(Mask(model), masked))


def test_padding_before_a_text_is_no_part_of_its_mean():
    """It was counted where a batch has labels, too. Each token's state is its embedding here."""
    ids, labels = torch.tensor([[0, 0, 3, 5], [0, 7, 9, 2]]), torch.full((2, 4), -100)
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels.index_fill(1, torch.tensor(3), 0)}
    model = Mask(decoder(classes=0).double())
    model.trunk = model.trunk.embed_tokens
    means = torch.stack([model.trunk(row[row > 0]).mean(0) for row in ids])
    torch.testing.assert_close(Contrastive(0.1, "mean").embeddings(model, batch), means / means.norm(dim=1, keepdim=True))


class Mask(nn.Module):
    """A model without a head that takes an attention_mask, which a causal one need not read where padding is at the end."""

    def __init__(self, model: Decoder):
        super().__init__()
        self.trunk = model.model

    def forward(self, input_ids, attention_mask):
        return self.trunk(input_ids)


@pytest.mark.parametrize("chunk", [1, 5, 12, 100])
def test_chunks_have_the_loss_and_gradients_of_the_whole(chunk):
    model, batch = decoder(classes=0).double(), matches()
    results = []
    for rows in (None, chunk):
        model.zero_grad()
        total, _ = Contrastive(0.1, negatives=2, chunk=rows)(model, batch, scale=torch.tensor(0.5))
        total.backward()
        results.append((total.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (got, gradients), (want, wanted) = results
    assert got == pytest.approx(want, rel=1e-12) and len(gradients) == len(wanted) > 5
    for one, other in zip(gradients, wanted):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["cheap", "blocks"])
def test_steps_in_chunks_are_those_of_the_whole(recompute):
    """Weights after steps that write gradients straight into their sums: once for each chunk of the micro-batch."""
    weights, reports = [], []
    for chunk in (None, 4):
        model = decoder(classes=0)
        objective = Contrastive(0.1, negatives=1, chunk=chunk)
        step = TrainStep(model, objective, AdamW(lr=1e-2), precision="fp32", graph="require", recompute=recompute)
        reports.append([step([matches(seed, 1)]).read().loss for seed in range(4)])
        weights.append([p.detach().clone() for p in model.parameters()])
    assert reports[1] == pytest.approx(reports[0], rel=1e-4)
    for one, other in zip(*weights):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_steps_bring_matches_together():
    model = decoder(classes=0)
    objective = Contrastive(0.1)
    before = objective.validate(model, [pairs()])
    step = TrainStep(model, objective, AdamW(lr=1e-2), precision="fp32", graph="require")
    for _ in range(20):
        step([pairs()])
    after = objective.validate(model, [pairs()])
    assert after["accuracy"] == 1 and after["held_out"] < 0.2 * before["held_out"]


def test_what_is_refused():
    for options in ({"classes": 0}, {"classes": "yes"}, {"classes": ["a", "a"]}):
        with pytest.raises(ValueError, match="classes"):
            Classification(**options)
    for options in ({"pooling": "max"}, {"temperature": 0.0}, {"negatives": -1}, {"negatives": "one"}, {"chunk": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Contrastive(**options)
    model, batch = decoder(), packed()
    with pytest.raises(ValueError, match=r"class 3.*0 to 2"):
        Classification()(model, batch | {"labels": batch["labels"].masked_fill(batch["labels"] >= 0, CLASSES)})
    with pytest.raises(ValueError, match=r"\(3,\)"):
        Classification()(model, batch | {"labels": torch.zeros(3, dtype=torch.long)})
    rows = len(batch["input_ids"])
    for labels in (torch.zeros(rows, dtype=torch.long), torch.zeros(rows), torch.zeros(rows, CLASSES)):
        with pytest.raises(ValueError, match="has scores at each token; wanted labels at tokens"):
            Classification()(model, batch | {"labels": labels})
    with pytest.raises(ValueError, match="even number"):
        Contrastive()(model, {"input_ids": torch.zeros(3, 4, dtype=torch.long)})
    with pytest.raises(ValueError, match="multiple of 3"):
        Contrastive(negatives=1)(model, {"input_ids": torch.zeros(4, 4, dtype=torch.long)})
    with pytest.raises(ValueError, match="head of 3"):
        Classification(4).adapt(model)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["classification", "contrastive", "chunks"])
def test_on_a_gpu_a_captured_step_equals_calls(kind):
    of_classes = kind == "classification"

    def make():
        return decoder(classes=CLASSES if of_classes else 0), (
            Classification() if of_classes else Contrastive(chunk=4 if kind == "chunks" else None)
        )

    check_captured(make, [(packed if of_classes else pairs)(seed) for seed in range(4)], "bf16", rel=2e-2)
