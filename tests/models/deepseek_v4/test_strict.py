"""Norms that leave their result in fp32, as those of transformers before 5.18: the model runs in 16 bits all the same."""

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

import gpubound as gb
from gpubound.models.deepseek_v4.family import keep_in_fp32, rounded

from .decode.cases import build, text


@pytest.fixture
def older(monkeypatch):
    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)

    monkeypatch.setattr(DeepseekV4RMSNorm, "forward", forward)


@pytest.mark.slow
def test_an_older_transformers_norm(older):
    model = build().bfloat16()
    for name, parameter in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.float()
    ids = text(9)[None]
    with pytest.raises(RuntimeError, match="same dtype"):
        model(input_ids=ids)
    assert gb.decoder(model, 1, 64).generate(ids.tolist(), max_new_tokens=2, stop=()).count == 2
    with pytest.raises(RuntimeError, match="same dtype"):  # which leaves the model as it was
        model(input_ids=ids)
    keep_in_fp32(model)
    assert model(input_ids=ids).logits.isfinite().all() and not rounded(model)


def test_norms_that_round_have_no_hook():
    model = build()
    assert not rounded(model)
    keep_in_fp32(model)
    assert not any(module._forward_hooks for module in model.modules())
