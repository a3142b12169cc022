"""Attention over caches in 8 bits and in pages: rounding to the bit, parity, the live length alone, several tokens, pages."""

import subprocess
import tempfile

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.decode_attention import KINDS, Heads, LayerCache, Scratch, decode, encode
from gpubound.kernels.decode_product import EARLY, Norm
from gpubound.kernels.registry import load
from tests.messages import message

from .apart import apart
from .cases import draw, pairwise, same

L, PAGE = 150, 64
# A key whose fp32 value the two mirrors sum differently may fall to either side of two codes: rare, and a code's width at most.
# Compiled, 16-bit models are multiplied in bf16.
CODED = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 8e-3}


class Case:
    """`tokens` of each row from its position on, over a cache of any form that is NaN wherever nobody may look."""

    def __init__(self, device, dtype, positions, kind=None, paged=False, kv=2, group=2, width=16, tokens=1, normed=False):
        self.device, self.dtype, self.kv, self.group, self.width, self.tokens = device, dtype, kv, group, width, tokens
        self.kind, rows = KINDS.get(kind), len(positions)
        self.qkv = draw(device, torch.float32, rows * tokens, (group + 2) * kv * width)
        first = torch.tensor(positions, device=device, dtype=torch.int32)
        self.position = first[:, None] + torch.arange(tokens, device=device, dtype=torch.int32) if tokens > 1 else first
        angles = draw(device, torch.float32, L, width // 2, seed=3)
        norms = [Norm(draw(device, dtype, width, seed=4 + i), 1e-6) if normed else None for i in range(2)]
        self.heads = Heads(angles.cos(), angles.sin(), *norms, width**-0.5)
        caches = [draw(device, torch.float32, rows, kv, L, width, seed=1 + i) for i in range(2)]
        for cache in caches:
            for row, position in enumerate(positions):
                cache[row, :, position:] = float("nan")
        self.pages = shuffled(rows, device) if paged else None
        kept = [self.keep(cache) for cache in caches]
        self.caches = [parts[0] for parts in kept] + [parts[1] for parts in kept if len(parts) > 1]

    def keep(self, cache):
        """In the case's form. What nobody may look at are NaN codes and scales, where codes can be NaN."""
        if self.kind is None:
            return [into_pages(cache.to(self.dtype), self.pages)]
        codes, scale = encode(cache, self.kind)
        if self.kind == torch.float8_e4m3fn:
            codes.view(torch.uint8)[scale.isnan()] = 0x7F
        return [into_pages(codes.view(torch.uint8), self.pages).view(self.kind), into_pages(scale, self.pages)]

    def __call__(self, source, window=0, part=None, caches=None, splits=4, dependent=0):
        """`part`: of the tokens of each row that one alone."""
        rows = len(self.position)
        pick = slice(None) if part is None else slice(part, None, self.tokens)
        qkv = self.qkv[pick].contiguous()
        position = self.position if part is None else self.position[:, part].contiguous()
        caches = [cache.clone() for cache in self.caches] if caches is None else caches
        cache = LayerCache(*caches)._replace(pages=self.pages)
        partial = torch.full((len(qkv), self.kv, splits, self.group, self.width + 2), float("nan"), device=self.device)
        count = torch.zeros(len(qkv) * self.kv, device=self.device, dtype=torch.int32)
        out = torch.full((len(qkv), self.kv * self.group * self.width), float("nan"), device=self.device).to(self.dtype)
        op = "decode_attention" if self.kind is None else "quantized_decode_attention"
        heads, scratch = self.heads._replace(window=window), Scratch(partial, count)
        result = load(source, op)(qkv, position, cache, heads, scratch, out, dependent)
        assert not count.any() and rows, "a launch must leave its counters at zero"
        return result


def shuffled(rows, device):
    """Three pages a row, anywhere among them; page 0 is nobody's."""
    order = torch.randperm(rows * 3, generator=torch.Generator().manual_seed(7)) + 1
    return order.view(rows, 3).to(device, torch.int32)


def into_pages(cache, pages):
    """(B, K, L, ...) into pages (P, K, PAGE, ...) that hold the same, or as it is."""
    if pages is None:
        return cache
    whole = cache.new_zeros((len(cache), cache.shape[1], pages.shape[1] * PAGE, *cache.shape[3:]))
    whole[:, :, :L] = cache
    found = cache.new_zeros((pages.numel() + 1, cache.shape[1], PAGE, *cache.shape[3:]))
    found[pages.long()] = whole.unflatten(2, (-1, PAGE)).transpose(1, 2)
    return found


def out_of_pages(cache, pages):
    return cache if pages is None else cache[pages.long()].transpose(1, 2).flatten(2, 3)[:, :, :L]


def stored(case, result):
    """(out, then keys and values as numbers, row by row)."""
    out, k, v, *scales = result
    if case.kind is None:
        return out, *(out_of_pages(t, case.pages) for t in (k, v))
    codes = [out_of_pages(t.view(torch.uint8), case.pages).view(case.kind) for t in (k, v)]
    return out, *(decode(c, out_of_pages(s, case.pages)) for c, s in zip(codes, scales))


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kv", "group", "width"), [(2, 2, 64), (1, 7, 24), (2, 1, 128)])
def test_agrees_with_the_reference(device, dtype, kind, kv, group, width):
    case = Case(device, dtype, [0, 63, 64, 149], kind, False, kv, group, width, normed=width == 64)
    window = 70 if width == 24 else 0
    found = (stored(case, case(source, window, splits=2)) for source in ("triton", "reference"))
    for name, got, want in zip(("out", "keys", "values"), *found):
        assert torch.equal(got.isnan(), want.isnan()), name
        same(name, got.nan_to_num(), want.nan_to_num(), CODED[dtype] if name == "out" else 1e-3)


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
    for source in ("triton", "reference"):
        whole = Case(device, torch.float16, positions, kind, tokens=tokens)
        paged = Case(device, torch.float16, positions, kind, True, tokens=tokens)
        found = [stored(case, case(source, window, splits=2)) for case in (whole, paged)]
        for name, want, got in zip(("out", "keys", "values"), *found):
            live = torch.arange(L, device=device) < torch.tensor(positions, device=device)[:, None] + tokens
            kept = (lambda t: t) if name == "out" else (lambda t, live=live: t.masked_fill(~live[:, None, :, None], 0.0))
            assert torch.equal(kept(want), kept(got)), (source, name)
            assert not kept(got).isnan().any(), (source, name)


@pytest.mark.parametrize(
    ("kind", "dtype", "window", "paged"),
    [("int8", torch.float32, 0, False), ("fp8", torch.bfloat16, 40, False), ("int8", torch.float16, 0, True)],
)
def test_several_tokens_of_a_row_are_those_tokens_one_by_one_to_the_bit(device, kind, dtype, window, paged):
    for source in ("triton", "reference"):
        case = Case(device, dtype, [0, 62, 147], kind, paged, kv=1, tokens=3, normed=True)
        together = stored(case, case(source, window, splits=2))
        caches, alone = [cache.clone() for cache in case.caches], torch.empty_like(together[0])
        for t in range(3):
            one = case(source, window, t, caches, splits=2)
            alone[t::3] = one[0]
        for name, got, want in zip(("out", "keys", "values"), together, (alone, *stored(case, one)[1:])):
            assert torch.equal(got.nan_to_num(9e9), want.nan_to_num(9e9)), (source, name)


def test_a_row_gives_the_same_bits_in_any_order_of_pages(device):
    """Beside other rows, in other pages."""
    case = Case(device, torch.float32, [3, 149, 88], "int8", True)
    want = case("triton")[0]
    keys, values, *scales = (out_of_pages(t, case.pages) for t in case.caches)
    case.pages = case.pages.flip(0).contiguous()
    case.caches = [into_pages(t, case.pages) for t in (keys, values, *scales)]
    assert torch.equal(case("triton")[0], want)


def test_wrong_arguments_are_named(device):
    case = Case(device, torch.float32, [3], "int8", True)
    k, v, k_scale, v_scale = case.caches
    partial, count = torch.zeros(1, 2, 4, 2, 18, device=device), torch.zeros(2, device=device, dtype=torch.int32)
    out = torch.zeros(1, 64, device=device)

    def call(k=k, v=v, k_scale=k_scale, pages=case.pages):
        cache, scratch = LayerCache(k, v, k_scale, v_scale, pages), Scratch(partial, count)
        kernels.quantized_decode_attention(case.qkv, case.position, cache, case.heads, scratch, out)

    call()
    for wrong, sentence in (
        ({"k": k.float(), "v": v.float()}, message("kernels/decode_attention_cached:wrong_arguments_are_named")),
        ({"k_scale": k_scale.half()}, message("kernels/decode_attention_cached:wrong_arguments_are_named.2")),
        ({"pages": case.pages.long()}, message("kernels/decode_attention_cached:wrong_arguments_are_named.3")),
        ({"pages": case.pages[:, :2].contiguous()}, message("kernels/decode_attention_cached:wrong_arguments_are_named.4")),
    ):
        with pytest.raises(ValueError) as caught:
            call(**wrong)
        assert str(caught.value) == sentence


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
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")
def test_every_form_compiles_spills_nothing_and_asks_for_old_keys_before_it_waits():
    """One of the position, one at least of cos and sin, and of each half of a tile of keys and of values."""
    found = [line.split() for line in apart(COMPILE_ALL).splitlines()]
    assert [line[:3] for line in found] == [[form, "_decode_attention_kernel", "STACK:0"] for form in FORMS]
    assert all(int(ahead) >= 7 for *_, ahead in found), found


COMPILE_ALL = "from tests.kernels.test_decode_attention_cached import compile_all; compile_all()"
