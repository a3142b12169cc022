"""The files of a saved policy besides its adapter: the options of its optimizer, and the optimizer's state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from torch import Tensor

from ..errors import DataError
from ..files import read_json, reading, regular
from ..lora.files import CONFIG, WEIGHTS
from ..train import AdamW
from ..train.schedule import is_rate

OPTIMIZER, FACTS = "optimizer.safetensors", "policy.json"
FILES = (WEIGHTS, CONFIG, OPTIMIZER, FACTS)


def read_saved(folder: Path) -> tuple[dict[str, Any], int, dict[str, Tensor]]:
    """Return the options of the optimizer, the number of updates, and the optimizer's state."""
    facts = read_json(folder / FACTS, "save the policy again")
    options, updates = optimizer_options(facts.get("optimizer")), facts.get("updates")
    if type(updates) is not int:
        raise DataError(f"{folder / FACTS}: updates is {updates!r}, wanted a whole number; save the policy again.")
    try:
        with reading(folder / OPTIMIZER):
            return options, updates, tensors_of(regular(folder / OPTIMIZER).read_bytes())
    except SafetensorError as error:
        raise DataError(f"{folder / OPTIMIZER}: is not in safetensors' format: {error}; save the policy again.") from error


def without_name(name: str, key: str) -> str:
    """Return the name of a policy's tensor for its file, where the policy may have another name later."""
    return key.replace(f".{name}.weight", ".weight")


def with_name(name: str, key: str) -> str:
    for half in ("lora_A", "lora_B"):
        key = key.replace(f".{half}.weight", f".{half}.{name}.weight")
    return key


def rate(lr: Any) -> float:
    """Return a learning rate; raise ValueError for what is none."""
    if not is_rate(lr):
        raise ValueError(f"lr: got {lr!r}, wanted a finite number of at least 0.")
    return float(lr)


def optimizer_options(options: Any) -> dict[str, Any]:
    """Return the options of a policy's optimizer; raise ValueError for others."""
    wanted = {"lr", "betas", "weight_decay", "clip"}
    if not isinstance(options, dict) or options.keys() != wanted:
        raise ValueError(f"optimizer: got {options!r}, wanted {', '.join(sorted(wanted))}.")
    betas, clip = options["betas"], options["clip"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(is_rate(beta) and beta < 1 for beta in betas):
        raise ValueError(f"betas: got {betas!r}, wanted two numbers from 0 to below 1.")
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ValueError(f"clip: got {clip!r}, wanted a number above 0, or None.")
    AdamW(options["lr"], tuple(betas), weight_decay=options["weight_decay"])  # refuses its own
    return options | {"lr": rate(options["lr"]), "betas": list(betas)}
