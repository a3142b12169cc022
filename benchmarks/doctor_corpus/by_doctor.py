"""What `gpubound doctor` finds in a script, by the JSON that it prints. To be called in a process of its own."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from gpubound import cli
from gpubound.errors import MeasureError

from .score import Found, Sight


def look(script: Path, arguments: Sequence[str]) -> Sight:
    """With a price on a GPU. Without one its dry run: counts and lines."""
    dry = [] if torch.cuda.is_available() else ["--dry-run"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        with _redirected(1, out), _redirected(2, errors):
            code = cli.main(["doctor", "--json", *dry, str(script), *arguments])
        for file in (out, errors):
            file.seek(0)
        printed, complained = out.read(), errors.read().strip().splitlines()
    if code not in (0, 1) or "{" not in printed:
        raise MeasureError(f"gpubound doctor ended with code {code}: {complained[-1] if complained else 'it said nothing'}")
    return read(json.loads(printed[printed.index("{") :]))


def read(verdict: dict[str, Any]) -> Sight:
    """The findings of a verdict, the harmless ones marked. One without a line has none here either."""
    found = [
        Found(entry["kind"], entry["file"] or "", entry["line"] or 0, entry["ms"], harmless)
        for name, harmless in (("findings", False), ("harmless", True))
        for entry in verdict[name]
    ]
    return Sight(found, verdict["step_ms"])


@contextmanager
def _redirected(handle: int, file: IO[str]) -> Iterator[None]:
    """Let what is written to a file descriptor go into `file`, also what a library writes."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(handle)
    os.dup2(file.fileno(), handle)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(kept, handle)
        os.close(kept)
