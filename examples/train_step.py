"""A small decoder learns to write this file: place, feed, TrainStep. It runs anywhere; on a GPU a step runs as CUDA graphs.

python examples/train_step.py
"""

from pathlib import Path

import torch

from gpubound.data import feed
from gpubound.models import Decoder, DecoderConfig
from gpubound.place import place
from gpubound.train import AdamW, Schedule, TrainStep

SEQ, ROWS, STEPS = 64, 8, 150


def main() -> None:
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    starts = torch.randint(len(text) - SEQ, (40, ROWS))
    windows = text.unfold(0, SEQ, 1)
    batches = [{"input_ids": windows[rows], "labels": windows[rows]} for rows in starts]

    model = Decoder(DecoderConfig(hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2, vocabulary=256, tied=True))
    placement = place(model)
    data = feed(batches, placement.device)
    step = TrainStep(
        model.train(),
        "causal_lm",
        AdamW(lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1),
        accumulate=2,  # two micro-batches an update: exact, whatever their fill
        clip=1.0,
        precision="bf16" if placement.device.type == "cuda" else "fp32",
        schedule=Schedule("cosine", steps=STEPS, warmup=0.1),
    )
    previous = None
    for number in range(STEPS):
        result = step(data)
        if previous is not None and number % 30 == 1:  # one step late: the device has the next one to do already
            values = previous.read()
            print(f"step {values.updates:3}  loss {values.loss:.3f}  grad norm {values.grad_norm:.2f}  lr {values.lr:.4f}")
        previous = result
    print(f"step {STEPS:3}  loss {previous.read().loss:.3f}, run as {'graphs' if step.captured else 'single calls'}")


if __name__ == "__main__":
    main()
