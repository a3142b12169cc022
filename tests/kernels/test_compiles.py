"""Every kernel compiles for compute capability 9.0, on a machine without a GPU: the interpreter accepts more than that."""

import ast
import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import gpubound as gb
from gpubound.kernels.decode_adapters import EMPTY
from gpubound.kernels.registry import every
from gpubound.kernels.triton import decode_adapters
from gpubound.kernels.triton.decode_adapters import _come

from .aot import MORE
from .apart import apart

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")

TORCHS = ("sink_attention", "swiglu_product", "swiglu_product_backward")  # few rows are computed by kernels of torch's
CASES = [op for op in [*every(), *MORE] if op not in TORCHS]


def compile_apart(*cases: str, before: str = "") -> dict[str, str]:
    """case -> the kernels that compiled, in a process of its own where kernels are not interpreted."""
    script = f"import sys\nfrom tests.kernels import aot, plans_fit\n{before}\naot.main({list(cases)!r})"
    return dict(line.split(": ", 1) for line in apart(script).splitlines())


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Compiled once for each state of a kernel's code: `make plans` keeps what has."""
    return compile_apart(*CASES, before="aot.compiler = plans_fit.compile_new")


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


@pytest.mark.slow
def test_a_name_that_leaks_from_a_loop_is_seen(tmp_path):
    """Triton reads a kernel's source from its file."""
    (tmp_path / "leaking.py").write_text(BROKEN)
    outcome = compile_apart("rms_norm", before=f"sys.path.insert(0, {str(tmp_path)!r})\nimport leaking")["rms_norm"]
    assert outcome.startswith("CompilationError") and "x is not defined" in outcome


BOUNDED = {
    ("decode_adapters", "_come"): "POLLS",
    ("sampling", "_search"): "PASSES",
    ("peer_exchange", "_take"): "polls",
    ("row_ops", "_add_rows_kernel"): "more",  # until the ids end
}
"""a name in the condition of each loop that a kernel decides to leave, by its file and function"""


def _loops() -> dict[tuple[str, str], str]:
    found = {}
    for path in sorted(Path(gb.__file__).parent.rglob("triton/*.py")):
        for function in ast.parse(path.read_text()).body:
            compiled = isinstance(function, ast.FunctionDef) and any(
                ast.unparse(d).startswith("triton.jit") for d in function.decorator_list
            )
            for node in ast.walk(function) if compiled else ():
                if isinstance(node, ast.While):
                    found[path.stem, function.name] = ast.unparse(node.test)
    return found


def test_each_loop_of_a_kernel_has_a_bound():
    loops = _loops()
    assert loops.keys() == BOUNDED.keys() and all(BOUNDED[at] in test for at, test in loops.items())


@triton.jit
def _wait_kernel(words_ptr, out_ptr, RANKS: tl.constexpr):
    at = words_ptr + tl.arange(0, RANKS)
    tl.store(out_ptr + tl.arange(0, RANKS), _come(tl.load(at, volatile=True), at, RANKS))


@pytest.mark.parametrize("ranks", [16, 64])
def test_a_word_of_an_adapter_that_never_comes_is_nan(ranks, device, monkeypatch):
    if device.type == "cpu":  # the compiler refuses globals that change
        monkeypatch.setattr(decode_adapters, "POLLS", tl.constexpr(3))
    words = torch.arange(ranks, device=device, dtype=torch.int32)
    words[5] = EMPTY
    out = torch.empty_like(words)
    _wait_kernel[(1,)](words, out, RANKS=ranks)
    for found in (out, words):  # nor does another program wait for it
        assert found.view(torch.float32).isnan().nonzero().tolist() == [[5]] and found[5] != EMPTY
        assert found[6:].tolist() == list(range(6, ranks))


def test_no_kernel_assigns_to_a_nested_tuple():
    """Triton 3.6 raises an unhashable list there, where 3.7 compiles it."""
    for file in Path(gb.__file__).parent.rglob("triton/*.py"):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list):
                targets = [t for node in ast.walk(function) if isinstance(node, ast.Assign) for t in node.targets]
                nested = [t for t in targets if isinstance(t, ast.Tuple) and any(isinstance(e, ast.Tuple) for e in t.elts)]
                assert not nested, f"{file.name}:{nested[0].lineno}"


READS = """
import re
import triton
from tests.kernels import aot

def compiled(source, target, options):
    text = triton.compile(source, target=target, options=options).asm["ptx"]
    print("reads:", len(re.findall(r"ld\\.global[.\\w]*\\.b16", text)), "from shared memory:", text.count("ldmatrix"))

aot.compiler = compiled
"""


@pytest.mark.parametrize("op", ["tiled_norm_product", "tiled_norm_gate_up", "split_product", "split_gate_up"])
def test_weights_behind_a_choice_of_pointers_are_not_read_by_numbers(op):
    """The compiler needs to be told how these are aligned: else 98 to 258 loads of 2 bytes are in these examples. And a tiled
    product loads its operands as tensor cores want them: by way of shared memory it waited for 16 barriers, not for 7."""
    text = apart(
        f"{READS}\nimport torch\nfrom gpubound.kernels import selftest\nfrom gpubound.kernels.registry import every, load\n"
        f"aot.stand_in(aot.HOPPER, aot.SHARED)\ng = torch.Generator().manual_seed(0)\n"
        f"selftest._run(load('triton', {op!r}), every()[{op!r}].example(g), torch.device('cpu'), torch.bfloat16)"
    )
    by_two, shared = re.findall(r"reads: (\d+) from shared memory: (\d+)", text)[0]
    assert int(by_two) < 8 and (op.startswith("split") or shared == "0"), text
