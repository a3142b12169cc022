"""Speculative steps bring the tokens that plain steps bring, greedy and drawn, whatever was drafted; only sooner."""

import collections
import functools
import random

import pytest
import torch
import transformers

import gpubound as gb
from gpubound.decode.runner import RunnerConfig
from gpubound.decode.speculation import Pace
from gpubound.decode.transformer import FusedRunner
from gpubound.decode.weight_view import bind
from gpubound.kernels import dispatch
from gpubound.watch.pretend import simgpu
from tests.messages import message, refusal, same_texts

from . import cases

SAMPLED = {"temperature": 1.0, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 7}
DRAFTS = pytest.mark.parametrize("draft", ["text", "other", "same"])


@functools.cache
def shared(kind: str, draft: str, tokens: int = 4, max_batch: int = 4) -> gb.FastDecoder:
    """A decoder of the model of `cases.shared` that looks drafts up in the text, or asks another model or a twin."""
    model = cases.shared(kind).model
    speculate = tokens if draft == "text" else gb.Draft(model_of(kind, draft), tokens)
    verify = kind == "Llama" and tokens == 4  # the others' tokens are compared by the tests themselves
    return gb.decoder(model, max_batch, cases.ROOM, verify=verify, speculate=speculate)


@functools.cache
def model_of(kind: str, draft: str) -> torch.nn.Module:
    return cases.build("Qwen2", vocab_size=70, num_hidden_layers=1) if draft == "other" else cases.build(kind)


_plain: dict[tuple, gb.decode.Generation] = {}


def compare(fast: gb.FastDecoder, plain: gb.FastDecoder, prompts, **settings) -> gb.decode.Generation:
    """What `fast` gives, after it was compared with what `plain`, whose weights stay, gives: asked once."""
    key = (plain, repr(prompts), repr(settings))
    if key not in _plain:
        _plain[key] = plain.generate(prompts, **settings)
    found, want = fast.generate(prompts, **settings), _plain[key]
    assert found.tokens == want.tokens
    assert [s.finish for s in found.sequences] == [s.finish for s in want.sequences]
    for got, wanted in zip(found.sequences, want.sequences):
        assert len(got.logprobs) == len(wanted.logprobs)
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(wanted.logprobs), rtol=0, atol=1e-5)
    return found


WAY = {"greedy": {}, "drawn": {"temperature": 0.7, "seed": 1}, "all settings": SAMPLED}
PAIRS = [(way, draft) for way in WAY for draft in ("text", "other", "same")]


# All pairs with normed heads; with a window each way and each draft once.
@pytest.mark.parametrize(
    ("kind", "way", "draft"), [*(("Qwen3", *pair) for pair in PAIRS), *(("Mistral", *pair) for pair in PAIRS[::4])]
)
def test_the_tokens_of_plain_steps(kind, way, draft):
    """A ragged batch of three, launched as four; a window shorter than the texts; normed heads."""
    found = compare(shared(kind, draft), cases.shared(kind), cases.prompts(), max_new_tokens=12, **WAY[way])
    assert draft != "same" or found.tokens_a_step == 4


@DRAFTS
def test_log_probabilities_come_with_their_tokens(draft):
    compare(shared("Qwen3", draft), cases.shared("Qwen3"), cases.prompts(), max_new_tokens=9, logprobs=True, **SAMPLED)
    compare(shared("Qwen3", draft), cases.shared("Qwen3"), cases.prompts(), max_new_tokens=9, logprobs=True)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 3, 15])
def test_any_number_of_tokens(tokens):
    """One row alone, whose step of up to eight tokens is computed by the kernels of plain steps; fifteen are wide."""
    fast, prompt = shared("Llama", "text", tokens, 1), cases.prompts(19)
    assert (tokens + 1 <= fast.body.gemv_rows) == (tokens < 8)
    found = compare(fast, cases.shared("Llama"), prompt, max_new_tokens=41)
    assert found.tokens_a_step > 1.3  # a greedy text of a random model comes round
    compare(fast, cases.shared("Llama"), prompt, max_new_tokens=12, **SAMPLED)


