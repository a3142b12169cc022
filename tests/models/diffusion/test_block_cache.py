"""The sampler with keys and values cached for a block, next to the same algorithm in plain torch over the weights."""

import pytest
import torch
import torch.nn.functional as F

from gpubound import trace
from gpubound.decode import MaskedSampler
from gpubound.models import Decoder, DecoderConfig, RichardsConfig, RichardsDecoder
from gpubound.models.diffusion.masked import BlockCache, why_uncached
from gpubound.models.language_model import hidden_of

from ...train.both_ways import BothWays

MASK, D = 15, 8
SIZES = {"hidden": 32, "intermediate": 48, "layers": 3, "heads": 4, "kv_heads": 2, "vocabulary": 16, "causal": False}
PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 1, 7]]
KINDS = {
    "LLaDA": lambda: Decoder(DecoderConfig(**SIZES)),
    "Dream": lambda: Decoder(DecoderConfig(**SIZES, qkv_bias=True, shifted=True)),
    "Richards": lambda: RichardsDecoder(RichardsConfig(**SIZES, qk_norm=True)),
}


def random_model(kind="LLaDA"):
    """With logits that differ by more than rounding."""
    torch.manual_seed(2)
    model = KINDS[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model


class Plain:
    """A forward in fp64 of one row, of all positions or of some, with keys and values kept between the two."""

    def __init__(self, model):
        self.c, self.w = model.config, {name: p.detach().double() for name, p in model.named_parameters()}
        self.kept = []

    def rms(self, x, name):
        return x / (x.square().mean(-1, keepdim=True) + self.c.eps).sqrt() * self.w[name]

    def head(self, x, n, name, at):
        y = x @ self.w[f"model.layers.{n}.self_attn.{name}_proj.weight"].T
        y = (y + self.w.get(f"model.layers.{n}.self_attn.{name}_proj.bias", 0)).unflatten(-1, (-1, D)).transpose(0, 1)
        if name == "v":
            return y
        if self.c.qk_norm:
            y = self.rms(y, f"model.layers.{n}.self_attn.{name}_norm.weight")
        angle = torch.tensor(at).double()[:, None] * self.c.rope_theta ** (-torch.arange(0, D, 2).double() / D)
        one, two = y[..., : D // 2], y[..., D // 2 :]
        return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)

    def logits(self, row, at=None):
        """Of the positions `at`, None: of all, whose keys and values are kept."""
        whole = at is None
        at, fresh = (list(range(len(row))), []) if whole else (at, None)
        x = self.w["model.embed_tokens.weight"][torch.tensor(row)[at]]
        for n in range(self.c.layers):
            own = f"model.layers.{n}."
            y = self.rms(x, f"{own}input_layernorm.weight")
            q, k, v = (self.head(y, n, name, at) for name in "qkv")
            if whole:
                fresh.append((k, v))
            else:
                for kept, new in zip(self.kept[n], (k, v)):
                    kept[:, at] = new
                k, v = self.kept[n]
            k, v = (t.repeat_interleave(2, 0) for t in (k, v))
            y = ((q @ k.transpose(-1, -2) / D**0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)
            x = x + y @ self.w[f"{own}self_attn.o_proj.weight"].T
            y = self.rms(x, f"{own}post_attention_layernorm.weight")
            gate, up = (y @ self.w[f"{own}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ self.w[f"{own}mlp.down_proj.weight"].T
        if whole:
            self.kept = fresh
        return self.rms(x, "model.norm.weight") @ self.w["lm_head.weight"].T

    def predictions(self, row, block, whole):
        """Log-probabilities of the tokens at the positions `block`."""
        back = int(self.c.shifted)
        if whole:
            logits = self.logits(row)[[at - back for at in block]]
        else:
            logits = self.logits(row, [block[0] - 1, *block] if back else block)[: len(block)]
        logits[:, MASK] = -torch.inf
        return logits.log_softmax(-1)


def plainly(model, prompt, tokens, block, counts=None, threshold=None, refresh=None):
    """Return (the tokens, the number of steps) of one row. counts: tokens to write in each step of a block"""
    plain, row, steps = Plain(model), [*prompt, *[MASK] * tokens], 0
    for begin in range(len(prompt), len(row), block):
        positions, number = list(range(begin, begin + block)), 0
        while any(row[at] == MASK for at in positions):
            logs = plain.predictions(row, positions, number == 0 if refresh is None else number % refresh == 0)
            masked = sorted((i for i in range(block) if row[positions[i]] == MASK), key=lambda i: -logs[i].max().item())
            count = 1 if counts is None else counts[number]
            for rank, i in enumerate(masked):
                if rank < count or (threshold is not None and logs[i].max().exp() >= threshold):
                    row[positions[i]] = logs[i].argmax().item()
            number, steps = number + 1, steps + 1
    return row[len(prompt) :], steps


@pytest.mark.parametrize("ragged", [False, True], ids=["equal prompts", "ragged prompts"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_plain_algorithm_with_a_cache(kind, ragged):
    model, prompts = random_model(kind), [PROMPTS[0], PROMPTS[1][:2], PROMPTS[2][:1]] if ragged else PROMPTS
    sampler = MaskedSampler(model, mask_token=MASK)
    for how, plain in (
        ({"steps": 8, "block": 4}, {"counts": [1, 1, 1, 1]}),
        ({"steps": 6, "block": 4, "refresh": 2}, {"counts": [2, 1, 1], "refresh": 2}),
    ):
        with trace.strict():
            found = sampler.generate(prompts, 8, cache=True, **how)
        assert found.tokens == [plainly(model, prompt, 8, 4, **plain)[0] for prompt in prompts]
    cached, full = (sampler.generate(prompts, 8, steps=8, block=4, cache=cache).tokens for cache in (True, False))
    assert cached != full


@pytest.mark.parametrize("kind", ["LLaDA", "Dream"])
def test_refreshed_at_every_step_it_is_the_full_computation(kind):
    sampler, how = MaskedSampler(random_model(kind), mask_token=MASK), {"steps": 6, "block": 4}
    full = sampler.generate(PROMPTS, 8, **how)
    cached = sampler.generate(PROMPTS, 8, cache=True, refresh=1, **how)
    assert cached.tokens == full.tokens and cached.positions == full.positions


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_of_the_block_after_a_full_one_of_the_same_tokens_is_exact(kind):
    """And the full pass is the model's own forward; its keys and values are the plain ones."""
    model = random_model(kind)
    ids = torch.tensor([[1, 2, 3, 4, *[MASK] * 6]])
    cache, at = BlockCache(model, 1, 10), torch.arange(4, 8)[None]
    with torch.no_grad():
        full = cache.full(ids, at, None)
        assert torch.equal(full, hidden_of(model, {"input_ids": ids})[:, 4:8])
        plain = Plain(model)
        plain.logits(ids[0].tolist())
        for number, (k, v) in enumerate(plain.kept):
            for got, want in ((cache.k, k), (cache.v, v)):
                torch.testing.assert_close(got[number, 0].transpose(0, 1).double(), want, rtol=1e-4, atol=1e-4)
        before = cache.k.clone()
        torch.testing.assert_close(cache.block(ids, at, None), full, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cache.k, before, rtol=1e-4, atol=1e-4)
        ids[0, 5] = 7
        after = cache.block(ids, at, None)
    assert (after - full).abs().max() > 0.1
    outside = [*range(3 if kind == "Dream" else 4), 8, 9]
    assert torch.equal(cache.k[:, :, outside], before[:, :, outside]) and not torch.equal(cache.k[:, :, 5], before[:, :, 5])


def test_fewer_positions_are_computed():
    sampler = MaskedSampler(random_model(), mask_token=MASK)
    counts = {}
    for name, how in {"full": {}, "cached": {"cache": True}, "refreshed": {"cache": True, "refresh": 2}}.items():
        found = sampler.generate(PROMPTS, 8, block=4, **how)
        counts[name] = found.positions
        assert found.steps == 8
    assert counts == {"full": 3 * 8 * 11, "cached": 3 * (2 * 11 + 6 * 4), "refreshed": 3 * (4 * 11 + 4 * 4)}
    dream = MaskedSampler(random_model("Dream"), mask_token=MASK).generate(PROMPTS[:1], 8, block=4, cache=True)
    assert dream.positions == 2 * 11 + 6 * 5


def test_keys_and_values_of_few_shapes_are_in_memory():
    sampler = MaskedSampler(random_model(), mask_token=MASK)
    for length in range(1, 5):
        for cache in (True, False):
            sampler.generate([[1] * length], 2, cache=cache)
    cached = [buffers.cache for buffers in sampler._buffers.values() if buffers.cache is not None]
    assert [cache.k.shape[2] for cache in cached] == [5, 6] and len(sampler._buffers) == 6


@pytest.mark.parametrize("cache", [False, True])
def test_all_tokens_above_a_threshold_are_written_at_once(cache):
    model = random_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    sampler = MaskedSampler(model, mask_token=MASK)
    refresh = None if cache else 1
    steps = []
    for threshold in (0.3, 0.6, 1.0):
        rows = [plainly(model, prompt, 8, 4, threshold=threshold, refresh=refresh) for prompt in PROMPTS]
        for prompt, (tokens, count) in zip(PROMPTS, rows):
            alone = sampler.generate(prompt, 8, block=4, threshold=threshold, cache=cache)
            assert (alone.tokens[0], alone.steps) == (tokens, count)
        together = sampler.generate(PROMPTS, 8, block=4, threshold=threshold, cache=cache)
        assert together.tokens == [tokens for tokens, _ in rows]
        steps.append(together.steps)
    assert steps[0] < steps[1] <= steps[2] == 8


def test_captured_is_called(monkeypatch):
    """On a CPU the capture makes its checks around plain calls. The definition of `sample` asks a CPU whether it need draw,
    which a capture refuses."""

    def likeliest(logits, rows, settings, into, confidence):
        best = logits.log_softmax(-1).max(-1)
        into.emitted.copy_(torch.where(rows.alive != 0, best.indices, -1))
        confidence.copy_(best.values)

    monkeypatch.setattr("gpubound.models.diffusion.masked.sample", likeliest)
    model, how = random_model("Dream"), {"block": 2, "cache": True}
    called = MaskedSampler(model, mask_token=MASK, graph="off").generate(PROMPTS[:2], 4, **how)
    sampler = MaskedSampler(model, mask_token=MASK, graph="require")
    for _ in range(2):
        assert sampler.generate(PROMPTS[:2], 4, **how).tokens == called.tokens


def test_blocks_after_every_end_are_not_computed():
    model = random_model()
    answers = [
        MaskedSampler(model, mask_token=MASK).generate(prompt, 8, block=2, threshold=1.0).tokens[0] for prompt in PROMPTS[:2]
    ]
    ends = [answers[0][1], answers[1][3]]
    sampler = MaskedSampler(model, mask_token=MASK, ends=ends)
    found = sampler.generate(PROMPTS[:2], 8, block=2, threshold=1.0)
    last = max(min(at for at, token in enumerate(answer) if token in ends) for answer in answers)
    assert last < 6 and found.steps == 2 * (last // 2 + 1)
    assert {sequence.finish for sequence in found.sequences} == {"stop token"}
    assert found.tokens == sampler.generate(PROMPTS[:2], 8, block=2).tokens


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_captured_on_the_gpu(kind):
    model = random_model(kind).cuda()
    for how in ({"steps": 6}, {"threshold": 0.5}, {"steps": 6, "refresh": 2}):
        called, captured = (MaskedSampler(model, mask_token=MASK, graph=graph) for graph in ("off", "require"))
        want = called.generate(PROMPTS, 8, block=4, cache=True, **how)
        for _ in range(2):
            found = captured.generate(PROMPTS, 8, block=4, cache=True, **how)
            assert (found.tokens, found.steps) == (want.tokens, want.steps)


def test_models_that_are_not_cached():
    assert why_uncached(random_model()) is None
    hooked = random_model()
    hooked.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    others = {
        "BothWays": BothWays(),
        "PolyAttention": RichardsDecoder(RichardsConfig(**SIZES, attention="poly")),
        "hooks": hooked,
    }
    for named, model in others.items():
        assert named in why_uncached(model)
        with pytest.raises(ValueError, match=f"^generate: cache: got True, but .*{named}"):
            MaskedSampler(model, mask_token=MASK).generate(PROMPTS, 4, cache=True)


@pytest.mark.parametrize(
    "how, named",
    [
        ({"threshold": 0.0}, "threshold: got 0.0"),
        ({"threshold": 1.5}, "threshold: got 1.5"),
        ({"threshold": 0.9, "steps": 4}, "steps: got 4"),
        ({"refresh": 2}, "refresh: got 2"),
        ({"refresh": 0, "cache": True}, "refresh: got 0"),
    ],
)
def test_refused_requests(how, named):
    with pytest.raises(ValueError, match=f"^generate: {named}"):
        MaskedSampler(random_model(), mask_token=MASK).generate(PROMPTS, 8, **how)
