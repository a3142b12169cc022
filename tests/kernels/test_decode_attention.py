"""One token's attention over the cache: parity, the live length alone, windows, normed heads, splits, the same bits."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels import plans
from gpubound.kernels.decode_attention import Heads, LayerCache, Scratch
from gpubound.kernels.decode_product import EARLY, LATE, Norm
from gpubound.kernels.plans.types import AttentionPlan
from gpubound.kernels.registry import load
from gpubound.kernels.triton import decode_attention as fast
from tests.messages import message

from .cases import TOLERANCE, draw, pairwise, same

L = 150


class Case:
    """A step of `rows` rows at their positions, with NaN wherever nobody may look."""

    def __init__(self, device, dtype, positions, kv=2, group=2, width=16, splits=4, normed=False):
        self.device, self.kv, self.group, self.width, self.splits = device, kv, group, width, splits
        rows = len(positions)
        self.qkv = draw(device, torch.float32, rows, (group + 2) * kv * width)
        self.position = torch.tensor(positions, device=device, dtype=torch.int32)
        self.caches = [draw(device, dtype, rows, kv, L, width, seed=1 + i) for i in range(2)]
        for cache in self.caches:
            for row, position in enumerate(positions):
                cache[row, :, position:] = float("nan")
        angles = draw(device, torch.float32, L, width // 2, seed=3)
        norms = [Norm(draw(device, dtype, width, seed=4 + i), 1e-6) if normed else None for i in range(2)]
        self.heads = Heads(angles.cos(), angles.sin(), *norms, width**-0.5)

    def scratch(self, rows):
        partial = torch.full((rows, self.kv, self.splits, self.group, self.width + 2), float("nan"), device=self.device)
        return Scratch(partial, torch.zeros(rows * self.kv, device=self.device, dtype=torch.int32))

    def __call__(self, source, window=0, rows=slice(None), dependent=0, tiles=1):
        caches = [cache[rows].clone() for cache in self.caches]
        n = len(caches[0])
        scratch = self.scratch(n)._replace(tiles=tiles)
        out = torch.full((n, self.kv * self.group * self.width), float("nan"), device=self.device)
        given = self.qkv[rows], self.position[rows], LayerCache(*caches), self.heads._replace(window=window)
        result = load(source, "decode_attention")(*given, scratch, out, dependent)
        assert not scratch.finished.any(), "a launch must leave its counters at zero"
        return result


@pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv, group, width", [(2, 2, 16), (1, 7, 32), (3, 1, 24)])
@pytest.mark.parametrize("normed", [False, True])
def test_agrees_with_the_reference(device, dtype, kv, group, width, normed):
    case = Case(device, dtype, [0, 5, 63, 64, 149], kv, group, width, normed=normed)
    for name, got, want in zip(("out", "k cache", "v cache"), case("triton"), case("reference")):
        assert torch.equal(got.isnan(), want.isnan()), name
        same(name, got.nan_to_num(), want.nan_to_num(), max(TOLERANCE[dtype], 1e-5))


@pytest.mark.parametrize("window", [1, 20, 64, 149])
def test_a_window_hides_what_is_older(device, window):
    case = Case(device, torch.float32, [0, 19, 20, 100, 149])
    got, want = case("triton", window)[0], case("reference", window)[0]
    same("out", got, want, 1e-5)
    if window < 149:
        assert not torch.allclose(got[-1], case("triton")[0][-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_fill_a_gpu_have_a_plan_of_their_own(device, dtype, monkeypatch):
    monkeypatch.setattr(fast, "MANY", 1)
    case = Case(device, dtype, [0, 31, 33, 149], normed=True)
    asked = plans.asked_by(lambda: case("triton", tiles=32))
    assert [job.way for job in asked] == ["many"]
    same("out", case("triton", tiles=32)[0], case("reference")[0], max(TOLERANCE[dtype], 1e-5))


@pytest.mark.parametrize("splits", [1, 2, 16])
def test_any_number_of_splits_sums_the_same(device, splits):
    case = Case(device, torch.float32, [149, 70], splits=splits)
    same("out", case("triton")[0], case("reference")[0], 1e-5)


@pytest.mark.parametrize("dependent", [0, EARLY, LATE])
@pytest.mark.parametrize("window", [0, 30])
def test_many_parts_in_every_way_of_launching(device, dependent, window):
    """Ten parts of 16 keys are combined in two trips, three in one; keys are asked for before the wait, or behind it."""
    case = Case(device, torch.float32, [0, 40, 149, 70], splits=16)
    with plans.trying(plans.job_of("decode_attention", "", (2, 8, 2, 4), case.caches[0]), AttentionPlan(16, 2, 4)):
        same("out", case("triton", window, dependent=dependent)[0], case("reference", window)[0], 1e-5)


@pytest.mark.parametrize("tiles", [3, 16])
@pytest.mark.parametrize("window", [0, 30])
def test_parts_have_as_many_tiles_as_they_are_told(device, tiles, window):
    """Of 150 keys four parts of up to 48, or one of all."""
    case = Case(device, torch.float32, [0, 40, 149, 48, 47], splits=16)
    with plans.trying(plans.job_of("decode_attention", "", (2, 8, 2, 4), case.caches[0]), AttentionPlan(16, 2, 4)):
        same("out", case("triton", window, tiles=tiles)[0], case("reference", window)[0], 1e-5)


def test_a_row_gives_the_same_bits_in_any_batch(device):
    case = Case(device, torch.float32, [3, 149, 88, 64])
    together = case("triton")[0]
    for rows in ([1], [2, 0], [3, 2, 1]):
        assert torch.equal(case("triton", rows=rows)[0], together[rows])


def several(case: Case, tokens: int, source: str, window: int = 0):
    """The case's rows as `tokens` a row, in one call: its positions are where each row's first token stands."""
    rows = len(case.position)
    generator = torch.Generator().manual_seed(9)
    qkv = torch.randn(rows * tokens, case.qkv.shape[1], generator=generator).to(case.device)
    place = case.position[:, None] + torch.arange(tokens, device=case.device, dtype=torch.int32)
    caches = [cache.clone() for cache in case.caches]
    scratch, heads = case.scratch(rows * tokens), case.heads._replace(window=window)
    out = torch.full((rows * tokens, case.kv * case.group * case.width), float("nan"), device=case.device)
    op = load(source, "decode_attention")
    together = op(qkv, place, LayerCache(*caches), heads, scratch, out)
    assert not scratch.finished.any()
    apart, alone = LayerCache(*(cache.clone() for cache in case.caches)), torch.empty_like(out)
    fewer = Scratch(scratch.partial[:rows], scratch.finished[: rows * case.kv])
    for t in range(tokens):
        mine = slice(t, None, tokens)
        one = op(qkv[mine].contiguous(), place[:, t].contiguous(), apart, heads, fewer, out[:rows].clone())
        alone[mine] = one[0]
    return together, (alone, apart.k, apart.v)


@pytest.mark.parametrize(
    ("dtype", "normed", "window"), [(torch.float32, False, 0), (torch.float16, True, 40), (torch.bfloat16, True, 0)]
)
def test_several_tokens_of_a_row_are_those_tokens_one_by_one_to_the_bit(device, dtype, normed, window):
    """From the start, inside a tile of 64 keys, across two, at its beginning, up to the last place."""
    case = Case(device, dtype, [0, 62, 64, 147], kv=1, splits=2, normed=normed)
    for source in ("triton", "reference"):
        for name, got, want in zip(("out", "k cache", "v cache"), *several(case, 3, source, window)):
            assert torch.equal(got.nan_to_num(nan=9e9), want.nan_to_num(nan=9e9)), (source, name)


def test_several_tokens_of_a_single_row(device):
    """Which of them the cache has, and whether it has the first, were once read and written in one place."""
    (out, *_), (alone, *_) = several(Case(device, torch.float32, [62]), 3, "reference")
    assert torch.equal(out, alone)


def test_what_is_wrong_with_a_later_token_stays_there(device):
    """A NaN among the values of each row's second token, and tokens beyond the cache: the first is as it was."""
    for positions in ([5, 62], [149, 148]):
        case = Case(device, torch.float32, positions)
        qkv = case.qkv.repeat_interleave(3, 0)
        qkv[1::3, -16:] = float("nan")
        place = (case.position[:, None] + torch.arange(3, device=device, dtype=torch.int32)).clamp(max=L - 1)
        for source in ("triton", "reference"):
            out, cache = torch.zeros(6, 64, device=device), LayerCache(*(cache.clone() for cache in case.caches))
            load(source, "decode_attention")(qkv, place, cache, case.heads, case.scratch(6), out)
            assert torch.equal(out[::3], case(source)[0]), (source, positions)


