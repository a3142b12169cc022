"""What others find in a script: two linters that read it, and torch's own debug mode for syncs, which needs a GPU.

They name no kinds of ours. Each of their rules stands for all kinds that it could mean, so that a right line always counts.
"""

import json
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from gpubound.errors import MeasureError

from .running import watched
from .score import Found

# The rules that are about a waiting GPU; the others of these tools are about memory, convergence and deprecated names.
RULES = {"TG004": ("data", "h2d", "pageable"), "TG007": ("sync",), "TG013": ("h2d", "repeat"), "TOR401": ("data",)}
SYNCS = ("sync", "h2d", "d2h", "repeat", "pageable")


def torch_preflight(script: Path, arguments: Sequence[str]) -> list[Found]:
    return _as_findings(reported("torch-preflight", "check", "--format", "json", str(script.parent)))


def torchfix(script: Path, arguments: Sequence[str]) -> list[Found]:
    return _as_findings(reported("torchfix", "--select=ALL", str(script.parent)))


def _as_findings(found: list[tuple[str, int, str]]) -> list[Found]:
    return [Found(kind, file, line) for file, line, rule in found for kind in RULES.get(rule, ())]


def reported(tool: str, *arguments: str) -> list[tuple[str, int, str]]:
    """The file, the line and the rule of each problem that a linter reports."""
    said = _said(tool, *arguments)
    if tool == "torch-preflight":
        return [(problem["path"], problem["line"], problem["code"]) for problem in json.loads(said)["diagnostics"]]
    problems = re.findall(r"^(.+?):(\d+):\d+: (TOR\d+) ", said, flags=re.MULTILINE)
    return [(file, int(line), rule) for file, line, rule in problems]


def _said(tool: str, *arguments: str) -> str:
    """What a tool prints. Its exit code says whether it found something, so none is an error."""
    if shutil.which(tool) is None:
        raise MeasureError(f"{tool} is not installed: pip install {tool}")
    return subprocess.run([tool, *arguments], capture_output=True, text=True).stdout


def sync_debug_mode(script: Path, arguments: Sequence[str]) -> list[Found]:
    """`torch.cuda.set_sync_debug_mode("warn")`, with every warning kept: the innermost Python line at each sync."""
    if not torch.cuda.is_available():
        raise MeasureError("torch.cuda.set_sync_debug_mode needs a GPU")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched(script, arguments, _warning())
    lines = dict.fromkeys((w.filename, w.lineno) for w in caught if "synchroniz" in str(w.message))
    return [Found(kind, file, line) for file, line in lines for kind in SYNCS]


@contextmanager
def _warning() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
