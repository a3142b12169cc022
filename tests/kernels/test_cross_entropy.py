"""Cross-entropy: both mirrors agree under every option, the reference is torch's, a bad label poisons its row alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpubound import kernels
from gpubound.kernels.triton import cross_entropy as fast
from tests.messages import refusals

from .cases import TOLERANCE, definitions, draw, no_copies, pairwise, same

reference = definitions("cross_entropy")

FP32, CPU = torch.float32, torch.device("cpu")
PLAIN = {"label_smoothing": 0.0, "softcap": None, "z_loss": 0.0}
OPTIONS = {
    "plain": PLAIN,
    "smoothing": PLAIN | {"label_smoothing": 0.1},
    "softcap": PLAIN | {"softcap": 3.0},
    "z-loss": PLAIN | {"z_loss": 0.01},
    "all": {"label_smoothing": 0.2, "softcap": 2.0, "z_loss": 0.02},
}
# rows and words: one word, below a power of two, one, no power of two, and more than one tile of 4096
SHAPES = [(3, 1), (3, 63), (2, 5, 128), (4, 1000), (3, 4100)]
# fp32: lse and z of size 10 differ in the eighth digit, so p = exp(z − lse) does in the sixth. 16 bits: one rounding.
GRADIENT = {FP32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def labels_for(shape: tuple[int, ...], device: torch.device, ignored: bool = True) -> Tensor:
    """One label a row; every third is ignored."""
    labels = torch.randint(shape[-1], shape[:-1], generator=torch.Generator().manual_seed(3))
    if ignored:
        labels.view(-1)[1::3] = -100
    return labels.to(device)


def loss_and_gradient(op, logits: Tensor, labels: Tensor, **options) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient for an upstream that differs from row to row."""
    logits = logits.detach().requires_grad_()  # keeps strides
    loss = op(logits, labels, **options)
    upstream = torch.linspace(0.5, 2, loss.numel(), device=loss.device).view(loss.shape)
    return loss.detach(), *torch.autograd.grad(loss, logits, upstream)


def agree(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tolerance: float) -> None:
    same("loss", got[0], want[0], 2e-6)
    size = want[1].double().square().mean().sqrt().clamp_min(1e-3).item()  # a mean's gradient is small everywhere
    same("gradient", got[1] / size, want[1] / size, tolerance)


def both(logits: Tensor, labels: Tensor, **options) -> None:
    got, want = (loss_and_gradient(op, logits, labels, **options) for op in (fast.cross_entropy, reference.cross_entropy))
    assert got[0].dtype == FP32 and got[1].dtype == logits.dtype
    agree(got, want, GRADIENT[logits.dtype])


@pairwise
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches(shape, options, dtype, device):
    both(draw(device, dtype, *shape), labels_for(shape, device), **OPTIONS[options], reduction="sum")


