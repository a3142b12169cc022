"""MaskedSampler: beside the plain algorithm, a memorised corpus, the distribution of its draws, no host in its steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gpubound import GenerateError, trace
from gpubound.data import train_tokenizer
from gpubound.decode import MaskedSampler
from gpubound.models import Decoder, DecoderConfig, RichardsConfig, RichardsDecoder
from gpubound.models.diffusion.masked import fill_schedule
from gpubound.models.diffusion.objective import MaskedDiffusion
from gpubound.train import AdamW, TrainStep
from gpubound.watch import no_stall, watch
from gpubound.watch.pretend import simgpu
from tests import forked
from tests.messages import message, refusal

from ...decode.test_text import word_tokenizers
from ...train.both_ways import BothWays

MASK = 15
PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 1, 7]]


def random_model(**options) -> BothWays:
    """With logits that differ by more than rounding."""
    model = BothWays(**options)
    with torch.no_grad():
        model.head.weight.mul_(5)
    return model


@torch.no_grad()
def plainly(model: nn.Module, prompt: list[int], tokens: int, steps: list[tuple[int, int, int]]) -> list[int]:
    """One row by the algorithm's own words. A step is (the block's begin, its end, how many tokens to write)."""
    row = [*prompt, *[MASK] * tokens]
    for begin, end, count in steps:
        logits = model(torch.tensor([row]))[0].double()
        logits[:, MASK] = -torch.inf
        logs = logits.log_softmax(-1)
        open_ = [at for at in range(len(prompt) + begin, len(prompt) + end) if row[at] == MASK]
        open_.sort(key=lambda at: -logs[at].max().item())
        for at in open_[:count]:
            row[at] = logs[at].argmax().item()
    return row[len(prompt) :]


@pytest.mark.parametrize(
    "how, steps",
    [
        ({}, [(0, 8, 1)] * 8),
        ({"steps": 3}, [(0, 8, 3), (0, 8, 3), (0, 8, 2)]),
        ({"steps": 3, "block": 4}, [(0, 4, 2), (0, 4, 2), (4, 8, 4)]),
        ({"steps": 8, "block": 2}, [(b, b + 2, 1) for b in (0, 0, 2, 2, 4, 4, 6, 6)]),
    ],
    ids=["a token a step", "several a step", "blocks", "small blocks"],
)
@pytest.mark.parametrize("ragged", [False, True], ids=["equal prompts", "ragged prompts"])
def test_it_is_the_plain_algorithm(how, steps, ragged):
    model, prompts = random_model(), [PROMPTS[0], PROMPTS[1][:2], PROMPTS[2][:1]] if ragged else PROMPTS
    with trace.strict():
        found = MaskedSampler(model, mask_token=MASK).generate(prompts, 8, **how)
    assert found.tokens == [plainly(model, prompt, 8, steps) for prompt in prompts]
    assert found.steps == len(steps) and {s.finish for s in found.sequences} == {"length"}
    assert len({tuple(row) for row in found.tokens}) > 1


@pytest.mark.parametrize("attention", ["softmax", "poly"])
def test_a_model_of_ours_is_kept_from_the_places_behind_its_rows(attention):
    """Rows of several lengths are padded; beside the same rows one by one, without any padding."""
    torch.manual_seed(1)
    model = RichardsDecoder(RichardsConfig(32, 48, 2, 4, 2, 16, causal=False, attention=attention)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    prompts, sampler = [PROMPTS[0], PROMPTS[1][:1]], MaskedSampler(model, mask_token=MASK)
    want = [plainly(model, prompt, 6, [(0, 3, 2), (0, 3, 1), (3, 6, 2), (3, 6, 1)]) for prompt in prompts]
    assert sampler.generate(prompts, 6, steps=4, block=3).tokens == want and want[0] != want[1]


STEPS = 1000  # of training, at most; four seeds took 175 to 275
MARGIN = 0.9  # of every token's probability where only its row's first token is seen


@pytest.mark.slow
def test_a_memorised_corpus_is_filled_exactly():
    texts = torch.randint(14, (6, 10), generator=torch.Generator().manual_seed(1))
    texts[:, 0] = torch.arange(6)
    prompts, answers = texts[:, :1], texts[:, 1:]
    labels = torch.cat([torch.full_like(prompts, -100), answers], 1)
    model = BothWays(width=48)
    torch.manual_seed(0)
    config = AdamW(lr=5e-3, betas=(0.9, 0.99))
    step = TrainStep(model, MaskedDiffusion(MASK), config, precision="fp32", graph="off", clip=1.0)
    batch = {"input_ids": texts.repeat(4, 1), "labels": labels.repeat(4, 1)}
    for _ in range(STEPS // 25):
        for _ in range(25):
            step(batch)
        with torch.no_grad():
            sure = (
                model(torch.cat([prompts, torch.full_like(answers, MASK)], 1))[:, 1:].softmax(-1).gather(2, answers[..., None])
            )
        if sure.min() > MARGIN:
            break
    assert sure.min() > MARGIN
    sampler, prompts, answers = MaskedSampler(model, mask_token=MASK), prompts.tolist(), answers.tolist()
    for how in ({}, {"steps": 3}, {"steps": 1}, {"steps": 3, "block": 3}, {"temperature": 0.1}):
        assert sampler.generate(prompts, 9, **how).tokens == answers, how


def test_draws_follow_the_models_distribution():
    model = random_model()
    with torch.no_grad():
        model.head.weight.mul_(0.4)
    sampler = MaskedSampler(model, mask_token=MASK)
    many = [[1, 2]] * 4000
    drawn = torch.tensor(sampler.generate(many, 1, temperature=2.0, seed=3).tokens)[:, 0]
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, MASK]]))[0, -1, :MASK]
    want = (logits / 2).softmax(-1)
    assert (drawn.bincount(minlength=MASK) / 4000 - want).abs().max() < 0.04  # a share's deviation is below 0.008
    assert want.max() > 0.12, "no flat distribution"


def test_a_seed_gives_the_same_tokens_in_any_batch():
    sampler, how = MaskedSampler(random_model(), mask_token=MASK), {"temperature": 3.0, "steps": 4}
    both = sampler.generate(PROMPTS[:2], 8, seed=1, **how).tokens
    assert both == sampler.generate(PROMPTS[:2], 8, seed=1, **how).tokens
    assert both != sampler.generate(PROMPTS[:2], 8, seed=2, **how).tokens
    assert both[1] == sampler.generate(PROMPTS[1], 8, seed=1, **how).tokens[0]
    same = sampler.generate([PROMPTS[0]] * 2, 8, seed=1, **how).tokens
    assert same[0] == both[0] != same[1]


@pytest.mark.slow
def test_captured_is_called(monkeypatch):
    """On a CPU the capture makes its checks around plain calls: replays on changed state, every tensor found. The kernel of
    `sample` is taken, for its definition asks a CPU whether it need draw."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model, how = random_model(), {"steps": 2, "temperature": 1.0}
    called = MaskedSampler(model, mask_token=MASK, graph="off").generate(PROMPTS[:2], 4, **how)
    sampler = MaskedSampler(model, mask_token=MASK, graph="require")
    for _ in range(2):
        assert sampler.generate(PROMPTS[:2], 4, **how).tokens == called.tokens
    with torch.no_grad():
        model.head.weight.copy_(model.head.weight.roll(1, 0))  # the weights are live
    moved = sampler.generate(PROMPTS[:2], 4, **how).tokens
    assert moved == MaskedSampler(model, mask_token=MASK, graph="off").generate(PROMPTS[:2], 4, **how).tokens != called.tokens


