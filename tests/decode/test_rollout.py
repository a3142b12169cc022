"""Rollouts: a queue longer than the batch, rows that are given the next sequence, and what a sequence depends on."""

import pytest
import torch

import gpubound as gb
from gpubound.decode import cpu_step, generate, kv_cache, rollout, runner
from gpubound.watch import no_stall, watch
from tests.messages import message, refusal

from . import cases

LENGTHS = [3, 14, 5, 8, 11]
PROMPTS = cases.prompts(5, 1, 19, 6, 30)


def by_name(sequences) -> dict[tuple[int, int], list[int]]:
    return {(one.prompt, one.sample): one.tokens for one in sequences}


def assert_as_generated(fast, found):
    for one in found[1::2]:
        how = {"temperature": 1.0, "logprobs": True, "seed": one.seed, "max_new_tokens": LENGTHS[one.prompt]}
        want = fast.generate(PROMPTS[one.prompt], **how).sequences[0]
        assert one.tokens == want.tokens
        assert one.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        assert one.finish == want.finish.partition(" ")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Mistral", {}),
        ("Qwen3", {"pages": 7}),
        ("own", {"pages": 6, "cache": "fp8"}),
        ("Qwen3Moe", {}),
        ("Llama", {"fused": False}),
    ],
)
def test_every_sequence_is_what_its_own_seed_draws_alone(kind, options, device):
    fast = cases.shared(kind, str(device), **options)
    found = fast.rollout(PROMPTS, n=3, max_new_tokens=LENGTHS, seed=5)
    assert len(found.sequences) == 15 and [(one.prompt, one.sample) for one in found.sequences[:4]] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
    ]
    assert_as_generated(fast, found.sequences)


@pytest.mark.parametrize("kind", ["Mistral", "own"])
def test_on_a_cpus_own_path(kind, monkeypatch):
    """Its masks let a NaN pass, which a row may hold beyond its prompt."""
    monkeypatch.undo()
    assert cpu_step.fits(torch.device("cpu"))
    fast = gb.decoder(cases.build(kind), 4, cases.ROOM, verify=False)
    fast.body.cache.poison()
    assert_as_generated(fast, fast.rollout(PROMPTS, n=2, max_new_tokens=LENGTHS, seed=5).sequences)


@pytest.mark.slow
def test_neither_the_batch_nor_the_order_of_the_queue_changes_a_sequence(device):
    want = by_name(cases.shared("Mistral", str(device)).rollout(PROMPTS, n=3, max_new_tokens=LENGTHS).sequences)
    for rows in (1, 11):
        found = cases.shared("Mistral", str(device), max_batch=rows).rollout(PROMPTS, n=3, max_new_tokens=LENGTHS)
        assert by_name(found.sequences) == want
    found = cases.shared("Mistral", str(device)).rollout(PROMPTS, n=3, max_new_tokens=LENGTHS)
    found.waiting.reverse()
    assert by_name(found.sequences) == want
    fewer = cases.shared("Mistral", str(device)).rollout(PROMPTS[:2], n=1, max_new_tokens=LENGTHS[:2])
    assert by_name(fewer.sequences) == {name: want[name] for name in ((0, 0), (1, 0))}


