"""The contenders of training on several GPUs, one process of each: ours, and PyTorch's own DDP and FSDP2 as they are used.

Each rank draws the same weights, and rows of its own. A process that is alone runs our plain step.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gpubound.device import grow_segments
from gpubound.distributed import Ranks, join
from gpubound.distributed.fsdp import shard
from gpubound.train.offload import blocks_of

from . import lora_worker, train_worker
from .serving import Contender, Job, Step, job_given, serve
from .train_worker import BATCHES, CLIP, Attach, as_it_is, llama, token_batches, use_liger

Contends = Callable[[Job, Ranks], Contender]


def ours(job: Job, ranks: Ranks) -> Contender:
    """Replicas: the step of a single GPU, on all of them."""
    return train_worker.ours(job, ranks=ranks)


def ours_in_shards(job: Job, ranks: Ranks) -> Contender:
    """The same step where each rank holds its rows of every weight, in fp32."""

    def dealt(model: nn.Module) -> nn.Module:
        shard(model, blocks_of(model), ranks)
        return model

    return train_worker.ours(job, attach=dealt, ranks=ranks, overlap=False)


def ours_over_rows(job: Job, ranks: Ranks) -> Contender:
    """Low-rank adapters, whole on each rank, over a frozen base of which it holds its rows in bf16."""

    def dealt(model: nn.Module) -> nn.Module:
        lora_worker.add(model)
        shard(model, blocks_of(model), ranks)
        return model

    return train_worker.ours(job, attach=dealt, ranks=ranks, overlap=False)


def usual(
    job: Job, ranks: Ranks, wrap: Callable[[nn.Module], nn.Module], dtype: torch.dtype, attach: Attach = as_it_is
) -> Contender:
    """The usual loop around a wrapped model: batches resident, fused AdamW.

    DDP sends gradients with the last micro-batch, FSDP with each: whole fp32 sums that wait for the last would not fit.
    """
    model, batches = attach(llama(job, dtype)), token_batches(job, ranks)
    parameters = sum(p.numel() for p in model.parameters())

    def start() -> Step:
        wrapped = wrap(model)
        trained = [p for p in wrapped.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=job.lr, fused=True)

        def step() -> Tensor:
            for i in range(job.accumulate):
                if isinstance(wrapped, DistributedDataParallel):
                    wrapped.require_backward_grad_sync = i == job.accumulate - 1  # no_sync, without its two contexts
                loss = wrapped(**batches[i % BATCHES]).loss
                (loss / job.accumulate).backward()
            nn.utils.clip_grad_norm_(trained, CLIP)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return Contender(start, parameters)


def ddp(job: Job, ranks: Ranks, compiled: bool = False, liger: bool = False) -> Contender:
    """Weights, gradients and moments in bf16, as Hugging Face models come; fp32 on a CPU."""
    if liger:
        use_liger()

    def wrap(model: nn.Module) -> nn.Module:
        if compiled:
            model.compile()
        ids = [ranks.device.index] if ranks.device.type == "cuda" else None
        still = not compiled and job.accumulate == 1  # a first backward without sums ends in an assertion of torch 2.11
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, static_graph=still)

    return usual(job, ranks, wrap, torch.bfloat16 if ranks.device.type != "cpu" else torch.float32)


def dealt_by_torch(model: nn.Module, ranks: Ranks, policy: MixedPrecisionPolicy) -> nn.Module:
    """Fully sharded, with the allocator's settings that torchtitan and ours have."""
    grow_segments(ranks.device)
    for block in blocks_of(model):
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def fsdp(job: Job, ranks: Ranks, compiled: bool = False, liger: bool = False) -> Contender:
    """fp32 shards, bf16 products, fp32 sums of gradients: a block at a time. Compiled are each block, and the loss."""
    if liger:
        use_liger()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def wrap(model: nn.Module) -> nn.Module:
        if compiled:
            model.loss_function = torch.compile(model.loss_function)
            for block in blocks_of(model):
                block.compile()
        return dealt_by_torch(model, ranks, policy)

    return usual(job, ranks, wrap, torch.float32)


def peft(job: Job, ranks: Ranks, liger: bool = False) -> Contender:
    """PEFT's adapters in fp32, sharded beside the frozen bf16 weights of their block: fp32 on a CPU."""
    if liger:
        use_liger()
    dtype = torch.bfloat16 if ranks.device.type != "cpu" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)

    return usual(job, ranks, partial(dealt_by_torch, ranks=ranks, policy=policy), dtype, lora_worker.get_peft_model)


CONTENDERS: dict[str, Contends] = {
    "ours-ddp": ours,
    "ours-fsdp": ours_in_shards,
    "ours-fsdp-lora": ours_over_rows,
    "fsdp-peft": peft,
    "fsdp-peft-liger": partial(peft, liger=True),
    "ddp": ddp,
    "ddp-compile": partial(ddp, compiled=True),
    "ddp-liger": partial(ddp, liger=True),
    "fsdp": fsdp,
    "fsdp-compile": partial(fsdp, compiled=True),
    "fsdp-liger": partial(fsdp, liger=True),
}


if __name__ == "__main__":
    with join(job_given().device) as ranks:
        serve({name: partial(contends, ranks=ranks) for name, contends in CONTENDERS.items()})
