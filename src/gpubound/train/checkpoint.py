"""Checkpoints: each is complete or absent, and they are written while the training goes on.

`snapshot` copies the tensors in order with the step's own work, so no step waits for the disk (staging.py). `write` lets a
thread bring the copies to the host on a side stream and write a temporary folder, which is renamed once all of it is on disk: a
run that is killed at any moment leaves its last complete checkpoint. Opening a checkpoint verifies its checksums.

    <folder>/step-00000120/
        tensors.safetensors    every tensor, by name (whole.py); or, where tensors are sharded, files of every rank
                               (distributed/sharded_checkpoint.py)
        state.json             step, facts, size and crc32 of the tensors' files, and the crc32 of all of this

Of many ranks all make every call. Where each holds the whole, the first writes; of sharded tensors each writes its own. The
folder is renamed when every rank has said that its files are on disk. Any number of ranks opens what any other has written.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..distributed import ALONE, Ranks
from ..distributed.ddp_unwrap import tell_if_saved_apart
from ..distributed.local_shard import LocalShard, any_sharded, local_shard_of
from ..errors import DataError
from ..files import beside, writing
from ..formatting import readable
from ..trace import notice
from . import manifest, safetensors_file
from .manifest import STATE
from .safetensors_file import TENSORS
from .staging import Staging

WHERE = "where"  # in a checkpoint's facts: the folder that relative paths of its recipe begin in
_NAME = re.compile(r"step-(\d{8,})$")


def _form(sharded: bool) -> Any:
    """The module that writes and reads the tensors' files."""
    if not sharded:
        return safetensors_file
    from ..distributed import sharded_checkpoint  # with torch.distributed.checkpoint, which takes half a second to import

    return sharded_checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint on disk. `facts` is read at once, tensors when asked for."""

    path: Path
    step: int
    facts: dict[str, Any]
    sharded: bool = False

    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of every tensor, by name."""
        return _form(self.sharded).shapes(self.path)

    def tensors(
        self,
        device: str | torch.device = "cpu",
        like: Mapping[str, Tensor] | None = None,
        begin: tuple[str, ...] = ("",),
        but: Container[str] = (),
    ) -> dict[str, Tensor]:
        """Every tensor whose name begins so, but for those named.

        One of `like` with the same name and shape is filled where it lies, of a sharded one what this rank has of it. The
        others are whole, on `device`.
        """
        found = dict[str, Tensor]()
        for name, (shape, dtype) in self.shapes().items():
            if name.startswith(begin) and name not in but:
                known = (like or {}).get(name)
                fits = known is not None and known.shape == shape
                found[name] = known if fits else torch.empty(shape, dtype=dtype, device=device)  # type: ignore[assignment]
        self.read(found)
        return found

    @torch.no_grad()
    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill these, of a sharded one what this rank has of it. Their shapes are those here."""
        _form(self.sharded).read(self.path, {name: local_shard_of(t) for name, t in into.items()})


class Checkpoints:
    """The checkpoints of one run. `first` puts on disk, on the writing thread, what must be there before a checkpoint is."""

    def __init__(
        self,
        folder: str | Path,
        keep: int = 3,
        keep_every: int | None = None,
        first: Callable[[], None] = lambda: None,
        ranks: Ranks = ALONE,
    ):
        if keep < 1:
            raise ValueError(f"Checkpoints: keep must be at least 1, got {keep}; the newest one is what a resumed run needs.")
        self.folder, self.keep, self.keep_every, self.first = Path(folder), keep, keep_every, first
        self.ranks, self._writers, self._staging = ranks, ALONE, Staging()
        self._snapshot: tuple[Any, ...] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpubound-checkpoint")
        self._writing: Future | None = None

    def save(
        self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any], score: Any = None, wait: bool = False
    ) -> Future:
        """Snapshot now, write in the background; `wait` until it is on disk. A lower `score`, a number or a list, is better.

        What is returned is done when it is written; `wait` says what failed.
        """
        self.snapshot(step, tensors, facts, score)
        writing = self.write()
        assert writing is not None  # there is a snapshot
        if wait:
            self.wait()
        return writing

    def snapshot(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any], score: Any = None) -> None:
        """Copy everything as it is now. `write` writes it, later."""
        self.write()
        self.wait()  # one snapshot at a time; also where an earlier write's failure is raised
        tell_if_saved_apart(self.ranks, self.folder)
        if self._writers.alone:  # all ranks are here now
            self._writers = self.ranks.aside()
        sharded, pieces = self._mine(tensors)
        copies = self._staging.take({name: piece.local for name, piece in pieces.items()})
        scored = {"score": score} if score is not None else {}
        self._snapshot = (
            step,
            sharded,
            {name: pieces[name].moved(copy) for name, copy in copies.items()},
            dict(facts) | scored,
        )

    def write(self) -> Future | None:
        """Write the snapshot, if there is one, in the background."""
        if self._snapshot:
            work, self._snapshot = self._snapshot, None
            self._writing = self._thread.submit(self._write, *work)
            self._thread.submit(self._staging.make_ready)
        return self._writing

    def expect(self, tensors: dict[str, Tensor]) -> Future:
        """Make ready for snapshots of these, in the background; else the first may hold a step up for seconds.

        What is free on the GPU now is taken for what steps do not need: call it some steps behind torch.cuda.empty_cache().
        """
        _, pieces = self._mine(tensors)
        self._staging.expect({name: piece.local for name, piece in pieces.items()})
        return self._thread.submit(self._staging.make_ready)

    def wait(self) -> None:
        """Until the checkpoint under way is on disk. Raises what its writing raised."""
        failure = self._writing.exception() if self._writing else None
        self._writing = None
        if failure:
            raise DataError(
                f"the checkpoint could not be written: {failure}; earlier checkpoints in {self.folder} are intact. "
                f"Free space or choose another folder."
            ) from failure

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint. Damaged ones are skipped, each with a line that says why."""
        for path in reversed(self.ranks.of_first(self.paths())):
            try:
                return open_checkpoint(path, self.ranks)
            except DataError as error:
                if self.ranks.first:
                    notice(f"{error} Skipped; trying the one before.")
        return None

    def at(self, step: int) -> Checkpoint:
        return open_checkpoint(self._place(step), self.ranks)

    def check_writable(self) -> None:
        """DataError now, and not hours later at the first checkpoint. That one makes the folder where there is none yet."""
        if self.folder.exists():
            with writing(self.folder), TemporaryDirectory(prefix=".try-", dir=self.folder):
                pass

    def tell_of_room(self, needed: int) -> None:
        """Say now that the disk has no room for one of so many bytes; else the first one would fail after many steps."""
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
        """Remove what a killed run has left half written, and say so. No other process may be writing there."""
        if self.ranks.first and (left := sorted(self.folder.glob(".step-*"))):
            for path in left:
                shutil.rmtree(path)
            steps = ", ".join(str(int(path.name.split(".")[1].removeprefix("step-"))) for path in left)
            notice(f"{self.folder}: removed what was half written when a run ended: step {steps}.")

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def paths(self) -> list[Path]:
        """Return all that exist, complete or damaged, in the order of their steps."""
        return sorted((p for p in self.folder.glob("step-*") if p.is_dir() and _NAME.search(p.name)), key=_number)

    def _mine(self, tensors: dict[str, Tensor]) -> tuple[bool, dict[str, LocalShard]]:
        """Whether they are sharded, and what this rank writes of them."""
        sharded = any_sharded(tensors.values())
        return sharded, _form(sharded).mine({name: local_shard_of(t) for name, t in tensors.items()}, self.ranks)

    def _write(self, step: int, sharded: bool, pieces: dict[str, LocalShard], facts: dict[str, Any]) -> None:
        """In two phases: every rank says that its files are on disk, then the first gives the folder its name."""
        writers, final = self._writers, self._place(step)
        fresh = writers.of_first(self.folder / f".{final.name}.{os.getpid()}")
        try:
            writers.together(partial(_make_empty, fresh, writers))
            host = writers.together(lambda: self._staging.give({name: piece.local for name, piece in pieces.items()}))
            pieces = {name: piece.moved(host[name]) for name, piece in pieces.items()}
            written = writers.together(
                lambda: [manifest.flushed(file) for file in _form(sharded).write(fresh, pieces, writers)]
            )
            files = {name: about for some in writers.gather(written) for name, *about in some}
            writers.together(partial(self._commit, fresh, final, {"step": step, "facts": facts}, sharded, files))
        except BaseException:
            if writers.first:
                shutil.rmtree(fresh, ignore_errors=True)
            raise

    def _commit(self, fresh: Path, final: Path, state: dict[str, Any], sharded: bool, files: dict[str, list[int]]) -> None:
        """Write what stands beside the files, and let all of it appear at once."""
        if not self.ranks.first:
            return
        for name, (size, _) in files.items():
            if not (fresh / name).exists() or (fresh / name).stat().st_size != size:
                raise OSError(
                    f"{fresh / name} was written by another rank and is not seen by the first; give a folder they share"
                )
        if sharded:
            state["files"] = files
        else:
            state["bytes"], state["crc32"] = files[TENSORS]
        manifest.write(fresh, state)
        self.first()
        if final.exists():  # a resumed run reaches a step that it had saved before
            shutil.rmtree(final)
        os.replace(fresh, final)
        manifest.flush(self.folder)
        self._prune(state["step"])

    def _prune(self, newest: int) -> None:
        """Remove what is neither among the newest, nor on the grid, nor the best, and leftovers of killed writers.

        A step beyond `newest`, just written, was damaged, or the run had gone on from there: it must push no whole one out.
        """
        steps = {p: step for p in self.paths() if (step := _number(p)) <= newest}
        paths = list(steps)
        kept = set(paths[-self.keep :])
        kept |= {p for p in paths if self.keep_every and steps[p] % self.keep_every == 0}
        scores = [(score, p) for p in paths if (score := manifest.score_of(p)) is not None]
        kept |= {min(scores)[1]} if scores else set()
        for path in set(self.paths()) - kept:
            shutil.rmtree(path)
        for left in self.folder.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)