def test_wrong_arguments_are_named(device):
    case = Case(device, torch.float32, [3])
    cache, scratch, out = LayerCache(*case.caches), case.scratch(1), torch.zeros(1, 64, device=device)

    norm = Norm(torch.ones(16, device=device), 1e-6)

    def call(qkv=case.qkv, position=case.position, **changed):
        kernels.decode_attention(qkv, position, cache, case.heads._replace(**changed), scratch, out)

    for wrong, sentence in (
        ({"qkv": case.qkv[:, :64]}, message("kernels/decode_attention:wrong_arguments_are_named")),
        ({"position": case.position.long()}, message("kernels/decode_attention:wrong_arguments_are_named.2")),
        ({"cos": case.heads.cos[:9]}, message("kernels/decode_attention:wrong_arguments_are_named.3")),
        ({"q_norm": norm}, message("kernels/decode_attention:wrong_arguments_are_named.4")),
        (
            {"q_norm": norm, "k_norm": norm._replace(offset=1.0)},
            message("kernels/decode_attention:wrong_arguments_are_named.5"),
        ),
    ):
        with pytest.raises(ValueError) as caught:
            call(**wrong)
        assert str(caught.value) == sentence


class Special(Case):
    """Scores that are capped, a few pairs turned, or interleaved ones, norms over whole rows or with an offset."""

    def __init__(self, device, dtype, positions, pairs, whole, offset, cap, interleaved, **sizes):
        super().__init__(device, dtype, positions, normed=True, **sizes)
        angles = draw(device, torch.float32, L, pairs, seed=3)
        counts = [self.kv * self.group, self.kv] if whole else [1, 1]
        norms = [Norm(draw(device, dtype, n * self.width, seed=4 + i), 1e-6, offset) for i, n in enumerate(counts)]
        self.heads = Heads(angles.cos(), angles.sin(), *norms, self.width**-0.5, 0, cap, interleaved)


