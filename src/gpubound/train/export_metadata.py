"""What an export says of its run, in a file beside the model's own: which step's weights it has, and how far the run was.

So `gpubound generate RUN` can tell whether a checkpoint is newer. Files' times do not tell: a copy of a run has other ones.
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
    """Mark `folder` as an export of the run with this id before anything is written; ValueError if it holds other files.

    An export that is interrupted leaves the mark, so the run can write the folder again.
    """
    check_replaceable(folder, "export", run=run, overwrite=overwrite)
    make_folder(folder)
    write_atomic(folder / ORIGIN, json.dumps({"run": run}) + "\n")


def note(folder: Path, run: str, step: int, done: int) -> None:
    """Write which step the exported weights are of, and how many steps the run had done."""
    write_atomic(folder / ORIGIN, json.dumps({"run": run, "step": step, "done": done}) + "\n")


def done_at(folder: Path) -> int | None:
    """How many steps the run had done when it wrote this export. None where the folder does not say."""
    if not (folder / ORIGIN).exists():
        return None
    done = read_json(folder / ORIGIN, "export the run again").get("done")
    if done is None:  # the export was interrupted
        return None
    if type(done) is not int:
        raise DataError(f"{folder / ORIGIN}: done is {done!r}, wanted a number of steps; export the run again.")
    return done


def newer(exports: Sequence[Path], checkpoint: Checkpoint | None) -> Path | Checkpoint | None:
    """The export of the latest step, or the checkpoint where that is of a later one.

    By the files' times, aloud, where an export does not say its step: an older version wrote it, or no run.
    """
    if checkpoint is None and len(exports) == 1:
        return exports[0]
    told = {folder: done_at(folder) for folder in exports}
    silent = next((folder for folder, done in told.items() if done is None), None)

    def age(folder: Path, step: int | None) -> float:
        return _written(folder) if silent or step is None else step

    export = max(exports, key=lambda folder: age(folder, told[folder]), default=None)
    if export is None:
        return checkpoint
    later = checkpoint is not None and age(checkpoint.path, checkpoint.step) > age(export, told[export])
    if silent:
        chosen = checkpoint.path if later and checkpoint else export
        notice(f"{silent} does not say of which step it is; taken is {chosen}, because its files are the newest.")
    return checkpoint if later else export


def _written(folder: Path) -> float:
    """When a model or a checkpoint was written."""
    return max(file.stat().st_mtime for pattern in (STATE, "*config.json") for file in folder.glob(pattern))
