"""Linear cross-entropy's gradients, however asked for: any upstream, grad_scale, main_grad, frozen parts; and their cost."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpubound.kernels.triton import cross_entropy as fast
from tests.messages import message

from .cases import definitions, pairwise, same
from .test_linear_cross_entropy import BF16, BOTH, CPU, FP32, MAIN, NAMES, TOLERANCE, accumulate, check, near, problem, truth

reference = definitions("cross_entropy")

CHUNK = pytest.mark.parametrize("chunk", [None, 5], ids=["one chunk", "three chunks"])


ASKED = {  # backward, and what the gradients are multiplied by
    "3 * loss": (lambda loss, again: (3 * loss).backward(), lambda value: 3),
    "loss + loss": (lambda loss, again: (loss + loss).backward(), lambda value: 2),
    "2 * loss + loss * loss": (lambda loss, again: (2 * loss + loss * loss).backward(), lambda value: 2 + 2 * value),
    "twice": (lambda loss, again: (loss.backward(retain_graph=True), (2 * loss).backward()), lambda value: 3),
    "another graph between": (lambda loss, again: (again().backward(), (2 * loss).backward()), lambda value: 3),
}


@pairwise
@BOTH
@MAIN
@CHUNK
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("asked", ASKED)
def test_any_upstream_gradient(asked, reduction, chunk, main, op, device):
    """Gradients are made in forward, before anybody knows what the loss is multiplied by, or how often backward runs."""
    x, weight, bias, labels = problem(device)
    if main:
        accumulate(weight, bias)
    loss = partial(op, x, weight, labels, bias, reduction=reduction, chunk=chunk)
    backward, factor = ASKED[asked]
    first = loss()
    value = first.item()
    backward(first, loss)
    check(x, weight, bias, truth(x, weight, bias, labels, factor(value), reduction))


@BOTH
@MAIN
@CHUNK
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_grad_scale(reduction, chunk, main, op, device):
    x, weight, bias, labels = problem(device)
    if main:
        accumulate(weight, bias)
    scale = torch.tensor(0.25, device=device)
    loss = op(x, weight, labels, bias, reduction=reduction, chunk=chunk, grad_scale=scale)
    same("loss", loss, 0.25 * op(x, weight, labels, bias, reduction=reduction).detach(), 1e-5)
    loss.backward()
    check(x, weight, bias, truth(x, weight, bias, labels, 0.25, reduction))


def test_micro_batches_add_up_to_the_whole(device):
    """Accumulation over ragged micro-batches: each divided by the tokens of all, the sum is the gradient of the whole batch."""
    x, weight, bias, labels = problem(device, rows=(12,))
    want = truth(x, weight, bias, labels)
    accumulate(weight, bias)
    share = (labels != -100).sum().float().reciprocal()
    for part in (slice(0, 2), slice(2, 9), slice(9, 12)):
        loss = fast.linear_cross_entropy(x[part], weight, labels[part], bias, reduction="sum", chunk=4, grad_scale=share)
        loss.backward()
    check(x, weight, bias, want)


@BOTH
def test_grad_scale_holds_the_caller_to_the_promise(op):
    x, weight, bias, labels = problem(CPU)
    scale = torch.tensor(0.25)
    with pytest.raises(RuntimeError) as error:
        (3 * op(x, weight, labels, bias, grad_scale=scale)).backward()
    assert str(error.value) == message("kernels/linear_cross_entropy_gradients:grad_scale_holds_the_cal")
    loss = op(x, weight, labels, bias, grad_scale=scale)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    assert str(error.value) == message("kernels/linear_cross_entropy_gradients:grad_scale_holds_the_cal.2")


def test_bf16_accumulators_keep_what_grad_rounds(device):
    """Eight chunks in bf16, summed in fp32, are as good as one product; the accumulator holds more digits than the weight."""
    x, weight, bias, labels = problem(device, BF16, rows=(64,))
    want = truth(x, weight, bias, labels)
    fast.linear_cross_entropy(x, weight, labels, bias, chunk=8).backward()
    assert weight.grad.dtype == bias.grad.dtype == x.grad.dtype == BF16
    accumulate(weight)
    weight.grad = None
    fast.linear_cross_entropy(x, weight, labels, bias, chunk=8).backward()
    near("main_grad", weight.main_grad, want[1], TOLERANCE[BF16])
    assert not weight.main_grad.equal(weight.main_grad.bfloat16().float())


def test_weight_wider_than_x(device):
    """A fp32 weight under bf16 activations, as autocast has it: products in bf16, its gradient summed and returned in fp32."""
    x, weight, bias, labels = problem(device, BF16)
    weight, bias = nn.Parameter(weight.detach().float()), nn.Parameter(bias.detach().float())
    loss = fast.linear_cross_entropy(x, weight, labels, bias, chunk=5)
    loss.backward()
    assert weight.grad.dtype == bias.grad.dtype == FP32
    check(x, weight, bias, [truth(x, weight, bias, labels)[0].bfloat16(), *truth(x, weight, bias, labels)[1:]], TOLERANCE[BF16])


@pytest.mark.parametrize("trained", range(3), ids=NAMES)
def test_only_what_is_trained_is_computed(trained, device, monkeypatch):
    x, weight, bias, labels = problem(device)
    want = truth(x, weight, bias, labels)
    tensors = [t.requires_grad_(i == trained) for i, t in enumerate((x, weight, bias))]
    products = []
    for name in ("product", "add_product"):
        real = getattr(fast, name)
        monkeypatch.setattr(fast, name, lambda *a, real=real: products.append(a) or real(*a))
    fast.linear_cross_entropy(x, weight, labels, bias, chunk=5).backward()
    assert len(products) == (3 if trained == 1 else 0)
    for i, t in enumerate(tensors):
        near(NAMES[i], t.grad, want[i], 1e-5) if i == trained else None
        assert i == trained or t.grad is None


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "no_grad"])
def test_without_gradients_only_the_loss_is_computed(frozen, device, monkeypatch):
    x, weight, bias, labels = problem(device)
    want = reference.linear_cross_entropy(x, weight, labels, bias)
    written = []
    real = fast._row_losses
    monkeypatch.setattr(fast, "_row_losses", lambda *a, write, **k: written.append(write) or real(*a, write=write, **k))
    if frozen:
        x, weight, bias = (t.detach() for t in (x, weight, bias))
    with nullcontext() if frozen else torch.no_grad():
        loss = fast.linear_cross_entropy(x, weight, labels, bias, chunk=5)
    same("loss", loss, want, 1e-5)
    assert written == [False] * 3 and not loss.requires_grad


def test_accumulator_is_left_alone_without_gradients(device):
    x, weight, bias, labels = problem(device)
    accumulate(weight, bias)
    with torch.no_grad():
        fast.linear_cross_entropy(x, weight, labels, bias, grad_scale=torch.ones((), device=device))
    assert weight.main_grad.eq(0).all() and bias.main_grad.eq(0).all()


class Seen(TorchDispatchMode):
    """The largest result, in elements, and the ops that make a host wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "equal", "unique", "index_put")

    def __init__(self):
        super().__init__()
        self.largest, self.waits = 0, []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if function.__name__.startswith(self.WAITS):
            self.waits.append(function.__name__)
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor) and not function.is_view:
                self.largest = max(self.largest, t.numel())
        return result


