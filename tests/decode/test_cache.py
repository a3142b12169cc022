"""A cache in 8 bits, also in pages (test_pages.py): an emulation's tokens, what rounding costs, what is read and refused."""

from functools import partial

import pytest
import torch
import transformers
from torch.nn import functional as F

import gpubound as gb
from gpubound.decode import certificate, kv_cache, transformer
from gpubound.models.registry import cache_word
from tests.messages import message, refusal, refusals

from . import cases

KINDS = ("int8", "fp8")
# (relative, of the logits in the norm) what 8 bits cost models this small, whose attention decides all: int8 0.6 to 1.2 %,
# fp8 3 to 6 % measured
COST = {"int8": 0.03, "fp8": 0.12}
SAMPLED = {"temperature": 1.0, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 7}
FORMS = [{"cache": "int8"}, {"cache": "fp8"}, {"pages": 9}, {"cache": "fp8", "pages": 9}]
FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))


def nearest(x: torch.Tensor, kind: str) -> torch.Tensor:
    """What 8 bits make of the last dimension, found by looking: the nearest of all numbers that there are."""
    every = torch.arange(256).to(torch.uint8)
    numbers = every.view(torch.float8_e4m3fn).float() if kind == "fp8" else every[1:].float() - 128
    numbers = numbers[numbers.isfinite()].to(x.device).unique()
    scale = x.abs().amax(-1, keepdim=True) / numbers.max()
    level = x / scale
    at = torch.bucketize(level.contiguous(), (numbers[1:] + numbers[:-1]) / 2)
    return numbers[at] * scale


class Rounding(transformers.DynamicCache):
    """Attention of Hugging Face gets its keys and values rounded, in one forward over a whole text."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def update(self, key_states, value_states, *rest, **named):
        return nearest(key_states, self.kind), nearest(value_states, self.kind)


@torch.no_grad()
def emulated_logits(model, ids: list[int], kind: str) -> torch.Tensor:
    given = torch.tensor([ids], device=model.device)
    return model(given, **{cache_word(model.forward): Rounding(kind)}, use_cache=True).logits[0].float()


def emulated(model, prompt: list[int], tokens: list[int], kind: str) -> list[int]:
    """The likeliest after the prompt and after each of `tokens` but the last: themselves, where they are greedy ones."""
    return emulated_logits(model, [*prompt, *tokens[:-1]], kind)[len(prompt) - 1 :].argmax(-1).tolist()


def tokens(fast, prompts, **settings):
    return fast.generate(prompts, **{"max_new_tokens": 10, **settings}).tokens


# Each family with one kind, which knows none; others: test_combinations.py.
@pytest.mark.parametrize(
    ("family", "kind"), [("Llama", "int8"), ("Qwen2", "fp8"), ("Qwen3", "int8"), ("SmolLM3", "fp8"), ("Qwen3Moe", "int8")]
)
def test_tokens_are_those_of_a_model_whose_keys_and_values_are_rounded(family, kind, device):
    """Ragged rows, prefilled and stepped; normed heads, biases, a layer without positions, experts in some layers."""
    fast = cases.shared(family, str(device), cache=kind)
    given = cases.prompts(1, 19, 30)
    found = tokens(fast, given)
    assert found == [tokens(fast, prompt)[0] for prompt in given]
    assert found == [emulated(fast.model, prompt, row, kind) for prompt, row in zip(given, found)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_near_the_exact_ones(kind, device):
    """As the cache's share of the certificate says, and no more than stated."""
    for family in cases.FAMILIES:
        fast = cases.shared(family, str(device), cache=kind, verify=family in ("Llama", "Mistral"))
        ids = cases.prompts(40)[0]
        exact, rounded = cases.logits(fast.model, ids), emulated_logits(fast.model, ids, kind)
        cost = ((rounded - exact).norm() / exact.norm()).item()
        assert 0.1 * COST[kind] < cost < COST[kind]
        if fast.certificate is not None:
            assert 0.1 * COST[kind] < fast.certificate.cache_error < COST[kind]
        scores = torch.tensor(fast.score(ids)[0], device=device)
        want = rounded[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:], device=device)[:, None])[:, 0]
        assert (scores - want).norm() < 0.1 * cost * want.norm()  # a key on the edge of two codes may become either


@pytest.mark.parametrize(
    ("kind", "dtype", "rows"),
    [("int8", torch.float16, 1), ("int8", torch.bfloat16, 12), ("fp8", torch.float16, 12), ("fp8", torch.bfloat16, 1)],
)
def test_16_bit_models_pass_their_certificate(kind, dtype, rows, device):
    found = gb.decoder(cases.build("Qwen3", dtype, device), rows, cases.ROOM, cache=kind, pages=rows + 2).certificate
    assert found.logits_error < 1.5 * (found.model_error + found.cache_error) and found.cache_error < COST[kind]


