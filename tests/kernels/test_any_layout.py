"""Every op with the tensors and integers that users bring: strided, expanded, at an offset, empty, out of range.

Through its public function, an op either refuses with a sentence of its own or does what the reference does with plain copies:
the same results and gradients, NaN at the same places, and not a byte changed around any tensor, be it an argument or made by
the op. Arguments are the self-tests'.
"""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from torch import Tensor

from gpubound import trace
from gpubound.kernels import selftest
from gpubound.kernels.registry import every, load
from tests.messages import message

from .cases import public

OPS = every()

# What may hold any integer. Scratch, codes and packed words may not.
INTEGERS = ("ids", "labels", "position", "arg", "rows", "settings", "text", "chunk", "chosen", "going")
# Numbers on their way between programs: the definition has no use for them.
PASSING = ("adapters.h", "adapters.before", "scratch.sums", "scratch.weights")
NUMBERS = ("without", "ignore_index", "window", "decay_until")
ODD = (-1, -2, 0, 3, 8, 9, 10, 299, 300, 2**20, 2**31 - 1, -(2**31), 2**32 + 1, -(2**32) - 1)
# A loop over tokens, or over experts: half of the time of all.
LONG = ("rg_lru", "quantized_add_routed", "quantized_routed_gate_up", "norm_products", "quantized_routed_down", "add_adapters")
LAYOUTS = ("offset", "gaps", "transposed", "column", "expanded", "wider", "empty")
BAND = 67  # elements before and behind, full of a pattern; no multiple of what loads are aligned to
ROOM = 64  # the same around what an op makes, which is aligned


