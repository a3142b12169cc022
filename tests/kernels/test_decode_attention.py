"""One token's attention over the cache: parity, the live length alone, windows, normed heads, splits, the same bits."""

from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map_only

from gpubound import kernels
from gpubound.kernels import plans
from gpubound.kernels.decode_attention import LayerCache, listed
from gpubound.kernels.decode_product import EARLY, LATE, Norm
from gpubound.kernels.plans.types import AttentionPlan
from gpubound.kernels.registry import every, load
from gpubound.kernels.triton import decode_attention as fast
from tests.messages import refusals

from .attention_cases import NAMES, Case, L, one_by_one, parity
from .cases import DTYPES, SOURCES, TOLERANCE, agree, assert_same_bits_in_any_batch, draw, pairwise, same


def small_tiles(case: Case, way: str = ""):
    """16 keys a tile."""
    cache = case.caches[0]
    return plans.trying(plans.job_of("decode_attention", way, (2, 8, 2, cache.element_size()), cache), AttentionPlan(16, 2, 4))


@pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv, group, width", [(2, 2, 16), (1, 7, 32), (3, 1, 24)])
@pytest.mark.parametrize("normed", [False, True])
def test_agrees_with_the_reference(device, dtype, kv, group, width, normed):
    case = Case(device, dtype, [0, 5, 63, 64, 149], kv=kv, group=group, width=width, normed=normed)
    parity(case, max(TOLERANCE[dtype], 1e-5))


