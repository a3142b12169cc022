"""Models of transformers from quantised folders."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..folder import auto_class, read_config
from .choose import scheme_of
from .fill import fill

META = torch.device("meta")
UNREAD = {"mxfp4"}  # quantisations of experts, which transformers reads


def load_published(folder: Path, device: Any, dtype: torch.dtype | None, trust_remote_code: bool) -> nn.Module | None:
    """Load the folder's model with its weights as they are published; None if they are not quantised, or transformers reads
    them."""
    from transformers import AutoConfig, GenerationConfig
    from transformers.initialization import no_init_weights

    about = read_config(folder)
    options = about.get("quantization_config")
    if isinstance(options, dict) and options.get("quant_method") in UNREAD:
        return None
    scheme = scheme_of(folder, about)
    if scheme is None:
        return None
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    del config.quantization_config
    target = torch.device(device)
    dtype = dtype or config.dtype or torch.bfloat16
    with target, no_init_weights(), linears_on_meta():
        model = auto_class(about).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).eval()
    fill(model, scheme, target, dtype)
    model.name_or_path = str(folder.resolve())
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


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
