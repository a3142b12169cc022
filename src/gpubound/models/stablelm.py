"""StableLM and Nemotron: Llama's attention, with rotation of a part of each head, and LayerNorms.

StableLM's MLP has a gate, and its blocks may be parallel. Nemotron's has none, and its norms' gain is 1 + weight. Placing swaps
norms and the loss.
"""

from typing import Any, ClassVar

from ..kernels.row_ops import LayerNorm
from .reader import LayerNormReader, UngatedReader
from .registry import Maker

SWAPS: dict[str, Maker] = {}


class StableLMReader(LayerNormReader):
    READS = frozenset({"layer_norm_eps", "use_qkv_bias", "use_parallel_residual", "hidden_dropout"})


class NemotronReader(UngatedReader):
    READS = frozenset({"norm_eps"})
    LAYERS: ClassVar[tuple[str, str]] = ("up_proj", "down_proj")

    def norm(self, module: Any) -> LayerNorm:
        return super().norm(module)._replace(offset=1.0)


DECODING: dict[str, Any] = {"StableLmForCausalLM": StableLMReader, "NemotronForCausalLM": NemotronReader}
