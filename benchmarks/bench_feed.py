"""What feeding costs: a blocking loop with cached batches moved to gb.feed alone, a loader through the ring, a token batch.

The loop: ten cached batches on the host, cloned and copied leaf by leaf, pageable, one blocking `.item()` a step. Its model has
3.2 million parameters: launches are most of a step at batch 4, products at 256. With a small
model there is little beside the copies.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gpubound import measure
from gpubound.cli import arguments, guarded
from gpubound.data import Corpus, feed
from gpubound.data.shards import write_shard
from gpubound.device import resolve
from gpubound.graph import capture

from . import results
from .harness import Bench, release

FRAMES, CACHED = 8, 10
WIDE = 256  # rows of the batch whose copies are most of a usual step
RESIDENT = 0.97  # of the speed of a loop whose batches are on the device already: the most that a feed can reach
ALONE = 1.5  # times the usual loop, where copies are most of its step
Loop = Callable[[], Tensor]
Build = Callable[[Bench], nn.Module]


@dataclass(frozen=True)
class Feed:
    """Measure what feeding costs beside a usual loop, a pinned DataLoader and batches cut on the host.

    Example: gpubound bench feed --batches 4,256
    """

    batches: str = "4,64,256"
    """Rows of a cached batch, by comma."""
    tokens: int = 100_000_000
    """Size of the corpus that token batches are cut from."""
    results: Path = results.FOLDER
    """Folder that the lines are kept in."""
    dry: bool = False
    """Tiny sizes on the CPU: shows that the script works, keeps nothing."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Feed, argv, "bench feed")
    device = resolve("cpu" if options.dry else "require")
    bench = Bench.of(options, "feed", device, argv)
    for word in ("2" if options.dry else options.batches).split(","):
        cached_batches(bench, int(word), build, "")
        release(device)
    cached_batches(bench, 2 if options.dry else WIDE, small, ", a small model", {"usual": ALONE})
    release(device)
    streamed_batches(bench, 2 if options.dry else 64)
    release(device)
    token_batches(bench, 20_000 if options.dry else options.tokens, *((64, 2) if options.dry else (1024, 16)))
    return bench.finish()


def build(bench: Bench) -> nn.Module:
    width, layers = (32, 1) if bench.dry else (256, 4)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(32, width), encoder, nn.Linear(width, 5)).to(bench.device)


def small(bench: Bench) -> nn.Module:
    """A step of it is soon done, so that the time of a usual loop is its copies."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5)).to(bench.device)


def host_batches(bench: Bench, rows: int) -> list[dict[str, Tensor]]:
    seq = 8 if bench.dry else 200
    draw = torch.Generator().manual_seed(1)
    shapes = {f"frame{j}": (rows, seq, 32) for j in range(FRAMES)} | {"y": (rows, seq, 5)}
    return [{k: torch.randn(*shape, generator=draw) for k, shape in shapes.items()} for _ in range(CACHED)]


def loop_over(bench: Bench, epoch: Callable[[], Iterable[dict[str, Tensor]]], build: Build = build) -> Loop:
    """The user's loop over one epoch; it returns the losses."""
    model = build(bench)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run() -> Tensor:
        losses = []
        for batch in epoch():
            loss = nn.functional.mse_loss(model(sum(batch[f"frame{j}"] for j in range(FRAMES))), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses)

    return run


def copied(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {k: v.detach().clone().to(device) for k, v in batch.items()}


def cached_batches(bench: Bench, rows: int, build: Build, note: str, gates: dict[str, float] | None = None) -> None:
    """Ten batches in host memory, used again every epoch. "on the device": no feeding at all, the most that a feed can gain."""
    host = host_batches(bench, rows)
    served, there = feed(host, bench.device), [{k: v.to(bench.device) for k, v in batch.items()} for batch in host]
    works = {
        "ours": loop_over(bench, lambda: served, build),
        "usual": loop_over(bench, lambda: (copied(batch, bench.device) for batch in host), build),
        "on the device": loop_over(bench, lambda: there, build),
    }
    compared(bench, f"ten cached batches of {rows}{note}, one epoch", works, {"on the device": RESIDENT} | (gates or {}))
    print(f"    {served.stats()}")


def streamed_batches(bench: Bench, rows: int) -> None:
    """Batches that come from a DataLoader every epoch: the ring beside the loader's own pinned memory."""
    host = host_batches(bench, rows)
    plain = DataLoader(host, batch_size=None)  # type: ignore[arg-type]
    pinned = DataLoader(host, batch_size=None, pin_memory=bench.device.type == "cuda")  # type: ignore[arg-type]
    served = feed(plain, bench.device, mode="ring")
    works = {
        "ours": loop_over(bench, lambda: served),
        "usual": loop_over(bench, lambda: (copied(batch, bench.device) for batch in plain)),
        "pin_memory, non_blocking": loop_over(
            bench, lambda: ({k: v.to(bench.device, non_blocking=True) for k, v in batch.items()} for batch in pinned)
        ),
    }
    compared(bench, f"a loader of {CACHED} batches of {rows}, one epoch", works)
    print(f"    {served.stats()}")


def compared(bench: Bench, case: str, works: dict[str, Loop], gates: dict[str, float] | None = None) -> None:
    """Time the loops in turn, once their first epochs from equal weights gave equal losses."""
    ours, *others = [run() for run in works.values()]
    if wrong := [name for name, losses in zip(list(works)[1:], others) if not torch.allclose(losses, ours, rtol=1e-3)]:
        bench.wrong.append(f"{case}: the losses of {wrong[0]} are not ours; not timed")
        return
    found = measure.compare(works, rounds=bench.rounds, warmup=2, device=bench.device)
    bench.keep(case, found, unit="ms", amount=1, gates=gates)


def token_batches(bench: Bench, tokens: int, seq: int, micro_batch: int) -> None:
    """One batch of tokens: cut on the device, the same in a graph, or cut on the host as small trainers do."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard-00000.gbt"
        ids = np.random.default_rng(0).integers(0, 32_768, tokens).astype(np.uint16)
        ends = np.arange(0, tokens + 1, 500)
        write_shard(path, ids[: ends[-1]], ends, None, vocab_size=32_768, tokenizer="random", texts_read=0, texts_crc=0)
        corpus = Corpus.open(path, verify=False)
        for pack in ("stream", "documents"):
            served, fetched = (corpus.batches(seq, micro_batch, bench.device, pack=pack) for _ in range(2))
            works = {
                "ours": served.take,
                "ours, replayed": capture(fetched.fetch),
                "cut on the host, pinned": lambda: cut_on_the_host(ids, seq, micro_batch, bench.device),
            }
            found = measure.compare(works, rounds=bench.rounds, warmup=3, device=bench.device)
            bench.keep(f"a batch of {micro_batch} x {seq} tokens, {pack}", found, unit="us", amount=1)


def cut_on_the_host(ids: np.ndarray, seq: int, micro_batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random windows of a memory map, without documents: the least that a loader on the host can do."""
    starts = np.random.randint(0, len(ids) - seq - 1, micro_batch)
    x, y = (torch.stack([torch.from_numpy(ids[s + off : s + off + seq].astype(np.int64)) for s in starts]) for off in (0, 1))
    if device.type != "cuda":
        return x, y
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


if __name__ == "__main__":
    sys.exit(guarded("bench feed", main, sys.argv[1:]))