def cut(flat: Tensor, shape: tuple[int, ...], layout: str) -> Tensor:
    """A tensor of `shape` out of the middle of `flat`. Expanded ones have one column."""
    inner, size, last = flat[BAND:], torch.Size(shape).numel(), shape[-1]
    if layout == "transposed" and len(shape) > 1:
        return inner[:size].view(*shape[:-2], last, shape[-2]).transpose(-1, -2)
    if layout == "gaps":
        return inner[: 3 * size].view(*shape[:-1], 3 * last)[..., 1::3]
    if layout == "column":
        return inner[: 2 * size].view(*shape, 2)[..., 1]
    if layout == "expanded":
        return inner[: size // max(1, last)].view(*shape[:-1], 1)
    return inner[:size].view(shape)


class Laid:
    """The values of a tensor in another layout, and the memory around them."""

    def __init__(self, t: Tensor, layout: str):
        t = t.detach()
        if layout == "wider" and t.dtype == torch.int32:
            t = t.long()
        if layout == "empty":
            t = t[:0]
        shape = tuple(t.shape)
        room, size = 3 * t.numel() + 2 * BAND, t.element_size()
        self.whole = torch.full((room * size,), 0x7F, dtype=torch.uint8)
        outside = torch.ones(room, dtype=torch.bool)
        cut(outside, shape, layout).fill_(False)
        self.outside = outside.repeat_interleave(size)
        self.tensor = cut(self.whole.view(t.dtype), shape, layout)
        self.tensor.copy_(t[..., :1] if layout == "expanded" else t)
        if layout == "expanded":
            self.tensor = self.tensor.expand(shape)

    def untouched(self) -> bool:
        return bool((self.whole[self.outside] == 0x7F).all())


class Made:
    """torch.empty and torch.empty_like while an op runs: what they return is NaN, in the middle of a pattern."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.of, self.like, self.bands = torch.empty, torch.empty_like, []
        patch.setattr(torch, "empty", self.empty)
        patch.setattr(torch, "empty_like", self.empty_like)

    def empty(self, *shape, dtype: torch.dtype | None = None, **options) -> Tensor:
        size = torch.Size(shape if shape and isinstance(shape[0], int) else shape[0])
        whole = self.of(size.numel() + 2 * ROOM, dtype=dtype or torch.get_default_dtype(), **options)
        whole.view(torch.uint8).fill_(0x7F)
        inside = whole[ROOM : ROOM + size.numel()]
        self.bands.append((whole[:ROOM].view(torch.uint8), whole[ROOM + size.numel() :].view(torch.uint8)))
        return (inside.fill_(torch.nan) if whole.is_floating_point() else inside).view(size)

    def empty_like(self, t: Tensor, **options) -> Tensor:
        if not t.is_contiguous():
            return self.like(t, **options)
        return self.empty(t.shape, **{"dtype": t.dtype, "device": t.device} | options)

    def untouched(self) -> bool:
        return all(bool((band == 0x7F).all()) for bands in self.bands for band in bands)


def leaves(arguments: dict) -> dict[str, Any]:
    """All by name, those in named tuples too."""
    found = {}
    for name, value in arguments.items():
        fields = getattr(value, "_fields", None)
        found |= {name: value} if fields is None else {f"{name}.{field}": part for field, part in zip(fields, value)}
    return found


def tensors(arguments: dict) -> dict[str, Tensor]:
    return {name: t for name, t in leaves(arguments).items() if isinstance(t, Tensor)}


def replaced(arguments: dict, new: dict[str, Any]) -> dict:
    result = {}
    for name, value in arguments.items():
        if hasattr(value, "_fields"):
            value = type(value)(*(new.get(f"{name}.{field}", t) for field, t in zip(value._fields, value)))
        result[name] = new.get(name, value)
    return result


def outcome(function, arguments: dict, upstream: str) -> dict[str, Tensor]:
    """Results, gradients, and what the arguments are afterwards."""
    given = tensors(arguments)
    result = function(**arguments)
    results = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
    wired, inputs = [t for t in results if t.grad_fn is not None], {n: t for n, t in given.items() if t.requires_grad}
    found = {f"result {i}": t.detach() for i, t in enumerate(results)}
    found |= {name: t.detach() for name, t in given.items() if name not in PASSING}
    if wired and inputs:
        ones = [torch.ones((), dtype=t.dtype).expand(t.shape) for t in wired]
        if upstream == "apart":
            ones = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.dtype) for t in wired]
        gradients = torch.autograd.grad(wired, list(inputs.values()), ones, allow_unused=True)
        found |= {f"gradient of {n}": g for n, g in zip(inputs, gradients) if g is not None}
    return found


def of(op: str) -> tuple[dict, list[str]]:
    """The self-test's arguments by name, and which of them have gradients."""
    values = OPS[op].example(torch.Generator().manual_seed(0))
    arguments = dict(zip(inspect.signature(load("reference", op)).parameters, values))
    return arguments, [name for name, t in tensors(arguments).items() if t.requires_grad]


def check(op: str, data) -> None:
    arguments, wired = of(op)
    own = {key: t.detach().clone() for key, t in tensors(arguments).items()}
    loose = [key for key, t in own.items() if key.split(".")[0] in INTEGERS and not t.is_floating_point()]
    for _ in range(data.draw(st.integers(0, 2), "odd integers") if loose else 0):
        key = data.draw(st.sampled_from(loose), "of")
        at, odd = data.draw(st.integers(0, own[key].numel() - 1), "at"), data.draw(st.sampled_from(ODD), "integer")
        own[key].view(-1)[at] = torch.tensor(odd).to(own[key].dtype)
    for key, number in leaves(arguments).items():
        if key.rpartition(".")[2] in NUMBERS:
            arguments = replaced(arguments, {key: data.draw(st.sampled_from((number, *ODD)), key)})
    laid = {key: Laid(t, "offset") for key, t in own.items()}
    for _ in range(data.draw(st.integers(0, 2), "layouts")):
        key = data.draw(st.sampled_from(list(own)), "tensor")
        laid[key] = Laid(own[key], data.draw(st.sampled_from(LAYOUTS), "layout") if own[key].dim() else "offset")
    plain = {key: each.tensor.clone(memory_format=torch.contiguous_format) for key, each in laid.items()}
    given = {key: each.tensor for key, each in laid.items()}
    for key in wired:
        given[key], plain[key] = given[key].requires_grad_(), plain[key].requires_grad_()
    upstream = data.draw(st.sampled_from(("expanded", "apart")), "upstream")
    try:
        with pytest.MonkeyPatch.context() as patch, trace.strict():
            made = Made(patch)
            got = outcome(public(op), replaced(arguments, given), upstream)
    except ValueError as refusal:
        assert str(refusal).startswith(f"{OPS[op].function}: ") and str(refusal).endswith("."), refusal
        got = None
    assert all(each.untouched() for each in (made, *laid.values())), "a store landed outside its tensor"
    if got is None:
        return
    want = outcome(load("reference", op), replaced(arguments, plain), upstream)
    assert got.keys() <= want.keys() and {k for k in want.keys() - got.keys() if not k.startswith("result")} == set()
    for key in got:
        wanted = want[key]
        a, b = got[key].double(), wanted.double()
        assert a.shape == b.shape and torch.equal(a.isnan(), b.isnan()), f"{key}: NaN where the other is not: {a}, {b}"
        off = (a.nan_to_num() - b.nan_to_num()).norm() / b.nan_to_num().norm().clamp_min(0.1 * max(1, b.numel()) ** 0.5)
        assert off <= selftest.LIMITS[torch.float32], f"{key} is off by {off:.1e}: {a}, {b}"


CASES = [pytest.param(op, 3, id=op, marks=pytest.mark.slow) if op in LONG else pytest.param(op, 6, id=op) for op in OPS]


@pytest.mark.parametrize(("op", "examples"), CASES)
def test_refused_or_equal(op, examples):
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.data())
    def run(data):
        check(op, data)

    run()


TRAINED = ("cross_entropy", "linear_cross_entropy", "poly_attention", "richards", "rms_norm", "rope", "rope_qkv", "swiglu")


@pytest.mark.parametrize("op", TRAINED)
def test_second_derivatives_are_refused(op):
    arguments, wired = of(op)
    result = public(op)(**arguments)
    results = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None and t.grad_fn is not None]
    inputs = [tensors(arguments)[name] for name in wired]
    with pytest.raises(NotImplementedError) as error:
        torch.autograd.grad([t.float().square().sum() for t in results], inputs, create_graph=True, allow_unused=True)
    assert str(error.value) == message("kernels/any_layout:second_derivatives_are_r", op)
