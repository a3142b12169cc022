"""What a plan says that backward finds kept is what autograd's own hooks count on a model that runs: to the byte."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from gpubound.layers.recompute import LEAST_BYTES, recompute_from
from gpubound.models.llama.decoder import Decoder, DecoderConfig
from gpubound.parallel import ALONE, Ranks, join
from gpubound.parallel.dealt import fsdp_parameters, units
from gpubound.parallel.sharded import shard
from gpubound.plan.kept import model_keeps
from gpubound.plan.setting import Outline, Setting
from gpubound.train import AdamW, TrainStep
from gpubound.train.objectives.causal_lm import NextToken
from gpubound.train.recompute import blocks_of
from tests.parallel.processes import on_ranks

ROWS, SEQ = 2, 16
PLAIN = DecoderConfig(64, 96, 2, 4, 2, 256, tied=True)
NORMED = DecoderConfig(64, 80, 2, 4, 4, 192, head_width=32, qk_norm=True)


def counted(config: DecoderConfig, precision: str, recompute: str, least: float, ranks: Ranks = ALONE) -> int:
    """Bytes of all storages that autograd saves in one forward, but for the parameters and the batch. Of weights that a block
    has gathered nothing is there any more."""
    torch.manual_seed(0)
    model = Decoder(config).train()
    if not ranks.alone:
        shard(model, blocks_of(model), ranks, torch.float32)
    step = TrainStep(model, "next_token", precision=precision, recompute=recompute, graph="off", ranks=ranks)
    if recompute == "cheap":
        recompute_from(model, least)
    batch = {name: torch.randint(config.vocabulary, (ROWS, SEQ)) for name in ("input_ids", "labels")}
    objective, scale = NextToken(), torch.ones(())
    objective.prepare(model, batch)
    if precision == "fp8":
        step._fp8.states[..., 0] = 0.01  # any scale will do
    angles = model.model.rope.first(SEQ, torch.device("cpu"))  # the model's own table
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total, _ = step._held.loss(lambda: objective(model, batch, scale=scale))
    gathered = [p.unsharded_param for unit in units(model) for p in fsdp_parameters(unit)]
    weights = gathered or model.parameters()
    known = {t.untyped_storage().data_ptr() for t in (*weights, *batch.values(), *angles, scale)}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    size = sum(size for where, size in sizes.items() if where not in known)
    del total
    step.close()
    return size


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


def counted_in_shards(*case) -> int:
    os.environ["TRITON_INTERPRET"] = "1"  # what the kernels keep, and not their definitions; the process is this test's
    with join("cpu") as ranks:
        return counted(*case, ranks)


@pytest.mark.parametrize("least", [0, LEAST_BYTES], ids=["again", "kept"])
def test_shards_keep_as_much(least):
    """And the head's gradient, which the plan counts among those that are not summed yet."""
    case = PLAIN, "fp32", "cheap"
    predicted = sum(model_keeps(replace(setting(*case), world=2, sharded=True), least).values())
    head = 4 * PLAIN.vocabulary * PLAIN.hidden
    assert on_ranks(2, partial(counted_in_shards, *case, least)) == [predicted + head] * 2