def joined(**parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all parts of a checkpoint, their part's name before their own."""
    return {f"{part}.{name}": t for part, named in parts.items() for name, t in named.items()}


def open_checkpoint(path: str | Path, ranks: Ranks = ALONE) -> Checkpoint:
    """The checkpoint in `path`, after its sizes and checksums have been verified. Ranks share its files out, and all raise
    DataError where one finds damage."""
    path, state, wrong = Path(path), dict[str, Any](), None
    try:
        state = manifest.read(path)
        if (named := _NAME.search(path.name)) and int(named[1]) != state["step"]:
            raise DataError(f"{path} holds step {state['step']}, and its name another one; give the folder its own name back.")
        for name, about in sorted(manifest.files_of(state).items())[ranks.rank :: ranks.world]:
            if manifest.about(beside(path / STATE, name)) != [name, *about]:
                wrong = manifest.damaged(path, name)
    except (OSError, ValueError) as error:
        wrong = DataError(f"{path} is not a whole checkpoint: {error}.")
    except DataError as error:
        wrong = error
    if said := next(filter(None, ranks.gather(wrong and str(wrong))), None):
        raise DataError(said)
    return Checkpoint(path, state["step"], state["facts"], "files" in state)


def _make_empty(folder: Path, ranks: Ranks) -> None:
    if ranks.first:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def _number(path: Path) -> int:
    return int(_NAME.search(path.name)[1])  # type: ignore[index]


def path_from_here(found: Checkpoint, name: str) -> str:
    """Return the path `name` of this checkpoint's recipe; where it does not exist, as seen from where the run was begun."""
    begun = os.path.join(found.facts.get(WHERE, ""), name)
    return begun if not os.path.exists(name) and os.path.exists(begun) else name
