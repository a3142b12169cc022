"""Attention over caches in 8 bits and in pages: rounding to the bit, parity, the live length alone, several tokens, pages."""

import subprocess
import tempfile
from functools import partial

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.decode_attention import KINDS, LayerCache, decode, encode
from gpubound.kernels.decode_product import EARLY
from gpubound.kernels.invariant import MEMBERS, SharedKeys
from gpubound.kernels.registry import load
from gpubound.kernels.row_ops import as_integers
from tests.messages import refusals

from .apart import apart
from .attention_cases import NAMES, Case, L, into_pages, one_by_one, out_of_pages, parity, shuffled, stored
from .cases import DTYPES, SOURCES, TOLERANCE, draw, pairwise, same

# A key whose fp32 value the two mirrors sum differently may fall to either side of two codes: rare, and a code's width at most.
# Compiled, 16-bit models are multiplied in bf16.
CODED = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("kind", KINDS)
def test_codes_stand_for_the_nearest_number(kind):
    """Against the definition: the largest of a token is kept, all others lie within half a step, and torch's own e4m3."""
    x = draw("cpu", torch.float32, 40, 3, 64) * torch.logspace(-8, 8, 40)[:, None, None]
    codes, scale = encode(x, KINDS[kind])
    torch.testing.assert_close(scale, x.abs().amax(-1) / {"int8": 127, "fp8": 448}[kind])
    level = x.double() / scale.double()[..., None]
    back = decode(codes, scale).double() / scale.double()[..., None]
    step = torch.ones_like(level) if kind == "int8" else 2.0 ** (level.abs().log2().floor().clamp_min(-6) - 3)
    assert ((back - level).abs() <= 0.5001 * step).all()
    error = (decode(codes, scale) - x).norm() / x.norm()
    assert error < {"int8": 0.009, "fp8": 0.03}[kind]
    assert torch.equal(decode(codes, scale, torch.bfloat16), decode(codes, scale).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so_and_zero_is_zero(kind):
    x = draw("cpu", torch.float32, 5, 16)
    x[0, 3], x[1, 0], x[2, 7], x[3], x[4] = float("nan"), float("inf"), -float("inf"), 0.0, 1e-42
    back = decode(*encode(x, KINDS[kind]))
    assert back[:3].isnan().all() and torch.equal(back[3:], torch.zeros(2, 16))


@pytest.mark.parametrize(("kind", "width"), [("int8", 24), ("fp8", 24), ("int8", 128), ("fp8", 128)])
def test_the_kernel_rounds_as_prompts_are_rounded_to_the_bit(device, kind, width):
    """Without norm and rotation the keys are the product's own numbers: the same codes and scales, at every magnitude."""
    case = Case(device, torch.float32, [0] * 8, kind, width=width)
    case.heads = case.heads._replace(cos=torch.ones_like(case.heads.cos), sin=torch.zeros_like(case.heads.sin))
    case.qkv *= torch.logspace(-6, 6, 8, device=device)[:, None]
    case.qkv[:, -width] = 0.0
    case.qkv[1, -2 * width] = float("nan")
    case.qkv[2, -width:] = 0.0
    _, *got = case("triton", splits=1)
    keys, values = (case.qkv.view(8, 8, width)[:, i : i + 2] for i in (4, 6))
    for name, codes, scale, new in (("keys", got[0], got[2], keys), ("values", got[1], got[3], values)):
        want, want_scale = encode(new, case.kind)
        assert torch.equal(scale[:, :, 0].nan_to_num(9e9), want_scale.nan_to_num(9e9)), name
        assert torch.equal(codes[:, :, 0].view(torch.uint8), want.view(torch.uint8)), name


@pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kv", "group", "width"), [(2, 2, 64), (1, 7, 24), (2, 1, 128)])
def test_agrees_with_the_reference(device, dtype, kind, kv, group, width):
    case = Case(device, dtype, [0, 63, 64, 149], kind, False, kv, group, width, normed=width == 64)
    window = 70 if width == 24 else 0
    parity(case, CODED[dtype], 1e-3, window=window, splits=2)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_attended_to_is_what_the_cache_holds(device, kind):
    """Plain attention over the numbers that the codes stand for, the new token among them."""
    case = Case(device, torch.float32, [0, 40, 149], kind)
    out, keys, values = stored(case, case("triton"))
    heads = case.qkv.view(3, 8, 16)[:, :4]
    c, s = (t[case.position.long()][:, None] for t in (case.heads.cos, case.heads.sin))
    a, b = heads.chunk(2, -1)
    q = torch.cat([a * c - b * s, b * c + a * s], -1).view(3, 2, 2, 16)
    for row, position in enumerate((0, 40, 149)):
        k, v = keys[row, :, : position + 1], values[row, :, : position + 1]
        weights = (torch.einsum("kgd,kld->kgl", q[row], k) / 4).softmax(-1)
        same("out", out[row], torch.einsum("kgl,kld->kgd", weights, v).flatten(), 1e-5)


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize(("window", "tokens"), [(0, 1), (70, 1), (0, 3)])
def test_pages_give_the_bits_of_rows_side_by_side(device, kind, window, tokens):
    """Windows begin anywhere, so that a tile of keys lies across two pages."""
    positions = [62, 147]
    for source in SOURCES:
        whole = Case(device, torch.float16, positions, kind, tokens=tokens)
        paged = Case(device, torch.float16, positions, kind, True, tokens=tokens)
        found = [stored(case, case(source, window, splits=2)) for case in (whole, paged)]
        for name, want, got in zip(NAMES, *found):
            live = torch.arange(L, device=device) < torch.tensor(positions, device=device)[:, None] + tokens
            kept = (lambda t: t) if name == "out" else (lambda t, live=live: t.masked_fill(~live[:, None, :, None], 0.0))
            assert torch.equal(kept(want), kept(got)), (source, name)
            assert not kept(got).isnan().any(), (source, name)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("kind", "dtype", "window", "paged"),
    [("int8", torch.float32, 0, False), ("fp8", torch.bfloat16, 40, False), ("int8", torch.float16, 0, True)],
)
def test_several_tokens_of_a_row_are_those_tokens_one_by_one_to_the_bit(device, source, kind, dtype, window, paged):
    one_by_one(Case(device, dtype, [0, 62, 147], kind, paged, kv=1, tokens=3, normed=True), source, window)