@pytest.mark.parametrize("window", [1, 20, 64, 149])
def test_a_window_hides_what_is_older(device, window):
    case = Case(device, torch.float32, [0, 19, 20, 100, 149], kv=1)
    parity(case, 1e-5, window=window)
    if window < 149:
        assert not torch.allclose(case("triton", window)[0][-1], case("triton")[0][-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_fill_a_gpu_have_a_plan_of_their_own(device, dtype, monkeypatch):
    monkeypatch.setattr(fast, "MANY", 1)
    case = Case(device, dtype, [0, 31, 33, 149], normed=True)
    asked = plans.asked_by(lambda: case("triton", tiles=32))
    assert [job.way for job in asked] == ["many"]
    parity(case, max(TOLERANCE[dtype], 1e-5), tiles=32)
    monkeypatch.setattr(fast, "MANY", 1024)  # programs that take several tiles have one, too
    asked = plans.asked_by(lambda: [case("triton", tiles=tiles) for tiles in (1, 8)])
    assert [job.way for job in asked] == ["", "several"]


@pytest.mark.parametrize("dependent", [EARLY, LATE])
def test_few_rows_of_many_keys_have_that_plan_too(device, dependent):
    case, how = Case(device, torch.bfloat16, [0, 31, 33, 149], normed=True), {"splits": 16, "tiles": 2, "dependent": dependent}
    asked = plans.asked_by(lambda: case("triton", many=True, **how))
    assert [job.way for job in asked] == ["many"]
    parity(case, TOLERANCE[torch.bfloat16], many=True, **how)


@pytest.mark.parametrize("splits", [1, 2, 16])
def test_any_number_of_splits_sums_the_same(device, splits):
    parity(Case(device, torch.float32, [149, 70], kv=1), 1e-5, splits=splits)


@pytest.mark.parametrize("dependent", [0, EARLY, LATE])
@pytest.mark.parametrize("window", [0, 30])
def test_many_parts_in_every_way_of_launching(device, dependent, window):
    """Ten parts of 16 keys are combined in two trips, three in one; keys are asked for before the wait, or behind it."""
    case = Case(device, torch.float32, [0, 40, 149, 70], kv=1)
    with small_tiles(case):
        parity(case, 1e-5, window=window, splits=16, dependent=dependent)


@pytest.mark.parametrize("tiles", [3, 16])
@pytest.mark.parametrize("window", [0, 30])
def test_parts_have_as_many_tiles_as_they_are_told(device, tiles, window):
    """Of 150 keys four parts of up to 48, or one of all."""
    case = Case(device, torch.float32, [0, 40, 149, 48, 47], kv=1)
    with small_tiles(case, "several"):
        parity(case, 1e-5, window=window, splits=16, tiles=tiles)


@pytest.mark.parametrize("most", [40, 160])
def test_rows_may_read_more_keys_than_they_are_known_to(device, most):
    """Three programs of 16 keys take 150 all the same, in parts of 64; ten have the parts of sixteen, and so their bits."""
    case = Case(device, torch.float32, [0, 40, 149, 48, 70], kv=1)
    with small_tiles(case):
        parity(case, 1e-5, splits=16, most=most)
        whole, bounded = (case("triton", splits=16, most=bound)[0] for bound in (0, most))
    assert most < 150 or torch.equal(whole, bounded)


@pytest.mark.parametrize("dependent", [0, EARLY])
def test_rows_have_the_parts_that_are_listed(device, dependent):
    """In any order, one for a row that is nowhere, more or fewer than a row's keys have of 16, and entries of none."""
    case = Case(device, torch.float32, [0, 40, 149, 48, -1], kv=1)
    counts = {2: 10, 1: 3, 3: 2, 0: 2, 4: 1}
    entries = [listed(row, part, count) for row, count in counts.items() for part in range(count)]
    with small_tiles(case):
        parts = torch.tensor([*entries[::-1], -1, -1], device=device, dtype=torch.int32)
        parity(case, 1e-5, splits=16, dependent=dependent, parts=parts)


def test_a_row_gives_the_same_bits_in_any_batch(device):
    assert_same_bits_in_any_batch(Case(device, torch.float32, [3, 149, 88, 64]))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("dtype", "normed", "window"), [(torch.float32, False, 0), (torch.float16, True, 40), (torch.bfloat16, True, 0)]
)
def test_several_tokens_of_a_row_are_those_tokens_one_by_one_to_the_bit(device, source, dtype, normed, window):
    """From the start, inside a tile of 64 keys, across two, at its beginning, up to the last place."""
    one_by_one(Case(device, dtype, [0, 62, 64, 147], kv=1, tokens=3, normed=normed), source, window)


def test_several_tokens_of_a_single_row(device):
    """Which of them the cache has, and whether it has the first, were once read and written in one place."""
    one_by_one(Case(device, torch.float32, [62], tokens=3), "reference")


@pairwise
@pytest.mark.parametrize("tokens", [2, 5, 16])
@pytest.mark.parametrize("dependent", [0, EARLY])
@pytest.mark.parametrize("window", [0, 2, 20])
@pytest.mark.parametrize("splits", [1, 3, 6])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"kind": "int8", "paged": True},
        {"kind": "fp8"},
        {"paged": True, "normed": True, "offset": 1.0},
        {"gated": True, "interleaved": True, "cap": 5.0, "pairs": 4},
        {"new": 1, "v_eps": 1e-6},
        {"new": 0},
        {"normed": True, "whole": True},
    ],
)
def test_tokens_of_a_row_together_agree_with_the_reference(device, tokens, dependent, window, splits, form):
    """From the start, before, at and behind the borders of tiles of 16 keys, and up to the last place. The new keys are a
    separate part beyond one part of others, where there is room for it."""
    kv = 2 if "paged" in form else 1
    begins = [15, L - tokens] if "whole" in form else [0, 15, 17, 64, L - tokens]  # each token has programs of its own there
    case = Case(device, torch.float32, begins, kv=kv, tokens=tokens, **form)
    if "cap" in form:
        case.heads = case.heads._replace(sinks=draw(device, torch.float32, 2, seed=9))
    size = 4 if "kind" in form else case.caches[0].element_size()
    job = plans.job_of("decode_attention", "", (2 * tokens, 8, 2, size), case.caches[0])
    with plans.trying(job, AttentionPlan(16, 2, 4)):
        parity(case, 1e-5, window=window, splits=splits, dependent=dependent, together=True)


def test_tokens_together_where_the_cache_has_no_place_for_some(device):
    """A row that begins nowhere, one whose last token is beyond the end, and a NaN among the values of a second token."""
    case = Case(device, torch.float32, [-1, L, 5, L - 2, 62], tokens=3)
    case.qkv[4 * 3 + 1, -16:] = float("nan")
    parity(case, 1e-5, together=True)


