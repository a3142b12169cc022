"""Metadata of an export, in a file of its folder: the step of its weights, and the number of steps that the run had done.

`gpubound generate RUN` compares it with the checkpoints' steps. File times cannot be compared: those of a copied run differ.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import DataError
from ..files import EXPORT as ORIGIN, check_replaceable, make_folder, read_json, write_atomic
from ..trace import notice
from .checkpoint import Checkpoint
from .checkpoint.files import STATE


def claim(folder: Path, run: str, overwrite: bool = False) -> None:
    """Mark `folder` as an export of this run before anything is written. Raise ValueError if it holds other files.

    An export that is interrupted leaves the mark, so the run can write the folder again.
    """
    check_replaceable(folder, "export", run=run, overwrite=overwrite)
    make_folder(folder)
    write_atomic(folder / ORIGIN, json.dumps({"run": run}) + "\n")


def note(folder: Path, run: str, step: int, done: int) -> None:
    """Write the step of the exported weights, and the number of steps that the run had done."""
    write_atomic(folder / ORIGIN, json.dumps({"run": run, "step": step, "done": done}) + "\n")


def done_at(folder: Path) -> int | None:
    """Return the number of steps that the run had done when it wrote this export, None if unknown."""
    if not (folder / ORIGIN).exists():
        return None
    done = read_json(folder / ORIGIN, "export the run again").get("done")
    if done is None:  # the export was interrupted
        return None
    if type(done) is not int:
        raise DataError(f"{folder / ORIGIN}: done is {done!r}, wanted a number of steps; export the run again.")
    return done


def newer(exports: Sequence[Path], checkpoint: Checkpoint | None) -> Path | Checkpoint | None:
    """Return the export of the latest step, or the checkpoint if its step is later.

    If an export has no step, as from an older version or an interruption, file times are compared, with a notice.
    """
    if checkpoint is None and len(exports) == 1:
        return exports[0]
    steps = {folder: done_at(folder) for folder in exports}
    without_step = next((folder for folder, done in steps.items() if done is None), None)

    def age(folder: Path, step: int | None) -> float:
        return _written(folder) if without_step or step is None else step

    export = max(exports, key=lambda folder: age(folder, steps[folder]), default=None)
    if export is None:
        return checkpoint
    later = checkpoint is not None and age(checkpoint.path, checkpoint.step) > age(export, steps[export])
    if without_step:
        chosen = checkpoint.path if later and checkpoint else export
        notice(f"{without_step} does not say of which step it is; taken is {chosen}, because its files are the newest.")
    return checkpoint if later else export


def _written(folder: Path) -> float:
    """Return the time when a model or a checkpoint was written."""
    return max(file.stat().st_mtime for pattern in (STATE, "*config.json") for file in folder.glob(pattern))
