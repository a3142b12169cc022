"""The ops that only the Richards family needs, as plain functions; each kernel is in triton/ under the same name."""

from .dynamic_tanh import (
    add_dynamic_tanh as add_dynamic_tanh,
    add_richards_norm as add_richards_norm,
    dynamic_tanh as dynamic_tanh,
    richards_norm as richards_norm,
)
from .poly_attention import poly_attention as poly_attention, poly_attention_step as poly_attention_step
from .rg_lru import rg_lru as rg_lru
from .richards import (
    Curve as Curve,
    richards as richards,
    richards_glu as richards_glu,
    richards_glu_backward as richards_glu_backward,
)