@FORM
def test_a_prompt_in_chunks_gives_the_same_tokens(form, monkeypatch, device):
    """All of a prompt attends to what the cache holds, its own chunk too."""
    given = cases.prompts(25, 16)
    for family in ("Mistral", "Qwen3"):
        fast = cases.shared(family, str(device), **form)
        want = tokens(fast, given)
        with monkeypatch.context() as patch:
            patch.setattr(transformer, "CHUNK", 7)
            assert tokens(fast, given) == want


@pytest.mark.parametrize(("form", "how"), list(zip(FORMS, ({}, SAMPLED, SAMPLED, {}))), ids=str)
def test_rows_in_any_company_and_order(form, how, device):
    fast = cases.shared("Mistral", str(device), **form)
    given = cases.prompts(5, 1, 19, 6)
    found, order = tokens(fast, given, **how), [2, 0, 3, 1]
    assert tokens(fast, [given[row] for row in order], **how) == [found[row] for row in order]
    assert tokens(fast, given[1:], **how) == found[1:] and tokens(fast, given[2], **how) == found[2:3]


# Each form once, and each draft with and without pages: what is drafted knows no form.
@pytest.mark.slow
@pytest.mark.parametrize(("form", "draft"), [*zip(FORMS, (False, True, True, False))])
def test_speculation_gives_the_tokens_of_plain_steps(form, draft, device):
    """Drafts go back and beyond a row's end: what they wrote there is nobody's."""
    model = cases.build("Mistral", device=device)
    with_draft = gb.Draft(cases.build("Mistral", device=device, num_hidden_layers=1), 3) if draft else 4
    plain = gb.decoder(model, 2, 70, **form, verify=False)
    fast = gb.decoder(model, 2, 70, speculate=with_draft, **form, verify=False)
    for given, new, how in ((cases.prompts(60), None, {}), (cases.prompts(50, 7), 10, SAMPLED)):
        found = fast.generate(given, max_new_tokens=new, **how)
        assert found.tokens == tokens(plain, given, max_new_tokens=new, **how)


@FORM
def test_wide_batches(form, device):
    model = cases.build("Qwen3", device=device)
    fast = gb.decoder(model, 11, cases.ROOM, **form | ({"pages": 12} if "pages" in form else {}), verify=False)
    given = cases.prompts(*range(1, 12))
    want = [tokens(cases.shared("Qwen3", str(device), **form), prompt, max_new_tokens=5)[0] for prompt in given]
    assert tokens(fast, given, max_new_tokens=5) == want


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy_is_what_rounding_the_cache_costs(kind, device):
    fast = gb.decoder(cases.build("Llama", device=device), 1, cases.ROOM, cache=kind, verify=False)
    ids = cases.prompts(40)[0]
    ours = emulated_logits(fast.model, ids[:-1], kind).log_softmax(-1)
    theirs = cases.logits(fast.model, ids[:-1]).log_softmax(-1)
    divergence = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
    found = fast.accuracy(ids)
    assert found.kind == f"{kind} cache" and found.tokens == 39
    assert found.kl_mean == pytest.approx(divergence.mean().item(), rel=1e-2)
    assert found.kl_max == pytest.approx(divergence.max().item(), rel=1e-2)
    assert ("accuracy", "measured", str(found)) in fast.body.report()
    assert refusal(ValueError, lambda: cases.shared("Llama", str(device)).accuracy(ids)) == message(
        "decode/cache:accuracy_is_what_roundin"
    )


def test_a_step_reads_codes_and_scales():
    model = cases.build("Llama", torch.bfloat16)
    plain = gb.decoder(model, 2, cases.ROOM, verify=False).body
    once, token = plain.bytes_a_step([]), 2 * 2 * 2  # layers, keys and values, kv heads; 8 wide
    assert plain.bytes_a_step([5, 2]) == once + 7 * token * 8 * 2
    for form in ({"cache": "int8"}, {"cache": "fp8"}, {"cache": "int8", "pages": 3}):
        assert gb.decoder(model, 2, cases.ROOM, **form, verify=False).body.bytes_a_step([5, 2]) == once + 7 * token * (8 + 4)
    assert gb.decoder(model, 2, cases.ROOM, pages=3, verify=False).body.bytes_a_step([5, 2]) == once + 7 * token * 8 * 2


