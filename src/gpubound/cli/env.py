"""Print what this machine can do, and measure it.

Versions and devices, the device that `auto` means here and why, then the measured ceilings: the denominators of every
percentage the project prints.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import DeviceError
from ..formatting import readable
from . import arguments

# Figure -> its label, in the order printed.
LABELS = {
    "copy_bytes_per_s": "copy, read + written",
    "read_bytes_per_s": "read",
    "fp32_flops_per_s": "fp32 products",
    "tf32_flops_per_s": "tf32 products",
    "bf16_flops_per_s": "bf16 products",
    "fp16_flops_per_s": "fp16 products",
    "fp8_flops_per_s": "fp8 products",
    "pinned_h2d_bytes_per_s": "host to device, pinned",
    "pageable_h2d_bytes_per_s": "host to device, pageable",
    "launch_us": "one eager launch, host time",
    "graph_node_us": "one kernel in a CUDA graph",
    "item_us": ".item() round trip",
}


@dataclass(frozen=True)
class Env:
    """Print what this machine can do, and measure it.

    The figures are measured once (about 5 s) and kept; --refresh measures again. Exit code 1: a visible GPU fails its test.

    Example: gpubound env --json
    """

    json: bool = False
    """Print one JSON document instead of tables."""
    refresh: bool = False
    """Measure again, whatever the cache holds."""
    device: str = "auto"
    """Measure this device: auto, require, cpu, cuda or cuda:<index>."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Env, argv, "env")
    from .. import measure  # torch takes two seconds: options are read first

    policy = choose_device(options.device)
    facts: dict[str, Any] = {"machine": asdict(measure.machine()), "gpus": policy.pop("gpus"), "policy": policy}
    if policy["device"] is not None:
        facts["ceilings"] = measure.ceilings(policy["device"], refresh=options.refresh).as_dict()
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        width = None if sys.stdout.isatty() else 100  # the same text in every pipe
        _print(facts, Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False))
    failing = policy["device"] is None or any(gpu["test"] != "passes" for gpu in facts["gpus"])
    return 1 if failing else 0


def choose_device(spec: str) -> dict[str, Any]:
    """Return the device that `spec` means and why, after a test of every visible GPU. device None: there is an error."""
    from .. import measure
    from ..device import label, look, resolve

    try:
        device = resolve(spec)
    except DeviceError as error:
        if spec != "auto":
            raise
        return {"asked": spec, "device": None, "why": str(error), "gpus": []}
    gpus = [asdict(gpu) | {"test": _test(gpu.index)} for gpu in measure.gpus()] if look().count else []
    if device.type == "cuda":
        why = "it computed a small product forward and backward, and the result agrees with the CPU's"
    else:
        why = look().why if spec == "auto" else "asked for"
    return {"asked": spec, "device": str(device), "name": label(device), "why": why, "gpus": gpus}


def _test(index: int) -> str:
    from ..device import resolve

    try:
        resolve(f"cuda:{index}")
    except DeviceError as error:
        return str(error)
    return "passes"


def _print(facts: dict[str, Any], console: Console) -> None:
    table = Table("this machine", "", box=None, pad_edge=False)
    for name, value in facts["machine"].items():
        if name == "host_memory_bytes":
            name, value = "host memory", value and readable(value)
        table.add_row(name, "none" if value is None else str(value))
    for gpu in facts["gpus"]:
        sizes = f"{readable(gpu['memory_bytes'])}, L2 {readable(gpu['l2_bytes'])}, {gpu['sms']} SMs"
        table.add_row(f"cuda:{gpu['index']}", f"{gpu['name']}, {sizes}, capability {gpu['capability']}; test: {gpu['test']}")
    policy = facts["policy"]
    table.add_row(f"device={policy['asked']}", f"{policy.get('name', 'ERROR')}: {policy['why']}")
    with console.capture() as capture:
        console.print(table)
        if "ceilings" in facts:
            console.print()
            console.print(_ceilings_table(facts["ceilings"]))
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _ceilings_table(figures: dict[str, Any]) -> Table:
    table = Table("measured ceilings", "", f"{figures['name']}, {figures['date']}", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for name, label in LABELS.items():
        if figures[name] is not None:
            table.add_row(label, *_in_unit(name, figures[name]))
        elif name in figures["missing"]:
            table.add_row(label, "none", figures["missing"][name])
    return table


def _in_unit(name: str, figure: float) -> tuple[str, str]:
    """Return the figure and its unit, two columns."""
    if name.endswith("_us"):
        return f"{figure:.2f}", "µs"
    unit = "FLOP/s" if name.endswith("_flops_per_s") else "B/s"
    return (f"{figure / 1e12:.2f}", f"T{unit}") if figure >= 1e12 else (f"{figure / 1e9:.1f}", f"G{unit}")
