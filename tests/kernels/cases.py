"""What the kernel tests share: shapes at the edges, argued tolerances, and the comparison of both mirrors in guard bands."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations, product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from gpubound.kernels.registry import FAMILIES, every, load

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SOURCES = ("triton", "reference")

# Last-dimension edges: one element, just under a power of two, a power of two, neither; several leading dimensions; nothing.
ROW_SHAPES = [(1, 1), (3, 63), (2, 5, 128), (4, 1000), (0, 64)]

# Relative error in the norm, per dtype of the inputs. Both mirrors compute in fp32 and round once on the way out, so half and
# bfloat16 may differ by one unit in the last place (2^-11, 2^-8; the interpreter truncates bf16 instead of rounding it).
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def module(file: str) -> ModuleType:
    """gpubound/kernels/<file>.py itself, or a family's. `from gpubound.kernels import rope` is the op."""
    packages = ("gpubound.kernels", *FAMILIES)
    return import_module(next(name for p in packages if find_spec(name := f"{p}.{file}") is not None))


def public(op: str) -> Callable:
    """The op's public function; of a variant, as it computes that."""
    function = getattr(import_module(every()[op].package), every()[op].function)
    return partial(function, tiled=True) if op.startswith("tiled_") else function


def definitions(file: str) -> ModuleType:
    """The definitions in that file, each by its op's name as the kernels' own file has them; and what else the file holds."""
    found = ModuleType(file)
    vars(found).update(vars(module(file)) | {name: op.reference for name, op in every().items() if op.file == file})
    return found


def same(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Assert ‖got − want‖ ≤ tolerance · ‖want‖; the message names the tensor and its worst element.

    Inputs are unit normal, so a result far below 1 is a difference of numbers near 1: its error is against 0.1 an element.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: {got.dtype}, wanted {want.dtype}"
    if want.numel() == 0:
        return
    a, b = got.detach().double().cpu(), want.detach().double().cpu()
    error = ((a - b).norm() / b.norm().clamp_min(0.1 * b.numel() ** 0.5)).item()
    worst = (a - b).abs().flatten().argmax().item()
    assert error <= tolerance, (
        f"{name}: relative error {error:.2e} > {tolerance:.0e}; worst at flat index {worst}: "
        f"{a.flatten()[worst]:.6g}, wanted {b.flatten()[worst]:.6g}"
    )


def parity(fast: Callable, slow: Callable, arguments: tuple, tolerance: float) -> None:
    """Run both mirrors on the same arguments; compare every output, then the gradient of every floating tensor."""
    got, want = _run(fast, arguments), _run(slow, arguments)
    assert got.keys() == want.keys(), f"got {list(got)}, wanted {list(want)}"
    for name in want:
        same(name, got[name], want[name], tolerance)


def _run(function: Callable, arguments: tuple) -> dict[str, Tensor]:
    fresh = [a.detach().clone().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in arguments]
    result = function(*fresh)
    outputs = result if isinstance(result, tuple) else (result,)
    named = {f"output {i}": t for i, t in enumerate(outputs) if t is not None}
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(t.shape, generator=generator).to(t) for t in named.values()]
    leaves = [(i, t) for i, t in enumerate(fresh) if isinstance(t, Tensor) and t.requires_grad]
    gradients = torch.autograd.grad(list(named.values()), [t for _, t in leaves], upstream, allow_unused=True)
    return named | {f"gradient of argument {i}": g for (i, _), g in zip(leaves, gradients) if g is not None}


BAND = 256  # bytes before and after each argument of `agree`


def agree(op: str, *arguments: Any, limit: float = 1e-5, scratch: Sequence[int] = ()) -> tuple:
    """Run the kernel and the definition on copies of the arguments. What they return and write agrees, the rest is unchanged.

    Each copy is in a guard band, of NaN or large integers, as is `torch.empty`, an output that must be written whole.

    limit    of the relative error; 16-bit tensors are rounded, too (TOLERANCE). 0: all are equal. Integers always are
    scratch  numbers of the arguments in which either may leave anything

    Return the arguments as the kernel left them.
    """
    got, want = (_in_bands(source, op, arguments) for source in SOURCES)
    for name in want[0].keys() | got[0].keys():
        _compare(f"{op}: result {name}", got[0][name], want[0][name], limit)
    before = _tensors(arguments)
    for name, argument in before.items():
        if not any(name.startswith(f"[{number}]") for number in scratch):
            changed = not _equal(want[1][name], argument)
            _compare(f"{op}: argument {name}", got[1][name], want[1][name], limit if changed else 0.0)
    return got[2]


def _in_bands(source: str, op: str, arguments: tuple) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple]:
    """Return the results, the arguments' tensors by name, and the arguments."""
    bands: list[tuple[Tensor, Tensor]] = []

    def copied(t: Tensor) -> Tensor:
        """Copy a tensor with its strides. Gaps between its elements are a part of the band."""
        if any(step == 0 and size > 1 for size, step in zip(t.shape, t.stride())):
            return t.clone()
        count = 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride())) if t.numel() else 0
        whole = torch.full((count * t.itemsize + 2 * BAND,), 0xFF if t.is_floating_point() else 0x7B, dtype=torch.uint8)
        whole = whole.to(t.device)
        inside = whole[BAND : BAND + count * t.itemsize].view(t.dtype).as_strided(t.shape, t.stride())
        bands.append((whole, inside.copy_(t.detach())))
        return inside

    copies = tree_map_only(Tensor, copied, arguments)
    results = _tensors(load(source, op)(*copies))
    for whole, inside in bands:
        fill = 0xFF if inside.is_floating_point() else 0x7B
        assert (whole[:BAND] == fill).all() and (whole[-BAND:] == fill).all(), f"{op}: {source} stored outside of a tensor"
    return results, _tensors(copies), copies


