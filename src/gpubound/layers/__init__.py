"""The parts of a decoder, as thin modules over the kernels' doors.

Children carry Hugging Face's names, so checkpoints fit both ways.
"""

from .attention import Attention as Attention
from .attention import RopeTable as RopeTable
from .attention import RotaryAngles as RotaryAngles
from .block import Block as Block
from .block import run_blocks as run_blocks
from .linear_site import fused_linear as fused_linear
from .linear_site import linear as linear
from .mlp import MLP as MLP
from .norm import RMSNorm as RMSNorm
from .stacked import Stacked as Stacked
from .vocabulary import LMLoss as LMLoss
from .vocabulary import look_up as look_up
from .vocabulary import shift as shift
