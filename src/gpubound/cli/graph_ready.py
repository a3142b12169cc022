"""`gpubound doctor --graph-ready TARGET`: the audit of what a CUDA graph can hold."""

import json
from pathlib import Path
from typing import Any

from ..device import resolve
from ..doctor.ready.targets import audits, named
from ..models.registry import family_of, is_named
from .place import load

VOCABULARY, POSITIONS = 512, 512  # of a preset, whose tokenizer is not known here


def graph_ready(target: str, device: str, as_json: bool) -> int:
    """Print the audits of what `target` names. 0: all is ready; 1: something is not; 3: no device to capture on."""
    there = resolve(device)
    found = audits(_thing(target, there), there)
    code = max((audit.exit_code for audit in found), key=(0, 3, 1).index)
    if as_json:
        print(
            json.dumps({"version": 1, "target": target, "exit": code, "audits": [audit.as_dict() for audit in found]}, indent=1)
        )
    else:
        print("\n\n".join(map(str, found)))
    return code


def _thing(target: str, device: Any) -> Any:
    if (Path(target) / "config.json").is_file():
        return load(target)[0]
    if is_named(target):
        return family_of(target).make(target, VOCABULARY, POSITIONS, device)
    return named(target)
