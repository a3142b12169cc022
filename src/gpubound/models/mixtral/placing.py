"""How the modules of models with sparse layers are swapped: norms and attention.

The experts, the loop over layers that holds them, and the loss, to which the router's may be added, stay transformers' own.
"""

from ..parts import attention, norm
from ..placing import Maker

SWAPS: dict[str, Maker] = {"RMSNorm": norm, "Attention": attention}