def test_sequences_come_as_they_end_and_rows_are_taken_again():
    fast = cases.shared("Llama")
    found = fast.rollout(PROMPTS, n=2, max_new_tokens=LENGTHS)
    first = next(found)
    assert first.prompt == 0 and first in found.finished and len(found.waiting) > 0
    rest = list(found)
    assert [one.prompt for one in (first, *rest)] != sorted(one.prompt for one in (first, *rest))
    assert found.count == 2 * sum(LENGTHS) and 0 < found.occupancy <= 1 and found.tokens_per_s > 0
    together = sum(max(LENGTHS[at // 2] for at in range(start, min(start + 4, 10))) for start in (0, 4, 8))
    assert found.launches * rollout.STEPS[1] < together  # the steps of batches that begin and end together


def test_no_step_follows_the_last_token_of_all():
    found = cases.shared("Llama").rollout(PROMPTS[:4], max_new_tokens=[1, 2, 1, 1])
    assert len(found.sequences) == 4 and found.row_steps == 2 * 4


def test_the_next_sequences_begin_before_the_caller_gets_those_that_ended():
    found = cases.shared("Llama", max_batch=2).rollout(PROMPTS[:4], max_new_tokens=4)
    assert next(found).prompt == 0 and not found.waiting and all(found.rows)
    assert [one.prompt for one in found] == [1, 2, 3]


def test_the_samples_of_a_prompt_share_its_prefill():
    fast = cases.shared("Llama", max_batch=8)
    found = fast.rollout(PROMPTS[:2], n=4, max_new_tokens=4)
    assert len(found.sequences) == 8 and found.prefills == 2
    found = fast.rollout(PROMPTS[2:4], n=16, max_new_tokens=8)
    assert len(found.sequences) == 32 and found.prefills == 2  # rows that are taken later copy from those that go on


@pytest.mark.parametrize("options", [{}, {"pages": 14}, {"pages": 8}, {"cache": "fp8"}], ids=["rows", "pages", "few", "fp8"])
def test_prompts_are_prefilled_ahead_several_at_once(options, monkeypatch, device):
    given, lengths, batches = cases.prompts(5, 70, 3, 9, 2, 66, 8, 4), [3, 9, 5, 2, 7, 4, 6, 3], []
    prefill = rollout.Rollout._prefill
    monkeypatch.setattr(rollout.Rollout, "_prefill", lambda self, *of: (batches.append(len(of[0])), prefill(self, *of)))
    found = {}
    for share in (100, 2):
        monkeypatch.setattr(generate, "SPARE", share)
        fast = gb.decoder(cases.build("Qwen3", torch.float32, device), 8, cases.ROOM, verify=False, **options)
        batches.clear()
        rolled = fast.rollout(given, n=4, max_new_tokens=lengths, seed=3, stop=())
        found[share] = by_name(rolled.sequences), [*batches], rolled._pages.cache and len(rolled._pages.free)
    assert found[2][0] == found[100][0] and found[2][2] == found[100][2]
    if options.get("pages") != 8:
        assert len(found[2][1]) < len(found[100][1]) and sum(found[2][1]) == sum(found[100][1]) == 8


@pytest.mark.parametrize(("samples", "rows"), [(1, 2), (2, 1)])
def test_fewer_rows_have_ended_at_a_refill_where_prompts_are_prefilled_ahead(samples, rows, monkeypatch):
    for module, name, value in (
        (generate, "SPARE", 2),
        (rollout, "SHARE", (2, 4)),
        (rollout, "MANY", 4),
        (rollout, "STEPS", (1, 1)),
    ):
        monkeypatch.setattr(module, name, value)
    fast, free = gb.decoder(cases.build("Qwen3"), 4, cases.ROOM, verify=False), []
    refill = rollout.Rollout._refill
    monkeypatch.setattr(rollout.Rollout, "_refill", lambda self: (free.append(self.rows.count(None)), refill(self)))
    found = fast.rollout(cases.prompts(*[3] * (12 // samples)), n=samples, max_new_tokens=9, seed=3, stop=())
    for ended, one in enumerate(found.waiting):
        one.limit -= ended % 4  # rows end one after the other
    assert list(found) and min(free) == rows


def test_rows_that_have_ended_read_no_keys_while_they_wait(monkeypatch):
    monkeypatch.setattr(rollout, "SHARE", (1, 1))
    fast = gb.decoder(cases.build("Qwen3"), 4, cases.ROOM, verify=False)
    seen, step = [], fast.body.step
    monkeypatch.setattr(fast.body, "step", lambda token, position: (seen.append(position.tolist()), step(token, position))[1])
    found = fast.rollout(cases.prompts(9, 8, 7, 6, 5), max_new_tokens=[2, 30, 30, 30, 2], seed=3, stop=())
    assert [len(one.tokens) for one in found.sequences] == [2, 30, 30, 30, 2]
    first = [positions[0] for positions in seen[:16]]  # which ends after two steps
    assert first[:2] == [8, 9] and first[8:] == [0] * 8


def test_steps_are_compiled_beside_the_prefill_and_those_of_fewer_rows_beside_steps(monkeypatch):
    """Naming their kernels runs torch's own ops, and here all of a step: no sequence may change by it."""
    named = []
    monkeypatch.setattr(runner, "compile_ahead", lambda call, device: (named.append(call.args), call()))
    fast = gb.decoder(cases.build("Qwen3", torch.float16), 8, cases.ROOM, verify=False)
    how = {"n": 2, "max_new_tokens": LENGTHS, "seed": 5, "stop": ()}
    found = []
    for alike in (False, True, True):
        monkeypatch.setattr(fast.body, "launches_alike", alike)
        found.append(by_name(fast.rollout(PROMPTS, **how).sequences))
    assert found[0] == found[1] == found[2]
    assert [*dict.fromkeys(rows for rows, *_ in named)] == [8, 4, 2, 1] and len(named) == len({*named})


@pytest.mark.slow
def test_the_last_sequences_move_to_fewer_rows():
    fast = cases.shared("Qwen3", max_batch=8)
    for decoder in (fast, cases.shared("Qwen3", max_batch=8, pages=16), cases.shared("Qwen3", max_batch=8, cache="int8")):
        lengths = [2, 3, 4, 2, 9, 5, 24, 2]
        given = [PROMPTS[at % 5] for at in range(8)]
        found = decoder.rollout(given, max_new_tokens=lengths, repetition_penalty=1.2, temperature=0.7)
        assert [len(one.tokens) for one in found.sequences] == lengths and found.size == 1
        last = found.sequences[6]
        how = {"max_new_tokens": 24, "repetition_penalty": 1.2, "temperature": 0.7, "seed": last.seed}
        assert decoder.generate(given[6], **how).tokens[0] == last.tokens


@pytest.mark.slow
def test_stop_tokens_and_strings():
    fast = cases.shared("Llama")
    ends = [3, 4, 5, 6, 7, 8]
    found = fast.rollout(PROMPTS, n=4, stop=ends, max_new_tokens=16).sequences
    assert {one.finish for one in found} == {"stop", "length"}
    for one in found:
        assert not set(one.tokens[:-1]) & set(ends) and (one.tokens[-1] in ends) == (one.finish == "stop")
    text = gb.decoder(cases.build("Llama"), 3, cases.ROOM, tokenizer=cases.Bytes(), verify=False)
    stop = [chr(letter) for letter in range(48, 64)]
    found = text.rollout(PROMPTS, n=2, stop=stop, max_new_tokens=12).sequences
    for one in found:
        want = text.generate(PROMPTS[one.prompt], temperature=1.0, seed=one.seed, stop=stop, max_new_tokens=12).sequences[0]
        assert (one.tokens, one.text, one.finish) == (want.tokens, want.text, want.finish.partition(" ")[0])
        assert len(one.logprobs) == len(one.tokens)
    assert {one.finish for one in found} == {"stop", "length"}


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 3.0])
def test_logprobs_are_those_of_the_distribution_that_is_drawn_from(temperature, device):
    fast = cases.shared("Qwen3", str(device))
    for one in fast.rollout(PROMPTS, max_new_tokens=9, temperature=temperature):
        logits = cases.logits(fast.model, [*PROMPTS[one.prompt], *one.tokens[:-1]])[len(PROMPTS[one.prompt]) - 1 :]
        scores = (logits.double() / (temperature or 1.0)).log_softmax(-1)
        want = scores.gather(1, torch.tensor(one.tokens, device=scores.device)[:, None])[:, 0]
        assert one.logprobs == pytest.approx(want.tolist(), abs=1e-4)
        if not temperature:
            assert one.tokens == logits.argmax(-1).tolist()


@pytest.mark.slow
def test_settings_of_each_prompt():
    fast = cases.shared("Llama")
    settings = {"temperature": [0.0, 1.0, 0.5, 2.0, 1.0], "top_k": [0, 5, 0, 3, 1], "top_p": [1.0, 0.9, 1.0, 1.0, 0.5]}
    found = fast.rollout(PROMPTS, n=2, max_new_tokens=LENGTHS, **settings).sequences
    for one in found:
        how = {name: values[one.prompt] for name, values in settings.items()}
        want = fast.generate(PROMPTS[one.prompt], max_new_tokens=LENGTHS[one.prompt], seed=one.seed, **how)
        assert one.tokens == want.tokens[0]
    assert found[0].tokens == found[1].tokens and found[2].tokens != found[3].tokens


@pytest.mark.slow
def test_adapters_of_each_prompt():
    model = cases.build("own")
    for name in ("x", "y"):
        gb.lora.add(model, 4, name=name, init=False)
    fast = gb.decoder(model, 3, cases.ROOM, verify=False)
    names = ["x", None, "y", "x", "y"]
    found = fast.rollout(PROMPTS, max_new_tokens=6, adapters=names).sequences
    for one in found:
        how = {"temperature": 1.0, "seed": one.seed, "max_new_tokens": 6, "adapters": [names[one.prompt]]}
        assert one.tokens == fast.generate(PROMPTS[one.prompt], **how).tokens[0]


@pytest.mark.slow
def test_the_next_rollout_has_the_weights_as_they_are_then():
    model = cases.build("Llama")
    fast = gb.decoder(model, 3, cases.ROOM, verify=False)
    before = by_name(fast.rollout(PROMPTS, n=2, max_new_tokens=12).sequences)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    after = by_name(fast.rollout(PROMPTS, n=2, max_new_tokens=12).sequences)
    fresh = gb.decoder(model, 3, cases.ROOM, verify=False).rollout(PROMPTS, n=2, max_new_tokens=12)
    assert by_name(fresh.sequences) == after != before


@pytest.mark.slow
def test_nothing_waits_for_the_device(sim):
    fast = gb.decoder(cases.build("Llama", device=sim), 4, cases.ROOM, verify=False)
    given = {"n": 2, "max_new_tokens": [1, 5, 2], "temperature": 0.7, "seed": 1}
    list(fast.rollout(PROMPTS[:3], **given))
    with no_stall():
        assert len(fast.rollout(PROMPTS[:3], **given).sequences) == 6


@pytest.mark.slow
@pytest.mark.parametrize(("options", "kept"), [({}, 1), ({}, 99), ({"pages": 7, "cache": "int8"}, 1), ({"fused": False}, 1)])
def test_conversations_go_on_turn_by_turn(options, kept, monkeypatch, device):
    """As `generate` goes on after the whole conversation, whether the row still has its keys and values or not."""
    monkeypatch.setattr(rollout, "KEPT", kept)
    fast, alone = (cases.shared("Llama", str(device), max_batch=rows, **options) for rows in (3, 2))
    prefills, refill = [], fast.graphs.refill
    monkeypatch.setattr(fast.graphs, "refill", lambda *inputs: (prefills.append(inputs[3]), refill(*inputs)))
    found, texts = fast.rollout(PROMPTS, n=2, max_new_tokens=6, seed=3, stop=[7]), {}
    for one in found:
        text = texts.setdefault((one.prompt, one.sample), list(PROMPTS[one.prompt]))
        want = alone.generate(text, max_new_tokens=6, temperature=1.0, seed=one.seed, stop=[7]).tokens[0]
        assert one.tokens == want
        text += one.tokens
        if one.turn < one.sample + 1:
            found.extend(one, [9, one.prompt])
            text += [9, one.prompt]
    assert len(found.finished) == found.total == 5 * (2 + 3) and {one.turn for one in found.sequences} == {0, 1, 2}
    assert any(prefills) == (kept == 1)
    with pytest.raises(ValueError):
        found.extend(found.finished[-1], [9])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"pages": 22}, {"cache": "int8"}], ids=["rows", "pages", "int8"])
def test_a_prompts_keys_are_read_once_for_its_samples(options, monkeypatch, device):
    """In 16 bits, and with as many rows as torch multiplies; beside a rollout that reads them again for each. The likeliest
    first tokens have equal log-probabilities but for rounding, also where two tokens are as likely."""
    fast = gb.decoder(cases.build("Qwen3", torch.float16, device), 10, cases.ROOM, verify=False, **options)
    given, found, seen = cases.prompts(80, 70, 3), [], []
    attention = kv_cache.decode_attention

    def look(qkv, position, cache, *rest):
        seen.append(None if cache.shared is None else cache.shared.counts.tolist())
        if cache.shared is not None and device.type == "cpu":  # who goes on after the keys of its line is in one
            assert {row for row, count in enumerate(seen[-1]) if count} <= set(cache.shared.rows.flatten().tolist())
        return attention(qkv, position, cache, *rest)

    for most in (rollout.PAGE, 1000):
        monkeypatch.setattr(rollout, "PAGE", most)
        if device.type == "cpu":  # a graph cannot hold what looks into tensors
            monkeypatch.setattr(kv_cache, "decode_attention", look)
        found.append(fast.rollout(given, n=7, max_new_tokens=[5, 3, 2], temperature=0.0).sequences)
    shared = [counts for counts in seen if counts is not None]
    assert device.type != "cpu" or (shared[0] == [80] * 7 + [70] * 3 and 0 in shared[-1] and len(shared) < len(seen))
    assert len(found[0]) == 21
    for ours, want in zip(*found):
        assert ours.logprobs[0] == pytest.approx(want.logprobs[0], abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 3])
