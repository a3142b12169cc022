"""The choice behind the doors.

A broken kernel is caught by its self-test, becomes a fallback that is recorded and printed once, and raises under strict. The
verdict is reached once, outside the caller's modes. torch.compile traces through.
"""

import subprocess
import sys
import textwrap
import threading
from collections import Counter
from inspect import signature

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpubound import kernels, trace
from gpubound.errors import FallbackError, KernelError
from gpubound.kernels import choose, selftest
from gpubound.kernels.ops import OPS
from gpubound.kernels.triton import norms as fast

from .aot import apart
from .cases import TOLERANCE, definitions, draw, same

reference = definitions("norms")

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


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No verdicts, no fallbacks, nothing said yet; all restored afterwards."""
    monkeypatch.setattr(choose, "_verdicts", {})
    monkeypatch.setattr(trace, "fallbacks", Counter())
    monkeypatch.setattr(trace, "_said", set())


@pytest.fixture
def x(device):
    return draw(device, FP32, 3, 40)


def sentence(device, end):
    where = torch.empty(0, device=device).device  # with its index
    return f"its self-test in torch.float32 on {where} {end}"


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_kernel_becomes_a_printed_fallback(broken, x, monkeypatch, capsys):
    monkeypatch.setattr(fast, "rms_norm", broken)
    weight = draw(x.device, FP32, 40, seed=1)
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
    assert str(error.value) == (
        f"rms_norm: would fall back: {sentence(x.device, BROKEN[wrong_output])}. "
        "Mend the cause, or leave strict mode to accept the slow path."
    )
    assert not trace.fallbacks


def test_strict_is_silent_about_a_right_kernel(x):
    with trace.strict():
        kernels.rms_norm(x)


def test_one_verdict_an_op_device_and_dtype(x, monkeypatch):
    asked = []
    monkeypatch.setattr(selftest, "check", lambda op, device, dtype, shape: asked.append((op, dtype)))
    for dtype in (FP32, FP32, torch.float16, torch.bfloat16, torch.float16):
        kernels.rms_norm(x.to(dtype))
    kernels.add_rms_norm(x, x)
    assert asked == [
        ("rms_norm", FP32),
        ("rms_norm", torch.float16),
        ("rms_norm", torch.bfloat16),
        ("add_rms_norm", FP32),
    ]


SHAPED = {
    "add_rms_norm": (96,),
    "cross_entropy": (333, False, True),
    "decode_attention": (1, 3, 32),
    "dynamic_tanh": (96,),
    "geglu": (72, True),
    "layer_norm": (96,),
    "linear_cross_entropy": (333, True, False),
    "quantized_decode_attention": (3, 1, 32),
    "rms_norm": (96,),
    "rope": (3, 1, 24, 8),
    "rope_qkv": (6, 3, 8, 4),
    "swiglu": (72, False),
    "swiglu_backward": (72,),
}


def test_which_ops_test_themselves_in_their_callers_shape():
    assert sorted(SHAPED) == sorted(op for op in OPS if len(signature(OPS[op].example).parameters) > 1)


@pytest.mark.parametrize("op", SHAPED)
def test_self_tests_in_the_callers_shape(op, device):
    assert selftest.check(op, device, FP32, SHAPED[op]) is None


def test_the_doors_hand_on_their_callers_shape(monkeypatch):
    """On a GPU, which this is not: what the self-tests would be given."""
    asked = {}

    def source(op, device, dtype, unable, shape):
        asked[op] = shape
        return "reference"

    class Cuda(torch.Tensor):
        is_cuda = True
        device = torch.device("cpu")

    monkeypatch.setattr(choose, "_source", source)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    draw = lambda *shape: torch.randn(*shape).as_subclass(Cuda)  # noqa: E731
    x, angles = draw(2, 3, 48), (torch.ones(3, 2), torch.zeros(3, 2))
    kernels.rms_norm(x)
    kernels.add_rms_norm(x, x)
    kernels.layer_norm(x)
    kernels.dynamic_tanh(x, torch.ones(1), torch.ones(48))
    kernels.swiglu(x)
    kernels.geglu(x, x)
    kernels.swiglu_backward(draw(2, 24), draw(2, 48))
    kernels.rope(draw(2, 3, 4, 6), draw(2, 3, 2, 6), *angles)
    kernels.rope_qkv(x, *angles, 4, 2)
    kernels.cross_entropy(x, torch.ones(2, 3, dtype=torch.long), softcap=2.0)
    kernels.linear_cross_entropy(x, torch.randn(50257, 48), torch.ones(2, 3, dtype=torch.long), label_smoothing=0.1)
    assert asked == {
        "rms_norm": (48,),
        "add_rms_norm": (48,),
        "layer_norm": (48,),
        "dynamic_tanh": (48,),
        "swiglu": (24, True),
        "geglu": (48, False),
        "swiglu_backward": (24,),
        "rope": (4, 2, 6, 2),
        "rope_qkv": (4, 2, 6, 2),
        "cross_entropy": (48, False, True),
        "linear_cross_entropy": (8209, True, False),  # 50,257 is as little a multiple of 16
    }


@pytest.mark.parametrize("why, source", [(None, "triton"), ("it was wrong", "reference")])
def test_what_an_op_runs_is_what_its_calls_have_found(why, source, device, monkeypatch):
    """A test of its own would compile kernels in a shape that nobody uses."""
    monkeypatch.setattr(choose, "_verdicts", {("rms_norm", device, torch.float32, (4096,)): why})
    monkeypatch.setattr(selftest, "check", lambda *_: pytest.fail("it was tested again"))
    assert choose.runs("rms_norm", device, torch.float32) == source


def test_a_verdict_in_another_shape_holds_inside_a_capture(monkeypatch):
    """Where none can be made: a width that is new there is no reason to raise."""
    there = torch.device("cuda", 0)
    monkeypatch.setattr(choose, "_verdicts", {("rms_norm", there, FP32, (64,)): None, ("swiglu", there, FP32, (8,)): "broken"})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose.verdict("rms_norm", there, FP32, (128,)) is None
    assert choose.verdict("swiglu", there, FP32, (16,)) == "broken"
    with pytest.raises(KernelError):
        choose.verdict("geglu", there, FP32, (16,))


@pytest.mark.parametrize("op", ["dynamic_tanh", "group_norm", "layer_norm", "rms_norm", "add_rms_norm"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_norms_pass_their_self_tests(op, dtype, device):
    assert selftest.check(op, device, dtype) is None


def test_the_self_test_leaves_its_arguments_alone(device, monkeypatch):
    """An op that works in place on what both mirrors get would compare the second update with the first."""

    def in_place(x, weight, eps):
        return x.detach().mul_(2) * weight

    monkeypatch.setattr(fast, "rms_norm", in_place)
    monkeypatch.setitem(OPS, "rms_norm", OPS["rms_norm"]._replace(reference=in_place))
    assert selftest.check("rms_norm", device, FP32) is None


MODES = {
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_verdict_does_not_depend_on_the_callers_modes(mode, x):
    with mode():
        kernels.rms_norm(x)
    assert list(choose._verdicts.values()) == [None]


def test_first_use_inside_a_checkpointed_block(x):
    """The self-test runs in the forward and not in the recomputation: its saved tensors must not be counted as the block's."""
    x.requires_grad_()
    checkpoint(kernels.rms_norm, x, use_reentrant=False).square().sum().backward()
    want = x.detach().clone().requires_grad_()
    reference.rms_norm(want).square().sum().backward()
    same("x.grad", x.grad, want.grad, 1e-5)


