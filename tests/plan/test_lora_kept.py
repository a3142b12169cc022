"""What a plan says that backward keeps of a step of adapters is what autograd's own hooks count: to the byte."""

import pytest
import torch

from gpubound.layers.recompute import LEAST_BYTES, recompute_from
from gpubound.models.llama.decoder import Decoder, DecoderConfig
from gpubound.plan.kept import model_keeps
from gpubound.plan.lora import LoraSetting, adapted
from gpubound.plan.reading import META, outlined
from gpubound.plan.setting import Setting
from gpubound.train import AdamW, TrainStep
from gpubound.train.adapters import Lora
from gpubound.train.precision import precision as precision_named
from tests.plan.counting import ROWS, SEQ, kept

PLAIN = DecoderConfig(64, 128, 3, 4, 2, 256, tied=True)
NORMED = DecoderConfig(64, 128, 2, 4, 4, 192, head_width=32, qk_norm=True)
RANK = 4


def setting(config: DecoderConfig, precision: str, recompute: str, lora: Lora) -> LoraSetting:
    model = Decoder(config, device=META)
    return adapted(Setting(outlined(model), AdamW(), precision, SEQ, ROWS, 1, recompute), lora, model)


def counted(config: DecoderConfig, precision: str, recompute: str, least: float, lora: Lora) -> int:
    """Of the step that trains adapters of a model."""
    torch.manual_seed(0)
    model = Decoder(config, dtype=precision_named(precision).dtype).train()
    lora.add(model)
    step = TrainStep(model, "next_token", precision=precision, recompute=recompute, graph="off")
    if recompute == "cheap":
        recompute_from(model, least)
    size = kept(model)
    step.close()
    return size


@pytest.mark.parametrize(
    ("config", "precision", "recompute", "least", "options"),
    [
        (PLAIN, "bf16", "cheap", LEAST_BYTES, {}),  # results so small are kept
        (PLAIN, "bf16", "cheap", 0, {}),
        (PLAIN, "bf16", "none", 0, {}),
        (PLAIN, "fp32", "1", LEAST_BYTES, {}),
        (PLAIN, "fp32", "blocks", LEAST_BYTES, {}),
        (NORMED, "fp32", "cheap", 0, {}),
        (PLAIN, "bf16", "cheap", 0, {"base": "nf4"}),
        (PLAIN, "bf16", "cheap", 0, {"base": "int8"}),
        (PLAIN, "bf16", "cheap", 0, {"base": "fp8"}),
        (PLAIN, "bf16", "cheap", 0, {"targets": ("q_proj", "v_proj")}),
        (PLAIN, "bf16", "cheap", 0, {"targets": ("o_proj",)}),
        (PLAIN, "bf16", "cheap", 0, {"targets": ("gate_proj", "up_proj")}),
        (PLAIN, "bf16", "cheap", 0, {"targets": ("down_proj",)}),
        (PLAIN, "bf16", "1", LEAST_BYTES, {"targets": ("down_proj", "o_proj")}),
    ],
)
def test_predicted_bytes_are_those_that_autograd_keeps(config, precision, recompute, least, options):
    lora = Lora(RANK, **options)
    predicted = model_keeps(setting(config, precision, recompute, lora), least)
    assert sum(predicted.values()) == counted(config, precision, recompute, least, lora), predicted
