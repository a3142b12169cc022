"""The parts of a decoder, as thin modules over the kernels' doors.

Children carry Hugging Face's names, so checkpoints fit both ways.
"""

from .attention import Attention as Attention, RopeTable as RopeTable, RotaryAngles as RotaryAngles
from .block import MLP as MLP, Block as Block, RMSNorm as RMSNorm, run_blocks as run_blocks
from .embedding_and_head import LMLoss as LMLoss, look_up as look_up, shift as shift
from .fused_weights import Stacked as Stacked
from .invariant import BatchInvariant as BatchInvariant
from .linear_product import fused_linear as fused_linear, linear as linear
from .moe import MoE as MoE
