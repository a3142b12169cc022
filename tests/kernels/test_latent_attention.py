"""Attention over latents: its definition against attention over expanded keys, and the kernels against the definition."""

from functools import partial

import pytest
import torch

from gpubound import kernels
from gpubound.kernels import plans
from gpubound.kernels.decode_product import EARLY, Norm
from gpubound.kernels.latent_attention import LatentCache, LatentScratch
from gpubound.kernels.plans.types import LatentPlan
from gpubound.kernels.registry import load
from gpubound.kernels.rope import apart, rotate
from tests.messages import refusals

from .attention_cases import L, into_pages, out_of_pages, shuffled
from .cases import DTYPES, SOURCES, TOLERANCE, assert_same_bits_in_any_batch, draw, pairwise, same


class Case:
    """`tokens` of each row from its position on, over a cache that is NaN wherever no token may look."""

    def __init__(
        self, device, dtype, positions, heads=3, plain=24, value=20, rank=24, pairs=4, tokens=1, paged=False, interleaved=True
    ):
        self.device, self.dtype, self.heads, self.pairs, self.rank, self.value = device, dtype, heads, pairs, rank, value
        self.tokens, self.interleaved, rows, width = tokens, interleaved, len(positions), rank + 2 * pairs
        first = torch.tensor(positions, device=device, dtype=torch.int32)
        self.position = first[:, None] + torch.arange(tokens, device=device, dtype=torch.int32) if tokens > 1 else first
        self.q = draw(device, torch.float32, rows * tokens, heads * (plain + 2 * pairs))
        self.latent = draw(device, torch.float32, rows * tokens, width, seed=5)
        self.norm, self.up = (
            Norm(draw(device, dtype, rank, seed=2), 1e-6),
            draw(device, dtype, heads * (plain + value), rank, seed=6),
        )
        angles = draw(device, torch.float32, L, pairs, seed=3)
        self.cos, self.sin = angles.cos(), angles.sin()
        cache = draw(device, dtype, rows, 1, L, width, seed=1)
        for row, position in enumerate(positions):
            cache[row, :, position:] = float("nan")
        self.pages = shuffled(rows, device) if paged else None
        self.cache, self.table = into_pages(cache, self.pages), self.pages

    def __call__(self, source, rows=None, part=None, cache=None, splits=4, tiles=1, dependent=0):
        """Return (out, the cache's rows). rows: of the batch, those alone; part: of the tokens of each row, that one alone."""
        q, latent, position = self.q, self.latent, self.position
        cache = self.cache.clone() if cache is None else cache
        if rows is not None:
            q, latent, position, cache = q[rows], latent[rows], position[rows], cache[rows]
        if part is not None:
            q, latent, position = q[part :: self.tokens], latent[part :: self.tokens], position[:, part].contiguous()
        latents, N = LatentCache(cache, self.table), len(q)
        queries = torch.empty(N, self.heads, latents.latents.shape[3], device=self.device, dtype=self.dtype)
        load(source, "latent_queries")(
            q, latent, position, self.norm, self.up, self.cos, self.sin, latents, queries, self.interleaved, dependent
        )
        sums = torch.full((N, splits, self.heads, self.rank), float("nan"), device=self.device)
        scratch = LatentScratch(sums, torch.full((N, splits, self.heads, 2), float("nan"), device=self.device), tiles)
        out = torch.empty(N, self.heads * self.value, device=self.device, dtype=self.dtype)
        load(source, "latent_attention")(queries, position, latents, self.up, 0.2, scratch, out, dependent)
        return out, out_of_pages(cache, self.pages)


def parity(case: Case, **call) -> None:
    for name, got, want in zip(("out", "latents"), *(case(source, **call) for source in SOURCES)):
        assert torch.equal(got.isnan(), want.isnan()), name
        same(name, got.nan_to_num(), want.nan_to_num(), max(4 * TOLERANCE[case.dtype], 1e-5))


@torch.no_grad()
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_results_are_those_of_attention_over_expanded_keys_and_values(device, source, interleaved):
    case = Case(device, torch.float32, [0, 37, 149], interleaved=interleaved)
    out, latents = case(source)
    R, H = case.rank, case.heads
    for row, position in enumerate(case.position.tolist()):
        new, turn = case.latent[row], [table[position] for table in (case.cos, case.sin)]
        key = new[R:]
        own = torch.cat([
            new[:R] / (new[:R].square().mean() + 1e-6).sqrt() * case.norm.weight,
            rotate(apart(key, 4) if interleaved else key, *turn),
        ])  # fmt: skip
        same("latent", latents[row, 0, position], own, 1e-6)
        kept = torch.cat([case.cache[row, 0, :position], own[None]])
        k, v = (kept[:, :R] @ case.up.t()).unflatten(1, (H, -1)).split([24, 20], -1)
        k = torch.cat([k, kept[:, None, R:].expand(-1, H, -1)], -1)
        q = case.q[row].view(H, 32)
        rotated = rotate(apart(q[:, 24:], 4) if interleaved else q[:, 24:], *turn)
        scores = torch.einsum("hd,lhd->hl", torch.cat([q[:, :24], rotated], -1), k) * 0.2
        same("out", out[row], torch.einsum("hl,lhv->hv", scores.softmax(-1), v).flatten(), 1e-5)


@pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, plain, value, rank, pairs", [(3, 24, 20, 24, 4), (20, 70, 16, 64, 8), (1, 16, 40, 130, 3)])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dependent", [0, EARLY])
def test_agrees_with_the_reference(device, dtype, heads, plain, value, rank, pairs, paged, tokens, dependent):
    sizes = {"heads": heads, "plain": plain, "value": value, "rank": rank, "pairs": pairs}
    parity(Case(device, dtype, [0, 63, 64, 147], tokens=tokens, paged=paged, **sizes), dependent=dependent)


@pytest.mark.parametrize("splits, tiles", [(1, 1), (3, 1), (16, 1), (16, 3)])
def test_keys_are_split_in_any_number_of_parts(device, splits, tiles):
    case = Case(device, torch.float32, [0, 40, 149])
    job = plans.job_of("latent_attention", "", (3, 24, 8), case.cache)
    with plans.trying(job, LatentPlan(16, 16, 2, 4)):
        parity(case, splits=splits, tiles=tiles)


def test_a_row_gives_the_same_bits_in_any_batch(device):
    assert_same_bits_in_any_batch(Case(device, torch.float32, [3, 149, 88, 64]))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype, paged", [(torch.float32, False), (torch.bfloat16, True)])
def test_several_tokens_of_a_row_are_those_tokens_one_by_one_to_the_bit(device, source, dtype, paged):
    case = Case(device, dtype, [0, 62, 147], tokens=3, paged=paged)
    together, cache = case(source)[0], case.cache.clone()
    alone = torch.empty_like(together)
    for t in range(3):
        alone[t::3] = case(source, part=t, cache=cache)[0]
    assert torch.equal(together, alone)


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_wrong_with_a_later_token_stays_there(device, source):
    """A NaN in each row's second token, and tokens beyond the cache: the first is as it was."""
    for positions in ([5, 62], [149, 148]):
        case = Case(device, torch.float32, positions)
        alone = case(source)[0]
        case.q, case.latent = (t.repeat_interleave(3, 0) for t in (case.q, case.latent))
        case.latent[1::3] = float("nan")
        case.tokens, steps = 3, torch.arange(3, device=device, dtype=torch.int32)
        case.position = (case.position[:, None] + steps).clamp(max=L - 1)
        assert torch.equal(case(source)[0][::3], alone), positions


@pytest.mark.parametrize("source", SOURCES)
def test_places_outside_the_cache_are_nan_and_write_nothing(device, source):
    case = Case(device, torch.float32, [-1, L, 5])
    out, latents = case(source)
    assert out[:2].isnan().all() and out[2].isfinite().all()
    assert torch.equal(latents[:2].nan_to_num(7.0), case.cache[:2].nan_to_num(7.0))


@pytest.mark.parametrize("source", SOURCES)
def test_a_page_that_does_not_exist_is_nan(device, source):
    case = Case(device, torch.float32, [130, 20, 80], paged=True)
    case.table = case.pages.clone()
    case.table[0, 1], case.table[1, 0] = 99, -1
    out, latents = case(source)  # a row of an old key, and one of the new key alone
    assert out[:2].isnan().all() and out[2].isfinite().all()
    assert torch.equal(latents[1].nan_to_num(7.0), out_of_pages(case.cache, case.pages)[1].nan_to_num(7.0))


def test_wrong_arguments_are_named():
    case = Case(torch.device("cpu"), torch.float32, [3])
    cache, queries = LatentCache(case.cache), torch.zeros(1, 3, 32)
    scratch = LatentScratch(torch.zeros(1, 4, 3, 24), torch.zeros(1, 4, 3, 2))
    out = torch.zeros(1, 60)

    def project(q=case.q, position=case.position, cos=case.cos, up=case.up, latent=case.latent):
        kernels.latent_queries(q, latent, position, case.norm, up, cos, case.sin, cache, queries)

    def attend(q=queries, scratch=scratch, out=out):
        kernels.latent_attention(q, case.position, cache, case.up, 0.2, scratch, out)

    refusals(
        "kernels/latent_attention:wrong_arguments_are_named",
        partial(project, q=case.q[:, :95]),
        partial(project, latent=case.latent[:, :31]),
        partial(project, position=case.position.long()),
        partial(project, cos=case.cos[:, :3]),
        partial(project, up=case.up[:131]),
        partial(attend, q=queries[:, :, :30]),
        partial(attend, scratch=scratch._replace(weights=scratch.sums)),
        partial(attend, out=out[:, :59].contiguous()),
    )
