"""Scan over the chunks of a linear recurrence: what is left to do token after token once each chunk has been solved by itself.

    new = u - w S,   o = q S + p new,   S = decay S + kᵀ new

for each chunk of L tokens: the gated delta rule (delta_rule.py), and without w Mamba-2 (mamba.py).

Legend: B sequences of T tokens, H heads, R = B H rows, n chunks, L tokens a chunk, D width of a key, E of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import implementation
from .registry import definition, draw

CHUNK = 64  # tokens of a chunk


def chunk_scan(
    u: Tensor, w: Tensor | None, q: Tensor, p: Tensor, k: Tensor, decay: Tensor, state: Tensor, precise: bool = True
) -> tuple[Tensor, Tensor]:
    """Outputs o (R, n, L, E), and the states (R, D, E) after the last chunk.

    u      (R, n, L, E)
    w      (R, n, L, D), or None: what is written does not depend on the state
    q, k   (R, n, L, D)
    p      (R, n, L, L): zeros above the diagonal
    decay  (R, n): the share of a state that is left after a chunk
    state  (R, D, E)
    precise  False: the kernel multiplies in tf32, enough for what comes from 16 bits
    """
    R, n, L, E = u.shape
    D = q.shape[-1]
    sizes = {"q": (q, (R, n, L, D)), "p": (p, (R, n, L, L)), "k": (k, (R, n, L, D)), "decay": (decay, (R, n))}
    sizes |= {"state": (state, (R, D, E))} | ({} if w is None else {"w": (w, (R, n, L, D))})
    for name, (t, size) in sizes.items():
        if t.shape != size or t.dtype != u.dtype or t.device != u.device:
            raise ValueError(
                f"chunk_scan: {name} must be {size} {u.dtype} on {u.device} to match u, got {tuple(t.shape)} {t.dtype} on "
                f"{t.device}; reshape or cast it before the call."
            )
    unable = None if L in (16, 32, 64) else f"its kernel takes chunks of 16, 32 or 64 tokens, not {L}"
    return implementation("chunk_scan", u, unable, (w is not None, D, E, L, precise))(u, w, q, p, k, decay, state, precise)


def _example(g: torch.Generator, reads: bool = True, D: int = 16, E: int = 24, L: int = 16, precise: bool = True) -> tuple:
    """Two rows of three chunks."""
    u, q, k = draw(g, 2, 3, L, E), draw(g, 2, 3, L, D), draw(g, 2, 3, L, D)
    w = draw(g, 2, 3, L, D).detach().mul(D**-1.0).requires_grad_() if reads else None
    p = draw(g, 2, 3, L, L).detach().tril().requires_grad_()
    return u, w, q, p, k, draw(g, 2, 3).detach().sigmoid().requires_grad_(), draw(g, 2, D, E), precise


@definition(_example, tf32=lambda *shape: shape[-1:] == (False,))
def chunk_scan_reference(
    u: Tensor, w: Tensor | None, q: Tensor, p: Tensor, k: Tensor, decay: Tensor, state: Tensor, precise: bool = True
) -> tuple[Tensor, Tensor]:
    compute_dtype = torch.promote_types(u.dtype, torch.float32)
    u, q, p, k, decay, S = (t.to(compute_dtype) for t in (u, q, p, k, decay, state))
    w, outputs = None if w is None else w.to(compute_dtype), []
    for chunk in range(u.shape[1]):
        new = u[:, chunk] if w is None else u[:, chunk] - w[:, chunk] @ S
        outputs.append(q[:, chunk] @ S + p[:, chunk] @ new)
        S = S * decay[:, chunk, None, None] + k[:, chunk].transpose(-1, -2) @ new
    return torch.stack(outputs, 1).to(state.dtype), S.to(state.dtype)


def in_chunks(g: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return tensors (B, T, H, ...) in chunks (B, H, n, L, ...), padded by zeros, which neither forget nor write; and of logs
    of decays g (B, T, H) the log of what each token leaves of a state, and what it leaves (..., L, L) of each token's write."""
    pad = -g.shape[1] % CHUNK
    padded = (F.pad(t, (*[0, 0] * (t.dim() - 2), 0, pad)) if pad else t for t in (g, *tensors))
    g, *split = (t.transpose(1, 2).unflatten(2, (-1, CHUNK)) for t in padded)
    total = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, device=g.device, dtype=torch.bool).tril()
    return [*split, total, (total[..., None] - total[..., None, :]).masked_fill(~causal, float("-inf")).exp()]


def scan_chunks(
    u: Tensor, w: Tensor | None, q: Tensor, k: Tensor, total: Tensor, left: Tensor, state: Tensor | None, precise: bool
) -> tuple[Tensor, Tensor]:
    """Return o (B, n L, H, E) and the last states (B, H, D, E) of chunks by `in_chunks`. state: None begins with zeros"""
    (B, H, *_, E), D = u.shape, q.shape[-1]
    scores, q = q @ k.transpose(-1, -2) * left, q * total.exp()[..., None]
    k, decay = k * (total[..., -1:] - total).exp()[..., None], total[..., -1].exp()
    S = u.new_zeros(B, H, D, E) if state is None else state.to(u.dtype)
    u, q, scores, k, decay, S = (t.flatten(0, 1) for t in (u, q, scores, k, decay, S))
    o, S = chunk_scan(u, None if w is None else w.flatten(0, 1), q, scores, k, decay, S, precise)
    return o.view(B, H, -1, E).transpose(1, 2), S.view(B, H, D, E)