@pytest.mark.slow
def test_steps_never_wait_for_the_device():
    if torch.cuda.is_available():
        pytest.skip("the pretend device contends with a real one; the gpu test below has the real one's")
    sampler = MaskedSampler(random_model().to(simgpu()), mask_token=MASK, graph="off")
    schedule = fill_schedule(8, 4, 4)
    prompts = [*PROMPTS[:2], [3]]
    buffers = sampler.buffers(prompts, schedule)
    sampler.generate(prompts, 8, steps=4, block=4, temperature=1.0)
    with no_stall(), watch() as ledger:
        for _ in schedule.begins:
            buffers.step(True)
    ledger.assert_within(syncs=0, h2d_bytes=0, d2h_bytes=0)
    with watch() as ledger:
        sampler.generate(prompts, 8, steps=4, block=4, temperature=1.0)
    assert (ledger.totals["syncs"], ledger.totals["d2h_copies"]) == (1, 1), "the answer is read, and nothing else"


@pytest.mark.gpu
def test_a_captured_request_on_the_gpu_waits_once_at_its_end():
    model = random_model(width=64).cuda()
    how = {"steps": 4, "block": 4, "temperature": 1.0}
    sampler = MaskedSampler(model, mask_token=MASK)
    first = sampler.generate(PROMPTS, 8, **how).tokens
    with watch(gputrace=True) as ledger:
        again = sampler.generate(PROMPTS, 8, **how).tokens
    assert again == first == MaskedSampler(model, mask_token=MASK, graph="off").generate(PROMPTS, 8, **how).tokens
    assert ledger.totals["d2h_copies"] == 1, str(ledger)


def test_text_block_by_block_and_its_end():
    tokenizer = train_tokenizer(["ab " * 40], 261).with_mask()
    torch.manual_seed(0)
    model = BothWays(words=320)
    with torch.no_grad():
        model.head.weight.mul_(5)
    sampler = MaskedSampler(model, tokenizer)
    pieces, whole = (
        list(sampler.stream(["ab a", "b"], 6, steps=3, block=2)),
        sampler.generate(["ab a", "b"], 6, steps=3, block=2),
    )
    assert len(pieces) > 4, "a piece a block and row, but where a character is not whole yet"
    for row in range(2):
        assert "".join(piece for number, piece in pieces if number == row) == whole.texts[row]
        assert whole.texts[row] == tokenizer.decode(whole.tokens[row])
    assert max(max(row) for row in whole.tokens) < tokenizer.mask, "ids of no token are never written"
    first = whole.tokens[0]
    ended = MaskedSampler(model, tokenizer, ends=[first[2]]).generate(["ab a", "b"], 6, steps=3, block=2).sequences[0]
    assert ended.tokens == first[: first.index(first[2]) + 1] and ended.finish == "stop token"
    assert ended.text == tokenizer.decode(ended.tokens[:-1])


