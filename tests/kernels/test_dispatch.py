"""The choice behind every op: a kernel, or its reference.

A broken kernel is caught by its self-test, becomes a fallback that is recorded and printed once, and raises under strict.
"""

import threading

import pytest
import torch

from gpubound import kernels, trace
from gpubound.errors import FallbackError, KernelError
from gpubound.kernels import decode_product, dispatch, selftest
from gpubound.kernels.decode_product import EARLY, chain_mode, chained
from gpubound.kernels.triton import norms as fast
from gpubound.models.richards import kernels as richards_kernels
from tests.messages import message

from .cases import definitions, draw, same

reference = definitions("norms")

pytestmark = pytest.mark.usefixtures("fresh")

FP32 = torch.float32
right = fast.rms_norm


def wrong_output(x, weight=None, eps=1e-6):
    y = right(x, weight, eps)
    return y + 0.125 * y.detach()


def wrong_gradient(x, weight=None, eps=1e-6):
    return right(x, weight, eps) + (x - x.detach())


def missing_gradient(x, weight=None, eps=1e-6):
    return right(x, weight.detach(), eps)


def nan_output(x, weight=None, eps=1e-6):
    return right(x, weight, eps) * float("nan")


def raising(x, weight=None, eps=1e-6):
    raise RuntimeError("PassManager::run failed\nand a long dump")


BROKEN = {
    wrong_output: "failed: output 0 is off by 1.25e-01 relative to the reference (limit 2e-03)",
    wrong_gradient: "failed: the gradient of argument 0 is off by 1.25e+00 relative to the reference (limit 2e-03)",
    missing_gradient: "failed: only one of kernel and reference gives the gradient of argument 1",
    nan_output: "failed: output 0 is off by nan relative to the reference (limit 2e-03)",
    raising: "raised RuntimeError: PassManager::run failed",
}


def sentence(device, end):
    where = torch.empty(0, device=device).device  # with its index
    return f"its self-test in torch.float32 on {where} {end}"


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_kernel_becomes_a_printed_fallback(broken, x, monkeypatch, capsys):
    monkeypatch.setattr(fast, "rms_norm", broken)
    weight = draw(x.device, FP32, 40, seed=1).requires_grad_()  # or the self-test asks for no gradient of it
    for _ in range(3):
        assert torch.equal(kernels.rms_norm(x, weight), reference.rms_norm(x, weight))
    (((what, why), count),) = trace.fallbacks.items()
    assert what == "rms_norm" and count == 3
    if broken is wrong_gradient:  # its size depends on the draw
        assert why.startswith(sentence(x.device, "failed: the gradient of argument 0 is off by "))
    else:
        assert why == sentence(x.device, BROKEN[broken])
    assert capsys.readouterr().err == f"gpubound: fallback: rms_norm: {why}\n"


def test_strict_forbids_the_fallback(x, monkeypatch):
    monkeypatch.setattr(fast, "rms_norm", wrong_output)
    with trace.strict(), pytest.raises(FallbackError) as error:
        kernels.rms_norm(x)
    assert str(error.value) == message("kernels/choose:strict_forbids_the_fallb", sentence(x.device, BROKEN[wrong_output]))
    assert not trace.fallbacks


def test_strict_is_silent_about_a_right_kernel(x):
    with trace.strict():
        kernels.rms_norm(x)


def test_one_verdict_an_op_device_and_dtype(x, monkeypatch):
    asked = []
    monkeypatch.setattr(selftest, "check", lambda op, device, dtype, *_: asked.append((op, dtype)))
    for dtype in (FP32, FP32, torch.float16, torch.bfloat16, torch.float16):
        kernels.rms_norm(x.to(dtype))
    kernels.add_rms_norm(x, x)
    assert asked == [("rms_norm", FP32), ("rms_norm", torch.float16), ("rms_norm", torch.bfloat16), ("add_rms_norm", FP32)]