@pytest.mark.parametrize("ignored", [True, False], ids=["some ignored", "none ignored"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions(reduction, ignored, device):
    both(draw(device, FP32, 2, 4, 40), labels_for((2, 4, 40), device, ignored), **OPTIONS["all"], reduction=reduction)


LABELS = {
    "a column": lambda labels: torch.stack([labels, labels + 1], 1)[:, 0],
    "every third": lambda labels: labels.repeat_interleave(3)[1::3],
    "from the end": lambda labels: labels.flip(0).as_strided(labels.shape, (1,)),
    "one for all": lambda labels: labels[:1].expand(len(labels)),
    "8 bits": lambda labels: labels.clamp(min=0).to(torch.uint8),
}


@pytest.mark.parametrize("lay", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy"])
def test_labels_of_any_layout(op, lay, device):
    labels = lay(torch.tensor([3, -100, 0, 7, 5], device=device))
    x, weight = draw(device, FP32, 5, 6), draw(device, FP32, 156, 6, seed=1)
    own = (x @ weight.t(),) if op == "cross_entropy" else (x, weight)
    leaves = [t.requires_grad_() for t in own]
    got, want = (getattr(kernels, op)(*leaves, each) for each in (labels, labels.clone().long().contiguous()))
    plain = F.cross_entropy(x @ weight.t(), labels.long())
    same("loss", got, plain, 2e-6)
    gradients = zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves))
    assert torch.equal(got, want) and all(torch.equal(a, b) for a, b in gradients)


def test_labels_of_8_bits_are_no_ignored_ones(device):
    """torch compares a uint8 label with -100 as if that were 156."""
    logits, labels = draw(device, FP32, 2, 200), torch.tensor([156, 3], device=device, dtype=torch.uint8)
    want = F.cross_entropy(logits, labels.long())
    for mirror in (fast, reference):
        same("loss", mirror.cross_entropy(logits, labels), want, 2e-6)


def test_a_huge_logit_is_no_nan(device):
    """1e20 squared is beyond fp32, and a z-loss of 0 must not look at it."""
    for mirror in (fast, reference):
        logits = torch.tensor([[1e20, 0.0]], device=device, requires_grad=True)
        loss = mirror.cross_entropy(logits, torch.tensor([0], device=device))
        loss.backward()
        assert loss.item() == 0 and logits.grad.tolist() == [[0, 0]]


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reference_is_torch(smoothing, reduction):
    logits, labels = draw(CPU, torch.float64, 7, 30), labels_for((7, 30), CPU)
    got = loss_and_gradient(reference.cross_entropy, logits, labels, label_smoothing=smoothing, reduction=reduction)
    want = loss_and_gradient(F.cross_entropy, logits, labels, label_smoothing=smoothing, reduction=reduction)
    for name, a, b in zip(("loss", "gradient"), got, want):
        same(name, a, b, 1e-14)


def test_reference_softcap_and_z_loss_are_the_formulas():
    logits, labels = 3 * draw(CPU, torch.float64, 7, 30), labels_for((7, 30), CPU, ignored=False)
    capped = 2 * torch.tanh(logits / 2)
    want = F.cross_entropy(capped, labels) + 0.1 * torch.logsumexp(capped, -1).square().mean()
    same("loss", reference.cross_entropy(logits, labels, softcap=2.0, z_loss=0.1), want, 1e-14)


@pytest.mark.parametrize("options", OPTIONS)
def test_reference_gradients_in_fp64(options):
    logits, labels = draw(CPU, torch.float64, 4, 6).requires_grad_(), labels_for((4, 6), CPU)
    assert torch.autograd.gradcheck(lambda z: reference.cross_entropy(z, labels, **OPTIONS[options]), logits)


@pytest.mark.parametrize("op", [fast.cross_entropy, reference.cross_entropy], ids=["triton", "reference"])
def test_all_ignored(op, device):
    """The mean over nothing is NaN, as torch's; the sum is 0; the gradient is 0 either way."""
    logits, labels = draw(device, FP32, 3, 40), torch.full((3,), 7, device=device)
    for reduction in ("mean", "sum", "none"):
        loss, gradient = loss_and_gradient(op, logits, labels, ignore_index=7, reduction=reduction)
        assert loss.isnan().all() if reduction == "mean" else loss.eq(0).all()
        assert gradient.eq(0).all()


@pytest.mark.parametrize("op", [fast.cross_entropy, reference.cross_entropy], ids=["triton", "reference"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_ignored_row_is_not_read(op, bad, device):
    """A padded row that sees nothing is NaN in many models."""
    logits = draw(device, FP32, 3, 40)
    logits[1] = bad
    labels = torch.tensor([5, -100, 7], device=device)
    loss, gradient = loss_and_gradient(op, logits, labels, **OPTIONS["all"], ignore_index=-100, reduction="sum")
    want, wanted = loss_and_gradient(op, logits[::2], labels[::2], **OPTIONS["all"], ignore_index=-100, reduction="sum")
    assert loss.equal(want) and gradient[::2].equal(wanted) and not gradient[1].any()


@pytest.mark.parametrize("wrong", [40, -1, 10**12, -(10**12)])
@pytest.mark.parametrize("op", [fast.cross_entropy, reference.cross_entropy], ids=["triton", "reference"])
def test_label_out_of_range_poisons_its_row_alone(op, wrong, device):
    logits, labels = draw(device, FP32, 3, 40), torch.tensor([3, wrong, 39], device=device)
    loss, gradient = loss_and_gradient(op, logits, labels, reduction="none")
    assert loss.isnan().tolist() == [False, True, False]
    assert gradient[1].isnan().all() and gradient[[0, 2]].isfinite().all()


def test_masked_words(device):
    """-inf logits, as constrained vocabularies have them: a tile of nothing else, at the start and later."""
    logits, labels = draw(device, FP32, 3, 9000), torch.tensor([5000, 4999, 8999], device=device)
    logits[0, :4500] = logits[1, 5000:] = logits[2, 1:-1] = float("-inf")
    both(logits, labels)


def test_large_logits(device):
    both(1e4 * draw(device, FP32, 3, 70), labels_for((3, 70), device))


def test_the_callers_logits_are_left_alone(device):
    logits = draw(device, FP32, 3, 40)
    before = logits.clone()
    loss_and_gradient(fast.cross_entropy, logits, labels_for((3, 40), device))
    assert logits.equal(before)


def test_backward_twice(device):
    logits = draw(device, FP32, 3, 40).requires_grad_()
    loss = fast.cross_entropy(logits, labels_for((3, 40), device))
    first, second = (torch.autograd.grad(3 * loss, logits, retain_graph=True)[0] for _ in range(2))
    assert first.equal(second)


def test_shifted_logits_are_read_where_they_lie(device):
    """logits[:, :-1] is how next-token losses are usually written; copying it would double the logits."""
    logits, labels = draw(device, FP32, 2, 4, 40)[:, :-1], labels_for((2, 3, 40), device)
    want = loss_and_gradient(reference.cross_entropy, logits, labels)

    with no_copies(logits.numel()):
        got = loss_and_gradient(fast.cross_entropy, logits, labels)
    agree(got, want, GRADIENT[FP32])


def test_other_strides(device):
    both(draw(device, FP32, 40, 3).t(), labels_for((3, 40), device))
    both(draw(device, FP32, 2, 2, 3, 40).transpose(0, 2), labels_for((3, 2, 2, 40), device).transpose(1, 2))


def test_one_row_and_int32_labels(device):
    logits = draw(device, FP32, 40)
    both(logits, torch.tensor(7, device=device), reduction="none")
    both(logits[None], torch.tensor([7], device=device, dtype=torch.int32))


def test_empty(device):
    logits, labels = torch.empty(0, 40, device=device, requires_grad=True), torch.empty(0, device=device, dtype=torch.long)
    loss = kernels.cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    assert loss == 0 and logits.grad.shape == (0, 40)
    assert kernels.cross_entropy(logits, labels).isnan()


LOGITS, LABELS = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)


def test_wrong_arguments():
    refusals(
        "kernels/cross_entropy:wrong_arguments",
        lambda: kernels.cross_entropy(LOGITS.long(), LABELS),
        lambda: kernels.cross_entropy(LOGITS, torch.zeros(3, dtype=torch.long)),
        lambda: kernels.cross_entropy(LOGITS, LOGITS),
        lambda: kernels.cross_entropy(LOGITS, LABELS.to("meta")),
        lambda: kernels.cross_entropy(LOGITS, LABELS, label_smoothing=1.0),
        lambda: kernels.cross_entropy(LOGITS, LABELS, softcap=0.0),
        lambda: kernels.cross_entropy(LOGITS, LABELS, z_loss=-1.0),
        lambda: kernels.cross_entropy(LOGITS, LABELS, reduction="max"),
    )