def test_a_row_gives_the_same_bits_in_any_order_of_pages(device):
    """Beside other rows, in other pages."""
    case = Case(device, torch.float32, [3, 149, 88], "int8", True)
    want = case("triton")[0]
    keys, values, *scales = (out_of_pages(t, case.pages) for t in case.caches)
    case.pages = case.pages.flip(0).contiguous()
    case.caches = [into_pages(t, case.pages) for t in (keys, values, *scales)]
    assert torch.equal(case("triton")[0], want)


@pytest.mark.parametrize(
    ("kind", "dtype", "paged", "options"),
    [
        (None, torch.float32, False, {"normed": True}),
        ("int8", torch.float32, True, {"gated": True, "width": 32, "pairs": 8}),
        (None, torch.bfloat16, True, {"group": 5, "interleaved": True, "cap": 20.0, "new": 1}),
        pytest.param("fp8", torch.float16, False, {"normed": True, "offset": 1.0}, marks=pytest.mark.slow),
    ],
)
def test_keys_that_rows_share_are_read_from_the_furthest_of_them(device, kind, dtype, paged, options):
    """Rows 2 and 5 have no group, and row 8 reads its own keys: it is not beyond those that it shares. What the others of a
    group hold is lost before the kernel runs."""
    case = Case(device, dtype, [129, 140, 66, 149, 128, 12, 64, 90, 63], kind, **options)
    groups, counts = [[0, 1, 3, 4], [8, 7, 6]], [127, 127, 0, 127, 127, 0, 64, 64, 64]
    others = [(0, 3, 127), (1, 3, 127), (4, 3, 127), (6, 7, 64)]
    for cache in map(as_integers, case.caches):
        cache[8, :, :63] = cache[7, :, :63]
    for cache in map(as_integers, case.caches):
        for row, leader, end in others:
            cache[row, :, :end] = cache[leader, :, :end]
    want = case("reference", splits=2)
    for cache in case.caches:
        for row, _, end in others:
            cache[row, :, :end] = 0 if cache.dtype == torch.int8 else float("nan")
    case.pages = shuffled(9, device) if paged else None
    case.caches = [into_pages(as_integers(cache), case.pages).view(cache.dtype) for cache in case.caches]
    rows = torch.tensor([row + [-1] * (MEMBERS - len(row)) for row in [*groups, []]], dtype=torch.int32, device=device)
    case.shared = SharedKeys(rows, torch.tensor(counts, dtype=torch.int32, device=device))
    for splits in (1, 2):
        same("out", case("triton", splits=splits)[0], want[0], max(2 * TOLERANCE[dtype], CODED[dtype] if kind else 1e-5))


