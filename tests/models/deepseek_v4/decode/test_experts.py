"""Experts in codes beside the same numbers: for few rows and for many, some experts at a time."""

from types import SimpleNamespace

import pytest
import torch

from gpubound.kernels.decode_product import Norm
from gpubound.kernels.packed_weights import pack_fp4, unpack
from gpubound.models.deepseek_v4.decode import mixture as experts
from gpubound.models.deepseek_v4.decode.mixture import CodedExperts, LiveExperts, experts_of
from tests.messages import message

COUNT, WIDTH, HIDDEN, TOKENS, SLOTS = 5, 32, 64, 11, 3


def both(monkeypatch, at_once: int) -> tuple[LiveExperts, CodedExperts]:
    monkeypatch.setattr(experts, "WIDE", at_once * 3 * WIDTH * HIDDEN)
    generator = torch.Generator().manual_seed(0)

    def packed(rows: int, columns: int):
        codes = torch.randint(256, (COUNT * rows, columns // 2), generator=generator, dtype=torch.uint8)
        return pack_fp4(codes, torch.randint(120, 125, (COUNT * rows, columns // 32), generator=generator, dtype=torch.uint8))

    coded = SimpleNamespace(gate_up=packed(2 * WIDTH, HIDDEN), down=packed(HIDDEN, WIDTH), limit=0.7)
    coded.gate, coded.norm = SimpleNamespace(weight=torch.empty(0)), SimpleNamespace(weight=torch.empty(HIDDEN))
    numbers = {part: unpack(getattr(coded, part)).unflatten(0, (COUNT, -1)) for part in ("gate_up", "down")}
    return experts_of(SimpleNamespace(**vars(coded) | numbers)), experts_of(coded)


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(TOKENS, COUNT, generator=generator).argsort(1)[:, :SLOTS]
    return torch.randn(TOKENS, HIDDEN, generator=generator), ids, torch.rand(TOKENS, SLOTS, generator=generator)


@pytest.mark.parametrize("ungrouped", ["", "not here"])
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_many_rows(at_once, ungrouped, monkeypatch):
    live, coded = both(monkeypatch, at_once)
    assert isinstance(coded, CodedExperts) and not isinstance(live, CodedExperts) and coded.at_once == at_once
    coded.ungrouped = ungrouped or None
    h, ids, shares = drawn()
    wanted = live.many(h, ids, shares)
    torch.testing.assert_close(coded.many(h, ids, shares), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    firsts = [first for first, *_ in coded.numbers()]
    assert firsts == list(range(0, COUNT, at_once)) and message("decode/compressed/experts:many_rows", at_once).within(
        coded.report()[0]
    )


def test_few_rows_and_what_is_counted(monkeypatch):
    live, coded = both(monkeypatch, 5)
    (u, ids, shares), norm = drawn(), Norm(torch.rand(HIDDEN, generator=torch.Generator().manual_seed(2)), 1e-6)
    ids = ids[:3].int()
    found, wanted = (one.few_down(one.few(u[:3], norm, ids), ids, shares[:3]) for one in (coded, live))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    assert coded.count == live.count == COUNT and COUNT * coded.nbytes == sum(t.nbytes for t in coded.tensors())
