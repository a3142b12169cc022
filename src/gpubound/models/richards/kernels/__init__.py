"""Ops of Richards models; each kernel is in triton/ under the same name (kernels/registry.py)."""

from . import plans as plans
from .poly_attention import poly_attention as poly_attention, poly_attention_step as poly_attention_step
from .rg_lru import rg_lru as rg_lru
from .richards import (
    Curve as Curve,
    add_dynamic_tanh as add_dynamic_tanh,
    dynamic_tanh as dynamic_tanh,
    richards as richards,
    richards_glu as richards_glu,
    richards_glu_backward as richards_glu_backward,
)
