"""Decoding a model whose adapters are on: the tokens of the model that adds them, without a merge."""

import pytest
import torch

import gpubound as gb

from . import cases

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
NEW = 20


def adapt(model, rank=4, seed=3, **options):
    torch.manual_seed(seed)
    gb.lora.add(model, rank, alpha=2 * rank, init=False, **options)
    return model


def of(fast, prompt=cases.PROMPT, **settings):
    return fast.generate(prompt, max_new_tokens=NEW, **settings).tokens[0]


def peft_model(kind="Llama", **options):
    torch.manual_seed(4)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False} | options
    return peft.get_peft_model(cases.build(kind), peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()


def test_our_own_models_forward_knows_its_adapters():
    """Its transformers twin has layers of its own over the same parameters: none may be without what the record says."""
    model = adapt(cases.build("own", qkv_bias=False, qk_norm=False))
    fast = gb.decoder(model, 1, cases.ROOM, fused=False)
    want = of(fast)
    assert want == cases.greedy_by_forwards(model, cases.PROMPT, NEW)
    with gb.lora.disable(model):
        assert of(fast) == cases.greedy_by_forwards(model, cases.PROMPT, NEW) != want


@pytest.mark.parametrize("fused", [True, False])
def test_pefts_wrapper_is_decoded_as_it_is(fused):
    model = peft_model()
    fast = gb.decoder(model, 1, cases.ROOM, fused=fused)
    want = cases.hugging_face(model, cases.PROMPT, NEW)
    assert of(fast) == want
    with model.disable_adapter():
        assert of(fast) == cases.hugging_face(model, cases.PROMPT, NEW) != want
    assert of(fast) == want


def test_what_the_kernels_do_not_take_is_a_counted_fallback():
    model = peft_model(use_dora=True)
    why = r"decoder: the fused kernels: would fall back: model\.layers\.0"
    with pytest.raises(gb.errors.FallbackError, match=why), gb.strict():
        gb.decoder(model, 1, cases.ROOM)
    fast = gb.decoder(model, 1, cases.ROOM)
    assert fast.path
    assert of(fast) == cases.hugging_face(model, cases.PROMPT, NEW)