def test_the_doors_hand_on_their_callers_shape(monkeypatch):
    """On a GPU, which this is not: what the self-tests would be given."""
    asked = {}

    def source(op, device, dtype, unable, shape):
        asked[op] = shape
        return "reference"

    class Cuda(torch.Tensor):
        is_cuda = True
        device = torch.device("cpu")

    monkeypatch.setattr(dispatch, "_source", source)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    draw = lambda *shape: torch.randn(*shape).as_subclass(Cuda)  # noqa: E731
    logistic = richards_kernels.Curve()
    x, angles = draw(2, 3, 48), (torch.ones(3, 2), torch.zeros(3, 2))
    kernels.rms_norm(x)
    kernels.add_rms_norm(x, x)
    kernels.layer_norm(x)
    richards_kernels.dynamic_tanh(x, torch.ones(1), torch.ones(48))
    richards_kernels.add_dynamic_tanh(x, x, torch.ones(1), torch.ones(48))
    kernels.swiglu(x)
    kernels.geglu(x, x)
    kernels.swiglu_backward(draw(2, 24), draw(2, 48))
    kernels.swiglu_product(draw(2, 24), draw(48, 24))
    kernels.swiglu_product_backward(draw(2, 24), draw(24, 24), draw(2, 48))
    richards_kernels.richards(x, None, logistic)
    richards_kernels.richards_glu(x, None, None, logistic, logistic)
    richards_kernels.richards_glu_backward(draw(2, 24), draw(2, 48), None, None, logistic, logistic)
    kernels.rope(draw(2, 3, 4, 6), draw(2, 3, 2, 6), *angles)
    kernels.rope_qkv(x, *angles, 4, 2)
    kernels.cross_entropy(x, torch.ones(2, 3, dtype=torch.long), softcap=2.0)
    kernels.linear_cross_entropy(x, torch.ones(1).expand(50257, 48), torch.ones(2, 3, dtype=torch.long), label_smoothing=0.1)
    kernels.add_rows(torch.zeros(9, 48), torch.ones(2, 3, dtype=torch.long), x)
    kernels.quantize(draw(16, 48).bfloat16(), torch.ones(4), torch.float8_e5m2)
    assert asked == {
        "rms_norm": (48,),
        "add_rms_norm": (48,),
        "layer_norm": (48,),
        "dynamic_tanh": (48,),
        "add_dynamic_tanh": (48,),
        "swiglu": (24, True),
        "geglu": (48, False),
        "swiglu_backward": (24,),
        "swiglu_product": (256, 128, 4096),
        "swiglu_product_backward": (256, 128, 4096),
        "richards": (logistic,),
        "richards_glu": (24, logistic, logistic),
        "richards_glu_backward": (24, logistic, logistic),
        "rope": (4, 2, 6, 2),
        "rope_qkv": (4, 2, 6, 2),
        "cross_entropy": (48, False, True),
        "linear_cross_entropy": (8209, True, False, False, False),  # 50,257 is as little a multiple of 16
        "add_rows": (48,),
        "quantize": (torch.float8_e5m2, True),
    }


@pytest.mark.parametrize("why, source", [(None, "triton"), ("it was wrong", "reference")])
def test_what_an_op_runs_is_what_its_calls_have_found(why, source, device, monkeypatch):
    """A test of its own would compile kernels in a shape that nobody uses."""
    monkeypatch.setattr(dispatch, "_verdicts", {dispatch.Key("rms_norm", device, torch.float32, (4096,)): why})
    monkeypatch.setattr(selftest, "check", lambda *_: pytest.fail("it was tested again"))
    assert dispatch.runs("rms_norm", device, torch.float32) == source


