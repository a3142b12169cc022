"""Every kernel compiles for compute capability 9.0, on a machine without a GPU: the interpreter accepts more than that."""

import pytest
import torch

from gpubound.kernels.registry import every

from .aot import MORE
from .apart import apart

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")

CASES = [*every(), *MORE]


def compile_apart(*cases: str, before: str = "") -> dict[str, str]:
    """case -> the kernels that compiled, in a process of its own where kernels are not interpreted."""
    call = f"sys.argv[1:] = {list(cases)!r}\nrunpy.run_path('tests/kernels/aot.py', run_name='__main__')"
    script = f"import runpy, sys\n{before}\n{call}"
    return dict(line.split(": ", 1) for line in apart(script).splitlines())


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return compile_apart(*CASES)


@pytest.mark.parametrize("case", CASES)
def test_every_kernel_compiles(case, outcomes):
    kernels = outcomes[case].split(", ")
    assert all(name.endswith("_kernel") for name in kernels), outcomes[case]


BROKEN = """
import triton
import triton.language as tl
from gpubound.kernels.triton import norms

@triton.jit
def leaking_kernel(x_ptr, n):
    for i in range(0, n):
        x = tl.load(x_ptr + i)
    tl.store(x_ptr, x)

def leaking(x, weight, eps):
    leaking_kernel[(1,)](x, 5)
    return x

norms.rms_norm = leaking
"""


def test_a_name_that_leaks_from_a_loop_is_seen(tmp_path):
    """Triton reads a kernel's source from its file."""
    (tmp_path / "leaking.py").write_text(BROKEN)
    outcome = compile_apart("rms_norm", before=f"sys.path.insert(0, {str(tmp_path)!r})\nimport leaking")["rms_norm"]
    assert outcome.startswith("CompilationError") and "x is not defined" in outcome
