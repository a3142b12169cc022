"""Adapters that PEFT computes itself: DoRA, convolutions, embeddings, experts, modules_to_save."""

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import gpubound as gb

from ..place.models import assert_near, batch, place, tiny, tokens
from .cases import adapted, folded

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
KINDS = {
    "DoRA": {"dora": True},
    "embedding": {"targets": ["embed_tokens", "q_proj"]},
    "head": {"targets": ["lm_head", "q_proj"]},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_peft_loads_what_was_trained(options, tmp_path):
    model = tiny()
    if "dora" not in options:
        place(model)
    adapted(model, **options)
    step = gb.TrainStep(model.train(), "causal_lm", gb.AdamW(lr=1e-2), precision="fp32", graph="off")
    losses = [step(batch()).read().loss for _ in range(3)]
    step.close()
    gb.lora.save(model.eval(), tmp_path)
    theirs, again = peft.PeftModel.from_pretrained(tiny(), tmp_path).eval(), tiny().eval()
    gb.lora.load(again, tmp_path)
    want = model(tokens()).logits
    assert losses[-1] < losses[0]
    for other in (theirs, again):
        assert_near(other(tokens()).logits, want)
    gb.lora.merge(again, for_good=True)
    assert list(again.state_dict()) == list(tiny().state_dict())
    assert_near(again(tokens()).logits, want)


def test_modules_to_save_come_from_pefts_files(tmp_path):
    """As of a chat model with new tokens: the embedding and the head were trained whole."""
    config = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "init_lora_weights": False}
    theirs = peft.get_peft_model(tiny(), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **config)).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "modules_to_save" in name:
                p.mul_(1.5)
    theirs.save_pretrained(tmp_path)
    model = tiny().eval()
    before = model(tokens()).logits
    gb.lora.load(model, tmp_path)
    want = theirs(tokens()).logits
    assert_near(model(tokens()).logits, want)
    assert len(gb.lora.parameters(model)) == 2 * 2 + 2
    with gb.lora.disable(model):
        assert torch.equal(model(tokens()).logits, before)
    step = gb.TrainStep(model.train(), "causal_lm", gb.AdamW(lr=1e-3), precision="fp32", graph="off")
    losses = [step(batch()).read().loss for _ in range(3)]
    step.close()
    assert losses[-1] < losses[0]
    gb.lora.remove(model)
    assert torch.equal(model.eval()(tokens()).logits, before) and list(model.state_dict()) == list(tiny().state_dict())


def test_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 3, padding=1))
    torch.manual_seed(0)
    assert gb.lora.add(model, rank=4, targets="all-linear-and-conv", init=False) == ["0", "2"], "the last is too small"
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(model(x), folded(model)(x), rtol=1e-4, atol=1e-5)
    model(x).square().sum().backward()
    assert all(p.grad.any() for p in gb.lora.parameters(model))


def test_experts(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, vocab_size=89)

    def sparse():
        torch.manual_seed(0)
        return MixtralForCausalLM(config).eval()

    model = sparse()
    before = model(tokens()).logits
    names = gb.lora.add(model, rank=4, targets=["q_proj", "gate_up_proj", "down_proj"], init=False)
    assert len(names) == 3
    want = model(tokens()).logits
    assert not torch.allclose(want, before, atol=1e-3)
    gb.lora.save(model, tmp_path)
    again = sparse()
    gb.lora.load(again, tmp_path)
    assert_near(again(tokens()).logits, want)
    gb.lora.remove(model)
    assert torch.equal(model(tokens()).logits, before)
