"""Every causal language model of transformers: decoded by fused kernels, by its own forward, or refused in one sentence; then
placed and verified, or left with a reason. Never a raw exception."""

import pytest
import torch
import transformers

import gpubound as gb

from .decode import conftest as of_decode
from .models_table import CLASSES, SKIPPED, TYPES, tiny
from .place.models import place

kernels_path = of_decode.kernels_path  # a fixture: the way that a GPU takes

FUSED = (
    "arcee", "axk1", "bamba", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "exaone",
    "exaone4", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm",
    "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite",
    "granitemoehybrid", "helium", "hyperclovax", "jais2", "lfm2", "lfm2_moe", "llama", "mamba2", "mellum", "minicpm3",
    "minimax_m2", "ministral", "ministral3", "mistral4", "mistral", "mixtral", "nemotron", "nemotron_h", "olmo", "olmo2",
    "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma",
    "youtu",
)  # fmt: skip
# The certificates of the others are those of tests/decode.
CERTIFIED = (
    "arcee", "cwm", "exaone", "gemma3", "gpt_bigcode", "gptj", "helium", "hyperclovax", "jais2", "olmo", "qwen3_5_moe_text",
    "sarvam_mla", "sarvam_moe", "solar_open",
)  # fmt: skip
PROMPTS = [[1, 2, 3, 5, 8], [4, 5]]
RECURRENT = "its two layers are recurrent, and transformers' cache wants one of attention"
OWN_FAULT = "transformers' own forward raises in this configuration"
UNVERIFIED = {
    **dict.fromkeys(("axk2", "deepseek_v32", "dory", "glm_moe_dsa", "prophetnet", "reformer", "xlstm"), OWN_FAULT),
    **dict.fromkeys(("bailing_hybrid", "jamba", "kimi_linear", "lfm3"), RECURRENT),
    **dict.fromkeys(("qwen4_exp_text", "recurrent_gemma"), RECURRENT),
}  # fmt: skip
QUICK = ("deepseek_v3", "gemma3_text", "gpt2", "llama", "mamba2", "qwen3_next", "rwkv", "xlstm")


def marks(kind: str) -> list:
    return [pytest.mark.skip(SKIPPED[kind])] if kind in SKIPPED else [] if kind in QUICK else [pytest.mark.slow]


KINDS = [pytest.param(kind, marks=marks(kind)) for kind in TYPES]


@pytest.fixture(scope="module", autouse=True)
def no_notices():
    """A fallback is a line on stderr for each model here."""
    before, gb.trace.logger.level = gb.trace.logger.level, 100
    yield
    gb.trace.logger.level = before


@torch.no_grad()
def logits(model, *ids):
    return model(input_ids=torch.tensor([ids])).logits


def decoded(model, kind) -> None:
    try:
        fast = gb.decoder(model, 2, 32, verify=kind in CERTIFIED)
    except ValueError as error:
        assert str(error).startswith("decoder: ") and "\n" not in str(error) and kind not in FUSED
        return
    assert (fast.path == "") or kind not in FUSED
    rows = fast.generate(PROMPTS, max_new_tokens=3, stop=()).tokens
    for prompt, row in zip(PROMPTS, rows):
        own = logits(model, *prompt, *row[:-1])[0, len(prompt) - 1 :].float()
        best, chosen = own.max(-1).values, own.gather(-1, torch.tensor(row)[:, None])[:, 0]
        assert (best - chosen <= 2e-2 * own.abs().amax(-1)).all()


def verified(model, kind) -> None:
    ids = (5, 3, 8, 13, 21, 34)
    try:
        want = logits(model, *ids)
    except Exception:
        assert kind in UNVERIFIED
        want = None
    placement = place(model)
    if not placement.verified:
        assert kind in UNVERIFIED and "its own forward and backward raised" in placement.summary, placement.summary
    if want is not None:
        assert (logits(model.eval(), *ids) - want).norm() <= 1e-4 * want.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_decoded_and_placed_or_has_a_reason(kind):
    model = tiny(kind)
    decoded(model, kind)
    verified(model, kind)


def test_the_table_has_all_exported_models():
    names = {name for name in dir(transformers) if name.endswith("ForCausalLM") and not name.startswith("Auto")}
    assert names <= set(CLASSES.values())


def test_an_input_that_cannot_be_guessed_is_named():
    summary = place(torch.nn.Sequential(torch.nn.LayerNorm(4))).summary
    assert "not verified as a whole" in summary and "example=" in summary
