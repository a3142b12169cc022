"""A loop whose batches are on the device before it asks for them: first ten cached batches, then tokens cut from a corpus.

python examples/feed_a_loop.py        (a few seconds on a CPU)
"""

import tempfile

import torch
from torch.nn import functional

from gpubound.data import Corpus, feed, python_stdlib_texts, train_tokenizer


def cached_batches() -> None:
    """Replaces `for batch in batches: batch = {k: v.clone().to(device) for ...}`: one line, and no copy in the step."""
    batches = [{"x": torch.randn(16, 32), "y": torch.randn(16, 1)} for _ in range(10)]
    served = feed(batches, shuffle=True)
    model = torch.nn.Linear(32, 1).to(served.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        for batch in served:
            loss = functional.mse_loss(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"cached batches: loss {loss.item():.3f}; {served.stats()}")


def corpus(folder: str) -> None:
    """Tokenise text once; then every batch is cut on the device, and a saved position is an epoch and a step."""
    texts = list(python_stdlib_texts(1_000_000))
    tokens = Corpus.build(texts, train_tokenizer(texts, vocab_size=512), folder, progress=False)
    served = tokens.batches(seq=64, micro_batch=8)
    model = torch.nn.Sequential(torch.nn.Embedding(512, 64), torch.nn.Linear(64, 512)).to(served.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        batch = served.take()
        loss = functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    position = served.state_dict()
    print(f"{tokens}: loss {loss.item():.3f} at epoch {position['epoch']}, batch {position['batch']}; {served.stats()}")


if __name__ == "__main__":
    cached_batches()
    with tempfile.TemporaryDirectory() as folder:
        corpus(folder)