@pytest.mark.gpu
def test_own_keys_are_read_beside_another_launch_that_reads_shared_ones(device):
    """Six steps in one graph, over the same buffers: each gives what rows that share nothing give."""
    case = Case(device, torch.bfloat16, [100 + 5 * (row % 8) for row in range(128)], kv=8, width=128, normed=True)
    for cache in case.caches:
        cache[:, :, :80] = cache[::8, :, :80].repeat_interleave(8, 0)
    rows = torch.full((16, MEMBERS), -1, device=device, dtype=torch.int32)
    rows[:, :8] = torch.arange(128, device=device).view(16, 8)
    shared = SharedKeys(rows, torch.full((128,), 80, device=device, dtype=torch.int32))
    products, scratch = draw(device, torch.float32, 6, *case.qkv.shape, seed=9), case.scratch(128, 16, 64)

    def steps(shared: SharedKeys | None) -> torch.Tensor:
        out = torch.zeros(6, 128, 2 * 8 * 128, device=device, dtype=torch.bfloat16)
        for product, result in zip(products, out):
            case.qkv.copy_(product)
            cache = LayerCache(*case.caches, shared=shared)
            load("triton", "decode_attention")(case.qkv, case.position, cache, case.heads, scratch, result)
        return out

    want, _ = steps(None), steps(shared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = steps(shared)
    for _ in range(3):
        got.zero_()
        graph.replay()
        same("out", got, want, 2 * TOLERANCE[torch.bfloat16])


def test_wrong_arguments_are_named(device):
    case = Case(device, torch.float32, [3], "int8", True)
    k, v, k_scale, v_scale = case.caches
    out = torch.zeros(1, 64, device=device)

    group, none = (
        torch.full(shape, value, dtype=torch.int32, device=device) for shape, value in (((1, MEMBERS), -1), ((1,), 0))
    )

    def call(k=k, v=v, k_scale=k_scale, pages=case.pages, window=None):
        cache = LayerCache(k, v, k_scale, v_scale, pages, window and SharedKeys(group, none))
        heads = case.heads._replace(window=window or 0)
        kernels.decode_attention(case.qkv, case.position, cache, heads, case.scratch(1), out)

    call()
    refusals(
        "kernels/decode_attention_cached:wrong_arguments_are_named",
        partial(call, k=k.float(), v=v.float()),
        partial(call, k_scale=k_scale.half()),
        partial(call, pages=case.pages.long()),
        partial(call, pages=case.pages[:, :2].contiguous()),
        partial(call, window=2),
    )


def compile_all() -> None:
    """Every form for compute capability 9.0, a line each: which, the kernel, what ptxas says of its registers, and how many
    loads stand before the wait for the launch before."""
    import triton

    from . import aot

    compile_for_hopper = triton.compile

    def measured(*given, **options):
        made = compile_for_hopper(*given, **options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            call = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            stack = subprocess.run(call, capture_output=True, text=True).stdout.split("REG:")[1].split()[1]
        ahead, waits, _ = made.asm["ptx"].partition("griddepcontrol.wait")
        print(form, made.metadata.name, stack, ahead.count("ld.global") if waits else "no wait")
        return made

    triton.compile, triton.runtime.jit.JITFunction.run = measured, aot.compile_instead
    for form in FORMS:
        kind, paged, tokens, width = FORMS[form]
        Case("cpu", torch.bfloat16, [3, 70], kind, paged, 2, 4, width, tokens, True)("triton", splits=16, dependent=EARLY)


FORMS = {
    "plain": (None, False, 1, 64),
    "int8": ("int8", False, 1, 128),
    "fp8": ("fp8", False, 1, 128),
    "paged": (None, True, 1, 128),
    "fp8-paged": ("fp8", True, 1, 64),
    "fp8-paged-several": ("fp8", True, 3, 64),
    "wide": (None, False, 1, 512),
}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")
def test_every_form_compiles_spills_nothing_and_asks_for_old_keys_before_it_waits():
    """One of the position, one at least of cos and sin, and of each half of a tile of keys and of values."""
    found = [line.split() for line in apart(COMPILE_ALL).splitlines()]
    assert [line[:3] for line in found] == [[form, "_decode_attention_kernel", "STACK:0"] for form in FORMS]
    assert all(int(ahead) >= 7 for *_, ahead in found), found


COMPILE_ALL = "from tests.kernels.test_decode_attention_cached import compile_all; compile_all()"