def test_what_is_wrong_with_a_later_token_stays_there(device):
    """A NaN among the values of each row's second token, and tokens beyond the cache: the first is as it was."""
    for positions in ([5, 62], [149, 148]):
        case = Case(device, torch.float32, positions, kv=1)
        qkv = case.qkv.repeat_interleave(3, 0)
        qkv[1::3, -16:] = float("nan")
        place = (case.position[:, None] + torch.arange(3, device=device, dtype=torch.int32)).clamp(max=L - 1)
        for source in SOURCES:
            out, cache = torch.zeros(6, 32, device=device), LayerCache(*(cache.clone() for cache in case.caches))
            load(source, "decode_attention")(qkv, place, cache, case.heads, case.scratch(6), out)
            assert torch.equal(out[::3], case(source)[0]), (source, positions)


def test_wrong_arguments_are_named(device):
    case = Case(device, torch.float32, [3])
    cache, scratch, out = LayerCache(*case.caches), case.scratch(1), torch.zeros(1, 64, device=device)

    norm = Norm(torch.ones(16, device=device), 1e-6)

    def call(qkv=case.qkv, position=case.position, **changed):
        kernels.decode_attention(qkv, position, cache, case.heads._replace(**changed), scratch, out)

    refusals(
        "kernels/decode_attention:wrong_arguments_are_named",
        partial(call, qkv=case.qkv[:, :48]),
        partial(call, position=case.position.long()),
        partial(call, cos=case.heads.cos[:9]),
        partial(call, q_norm=norm),
        partial(call, q_norm=norm, k_norm=norm._replace(offset=1.0)),
    )


def special(device, dtype, positions, pairs, whole, offset, cap, interleaved, **sizes) -> Case:
    """Scores that are capped, a few pairs rotated, or interleaved ones, norms over whole rows or with an offset."""
    form = {"pairs": pairs, "whole": whole, "offset": offset, "cap": cap, "interleaved": interleaved}
    return Case(device, dtype, positions, normed=True, **form, **sizes)


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
    case = special(device, dtype, [0, 63, 64, 149], pairs, whole, offset, cap, interleaved)
    parity(case, max(TOLERANCE[dtype], 1e-5), window=20 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("form", SPECIAL[1:])
def test_several_tokens_in_the_forms_of_other_families(device, source, form):
    one_by_one(special(device, torch.bfloat16, [0, 62, 147], *form, kv=1, tokens=3), source)


SHARED = [(0, 0.0), (1, 0.0), (1, 1e-6), (2, 1e-2)]


@pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dependent", [0, EARLY])
@pytest.mark.parametrize(("new", "v_eps"), SHARED)
@pytest.mark.parametrize("form", [{}, {"paged": True}, {"kind": "int8"}], ids=str)
def test_shared_keys_and_normed_values_agree_with_the_reference(device, dtype, dependent, new, v_eps, form):
    kv = 2 if "paged" in form else 1
    case = Case(device, dtype, [0, 5, 63, 64, 149], kv=kv, normed=True, new=new, v_eps=v_eps, **form)
    parity(case, max(TOLERANCE[dtype], 1e-5), window=70, dependent=dependent)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("new", "v_eps"), SHARED[:3])
def test_several_tokens_over_shared_keys(device, source, new, v_eps):
    one_by_one(Case(device, torch.float32, [0, 62, 147], kv=1, tokens=3, normed=True, new=new, v_eps=v_eps), source)


