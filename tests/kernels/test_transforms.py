"""torch.compile and torch.func over the ops: the one traces through, the other takes the references and says so."""

import textwrap

import pytest
import torch

from gpubound import kernels, trace
from gpubound.errors import FallbackError
from tests.messages import message

from .apart import apart
from .cases import definitions, same

reference = definitions("norms")

pytestmark = pytest.mark.usefixtures("fresh")


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's own, of a class that releases differ in; jvp's first use
@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_a_transform_that_sees_into_no_kernel_takes_the_reference(transform, x, monkeypatch):
    """And says so. torch's own error would name its C++."""
    got = transform(sum_of_norm, x)
    ((what, why),) = trace.fallbacks
    assert what == "rms_norm" and why == message("kernels/transforms:a_transform_that_sees_in")
    with trace.strict(), pytest.raises(FallbackError, match=r"^rms_norm: would fall back"):
        transform(sum_of_norm, x)
    monkeypatch.setattr(kernels, "rms_norm", reference.rms_norm)
    same("result", got, transform(sum_of_norm, x), 1e-6)


NORMS = """
    import torch
    from gpubound import kernels
    from gpubound.models.richards import kernels as richards_kernels

    def call(x, r, w, b, a, f):
        y, s = kernels.add_rms_norm(x, r, w)
        y = kernels.group_norm(kernels.layer_norm(kernels.rms_norm(y, w), w, b), 2, w, b)
        y = richards_kernels.dynamic_tanh(y, a, w, b) + s
        y = richards_kernels.richards_glu(y, f, None, curve, richards_kernels.Curve())  # by the definition
        return richards_kernels.richards(y, f, curve) * w[:4] + b[:4]

    curve = richards_kernels.Curve(("nu", "k", "m", "bias"), tail=True)
    shapes = [(3, 8), (3, 8), (8,), (8,), (1,), (4,)]
    arguments = [torch.randn(s, device=DEVICE, requires_grad=True) for s in shapes]
"""

LOSSES = """
    import torch
    from gpubound import kernels

    def call(packed, gate, weight, logits):
        q, k, v = kernels.rope_qkv(packed, cos, sin, 2, 1)
        q, k = kernels.rope(q, k, cos, sin)
        x = kernels.geglu(kernels.swiglu(torch.cat([q, k, v], 2).flatten(2)), gate)
        return kernels.linear_cross_entropy(x, weight, labels, chunk=4) + kernels.cross_entropy(logits, labels)

    angles = torch.randn(3, 4, device=DEVICE)
    cos, sin, labels = angles.cos(), angles.sin(), torch.zeros(2, 3, device=DEVICE, dtype=torch.long)
    shapes = [(2, 3, 32), (2, 3, 16), (50, 16), (2, 3, 50)]
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
    from gpubound.kernels import dispatch

    torch._dynamo.reset()
    torch.utils._triton.has_triton = lambda *_: True
    dispatch._source = torch.compiler.assume_constant_result(lambda *_: "triton")

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


def run_apart(*parts, warning="error", **names):
    """What a script prints in a process of its own, where kernels are not interpreted."""
    head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    return apart(head + "".join(textwrap.dedent(part) for part in parts), warning).strip()


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """One process for all tests below: it takes seconds to start, and to compile first."""
    traced = [] if torch.cuda.is_available() else [TRACE, LOSSES, TRACE]
    return run_apart(NORMS, COMPARE, *traced, DEVICE="cpu", BACKEND="eager").splitlines()


@pytest.mark.slow
def test_compile_sees_through_the_references(printed):
    assert printed[0] == "agrees"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below compiles the kernels and runs them")
def test_compile_traces_the_kernels(printed):
    """Norms: 5 kernels each way; the sums over programs are torch's here, which inductor may fuse. Losses and the ops around
    them: 5 each way, and the two chunks of linear_cross_entropy, whose launch does both ways at once."""
    assert printed[1:] == ["10 kernels", "12 kernels"]


@pytest.mark.gpu
@pytest.mark.parametrize("calls", [NORMS, LOSSES], ids=["norms", "losses"])
def test_compile_runs_the_kernels(calls):
    """Inductor's own advice (TensorFloat32 is off) is a warning that says nothing of ours."""
    assert run_apart(calls, COMPARE, warning="default", DEVICE="cuda", BACKEND="inductor") == "agrees"
