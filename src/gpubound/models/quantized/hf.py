"""Models of transformers from quantised folders."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...trace import fallback
from ..folder import Beyond, auto_class, read_config
from .choose import scheme_of
from .fill import fill
from .mxfp4 import Mxfp4, experts_in_codes

META = torch.device("meta")


def load_published(folder: Path, device: Any, dtype: torch.dtype | None, trust_remote_code: bool) -> nn.Module | None:
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
    del config.quantization_config
    target = torch.device(device)
    dtype = dtype or config.dtype or torch.bfloat16
    experts = experts_in_codes() if isinstance(scheme, Mxfp4) else nullcontext()
    with target, no_init_weights(), linears_on_meta(), experts:
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
