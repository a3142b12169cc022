"""Exact decoding: log-probabilities of a rollout are those of the trainer's packed forward, bit for bit."""

import pytest
import torch
import transformers

import gpubound as gb
from gpubound.data.packing import AnswerInRow, answer_rows
from gpubound.models.language_model import logits_of
from gpubound.train.objectives.policy import Policy
from tests.messages import refusal

from . import cases

WORDS = 128
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8] * 13, [9], [10, 11] * 4]
LENGTHS = [5, 3, 9, 4]
ROOM = 96
SHAPE = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def model_of(kind: str, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """A model with wide logits, whose widths are whole vectors of a CPU."""
    torch.manual_seed(0)
    if kind == "own":
        model: torch.nn.Module = gb.Decoder(gb.DecoderConfig(64, 128, 2, 4, 2, WORDS, qk_norm=True, head_width=32))
    else:
        config = getattr(transformers, f"{kind}Config")(**SHAPE)
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    model = model.to(device, dtype)
    if kind != "own":
        gb.place(model, device=device)
    return model


def rows_of(sequences, device, count: int = 2, tokens: int = 160) -> dict[str, torch.Tensor]:
    """Pack the sequences into rows, in the order in which they come."""
    rows: list[list[AnswerInRow]] = [[]]
    for one in sequences:
        fields = {"advantages": 1.0 - one.sample, "sampler_logprobs": one.logprobs}
        answer = AnswerInRow(PROMPTS[one.prompt], one.tokens, one.tokens, fields)
        if sum(len(each.prompt) + len(each.answer) for each in (*rows[-1], answer)) > tokens:
            rows.append([])
        rows[-1].append(answer)
    batch = answer_rows(rows, count, tokens, ("advantages", "sampler_logprobs"))
    return {name: torch.from_numpy(values).to(device) for name, values in batch.items()}


def largest_gap(model, batch, **options) -> float:
    """The largest difference between the sampler's log-probabilities and those of a training step."""
    loss = Policy(**options)
    step = gb.TrainStep(model, loss, "adamw", precision="bf16" if halves(model) else "fp32", exact=True)
    step(batch)
    step.close()
    return loss.take_figures()["largest_gap"]


def halves(model) -> bool:
    return next(model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "pages", "temperature", "dtype"),
    [
        pytest.param("own", None, 1.0, torch.float32, marks=pytest.mark.slow),
        ("own", 9, 0.7, torch.bfloat16),
        pytest.param("Qwen3", 9, 1.0, torch.float32, marks=pytest.mark.slow),
        pytest.param("Llama", None, 1.3, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_log_probabilities_are_the_trainers(kind, pages, temperature, dtype, device):
    """Three rows for eight sequences: refills, prompts that share a prefill, and fewer rows at the end."""
    model = model_of(kind, dtype, device)
    fast = gb.decoder(model, 3, ROOM, pages=pages, exact=True, verify=False)
    sequences = fast.rollout(PROMPTS, n=2, max_new_tokens=LENGTHS, temperature=temperature, stop=()).sequences
    assert [len(one.tokens) for one in sequences] == [length for length in LENGTHS for _ in range(2)]
    batch = rows_of(sequences, device)
    assert (batch["labels"] != -100).sum() == 2 * sum(LENGTHS)
    assert largest_gap(model, batch, temperature=temperature) == 0


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_batch(device):
    model = model_of("own", torch.bfloat16, device)
    found = []
    for rows, pages in ((1, None), (4, 8)):
        fast = gb.decoder(model, rows, ROOM, pages=pages, exact=True, verify=False)
        sequences = fast.rollout(PROMPTS[::2], n=2, max_new_tokens=4, stop=()).sequences
        found.append([(one.tokens, one.logprobs) for one in sequences])
    assert found[0] == found[1]


@pytest.mark.slow
def test_samples_have_the_full_pages_of_their_prompt_once(device):
    """Six rows in pages that would hold three of them apart, and one row at a time."""
    model, prompts = model_of("own", torch.bfloat16, device), [[5, 6, 7, 8, 9] * 26, [3]]
    found, live, counts = [], [0], []
    for rows, pages in ((1, None), (6, 9)):
        fast = gb.decoder(model, rows, 192, pages=pages, exact=True, verify=False)
        run = fast.rollout(prompts, n=6, max_new_tokens=[5, 3], stop=())

        def look(run=run, common=fast.body.cache.common):
            live.append(len(run.rows) - run.rows.count(None))
            counts.append(common.counts.tolist() if run.variant.shared else [])

        run.each_launch = look
        found.append([(one.tokens, one.logprobs) for one in run.sequences])
    assert found[0] == found[1] and run.prefills == 2 and max(live) == 6
    assert [130] * 6 in counts


@pytest.mark.slow
def test_scores_are_the_log_probabilities_of_a_generation(device):
    fast = gb.decoder(model_of("own", torch.bfloat16, device), 2, ROOM, exact=True)
    assert "batch-invariant" in str(fast) and fast.certificate.tokens_compared
    one = fast.generate(PROMPTS[1], max_new_tokens=6, logprobs=True, temperature=1.0, stop=()).sequences[0]
    assert fast.score([PROMPTS[1] + one.tokens])[0][-6:] == one.logprobs


@pytest.mark.slow
def test_the_next_turn_of_a_conversation(device, monkeypatch):
    """With the keys of the turn before, and prefilled again."""
    model, turns = model_of("own", torch.bfloat16, device), []
    for kept in (0, 10**6):
        monkeypatch.setattr("gpubound.decode.rollout.KEPT", kept)
        run = gb.decoder(model, 2, ROOM, exact=True, verify=False).rollout(PROMPTS[:1], max_new_tokens=5, stop=())
        first = next(run)
        run.extend(first, [12, 13, 14])
        turns.append([(one.tokens, one.logprobs) for one in run.sequences])
    assert turns[0] == turns[1]


def test_gradients_are_the_usual_ones(device):
    model = model_of("own", torch.float32, device)
    ids = torch.randint(WORDS, (2, 60), generator=torch.Generator().manual_seed(0)).to(device)
    packed = {
        "segment_ids": (torch.arange(60, device=device) >= 25).long().expand(2, -1),
        "position_ids": torch.cat([torch.arange(25), torch.arange(35)]).to(device).expand(2, -1),
        "cu_seqlens": torch.tensor([0, 25, 60, 85, 120], device=device, dtype=torch.int32),
    }
    for inputs in ({"input_ids": ids}, {"input_ids": ids, **packed}):
        gradients = []
        for context in (gb.BatchInvariant(), torch.enable_grad()):
            with context:
                loss = logits_of(model, inputs).square().mean()
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        for got, want in zip(*gradients):
            assert (got - want).norm() <= 1e-5 * want.norm().clamp_min(1e-3)


@pytest.mark.parametrize(
    ("kind", "why"), [("Mistral", "window"), ("Qwen3Moe", "dense"), ("Gemma2 placed", "logits"), ("Granite", "logits")]
)
def test_models_that_are_refused(kind, why):
    for make in (
        lambda: gb.decoder(cases.build(kind), 2, ROOM, exact=True),
        lambda: gb.TrainStep(cases.build(kind), "causal_lm", exact=True),
    ):
        sentence = refusal(ValueError, make)
        assert "exact" in sentence and why in sentence


@pytest.mark.parametrize("options", [{"cache": "int8"}, {"weights": "int8"}, {"speculate": 2}, {"fused": False}])
def test_options_that_are_refused(options):
    with pytest.raises(ValueError) as error:
        gb.decoder(model_of("own", torch.float32, torch.device("cpu")), 2, ROOM, exact=True, **options)
    assert f"exact: got {next(iter(options))}" in str(error.value)


def test_what_has_no_batch_invariant_kernel_is_refused():
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    with gb.BatchInvariant():
        for call in (lambda: torch.bmm(a, b), lambda: a @ b, lambda: torch.einsum("bij,bjk->bik", a, b)):
            assert "exact" in refusal(ValueError, call)
        assert torch.equal(a[..., :1] @ b[:, :1], a[..., :1] * b[:, :1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "Qwen3"])
def test_low_rank_adapters(kind, device):
    model = model_of(kind, torch.bfloat16, device)
    gb.lora.add(model, rank=4, targets=["q_proj", "v_proj", "down_proj"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    sequences = gb.decoder(model, 3, ROOM, exact=True, verify=False).rollout(PROMPTS, max_new_tokens=LENGTHS, stop=()).sequences
    assert largest_gap(model, rows_of(sequences, device)) == 0
