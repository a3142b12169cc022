"""Sparse attention: the definition is transformers' attention, kernels agree, what is not seen is not read, parts combine."""

from types import SimpleNamespace

import pytest
import torch

from gpubound.kernels import plans
from gpubound.kernels.plans.types import MatrixPlan
from gpubound.kernels.registry import OPS, load
from gpubound.models.deepseek_v4 import kernels
from tests.kernels.cases import TOLERANCE, assert_inside, banded, draw, same

from .theirs import theirs

FP32, NAN = torch.float32, float("nan")
BOTH = ("triton", "reference")
FORMS = {"ring": (48, False, False, False), "chosen": (24, True, True, True), "limit": (64, True, False, True)}


def some_ids(device, *rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, device=device, dtype=torch.int32)


@pytest.mark.parametrize("source", BOTH)
@pytest.mark.parametrize("form", ["ring", "chosen", "limit"])
def test_it_is_transformers_attention(form, source, device, monkeypatch):
    """One token at position 20 that sees 7 near ones, and of 9 entries some; all others are NaN. One key a tile, so that the
    parts of many programs are combined."""
    monkeypatch.setitem(plans.TRIED, ("sparse_attention", "", (3, 16)), MatrixPlan(16, 16, 4))
    H, D, position, window, slots = 3, 16, 20, 7, 8
    cpu = torch.device("cpu")
    q, near, store, sinks = (draw(cpu, FP32, *s, seed=i) for i, s in enumerate(((1, H, D), (window, D), (1, 40, D), (H,))))
    ring = torch.full((1, slots, D), NAN)
    ring[0, torch.arange(position - window + 1, position + 1) % slots] = near
    seen = {"ring": [], "chosen": [0, 3, 5, 39], "limit": list(range(33))}[form]
    entries, store = store[0, seen].clone(), store.clone()
    store[0, [s for s in range(40) if s not in seen]] = NAN
    angle = torch.arange(24)[:, None] * torch.tensor([1.0, 0.3, 0.1])
    module = SimpleNamespace(num_key_value_groups=H, sinks=sinks, training=False)
    key = torch.cat([near, entries])[None, None]
    want, _ = theirs().eager_attention_forward(module, q.transpose(0, 1)[None], key, key, None, 0.25)
    cos, sin = angle[position].cos(), angle[position].sin()
    want = theirs().apply_rotary_pos_emb(want, cos[None, None], -sin[None, None], unsqueeze_dim=2)[0]

    whole, out = banded((1, H, D), device)
    given = {
        "ring": (None, None, None),
        "chosen": (store.to(device), some_ids(device, [0, 3, 5, 39, -1, -1]), None),
        "limit": (store.to(device), None, torch.tensor([33], device=device, dtype=torch.int32)),
    }[form]
    at = torch.tensor([position], device=device, dtype=torch.int32)
    tables = angle.cos().to(device), angle.sin().to(device)
    load(source, "sparse_attention")(q.to(device), at, ring.to(device), window, sinks.to(device), 0.25, out, *given, *tables)
    assert_inside(whole, out)
    same("out", out, want.to(device), 1e-5)  # on a GPU, of three tf32 products


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_matches(form, dtype, device):
    """Rows of two tokens: a full ring, one at the beginning, a place that is none, and ids all -1."""
    results = []
    for source in BOTH:
        given = OPS["sparse_attention"].example(torch.Generator().manual_seed(0), *FORMS[form])
        moved = [
            t.detach().to(device, dtype) if isinstance(t, torch.Tensor) and t.requires_grad
            else t.to(device) if isinstance(t, torch.Tensor) else t
            for t in given
        ]  # fmt: skip
        results.append(load(source, "sparse_attention")(*moved))
    same("out", *results, max(TOLERANCE[dtype], 1e-5))
    assert results[0][3].eq(0).all(), "a token at no place"


def test_a_sink_takes_its_share(device):
    """One key of equal logit: the result is half of it; a sink far above takes all."""
    q, ring = torch.zeros(1, 2, 16, device=device), torch.ones(1, 4, 16, device=device)
    for source in BOTH:
        out = torch.zeros(1, 2, 16, device=device)
        at, sinks = torch.zeros(1, device=device, dtype=torch.int32), torch.tensor([0.0, 90.0], device=device)
        load(source, "sparse_attention")(q, at, ring, 4, sinks, 1.0, out)
        same("out", out[0, 0], torch.full((16,), 0.5, device=device), 1e-6)
        assert out[0, 1].abs().max() < 1e-30


def test_a_token_gives_the_same_bits_in_any_batch(device):
    given = OPS["sparse_attention"].example(torch.Generator().manual_seed(0), 32)
    q, position, ring, window, sinks, scale, out, store, ids, limit, *angles = (
        t.detach().to(device) if isinstance(t, torch.Tensor) else t for t in given
    )
    call = load("triton", "sparse_attention")
    together = call(q, position, ring, window, sinks, scale, out, store, ids, limit, *angles).clone()
    for n in range(4):
        own = [t[n : n + 1].contiguous() for t in (q, position, ids)]
        row = slice(n // 2, n // 2 + 1)
        alone = call(own[0], own[1], ring[row], window, sinks, scale, out[:1], store[row], own[2], None, *angles)
        assert alone.equal(together[n : n + 1])


WRONG = {
    "window must be from 1 to 3, got 4": {"window": 4},
    "a store goes with either ids or limit, got store": {"store": torch.ones(1, 5, 8)},
    "cos and sin go together": {"cos": torch.ones(3, 2)},
    "cos has 5 pairs, a head of 8 at most 4": {"cos": torch.ones(3, 5), "sin": torch.ones(3, 5)},
}


@pytest.mark.parametrize("named", WRONG)
def test_wrong_arguments(named):
    right = {
        "q": torch.ones(2, 3, 8), "position": torch.zeros(2, dtype=torch.int32), "ring": torch.ones(1, 4, 8), "window": 3,
        "sinks": torch.ones(3), "scale": 1.0, "out": torch.ones(2, 3, 8),
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^sparse_attention: {named}"):
        kernels.sparse_attention(**right | WRONG[named])
