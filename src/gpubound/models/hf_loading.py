"""Load the models of transformers from folders, quantised or not."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import DataError
from ..files import read_json
from ..trace import fallback
from .folder import (
    GENERATION,
    INDEX,
    WEIGHTS,
    Beyond,
    attempt,
    auto_class,
    check_layers,
    layer_counts,
    needs_transformers,
    read_config,
    stored_tensors,
)
from .quantized.scheme import Renamed, Scheme
from .quantized.schemes import Mxfp4, experts_in_codes, scheme_of
from .registry import is_quantized, load_quantized
from .storing import fill

META = torch.device("meta")


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
    if (published := attempt(folder, lambda: _load_published(folder, device, dtype, trust_remote_code))) is not None:
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


def _load_published(folder: Path, device: Any, dtype: torch.dtype | None, trust_remote_code: bool) -> nn.Module | None:
    """Load the folder's model with its weights as they are published; None if transformers reads it: its weights are not
    quantised, or in a format that we do not read."""
    from transformers import AutoConfig, GenerationConfig
    from transformers.initialization import no_init_weights

    about = read_config(folder)
    try:
        scheme = scheme_of(folder, about)
    except Beyond as why:
        fallback(f"{folder.name}: quantised weights in their own format", f"transformers reads them: {why}")
        return None
    if scheme is None:
        return None
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    for name in ("quantization_config", "compression_config"):  # a GGUF file's config.json has neither
        vars(config).pop(name, None)
    target = torch.device(device)
    dtype = dtype or config.dtype or torch.bfloat16
    experts = experts_in_codes() if isinstance(scheme, Mxfp4) else nullcontext()
    with target, no_init_weights(), linears_on_meta(), experts:
        model = auto_class(about).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).eval()
    scheme = _in_names_of(model, scheme)
    if not (scheme.plain_names() | {f"{layer}.weight" for layer in scheme.layers}) & set(model._tied_weights_keys or ()):
        model.tie_weights()  # which a model without drawn weights has not done
    fill(model, scheme, target, dtype)
    model.name_or_path = str(folder.resolve())
    if (folder / GENERATION).exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _in_names_of(model: Any, scheme: Scheme) -> Scheme:
    """Return the scheme under the model's names, which for models of images and text are other ones than their folders have."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]

    def rename(name: str) -> str:
        for step in renamings:
            name, _ = step.rename_source_key(name)
        return name

    return Renamed(scheme, rename) if renamings else scheme


@contextmanager
def linears_on_meta() -> Iterator[None]:
    """Build linear layers without memory within the context."""
    original: Any = nn.Linear.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **(named | {"device": META}))

    nn.Linear.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.__init__ = original  # type: ignore[method-assign]
