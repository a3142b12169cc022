"""Checkpoints: each is complete or absent, and they are written while training continues.

`snapshot` copies the tensors in stream order, so no step waits for the disk (files.py). `write` lets a thread bring the
copies to the host on a side stream and write a temporary folder, which is renamed once all of it is on disk: a run that is
killed at any moment leaves its last complete checkpoint. Opening a checkpoint verifies its checksums.

    <folder>/step-00000120/
        tensors.safetensors    every tensor, by name (files.py); or, where tensors are sharded, files of every rank
                               (distributed/sharded_checkpoint.py)
        state.json             step, facts, size and crc32 of the tensors' files, and the crc32 of all of this

All ranks make every call. The first rank writes replicated tensors; of sharded ones each rank writes its own shards. The folder
is renamed when the files of every rank are on disk. Any number of ranks opens the checkpoint of any other number.

Some state depends on the ranks of a run: the RNG of each, and whether tensors are sharded. Each rank has its own RNG state,
from which dropout and the noise of diffusion are drawn; rank 0 has that of a single process. Initial weights are drawn before,
and are equal on every rank.

An export's folder has a file with the step of its weights, and the number of steps that the run had done. `gpubound generate
RUN` compares it with the checkpoints' steps. File times cannot be compared: those of a copied run differ.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ...distributed import ALONE, Ranks
from ...distributed.local_shard import LocalShard, any_sharded, local_shard_of
from ...distributed.ranks import tell_if_saved_apart
from ...errors import DataError
from ...files import EXPORT as ORIGIN, check_replaceable, make_folder, read_json, sibling, write_atomic, writing
from ...formatting import readable
from ...trace import notice
from . import files
from .files import STATE, Staging

WHERE = "where"  # key of a checkpoint's facts: the folder that relative paths of its recipe start from
NAME = re.compile(r"step-(\d{8,})$")


def _format(sharded: bool) -> Any:
    """Return the module that writes and reads the tensors' files."""
    if not sharded:
        return files
    from ...distributed import sharded_checkpoint  # with torch.distributed.checkpoint, which takes 0.5 s to import

    return sharded_checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk. `facts` are read when it is opened, tensors on request."""

    path: Path
    step: int
    facts: dict[str, Any]
    sharded: bool = False

    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and dtype of every tensor, by name."""
        return _format(self.sharded).shapes(self.path)

    def tensors(
        self,
        device: str | torch.device = "cpu",
        like: Mapping[str, Tensor] | None = None,
        begin: tuple[str, ...] = ("",),
        but: Container[str] = (),
    ) -> dict[str, Tensor]:
        """Return every tensor whose name begins with one of `begin`, except those in `but`.

        A tensor of `like` with the same name and shape is filled in place, a sharded one with this rank's shard. The others are
        new and whole, on `device`.
        """
        result = dict[str, Tensor]()
        for name, (shape, dtype) in self.shapes().items():
            if name.startswith(begin) and name not in but:
                live = (like or {}).get(name)
                if live is None or live.shape != shape:
                    live = torch.empty(shape, dtype=dtype, device=device)
                result[name] = live
        self.read(result)
        return result

    @torch.no_grad()
    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill these tensors in place, sharded ones with this rank's shard. Their shapes must be the checkpoint's."""
        _format(self.sharded).read(self.path, {name: local_shard_of(t) for name, t in into.items()})


class Checkpoints:
    """The checkpoints of one run.

    before_commit  called on the writing thread before a checkpoint becomes visible, for files that it refers to
    """

    def __init__(self, folder: str | Path, keep: int = 3, ranks: Ranks = ALONE):
        if keep < 1:
            raise ValueError(f"Checkpoints: keep must be at least 1, got {keep}; the newest one is what a resumed run needs.")
        self.folder, self.keep = Path(folder), keep
        self.ranks, self._writers, self._staging = ranks, ALONE, Staging()
        self.before_commit: Callable[[], None] = lambda: None
        self._snapshot: tuple[Any, ...] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpubound-checkpoint")
        self._writing: Future | None = None

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        facts: dict[str, Any],
        score: Any = None,
        wait: bool = False,
        to_host: bool = False,
    ) -> Future:
        """Take a snapshot and write it in the background; with `wait`, return once it is on disk.

        to_host  copy straight to the host, as with `wait`: the next step waits for it, and needs no memory of the GPU

        A lower `score`, a number or a list, is better. The result is done when the checkpoint is written; `wait()` raises the
        error of a failed write.
        """
        self.snapshot(step, tensors, facts, score, to_host or wait, last=wait)
        writing = self.write()
        assert writing is not None  # there is a snapshot
        if wait:
            self.wait()
        return writing

    def snapshot(
        self,
        step: int,
        tensors: dict[str, Tensor],
        facts: dict[str, Any],
        score: Any = None,
        to_host: bool = False,
        last: bool = False,
    ) -> None:
        """Copy the tensors as they are now, with `to_host` straight to the host; `write` writes the copies later.

        last  allocate no pinned memory for further ones
        """
        self.write()
        self.wait()  # one snapshot at a time; an earlier write's error is raised here too
        tell_if_saved_apart(self.ranks, self.folder)
        if self._writers.alone:  # every rank is here now, as making a new group requires
            self._writers = self.ranks.aside()
        sharded, shards = self._shards_to_write(tensors)
        copies = self._staging.take({name: shard.local for name, shard in shards.items()}, to_host, last)
        shards = {name: shards[name].moved(copy) for name, copy in copies.items()}
        self._snapshot = step, sharded, shards, dict(facts) | ({} if score is None else {"score": score})

    def write(self) -> Future | None:
        """Write the snapshot, if there is one, in the background."""
        if self._snapshot:
            snapshot, self._snapshot = self._snapshot, None
            self._writing = self._thread.submit(self._write, *snapshot)
            self._thread.submit(self._staging.make_ready)
        return self._writing

    def expect(self, tensors: dict[str, Tensor]) -> Future:
        """Allocate memory for snapshots of these tensors in the background; otherwise the first may delay a step by seconds.

        Memory of the GPU that is free now is assumed not to be needed by steps: call it a few steps after
        torch.cuda.empty_cache().
        """
        _, shards = self._shards_to_write(tensors)
        self._staging.expect({name: shard.local for name, shard in shards.items()})
        return self._thread.submit(self._staging.make_ready)

    def wait(self) -> None:
        """Wait until the checkpoint under way is on disk; raise the error of its writing."""
        failure = self._writing.exception() if self._writing else None
        self._writing = None
        if failure:
            raise DataError(
                f"the checkpoint could not be written: {failure}; earlier checkpoints in {self.folder} are intact. "
                f"Free space or choose another folder."
            ) from failure

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint. Damaged ones are skipped with a warning."""
        for path in reversed(self.ranks.of_first(self.paths())):
            try:
                return open_checkpoint(path, self.ranks)
            except DataError as error:
                if self.ranks.first:
                    notice(f"{error} Skipped; trying the one before.")
        return None

    def at(self, step: int) -> Checkpoint:
        return open_checkpoint(self._path(step), self.ranks)

    def check_writable(self) -> None:
        """Raise DataError if the folder exists and cannot be written, rather than hours later at the first checkpoint."""
        if self.folder.exists():
            with writing(self.folder), TemporaryDirectory(prefix=".try-", dir=self.folder):
                pass

    def warn_if_disk_is_full(self, needed: int) -> None:
        """Warn if the disk has no room for `needed` bytes, rather than at the first checkpoint."""
        if not self.ranks.first:
            return
        free = shutil.disk_usage(next(path for path in (self.folder, *self.folder.parents) if path.exists())).free
        if free < needed:
            notice(
                f"{self.folder}: a checkpoint takes {readable(needed)}, and {readable(free)} are free on its disk; free space "
                f"before the first one is written, or stop and give another --out.",
                logging.WARNING,
            )

    def clean(self) -> None:
        """Remove and report the temporary folders of a killed run. No other process may be writing here."""
        if self.ranks.first and (partial_folders := sorted(self.folder.glob(".step-*"))):
            for path in partial_folders:
                shutil.rmtree(path)
            steps = ", ".join(str(int(path.name.split(".")[1].removeprefix("step-"))) for path in partial_folders)
            notice(f"{self.folder}: removed what was half written when a run ended: step {steps}.")

    def paths(self) -> list[Path]:
        """Return the folders of all checkpoints, complete or damaged, in the order of their steps."""
        return sorted((p for p in self.folder.glob("step-*") if p.is_dir() and NAME.search(p.name)), key=_step_of)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _shards_to_write(self, tensors: dict[str, Tensor]) -> tuple[bool, dict[str, LocalShard]]:
        """Return whether tensors are sharded, and the shards that this rank writes."""
        sharded = any_sharded(tensors.values())
        return sharded, {name: local_shard_of(t) for name, t in tensors.items()} if sharded or self.ranks.first else {}

    def _write(self, step: int, sharded: bool, shards: dict[str, LocalShard], facts: dict[str, Any]) -> None:
        """Write a checkpoint in two phases: every rank writes and flushes its files, then the first rank renames the folder."""
        writers, final = self._writers, self._path(step)
        temporary = writers.of_first(self.folder / f".{final.name}.{os.getpid()}")

        def make_folder() -> None:
            if writers.first:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)

        try:
            writers.together(make_folder)
            host = writers.together(lambda: self._staging.give({name: shard.local for name, shard in shards.items()}))
            on_host = {name: shard.moved(host[name]) for name, shard in shards.items()}
            written = writers.together(
                lambda: [files.flushed(path) for path in _format(sharded).write(temporary, on_host, writers)]
            )
            by_name = {name: rest for descriptions in writers.gather(written) for name, *rest in descriptions}
            writers.together(partial(self._commit, temporary, final, {"step": step, "facts": facts}, sharded, by_name))
        except BaseException:
            if writers.first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _commit(self, temporary: Path, final: Path, state: dict[str, Any], sharded: bool, by_name: dict[str, list]) -> None:
        """Write state.json and rename the folder, which makes the checkpoint visible as a whole."""
        if not self.ranks.first:
            return
        for name, (size, _) in by_name.items():
            if not (temporary / name).exists() or (temporary / name).stat().st_size != size:
                raise OSError(
                    f"{temporary / name} was written by another rank and is not seen by the first; give a folder they share"
                )
        files.write_state(temporary, state | {"sharded": sharded, "files": by_name})
        self.before_commit()
        if final.exists():  # a resumed run reaches a step that it had saved before
            shutil.rmtree(final)
        os.replace(temporary, final)
        files.flush(self.folder)
        self._prune(state["step"])

    def _prune(self, newest: int) -> None:
        """Remove checkpoints that are neither among the newest nor the best, and leftovers.

        A checkpoint beyond `newest`, which was just written, is damaged, or the run has been resumed before it: it is removed
        and does not count among the newest.
        """
        paths = [path for path in self.paths() if _step_of(path) <= newest]
        keep = set(paths[-self.keep :])
        scores = [(score, p) for p in paths if (score := files.score_of(p)) is not None]
        keep |= {min(scores)[1]} if scores else set()
        for path in set(self.paths()) - keep:
            shutil.rmtree(path)
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)


