"""The start's part of the decoding benchmark: from a loaded model to the first token, in a fresh process (decode_start.py)."""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch

from gpubound.errors import MeasureError

from .decode_goals import GOALS
from .decode_start import MARK
from .harness import Bench, compile_sources
from .memory_rows import keep_phases, peaks_in

BEYOND_BYTES = 100e6  # beyond weights and cache


def measure_start(bench: Bench, name: str) -> None:
    """The same twice: the first process finds an empty Triton cache, the second one what the first has compiled."""
    goal = GOALS[name]
    if bench.device.type == "cuda":
        compile_sources()
    with tempfile.TemporaryDirectory(prefix="gpubound-triton-") as cache:
        for state in ("empty", "filled"):
            try:
                facts = started(name, bench.device, cache)
            except MeasureError as error:
                bench.unmeasured.append(f"{name}: {error}")
                return
            gates = {"budget": 1.0} if goal.gated and state == "filled" else {}
            case = f"{name} first token, fresh process, {state} Triton cache"
            bench.figure(case, "s", facts["first_token_s"], {"budget": goal.first_token_s}, gates)
            print(f"{'':44} {facts['built_s']:.2f} s of it until the decoder is built and verified", flush=True)
    keep_phases(bench, f"{name} fresh process", peaks_in(facts["phases"]))
    if facts["path"]:
        bench.wrong.append(f"{name}: ours took the model's own forward: {facts['path']}")
    if "syncs" in facts:
        bench.figure(f"{name} host syncs in a generation", "syncs", facts["syncs"], {"budget": 0}, {"budget": 1.0})
        beyond, allowed = facts["beyond_bytes"] / 2**30, BEYOND_BYTES / 2**30
        bench.figure(f"{name} memory beyond weights and cache", "GiB", beyond, {"budget": allowed}, {"budget": 1.0})


def started(name: str, device: torch.device, cache: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.decode_start", name, device.type]
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise MeasureError(f"its fresh process ended with {done.returncode} and no figures; its own message is above.")
