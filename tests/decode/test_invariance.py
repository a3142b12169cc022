"""A sequence's tokens depend on its prompt, the weights and the seed; not on its place, its neighbours or the launches."""

import pytest
import torch

import gpubound as gb
from gpubound.decode.request import draws

from . import cases

SAMPLED = {"temperature": 1.0, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 7}
WAYS = pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])


def tokens(fast, prompts, **settings):
    return fast.generate(prompts, **{"max_new_tokens": 12, **settings}).tokens


@pytest.mark.slow
@WAYS
def test_the_steps_of_a_launch_do_not_matter(how, device):
    want = cases.shared("Mistral", str(device)).generate(cases.prompts(), max_new_tokens=40, **how).tokens
    for k, launches in ((1, 40), (8, 1 + 4 + 7), (32, 1 + 1 + 7)):  # one step first, then k, then what is left by ones
        fast = cases.shared("Mistral", str(device), k=k)
        assert fast.ladder == ((k, 1) if k > 1 else (1,))
        found = fast.generate(cases.prompts(), max_new_tokens=40, **how)
        assert found.tokens == want and found.launches == launches


@pytest.mark.slow
def test_behind_many_steps_the_last_launch_may_overshoot():
    """The last 7 of 256 are one launch of 8; the step too many is in nobody's tokens and in no roofline."""
    model = cases.build("Llama", num_hidden_layers=1, max_position_embeddings=300)
    found = gb.decoder(model, 1, 300, verify=False).generate([5], max_new_tokens=256)
    assert (found.launches, found.steps, found.count) == (12, 257, 256)
    one = gb.decoder(model, 1, 300, k=1, verify=False).generate([5], max_new_tokens=256)
    assert (one.launches, one.steps, one.bytes_read) == (256, 256, found.bytes_read) and one.tokens == found.tokens


@pytest.mark.slow
def test_where_a_step_reads_much_no_step_is_too_many(monkeypatch):
    monkeypatch.setattr("gpubound.decode.running.HEAVY", 0)
    model = cases.build("Llama", num_hidden_layers=1, max_position_embeddings=300)
    found = gb.decoder(model, 1, 300, verify=False).generate([5], max_new_tokens=256)
    assert (found.launches, found.steps, found.count) == (11 + 7, 256, 256)


def test_launches_grow_and_then_shrink_near_the_end():
    found = cases.shared("Mistral").generate([3, 4], max_new_tokens=50)
    assert (found.launches, found.steps) == (5, 50)  # of 1, 8, 32, 8 and 1


@WAYS
def test_rows_in_another_order(how, device):
    fast = cases.shared("Mistral", str(device))
    given = cases.prompts(5, 1, 19, 6)
    found, order = tokens(fast, given, **how), [2, 0, 3, 1]
    assert tokens(fast, [given[row] for row in order], **how) == [found[row] for row in order]


@WAYS
def test_neighbours_paddings_and_buckets(how, device):
    """Alone, beside a longer prompt, among three (launched as four), in a decoder whose largest bucket is no power of two."""
    fast = cases.shared("Mistral", str(device))
    short, long, other = cases.prompts(6, 40, 11)
    want = tokens(fast, short, **how)[0]
    assert fast.bucket(3) == 4
    assert tokens(fast, [short, long], **how)[0] == tokens(fast, [long, other, short], **how)[2] == want
    odd = cases.shared("Mistral", str(device), max_batch=3)
    assert odd.bucket(3) == 3
    assert tokens(odd, [long, other, short], **how)[2] == want


def test_wide_batches_have_products_of_their_own_and_the_same_tokens(device):
    fast = cases.shared("Qwen3", str(device), max_batch=11)
    given = cases.prompts(*range(1, 12))
    assert tokens(fast, given) == [tokens(fast, prompt)[0] for prompt in given]


def test_what_an_earlier_request_left_does_not_matter(device):
    fast = cases.shared("Mistral", str(device))
    want = tokens(fast, cases.prompts(3))
    tokens(fast, cases.prompts(60, 50, 40, 30), **SAMPLED, stop=[5, 6])
    assert tokens(fast, cases.prompts(3)) == want


def test_a_seed_reproduces_and_another_differs(device):
    fast = cases.shared("Mistral", str(device))
    found = [tokens(fast, cases.prompts(4), temperature=1.5, seed=seed)[0] for seed in (1, 1, 2, -3, 2**62)]
    assert found[0] == found[1]
    assert len({tuple(row) for row in found}) == 4


def test_copies_of_a_prompt_draw_for_themselves():
    """Whether asked for by n or given several times."""
    fast = cases.shared("Mistral")
    prompt, other = cases.prompts(4, 4)
    found = tokens(fast, prompt, n=3, temperature=1.5)
    assert len({tuple(row) for row in found}) == 3
    assert tokens(fast, [prompt, other, prompt, prompt], temperature=1.5)[0::2] == found[:2]
    assert tokens(fast, prompt, temperature=1.5)[0] == found[0]


def test_prompts_do_not_share_their_luck():
    """With one number for all, prompts of one length and near distributions would draw alike."""
    numbers = draws(cases.prompts(*[5] * 200))
    assert len(set(numbers)) == 200 and all(0 <= number < 2**31 for number in numbers)
    prompt = cases.prompts(5)[0]
    first, second, third = draws([prompt, [1], prompt])[0::2] + draws([prompt])
    assert (second - first) % 2**31 == 1 and third == first


def test_sampled_tokens_have_the_probabilities_of_the_settings():
    """Chi-square over 4,000 draws of one next token: top-k, top-p and min-p together."""
    model = cases.build("Qwen3")
    fast = gb.decoder(model, 500, 16, verify="quick")
    prompt, settings = cases.prompts(5)[0], {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.03}
    drawn = torch.zeros(cases.VOCABULARY)
    for seed in range(8):
        for row in fast.generate(prompt, n=500, max_new_tokens=1, seed=seed, **settings).tokens:
            drawn[row[0]] += 1
    p = (cases.logits(model, prompt)[-1].double() / 1.3).softmax(-1)
    order = p.sort(descending=True)
    kept = order.values[:12] / order.values[:12].sum()
    count = int((kept.cumsum(0) < 0.9).sum()) + 1
    kept = order.values[:count][order.values[:count] >= 0.03 * order.values[0]]
    assert 3 < len(kept) < 12
    want = kept / kept.sum() * 4000
    assert drawn.sum() == drawn[order.indices[: len(kept)]].sum() == 4000
    chi_square = ((drawn[order.indices[: len(kept)]] - want) ** 2 / want).sum().item()
    # 3 sigma above the mean: len - 1, variance 2 (len - 1). The seeds are fixed, so this passes or fails once for all.
    assert chi_square < len(kept) - 1 + 3 * (2 * (len(kept) - 1)) ** 0.5
