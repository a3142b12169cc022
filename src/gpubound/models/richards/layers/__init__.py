"""The layers that only the Richards family needs."""

from .dynamic_tanh import DynamicTanh as DynamicTanh, RichardsNorm as RichardsNorm
from .poly_attention import PolyAttention as PolyAttention
from .rg_lru import RGLRU as RGLRU
from .richards import RichardsCurve as RichardsCurve, RichardsGLU as RichardsGLU