def test_the_keys_of_long_rows_are_split_among_more_programs(samples, monkeypatch, device):
    """In 16 bits, where a row is far longer than the others; log-probabilities are the model's own either way.

    And attention is told, by powers of two, how many keys a row reads at most, or all parts of the rows in a list.
    """
    for module, values in ((rollout, {"LONG": 12, "FEWEST": 16}), (kv_cache, {"UNEVEN": 3, "PART": 48, "MANY": 1})):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    fast = gb.decoder(cases.build("Qwen3", torch.float16, device), 10, cases.ROOM, verify=False)
    given, tiles, bounds, several = cases.prompts(5, 6, 5, 6, 7), set(), set(), []
    attention = kv_cache.decode_attention

    def look(qkv, position, cache, heads, scratch, *rest):
        tiles.add(scratch.tiles)
        bounds.add(scratch.most)
        if device.type == "cpu":
            assert position.max() < (scratch.most or cases.ROOM)
            assert (scratch.parts is None) == (scratch.tiles != 3)
            if scratch.parts is not None:
                counts = [1 + place // 48 for place in position.tolist()]
                entries = {(e & 0xFFFF, e >> 16 & 0xFF, e >> 24) for e in scratch.parts.tolist() if e >= 0}
                several.append(len(entries) > len(counts))
                for row, count in enumerate(counts):
                    (told,) = {of for at, _, of in entries if at == row}
                    assert told >= count and {part for at, part, _ in entries if at == row} == set(range(told))
        return attention(qkv, position, cache, heads, scratch, *rest)

    monkeypatch.setattr(kv_cache, "decode_attention", look)
    for most in (4, 60):
        tiles.clear(), bounds.clear()
        lengths = [4, 4, most, *[4] * 57]
        found = fast.rollout(given * 12, n=samples, max_new_tokens=lengths, seed=1, stop=()).sequences
        assert bounds <= {0, 16, 32}  # a list needs no bound: 0
        if device.type == "cpu":
            assert (3 in tiles) == any(several) == (0 in bounds) == (most == 60) and 16 in bounds
        else:  # kernels of fewer rows are compiled ahead, with a list, too; and 60 tokens find a graph for 16 keys
            assert 16 in bounds if most == 4 else 3 in tiles
        for one in found[2 * samples :: 17]:
            scores = fast.score([given[one.prompt % 5] + one.tokens])[0][-len(one.tokens) :]
            assert one.logprobs == pytest.approx(scores, abs=0.02)
    plain = cases.shared("Qwen3").rollout(given, n=samples, max_new_tokens=[4, 4, 60, 4, 4], stop=())
    assert plain.sequences and not plain.variant.uneven, "in fp32 no row's bits depend on the others"


@pytest.mark.parametrize("enough", [1, 1000])
def test_unlike_lengths_are_a_variant_where_rows_fill_a_gpu(enough, monkeypatch):
    """Each variant is a capture."""
    for module, name, value in ((rollout, "LONG", 6), (kv_cache, "MANY", enough)):
        monkeypatch.setattr(module, name, value)
    fast = gb.decoder(cases.build("Qwen3", torch.float16), 4, cases.ROOM, verify=False)
    assert list(fast.rollout(cases.prompts(*[2] * 13), max_new_tokens=[20, *[2] * 12], stop=()))
    assert {variant.uneven for *_, variant in fast.graphs._launches} == ({False, True} if enough == 1 else {False})


@pytest.mark.slow
def test_few_rows_of_many_keys_are_read_by_the_plan_of_many_rows(monkeypatch, device):
    """In 16 bits, from where the keys of all together are enough."""
    for name, value in (("MANY", 8), ("LONG", 48)):
        monkeypatch.setattr(kv_cache, name, value)
    fast, seen = gb.decoder(cases.build("Qwen3", torch.float16, device), 3, cases.ROOM, verify=False), []
    attention = kv_cache.decode_attention

    def look(qkv, position, cache, heads, scratch, *rest):
        if device.type == "cpu":
            keys = int(position.clamp(min=0).sum()) + len(position) * (1 + rollout.STEPS[1])
            seen.append((scratch.many, scratch.tiles, keys * cache.k.shape[1] >= 4 * 48))
        return attention(qkv, position, cache, heads, scratch, *rest)

    monkeypatch.setattr(kv_cache, "decode_attention", look)
    given = cases.prompts(30, 20, 10)
    found = fast.rollout(given, max_new_tokens=[50, 40, 30], stop=()).sequences
    assert device.type != "cpu" or {many for many, *_ in seen} == {True, False}
    assert all((tiles == 3) == many <= enough for many, tiles, enough in seen)
    for one in found:
        scores = fast.score([given[one.prompt] + one.tokens])[0][-len(one.tokens) :]
        assert one.logprobs == pytest.approx(scores, abs=0.02)
    plain = cases.shared("Qwen3").rollout(given, max_new_tokens=[50, 40, 30], stop=())
    assert plain.sequences and not plain.variant.many, "in fp32 no row's bits depend on the others"


@pytest.mark.gpu
@pytest.mark.parametrize("samples", [8, 20])
def test_few_rows_of_two_thousand_keys_have_the_models_log_probabilities(samples):
    torch.manual_seed(0)
    config = gb.DecoderConfig(hidden=512, intermediate=256, layers=2, heads=8, kv_heads=8, vocabulary=512)
    fast = gb.decoder(gb.Decoder(config).to("cuda", torch.bfloat16), 32, 2100, verify=False)
    given = torch.randint(512, (2040,), generator=torch.Generator().manual_seed(0)).tolist()
    found = fast.rollout([given], n=samples, max_new_tokens=8, stop=())
    assert len(found.sequences) == samples and found.variant.many
    for one in found.sequences:
        assert one.logprobs == pytest.approx(fast.score([given + one.tokens])[0][-8:], abs=0.06)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"pages": 150}, {"exact": True}], ids=["rows", "pages", "exact"])
