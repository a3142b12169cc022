"""Models of other families than ours, by transformers: all of their weights from the folder, and none of its Python.

transformers fills weights that a folder lacks at random and says so in a log; here that is an error. A folder whose model
needs Python of its own is refused unless the caller trusts it; left alone, transformers would ask on stdout and read stdin.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import DataError
from ..files import read_json
from .deepseek_v4.checkpoint import is_coded, load_coded
from .folder import INDEX, WEIGHTS, check_layers, stored_tensors

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def load_foreign(
    folder: Path, device: Any, dtype: torch.dtype | None = None, trust_remote_code: bool = False,
    computes: torch.device | None = None, **options: Any,
) -> nn.Module:  # fmt: skip
    """The causal language model in a Hugging Face folder. `dtype` None keeps what was saved.

    device, computes: of a folder in codes as of `load_coded`.
    """
    needs_transformers(folder)
    from transformers import AutoModelForCausalLM, logging

    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        about, told = folder / "config.json", read_json(folder / "config.json")
        check_layers(about, layer_counts(told), stored_tensors(folder))
        if is_coded(told):
            return attempt(folder, lambda: load_coded(folder, device, dtype, computes=computes))

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
        )

    logging.disable_progress_bar()
    model, about = attempt(folder, load)
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, about.get(what) or ())):
            raise DataError(
                f"{folder}: its tensors are not those of its config: {what.replace('_', ' ')} {found[:3]} ({len(found)} in "
                "all), which would be random; check that config.json belongs to these weights."
            )
    return model.to(device)


def needs_transformers(what: Any) -> None:
    if find_spec("transformers") is None:
        raise ValueError(f"{what}: transformers reads it, and it is not installed: pip install 'gpubound[hf]'.")


def attempt(folder: Path, load: Callable[[], Any]) -> Any:
    """Return the result of `load`; raise a DataError for any exception that transformers raises on a damaged folder."""
    try:
        return load()
    except (torch.OutOfMemoryError, DataError):
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise DataError(
                f"{folder}: this model is computed by Python code in its own folder, which was not run; read the code, and if "
                "you trust it pass --trust-remote-code."
            ) from error
        said = " ".join(str(error).split())
        raise DataError(f"{folder}: transformers cannot load it: {type(error).__name__}: {said[:400]}") from error


def layer_counts(about: dict[str, Any]) -> list[tuple[str, int]]:
    """(field, number of layers) of every field of a config.json that has one."""
    parts = [part for part in (about, about.get("text_config")) if isinstance(part, dict)]
    return [(name, part[name]) for part in parts for name in LAYERS if isinstance(part.get(name), int)]
