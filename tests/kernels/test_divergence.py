"""Divergence of two rows of logits: both mirrors agree, the definition is the formula, its gradient autograd's in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpubound import kernels
from gpubound.kernels.triton import cross_entropy as fast

from .cases import TOLERANCE, definitions, draw, pairwise, same

reference = definitions("cross_entropy")

FP32, CPU = torch.float32, torch.device("cpu")
# alpha, beta, temperature
KINDS = {
    "forward": (1.0, 0.0, 1.0),
    "reverse": (1.0, 1.0, 1.0),
    "between": (1.0, 0.3, 1.0),
    "forward, mixed": (0.6, 0.0, 1.0),
    "reverse, mixed, cold": (0.6, 1.0, 0.5),
    "between, mixed, hot": (0.25, 0.5, 3.0),
    "labels alone": (0.0, 0.5, 2.0),
}
WORDS = [1, 63, 128, 1000, 4099]
GRADIENT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def drawn(rows: int, words: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of both, and labels of which every third is ignored."""
    student, teacher = (3 * draw(device, torch.float32, rows, words, seed=seed) for seed in (0, 1))
    labels = torch.randint(words, (rows,), generator=torch.Generator().manual_seed(3))
    labels[1::3] = -100
    return student.to(dtype), teacher.to(dtype), labels.to(device)


def by_formula(student: Tensor, teacher: Tensor, labels: Tensor, beta: float, t: float) -> tuple[Tensor, Tensor]:
    """Written out in fp64, over probabilities."""
    z, y = student.double(), teacher.double()
    q, p = (z / t).softmax(-1), (y / t).softmax(-1)
    m = (1 - beta) * q + beta * p
    weights = {0: ((1, p, q),), 1: ((1, q, p),)}.get(beta, ((beta, p, m), (1 - beta, q, m)))
    distance = sum(w * (a * (a / b).log()).sum(-1) for w, a, b in weights)
    valid = labels != -100
    return torch.where(valid, t * t * distance, 0), F.cross_entropy(z, labels, reduction="none", ignore_index=-100)


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_is_the_formula(kind):
    alpha, beta, t = KINDS[kind]
    student, teacher, labels = drawn(5, 40, torch.float64, CPU)
    leaf, scale = student.clone().requires_grad_(), torch.tensor(0.5, dtype=torch.float64)
    want = by_formula(leaf, teacher, labels, beta, t)
    total = (alpha * want[0] + (1 - alpha) * want[1]).sum() * scale
    (slope,) = torch.autograd.grad(total, leaf)
    *got, gradient = kernels.divergence(student, teacher, labels, alpha, beta, t, scale=scale, gradient=True)
    for name, a, b in zip(("divergence", "cross-entropy"), got, want):
        same(name, a, b, 1e-12)
    assert gradient is student
    same("gradient", gradient, slope, 1e-12)


def check(student: Tensor, teacher: Tensor, labels: Tensor, kind: str, scale: Tensor | None = None) -> None:
    """Both mirrors, with and without a gradient."""
    results = [each.divergence(student.clone(), teacher, labels, *KINDS[kind], -100, scale, True) for each in (fast, reference)]
    got, want = results
    for name, a, b in zip(("divergence", "cross-entropy"), got, want):
        assert a.dtype == FP32
        same(name, a, b, 5e-6)
    size = want[2].double().square().mean().sqrt().clamp_min(1e-3).item()
    same("gradient", got[2].double() / size, want[2].double() / size, GRADIENT[student.dtype])
    kept = student.clone()
    *alone, none = fast.divergence(student, teacher, labels, *KINDS[kind], -100, None, False)
    assert none is None and torch.equal(student, kept)
    for name, a, b in zip(("divergence", "cross-entropy"), alone, got):  # other code: multiplications and sums fuse elsewhere
        same(f"{name} without a gradient", a, b, 2e-6)


@pairwise
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("kind", KINDS)
def test_matches(kind, words, dtype, device):
    check(*drawn(4, words, dtype, device), kind)


@pytest.mark.parametrize("kind", ["forward, mixed", "between, mixed, hot"])
def test_a_scale_of_the_device_and_rows_of_any_stride(kind, device):
    student, teacher, labels = drawn(3, 90, torch.bfloat16, device)
    scale, whole = torch.tensor(0.25, device=device), torch.full((3, 200), 7.0, device=device, dtype=torch.bfloat16)
    rows = whole[:, 50:140]
    rows.copy_(student)
    want = reference.divergence(student, teacher, labels, *KINDS[kind], -100, scale, True)[2]
    got = fast.divergence(rows, teacher.t().contiguous().t(), labels.flip(0).flip(0), *KINDS[kind], -100, scale, True)[2]
    same("gradient", 20 * got, 20 * want, 1e-2)
    assert got.data_ptr() == rows.data_ptr() and (whole[:, :50] == 7).all() and (whole[:, 140:] == 7).all()


