"""draft_head: the loss by its formula in fp64, packed rows, and a head that learns what its model says."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import gpubound as gb
from gpubound.models.draft_head import DraftHead, hidden_states_of
from gpubound.train import AdamW, TrainStep
from gpubound.train.objectives import chunked_head
from gpubound.train.objectives.draft_head import DraftLoss
from gpubound.watch import watch
from gpubound.watch.pretend import simgpu

from ...messages import refusal

WORDS = 23
SOME = [0, 2, 3, 5, 7, 11, 13, 17, 19]


def models(tokens=SOME, layers: int = 3, dtype=torch.float64) -> tuple[gb.Decoder, DraftHead]:
    torch.manual_seed(0)
    model = gb.Decoder(gb.DecoderConfig(16, 24, layers, 4, 2, WORDS, qk_norm=True), dtype=dtype)
    head = DraftHead.for_model(model, tokens, kv_heads=1)
    with torch.no_grad():
        for parameter in (*model.parameters(), *head.parameters()):
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(std=0.3)
    return model, head


def ids_of(rows: int = 2, tokens: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randint(WORDS, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def by_formula(model: gb.Decoder, head: DraftHead, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, int]:
    """One text (T,): each position alone, its guesses after one another, and their divergence from the model's distribution."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        states, _ = hidden_states_of(model, {"input_ids": ids[None]}, head.layers)
        wanted = model(ids[None])[0][:, head.targets].log_softmax(-1)
    for last in range(len(ids)):
        known = F.embedding(ids[None, : last + 1 + tokens], head.table(model))
        guesses = min(tokens, len(ids) - 1 - last)
        outputs = head(states[:, : last + 1], known[:, : last + 1 + guesses]) if guesses else []
        for guess, x in enumerate(outputs, 1):
            got = head.lm_head(x[0, last]).log_softmax(-1)
            p = wanted[last + guess]
            total, count = total + (p.exp() * (p - got)).sum(), count + 1
    return total, count


@pytest.mark.parametrize("tokens", [SOME, None], ids=["some tokens", "all"])
def test_the_loss_and_its_gradients(tokens, monkeypatch):
    model, head = models(tokens)
    monkeypatch.setattr(chunked_head, "CHUNK", 5)
    ids, loss = ids_of(), DraftLoss(model, 3)
    total, count = loss(head, {"input_ids": ids})
    got = torch.autograd.grad(total, [*head.parameters()])
    parts = [by_formula(model, head, row, 3) for row in ids]
    want = torch.autograd.grad(sum(part for part, _ in parts), [*head.parameters()])
    assert int(count) == sum(number for _, number in parts) == 2 * (7 + 6 + 5)
    torch.testing.assert_close(total.detach(), sum(part for part, _ in parts).detach(), rtol=1e-6, atol=1e-6)
    for (name, _), one, other in zip(head.named_parameters(), got, want):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
    assert all(p.grad is None for p in model.parameters())


def test_examples_of_a_packed_row_do_not_see_each_other():
    """Two examples and padding give the sum of both alone; of labels, -100 takes out the guesses of the token after it."""
    model, head = models()
    first, second, loss = ids_of(1, 6), ids_of(1, 5, seed=1), DraftLoss(model, 2)
    row = {
        "input_ids": torch.cat([first, second, torch.zeros(1, 2, dtype=torch.int64)], 1),
        "position_ids": torch.cat([torch.arange(6), torch.arange(5), torch.arange(2)])[None],
        "segment_ids": torch.tensor([0] * 6 + [1] * 5 + [-1] * 2)[None],
    }
    alone = [loss(head, {"input_ids": ids}) for ids in (first, second)]
    total, count = loss(head, row)
    assert int(count) == sum(int(number) for _, number in alone)
    torch.testing.assert_close(total, alone[0][0] + alone[1][0], rtol=1e-6, atol=1e-6)
    labels = first.clone()
    labels[0, 2] = -100  # two guesses fall on it
    assert int(loss(head, {"input_ids": first, "labels": labels})[1]) == int(alone[0][1]) - 2


@pytest.mark.slow
def test_a_head_learns_what_its_model_says():
    """More of its guesses agree with the model than before, and a decoder accepts more of its drafts."""
    model, head = models(None, dtype=torch.float32)
    loss = DraftLoss(model, 2)
    decoder = gb.decoder(model, 1, 64, speculate=gb.Draft(head, 2), verify=False)
    text = torch.tensor([[1, 2, 3, 4] * 4])
    held_out, before = [{"input_ids": text}], decoder.generate(text[0].tolist(), max_new_tokens=32).tokens_a_step
    first = loss.validate(head, held_out)
    step = TrainStep(head, loss, AdamW(lr=1e-2), precision="fp32")
    prompts = [text[0].tolist(), [5, 6]]
    samples = gb.decoder(model, 2, 64, verify=False).generate(prompts, max_new_tokens=32)
    rows = [(prompt + new)[:34] for prompt, new in zip(prompts, samples.tokens)]
    with gb.strict():
        for _ in range(30):
            step([{"input_ids": torch.tensor(rows)}])
    last, after = loss.validate(head, held_out), decoder.generate(text[0].tolist(), max_new_tokens=32)
    assert last["held_out"] < first["held_out"] and last["agreed"] > first["agreed"]
    assert after.tokens_a_step > before and after.tokens[0] == samples.tokens[0]


