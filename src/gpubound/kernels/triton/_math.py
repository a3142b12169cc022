"""Arithmetic that several kernels share, in few instructions: kernels that move 4 to 6 bytes an element have about 30 for it.

Compiled for compute capability 9.0, tl.exp takes 5 instructions and tl.exp2 one; 1 / x takes 8 (it scales x into range and
back), rsqrt(x)² two. A unit's worth of digits is left out: rsqrt is good to 2^-22.9, its square to 3e-7.
"""

import triton
import triton.language as tl


@triton.jit
def reciprocal(x):
    """1 / x for x >= 1, infinity included (0)."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(−z)); where exp is infinite, 0."""
    return reciprocal(1.0 + tl.exp2(-1.4426950408889634 * z))  # 1 / ln 2


@triton.jit
def add_both(a, b, c, d):
    """For tl.reduce over two tensors at once: half the barriers of two sums."""
    return a + c, b + d


@triton.jit
def capped(x, CAP: tl.constexpr):
    """CAP · tanh(x / CAP)."""
    e = tl.exp(-2.0 / CAP * tl.abs(x))
    y = CAP * (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -y, y)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """One of decode_product.ACTIVATED of fp32 x."""
    if ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)  # a NaN stays
    elif ACTIVATION == "relu2":
        y = tl.where(x < 0.0, 0.0, x * x)
    elif ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh u) / 2 = sigmoid(2u)
        y = x / (1.0 + tl.exp(-x * (1.5957691216057308 + 0.07135481282636 * x * x)))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y
