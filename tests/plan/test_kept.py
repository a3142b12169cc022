"""What a plan says that backward finds kept is what autograd's own hooks count on a model that runs: to the byte."""

from dataclasses import replace

import pytest
import torch

from gpubound.layers.recompute import LEAST_BYTES, recompute_from
from gpubound.models.llama.decoder import Decoder, DecoderConfig
from gpubound.plan.kept import model_keeps
from gpubound.plan.setting import Outline, Setting
from gpubound.train import AdamW, TrainStep
from tests.plan.counting import ROWS, SEQ, kept

PLAIN = DecoderConfig(64, 96, 2, 4, 2, 256, tied=True)
NORMED = DecoderConfig(64, 80, 2, 4, 4, 192, head_width=32, qk_norm=True)


def counted(config: DecoderConfig, precision: str, recompute: str, least: float) -> int:
    """Of the step that trains a model."""
    torch.manual_seed(0)
    model = Decoder(config).train()
    step = TrainStep(model, "next_token", precision=precision, recompute=recompute, graph="off")
    if recompute == "cheap":
        recompute_from(model, least)
    if precision == "fp8":
        step._fp8.states[..., 0] = 0.01  # any scale will do
    size = kept(model)
    step.close()
    return size


def counted_in_shards(config: DecoderConfig, least: float) -> int:
    """As where FSDP has gathered the weights: they have no accumulators, and are multiplied one by one."""
    torch.manual_seed(0)
    model = Decoder(config).train()
    for module in model.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
    recompute_from(model, least)
    return kept(model)


def setting(config: DecoderConfig, precision: str, recompute: str) -> Setting:
    return Setting(Outline(config, 0, 0, 0), AdamW(), precision, SEQ, ROWS, 1, recompute)


@pytest.mark.parametrize(
    ("config", "precision", "recompute", "least"),
    [
        (PLAIN, "bf16", "cheap", LEAST_BYTES),  # results so small are kept
        (PLAIN, "bf16", "cheap", 0),
        (PLAIN, "bf16", "none", LEAST_BYTES),
        (PLAIN, "fp32", "1", LEAST_BYTES),
        (PLAIN, "fp32", "blocks", LEAST_BYTES),
        (PLAIN, "fp8", "cheap", LEAST_BYTES),
        (NORMED, "fp32", "cheap", 0),
    ],
)
def test_predicted_bytes_are_those_that_autograd_keeps(config, precision, recompute, least):
    predicted = model_keeps(setting(config, precision, recompute), least)
    assert sum(predicted.values()) == counted(config, precision, recompute, least), predicted


@pytest.mark.parametrize("least", [0, LEAST_BYTES], ids=["again", "kept"])
def test_shards_keep_as_much(least):
    """And the head's gradient, which the plan counts among those that are not summed yet."""
    predicted = sum(model_keeps(replace(setting(PLAIN, "fp32", "cheap"), world=2, sharded=True), least).values())
    assert counted_in_shards(PLAIN, least) == predicted + 4 * PLAIN.vocabulary * PLAIN.hidden
