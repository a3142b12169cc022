"""Say whether a CUDA graph can hold a model or a function, and which lines stop it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from . import arguments


@dataclass(frozen=True)
class Doctor:
    """Say whether a CUDA graph can hold a model or a function, and which lines stop it.

    TARGET is a folder with a config.json, a preset's name, MODULE:NAME or FILE.py:NAME. NAME is a function or class that is
    called without arguments and returns a model, a function, or either with its inputs: (step, x, y). Exit code 0: a graph
    holds all of it. 1: something stops it. 3: nothing was found, but there is no GPU to capture on.

    Example: gpubound doctor --graph-ready train.py:build
    """

    graph_ready: Annotated[str, tyro.conf.arg(metavar="TARGET")]
    """What to audit: a folder, a preset, MODULE:NAME or FILE.py:NAME."""
    device: str = "auto"
    """Where: auto, require, cpu, cuda or cuda:<index>."""
    json: bool = False
    """Print one JSON document instead of the table."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Doctor, argv, "doctor")
    from .graph_ready import graph_ready

    return graph_ready(options.graph_ready, options.device, options.json)
