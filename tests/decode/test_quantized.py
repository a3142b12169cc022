"""Decoding from packed weights: the tokens of what they stand for, their bytes, what rounding costs, when they are made."""

import copy
import sys

import pytest
import torch
from torch.nn import functional as F

import gpubound as gb
from gpubound import kernels
from gpubound.decode import certificate as reference, transformer, weights
from gpubound.decode.certificate import MARGIN, accuracy
from gpubound.decode.generate import LADDER, FastDecoder
from gpubound.decode.runner import BatchState, RunnerConfig, Stepper
from gpubound.decode.transformer import FusedRunner
from gpubound.decode.weight_view import bind
from gpubound.kernels.packed_weights import KINDS, pack, unpack
from gpubound.models import Decoder, DecoderConfig, decoding
from tests.messages import refusals

from .cases import ALL, ROOM, VOCABULARY, build, prompts


def make(model, kind: str, max_batch: int = 4) -> FusedRunner:
    live = bind(model)
    assert not isinstance(live, str), live
    return FusedRunner(live, RunnerConfig(max_batch, ROOM, weights=kind))


def over(model, body: FusedRunner, verify: bool | str = False) -> FastDecoder:
    slots = BatchState(body.max_batch, body.vocab, max(LADDER), body.device)
    return FastDecoder(model, Stepper(body, slots), LADDER, None, verify)


@torch.no_grad()
def rounded(model, kind: str):
    """A copy of the model whose matrices are what the packed ones stand for; the head's is its own, tied or not."""
    twin = copy.deepcopy(model)
    twin.lm_head.weight = torch.nn.Parameter(unpack(pack(model.lm_head.weight, kind)).to(model.lm_head.weight.dtype))
    for weight in twin.model.layers.parameters():
        if weight.dim() == 2:
            weight.copy_(unpack(pack(weight, kind)))
    return twin


def greedy(body: FusedRunner, prompt: list[int], tokens: list[int]) -> list[int]:
    """The likeliest after the prompt and after each of `tokens` but the last: themselves, where they are greedy ones.

    By plain fp32 over the numbers that the packed weights stand for.
    """
    ids = torch.tensor([*prompt, *tokens[:-1]], device=body.device)
    return reference.reference_logits(body.exact(), ids)[len(prompt) - 1 :].argmax(-1).tolist()


# Packing knows no family: each has one kind in turn, and three that differ most have all.
OF_FAMILIES = [(family, kind) for at, family in enumerate(ALL) for k, kind in enumerate(KINDS)
               if k == at % len(KINDS) or family in ("Qwen2", "Gemma3", "Phi3")]  # fmt: skip