def test_a_verdict_in_another_shape_holds_inside_a_capture(monkeypatch):
    """Where none can be made: a width that is new there is no reason to raise."""
    there = torch.device("cuda", 0)
    found = {dispatch.Key("rms_norm", there, FP32, (64,)): None, dispatch.Key("swiglu", there, FP32, (8,)): "broken"}
    monkeypatch.setattr(dispatch, "_verdicts", found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert dispatch.verdict("rms_norm", there, FP32, (128,)) is None
    assert dispatch.verdict("swiglu", there, FP32, (16,)) == "broken"
    with pytest.raises(KernelError):
        dispatch.verdict("geglu", there, FP32, (16,))
    found[dispatch.Key("rope", there, FP32, (16,), forward=True)] = None
    with torch.no_grad():
        assert dispatch.verdict("rope", there, FP32, (8,)) is None
    with pytest.raises(KernelError):
        dispatch.verdict("rope", there, FP32, (8,))


def test_a_dtype_no_kernel_takes(x):
    weight = torch.ones(40, device=x.device, dtype=torch.float64)
    assert kernels.rms_norm(x.double(), weight).dtype == torch.float64
    assert list(trace.fallbacks) == [("rms_norm", "no kernel takes torch.float64: they compute in fp32")]


def test_no_elements_is_no_fallback(device):
    with trace.strict():
        assert kernels.rms_norm(torch.empty(0, 8, device=device, dtype=torch.float64)).shape == (0, 8)
    assert not dispatch._verdicts


def test_a_cpu_tensor_on_the_reference_is_no_fallback(monkeypatch):
    monkeypatch.setattr(dispatch, "can_launch", lambda device: False)
    with trace.strict():
        kernels.rms_norm(torch.ones(2, 4))
    assert not dispatch._verdicts and not trace.fallbacks


def test_without_triton_a_gpu_tensor_falls_back(monkeypatch):
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    assert dispatch._source("rms_norm", torch.device("cuda", 0), FP32, None) == "reference"
    assert list(trace.fallbacks) == [("rms_norm", "Triton is not installed")]


def test_a_first_call_inside_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelError) as error:
        dispatch._source("rms_norm", torch.device("cuda", 0), FP32, None)
    assert str(error.value) == message("kernels/choose:a_first_call_inside_a_ca")
    assert not dispatch._verdicts


def test_a_fallback_on_another_thread_is_forbidden_too(x, monkeypatch):
    """Checkpointing calls doors on autograd's threads; strict holds there."""
    monkeypatch.setattr(fast, "rms_norm", wrong_output)
    caught = []

    def call():
        try:
            kernels.rms_norm(x)
        except FallbackError as error:
            caught.append(error)

    with trace.strict():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len(caught) == 1


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_a_tensor_on_a_gpu_that_is_not_the_current_one():
    x = draw(torch.device("cuda", 1), FP32, 3, 40).requires_grad_()
    y = kernels.rms_norm(x)
    want = reference.rms_norm(x.detach().cpu().requires_grad_())
    same("y", y, want.to(y.device), 1e-5)
    y.sum().backward()
    assert torch.cuda.current_device() == 0 and x.grad.isfinite().all()


def test_the_definition_of_no_op():
    with pytest.raises(ValueError, check=message("kernels/choose:the_definition_of_no_op")):
        kernels.reference("rmsnorm")


@pytest.fixture
def able(monkeypatch):
    monkeypatch.setattr(decode_product, "can_chain", lambda device: True)


def test_a_step_says_it_once(able):
    seen = []
    with chained(torch.device("cpu")):
        assert chain_mode() == EARLY
        other = threading.Thread(target=lambda: seen.append(chain_mode()))
        other.start()
        other.join()
    assert chain_mode() == 0 and seen == [0], "another thread's launches are its own business"
    with pytest.raises(RuntimeError), chained(torch.device("cpu")):
        raise RuntimeError
    assert chain_mode() == 0


def test_a_self_test_launches_as_its_caller(able, monkeypatch):
    """Or the kernels that it compiles are nobody's."""
    seen = []
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(dispatch.selftest, "check", lambda *given: seen.append(chain_mode()))
    with chained(torch.device("cpu")):
        dispatch._test("swiglu", torch.device("cpu"), torch.float32, ())
    dispatch._test("swiglu", torch.device("cpu"), torch.float32, ())
    assert seen == [EARLY, 0]


def test_a_cpu_cannot():
    with chained(torch.device("cpu")):
        assert chain_mode() == 0
