"""Every weight format over every cache under every MLP: the tokens of Hugging Face's forward over the same rounded numbers.

A layer is an attention part and an MLP part, over weights and a cache in formats of their own. What is composed of them has no
test of its own elsewhere, so this table has all of it. The definition is independent of ours: the model's own forward, its
weights replaced by what the packed ones stand for, its keys and values by the nearest of all numbers in 8 bits.
"""

import copy
import functools
import itertools

import pytest
import torch

import gpubound as gb
from gpubound.kernels.packed_weights import KINDS as WEIGHTS, pack, unpack

from . import cases
from .test_cache import emulated

FORMS = {"side by side": {}, "pages": {"pages": 4}, "window": {}}
FAMILIES = {"dense": "Mistral", "experts": "Mixtral", "dense and experts": "Qwen3Moe"}
GIVEN = cases.prompts(1, 13)


@functools.cache
def model_of(mlp: str, window: bool, device: str) -> torch.nn.Module:
    options = {"sliding_window": 6 if window else None} if mlp != "dense and experts" else {}
    return cases.build(FAMILIES[mlp], device=device, **options)


@torch.no_grad()
def rounded(model: torch.nn.Module, kind: str | None) -> torch.nn.Module:
    """A copy whose matrices are the numbers that packed ones stand for; the router, which is not packed, is its own."""
    if kind is None:
        return model
    twin = copy.deepcopy(model)
    twin.lm_head.weight = torch.nn.Parameter(unpack(pack(model.lm_head.weight, kind)))
    for name, weight in twin.model.layers.named_parameters():
        if weight.dim() > 1 and not name.endswith("mlp.gate.weight"):
            weight.copy_(unpack(pack(weight.flatten(0, -2), kind)).view_as(weight))
    return twin


@functools.cache
def twin_of(mlp: str, window: bool, weights: str | None, device: str) -> torch.nn.Module:
    return rounded(model_of(mlp, window, device), weights)


def assert_greedy(twin: torch.nn.Module, prompt: list[int], tokens: list[int], cache: str | None) -> None:
    """Each token is the likeliest after all before it, by one forward over the whole text."""
    assert tokens == (cases.likeliest(twin, prompt, tokens) if cache is None else emulated(twin, prompt, tokens, cache))


