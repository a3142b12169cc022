"""A cache in pages that all rows share: the tokens of rows side by side, whose pages are whose, what is freed and refused.

And on a GPU every form of a cache: graphs, the host's waiting, the bits.
"""

import pytest
import torch

import gpubound as gb
from gpubound.decode.kv_cache import Cache, CachedLayer, PagePool
from gpubound.decode.runner import RunnerConfig
from gpubound.kernels.invariant import MEMBERS
from gpubound.watch import watch
from tests.messages import message, refusal

from . import cases
from .test_cache import FORM, KINDS, SAMPLED, tokens
from .test_gpu import eagerly, served


# Pages know neither family nor kind: each stands here with each of two others.
@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [("Llama", None), ("Qwen3", "int8"), ("own", "fp8")])
def test_pages_give_the_tokens_of_rows_side_by_side(family, kind, device):
    """Greedy and drawn, by text and by draft, over pages that do not suffice for all rows at full length."""
    whole, paged = (cases.shared(family, str(device), cache=kind, pages=pages) for pages in (None, 5))
    given = cases.prompts(1, 40, 6, 30)
    for how in ({}, SAMPLED, {"logprobs": True}, {"stop": [3, 4, 5, 6]}):
        found = [fast.generate(given, max_new_tokens=8, **how).sequences for fast in (paged, whole)]
        assert found[0] == found[1]
    prompt = cases.prompts(80)[0]
    assert tokens(paged, prompt, max_new_tokens=None) == tokens(whole, prompt, max_new_tokens=None)  # to the last place
    assert paged.score(given) == whole.score(given)


def test_memory_is_that_of_the_pages():
    model = cases.build("Qwen3", torch.bfloat16)
    whole, paged = (gb.decoder(model, 16, 256, pages=pages, verify="quick").body.cache.nbytes for pages in (None, 20))
    assert paged / whole == (20 + 1) * 64 / (16 * 256)


def test_rows_that_share_a_prompt_are_listed_in_lines():
    """Nineteen rows of one prompt take two lines; a row alone reads all keys itself."""
    layers = {0: CachedLayer(1, 8)}
    cache = Cache(RunnerConfig(40, 128), layers, torch.float32, torch.device("cpu"))
    cache.group([[1, 2], [39], list(range(20, 39)), list(range(3, 3 + MEMBERS + 1))], list(range(100, 140)))
    lines = [[row for row in line if row >= 0] for line in cache.common.rows.tolist()]
    assert lines[:5] == [[1, 2], [*range(20, 36)], [36, 37, 38], [*range(3, 19)], [19]] and not any(lines[5:])
    alone = [0, 39]
    assert cache.common.counts.tolist() == [0 if row in alone else 100 + row for row in range(40)]


class TestPages:
    def test_rows_have_pages_of_their_own_and_as_many_as_they_may_fill(self, device):
        fast = cases.shared("Llama", str(device), max_batch=4, pages=9)
        table = fast.body.cache.pages
        for lengths, new, counts in (((60, 3, 1), 5, (2, 1, 1, 0)), ((1,), 90, (2,)), ((40, 41, 42, 43), 30, (2, 2, 2, 2))):
            tokens(fast, cases.prompts(*lengths), max_new_tokens=new)
            given = [set(row.tolist()) - {0} for row in table]
            assert tuple(map(len, given))[: len(counts)] == counts
            used = set.union(*given[: len(counts)])
            assert len(used) == sum(counts) and used == set(range(1, 1 + sum(counts)))
            for row, count in zip(table.tolist(), counts):
                assert row[count:] == [0] * (2 - count) and 0 not in row[:count]

    @pytest.mark.slow
    def test_what_an_earlier_request_left_in_a_page_does_not_matter(self, device):
        for form in ({"pages": 5}, {"pages": 5, "cache": "int8"}):
            fast = cases.shared("Llama", str(device), max_batch=3, **form)
            asked = [(cases.prompts(58), 9), (cases.prompts(60, 50), 7), (cases.prompts(7, 8, 9), 7)]
            want = []
            for given, new in asked:
                fast.body.cache.poison()
                want.append(tokens(fast, given, max_new_tokens=new, **SAMPLED))
            for poison in (False, True):
                for (given, new), found in [*zip(asked, want)][::-1]:
                    if poison:
                        fast.body.cache.poison()
                    next(fast.stream(cases.prompts(30, 20), max_new_tokens=8))  # and left
                    assert tokens(fast, given, max_new_tokens=new, **SAMPLED) == found

    def test_a_request_that_does_not_fit_is_refused_before_anything_runs(self):
        fast = cases.shared("Llama", max_batch=3, pages=5)
        given = cases.prompts(60, 50, 3)
        assert tokens(fast, given, max_new_tokens=14) and tokens(fast, given[:2], max_new_tokens=None)
        held = [fast.body.cache.pages, *(t.view(torch.uint8) for t in fast.body.cache.tensors)]  # bytes: NaN is no NaN's equal
        before = [t.clone() for t in held]
        assert refusal(ValueError, lambda: fast.stream(given, max_new_tokens=None)) == message(
            "decode/pages:a_request_that_does_not"
        )
        assert all(torch.equal(now, then) for now, then in zip(held, before))
        assert tokens(fast, given, max_new_tokens=14)  # ready for the next


