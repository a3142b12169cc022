"""Load the models of transformers from folders, quantised or not."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import DataError
from ..files import read_json
from .folder import INDEX, WEIGHTS, attempt, auto_class, check_layers, layer_counts, needs_transformers, stored_tensors
from .quantized.hf import load_published
from .registry import is_quantized, load_quantized


def load_foreign(
    folder: Path, device: Any, dtype: torch.dtype | None = None, trust_remote_code: bool = False,
    computes: torch.device | None = None, **options: Any,
) -> nn.Module:  # fmt: skip
    """Load the causal language model in a Hugging Face folder by transformers. `dtype` None keeps the saved one.

    device, computes: for a quantised checkpoint, as in deepseek_v4/checkpoint.py.
    """
    needs_transformers(folder)
    from transformers import logging

    auto = auto_class(read_json(folder / "config.json"))
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        config = read_json(folder / "config.json")
        check_layers(folder / "config.json", layer_counts(config), stored_tensors(folder))
        if is_quantized(config):
            return attempt(folder, lambda: load_quantized(config, folder, device, dtype, computes=computes))
    if (published := attempt(folder, lambda: load_published(folder, device, dtype, trust_remote_code))) is not None:
        return published

    def load() -> Any:
        return auto.from_pretrained(
            folder,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
        )

    logging.disable_progress_bar()
    model, report = attempt(folder, load)
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(map(str, report.get(problem) or ())):
            raise DataError(
                f"{folder}: its tensors are not those of its config: {problem.replace('_', ' ')} {names[:3]} ({len(names)} in "
                "all), which would be random; check that config.json belongs to these weights."
            )
    return model.to(device)
