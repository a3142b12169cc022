"""The body against transformers' own model: texts, rows at positions, changed weights; experts in codes by numbers."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.fx.experimental.proxy_tensor import make_fx

import gpubound as gb
from gpubound.kernels.decode_product import Norm
from gpubound.kernels.packed_weights import pack_fp4, unpack
from gpubound.models.deepseek_v4.decode import attention, body as compressed, mixture as experts
from gpubound.models.deepseek_v4.decode.mixture import CodedExperts, LiveExperts, experts_of
from gpubound.watch import no_stall, watch
from gpubound.watch.pretend import simgpu
from tests.messages import message

from .cases import CSA, HCA, RATES, ROOM, TOP, WINDOW, body_of, build, model_of, own_logits, stand, step, text

EXACT = {"rtol": 0, "atol": 1e-5}  # logits are about 1
LONG = 300


def test_logits_of_a_whole_text(monkeypatch):
    """In one piece and in many: chunks of three stretches, scores of seven tokens at a time."""
    body, ids = body_of(), text(LONG)
    want = own_logits(model_of(), ids)
    torch.testing.assert_close(torch.cat(list(body.logits_after(ids))), want, **EXACT)
    monkeypatch.setattr(body, "chunk", 24)
    monkeypatch.setattr(attention, "PIECE", 7)
    torch.testing.assert_close(torch.cat(list(body.logits_after(ids))), want, **EXACT)


def test_prompts_whose_last_piece_is_one_token(monkeypatch):
    """Of several rows: an index reads how many entries each token may see, a number a row."""
    body, texts = body_of(rows=2), [text(17), text(17, seed=2)]
    monkeypatch.setattr(attention, "PIECE", 16)
    stand(body, texts)
    found = step(body, [3, 4], [17, 17])
    want = [own_logits(model_of(), torch.tensor([*ids, token]))[-1] for ids, token in zip(texts, (3, 4))]
    torch.testing.assert_close(found, torch.stack(want), **EXACT)


@pytest.mark.slow
def test_logits_of_150_tokens_one_by_one():
    """Three rows, each of which decodes a third of the text from where it stands."""
    body, ids = body_of(), text(150)
    starts = [0, 50, 100]
    stand(body, [ids[:start] for start in starts])
    found = torch.stack([step(body, ids[[start + n for start in starts]], [start + n for start in starts]) for n in range(50)])
    torch.testing.assert_close(found.transpose(0, 1).flatten(0, 1), own_logits(model_of(), ids), **EXACT)


def test_logits_of_several_tokens_a_step_some_of_which_are_taken_back():
    """Steps of four, of which the last two are guesses: wrong ones, which the next step writes over."""
    body, ids = body_of(rows=2, tokens=4), text(90)
    want, starts = own_logits(model_of(), ids), [3, 57]
    stand(body, [ids[:start] for start in starts])
    for n in range(0, 28, 2):
        place = torch.tensor([[start + n + t for t in range(4)] for start in starts])
        tokens = ids[place]
        tokens[:, 2:] = (tokens[:, 2:] + 1) % 89
        found = step(body, tokens, place).view(2, 4, -1)
        torch.testing.assert_close(found[:, :2], want[place[:, :2]], **EXACT)


def edges() -> list[int]:
    """Lengths around every edge: of a stretch, of the window, and where the index begins to choose."""
    around = [*RATES.values(), WINDOW, TOP * RATES["compressed_sparse_attention"]]
    return sorted({length + more for length in around for more in (-1, 0, 1)})


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.slow
def test_steps_of_a_draft_that_are_taken_back_leave_the_window_as_it_was():
    """A draft takes a step a token, and begins again after the last right one: as a body with room for all of them."""
    model, other = build(), build()
    with torch.no_grad():
        other.lm_head.weight.neg_()  # so that no draft is right
    fast = gb.decoder(model, 1, ROOM, speculate=gb.Draft(other, 6), verify=False)
    draft, given = fast.stepper.drafting, text(40).tolist()
    one, logits = draft.step, []
    draft.step = lambda *inputs: logits.append(one(*inputs).clone()) or logits[-1]
    found = fast.generate(given, max_new_tokens=4)
    assert found.tokens_a_step == 1
    firsts = torch.cat(logits[:: fast.stepper.tokens])  # after the tokens of the text
    want = own_logits(other, torch.tensor([*given, *found.tokens[0]]))[len(given) - 1 :]
    torch.testing.assert_close(firsts, want[: len(firsts)], **EXACT)


@pytest.mark.slow
def test_what_was_recorded_at_one_length_serves_any_other():
    """The ops of a step as a graph would hold them: traced at one length, replayed at others, beside the model."""
    model = build(num_hidden_layers=2, layer_types=[HCA, CSA], mlp_layer_types=["moe", "hash_moe"], hc_sinkhorn_iters=1)
    body, ids = body_of(model), text(LONG)
    want = own_logits(model, ids)
    token, position = torch.zeros(2, 3, dtype=torch.int32)
    replay = make_fx(lambda token, position: body.step(token, position))(token, position)
    lengths = [*edges(), 0, 100, LONG - 1]
    for place in zip(*[iter(lengths)] * 3, strict=True):
        stand(body, [ids[:n] for n in place])
        found = replay(ids[list(place)].int(), torch.tensor(place).int())
        torch.testing.assert_close(found, want[list(place)], **EXACT)


@pytest.mark.slow
def test_nothing_is_read_that_the_text_did_not_write():
    body, ids = body_of(), text(70)
    clean = []
    for poison in (False, True):
        if poison:
            body.poison()
        stand(body, [ids[:1], ids[:9], ids[:50]])
        clean.append(torch.stack([step(body, ids[[1 + n, 9 + n, 50 + n]], [1 + n, 9 + n, 50 + n]) for n in range(14)]))
    assert torch.equal(*clean)
    body.poison()
    assert step(body, ids[:1], [0]).isfinite().all()  # a prompt of one token has no prefill


def test_of_equal_scores_the_earlier_entries_are_chosen():
    index = body_of().layers[2].attention.index
    generator = torch.Generator().manual_seed(0)
    q, keys = torch.randn(2, 3, 24, 8, generator=generator).sign(), torch.randn(2, 80, 8, generator=generator)
    keys[:, ::2] = keys[:, :1]  # equal entries
    keys[:, 5] = 0
    index.entries.store[:2] = keys
    closed = torch.tensor([[0, 4, 20], [9, 19, 20]], dtype=torch.int32)
    chosen = index.choose(q.flatten(0, 1), torch.ones(6, 24), 2, closed.flatten()).view(2, 3, TOP)
    for b in range(2):
        for t in range(3):
            scores = [float(torch.einsum("hd,d->h", q[b, t], key).clamp(min=0).sum()) for key in keys[b, : closed[b, t]]]
            best = sorted(range(len(scores)), key=lambda s: (-round(scores[s], 4), s))[:TOP]
            assert chosen[b, t].tolist() == sorted(best) + [-1] * (TOP - len(best))


@pytest.mark.slow
def test_greedy_tokens_are_those_of_generate():
    """A ragged batch through the decoder; generate gets its prompts one by one, for it pads into a stretch."""
    prompts = [text(n, seed=n).tolist() for n in (1, 19, 7)]
    fast = gb.decoder(build(), 3, ROOM)
    found = fast.generate(prompts, max_new_tokens=14).tokens
    for prompt, tokens in zip(prompts, found):
        ids = torch.tensor([prompt])
        own = fast.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=14, pad_token_id=0)
        assert own[0, len(prompt) :].tolist() == tokens
    looked_up = gb.decoder(fast.model, 3, ROOM, speculate=3, verify=False)
    assert looked_up.generate(prompts, max_new_tokens=14).tokens == found
    assert str(fast).count("of 4 tokens: 6 by index") == 1 and fast.path == ""


@pytest.mark.slow
def test_a_padded_batch_gives_the_tokens_of_its_prompts_alone():
    """As a tokenizer pads it, on the left or on the right; transformers' own tokens would change."""
    fast, prompts = gb.decoder(model_of(), 2, ROOM, verify=False), [text(5, seed=2), text(13, seed=3)]
    want = [fast.generate(prompt, max_new_tokens=6, stop=()).tokens[0] for prompt in prompts]
    for side in ("left", "right"):
        ids, mask = (
            torch.nn.utils.rnn.pad_sequence(rows, True, 0, side) for rows in (prompts, [torch.ones_like(p) for p in prompts])
        )
        assert fast.generate({"input_ids": ids, "attention_mask": mask}, max_new_tokens=6, stop=()).tokens == want