@DRAFTS
def test_drafted_tokens_count_for_the_penalty_of_later_ones(draft):
    """A penalty so strong that no token comes twice, which one of an earlier place of the same step would."""
    fast, plain = shared("Qwen3", draft), cases.shared("Qwen3")
    found = compare(fast, plain, cases.prompts(6), max_new_tokens=14, repetition_penalty=30.0)
    assert len(set(found.tokens[0])) == 14


def test_what_is_accepted_is_counted():
    """A twin is always right: each step brings three drafted tokens and one more, and the last what there is room for."""
    found = shared("Llama", "same", 3).generate(cases.prompts(), max_new_tokens=25)
    assert (found.row_steps, found.count) == (3 * 7, 75)
    assert found.tokens_a_step == found.as_dict()["tokens_a_step"] == 75 / 21
    plain = cases.shared("Llama").generate(cases.prompts(), max_new_tokens=25)
    assert (plain.row_steps, plain.tokens_a_step) == (75, 1.0)


@pytest.mark.slow
def test_launches_follow_what_steps_bring():
    """Five tokens a step, of which the host learns with the first launch it reads: 60 tokens are 12 steps, not 60."""
    fast = shared("Llama", "same")
    fast.generate(cases.prompts(9), max_new_tokens=60)  # a launch that is new begins only when the others are read
    found = fast.generate(cases.prompts(9), max_new_tokens=60)
    # Launches of 1, 8 and 8: the second is under way before the first is read.
    assert (found.row_steps, found.steps) == (12, 17)
    assert cases.shared("Llama").generate(cases.prompts(9), max_new_tokens=50).steps == 50


def test_a_step_behind_the_last_token_is_launched_and_counts_for_no_roofline():
    """Launches of 1, 8, 32, 32 and 8: after 64 steps one may be idle, and what it read was not needed."""
    plain = cases.shared("Llama")
    found = plain.generate(cases.prompts(6), max_new_tokens=80)
    assert (found.steps, found.wanted, found.count) == (81, 80, 80)
    assert found.bytes_read == 80 * plain.body.bytes_a_step([6 + 40])


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "all settings"])
def test_stops_in_the_middle_of_what_was_accepted(how):
    """Rows stop at every place of a step of five in turn, each row at its own."""
    fast, plain, given = shared("Llama", "same"), cases.shared("Llama"), cases.prompts(3, 9, 17)
    whole = plain.generate(given, max_new_tokens=24, **how).tokens
    for place in range(7, 12):
        stops = [whole[0][place], whole[1][place + 3], whole[2][place + 10]]
        found = compare(fast, plain, given, max_new_tokens=24, stop=stops, **how)
        assert "stop token" in {s.finish for s in found.sequences}


@DRAFTS
def test_limits_in_the_middle_of_what_was_accepted(draft):
    fast, plain = shared("Mistral", draft), cases.shared("Mistral")
    for new in (1, 3, 5, 6):
        compare(fast, plain, cases.prompts(2, 7, 4), max_new_tokens=new)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "draft"), [({}, "text"), (SAMPLED, "other"), ({}, "same")], ids=str)
def test_up_to_the_last_place_of_the_cache(how, draft):
    """Rows reach max_length at different times; what they draft beyond it comes to nothing."""
    given = cases.prompts(90, 78, 95, 84)
    found = compare(shared("Qwen3", draft), cases.shared("Qwen3"), given, **how)
    assert [len(p) + len(t) for p, t in zip(given, found.tokens)] == [cases.ROOM] * 4