SPECIAL = [
    (8, False, 0.0, 0.5, False),
    (3, False, 1.0, 0.0, False),
    (8, True, 0.0, 0.0, False),
    (6, True, 1.0, 0.5, False),
    (8, False, 0.0, 0.0, True),
    (3, True, 0.0, 0.0, True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs, whole, offset, cap, interleaved", SPECIAL)
def test_the_forms_of_other_families_agree_with_the_reference(device, dtype, pairs, whole, offset, cap, interleaved):
    case = Special(device, dtype, [0, 63, 64, 149], pairs, whole, offset, cap, interleaved)
    for window in (0, 20):
        for name, got, want in zip(("out", "k cache", "v cache"), case("triton", window), case("reference", window)):
            assert torch.equal(got.isnan(), want.isnan()), name
            same(name, got.nan_to_num(), want.nan_to_num(), max(TOLERANCE[dtype], 1e-5))


@pytest.mark.parametrize("pairs, whole, offset, cap, interleaved", SPECIAL[1:])
def test_several_tokens_in_the_forms_of_other_families(device, pairs, whole, offset, cap, interleaved):
    case = Special(device, torch.bfloat16, [0, 62, 147], pairs, whole, offset, cap, interleaved, kv=1, splits=2)
    for source in ("triton", "reference"):
        for name, got, want in zip(("out", "k cache", "v cache"), *several(case, 3, source)):
            assert torch.equal(got.nan_to_num(nan=9e9), want.nan_to_num(nan=9e9)), (source, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dependent", [0, EARLY])
@pytest.mark.parametrize("window", [0, 20])
def test_sinks_agree_with_the_reference(device, dtype, dependent, window):
    case = Case(device, dtype, [0, 63, 64, 149], splits=16)
    case.heads = case.heads._replace(sinks=3 * draw(device, dtype, 4, seed=7))
    with plans.trying(plans.job_of("decode_attention", "", (2, 8, 2, case.caches[0].element_size()), case.caches[0]),
                      AttentionPlan(16, 2, 4)):  # fmt: skip
        got, want = case("triton", window, dependent=dependent)[0], case("reference", window)[0]
    same("out", got, want, max(TOLERANCE[dtype], 1e-5))


@torch.no_grad()
def test_the_definition_of_sinks(device):
    """A score without a value takes its share of the softmax. At position 0, v counts by the rest."""
    case = Case(device, torch.float32, [0], kv=1)
    case.heads = case.heads._replace(sinks=torch.tensor([-1.0, 2.0], device=device), cos=torch.ones_like(case.heads.cos),
                                     sin=torch.zeros_like(case.heads.sin))  # fmt: skip
    q, k, v = case.qkv[0].split([32, 16, 16])
    score = q.view(2, 16) @ k / 4
    share = 1 / (1 + (case.heads.sinks - score).exp())
    for source in ("triton", "reference"):
        same(source, case(source)[0][0], (share[:, None] * v).flatten(), 1e-5)


@torch.no_grad()
def test_the_definition_of_interleaved_pairs(device):
    """The pair (2i, 2i + 1) is rotated, and the cache has its halves apart; scores do not depend on the order."""
    case = Special(device, torch.float32, [0], 3, False, 0.0, 0.0, True, kv=1)
    out, keys, _ = case("reference")
    k, v = case.qkv[0, 32:48], case.qkv[0, 48:]
    k = k * (k.square().mean() + 1e-6).rsqrt() * case.heads.k_norm.weight
    angles = torch.complex(case.heads.cos[0], case.heads.sin[0])
    rotated = torch.view_as_complex(k[:6].view(3, 2)) * angles
    same("key", keys[0, 0, 0], torch.cat([rotated.real, rotated.imag, k[6:]]), 1e-6)
    same("out", out[0], v.repeat(2), 1e-6)


@torch.no_grad()
def test_the_definition_of_capped_scores_and_of_pairs_that_stand_still(device):
    """One row, one kv head, in torch: the first 2 · 3 dimensions turned, q and k normed over all heads of a row."""
    case = Special(device, torch.float32, [9], 3, True, 1.0, 0.5, False, kv=1)
    out, keys, _ = case("reference")
    q, k, v = case.qkv[0].split([32, 16, 16])

    def normed(x, weight):
        return x * (x.square().mean() + 1e-6).rsqrt() * (1 + weight)

    def turned(x):
        a, b, rest, c, s = x[..., :3], x[..., 3:6], x[..., 6:], case.heads.cos[9], case.heads.sin[9]
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

    q, k = turned(normed(q, case.heads.q_norm.weight).view(2, 16)), turned(normed(k, case.heads.k_norm.weight))
    same("key", keys[0, 0, 9], k, 1e-6)
    scores = torch.tanh(q @ torch.cat([case.caches[0][0, 0, :9], k[None]]).t() * 16**-0.5 / 0.5) * 0.5
    mixed = scores.softmax(-1) @ torch.cat([case.caches[1][0, 0, :9], v[None]])
    same("out", out[0], mixed.flatten(), 1e-5)