def test_a_queue_of_unlike_lengths_has_the_models_log_probabilities(options):
    """Prompts are prefilled ahead, rows that wait read no keys, and kernels of fewer rows are compiled beside the steps."""
    torch.manual_seed(0)
    config = gb.DecoderConfig(hidden=512, intermediate=256, layers=4, heads=8, kv_heads=8, vocabulary=512)
    fast = gb.decoder(gb.Decoder(config).to("cuda", torch.bfloat16), 64, 300, verify=False, **options)
    draw = torch.Generator().manual_seed(0)
    given = [torch.randint(512, (60 + 3 * at,), generator=draw).tolist() for at in range(30)]
    lengths = torch.randint(1, 60, (30,), generator=draw).tolist()
    found = fast.rollout(given, n=8, max_new_tokens=lengths, seed=1, stop=())
    assert len(found.sequences) == 240 and (options or fast.graphs._begun)
    for one in found.sequences[::7]:
        want = fast.score([given[one.prompt] + one.tokens])[0][-len(one.tokens) :]
        assert one.logprobs == pytest.approx(want, abs=0.0 if "exact" in options else 0.06)


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [None, 160])
@pytest.mark.parametrize("length", [900, 2050])
def test_a_long_row_among_many_has_the_models_log_probabilities(length, pages):
    """Its 900 keys are three programs', where those of 127 rows are one's each, as a list has them, rounded up."""
    torch.manual_seed(0)
    config = gb.DecoderConfig(hidden=1024, intermediate=256, layers=2, heads=8, kv_heads=8, vocabulary=512)
    fast = gb.decoder(gb.Decoder(config).to("cuda", torch.float16), 128, 2100, verify=False, pages=pages)
    draw = torch.Generator().manual_seed(0)
    given = [torch.randint(512, (length if row == 40 else 5,), generator=draw).tolist() for row in range(128)]
    found = fast.rollout(given, max_new_tokens=8, stop=())
    assert len(found.sequences) == 128 and found.variant.uneven and found.variant.parts == 192
    for one in found.sequences[30:50]:
        scores = fast.score([given[one.prompt] + one.tokens])[0][-8:]
        assert one.logprobs == pytest.approx(scores, abs=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"pages": 60}, {"cache": "fp8"}], ids=["rows", "pages", "fp8"])
