"""HyperCLOVA X: Granite's factors, of which that of the logits multiplies, and norms after the parts of a block as well.

Placing swaps norms.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .decoding import Shape
from .granite import MultipliedReader
from .registry import Maker

SWAPS: dict[str, Maker] = {}


class PeriReader(MultipliedReader):
    NORMS = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    READS = MultipliedReader.READS | {"use_post_norm"}

    def shape(self) -> Shape:
        return replace(super().shape(), logit_scale=self.config.logits_scaling)

    def norm(self, module: Any) -> Any:
        return None if isinstance(module, nn.Identity) else super().norm(module)

    def norms(self, parent: Any, names: Sequence[str | None]) -> list[Any]:
        before, after = super().norms(parent, names)
        return [before, after and after._replace(eps=after.eps * self.factor**2)]  # which does not read the stream


DECODING = {"ForCausalLM": PeriReader}