class TestPool:
    def test_pages_that_rows_share_are_free_when_the_last_row_has_ended(self, device):
        cache = gb.decoder(cases.build("Llama", device=device), 4, 256, pages=9, verify=False).body.cache
        pool = PagePool(cache)
        assert pool.give(0, 200) and pool.give(2, 250, 0, 150) and pool.give(3, 10)
        assert pool.rows[2][:2] == pool.rows[0][:2] and len(pool.free) == 9 - 4 - 2 - 1
        pool.upload()
        assert cache.pages.tolist() == [row + [0] * (4 - len(row)) for row in pool.rows]
        rows = torch.tensor([[0, 2], [3, 3]], device=device)
        second = [[-1, -1, *pool.rows[2][2:]], [-1] * 4]
        assert cache.copies(rows)[:, 1].tolist() == second and torch.equal(cache.copies(rows)[:, 0], cache.pages[rows[:, 0]])
        assert not pool.give(1, 200) and not pool.fits(200, [3]) and pool.fits(200, [2]) and pool.fits(129, [3])
        kept = pool.rows[0][:3]
        assert pool.give(0, 250, 0, 150) and pool.rows[0][:3] == kept  # its own ones, the last of them not full
        for row in range(4):
            pool.take(row)
        assert sorted(pool.free) == list(range(1, 10)) and not any(pool.users)

    def test_what_is_behind_the_full_pages_is_copied(self, device):
        cache = gb.decoder(cases.build("Qwen3", device=device), 2, 192, pages=6, cache="int8", verify=False).body.cache
        pool = PagePool(cache)
        pool.give(0, 150), pool.give(1, 150, 0, 130)
        cache.stores[0].k.copy_(torch.arange(7, device=device).view(1, -1, 1, 1, 1).expand_as(cache.stores[0].k))
        pool.copy_tails([(0, 1, 128)])
        assert cache.stores[0].k[0, pool.rows[1][2]].unique().tolist() == [pool.rows[1][2]]
        pool.copy_tails([(0, 1, 130)])
        assert cache.stores[0].k[0, pool.rows[1][2]].unique().tolist() == [pool.rows[0][2]]


@pytest.mark.slow
@FORM
def test_steps_never_wait_for_the_device(form, sim):
    fast = gb.decoder(cases.build("Mistral", device=sim), 2, 32, verify=False, **form)
    assert fast.path == ""
    fast.generate(cases.prompts(5, 3), max_new_tokens=1, temperature=1.0, repetition_penalty=1.1)
    cases.assert_never_waits(fast.graphs.run, 2)
    with watch() as ledger:
        fast.generate(cases.prompts(5, 3), max_new_tokens=3)
    assert ledger.totals["syncs"] == 0, str(ledger)


@pytest.mark.gpu
@FORM
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_graphs_over_every_form_give_what_single_launches_give(form, rows, monkeypatch):
    form = form | ({"pages": 48} if "pages" in form else {})
    fast, given = served("Mistral", **form), cases.prompts(*range(60, 60 + rows))
    asked = ({}, {"temperature": 1.0, "top_p": 0.95, "seed": 3, "logprobs": True})
    found = [fast.generate(given, max_new_tokens=75, **how).sequences for how in asked for _ in range(2)]
    assert found[0] == found[1] and found[2] == found[3]  # the second from a captured prefill, too
    eagerly(fast, monkeypatch)
    assert [fast.generate(given, max_new_tokens=75, **how).sequences for how in asked] == found[::2]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("drafted", [None, 4])
def test_pages_give_the_bits_of_rows_side_by_side_on_the_device(kind, drafted):
    """Log-probabilities too, after prompts across several pages.

    Drafts are taken always: of three rows, plain steps round otherwise, and when they are taken is a matter of measured times.
    """
    given, found = cases.prompts(200, 70, 3), []
    for pages in (None, 20):
        speculate = drafted and gb.Draft(None, drafted, adaptive=False)
        fast = served("Qwen3", max_batch=4, cache=kind, pages=pages, speculate=speculate)
        found.append([fast.generate(given, max_new_tokens=90, logprobs=True, **how).sequences for how in ({}, SAMPLED)])
    assert found[0] == found[1]


@pytest.mark.gpu
@FORM
def test_a_request_waits_for_nothing_on_the_device(form):
    fast = gb.decoder(cases.build("Qwen3", torch.bfloat16, torch.device("cuda", 0)), 4, cases.ROOM, **form)
    cases.assert_no_syncs(fast, cases.prompts(), seed=1)