@pytest.mark.parametrize("kind", ["forward", "reverse", "between"])
def test_logits_near_a_hundred_keep_their_digits(kind, device):
    """16-bit logits have few, and a softmax must not lose more: a shift of all of a row's changes nothing."""
    student, teacher, labels = drawn(3, 300, torch.float32, device)
    student, teacher = ((x * 8).round() / 8 for x in (student, teacher))  # so that they can be shifted exactly
    near = fast.divergence(student.clone(), teacher, labels, *KINDS[kind], -100, None, True)
    far = fast.divergence(student + 512, teacher - 1024, labels, *KINDS[kind], -100, None, True)
    same("divergence", far[0], near[0], 1e-6)
    same("gradient", 100 * far[2], 100 * near[2], 1e-6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")  # NumPy interprets
@pytest.mark.parametrize("kind", ["forward", "reverse", "between", "forward, mixed"])
def test_words_that_neither_may_say_add_nothing(kind, device):
    """A logit of -inf, as of a padded vocabulary. NaN is never hidden."""
    student, teacher, labels = drawn(3, 50, torch.float32, device)
    labels[0], labels[2] = 2, 3
    wide = [torch.cat([x, torch.full((3, 20), -torch.inf, device=device)], 1) for x in (student, teacher)]
    for each in (fast, reference):
        want = each.divergence(student.clone(), teacher, labels, *KINDS[kind], -100, None, True)
        got = each.divergence(wide[0].clone(), wide[1], labels, *KINDS[kind], -100, None, True)
        same("divergence", got[0], want[0], 2e-6)
        same("cross-entropy", got[1], want[1], 2e-6)
        same("gradient", got[2][:, :50], want[2], 2e-6)
        assert not got[2][:, 50:].any()
        for x in (0, 1):
            broken = [student.clone(), teacher.clone()]
            broken[x][2, 7] = torch.nan
            broken[x][1] = torch.nan  # ignored: not read
            distance, _, gradient = each.divergence(*broken, labels, *KINDS[kind], -100, None, True)
            assert distance.isnan().tolist() == [False, False, True] and gradient[2].isnan().all()
            assert not gradient[:2].isnan().any() and not gradient[1].any()


def test_far_apart_logits_of_16_bits(device):
    """A sure student and a teacher sure of another word: 1,000 nats, finite."""
    student, teacher = torch.zeros(2, 1, 70, dtype=torch.bfloat16, device=device)
    student[0, 3], teacher[0, 5] = 1000, 1000
    labels = torch.tensor([5], device=device)
    for kind, want in (("forward", 1000), ("reverse", 1000), ("between", 0.6109)):  # entropy of 0.3 and 0.7
        for each in (fast, reference):
            distance, entropy, gradient = each.divergence(student.clone(), teacher, labels, *KINDS[kind], -100, None, True)
            assert distance.item() == pytest.approx(want, rel=1e-3) and entropy.item() == 1000
            assert gradient.isfinite().all()


@pytest.mark.parametrize("label", [70, -1, 2**32 + 1])
def test_a_label_out_of_range_is_nan(label, device):
    student, teacher, labels = drawn(3, 70, torch.float32, device)
    labels[2] = label
    for each in (fast, reference):
        distance, entropy, gradient = each.divergence(student.clone(), teacher, labels, 0.5, 0.0, 1.0, -100, None, True)
        for result in (distance, entropy, gradient[:, 0]):
            assert result.isnan().tolist() == [False, False, True]


def test_refusals(device):
    x, labels = torch.zeros(3, 5, device=device), torch.zeros(3, dtype=torch.long, device=device)
    for named, arguments in {
        "student": (x[0], x[0], labels),
        "teacher": (x, x[:, :4], labels),
        "labels": (x, x, labels[:2]),
        "alpha": (x, x, labels, 1.5),
        "beta": (x, x, labels, 1.0, -0.1),
        "temperature": (x, x, labels, 1.0, 0.0, 0.0),
        "scale": (x, x, labels, 1.0, 0.0, 1.0, -100, torch.ones(2, device=device)),
        "student must have dense rows": (x[:1].expand(3, 5), x, labels, 1.0, 0.0, 1.0, -100, None, True),
        "student requires a gradient": (x.clone().requires_grad_(), x, labels, 1.0, 0.0, 1.0, -100, None, True),
    }.items():
        with pytest.raises(ValueError, match=f"divergence: {named}"):
            kernels.divergence(*arguments)