AXES = ((None, *WEIGHTS), ("dense", "experts"), (None, "int8", "fp8"), tuple(FORMS), (None, 3))
# Every weight format with every cache in every form. The MLP and the way of decoding change from one to the next so that any
# three parts meet in every way; of all 144 combinations that leaves 36.
TABLE = [
    (weights, AXES[1][(w + (c == f)) % 2], cache, form, AXES[4][(w // 2 + ((c + f) % 3 == 0)) % 2])
    for w, weights in enumerate(AXES[0])
    for c, cache in enumerate(AXES[2])
    for f, form in enumerate(AXES[3])
]


def test_any_three_parts_meet_in_every_way():
    for three in itertools.combinations(range(5), 3):
        met = {tuple(row[axis] for axis in three) for row in TABLE}
        assert met == set(itertools.product(*(AXES[axis] for axis in three)))


@pytest.mark.parametrize(("weights", "mlp", "cache", "form", "speculate"), TABLE)
def test_every_format_cache_and_form(weights, mlp, cache, form, speculate, device):
    where = form == "window", str(device)
    fast = gb.decoder(
        model_of(mlp, *where), 2, 80, weights=weights, cache=cache, speculate=speculate, verify=False, **FORMS[form]
    )
    twin = twin_of(mlp, form == "window", weights, str(device))
    for prompt, tokens in zip(GIVEN, fast.generate(GIVEN, max_new_tokens=9).tokens):
        assert len(tokens) == 9
        assert_greedy(twin, prompt, tokens, cache)


# (family, weights, cache, form, drafted tokens): each family in the four formats, all caches, pages, and speculative steps
CELLS = [
    ("Gemma", "int8", None, {"pages": 4}, 3),
    ("Gemma2", "int8", "int8", {}, None),
    ("Gemma2", "int4", None, {"pages": 4}, 3),
    ("Gemma2", None, "fp8", {"pages": 4}, 3),
    ("Gemma3", "fp8", "fp8", {"pages": 4}, None),
    ("Gemma3", None, "int8", {}, 3),
    ("Olmo2", "int4", "int8", {"pages": 4}, 3),
    ("Olmo2", "fp8", None, {}, None),
    ("Phi3", "int8", "fp8", {}, 3),
    ("Phi3", "int4", "int8", {"pages": 4}, None),
]


@pytest.mark.parametrize("family, weights, cache, form, speculate", CELLS)
def test_other_families_in_some_combinations(family, weights, cache, form, speculate, device):
    """What sets them apart is a field of a layer or of the shape: no format, cache or way of decoding knows a family."""
    model = cases.build(family, device=device)
    fast = gb.decoder(model, 2, 80, weights=weights, cache=cache, speculate=speculate, verify=False, **form)
    assert fast.path == ""
    twin = rounded(model, weights)
    for prompt, tokens in zip(GIVEN, fast.generate(GIVEN, max_new_tokens=9).tokens):
        assert len(tokens) == 9
        assert_greedy(twin, prompt, tokens, cache)


@pytest.mark.slow
@pytest.mark.parametrize(("mlp", "weights"), [*(("experts", weights) for weights in WEIGHTS), ("dense and experts", "int4")])
def test_packed_experts_pass_their_certificate(mlp, weights, device):
    """In fp32 and bf16, few rows and many: the choice of rounded experts is judged by what rounds alike."""
    for dtype, rows in ((torch.float32, 9), (torch.bfloat16, 1)):
        found = gb.decoder(cases.build(FAMILIES[mlp], dtype, device), rows, 32, weights=weights, cache="int8").certificate
        assert found.logits_error < 1.5 * (found.model_error + found.cache_error)


@pytest.mark.parametrize("mlp", ["experts", "dense and experts"])
def test_many_rows_of_packed_experts(mlp, device):
    """Prompts are unpacked and grouped; steps of many rows read packed experts row by row."""
    fast = gb.decoder(model_of(mlp, False, str(device)), 11, 32, weights="int4", verify=False)
    before, given = fast.body.form.unpacked, cases.prompts(*range(1, 12))
    twin = twin_of(mlp, False, "int4", str(device))
    for prompt, tokens in zip(given, fast.generate(given, max_new_tokens=6).tokens):
        assert_greedy(twin, prompt, tokens, None)
    assert fast.body.form.unpacked > before
    assert ("experts of more rows", "as of one row") in [row[:2] for row in fast.body.report()]  # why depends on the device


def test_packed_experts_that_change_are_packed_again(device):
    model = cases.build("Mixtral", device=device)
    fast = gb.decoder(model, 1, 32, weights="int8", verify=False)
    fast.generate(cases.PROMPT, max_new_tokens=2)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.mul_(-1)
    assert fast.body.moved() == "model.layers.1.mlp.experts.down_proj"
    found = fast.generate(cases.PROMPT, max_new_tokens=9).tokens[0]
    assert_greedy(rounded(model, "int8"), cases.PROMPT, found, None)


def test_a_step_reads_the_packed_bytes_of_the_chosen_experts(device):
    """Of 8 experts, 3 a row, as many as are different on average: a third of the bits and scales of all."""
    model = cases.build("Qwen3Moe", torch.bfloat16, device)
    for kind, group in (("int8", 128 + 2), ("int4", 64 + 2), ("fp8", 128 + 4)):  # bytes of a row of up to 128 columns
        body = gb.decoder(model, 2, 32, weights=kind, verify=False).body
        attention = 32 + 2 * 16 + 32
        rows = 3 * attention + 2 * 40 + 32 + cases.VOCABULARY
        small = 2 * (2 * 3 * 32 + 2 * 3 * 8 + 32 + 2 * 8 * 32)  # norms, head norms, the last norm, routers
        for tokens in (1, 2):
            chosen = 2 * 8 * (1 - (5 / 8) ** tokens) * (2 * 24 + 32)
            assert body.bytes_a_step([0] * tokens) == rows * group + small + round(chosen * group)


@pytest.mark.slow
def test_interpreted_kernels_give_the_same_tokens(interpret):
    model = cases.build("Mixtral", num_hidden_layers=1)
    report = cases.interpreted_report(interpret, model, [[5]], 2, rows=1, weights="int4")
    assert ("1 x down of experts", "triton: quantized_add_routed", "") in report
