"""The scan over chunks: kernel and definition agree, and gradients with those of fp64."""

import pytest
import torch

from gpubound import kernels
from gpubound.kernels.registry import load

from .cases import SOURCES, draw, pairwise, same


def inputs(device, dtype, reads, widths, length, chunks=3, rows=2):
    D, E = widths
    u, w, q, k = (draw(device, dtype, rows, chunks, length, size, seed=at) for at, size in enumerate((E, D, D, D)))
    p = draw(device, dtype, rows, chunks, length, length, seed=5).tril()
    kept, state = draw(device, dtype, rows, chunks, seed=6).sigmoid(), draw(device, dtype, rows, D, E, seed=7)
    return [u, w / D if reads else None, q, p, k / length, kept, state]


@pairwise
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("widths", [(16, 16), (24, 40), (8, 12)])
@pytest.mark.parametrize("length", [16, 64])
@pytest.mark.parametrize("last", [True, False])
def test_outputs_and_gradients(device, reads, widths, length, last):
    """Both mirrors in fp32 against the recurrence in fp64. last: with a gradient of the last state, or of it alone not."""
    arguments = inputs(device, torch.float32, reads, widths, length)
    wide = [None if t is None else t.double().requires_grad_() for t in arguments]
    o, state = load("reference", "chunk_scan")(*wide)
    upstream = draw(device, torch.float32, *o.shape, seed=8), draw(device, torch.float32, *state.shape, seed=9)
    wanted = [t for t in wide if t is not None]
    results = (o, state) if last else (o,)
    want = [o, state, *torch.autograd.grad(results, wanted, [t.double() for t in upstream[: len(results)]])]
    for source in SOURCES:
        fresh = [None if t is None else t.clone().requires_grad_() for t in arguments]
        found = load(source, "chunk_scan")(*fresh)
        gradients = torch.autograd.grad(found[: len(results)], [t for t in fresh if t is not None], upstream[: len(results)])
        for name, got, expected in zip("oSuwqpkgs", [*found, *gradients], want):
            same(f"{source} {name}", got.double(), expected, 1e-5)


def test_other_shapes_are_refused(device):
    u, w, q, p, k, kept, state = inputs(device, torch.float32, True, (8, 12), 16)
    with pytest.raises(ValueError, match="chunk_scan: p must be"):
        kernels.chunk_scan(u, w, q, p[..., :8], k, kept, state)
    with pytest.raises(ValueError, match="chunk_scan: state must be"):
        kernels.chunk_scan(u, w, q, p, k, kept, state.double())
