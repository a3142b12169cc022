"""The parts of a decoder, as thin modules over the kernels' doors.

Children carry Hugging Face's names, so checkpoints fit both ways.
"""

from .attention import Attention as Attention
from .attention import attend as attend
from .block import Block as Block
from .block import run_block as run_block
from .block import run_blocks as run_blocks
from .embedding import look_up as look_up
from .head import LMLoss as LMLoss
from .head import lm_loss as lm_loss
from .head import shift as shift
from .linear_site import fused_linear as fused_linear
from .linear_site import linear as linear
from .mlp import MLP as MLP
from .norm import RMSNorm as RMSNorm
from .rope import RopeTable as RopeTable
from .rope import RotaryAngles as RotaryAngles
from .stacked import Stacked as Stacked