@DRAFTS
def test_a_cache_shorter_than_a_step(draft):
    model = cases.shared("Llama").model
    speculate = 15 if draft == "text" else gb.Draft(model_of("Llama", draft), 15)
    fast = gb.decoder(model, 2, 4, speculate=speculate, verify=False)
    compare(fast, gb.decoder(model, 2, 4, verify=False), cases.prompts(1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["text", "other"])
def test_neighbours_order_and_earlier_requests_do_not_matter(draft):
    fast, given = shared("Mistral", draft), cases.prompts(5, 1, 19, 6)
    how = {"max_new_tokens": 9, "temperature": 1.0, "seed": 3}
    together = fast.generate(given, **how).tokens
    assert fast.generate([given[row] for row in (2, 0, 3, 1)], **how).tokens == [together[row] for row in (2, 0, 3, 1)]
    fast.generate(cases.prompts(60, 50, 40, 30), max_new_tokens=8)
    assert [fast.generate(prompt, **how).tokens[0] for prompt in given] == together


def test_copies_of_a_prompt_draw_for_themselves():
    how = {"max_new_tokens": 15, "temperature": 1.3, "n": 3}
    found = compare(shared("Qwen3", "same"), cases.shared("Qwen3"), cases.prompts(4), **how)
    assert len({tuple(row) for row in found.tokens}) == 3


@pytest.mark.parametrize("k", [1, 5])
def test_the_steps_of_a_launch_do_not_matter(k):
    fast = gb.decoder(cases.shared("Mistral").model, 4, cases.ROOM, k=k, speculate=3, verify=False)
    for how in ({}, SAMPLED):
        compare(fast, cases.shared("Mistral"), cases.prompts(), max_new_tokens=16, **how)


@pytest.mark.slow
def test_a_stream_brings_several_tokens_at_a_time(monkeypatch):
    monkeypatch.setattr("gpubound.decode.certificate.ON_CPU", 12)  # which makes the launches of eight steps
    fast, plain = shared.__wrapped__("Llama", "same"), cases.shared("Llama")
    pieces = [new for _, new in fast.stream(cases.prompts(6), max_new_tokens=30)]
    assert [token for piece in pieces for token in piece] == plain.generate(cases.prompts(6), max_new_tokens=30).tokens[0]
    assert [len(piece) for piece in pieces] == [5, 25]  # of a launch of one step, and one of eight


def test_stop_strings():
    fast = gb.decoder(cases.shared("Llama").model, 1, cases.ROOM, speculate=4, tokenizer=cases.Bytes(), verify=False)
    plain = gb.decoder(cases.shared("Llama").model, 1, cases.ROOM, tokenizer=cases.Bytes(), verify=False)
    text = plain.generate("A PROMPT", max_new_tokens=40).texts[0]
    found, want = (of.generate("A PROMPT", max_new_tokens=40, stop=[text[20:23]]) for of in (fast, plain))
    assert found.texts == want.texts and found.tokens == want.tokens and len(found.texts[0]) <= 20


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["text", "same"])
def test_the_models_own_forward_speculates_too(draft):
    """Several tokens of a row go through a model's own forward, at places of their own."""
    sizes = {"vocab_size": 89, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    models = [transformers.AutoModelForCausalLM.from_config(config).eval() for _ in range(2)]
    for model in models:
        torch.manual_seed(3)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    options = {"fused": False, "verify": False}
    plain = gb.decoder(models[0], 3, cases.ROOM, **options)
    fast = gb.decoder(models[0], 3, cases.ROOM, speculate=4 if draft == "text" else gb.Draft(models[1]), **options)
    assert fast.path and fast.body.same_kernels(1) is False
    for how in ({}, SAMPLED):
        found = compare(fast, plain, cases.prompts(), **how)
        assert found.tokens_a_step > (4.5 if draft == "same" else 1)


@pytest.mark.slow
def test_several_tokens_at_once_have_the_logits_of_one_by_one_to_the_bit(monkeypatch):
    """The kernels themselves, interpreted: logits and cache of four tokens at once and one by one, with normed heads."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "_verdicts", {})
    body = FusedRunner(bind(cases.build("Qwen3", num_hidden_layers=1)), RunnerConfig(2, 8, 4))
    ids = torch.tensor(cases.prompts(4, 4), dtype=torch.int32)
    places = torch.arange(4, dtype=torch.int32).repeat(2, 1)
    found = []
    for cut in ([slice(None)], range(4)):
        body.cache.poison()
        logits = []
        for part in cut:
            token, place = ids[:, part].contiguous(), places[:, part].contiguous()
            body.begin(token.flatten())
            logits.append(body.step(token, place).clone().view(2, -1, cases.VOCABULARY))
        found.append((torch.cat(logits, 1), body.cache.whole.k[..., :4, :].clone(), body.cache.whole.v[..., :4, :].clone()))
    for name, together, apart in zip(("logits", "keys", "values"), *found):
        assert apart.isfinite().all() and torch.equal(together, apart), name


def test_logits_that_are_not_finite():
    """Found at the place and in the part where a plain decoder finds them, in the middle of an accepted run."""
    prompt = cases.prompts(4)[0]
    model = cases.build("Llama", tie_word_embeddings=False)
    said = []
    for options in ({}, {"speculate": 3}, {"speculate": gb.Draft(cases.build("Llama", tie_word_embeddings=False), 4)}):
        fast = gb.decoder(model, 1, cases.ROOM, **options, verify=False)
        whole = fast.generate(prompt, max_new_tokens=9).tokens[0]
        assert whole[5] not in whole[:5]
        kept = model.model.embed_tokens.weight[whole[5]].clone()
        with torch.no_grad():
            model.model.embed_tokens.weight[whole[5]] = float("nan")
        with pytest.raises(gb.GenerateError) as error:
            fast.generate(prompt, max_new_tokens=9)
        with torch.no_grad():
            model.model.embed_tokens.weight[whole[5]] = kept
        assert fast.generate(prompt, max_new_tokens=9).tokens[0] == whole, "the next request has nothing of it"
        said.append(str(error.value))
    assert said[0].startswith("sequence 0: the logits at position 9 are not finite; first seen in model.embed_tokens.")
    assert set(said) == {said[0]}


@pytest.mark.slow
def test_what_is_read_is_counted_with_the_draft():
    found = {draft: shared("Llama", draft).generate(cases.prompts(6), max_new_tokens=20) for draft in ("text", "same")}
    lengths = [6 + 10]
    once = cases.shared("Llama").body.bytes_a_step(lengths)
    assert found["text"].bytes_read == once * found["text"].steps
    assert found["same"].bytes_read == 6 * once * found["same"].steps  # the model, and five steps of its twin


class TestWeights:
    def test_changed_in_place_they_are_followed_and_the_drafts_do_not_matter(self):
        model, other = cases.build("Qwen3"), cases.build("Qwen3")
        fast = gb.decoder(model, 2, cases.ROOM, speculate=gb.Draft(other), verify=False)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.2)
            model.lm_head.weight.add_(0.1 * torch.randn(89, 32, generator=torch.Generator().manual_seed(5)))
        compare(fast, gb.decoder(model, 2, cases.ROOM, verify=False), cases.prompts(5, 8), max_new_tokens=12)

    def test_a_draft_that_moved_is_bound_anew(self, capsys):
        model, other = cases.build("Llama"), cases.build("Llama")
        fast = gb.decoder(model, 1, cases.ROOM, speculate=gb.Draft(other, 3), verify=False)
        with torch.no_grad():
            other.model.norm.weight.data = other.model.norm.weight.data.clone()
        found = fast.generate(cases.prompts(5), max_new_tokens=24)
        assert found.tokens_a_step == 4.0
        assert message("decode/speculate:a_draft_that_moved_is_bo").within(capsys.readouterr().err)


class TestOnThePretendGpu:
    @pytest.fixture
    def sim(self) -> torch.device:
        if torch.cuda.is_available():
            pytest.skip("the pretend device contends with a real one")
        return simgpu()

    @pytest.mark.slow
    @pytest.mark.parametrize("draft", ["text", "model"])
    def test_steps_never_wait_for_the_device(self, draft, sim):
        how = 3 if draft == "text" else gb.Draft(cases.build("Llama", device=sim, num_hidden_layers=1), 3)
        fast = gb.decoder(cases.build("Qwen3", device=sim, num_hidden_layers=1), 2, 32, speculate=how, verify=False)
        plain = gb.decoder(cases.build("Qwen3", num_hidden_layers=1), 2, 32, verify=False)
        settings = {"max_new_tokens": 4, "temperature": 1.0, "repetition_penalty": 1.1}
        want = plain.generate(cases.prompts(5, 3), **settings).tokens
        assert fast.generate(cases.prompts(5, 3), **settings).tokens == want
        cases.assert_never_waits(fast.stepper.run, 2)


def test_the_table_says_so():
    assert str(shared("Llama", "text", 4)).splitlines()[0].endswith(": up to 4 rows of 96 tokens, 1 or 8 steps a launch")
    rows = {part: (what, why) for part, what, why in shared("Llama", "text", 4).stepper.report()}
    assert rows["speculation"] == (
        message("decode/speculate:the_table_says_so"),
        message("decode/speculate:the_table_says_so.2"),
    )
    rows = {part: (what, why) for part, what, why in shared("Llama", "same", 1, 4).stepper.report()}
    assert rows["speculation"] == (
        message("decode/speculate:the_table_says_so.3"),
        message("decode/speculate:the_table_says_so.4"),
    )
    assert rows["draft: norm, head"] == ("reference: norm_product", "")


def said(speculate) -> str:
    return refusal(ValueError, lambda: gb.decoder(cases.shared("Llama").model, 1, cases.ROOM, speculate=speculate))


def test_wrong_arguments():
    drafts = (cases.shared("Llama").model, 0), (cases.build("Llama", device="meta"),), (torch.nn.ReLU(),)
    same_texts("decode/speculate:wrong_arguments", map(said, (0, 16, True, "text", *(gb.Draft(*given) for given in drafts))))


SERVED = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {**SAMPLED, "logprobs": True}], ids=["greedy", "all settings"])
@pytest.mark.parametrize(("tokens", "rows"), [(4, 1), (7, 1), (1, 4), (3, 2)])
@DRAFTS
def test_in_graphs_the_tokens_are_those_of_plain_graphs(draft, tokens, rows, how):
    """bf16, where the kernels take all tokens at once: each row has the logits that it gets alone, to the bit, so no draw may
    differ. Beside two others a plain row is multiplied by cuBLAS, which rounds at other places."""
    model = served("Qwen3")
    other = None if draft == "text" else served("Llama" if draft == "other" else "Qwen3")
    fast = gb.decoder(model, rows, 512, speculate=gb.Draft(other, tokens) if other else tokens, verify="quick")
    assert fast.stepper.exact(rows)
    plain = gb.decoder(model, 1, 512, verify="quick")
    given = cases.prompts(*range(5, 5 + rows))
    found = fast.generate(given, max_new_tokens=200, **how)
    alone = [plain.generate([prompt], max_new_tokens=200, **how).sequences[0] for prompt in given]
    assert found.tokens == [sequence.tokens for sequence in alone]
    for got, wanted in zip(found.sequences, alone):
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(wanted.logprobs), rtol=0, atol=1e-5)
    assert draft != "same" or found.tokens_a_step > tokens


def served(kind: str) -> torch.nn.Module:
    sizes = {"vocab_size": 32000, "max_position_embeddings": 512, **SERVED}
    return cases.scaled(cases.build(kind, torch.bfloat16, "cuda:0", **sizes), 0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["text", "same"])
def test_gemm_steps_in_graphs(draft):
    """cuBLAS computes what no narrow kernel takes: the graph against its own steps, and against plain ones but for rounding."""
    model = served("Llama")
    fast = gb.decoder(model, 8, 512, speculate=gb.Draft(None if draft == "text" else served("Llama"), adaptive=False))
    given = cases.prompts(*range(5, 13))
    found = fast.generate(given, max_new_tokens=100).tokens
    fast.graphs.launch = fast.graphs.run
    assert fast.generate(given, max_new_tokens=100).tokens == found
    plain = gb.decoder(model, 8, 512)
    for prompt, ours, theirs in zip(given, found, plain.generate(given, max_new_tokens=100).tokens):
        at = next((at for at, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
        if at is not None:  # a near tie: narrow steps in fp32 and cuBLAS in bf16 may each take another of the two
            texts = [[*prompt, *ours[:at], token] for token in (ours[at], theirs[at])]
            one, other = (scores[-1] for scores in plain.score(texts))
            assert abs(one - other) < 0.1, f"{one:.3f} against {other:.3f} after {at} tokens"


@pytest.mark.parametrize("way", WAY)
@pytest.mark.parametrize("fails", [False, True], ids=["random drafts", "drafts that fail"])
def test_launches_of_either_kind_bring_the_tokens_of_plain_steps(way, fails, monkeypatch):
    """As the pace has it, where a verified step takes as long as 1.4 plain ones; and the text that drafts are looked up in."""
    monkeypatch.setattr(Pace, "REST", 8)
    fast, plain = gb.decoder(cases.shared("Qwen3").model, 2, cases.ROOM, k=4, speculate=3, verify=False), cases.shared("Qwen3")
    fast.stepper.pace.seconds[2] = 1.4, 1.0
    launched, run = [], fast.stepper.run
    fast.graphs.run = lambda rows, steps, variant: (launched.append(variant.plain), run(rows, steps, variant))
    if fails:
        fast.stepper.draft = lambda state, chunk, variant, before=fast.stepper.draft: (
            before(state, chunk, variant),
            chunk.token[:, 1:].fill_(0),
        )
    found = compare(fast, plain, cases.prompts(9, 5), max_new_tokens=44, **WAY[way])
    text = fast.stepper.text[: len(found.tokens)].tolist()
    for prompt, tokens, row in zip(cases.prompts(9, 5), found.tokens, text):
        assert row[: len(prompt) + len(tokens) - 2] == [*prompt, *tokens[:-2]]  # of a row that has ended nobody reads the end
    assert not fails or (True in launched and False in launched[launched.index(True) :])


def test_the_pace_drafts_while_it_pays():
    pace = Pace((32, 8, 1))
    pace.begin(1)
    assert not pace.plain(8), "not measured"
    pace.seconds[1] = 1.3, 1.0

    def launch(tokens_a_step: float, steps: int = 8) -> bool:
        """A launch whose tokens come at once, if it drafts; return whether it is plain."""
        plain = pace.plain(steps)
        pace.launched(plain, steps)
        if not plain:
            pace.add(round(tokens_a_step * steps), steps)
        return plain

    pace.begin(1)
    assert not any(launch(2.0) for _ in range(50))
    kinds = [launch(1.0) for _ in range(400)]
    trials = [at for at, plain in enumerate(kinds) if not plain]
    assert len(trials) < 12 and sum(kinds[:60]) > 50  # of 400 launches, and soon
    assert any(not launch(2.5) for _ in range(400)) and not any(launch(2.5) for _ in range(50))
    for _ in range(20):
        launch(1.0)
    pace.begin(1)
    assert pace.plain(1) and not pace.plain(8)  # a request begins with a trial, which one step is not
    pace.launched(False, 8)
    assert pace.plain(8) and pace.plain(8)  # until its tokens are here
    pace.add(24, 8)
    assert not pace.plain(8)
    pace.begin(1)
    assert pace.lead(3) == 2
    pace.launched(False, 8)
    assert pace.lead(3) == 1  # until the first trial of a request is over
    pace.add(8, 8)
    assert pace.lead(3) == 2 and pace.plain(8)  # far below: at once


@pytest.mark.parametrize(("right", "least"), [(0.05, 0.97), (0.2, 0.97), (0.7, 1.5), (0.85, 1.9)])
def test_texts_whose_drafts_fail_cost_three_percent(right, least):
    """Texts of 240 tokens: three drafted ones, each right so often, where a verified step takes 1.6 plain ones, and of plain
    launches 1 % is for the draft's cache. Against plain decoding, with launches as running.py has them."""
    pace, draw, cost, texts = Pace((32, 8, 1)), random.Random(0), 0.0, 200
    pace.seconds[1] = 1.6, 1.0
    for _ in range(texts):
        pace.begin(1)
        flight, got, launches = collections.deque(), 0, 0
        while got < 240:
            left = 240 - got - sum(steps if plain else steps * pace.rate for steps, plain, _ in flight)
            if left <= 0 or len(flight) >= pace.lead(3):
                steps, plain, tokens = flight.popleft()
                got += tokens
                if not plain:
                    pace.add(tokens, steps)
                continue
            ladder = (1,) if launches == 0 else (8, 1)
            plain = pace.plain(next(k for k in ladder if k == 1 or k <= left / pace.rate))
            ladder = pace.ladder[max(0, 2 - launches) :] if plain else ladder
            steps = next(k for k in ladder if k == 1 or k <= (left if plain else left / pace.rate))
            accepted = sum(next((n for n in range(3) if draw.random() > right), 3) for _ in range(0 if plain else steps))
            flight.append((steps, plain, steps + accepted))
            cost += steps * (1.01 if plain else 1.6)
            launches += 1
            pace.launched(plain, steps)
    assert 240 * texts / cost > least
