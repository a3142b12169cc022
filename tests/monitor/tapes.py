"""Tapes for tests, and for looking at the page: `python -m tests.monitor.tapes FOLDER` writes some runs and their reports."""

import math
import random
import sys
from pathlib import Path
from typing import Any

from gpubound.monitor import RunTape, write_report

OWN = "gpubound's own, tested against the reference"
ROWS = [
    ("module", "device", "dtype", "kernel", "fallbacks", "why"),
    ("model.embed_tokens", "cuda:0", "bfloat16", "torch", "0", "as it was"),
    ("model.layers.*.self_attn (24)", "cuda:0", "bfloat16", "q, k, v as one product; triton rope_qkv; SDPA", "0", OWN),
    ("model.layers.*.mlp (24)", "cuda:0", "bfloat16", "gate and up as one product; triton swiglu", "0", OWN),
    ("model.layers.*.post_attention_layernorm (24)", "cuda:0", "bfloat16", "triton rms_norm, add_rms_norm", "0", OWN),
    ("lm_head", "cuda:0", "bfloat16", "loss without whole logits: triton linear_cross_entropy", "0", OWN),
]
SUMMARY = "GPU ready: NVIDIA H200 (cuda:0). Whole model, forward and backward: output off by 3.1e-03 (allowed 1.0e-02)."
WIDTHS = [max(map(len, column)) for column in zip(*ROWS)]
PLACEMENT = "\n".join(
    [*("  ".join(c.ljust(w) for c, w in zip(row, WIDTHS)).rstrip() for row in ROWS), SUMMARY]
)  # as place prints it
CONFIG: dict[str, Any] = {
    "model": "350m", "data": ["books/", "chats/"], "tokenizer": None, "seq": 1024, "micro_batch": 16, "lr": 3e-4,
    "phases": [{"name": "books", "data": ["books/"], "steps": 400}, {"name": "chats", "data": ["chats/"], "steps": 200}],
}  # fmt: skip
MACHINE = {"device": "NVIDIA H200 (cuda:0)", "gpubound": "0.2.0", "torch": "2.11.0+cu130", "python": "3.12.3"}


def a_run(path, name="first", steps=30, slope=1.0):
    """A run whose loss falls evenly."""
    tape = RunTape.create(path, name=name, verdict="ran on the CPU")
    for step in range(1, steps + 1):
        tape.append({"step": step, "loss": 5.0 - slope * step / steps, "tokens_per_s": 1000.0 + step, "mfu": None})
    return tape


def gpu_run(folder: Path, name: str = "first", steps: int = 600, seed: int = 0, lowest: float = 2.4) -> RunTape:
    """A run on a GPU in two phases that went well."""
    draw = random.Random(seed)
    tape = RunTape.create(
        folder, name=name, config=CONFIG, changed=["data", "seq", "phases"], machine=MACHINE, placement=PLACEMENT, fallbacks=[],
        finished=True,
        verdict=f"{steps} steps on NVIDIA H200 (cuda:0), loss 10.812 to {lowest:.3f}, 184k tokens/s, no fallback.",
        sample="def main(argv):\n    if len(argv) < 2 and argv[0] <> '<unknown>':\n        return 0",
        mfu="MFU = tokens/s · (6 · 398M parameters in products + 6 · 24 layers · 1024 wide · 1024 tokens) "
        "/ 790TFLOP/s (bf16, measured on this machine)",
    )  # fmt: skip
    for step in range(1, steps + 1):
        phase = "books" if step <= steps * 2 // 3 else "chats"
        loss = lowest + (10.8 - lowest) * math.exp(-step / 90) + draw.gauss(0, 0.05) + (0.3 if phase == "chats" else 0)
        record = {"step": step, "phase": phase, "loss": loss, "grad_norm": 0.4 + 3 / step + abs(draw.gauss(0, 0.05))}
        record |= {"lr": 3e-4 * min(1, step / 30) * (1 - step / steps), "tokens": 16_384, "skipped": 0}
        if step > 1:
            seconds = 0.0888 + abs(draw.gauss(0, 0.0004))
            record |= {"seconds": seconds, "tokens_per_s": 16_384 / seconds, "mfu": 0.46 * 0.0888 / seconds}
            record |= {"gpu_busy": 0.995, "host_lead_ms": 81 + draw.gauss(0, 2)}
        if step in (6, 506):
            record |= {"syncs": 0, "h2d_bytes": 0}
        if step % 11 == 0:
            record |= {"power_w": 640 + draw.gauss(0, 8), "sm_active": 0.97, "memory_bytes": 2.37e10}
            record |= {"memory_allocated_bytes": 1.1e10, "memory_reserved_bytes": 2.5e10}
        if step % 100 == 0:
            record |= {"held_out": loss + 0.08}
        tape.append(record)
    return tape


def ranks_run(folder: Path, world: int = 8, steps: int = 300) -> RunTape:
    """A run on several GPUs, of which rank 5 is slow for a while."""
    draw = random.Random(world)
    tape = RunTape.create(
        folder, name=f"{world} ranks", config={"gpus": world}, machine=MACHINE, verdict="300 steps.", finished=True
    )
    for step in range(1, steps + 1):
        waited = [4 + abs(draw.gauss(0, 0.5)) + (9 if 100 < step < 180 and rank != 5 else 0) for rank in range(world)]
        record = {"step": step, "loss": 9 - step / 99, "tokens": 512, "tokens_per_s": 9e5, "seconds": 0.1, "waited_ms": waited}
        record |= {"slowest_rank": waited.index(min(waited)), "held_up_ms": max(waited) - min(waited)}
        tape.append(record | {"sums_share": min(waited) / 100})
    return tape


def cpu_run(folder: Path, steps: int = 12) -> RunTape:
    """A few steps on a CPU, with a fallback."""
    tape = RunTape.create(
        folder, name="laptop", config={"model": "1m", "data": ["stdlib"], "steps": steps}, finished=True,
        machine=MACHINE | {"device": "CPU (2 threads)"}, verdict=f"{steps} steps on CPU (2 threads), 3 fallbacks.",
        fallbacks=[{"what": "rms_norm", "why": "its self-test failed: off by 0.2 where 0.01 is allowed", "times": 3}],
    )  # fmt: skip
    for step in range(1, steps + 1):
        tape.append({"step": step, "loss": 7 - step / 9, "tokens": 512, "tokens_per_s": 9_900.0 + step, "memory_bytes": 5e8})
    return tape


def diverged_run(folder: Path, steps: int = 40) -> RunTape:
    """A run whose loss was not finite from step 13 on: those steps were skipped."""
    tape = RunTape.create(folder, name="too hot", config={"lr": 9.0}, machine=MACHINE, verdict="40 steps.", finished=True)
    for step in range(1, steps + 1):
        loss = 9 + step * step / 30 if step < 13 else math.nan
        norm = 10.0**step if step < 13 else math.inf
        tape.append({"step": step, "loss": loss, "grad_norm": norm, "tokens": 512, "lr": 9.0, "skipped": max(0, step - 12)})
    return tape


if __name__ == "__main__":
    out = Path(sys.argv[1])
    one, other = gpu_run(out / "first"), gpu_run(out / "second", "second", seed=1, lowest=2.1)
    for made in (
        one,
        cpu_run(out / "laptop"),
        diverged_run(out / "hot"),
        ranks_run(out / "ranks"),
        ranks_run(out / "many", 100),
    ):
        print(write_report([made]))
    print(write_report([one, other], out / "both.html"))
