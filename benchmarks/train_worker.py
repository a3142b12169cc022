"""The contenders of the training benchmark, one a process: Liger patches classes, and peaks of memory must not mix."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gpubound.data import feed
from gpubound.device import grow_segments, growing_segments, release_cached
from gpubound.distributed import ALONE, Ranks
from gpubound.measure.memory_phases import MemoryPhases
from gpubound.place import place
from gpubound.train import AdamW, AdamW8bit, TrainStep

from .serving import Contender, Job, Step, serve
from .shapes import SHAPES, llama_config

CLIP, BATCHES = 1.0, 8

Attach = Callable[[nn.Module], nn.Module]
"""gives a model adapters, or freezes a part of it, and returns what is called then"""


def llama(job: Job, dtype: torch.dtype) -> nn.Module:
    """The same fp32 draw for everyone, then the dtype."""
    from transformers import AutoModelForCausalLM

    config = llama_config(SHAPES[job.shape], job.seq)
    torch.manual_seed(0)
    # In plain segments the weights in 16 bits lie in pieces of what the fp32 ones left: of 8b, 3.2 GiB stay reserved.
    with growing_segments(torch.device(job.device)):
        with torch.device(job.device):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        model = model.to(dtype).train()
        release_cached(torch.device(job.device), 0)
    return model


def token_batches(job: Job, ranks: Ranks = ALONE) -> list[dict[str, Tensor]]:
    """The same eight for everyone; each rank begins at another one."""
    g = torch.Generator().manual_seed(1)
    ids = [torch.randint(SHAPES[job.shape].vocab, (job.micro, job.seq), generator=g).to(job.device) for _ in range(BATCHES)]
    first = ranks.rank * BATCHES // ranks.world
    return [{"input_ids": i, "labels": i} for i in ids[first:] + ids[:first]]


def as_it_is(model: nn.Module) -> nn.Module:
    return model


FEW_TOKENS = 4096  # a micro-batch so small that its launches bound it: weight gradients go on a second stream


def ours(
    job: Job,
    precision: str = "bf16",
    attach: Attach = as_it_is,
    more: dict[str, Tensor] | None = None,
    batches: list[dict[str, Tensor]] | None = None,
    ranks: Ranks = ALONE,
    optimizer: type[AdamW] = AdamW,
    **given: Any,
) -> Contender:
    """Our step on a placed model, of which `attach` says what trains. `more`: what each batch has beside tokens. `batches`:
    others than everyone's.

    `given`: options of TrainStep, before those that follow from the job.
    """
    model = llama(job, torch.bfloat16 if job.device != "cpu" else torch.float32)
    batches = [batch | (more or {}) for batch in batches or token_batches(job, ranks)]
    steps: list[TrainStep] = []

    memory = MemoryPhases(torch.device(job.device))

    def start() -> Step:
        if ranks.alone:  # as `gpubound train` does
            grow_segments(memory.device)
        with memory("place"):
            place(model, job.device)
        trained = attach(model)
        config = optimizer(lr=job.lr, decays=lambda name, parameter: True)  # as the peers' optimizers do
        options = {
            "accumulate": job.accumulate,
            "clip": CLIP,
            "precision": precision,
            "recompute": job.recompute,
            "overlap": job.micro * job.seq < FEW_TOKENS,
            "ranks": ranks,
        }
        with memory("make step"):
            step = TrainStep(trained, "causal_lm", config, **options | given)
        steps.append(step)
        window = [batches[i % BATCHES] for i in range(job.accumulate)]
        return lambda: step(window).loss

    return Contender(start, sum(p.numel() for p in model.parameters()), lambda: bool(steps[0].captured), memory)


def hugging_face(job: Job, autocast: bool = False, compiled: str = "") -> Contender:
    """Pure bf16, or fp32 weights under autocast. `compiled`: torch.compile's mode."""
    return usual(job, llama(job, torch.float32 if autocast else torch.bfloat16), autocast, compiled)


def usual(job: Job, model: nn.Module, autocast: bool = False, compiled: str = "") -> Contender:
    """The usual loop: batches resident, nothing read back, fused AdamW over what is not frozen."""
    batches, trained = token_batches(job), [p for p in model.parameters() if p.requires_grad]

    def start() -> Step:
        if compiled:
            model.compile(mode=compiled)
        optimizer = torch.optim.AdamW(trained, lr=job.lr, fused=True)

        def step() -> Tensor:
            for i in range(job.accumulate):
                with torch.autocast(job.device, torch.bfloat16) if autocast else nullcontext():
                    loss = model(**batches[i % BATCHES]).loss
                (loss / job.accumulate).backward()
            nn.utils.clip_grad_norm_(trained, CLIP)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach().clone() if compiled else loss.detach()  # torch's graphs write the next step's into this one

        return step

    return Contender(start, sum(p.numel() for p in model.parameters()))