def joined(**parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all parts in one dict, as PART.NAME."""
    return {f"{part}.{name}": t for part, named in parts.items() for name, t in named.items()}


def open_checkpoint(path: str | Path, ranks: Ranks = ALONE) -> Checkpoint:
    """Return the checkpoint in `path` after verifying sizes and checksums. Ranks share the files out, and all raise DataError
    if one finds damage."""
    path, state, failure = Path(path), dict[str, Any](), None
    try:
        state = files.read_state(path)
        if (name := NAME.search(path.name)) and int(name[1]) != state["step"]:
            raise DataError(f"{path} holds step {state['step']}, and its name another one; give the folder its own name back.")
        for file, expected in sorted(state["files"].items())[ranks.rank :: ranks.world]:
            if files.described(sibling(path / STATE, file)) != [file, *expected]:
                failure = files.damaged(path, file)
    except (OSError, ValueError, KeyError) as error:
        failure = DataError(f"{path} is not a whole checkpoint: {error}.")
    except DataError as error:
        failure = error
    if first := next(filter(None, ranks.gather(failure and str(failure))), None):
        raise DataError(first)
    return Checkpoint(path, state["step"], state["facts"], state["sharded"])


def _step_of(path: Path) -> int:
    return int(NAME.search(path.name)[1])  # type: ignore[index]


def path_from_here(checkpoint: Checkpoint, name: str) -> str:
    """Return the path `name` of this checkpoint's recipe; if it does not exist, relative to where the run was started."""
    original = os.path.join(checkpoint.facts.get(WHERE, ""), name)
    return original if not os.path.exists(name) and os.path.exists(original) else name


MIXED = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: neighbouring ranks and steps get distant seeds
SEEDS = (1 << 63) - 1
MASTER, MODEL = "step.master.", "model."
SCALE = "step.scale."  # of 8-bit moments: stored by rank, so another number of ranks needs the scales of all


def seed_ranks(ranks: Ranks, seed: int, step: int = 0) -> None:
    """Seed every rank but the first differently."""
    if not ranks.first:
        torch.manual_seed((seed + MIXED * (ranks.rank + (step << 20))) & SEEDS)


def rng_states(ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    """Return the RNG states of every rank, by name. Waits for all ranks, not for the device."""
    own = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    return {_rng_name(kind, rank): state for rank, states in enumerate(ranks.gather(own)) for kind, state in states.items()}


def restore_rng(tensors: dict[str, Tensor], ranks: Ranks, device: torch.device, seed: int, step: int) -> None:
    """Restore this rank's RNG from what `rng_states` returned; a rank without a saved state is seeded."""
    if (name := _rng_name("cpu", ranks.rank)) in tensors:
        torch.set_rng_state(tensors[name])
    else:
        seed_ranks(ranks, seed, step)
    if device.type == "cuda" and (name := _rng_name("cuda", ranks.rank)) in tensors:
        torch.cuda.set_rng_state(tensors[name], device)
    saved = sum(name.startswith("cpu") for name in tensors)
    if saved != ranks.world:
        fresh = f"; ranks from {saved} on draw dropout and noise anew" if saved < ranks.world else ""
        notice(f"resume: saved by {saved} rank{'s'[: saved != 1]}, goes on with {ranks.world}{fresh}.")


def _rng_name(kind: str, rank: int) -> str:
    return f"{kind}.{rank}" if rank else kind


def convert_tensors(checkpoint: Checkpoint, live: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by the names of `live`, filling those in place; other tensors are new.

    Replicas have 16-bit weights and fp32 masters. The shards of an FSDP model are fp32 and their own masters. So the fp32
    weights of one are called step.master.NAME, and those of the other model.NAME.
    """
    shapes = checkpoint.shapes()
    weights = {name: MODEL + name.removeprefix(MASTER) for name in (*shapes, *live) if name.startswith(MASTER)}
    from_masters = {m: live[w] for m, w in weights.items() if m in shapes and m not in live and w in live}
    to_masters = {w: live[m] for m, w in weights.items() if m in live and m not in shapes and w in shapes}
    fitting = {name: tensor for name, tensor in live.items() if not name.startswith(SCALE)}
    tensors = checkpoint.tensors(like=fitting, but=tuple(from_masters))
    checkpoint.read(from_masters)
    checkpoint.read(to_masters)
    return tensors | {m: live[m] for m, w in weights.items() if w in to_masters}


def claim_export(folder: Path, run: str, overwrite: bool = False) -> None:
    """Mark `folder` as an export of this run before anything is written. Raise ValueError if it holds other files.

    An export that is interrupted leaves the mark, so the run can write the folder again.
    """
    check_replaceable(folder, "export", run=run, overwrite=overwrite)
    make_folder(folder)
    write_atomic(folder / ORIGIN, json.dumps({"run": run}) + "\n")


def note_export(folder: Path, run: str, step: int, done: int) -> None:
    """Write the step of the exported weights, and the number of steps that the run had done."""
    write_atomic(folder / ORIGIN, json.dumps({"run": run, "step": step, "done": done}) + "\n")


def export_done_at(folder: Path) -> int | None:
    """Return the number of steps that the run had done when it wrote this export, None if unknown."""
    if not (folder / ORIGIN).exists():
        return None
    done = read_json(folder / ORIGIN, "export the run again").get("done")
    if done is None:  # the export was interrupted
        return None
    if type(done) is not int:
        raise DataError(f"{folder / ORIGIN}: done is {done!r}, wanted a number of steps; export the run again.")
    return done


def newer_export(exports: Sequence[Path], checkpoint: Checkpoint | None) -> Path | Checkpoint | None:
    """Return the export of the latest step, or the checkpoint if its step is later than that, or not known of any export."""
    if checkpoint is None and len(exports) == 1:
        return exports[0]
    steps = {folder: -1 if (done := export_done_at(folder)) is None else done for folder in exports}
    export = max(exports, key=lambda folder: steps[folder], default=None)
    return checkpoint if export is None or (checkpoint is not None and checkpoint.step > steps[export]) else export
