"""Kinds of packed weights that hold published numbers: what `pack_levels` keeps, and what is dequantised."""

import pytest
import torch

from gpubound.kernels.packed_weights import TABLE, join_packed, pack_levels, unpack
from gpubound.kernels.registry import load

from .cases import SOURCES
from .test_quantized_product import ROUNDED, weight

PUBLISHED = [kind for kind in TABLE if kind not in ROUNDED]
LEVELS = [kind for kind, about in TABLE.items() if about.values == "level"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("columns", [96, 384])
def test_published_levels_are_kept_bit_for_bit(device, kind, columns, dtype):
    about, generator = TABLE[kind], torch.Generator().manual_seed(0)
    levels = torch.randint(1 << about.bits, (6, columns), generator=generator, dtype=torch.uint8)
    groups = columns // (2 * about.group) if columns % (2 * about.group) == 0 else 1
    scale = torch.randn(6, groups, generator=generator).to(dtype)
    offset = torch.randn(6, groups, generator=generator) if about.offset else None
    packed = pack_levels(levels.to(device), scale.to(device), kind, None if offset is None else offset.to(device))
    each = scale.double().repeat_interleave(columns // groups, 1)
    less = 0.0 if offset is None else offset.double().repeat_interleave(columns // groups, 1)
    # of fp32's product and difference
    wanted = ((levels.double() - about.zero) * each).float().double() - less
    assert torch.equal(unpack(packed).cpu(), wanted.float())


@pytest.mark.parametrize("kind", PUBLISHED)
def test_dequantised_numbers_are_those_of_the_definition(device, kind):
    packed = weight(device, kind, 12, 640)
    out = [load(s, "dequantize")(packed, torch.zeros(12, packed.columns, device=device), 2) for s in SOURCES]
    # A kernel may compute level · scale - offset with one rounding.
    error = (out[0] - out[1]).abs().max() / out[1].abs().max()
    assert error <= (2e-7 if TABLE[kind].offset else 0.0)


@pytest.mark.parametrize("kind", ["uint4", "fp8_rows", "nf4"])
def test_rows_below_each_other_are_one_weight(device, kind):
    parts = [weight(device, kind, rows, 256, seed=rows) for rows in (8, 4)]
    if kind == "nf4":
        parts[1] = parts[1]._replace(extra=parts[0].extra)
    joined = join_packed(parts)
    assert torch.equal(unpack(joined), torch.cat([unpack(part) for part in parts]))
    assert torch.equal(unpack(joined.part(slice(8, 12))), unpack(parts[1]))


def test_groups_that_do_not_fit_are_refused():
    levels = torch.zeros(4, 128, dtype=torch.uint8)
    with pytest.raises(ValueError, match="got 8 a row of 128 columns"):
        pack_levels(levels, torch.ones(4, 8), "int4_32")
    with pytest.raises(ValueError, match="kind"):
        pack_levels(levels, torch.ones(4, 1), "uint4")