def test_weights_are_read_live_and_one_that_moved_is_bound_anew():
    model, ids = build(), text(40).tolist()
    fast = gb.decoder(model, 1, ROOM, verify=False)
    before = fast.score(ids)[0]
    with torch.no_grad():
        model.model.layers[1].self_attn.compressor.position_bias.mul_(-1)
        model.model.layers[2].mlp.gate.e_score_correction_bias.mul_(-2)
    for moved in (False, True):
        if moved:
            shift = model.model.layers[2].attn_hc.base
            shift.data = shift.data * 2
        own = own_logits(model, torch.tensor(ids))[:-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        found = fast.score(ids)[0]
        torch.testing.assert_close(torch.tensor(found), own, rtol=0, atol=1e-4)
        assert (torch.tensor(before) - own).abs().max() > 1e-2


def of_gates(model):
    for layer in model.model.layers:
        layer.mlp.gate.routed_scaling_factor = 6.0


def of_norm(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 3.0


def of_window(model):
    model.config.sliding_window = 5
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 5


def of_index(model):
    model.model.layers[2].self_attn.compressor.indexer.index_topk = 1


def of_bias(model):
    layer = model.model.layers[1].self_attn.q_a_proj
    layer.bias = torch.nn.Parameter(torch.linspace(-2, 2, layer.out_features))


@pytest.mark.parametrize("change", [of_gates, of_norm, of_window, of_index, of_bias])
@pytest.mark.parametrize("how", [{}, {"devices": ["cpu", "cpu"], "split": "tensors"}], ids=str)
def test_what_is_set_on_its_modules_later_is_taken_anew(change, how):
    model, ids = build(), text(40).tolist()
    fast = gb.decoder(model, 1, ROOM, verify=False, **how)
    before = fast.score(ids)[0]
    change(model)
    own = own_logits(model, torch.tensor(ids))[:-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(fast.score(ids)[0]), own, rtol=0, atol=1e-4)
    assert (torch.tensor(before) - own).abs().max() > 1e-2


def test_experts_and_the_shared_one_with_other_limits_are_refused():
    model = build()
    fast = gb.decoder(model, 1, ROOM, verify=False)
    model.model.layers[1].mlp.experts.limit = 0.25
    with pytest.raises(gb.GenerateError) as error:
        fast.score(text(9).tolist())
    assert str(error.value) == message("decode/compressed/body:experts_and_the_shared_o")


def test_more_rows_than_read_their_experts_one_by_one():
    """Nine tokens a step are sorted by their experts."""
    body, ids = body_of(rows=9), text(60)
    want, place = own_logits(model_of(), ids), list(range(5, 59, 6))
    stand(body, [ids[:n] for n in place])
    torch.testing.assert_close(step(body, ids[place], place), want[place], **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_trial_judges_the_experts_by_themselves(dtype):
    assert body_of(build(dtype)).trial.error < 0.1


def test_entries_of_equal_scores_may_be_chosen_otherwise():
    """All scores are 0, of which transformers takes any. The trial holds the model to the body's choice, and the scores to the
    best: 3 of 20 tiny models with random weights were refused before."""
    model = build(index_n_heads=2, compress_rates=RATES | {HCA: 40})  # a trial of 44 tokens, 11 entries
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("scorer.weights_proj.weight"):
                parameter.zero_()
    assert body_of(model).trial.error < 1e-4


def test_a_folder_in_16_bits_whose_norms_and_mixing_stay_in_32(tmp_path):
    build().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    body = body_of(model)
    assert body.trial.error < 0.1 and body.dtype == body.state()[0].dtype == torch.bfloat16


@pytest.mark.slow
def test_a_step_never_waits_for_the_device(monkeypatch):
    monkeypatch.setattr(compressed, "closed_projection", lambda *given: None)  # its weights are no plain parameters
    if torch.cuda.is_available():
        pytest.skip("the pretend device needs CUDA_VISIBLE_DEVICES=")
    model = build(device=simgpu(), num_hidden_layers=2, layer_types=[HCA, CSA], mlp_layer_types=["moe", "hash_moe"])
    model.set_experts_implementation("batched_mm")  # of the trial's own forward: histc takes no integers on a CPU
    body = body_of(model, rows=2)
    stand(body, [text(5), text(30)])
    token, place = (torch.tensor(values, dtype=torch.int32).to(body.device) for values in ([3, 4], [5, 30]))
    with no_stall(), watch() as ledger:
        for _ in range(2):
            token = body.step(token, place).argmax(-1).int()
            place = place + 1
    ledger.assert_within(syncs=0, h2d_bytes=0, d2h_bytes=0)


COUNT, WIDTH, HIDDEN, TOKENS, SLOTS = 5, 32, 64, 11, 3


def both(monkeypatch, at_once: int) -> tuple[LiveExperts, CodedExperts]:
    monkeypatch.setattr(experts, "WIDE", at_once * 3 * WIDTH * HIDDEN)
    generator = torch.Generator().manual_seed(0)

    def packed(rows: int, columns: int):
        codes = torch.randint(256, (COUNT * rows, columns // 2), generator=generator, dtype=torch.uint8)
        return pack_fp4(codes, torch.randint(120, 125, (COUNT * rows, columns // 32), generator=generator, dtype=torch.uint8))

    coded = SimpleNamespace(gate_up=packed(2 * WIDTH, HIDDEN), down=packed(HIDDEN, WIDTH), limit=0.7)
    coded.gate, coded.norm = SimpleNamespace(weight=torch.empty(0)), SimpleNamespace(weight=torch.empty(HIDDEN))
    numbers = {part: unpack(getattr(coded, part)).unflatten(0, (COUNT, -1)) for part in ("gate_up", "down")}
    return experts_of(SimpleNamespace(**vars(coded) | numbers)), experts_of(coded)


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(TOKENS, COUNT, generator=generator).argsort(1)[:, :SLOTS]
    return torch.randn(TOKENS, HIDDEN, generator=generator), ids, torch.rand(TOKENS, SLOTS, generator=generator)


@pytest.mark.parametrize("ungrouped", ["", "not here"])
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_many_rows(at_once, ungrouped, monkeypatch):
    live, coded = both(monkeypatch, at_once)
    assert isinstance(coded, CodedExperts) and not isinstance(live, CodedExperts) and coded.at_once == at_once
    coded.ungrouped = ungrouped or None
    h, ids, shares = drawn()
    wanted = live.many(h, ids, shares)
    torch.testing.assert_close(coded.many(h, ids, shares), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    firsts = [first for first, *_ in coded.numbers()]
    assert firsts == list(range(0, COUNT, at_once)) and message("decode/compressed/experts:many_rows", at_once).within(
        coded.report()[0]
    )


def test_few_rows_and_what_is_counted(monkeypatch):
    live, coded = both(monkeypatch, 5)
    (u, ids, shares), norm = drawn(), Norm(torch.rand(HIDDEN, generator=torch.Generator().manual_seed(2)), 1e-6)
    ids = ids[:3].int()
    found, wanted = (one.few_down(one.few(u[:3], norm, ids), ids, shares[:3]) for one in (coded, live))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    assert coded.count == live.count == COUNT and COUNT * coded.nbytes == sum(t.nbytes for t in coded.tensors())
