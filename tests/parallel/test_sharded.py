"""Ranks that each hold their rows of every parameter take the steps that one process takes with all of it."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.models.llama import Decoder, DecoderConfig
from gpubound.parallel import ALONE, join
from gpubound.parallel.sharded import shard
from gpubound.train.recompute import blocks_of
from tests.parallel.processes import on_ranks

STEPS, WORDS = 3, 26
ADAMW = gb.AdamW(lr=1e-2, weight_decay=0.1, eps=1e-4)  # with 1e-8 a gradient of nothing but noise moves by the rate


def llama(tied: bool = True) -> nn.Module:
    """26 words and 6 rows of a key: over 4 ranks the last one has fewer rows of the table, and none of the key."""
    torch.manual_seed(5)
    return Decoder(DecoderConfig(24, 40, 2, 4, 1, WORDS, tied=tied))


def batch(step: int, number: int) -> dict[str, torch.Tensor]:
    """Micro-batch `number` of a step: another one has other words, and another count of valid ones."""
    g = torch.Generator().manual_seed(100 * step + number)
    words, labels = torch.randint(WORDS, (2, 6), generator=g), torch.randint(WORDS, (2, 6), generator=g)
    labels[:, 6 - number % 4 :] = -100
    return {"input_ids": words, "labels": labels}


def trained(world: int, each: int, optimizer=ADAMW, precision="fp32", **options):
    """Three steps of `world` ranks with `each` micro-batches a step: the whole weights, the reports, and what a rank holds."""
    with join("cpu") if world > 1 else nullcontext(ALONE) as ranks:
        model = llama()
        if world > 1:
            shard(model, blocks_of(model), ranks, DTYPES[precision])
        step = gb.TrainStep(
            model, "next_token", optimizer, accumulate=each, clip=0.5, precision=precision, graph="off", ranks=ranks, **options
        )
        reports = []
        for number in range(STEPS):
            said = step([batch(number, ranks.rank + world * i) for i in range(each)]).read()
            reports.append((said.loss, said.grad_norm, said.tokens, said.skipped))
        state = {name: whole(tensor) for name, tensor in step.state_dict().items()}
        step.close()
        return {name: whole(tensor) for name, tensor in model.state_dict().items()}, reports, state, step.memory


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().float().numpy().copy()


def equal(wanted, got, rtol=1e-6, atol=1e-6):
    assert wanted.keys() == got.keys()
    for name in wanted:
        torch.testing.assert_close(torch.from_numpy(got[name]), torch.from_numpy(wanted[name]), rtol=rtol, atol=atol, msg=name)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("world, each", [(2, 1), (4, 1), (2, 4)])
def test_ranks_that_share_the_rows_are_one_process(world, each):
    weights, reports, state, memory = trained(1, world * each)
    for theirs, said, their_state, their_memory in on_ranks(world, trained, world, each):
        for a, b in zip(reports, said):
            assert b == pytest.approx(a, rel=2e-6)
        equal(weights, theirs)
        equal(state, their_state)
        for part in ("weights", "gradient", "moments"):
            padding = len(weights) * 64 * 4 * (2 if part == "moments" else 1)  # each begins at a multiple of 64
            assert their_memory[part] <= memory[part] / world + padding