def use_liger(implementation: str = "") -> None:
    if implementation:  # read when Liger is imported, which fails where it cannot be used
        os.environ["LIGER_KERNEL_IMPL"] = implementation
    from liger_kernel.transformers import apply_liger_kernel_to_llama, functional

    if implementation == "cutedsl" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (10, 0):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        # its fused linear cross-entropy in CuTe DSL is for Blackwell alone; norms, rotary and the gated MLP run on Hopper
        functional.LigerFusedLinearCrossEntropyFunction = LigerFusedLinearCrossEntropyFunction
    apply_liger_kernel_to_llama()


def liger(job: Job, autocast: bool = False, implementation: str = "") -> Contender:
    use_liger(implementation)
    return hugging_face(job, autocast)


def frames(job: Job) -> tuple[nn.Module, list[dict[str, Tensor]], Callable[[nn.Module, dict[str, Tensor]], Tensor]]:
    """A small, launch-bound transformer on eight input frames, its ten batches on the host, and its squared errors."""
    torch.manual_seed(0)
    width, seq, batch = 256, 200, 4
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(32, width), encoder, nn.Linear(width, 5)).to(job.device)
    g = torch.Generator().manual_seed(1)
    host = [
        {f"frame{j}": torch.randn(batch, seq, 32, generator=g) for j in range(8)}
        | {"y": torch.randn(batch, seq, 5, generator=g)}
        for _ in range(10)
    ]

    def errors(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return (model(sum(b[f"frame{j}"] for j in range(8))) - b["y"]).square()

    return model, host, errors


def frames_ours(job: Job, precision: str = "bf16") -> Contender:
    """The same loop moved to feed and TrainStep: as that comes, in bf16 with fp32 masters and errors, or in fp32 as theirs."""
    model, host, errors = frames(job)
    steps: list[TrainStep] = []

    def squares(model: nn.Module, b: dict[str, Tensor]) -> tuple[Tensor, int]:
        return errors(model, b).sum(), b["y"].numel()

    def start() -> Step:
        config = AdamW(lr=job.lr, decays=lambda name, parameter: True)
        step, source = TrainStep(model, squares, config, clip=CLIP, precision=precision), feed(host, job.device)
        steps.append(step)
        return lambda: step(source).loss

    return Contender(start, sum(p.numel() for p in model.parameters()), lambda: bool(steps[0].captured))


def frames_usual(job: Job) -> Contender:
    """gogo2's loop: clone, pageable upload, foreach AdamW, and the loss read every step."""
    model, host, errors = frames(job)

    def start() -> Step:
        optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr)
        drawn = iter(range(10**9))

        def step() -> Tensor:
            b = {k: v.detach().clone().to(job.device) for k, v in host[next(drawn) % 10].items()}
            loss = errors(model, b).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            loss.item()
            return loss.detach()

        return step

    return Contender(start, sum(p.numel() for p in model.parameters()))


CONTENDERS: dict[str, Callable[[Job], Contender]] = {
    "ours": ours,
    "ours-bf16": ours,
    "ours-fp8": lambda job: ours(job, "fp8"),
    "ours-8bit": lambda job: ours(job, optimizer=AdamW8bit),  # of the moments
    "ours-fp8-8bit": lambda job: ours(job, "fp8", optimizer=AdamW8bit),
    "hf": hugging_face,
    "liger": liger,
    "liger-autocast": lambda job: liger(job, autocast=True),
    "liger-cutedsl": lambda job: liger(job, implementation="cutedsl"),
    "liger-cutile": lambda job: liger(job, implementation="cutile"),
    "compile": lambda job: hugging_face(job, compiled="default"),
    "compile-max": lambda job: hugging_face(job, compiled="max-autotune"),  # with CUDA graphs
    "frames-ours": frames_ours,
    "frames-ours-fp32": lambda job: frames_ours(job, "fp32"),
    "frames-usual": frames_usual,
}


if __name__ == "__main__":
    serve(CONTENDERS)