def test_the_table():
    def rows(**form):
        found = str(gb.decoder(cases.build("Qwen2"), 4, cases.ROOM, verify="quick", **form)).splitlines()
        return [" ".join(line.split()) for line in found if "cache" in line or "accuracy" in line][:-1]

    attention, unknown = "2 x rotation, cache, attention reference: ", "accuracy not measured"
    assert rows(cache="int8") == [
        attention + "quantized_decode_attention", message("decode/cache:the_table"), unknown
    ]  # fmt: skip
    assert rows(pages=5) == [
        attention + "decode_attention", message("decode/cache:the_table.2")
    ]  # fmt: skip
    assert rows(cache="fp8", pages=5)[1:] == [message("decode/cache:the_table.3"), unknown]
    report = gb.decoder(cases.build("Qwen2"), 4, cases.ROOM, weights="int8", cache="int8", pages=5, verify=False).body.report()
    assert [row[0] for row in report][-4:] == ["prompts", "weights", "cache", "accuracy"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pages", [None, 6])
def test_places_beyond_the_live_length_may_hold_anything(kind, pages):
    fast = gb.decoder(cases.build("Mistral"), 3, cases.ROOM, cache=kind, pages=pages, verify=False)
    found = []
    for value in (0.0, float("nan"), 1e30):
        fast.body.cache.poison()
        for scale in [t for t in fast.body.cache.tensors if t.dtype == torch.float32]:
            scale.fill_(value)
        found.append(tokens(fast, cases.prompts(), **SAMPLED))
    assert found[0] == found[1] == found[2]


class TestTheCertificate:
    def test_says_what_the_cache_makes_of_fp32(self):
        said = str(cases.shared("Llama", cache="int8", verify=True).certificate)
        assert message("decode/cache:says_what_the_cache_make").within(said) and message(
            "decode/cache:says_what_the_cache_make.2"
        ).within(said)
        assert "over a cache" not in str(cases.shared("Llama", verify=True).certificate)

    @pytest.mark.parametrize("name", ["decode_attention", "encode"])
    def test_finds_what_is_wrong_with_a_rounded_cache(self, name, monkeypatch):
        """Attention that is off by a hundredth; a prompt that is rounded otherwise than the steps and fp32 are."""
        own = getattr(kv_cache, name)

        def off(*given, **named):
            found = own(*given, **named)
            if name == "encode":
                return found[0], found[1] * 1.01
            given[-2].mul_(1.01)
            return found

        monkeypatch.setattr(kv_cache, name, off)
        if name == "encode":
            monkeypatch.setattr(kv_cache.Cache, "rounded", lambda self, x: kv_cache.decode(*own(x, self.kind), x.dtype))
        with pytest.raises(gb.GenerateError, check=message("decode/cache:finds_what_is_wrong_with")):
            gb.decoder(cases.build("Llama"), 2, cases.ROOM, cache="int8")
        monkeypatch.setattr(certificate, "SEQUENCES", 1)
        with pytest.raises(gb.GenerateError, check=message("decode/cache:finds_what_is_wrong_with.2")):
            gb.decoder(cases.build("Llama"), 2, cases.ROOM, cache="int8")

    def test_one_key_of_another_code_is_no_fault(self, monkeypatch):
        """A key that lies between two codes. Here the judge finds other keys in a layer, for the first sequence alone."""
        own, calls = kv_cache.Cache.rounded, []

        def further(self, x):
            calls.append(x)
            return own(self, x) * (1.1 if len(calls) == 1 else 1.0)

        monkeypatch.setattr(kv_cache.Cache, "rounded", further)
        model = cases.build("Llama")
        with (
            monkeypatch.context() as once,
            pytest.raises(gb.GenerateError, check=message("decode/cache:one_key_of_another_code")),
        ):
            once.setattr(certificate, "SEQUENCES", 1)
            gb.decoder(model, 2, cases.ROOM, cache="int8")
        tried = len(calls)
        calls.clear()
        found = gb.decoder(model, 2, cases.ROOM, cache="int8").certificate
        assert len(calls) > tried and found.logits_error < found.cache_error

    def test_finds_keys_that_are_not_rounded_at_all(self, monkeypatch):
        """In fp32 a tenth of what rounding costs may be off, so all of it is seen."""
        monkeypatch.setattr(kv_cache.Cache, "rounded", lambda self, x: x)
        with pytest.raises(gb.GenerateError, check=message("decode/cache:finds_keys_that_are_not")):
            gb.decoder(cases.build("Llama"), 2, cases.ROOM, cache="int8")


def test_a_key_that_is_not_finite_is_named():
    """8 bits hold no NaN; the scale does."""
    for kind in KINDS:
        model = cases.build("Llama")
        fast = gb.decoder(model, 1, cases.ROOM, cache=kind)
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[3, 2] = float("nan")
        with pytest.raises(gb.GenerateError, check=message("decode/cache:a_key_that_is_not_finite")):
            tokens(fast, cases.prompts(5))


def test_wrong_arguments_are_named():
    model = cases.build("Llama")
    wrongs = ({"cache": "int4"}, {"pages": 3}, {"pages": 4.0}, {"cache": "fp8", "fused": False}, {"pages": 8, "fused": False})
    calls = [partial(gb.decoder, model, 4, cases.ROOM, **wrong) for wrong in wrongs]
    refusals("decode/cache:wrong_arguments", *calls)


@FORM
def test_interpreted_kernels_give_the_same_tokens(form, interpret):
    model = cases.build("Qwen3", num_hidden_layers=1)
    assert cases.interpreted_report(interpret, model, cases.prompts(5), 2, **form)[1][1].startswith("triton: ")