@pytest.mark.parametrize(("family", "kind"), OF_FAMILIES)
def test_tokens_are_those_of_the_rounded_model(device, family, kind):
    """Every family, ragged prompts: prefill unpacks, steps do not, and both agree with plain fp32 over the same numbers."""
    model = build(family, device=device)
    body = make(model, kind)
    texts = prompts(1, 19, 6)
    found = over(model, body).generate(texts, max_new_tokens=5).tokens
    assert found == [greedy(body, text, tokens) for text, tokens in zip(texts, found)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_what_weights_stand_for_is_what_the_model_would_be_rounded(device, family, kind, monkeypatch):
    """Packed together or alone, a weight's numbers are the same, read by 7 rows, too; a tied head is rounded, the embedding is
    not."""
    model = build(family, device=device)
    monkeypatch.setattr(decoding, "AT_ONCE", 7 * model.config.hidden_size)
    ids = torch.tensor(prompts(20)[0], device=device)
    want = rounded(model, kind)(ids[None]).logits[0]
    torch.testing.assert_close(reference.reference_logits(make(model, kind).exact(), ids), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("together", "part"), [(64, "5 to 10 rows"), (9, "more than 9 rows")])
def test_many_rows_read_the_codes_together_and_more_of_them_unpacked_weights(device, kind, together, part, monkeypatch):
    monkeypatch.setattr(weights, "MATMUL_ROWS", together)
    monkeypatch.setattr(transformer, "MATMUL_ROWS", together)
    model = build("Qwen3", device=device)
    body = make(model, kind, max_batch=10)
    texts = prompts(*range(2, 12))
    before, multiplied, product = body.form.unpacked, [], kernels.quantized_matmul
    noted = lambda *given, **options: multiplied.append(given) or product(*given, **options)  # noqa: E731
    monkeypatch.setattr(kernels, "quantized_matmul", noted)
    found = over(model, body).generate(texts, max_new_tokens=6).tokens
    assert found == [greedy(body, text, tokens) for text, tokens in zip(texts, found)]
    assert body.form.unpacked > before, "prompts, and steps of more rows"
    assert bool(multiplied) == (together >= 10) and any(part in row for row, _, _ in body.report()), body.report()


def test_logits_in_bf16_are_near_the_rounded_model(device):
    """No further from fp32 over the same numbers than the model that holds them, rounded to bf16, is."""
    model = build("Llama", torch.bfloat16, device)
    ids = torch.tensor(prompts(12)[0], device=device)
    for kind in KINDS:
        body = make(model, kind, 1)
        truth = reference.reference_logits(body.exact(), ids)[-1]
        own = rounded(model, kind)(ids[None]).logits[0, -1].float()
        body.prefill(ids[None, :-1], torch.tensor([11], device=device))
        body.begin(ids[-1:])
        ours = body.step(ids[-1:].int(), torch.tensor([11], device=device, dtype=torch.int32))[0]
        assert (ours - truth).norm() <= MARGIN * (own - truth).norm()


def test_a_step_reads_the_packed_bytes(device):
    model = build("Llama", torch.bfloat16, device)  # 32 wide: a group of 128 for every row
    hidden, inner, kv, layers = 32, 40, 16, 2
    weights = {"qkv": hidden + 2 * kv, "o": hidden, "gate_up": 2 * inner, "down": hidden}
    bits, scale = {"int8": 8, "int4": 4, "fp8": 8}, {"int8": 2, "int4": 2, "fp8": 4}
    small = 2 * (2 * layers + 1) * hidden
    for kind in KINDS:
        body = make(model, kind)
        rows = layers * sum(weights.values()) + VOCABULARY
        want = rows * (128 * bits[kind] // 8 + scale[kind]) + small
        assert body.bytes_a_step([0]) == want
        assert body.bytes_a_step([5, 2]) == want + 7 * 2 * layers * 2 * 8 * 2


def test_int4_is_a_quarter_of_bf16_where_groups_are_full():
    model = Decoder(DecoderConfig(256, 512, 2, 4, 2, 384), dtype=torch.bfloat16).eval()
    live = bind(model)
    sizes = {kind: FusedRunner(live, RunnerConfig(1, 32, weights=kind)).bytes_a_step([]) / live.bytes_read() for kind in KINDS}
    assert sizes["int4"] == pytest.approx(0.258, abs=0.003)  # (4 bits + 16 / 128) / 16
    assert sizes["int8"] == pytest.approx(0.508, abs=0.003)
    assert sizes["fp8"] == pytest.approx(0.504, abs=0.005)


def train():
    """A model that has learned to count: a few dozen steps on sequences that go up by their second token."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(64, 128, 2, 4, 2, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        ids = counting(torch.randint(64, (16,)), torch.randint(1, 4, (16,)))
        output = model(ids[:, :-1])
        logits = getattr(output, "logits", output)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def counting(first: torch.Tensor, step: torch.Tensor, length: int = 24) -> torch.Tensor:
    return (first[:, None] + step[:, None] * torch.arange(length)) % 64


@pytest.mark.slow
def test_a_trained_model_loses_little():
    """The fewer bits, the more; little in all. The table shows it."""
    trained = train()
    text = torch.cat(list(counting(torch.tensor([3, 40, 9]), torch.tensor([1, 2, 3]))))
    found = {}
    for kind in KINDS:
        body = make(trained, kind)
        assert ("accuracy", "not measured", "") in body.report()
        found[kind] = accuracy(body, text)
        assert ("accuracy", "measured", str(found[kind])) in body.report()
    assert 0 < found["int8"].kl_mean < found["fp8"].kl_mean < found["int4"].kl_mean < 0.2
    for result in found.values():
        assert result.tokens == len(text) - 1
        assert result.kl_mean <= result.kl_max < float("inf")
        assert abs(result.perplexity / result.original_perplexity - 1) < 0.3
    assert found["int8"].same_best > 0.95


def test_accuracy_is_what_two_models_say(device):
    """Against both models' own forwards and torch's own divergence; a long text is read in pieces."""
    model = build("Llama", device=device)
    body = make(model, "int4")
    ids = torch.tensor(prompts(40)[0], device=device)
    with torch.no_grad():
        theirs, ours = (m(ids[None, :-1]).logits[0].log_softmax(-1) for m in (model, rounded(model, "int4")))
    divergence = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
    found = accuracy(body, ids)
    assert found.kl_mean == pytest.approx(divergence.mean().item(), rel=1e-3)
    assert found.kl_max == pytest.approx(divergence.max().item(), rel=1e-3)
    assert found.perplexity == pytest.approx(F.nll_loss(ours, ids[1:]).exp().item(), rel=1e-3)
    assert found.original_perplexity == pytest.approx(F.nll_loss(theirs, ids[1:]).exp().item(), rel=1e-3)


def test_pieces_of_a_long_text_cover_it(device, monkeypatch):
    module = sys.modules[accuracy.__module__]
    body = make(build("Llama", device=device), "int8")
    monkeypatch.setattr(module, "PIECE", 10)
    assert accuracy(body, prompts(34)[0]).tokens == 33


def test_weights_that_change_are_packed_again(device, capsys, monkeypatch):
    """In place, at the next request; the tokens are then those of the new weights."""
    monkeypatch.setattr("gpubound.trace._printed", set())
    model = build("Llama", device=device)
    body = make(model, "int8")
    decoder = over(model, body)
    text = prompts(8)
    decoder.generate(text, max_new_tokens=4)
    assert body.moved() is None
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-1)
    assert body.moved() == "model.layers.1.mlp.up_proj.weight"
    found = decoder.generate(text, max_new_tokens=8).tokens
    assert found == [greedy(body, text[0], found[0])]
    assert body.moved() is None
    said = "decoder: the weights have changed since they were rounded to int8: rounded again"
    assert said in "".join(capsys.readouterr())
    change = torch.nn.Parameter(torch.randn_like(model.model.layers[0].self_attn.q_proj.weight))
    model.model.layers[0].self_attn.q_proj.weight = change
    found = decoder.generate(text, max_new_tokens=8).tokens
    assert found == [greedy(body, text[0], found[0])]


def test_what_writes_past_the_version_counter_is_told(device):
    """A graph's replay or `.data` count as no version: until torch is told, the copies are of the weights as they were."""
    model = build("Llama", device=device)
    body = make(model, "int8")
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data.mul_(2)
    assert body.moved() is None
    torch.autograd.graph.increment_version([weight])
    assert body.moved() == "model.layers.0.mlp.down_proj.weight"


def test_graphs_are_made_anew_behind_a_call_of_rebind(device, monkeypatch):
    """They read codes that are freed."""
    decoder, cleared = gb.decoder(build("Llama", device=device), 1, 64, weights="int8", verify=False), []
    clear = decoder.graphs.clear
    monkeypatch.setattr(decoder.graphs, "clear", lambda: cleared.append(1) or clear())
    decoder.generate([3, 4], max_new_tokens=2)
    decoder.body.rebind()
    for _ in range(2):
        decoder.generate([3, 4], max_new_tokens=2)
    assert len(cleared) == 1


def test_wrong_arguments_are_named():
    model = build("Llama")
    live = bind(model)
    body = FusedRunner(live, RunnerConfig(1, ROOM, weights="int8"))
    fast = gb.decoder(model, 1, ROOM, weights="int8", verify=False)
    refusals(
        "decode/quantized:wrong_arguments",
        lambda: fast.accuracy([[3, 4], [5, 6]]),
        lambda: FusedRunner(live, RunnerConfig(1, ROOM, weights="int2")),
        lambda: accuracy(body, [3]),
        lambda: accuracy(body, [3, VOCABULARY]),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_replay_the_packed_step(kind):
    """On a GPU: graph against single launches by the quick certificate, then the tokens of plain fp32; a wide batch too."""
    model = build("Llama", device="cuda")
    for rows in (1, 4, 10):
        body = make(model, kind, rows)
        texts = prompts(*range(3, 3 + rows))
        found = over(model, body, "quick").generate(texts, max_new_tokens=40).tokens
        assert found == [greedy(body, text, tokens) for text, tokens in zip(texts, found)]
