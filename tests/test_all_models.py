"""Every causal language model of transformers: decoded by fused kernels, by its own forward, or refused in one sentence; then
placed and verified, or left with a reason. Never a raw exception."""

import pytest
import torch

import gpubound as gb

from .decode import conftest as of_decode
from .models_table import SKIPPED, TYPES, tiny
from .place.models import place

kernels_path = of_decode.kernels_path  # a fixture: the way that a GPU takes

FUSED = (
    "cwm",
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "vaultgemma",
)
PROMPTS = [[1, 2, 3, 5, 8], [4, 5]]
RECURRENT = "its two layers are recurrent, and transformers' cache wants one of attention"
OWN_FAULT = "transformers' own forward raises in this configuration"
UNVERIFIED = {
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "prophetnet", "reformer", "xlstm"), OWN_FAULT),
    **dict.fromkeys(("bailing_hybrid", "bamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm3"), RECURRENT),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma"), RECURRENT),
}  # fmt: skip
KINDS = [pytest.param(kind, marks=[pytest.mark.skip(SKIPPED[kind])] if kind in SKIPPED else []) for kind in TYPES]


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
        fast = gb.decoder(model, 2, 32, verify=kind in FUSED)  # of others the certificate compares a forward with itself
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


def test_a_wrapper_of_a_fused_family_is_named_as_one():
    """Its path said that Gemma3 was none of the families, which named Gemma3 among them."""
    fast = gb.decoder(tiny("gemma3"), 1, 32)
    assert "gemma3_text" in fast.path and "Gemma3ForConditionalGeneration" in fast.path and "Gemma3ForCausalLM" in fast.path


def wrapper(kind):
    """A model of images and text, by its configuration's smallest towers."""
    import transformers as hf

    text = {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 89,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28}
    vision |= {"patch_size": 14}
    torch.manual_seed(0)
    if kind == "gemma3":
        ids = {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}  # ids that the random tokens would hold
        config = hf.Gemma3Config(text_config=text | {"sliding_window": 24}, vision_config=vision, mm_tokens_per_image=4, **ids)
        return hf.Gemma3ForConditionalGeneration(config).eval()
    towers = {"text_config": text | {"model_type": "mistral"}, "vision_config": vision | {"model_type": "pixtral"}}
    return hf.Mistral3ForConditionalGeneration(hf.Mistral3Config(**towers, image_token_index=5)).eval()


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_a_model_of_images_and_text_is_verified_on_text(kind):
    model = wrapper(kind)
    want = logits(model, 5, 3, 8, 13, 21, 34)
    placement = place(model)
    assert placement.verified and placement.swapped > 10, placement.summary
    torch.testing.assert_close(logits(model.eval(), 5, 3, 8, 13, 21, 34), want, rtol=1e-4, atol=1e-5)


def test_an_input_that_cannot_be_guessed_is_named():
    summary = place(torch.nn.Sequential(torch.nn.LayerNorm(4))).summary
    assert "not verified as a whole" in summary and "example=" in summary
