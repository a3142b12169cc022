"""The bytes that a plan puts on the wire are those that a run on two ranks gives to its collectives."""

from collections import Counter

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from gpubound.models.llama.decoder import Decoder, DecoderConfig
from gpubound.parallel import join
from gpubound.plan.setting import Setting, outlined
from gpubound.plan.wire import Collective, collectives
from gpubound.train import AdamW
from tests.parallel.processes import on_ranks

CONFIG = DecoderConfig(32, 48, 3, 2, 1, 64)
WORLD = 2
KINDS = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce"}


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


def llama() -> torch.nn.Module:
    """transformers' model of the same shape."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    c = CONFIG
    config = LlamaConfig(
        hidden_size=c.hidden, intermediate_size=c.intermediate, num_hidden_layers=c.layers, num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads, vocab_size=c.vocabulary, tie_word_embeddings=c.tied, use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def sharded(accumulate: int, deferred: bool) -> dict[str, int]:
    """What torch's own fully_shard sends in a step of `accumulate` micro-batches."""
    with join("cpu"):
        torch.manual_seed(0)
        model = llama().train()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        ids = torch.randint(CONFIG.vocabulary, (1, 8))
        with Collectives() as seen:
            for number in range(accumulate):
                model.set_requires_gradient_sync(not deferred or number == accumulate - 1)
                model(ids).logits.float().logsumexp(-1).sum().backward()
        return dict(seen.bytes)


def totals(calls: list[Collective]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for call in calls:
        found[call.kind] += call.bytes * call.times
    return dict(found)


def setting(**options) -> Setting:
    return Setting(outlined(Decoder(CONFIG, device="meta")), AdamW(), "bf16", 8, 1, world=WORLD, **options)


@pytest.mark.parametrize(("accumulate", "deferred"), [(1, False), (2, False), (2, True)])
def test_a_sharded_step_sends_what_fully_shard_sends(accumulate, deferred):
    counted = on_ranks(WORLD, sharded, accumulate, deferred)
    predicted = totals(collectives(setting(accumulate=accumulate, sharded=True, deferred=deferred)))
    assert counted == [predicted] * WORLD


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
