"""A Hugging Face Trainer script with one line added, gb.place(model), beside the same script without it.

Each contestant is a process of its own that runs trainer.train() once. A callback stops it between two steps until the parent
says go, so that the contestants take turns in random order and meet the same clocks and temperature.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.device import resolve
from gpubound.errors import MeasureError

from . import results
from .bench_place import Setting, Worker, in_turn, tell
from .harness import Bench, chosen, importable
from .shapes import SHAPES, llama_config

PEERS = ("trainer", "liger")


WORK = "Trainer bf16 autocast"
SETTINGS = {
    "350m": Setting("350m", 1024, 16, 1.6, WORK),
    "1b": Setting("1b", 1024, 8, 1.6, WORK),
    "135m": Setting("135m", 1024, 16, 1.3, WORK),
    "tiny": Setting("tiny", 16, 2, 1.0, WORK),
}
WARM, STEPS = 5, 5  # steps before the first round, and in each


@dataclass(frozen=True)
class Trainer:
    """Measure a Hugging Face Trainer script with gb.place(model) added, beside the same script without it.

    Example: gpubound bench trainer --shapes 350m --peers trainer,liger
    """

    shapes: str = "350m,1b"
    """Shapes, by comma: 350m, 135m (seq 1024, micro 16), 1b (micro 8)."""
    peers: str = "trainer"
    """Peers, by comma: trainer (as it is), liger (TrainingArguments(use_liger_kernel=True))."""
    rounds: int = 10
    """Rounds of five steps for each contestant."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """A tiny model on the CPU: shows that the script works, keeps nothing."""
    worker: str = ""
    """Used by the benchmark itself: run as this contestant."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Trainer, argv, "bench trainer")
    settings = [SETTINGS[name] for name in (["tiny"] if options.dry else chosen("--shapes", options.shapes, list(SETTINGS)))]
    peers = ["trainer"] if options.dry else chosen("--peers", options.peers, PEERS)
    if missing := [package for package in ("transformers", "accelerate") if not importable(package)]:
        raise MeasureError(f"bench trainer needs {missing[0]}: pip install 'gpubound[hf]' accelerate.")
    device = resolve("cpu" if options.dry else "require")
    if options.worker:
        return serve(options.worker, settings[0], device)
    bench = Bench.of(options, "trainer", device, argv)
    for setting in settings:
        contest(bench, setting, ["ours", *peers], 3 if options.dry else options.rounds)
    return bench.finish()


def contest(bench: Bench, setting: Setting, names: Sequence[str], rounds: int) -> None:
    """Start every contestant, check that they begin with the same loss and gradient, then let them train in turn."""
    workers = {name: Worker(name, setting.shape, bench.dry, "benchmarks.bench_trainer") for name in names}
    _, seconds = in_turn(bench, setting.case, workers, rounds)
    if len(seconds) < 2:
        return
    found = measure.compare_samples(seconds, clock="perf_counter")
    gates = {"trainer": setting.gate}
    bench.keep(setting.case, found, unit="tok/s", amount=setting.seq * setting.micro, gates=gates)


def serve(name: str, setting: Setting, device: torch.device) -> int:
    """A contestant's life: build, say the first loss and gradient norm, then train, a round for every line on stdin."""
    from transformers import LlamaForCausalLM, Trainer as HFTrainer, TrainerCallback, TrainingArguments

    on_gpu = device.type == "cuda"
    shape = SHAPES[setting.shape]
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(shape, setting.seq)).to(device)
    ids = torch.randint(shape.vocab, (256, setting.seq))
    if name == "ours":
        import gpubound as gb

        print(gb.place(model, device), file=sys.stderr)  # the one line
    tell(first_step(model, ids[: setting.micro].to(device), on_gpu))

    class Turns(TrainerCallback):
        """Waits for the parent's word before each round, and answers with the seconds of one of its steps."""

        begin = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= WARM and (state.global_step - WARM) % STEPS == 0:
                control.should_training_stop = not sys.stdin.readline()
                self.begin = now(device)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            done = state.global_step - WARM
            if done > 0 and done % STEPS == 0 and not control.should_training_stop:
                tell({"seconds": (now(device) - self.begin) / STEPS})

    folder = tempfile.TemporaryDirectory()  # Trainer wants one, and writes nothing here
    settings = TrainingArguments(
        output_dir=folder.name,
        per_device_train_batch_size=setting.micro,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        use_liger_kernel=name == "liger",
        max_steps=10**6,  # the parent ends it
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    HFTrainer(model=model, args=settings, train_dataset=rows, callbacks=[Turns()]).train()
    folder.cleanup()
    return 0


def first_step(model: torch.nn.Module, ids: torch.Tensor, autocast: bool) -> dict[str, float]:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return {"loss": loss.item(), "gradient_norm": norm.item()}


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(guarded("bench trainer", main, sys.argv[1:]))