def test_one_request_at_a_time():
    """Two requests of one shape would share a canvas."""
    sampler = MaskedSampler(random_model(), mask_token=MASK)
    want = sampler.generate(PROMPTS[:1], 4, block=2).tokens[0]
    stream = sampler.stream(PROMPTS[:1], 4, block=2)
    begun = next(stream)[1]
    with pytest.raises(GenerateError, match="one request at a time"):
        sampler.generate(PROMPTS[1:2], 4, block=2)
    assert begun + [token for _, new in stream for token in new] == want


def test_logits_that_are_not_finite_are_told():
    model = random_model()
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    sampler = MaskedSampler.__new__(MaskedSampler)
    sampler.__dict__.update(MaskedSampler(random_model(), mask_token=MASK).__dict__ | {"model": model})
    assert refusal(GenerateError, lambda: sampler.generate(PROMPTS, 4)) == message("decode/masked:logits_that_are_not_fini")


@pytest.mark.parametrize(
    "prompts, tokens, how, named",
    [
        (PROMPTS, 8, {"block": 3}, "block: got 3, wanted a number that divides the 8 tokens"),
        (PROMPTS, 8, {"block": 4, "steps": 1}, "steps: got 1, wanted 2 to 8"),
        (PROMPTS, 8, {"steps": 9}, "steps: got 9, wanted 1 to 8"),
        (PROMPTS, 0, {}, "tokens: got 0"),
        (
            PROMPTS,
            10**12,
            {"block": 10**6},
            f"tokens: got {10**12} for {len(PROMPTS)} rows, whose hidden states and logits take",
        ),
        ([[1], [2, MASK]], 8, {}, "prompt 1 holds the mask token 15"),
    ],
)
def test_refused_requests(prompts, tokens, how, named):
    with pytest.raises(ValueError, match=f"^generate: {named}"):
        MaskedSampler(BothWays(), mask_token=MASK).generate(prompts, tokens, **how)


def test_more_positions_than_the_model_is_made_for(said):
    model = Decoder(DecoderConfig(16, 32, 1, 2, 1, 16, causal=False, positions=12))
    sampler = MaskedSampler(model, mask_token=MASK)
    sampler.generate([1] * 4, 8, steps=1)
    for length in (5, 6):
        sampler.generate([1] * length, 8, steps=1)
    assert said() == message("models/diffusion/masked:more_positions_than_the_m")


def test_a_misspelt_setting():
    with pytest.raises(TypeError, match=r"^generate\(\) got .* 'step'; did you mean 'steps'\?$"):
        MaskedSampler(BothWays(), mask_token=MASK).generate([1], 8, step=2)


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: MaskedSampler(Decoder(DecoderConfig(16, 32, 1, 2, 1, 16)), mask_token=15), "Decoder is causal"),
        (lambda: MaskedSampler(BothWays()), "mask_token: got none, and the tokenizer has none"),
        (lambda: MaskedSampler(BothWays(), mask_token=16), "mask_token: got 16, but the model has the ids 0 to 15"),
        (lambda: MaskedSampler(BothWays(), mask_token=15, graph="on"), "graph: got 'on', wanted one of auto, require, off"),
    ],
)
def test_refused_models(make, named):
    with pytest.raises(ValueError, match=f"^MaskedSampler: {named}"):
        make()


@pytest.mark.parametrize("kind", ["tokenizers", "transformers", "gpubound"])
def test_special_tokens_of_every_kind_of_tokenizer(kind):
    """transformers calls them mask_token_id and eos_token_id; the end of text is an added token, and was never written."""
    model, tokenizer = random_model(), word_tokenizers()[kind]
    sampler = MaskedSampler(model, tokenizer)
    assert (sampler.mask_token, sampler.ends) == (12, (11,))
    assert sampler.barred.isinf().nonzero().flatten().tolist() == [12, *range(13, sampler.vocab)]
    with torch.no_grad():
        model.head.weight[11] = 50 * model.head.weight.abs().max() * torch.ones_like(model.head.weight[11])
        forward = model.below.forward
        model.below.forward = lambda *inputs, **named: forward(*inputs, **named).abs()
    found = sampler.generate("w1 w2", 4).sequences[0]
    assert found.tokens == [11] and found.finish == "stop token" and found.text == ""


EXAMPLE = Path(__file__).parents[3] / "examples" / "denoise.py"


@pytest.mark.slow
def test_denoise():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([forked.python(), str(EXAMPLE)], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("radius ") and len(EXAMPLE.read_text().splitlines()) < 50
