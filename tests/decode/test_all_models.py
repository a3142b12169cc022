"""Every causal language model of transformers: decoded by the fused kernels, by its own forward, or refused in one sentence."""

import pytest
import torch

import gpubound as gb

from ..models_table import SKIPPED, TYPES, tiny

PROMPTS = [[1, 2, 3, 5, 8], [4, 5]]
FUSED = [
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
]


@pytest.fixture(scope="module", autouse=True)
def no_notices():
    """A fallback is a line on stderr for each model here."""
    before, gb.trace.logger.level = gb.trace.logger.level, 100
    yield
    gb.trace.logger.level = before


KINDS = [pytest.param(kind, marks=[pytest.mark.skip(SKIPPED[kind])] if kind in SKIPPED else []) for kind in TYPES]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_decoded_or_refused_in_one_sentence(kind):
    model = tiny(kind)
    try:
        fast = gb.decoder(model, 2, 32, verify=kind in FUSED)  # of others the certificate compares a forward with itself
    except ValueError as error:
        assert str(error).startswith("decoder: ") and "\n" not in str(error) and kind not in FUSED
        return
    assert (fast.path == "") or kind not in FUSED
    rows = fast.generate(PROMPTS, max_new_tokens=3, stop=()).tokens
    for prompt, row in zip(PROMPTS, rows):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *row[:-1]]])).logits[0, len(prompt) - 1 :].float()
        best, chosen = logits.max(-1).values, logits.gather(-1, torch.tensor(row)[:, None])[:, 0]
        assert (best - chosen <= 2e-2 * logits.abs().amax(-1)).all()


def test_a_wrapper_of_a_fused_family_is_named_as_one():
    """Its path said that Gemma3 was none of the families, which named Gemma3 among them."""
    fast = gb.decoder(tiny("gemma3"), 1, 32)
    assert "gemma3_text" in fast.path and "Gemma3ForConditionalGeneration" in fast.path and "Gemma3ForCausalLM" in fast.path