def test_the_definition_of_shared_keys_and_normed_values(device):
    """A key that is the value too, then an earlier layer's keys and values in the cache: as of three products with them."""
    three = Case(device, torch.float32, [0, 9, 149], normed=True, v_eps=1e-2)
    q, k, _ = three.qkv.split([64, 32, 32], -1)
    three.qkv = torch.cat([q, k, k], -1)
    want, *caches = three("reference")
    three.qkv = torch.cat([q, k], -1)
    for name, one, other in zip(NAMES, three("reference"), (want, *caches)):
        same(name, one.nan_to_num(), other.nan_to_num(), 0.0)  # NaN beyond the tokens
    three.qkv = q.contiguous()
    same("out", three("reference", caches=list(caches))[0], want, 0.0)
    factor = k.view(3, 2, 16).square().mean(-1, keepdim=True).add(1e-2).rsqrt()
    torch.testing.assert_close(caches[1][range(3), :, [0, 9, 149]], k.view(3, 2, 16) * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dependent", [0, EARLY])
@pytest.mark.parametrize("window", [0, 20])
def test_sinks_agree_with_the_reference(device, dtype, dependent, window):
    case = Case(device, dtype, [0, 64, 149], kv=1)
    case.heads = case.heads._replace(sinks=3 * draw(device, dtype, 2, seed=7))
    with small_tiles(case):
        parity(case, max(TOLERANCE[dtype], 1e-5), window=window, splits=4, dependent=dependent)


@pytest.mark.parametrize("shared, whole", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("op", ["decode_attention", "quantized_decode_attention"])
def test_q_k_and_v_as_parts_of_a_sum(device, op, shared, whole):
    """Of split products, with norms of whole rows too, which read all of a row."""
    form = 8, whole, 0.0, 0.0, False, False, False, 2, 0.0, shared, True
    given = every()[op].example(torch.Generator().manual_seed(0), 2, 2, 16, *form)
    agree(op, *tree_map_only(torch.Tensor, lambda t: t.detach().to(device), given), scratch=[4])
    rest = given[1:]
    gated = rest[2]._replace(gated=True, q_norm=None, k_norm=None)
    refusals(
        "kernels/decode_attention:parts_of_gated_heads",
        lambda: kernels.decode_attention(torch.zeros(3, 2, 192), rest[0], rest[1]._replace(shared=None), gated, *rest[3:]),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "dependent"), [(torch.float32, EARLY), (torch.bfloat16, 0)])
def test_gated_heads_are_heads_times_their_gates(device, dtype, dependent):
    """A head of the product is q, then a gate; with one tile a part, or several, and of several tokens a row."""
    case = Case(device, dtype, [0, 63, 64, 149], normed=True, pairs=3, offset=1.0, gated=True)
    with small_tiles(case):
        for splits in (1, 16):
            parity(case, max(TOLERANCE[dtype], 1e-5), splits=splits, dependent=dependent)
    q, gates = case.qkv[:, :128].view(4, 4, 2, 16).unbind(2)
    plain = Case(device, dtype, [0, 63, 64, 149], normed=True, pairs=3, offset=1.0)
    plain.qkv = torch.cat([q.flatten(1), case.qkv[:, 128:]], 1).contiguous()
    want = plain("reference")[0].float() * gates.flatten(1).sigmoid()
    same("out", case("reference")[0].float(), want, max(TOLERANCE[dtype], 1e-5))
    one_by_one(Case(device, dtype, [0, 62, 147], kv=1, tokens=3, gated=True), "triton")


@torch.no_grad()
def test_the_definition_of_sinks(device):
    """A score without a value takes its share of the softmax. At position 0, v counts by the rest."""
    case = Case(device, torch.float32, [0], kv=1)
    case.heads = case.heads._replace(sinks=torch.tensor([-1.0, 2.0], device=device), cos=torch.ones_like(case.heads.cos),
                                     sin=torch.zeros_like(case.heads.sin))  # fmt: skip
    q, k, v = case.qkv[0].split([32, 16, 16])
    score = q.view(2, 16) @ k / 4
    share = 1 / (1 + (case.heads.sinks - score).exp())
    for source in SOURCES:
        same(source, case(source)[0][0], (share[:, None] * v).flatten(), 1e-5)


@torch.no_grad()
def test_the_definition_of_interleaved_pairs(device):
    """The pair (2i, 2i + 1) is rotated, and the cache has its halves apart; scores do not depend on the order."""
    case = special(device, torch.float32, [0], 3, False, 0.0, 0.0, True, kv=1)
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
    case = special(device, torch.float32, [9], 3, True, 1.0, 0.5, False, kv=1)
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


FORMS: list[dict] = [{}, {"kind": "int8"}, {"paged": True}, {"new": 0}, {"new": 1, "v_eps": 1e-6}, {"gated": True}]


@pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dependent", [0, EARLY, LATE])
def test_each_query_head_may_have_its_own_programs(device, dtype, form, window, dependent):
    """Nobody writes the new token's key twice, and all count separately: parts of one head would be combined with another's."""
    case = Case(device, dtype, [0, 5, 64, 149], kv=2 if "paged" in form else 1, group=3, normed=True, **form)
    job = plans.job_of("decode_attention", "by query", (3, 8, 2, case.caches[0].element_size()), case.caches[0])
    with plans.trying(job, AttentionPlan(16, 1, 2)):
        parity(case, max(TOLERANCE[dtype], 1e-5), window=window, splits=4, dependent=dependent, by_query=True)
