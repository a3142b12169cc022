"""The bytes that a plan puts on the wire are those that a run on two ranks gives to its collectives."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from gpubound.models.llama.decoder import DecoderConfig
from gpubound.parallel import Ranks, join
from gpubound.plan.setting import Outline, Setting
from gpubound.plan.wire import Collective, collectives
from gpubound.train import AdamW, TrainStep
from tests.parallel.processes import on_ranks

WORLD, WIDTH = 2, 64
CONFIG = DecoderConfig(WIDTH, 48, 3, 2, 1, 64)  # three blocks, whose parameters are those of Blocks here
OUTLINE = Outline(CONFIG, WIDTH * WIDTH + WIDTH, 32 * WIDTH, 0)
KINDS = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce"}


class Blocks(nn.Module):
    """As many blocks as the config says, a linear layer each, above a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(CONFIG.layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Collectives(TorchDispatchMode):
    """Counts the bytes of the whole tensors that collectives gather, scatter or sum."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name.startswith("c10d::"):
            tensors = [t for argument in args[:2] for t in ([argument] if isinstance(argument, torch.Tensor) else [])]
            lists = [t for argument in args[:1] if isinstance(argument, list) for t in argument]
            self.bytes[KINDS.get(name[6:], name)] += max(t.nbytes for t in [*tensors, *lists])
        return function(*args, **(kwargs or {}))


def sharded(accumulate: int, once: bool = False) -> dict[str, int]:
    """What torch's own fully_shard sends in a step of `accumulate` micro-batches."""
    model = Blocks()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    with Collectives() as seen:
        for n in range(accumulate):
            model.set_requires_gradient_sync(not once or n == accumulate - 1)
            model(torch.arange(32)).float().sum().backward()
    return dict(seen.bytes)


def replicated(accumulate: int, ranks: Ranks) -> dict[str, int]:
    """What a TrainStep on replicas sends in a step, but for how it begins."""
    step = TrainStep(
        Blocks(), lambda m, x: (m(x).sum(), len(x)), torch.optim.SGD, accumulate=accumulate, precision="fp32", graph="off",
        ranks=ranks,
    )  # fmt: skip
    step([torch.arange(32)] * accumulate)  # the first one also finds the order of its buckets
    with Collectives() as seen:
        step([torch.arange(32)] * accumulate)
    return dict(seen.bytes)


def sent() -> tuple[dict[str, int], list[dict[str, int]]]:
    with join("cpu") as ranks:
        return replicated(2, ranks), [sharded(1), sharded(2), sharded(2, once=True)]


def test_a_step_sends_what_its_collectives_are_given():
    """A run on two ranks, its own TrainStep of replicas and torch's fully_shard, counted at torch's dispatcher."""
    losses = 3 * 8  # beside the gradient: the sum of the losses, their number and that of idle ranks, in fp64
    replicas = {"all-reduce": totals(collectives(setting(accumulate=2)))["all-reduce"] + losses}
    shards = [totals(collectives(setting(accumulate=n, sharded=True, once=once))) for n, once in ((1, 0), (2, 0), (2, 1))]
    assert on_ranks(WORLD, sent) == [(replicas, shards)] * WORLD


def totals(calls: list[Collective]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for call in calls:
        found[call.kind] += call.bytes * call.times
    return dict(found)


def setting(**options) -> Setting:
    return Setting(OUTLINE, AdamW(), "bf16", 8, 1, world=WORLD, **options)


def ring(world: int, size: int) -> list[int]:
    """Elements that each rank sends while a ring adds up `size` of them, chunk by chunk, and hands the sums round."""
    sent, chunk = [0] * world, size // world
    held = [[{rank} for _ in range(world)] for rank in range(world)]  # of each chunk, whose parts the rank has added
    for phase in ("add", "copy"):
        for step in range(world - 1):
            for rank in range(world):
                which = (rank - step + (phase == "copy")) % world
                there = held[(rank + 1) % world][which]
                there |= held[rank][which]
                sent[rank] += chunk
    assert all(parts == set(range(world)) for chunks in held for parts in chunks)
    return sent


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_ring_sends_what_a_collective_says(world):
    call = Collective("gradient", "all-reduce", 4 * 64 * world, 1)
    assert [4 * elements for elements in ring(world, 64 * world)] == [call.sent(world)] * world
