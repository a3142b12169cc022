"""The loop of train_step.py on any number of GPUs: each process takes its share of every step, and all make the same update.

python examples/train_on_many.py                                    one process
torchrun --nproc-per-node 2 examples/train_on_many.py               one for each GPU; on a machine without GPUs, on the CPU
"""

from pathlib import Path

import torch

import gpubound as gb

SEQ, ROWS, STEPS, ACCUMULATE = 64, 4, 60, 4


def main() -> None:
    with gb.distributed.join("cuda" if torch.cuda.is_available() else "cpu") as ranks:
        torch.manual_seed(0)
        model = gb.Decoder(gb.DecoderConfig(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, vocabulary=256))
        gb.place(model, device=ranks.device)
        windows = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, SEQ, 1)
        order = torch.randint(len(windows), (STEPS * ACCUMULATE, ROWS))
        rows = order[
            ranks.rank :: ranks.world
        ]  # one order of micro-batches, dealt out: a step's rows do not depend on the ranks
        step = gb.TrainStep(
            model.train(),
            "causal_lm",
            gb.AdamW(lr=5e-3),
            accumulate=ranks.share(ACCUMULATE),  # of a step's micro-batches over all ranks, those of this one
            clip=1.0,
            precision="bf16" if ranks.device.type == "cuda" else "fp32",
            ranks=ranks,
        )
        data = gb.feed([{"input_ids": windows[some], "labels": windows[some]} for some in rows], ranks.device)
        for _ in range(STEPS):
            result = step(data)
        values = result.read()  # of all ranks, and the same on each
        if ranks.first:
            print(f"step {values.updates}  loss {values.loss:.4f}  tokens {values.tokens:.0f} a step, {ranks.world} ranks")


if __name__ == "__main__":
    main()
