"""What a plan of adapters says that two ranks send each other, and that each of them holds, beside a step that runs."""

from functools import partial

import pytest
import torch

import gpubound as gb
from gpubound.models.llama import Decoder, DecoderConfig
from gpubound.parallel import Ranks, join
from gpubound.parallel.pieces import is_sharded
from gpubound.parallel.sharded import shard
from gpubound.plan.lora import LoraSetting, adapted
from gpubound.plan.memory import held
from gpubound.plan.reading import META, outlined
from gpubound.plan.setting import Setting
from gpubound.plan.wire import collectives
from gpubound.train import AdamW
from gpubound.train.adapters import Lora
from gpubound.train.recompute import blocks_of
from tests.parallel.processes import on_ranks
from tests.plan.test_wire import Collectives, totals

WORLD, EACH, SEQ = 2, 2, 16
CONFIG = DecoderConfig(64, 128, 3, 4, 2, 96)
LOSSES = 3 * 8  # beside the gradient: the sum of the losses, their number and that of idle ranks, in fp64
TURNOUT = 8 * WORLD  # between hosts: how many micro-batches each rank of a sharded model has, in int64


def ran(sharded: bool, base: str | None) -> tuple[dict[str, int], dict[str, int]]:
    """(bytes of a step's collectives, bytes that this rank holds) of two micro-batches on each of two ranks."""
    with join("cpu") as ranks:
        return stepped(ranks, sharded, base)


def stepped(ranks: Ranks, sharded: bool, base: str | None) -> tuple[dict[str, int], dict[str, int]]:
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    Lora(4, base=base).add(model)
    if sharded:
        shard(model, blocks_of(model), ranks, torch.float32)
    step = gb.TrainStep(model, "next_token", accumulate=EACH, precision="fp32", graph="off", ranks=ranks)
    batch = dict.fromkeys(("input_ids", "labels"), torch.arange(SEQ)[None])
    step([batch] * EACH)  # the first one also finds the order of its buckets
    with Collectives() as seen:
        step([batch] * EACH)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    of_rank = sum((p.to_local() if is_sharded(p) else p).nbytes for p in frozen)  # type: ignore[attr-defined]
    holds = {"frozen weights": of_rank, "what codes are read by": sum(b.nbytes for b in model.buffers())} | step.memory
    holds["adapters"] = holds.pop("weights")
    step.close()
    return dict(seen.bytes), {name: size for name, size in holds.items() if size}


def setting(sharded: bool, base: str | None) -> LoraSetting:
    model = Decoder(CONFIG, device=META)
    whole = Setting(outlined(model), AdamW(), "fp32", SEQ, 1, EACH, captured=False, world=WORLD, sharded=sharded)
    return adapted(whole, Lora(4, base=base), model)


@pytest.mark.parametrize("base", [None, "nf4"])
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_a_step_sends_and_holds_what_the_plan_says(sharded, base):
    planned = setting(sharded, base)
    sent = totals(collectives(planned))
    sent["all-reduce"] += LOSSES + sharded * TURNOUT
    holds = {name: size for name, size in held(planned).items() if size}
    for seen, there in on_ranks(WORLD, partial(ran, sharded, base)):
        assert (seen, there) == (sent, holds)
