"""Qwen3-Next, and Qwen3.5 with experts: the layers of Qwen3.5, and sparse MLPs with a shared expert, as Qwen2-MoE has.

Placing swaps norms and layers of the delta rule; all else stays that of transformers.
"""

from functools import partial
from typing import Any

from ..kernels.decode_product import Norm
from .hf_modules import HFShiftedNorm, norm
from .hybrids import gated_delta
from .mixtral import SparseReader
from .qwen3_5 import INPUTS, DeltaReader
from .reader import HFAngles, weight_of
from .registry import Maker, Swap

GROUPED = ("in_proj_qkvz", "in_proj_ba")


def delta_layer(module: Any, stack: Any) -> Swap:
    grouped = hasattr(module, GROUPED[0])
    return gated_delta(module, stack, GROUPED if grouped else INPUTS, grouped)


SWAPS: dict[str, Maker] = {"RMSNorm": partial(norm, part=HFShiftedNorm), "GatedDeltaNet": delta_layer}


class SparseDeltaReader(DeltaReader, SparseReader):
    READS = DeltaReader.READS | SparseReader.READS

    def mlp_norms(self, block: Any) -> list[Any]:
        """Return the norms around the MLP. The experts' kernels take a gain, which is a copy in fp32."""
        before, after = super().mlp_norms(block)
        gain = self.copies.of(weight_of(getattr(block, self.NORMS[2] or "")), lambda weight: 1 + weight.float())
        return [Norm(gain, before.eps, 0.0), after]


class NextReader(SparseDeltaReader):
    ANGLES = HFAngles
    INPUTS = GROUPED
    GROUPED = True


DECODING: dict[str, Any] = {"Qwen3NextForCausalLM": NextReader, "ForCausalLM": SparseDeltaReader}