@MAIN
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_logits_are_never_whole_and_nothing_waits(reduction, main, monkeypatch):
    """40 tokens of 100 words in chunks of 8: nothing larger than the buffer of one chunk (rows of 128) or the weight."""
    x, weight, bias, labels = problem(CPU, rows=(40,), features=8, words=100)
    if main:
        accumulate(weight, bias)
    kernel = fast._row_losses

    def unseen(*arguments, **options):  # the interpreter reads tensors as it likes; a GPU's kernel does not
        with torch.utils._python_dispatch._disable_current_modes():
            return kernel(*arguments, **options)

    monkeypatch.setattr(fast, "_row_losses", unseen)
    with Seen() as seen:
        fast.linear_cross_entropy(x, weight, labels, bias, reduction=reduction, chunk=8).backward()
        assert seen.largest == 8 * 128
    assert seen.waits == []


def test_of_few_tokens_no_gradient_of_the_weight_is_saved(device):
    """The logits' is smaller, and the weight's is made once, in backward."""
    g, saved = torch.Generator().manual_seed(0), []
    x, weight = (torch.randn(n, 96, generator=g).to(device).requires_grad_() for n in (40, 70))
    labels = torch.randint(70, (40,), generator=g).to(device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        loss = fast.linear_cross_entropy(x, weight, labels)
    assert max(saved) == 40 * 96 and sorted(saved)[-2:] == [40 * 96, 40 * 96]  # x and its gradient; the logits' 40 x 70
    loss.backward()
    want = x.detach().requires_grad_(), weight.detach().requires_grad_()
    torch.nn.functional.cross_entropy(want[0] @ want[1].t(), labels).backward()
    torch.testing.assert_close(x.grad, want[0].grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight.grad, want[1].grad, rtol=1e-4, atol=1e-6)