def test_the_default_dtype_does_not_reach_the_self_test(x):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert choose.verdict("rms_norm", x.device, FP32) is None
    finally:
        torch.set_default_dtype(before)


def test_a_dtype_no_kernel_takes(x):
    weight = torch.ones(40, device=x.device, dtype=torch.float64)
    assert kernels.rms_norm(x.double(), weight).dtype == torch.float64
    assert list(trace.fallbacks) == [("rms_norm", "no kernel takes torch.float64: they compute in fp32")]


def test_no_elements_is_no_fallback(device):
    with trace.strict():
        assert kernels.rms_norm(torch.empty(0, 8, device=device, dtype=torch.float64)).shape == (0, 8)
    assert not choose._verdicts


def test_a_cpu_tensor_on_the_reference_is_no_fallback(monkeypatch):
    monkeypatch.setattr(choose, "can_launch", lambda device: False)
    with trace.strict():
        kernels.rms_norm(torch.ones(2, 4))
    assert not choose._verdicts and not trace.fallbacks


def sum_of_norm(x):
    return kernels.rms_norm(x).square().sum()


TRANSFORMED = {
    "vmap": lambda f, x: torch.func.vmap(kernels.rms_norm)(x),
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "gradients of each row": lambda f, x: torch.func.vmap(torch.func.grad(f))(x),
    "forward AD": lambda f, x: forward_derivative(f, x),
}


