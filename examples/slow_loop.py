"""A training loop as many are written: the GPU waits for Python in several of its lines. The doctor names and prices them.

gpubound doctor examples/slow_loop.py, or without a GPU: gpubound doctor --dry-run examples/slow_loop.py 32 2
"""

import re
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, ROWS = map(int, sys.argv[1:] or (512, 16))  # a small model, and few texts a step
TEXTS = [path.read_text(errors="replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]


class Words(Dataset):
    """The modules of Python's own library, cut into words when one is asked for."""

    def __len__(self):
        return len(TEXTS) * 20

    def __getitem__(self, item):
        words = re.findall(r"\w+|\S", TEXTS[item // 20])[item % 20 * 50 :][:512]
        tokens = torch.tensor([sum(word.encode()) % 8192 for word in words], dtype=torch.long)
        return nn.functional.pad(tokens, (0, 512 - len(words))), item // 20


if __name__ == "__main__":
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    layer = nn.TransformerEncoderLayer(WIDTH, WIDTH // 32, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(8192, WIDTH), encoder, nn.Linear(WIDTH, len(TEXTS))).to(device)  # which module is it?
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    total = hits = 0.0
    for step, (tokens, module) in enumerate(DataLoader(Words(), batch_size=ROWS, shuffle=True)):
        tokens, module = tokens.to(device), module.to(device)
        optimizer.zero_grad()
        scores = model(tokens).mean(1)
        loss = nn.functional.cross_entropy(scores, module)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        hits += (scores.argmax(1) == module).float().mean().item()
        if step % 20 == 19:
            print(f"step {step}  loss {total / (step + 1):.3f}  right {hits / (step + 1):.0%}  gradient {norm:.2f}")