def test_nothing_waits_for_a_gpu(options):
    fast = gb.decoder(cases.build("Qwen3", torch.bfloat16, torch.device("cuda", 0)), 24, cases.ROOM, **options)
    given = cases.prompts(*(1 + 7 * number % 73 for number in range(60)))  # some share their keys' first 64
    how = {"n": 2, "max_new_tokens": [1 + number % 23 for number in range(60)], "temperature": 0.8}
    for _ in range(3):  # the first captures the steps, and then each size of a refill at its second use
        want = fast.rollout(given, **how).sequences
    torch.cuda.synchronize()
    with watch(gputrace=True) as ledger:
        found = fast.rollout(given, **how).sequences
    assert ledger.totals["syncs"] == 0, str(ledger)
    assert by_name(found) == by_name(want) and [len(one.tokens) for one in found[::2]] == how["max_new_tokens"]


@pytest.mark.gpu
def test_captured_refills_are_those_of_single_launches(monkeypatch):
    fast = gb.decoder(cases.build("Qwen3", torch.bfloat16, torch.device("cuda", 0)), 8, cases.ROOM, verify=False)
    given, how = cases.prompts(*range(1, 41)), {"n": 3, "max_new_tokens": 9}
    captured = [by_name(fast.rollout(given, **how).sequences) for _ in range(3)][-1]
    monkeypatch.setattr(fast.graphs, "refill", fast.body.refill)
    assert by_name(fast.rollout(given, **how).sequences) == captured