def _tensors(tree: Any) -> dict[str, Tensor]:
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0] if isinstance(leaf, Tensor)}


def _compare(name: str, got: Tensor, want: Tensor, limit: float) -> None:
    if not limit or not want.is_floating_point():
        assert _equal(got, want), f"{name}: {got}, wanted {want}"
        return
    assert got.isnan().equal(want.isnan()), f"{name}: NaN at other places"
    alike = got.isnan() | (got.isinf() & (got == want))
    allowed = limit if want.dtype in (torch.float32, torch.float64) else max(limit, TOLERANCE[want.dtype])
    same(name, got.masked_fill(alike, 0), want.masked_fill(alike, 0), allowed)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point() and a.itemsize == 1:
        a, b = a.float(), b.float()
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


@contextmanager
def no_copies(least: int = 0) -> Iterator[None]:
    """Refuse copies of `least` elements or more by Tensor.contiguous: a view is read where it lies."""

    def contiguous(t: Tensor) -> Tensor:
        assert t.numel() < least, "a view was copied"
        return t

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "contiguous", contiguous)
        yield


def draw(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def banded(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32, band: int = 64
) -> tuple[Tensor, Tensor]:
    """(whole, inside): a contiguous view inside a NaN-filled buffer. After a launch the margins must still be NaN."""
    count = 1
    for size in shape:
        count *= size
    whole = torch.full((count + 2 * band,), float("nan"), device=device, dtype=dtype)
    return whole, whole[band : band + count].view(shape)


def assert_inside(whole: Tensor, inside: Tensor, band: int = 64) -> None:
    assert whole[:band].isnan().all() and whole[-band:].isnan().all(), "a store landed outside the tensor"
    assert not inside.isnan().any(), "part of the tensor was never written"


def pairwise(test: Callable) -> Callable:
    """Reduce the stacked parametrize marks of a test to few combinations, in which each two values of two marks still meet.

    The interpreter takes most of the suite's time, and errors depend on one value or on a pair: three dtypes, shapes and
    counts of rows with a flag are 9 launches instead of 54.
    """
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    axes = [list(enumerate(_cases(mark))) for mark in marks]
    open_pairs = {(a, i, b, j) for a, b in combinations(range(len(axes)), 2) for i, _ in axes[a] for j, _ in axes[b]}
    rows, ids = [], []
    while open_pairs:
        best = max(product(*axes), key=lambda row: len(_pairs(row) & open_pairs))
        open_pairs -= _pairs(best)
        rows.append(tuple(value for _, (values, _) in best for value in values))
        ids.append("-".join(name for _, (_, name) in best))
    names = [name for mark in marks for name in _names(mark)]
    test.pytestmark = [mark for mark in test.pytestmark if mark.name != "parametrize"]
    return pytest.mark.parametrize(names, rows, ids=ids)(test)


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _cases(mark: pytest.Mark) -> list[tuple[tuple, str]]:
    """Each case of a mark as the values of its names, and the case's id."""
    values, ids = list(mark.args[1]), mark.kwargs.get("ids")
    if ids is None or callable(ids):
        ids = [str(value if ids is None else ids(value)) for value in values]
    return [(value if len(_names(mark)) > 1 else (value,), str(name)) for value, name in zip(values, ids, strict=True)]


def _pairs(row: tuple) -> set[tuple[int, int, int, int]]:
    return {(a, row[a][0], b, row[b][0]) for a, b in combinations(range(len(row)), 2)}


def assert_chunks_match(chunked: Callable, recurrence: Callable, arguments: list[Tensor], names: str) -> None:
    """Compare `chunked` of arguments (B, T, H, ...) and a state (B, H, ...) with `recurrence` of each row and head, in fp64.

    Outputs, the state after the last token, and gradients.
    """
    *inputs, state = arguments = [t.requires_grad_() for t in arguments]
    found = chunked(*arguments)
    rows, heads = range(len(state)), range(state.shape[1])
    each = [[recurrence(*(t[row, :, head] for t in inputs), state[row, head]) for head in heads] for row in rows]
    want = (
        torch.stack([torch.stack([o for o, _ in row], 1) for row in each]),
        torch.stack([torch.stack([S for _, S in row]) for row in each]),
    )
    upstream = [draw(t.device, torch.float64, *t.shape, seed=6 + at) for at, t in enumerate(found)]
    for name, mine, theirs in zip(("outputs", "state"), found, want):
        same(name, mine, theirs, 1e-12)
    got, wanted = (torch.autograd.grad(results, arguments, upstream) for results in (found, want))
    for name, mine, theirs in zip(names, got, wanted):
        same(name, mine, theirs, 1e-11)


def assert_same_bits_in_any_batch(case: Callable) -> None:
    """Assert that rows of an attention case give the bits that they give with other rows."""
    together = case("triton")[0]
    for rows in ([1], [2, 0], [3, 2, 1]):
        assert torch.equal(case("triton", rows=rows)[0], together[rows])
