"""One contender of the training benchmark in a process of its own: Liger patches classes, and peaks of memory must not mix.

It builds its step, runs it once, says how that went, and then obeys lines on stdin: {"steps": 5} times five steps,
{"profile": 1} lists the kernels of one, {"busy": 50} tells how busy fifty keep the GPU. Every answer is one line on stdout
that begins with MARK.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpubound.feed import feed
from gpubound.place import place
from gpubound.train import AdamW, TrainStep

from .harness import host_syncs
from .shapes import SHAPES, llama_config

MARK = "@@ "
LR, CLIP, BATCHES = 1e-4, 1.0, 8

Step = Callable[[], Tensor]
"""one optimizer step; gives the (last) loss, on the device"""


@dataclass(frozen=True)
class Job:
    """Who runs what. The data and the initial weights depend on nothing else, so that first losses can be compared."""

    who: str
    shape: str
    seq: int
    micro: int
    accumulate: int
    device: str
    recompute: str = "cheap"


@dataclass
class Contender:
    """A model on its device, and how to make its step ready: what `start` does is on the clock of the first step."""

    start: Callable[[], Step]
    parameters: int
    graph_captured: Callable[[], bool] = lambda: False


def llama(job: Job, dtype: torch.dtype) -> nn.Module:
    """The same fp32 draw for everyone, then the dtype."""
    from transformers import AutoModelForCausalLM

    config = llama_config(SHAPES[job.shape], job.seq)
    torch.manual_seed(0)
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model.to(dtype).train()


def token_batches(job: Job) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    ids = [torch.randint(SHAPES[job.shape].vocab, (job.micro, job.seq), generator=g).to(job.device) for _ in range(BATCHES)]
    return [{"input_ids": i, "labels": i} for i in ids]


FEW_TOKENS = 4096  # a micro-batch so small that its launches bound it: weight gradients go on a second stream


def ours(job: Job, precision: str = "bf16") -> Contender:
    model, batches = llama(job, torch.bfloat16 if job.device != "cpu" else torch.float32), token_batches(job)
    steps: list[TrainStep] = []

    def start() -> Step:
        place(model, job.device)
        config = AdamW(lr=LR, decays=lambda name, parameter: True)  # as the peers' optimizers do
        options = {
            "accumulate": job.accumulate,
            "clip": CLIP,
            "precision": precision,
            "recompute": job.recompute,
            "overlap": job.micro * job.seq < FEW_TOKENS,
        }
        step = TrainStep(model, "causal_lm", config, **options)
        steps.append(step)
        window = [batches[i % BATCHES] for i in range(job.accumulate)]
        return lambda: step(window).loss

    return Contender(start, sum(p.numel() for p in model.parameters()), lambda: bool(steps[0].captured))


def hugging_face(job: Job, autocast: bool = False, compiled: bool = False) -> Contender:
    """The usual loop: batches resident, nothing read back, fused AdamW. Pure bf16, or fp32 weights under autocast."""
    model, batches = llama(job, torch.float32 if autocast else torch.bfloat16), token_batches(job)

    def start() -> Step:
        if compiled:
            model.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

        def step() -> Tensor:
            for i in range(job.accumulate):
                with torch.autocast(job.device, torch.bfloat16) if autocast else nullcontext():
                    loss = model(**batches[i % BATCHES]).loss
                (loss / job.accumulate).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return Contender(start, sum(p.numel() for p in model.parameters()))


def liger(job: Job, autocast: bool = False) -> Contender:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
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
        config = AdamW(lr=LR, decays=lambda name, parameter: True)
        step, source = TrainStep(model, squares, config, clip=CLIP, precision=precision), feed(host, job.device)
        steps.append(step)
        return lambda: step(source).loss

    return Contender(start, sum(p.numel() for p in model.parameters()), lambda: bool(steps[0].captured))


def frames_usual(job: Job) -> Contender:
    """gogo2's loop: clone, pageable upload, foreach AdamW, and the loss read every step."""
    model, host, errors = frames(job)

    def start() -> Step:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
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
    "hf": hugging_face,
    "liger": liger,
    "liger-autocast": lambda job: liger(job, autocast=True),
    "compile": lambda job: hugging_face(job, compiled=True),
    "frames-ours": frames_ours,
    "frames-ours-fp32": lambda job: frames_ours(job, "fp32"),
    "frames-usual": frames_usual,
}


def settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def introduce(job: Job, contender: Contender) -> tuple[Step, dict[str, Any]]:
    """The step, ready, and what is known of it: seconds to the first one done, its loss, peak memory, host syncs."""
    torch.ones(256, 256, device=job.device) @ torch.ones(256, 256, device=job.device)  # the context is nobody's first step
    settle(job.device)
    began = time.perf_counter()
    step = contender.start()
    loss = step()
    settle(job.device)
    facts: dict[str, Any] = {"first_step_s": time.perf_counter() - began, "loss": loss.item()}
    facts |= {"parameters": contender.parameters, "captured": contender.graph_captured()}
    step()
    settle(job.device)
    if job.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        facts["syncs"] = host_syncs(step)
        settle(job.device)
        # What the process holds of the GPU. A graph's own memory is reserved, not allocated: so all are counted by it.
        facts["peak_gib"] = torch.cuda.memory_reserved() / 2**30
    return step, facts


def seconds_a_step(step: Step, steps: int, device: str) -> float:
    settle(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    settle(device)
    return (time.perf_counter() - began) / steps


def busy_percent(step: Step, steps: int) -> float:
    """How much of the time the device was inside a step, by events around each. For captured steps: in others it may idle."""
    step()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
    for begin, end in marks:
        begin.record()
        step()
        end.record()
    settle("cuda")
    return 100 * sum(begin.elapsed_time(end) for begin, end in marks) / marks[0][0].elapsed_time(marks[-1][1])


def kernels_of(step: Step, device: str) -> list[tuple[str, float, int]]:
    """(name, milliseconds, launches) of one step, longest first."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU if device == "cpu" else activity.CUDA]) as profile:
        step()
        settle(device)
    rows = [
        (e.key, (e.self_cpu_time_total if device == "cpu" else e.self_device_time_total) / 1e3, e.count)
        for e in profile.key_averages()
    ]
    return sorted(rows, key=lambda row: -row[1])


def answer(what: Any) -> None:
    print(MARK + json.dumps(what), flush=True)


def main(job: Job) -> None:
    step, facts = introduce(job, CONTENDERS[job.who](job))
    answer(facts)
    for line in sys.stdin:
        wish = json.loads(line)
        if "profile" in wish:
            answer(kernels_of(step, job.device))
        else:
            answer(busy_percent(step, wish["busy"]) if "busy" in wish else seconds_a_step(step, wish["steps"], job.device))


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