class TestFaults:
    def test_a_prompt_longer_than_the_cache(self):
        fast = cases.shared("Llama")
        given = [*PROMPTS, [3] * cases.ROOM]
        assert refusal(ValueError, lambda: fast.rollout(given)) == message("decode/rollout:long_prompt")

    def test_requests_that_cannot_be(self):
        fast = cases.shared("Llama")
        settings = {"n": 0}, {"max_new_tokens": [3]}, {"temperature": -1.0}, {"max_new_tokens": [3, 0, 1, 1, 1]}, {"stop": 2.5}
        for how in (*settings, {"stop": [""]}, {"adapters": "x"}):
            with pytest.raises(ValueError, match=r"^rollout: "):
                fast.rollout(PROMPTS, **how)
        with pytest.raises(TypeError):
            fast.rollout(PROMPTS, beams=3)
        draft = gb.decoder(cases.build("Llama"), 2, cases.ROOM, speculate=2, verify=False)
        assert refusal(ValueError, lambda: draft.rollout(PROMPTS)) == message("decode/rollout:speculation")

    def test_an_interrupt_leaves_the_decoder_usable(self, monkeypatch):
        fast = cases.shared("Mistral")
        want = by_name(fast.rollout(PROMPTS, n=2, max_new_tokens=9).sequences)
        receive, calls = fast.slots.receive, []

        def interrupted(*logprobs):
            calls.append(logprobs)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return receive(*logprobs)

        monkeypatch.setattr(fast.slots, "receive", interrupted)
        found = fast.rollout(PROMPTS, n=2, max_new_tokens=9)
        with pytest.raises(KeyboardInterrupt):
            list(found)
        monkeypatch.undo()
        assert {one.prompt for one in found.finished} < {0, 1, 2, 3, 4}
        assert refusal(gb.errors.GenerateError, lambda: found.sequences) == message(
            "decode/rollout:left", 10 - len(found.finished)
        )
        assert by_name(fast.rollout(PROMPTS, n=2, max_new_tokens=9).sequences) == want

    def test_a_rollout_that_is_left_early(self):
        fast = cases.shared("Mistral")
        found = fast.rollout(PROMPTS, n=2, max_new_tokens=9)
        next(found)
        with pytest.raises(gb.errors.GenerateError):
            fast.generate(PROMPTS[0], max_new_tokens=1)
        found.close()
        assert fast.generate(PROMPTS[0], max_new_tokens=1).count == 1
        for _ in fast.rollout(PROMPTS, max_new_tokens=9):
            break
        assert fast.generate(PROMPTS[0], max_new_tokens=1).count == 1

    def test_out_of_memory_in_a_refill(self, monkeypatch):
        fast = cases.shared("Mistral")
        refill, calls = fast.body.refill, []

        def full(*inputs):
            calls.append(inputs)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            refill(*inputs)

        monkeypatch.setattr(fast.body, "refill", full)
        found = fast.rollout(PROMPTS, n=2, max_new_tokens=9)
        text = refusal(gb.errors.GenerateError, lambda: list(found))
        assert text == message("decode/rollout:out_of_memory") and found.finished
        monkeypatch.undo()
        assert len(fast.rollout(PROMPTS, n=2, max_new_tokens=9).sequences) == 10

    def test_a_nan_names_the_sequence(self):
        model = cases.build("Llama")
        fast = gb.decoder(model, 2, cases.ROOM, verify=False)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
        assert refusal(gb.errors.GenerateError, lambda: fast.rollout(PROMPTS).sequences) == message("decode/rollout:nan")