def forward_derivative(f, x):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(f(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, when jvp is first used
@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_a_transform_that_sees_into_no_kernel_takes_the_reference(transform, x, monkeypatch):
    """And says so. torch's own error would name its C++."""
    got = transform(sum_of_norm, x)
    ((what, why),) = trace.fallbacks
    assert what == "rms_norm" and why == "torch.func and forward-mode transforms (vmap, grad, jvp) have no rule for its kernel"
    with trace.strict(), pytest.raises(FallbackError, match=r"^rms_norm: would fall back"):
        transform(sum_of_norm, x)
    monkeypatch.setattr(kernels, "rms_norm", reference.rms_norm)
    same("result", got, transform(sum_of_norm, x), 1e-6)


def test_without_triton_a_gpu_tensor_falls_back(monkeypatch):
    monkeypatch.setattr(choose, "has_triton", lambda: False)
    assert choose._source("rms_norm", torch.device("cuda", 0), FP32, None) == "reference"
    assert list(trace.fallbacks) == [("rms_norm", "Triton is not installed")]


def test_a_first_call_inside_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelError) as error:
        choose._source("rms_norm", torch.device("cuda", 0), FP32, None)
    assert str(error.value) == (
        "rms_norm: its first call in torch.float32 on cuda:0 came inside a graph capture, where it cannot test itself; "
        "call it once before."
    )
    assert not choose._verdicts


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


CALLS = """
    import torch
    from gpubound import kernels

    def call(x, r, w, b, a):
        y, s = kernels.add_rms_norm(x, r, w)
        y = kernels.group_norm(kernels.layer_norm(kernels.rms_norm(y, w), w, b), 2, w, b)
        return kernels.dynamic_tanh(y, a, w, b) + s

    shapes = [(3, 8), (3, 8), (8,), (8,), (1,)]
    arguments = [torch.randn(s, device=DEVICE, requires_grad=True) for s in shapes]
"""

COMPARE = """
    compiled = torch.compile(call, backend=BACKEND, fullgraph=True)
    got, want = compiled(*arguments), call(*arguments)  # compiled first: the kernels test themselves while dynamo traces
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(y.square().sum(), arguments) for y in (got, want)]
    torch.testing.assert_close(*gradients)
    print("agrees")
"""

# Without a GPU dynamo takes Triton kernels for plain Python and refuses them. Told that there is one, it traces them.
TRACE = """
    import torch.utils._triton
    from gpubound.kernels import choose

    torch.utils._triton.has_triton = lambda *_: True
    choose._source = torch.compiler.assume_constant_result(lambda *_: "triton")

    class Traced(Exception):
        pass

    def backend(graph, _):
        text = graph.print_readable(print_output=False)
        print(text.count("triton_kernel_wrapper_mutation("), "kernels")
        raise Traced

    try:
        torch.compile(call, backend=backend, fullgraph=True)(*arguments)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        assert isinstance(error.inner_exception, Traced), error
"""


def run_apart(*parts, warnings="error::UserWarning", **names):
    """What a script prints in a process of its own, where kernels are not interpreted."""
    head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    return apart(head + "".join(textwrap.dedent(part) for part in parts), warnings).strip()


def test_compile_sees_through_the_references():
    assert run_apart(CALLS, COMPARE, DEVICE="cpu", BACKEND="eager") == "agrees"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below compiles the kernels and runs them")
def test_compile_traces_the_kernels():
    """Forward 5 kernels, backward 5: the sums over programs are torch's here, which inductor may fuse."""
    assert run_apart(CALLS, TRACE, DEVICE="cpu") == "10 kernels"


@pytest.mark.gpu
def test_compile_runs_the_kernels():
    """Inductor's own advice (TensorFloat32 is off) is a warning that says nothing of ours."""
    assert run_apart(CALLS, COMPARE, warnings="default", DEVICE="cuda", BACKEND="inductor") == "agrees"


def test_a_self_test_leaves_the_device_s_own_thread_alone(monkeypatch):
    """That thread may be the one that waits for the verdict: of an op whose first call comes in backward, say."""
    threads, grad = [], torch.autograd.grad

    def watched(*arguments, **named):
        threads.append(torch._C._is_multithreading_enabled())
        return grad(*arguments, **named)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    assert selftest.check("rms_norm", torch.device("cpu"), FP32) is None
    assert threads == [False, False]  # Triton's gradients, and the reference's


FIRST_IN_BACKWARD = """
import torch
from gpubound import kernels

class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return kernels.rms_norm(g.contiguous())

x = torch.ones(3, 40, device="cuda", requires_grad=True)
Late.apply(x).sum().backward()
print("agrees" if x.grad.allclose(torch.ones_like(x), atol=1e-4) else x.grad)
"""


@pytest.mark.gpu
def test_an_op_whose_first_call_comes_in_backward():
    """In a process of its own, where nothing has judged the op yet. It waited for ever."""
    done = subprocess.run([sys.executable, "-c", FIRST_IN_BACKWARD], capture_output=True, text=True, timeout=300)
    assert done.stdout == "agrees\n", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tensor_on_a_gpu_that_is_not_the_current_one():
    x = draw(torch.device("cuda", 1), FP32, 3, 40).requires_grad_()
    y = kernels.rms_norm(x)
    want = reference.rms_norm(x.detach().cpu().requires_grad_())
    same("y", y, want.to(y.device), 1e-5)
    y.sum().backward()
    assert torch.cuda.current_device() == 0 and x.grad.isfinite().all()
