"""A rank of a sharded training that saves: as ours does, or as torch.distributed.checkpoint does by itself (async_save).

Lines on stdin are wishes: {"save": "ours"} takes some steps with one save among them. Both save the same tensors, and what they
have written is removed when it is whole, so the disk holds one checkpoint at a time; {"leave": true} leaves it there.
{"steps": 8} takes steps alone.
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from gpubound.distributed import Ranks, join
from gpubound.distributed.fsdp import shard_deferred
from gpubound.models import PRESETS, Decoder
from gpubound.train import AdamW, TrainStep
from gpubound.train.checkpoint import Checkpoints, joined
from gpubound.train.checkpoint.checkpoints import convert_tensors
from gpubound.train.loop import SETTLED
from gpubound.train.offload import blocks_of

from .bench_checkpoint import SavesJob, batches, one_round
from .serving import answer, settle


class Way:
    """`written`: seconds from the call of `save` until the checkpoint was on disk, whatever steps came meanwhile."""

    written = 0.0

    def save(self, number: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        began = time.perf_counter()
        self.begin(number, tensors, facts).add_done_callback(lambda _: setattr(self, "written", time.perf_counter() - began))

    def begin(self, number: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Future:
        raise NotImplementedError

    def expect(self, tensors: dict[str, Tensor]) -> None:
        """What a run does long before its first checkpoint."""

    def wait(self) -> list[Path]:
        """Until it is there; what it has written."""
        raise NotImplementedError


class Ours(Way):
    def __init__(self, folder: Path, ranks: Ranks):
        self.store = Checkpoints(folder, keep=1, ranks=ranks)

    def expect(self, tensors: dict[str, Tensor]) -> None:
        self.store.expect(tensors).result()

    def begin(self, number: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Future:
        return self.store.save(number, tensors, facts)

    def wait(self) -> list[Path]:
        self.store.wait()
        return self.store.paths()


class Theirs(Way):
    """Beside the steps as ours: a thread writes, over a line of its own. The host's copy is made before, in memory kept for it.

    torch 2.13 cannot copy a DTensor whose own part begins within a storage, so it is given others over the same memory.
    """

    def __init__(self, folder: Path, ranks: Ranks, state: dict[str, Tensor]):
        self.state = {name: at_offset_zero(tensor) for name, tensor in state.items()}
        self.folder, self.group = folder, ranks.aside().host
        self._stager = BlockingAsyncStager(cache_staged_state_dict=ranks.device.type == "cuda")  # in pinned memory
        self._writing: tuple[Path, Future] | None = None

    def begin(self, number: int, *_: Any) -> Future:
        path = self.folder / str(number)
        writing = dcp.async_save(self.state, checkpoint_id=path, process_group=self.group, async_stager=self._stager)
        assert isinstance(writing, Future)
        self._writing = path, writing
        return writing

    def wait(self) -> list[Path]:
        assert self._writing is not None
        path, writing = self._writing
        writing.result()
        return [path]


def at_offset_zero(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    own, shape = torch.from_dlpack(tensor.to_local()), tensor.shape
    return DTensor.from_local(own, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=tensor.stride())


@contextmanager
def training(job: SavesJob, ranks: Ranks) -> Iterator[tuple[TrainStep, dict[str, Way]]]:
    """A step of a model in shards, and both ways to save it."""
    torch.manual_seed(0)
    model = shard_deferred(lambda meta: Decoder(PRESETS[job.shape], device=meta), blocks_of, ranks).train()
    options: dict[str, Any] = {"accumulate": job.accumulate, "clip": 1.0, "graph": "off", "ranks": ranks}
    step = TrainStep(model, "next_token", AdamW(lr=job.lr), precision="bf16", **options)
    folder = Path(job.folder)
    yield step, {"ours": Ours(folder / "ours", ranks), "dcp": Theirs(folder / "dcp", ranks, state_of(step))}
    step.close()


def state_of(step: TrainStep) -> dict[str, Tensor]:
    return joined(model=step.model.state_dict(), step=step.state_dict())


def taken(folder: Path, step: TrainStep, ranks: Ranks) -> float:
    """Seconds until this rank has its part of the newest checkpoint of ours, whoever wrote it."""
    began = time.perf_counter()
    newest = Checkpoints(folder / "ours", ranks=ranks).latest()
    assert newest is not None
    tensors = convert_tensors(newest, state_of(step))
    step.load_state_dict({name.removeprefix("step."): t for name, t in tensors.items() if name.startswith("step.")})
    settle(ranks.device.type)
    return time.perf_counter() - began


def steps_alone(step: TrainStep, window: list[dict[str, Tensor]], count: int) -> dict[str, float]:
    results = [step(window) for _ in range(count)]
    return {"loss": results[-1].read().loss}


def main() -> None:
    job = SavesJob(**json.loads(sys.argv[1]))
    with join(job.device) as ranks, training(job, ranks) as (step, ways):
        window = batches(PRESETS[job.shape].vocabulary, job.seq, job.micro, job.accumulate, ranks.device)
        facts = {"read": taken(Path(job.folder), step, ranks)} if job.resume else {}
        if not job.resume:
            steps_alone(step, window, SETTLED)
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            steps_alone(step, window, SETTLED)
            ways["ours"].expect(state_of(step))
        answer(facts | {"bytes": sum(t.nbytes for t in state_of(step).values())})
        for number, line in enumerate(sys.stdin):
            wish = json.loads(line)
            if "steps" in wish:
                answer(steps_alone(step, window, wish["steps"]))
                continue
            way = ways[wish["save"]]
            found = one_round(step, window, way, number)
            for path in way.wait() if ranks.first and "leave" not in wish else ():
                shutil.rmtree(path)
            ranks.wait()
            answer(found | {"written": way.written})


if __name__ == "__main__":
    main()