@pytest.mark.gpu
def test_training_is_captured():
    """On a GPU, with the model that trains in the same loop: its weights move in place under the head's graph."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = gb.Decoder(gb.DecoderConfig(128, 256, 6, 4, 2, 512), dtype=torch.float32)
        batch = torch.randint(512, (4, 1)).repeat(1, 65)
    rows = {"input_ids": batch[:, :-1].contiguous(), "labels": batch[:, 1:].contiguous()}
    step = TrainStep(model, "next_token", AdamW(lr=1e-3), graph="require")
    learn = TrainStep(DraftHead.for_model(model, range(256)), DraftLoss(model, 3), AdamW(lr=1e-2), graph="require")
    losses = []
    for _ in range(20):
        step([rows])
        losses.append(learn([rows]).loss)
    assert len(learn.captured) == 2 and losses[-1] < losses[0] / 2


def placed_llama(**sizes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2} | sizes
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    gb.place(model, device="cpu")
    return model


def test_the_loop_of_a_placed_model_gives_its_hidden_states():
    """They are those of transformers, whose forward is not called: it asks the device for a mask."""
    model, ids = placed_llama(), ids_of()
    with torch.no_grad():
        states, last = hidden_states_of(model, {"input_ids": ids}, (2, 3, 3))
        assert not model.model.delegated
        want = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    torch.testing.assert_close(states, torch.cat([want[2], want[3], want[3]], -1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last, want[-1], rtol=1e-5, atol=1e-5)
    assert not any(block._forward_pre_hooks for block in model.model.layers)


@pytest.mark.slow
def test_a_step_below_a_placed_model_never_waits():
    if torch.cuda.is_available():
        pytest.skip("the pretend device contends with a real one")
    model = placed_llama().to(simgpu())
    before = [p.clone() for p in model.parameters()]
    step = TrainStep(DraftHead.for_model(model, SOME), DraftLoss(model, 2), AdamW(lr=1e-2), precision="fp32", graph="off")
    batch = {"input_ids": ids_of().to(simgpu())}
    with gb.strict():
        step([batch])  # the first one checks the batch, and the model
        with watch() as ledger:
            step([batch])
    ledger.assert_within(syncs=0, h2d_bytes=0)
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before))


@pytest.mark.slow
def test_a_captured_step_below_a_placed_model_is_an_uncaptured_one():
    """On a CPU, where capture makes its checks without a graph."""
    model, losses = placed_llama(), dict[str, list[float]]()
    for graph in ("require", "off"):
        torch.manual_seed(1)
        head = DraftHead.for_model(model, SOME)
        step = TrainStep(head, DraftLoss(model, 2), AdamW(lr=1e-2), precision="fp32", graph=graph)
        with gb.strict():
            losses[graph] = [float(step([{"input_ids": ids_of(seed=seed)}]).loss) for seed in range(3)]
        assert len(step.captured) == 2 * (graph == "require")
    assert losses["require"] == pytest.approx(losses["off"], rel=1e-5)


@pytest.mark.gpu
def test_training_below_a_placed_model_is_captured():
    """Its losses are those of uncaptured steps, and nothing falls back. In bf16, whose sums come in another order each time."""
    model = placed_llama(hidden_size=128, intermediate_size=256, vocab_size=512).to("cuda", torch.bfloat16)
    batches = [{"input_ids": ids_of(8, 128, seed).cuda()} for seed in range(6)]
    losses: dict[str, list[float]] = {}
    for graph in ("require", "off"):
        torch.manual_seed(1)
        step = TrainStep(DraftHead.for_model(model, range(256)), DraftLoss(model, 3), AdamW(lr=1e-3), graph=graph)
        with gb.strict():
            losses[graph] = [float(step([batch]).loss) for batch in batches]
        assert len(step.captured) == 2 * (graph == "require")
    assert not model.model.delegated and losses["off"] == pytest.approx(losses["require"], rel=2e-2)


class TestRefusals:
    def test_what_is_no_head(self):
        model, head = models()
        assert "Decoder" in refusal(ValueError, lambda: TrainStep(model, DraftLoss(model)))
        assert "str" in refusal(ValueError, lambda: DraftLoss("model"))
        assert "16" in refusal(ValueError, lambda: DraftLoss(model, 16))
        other, _ = models(layers=1)
        assert "0 to 0" in refusal(ValueError, lambda: TrainStep(head, DraftLoss(other)))

    def test_batches(self):
        model, head = models()
        loss = DraftLoss(model, 3)
        for batch, fact in (
            ([1], "list"),
            ({"input_ids": ids_of(), "mask": 1}, "mask"),
            ({"input_ids": ids_of(tokens=3)}, "3 tokens"),
            ({"input_ids": ids_of() + 10**6}, "outside the model's vocabulary"),
            ({"input_ids": ids_of().float()}, "torch.float32"),
        ):
            assert fact in refusal(ValueError, lambda batch=batch: loss.check_batch(head, batch))
