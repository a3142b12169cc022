"""The recurrent mixer: padded rows, its first weights, and what it refuses. test_model.py has its formula."""

import pytest
import torch

from gpubound.models.richards.kernels import rg_lru
from gpubound.models.richards.layers import RGLRU
from tests.messages import message

HIDDEN, WIDTH = 6, 4


def mixer(**options) -> RGLRU:
    torch.manual_seed(0)
    return RGLRU(HIDDEN, WIDTH, dtype=torch.float64, **options)


def x_of(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_projections_without_biases():
    m, x = mixer(bias=False), x_of(2, 5, HIDDEN)
    projected = torch.cat([p(x) for p in (m.x_proj, m.r_proj, m.i_proj)], -1)
    torch.testing.assert_close(m.mix(x), m.o_proj(rg_lru(projected, m.decay)[0]), rtol=1e-9, atol=1e-12)


def test_a_row_that_is_padded_has_the_state_behind_its_own_tokens():
    m, x = mixer(), x_of(3, 7, HIDDEN)
    lengths = torch.tensor([7, 2, 0])
    _, states = m.step(x, None, lengths)
    for row, length in enumerate(lengths.tolist()):
        want = m.step(x[row : row + 1, :length], None)[1][0] if length else torch.zeros(WIDTH)
        torch.testing.assert_close(states[row], want.to(states.dtype), rtol=1e-12, atol=1e-12)


def test_at_first_a_channel_keeps_what_griffins_do():
    kept = torch.sigmoid(RGLRU(8, 4000).decay) ** 8
    assert 0.9 <= kept.min() < 0.91 and 0.998 < kept.max() <= 0.999 + 1e-6 and 0.94 < kept.mean() < 0.96


def test_a_mask_is_refused():
    with pytest.raises(ValueError) as error:
        mixer().mix(x_of(1, 2, HIDDEN), None, torch.ones(2, 2))
    assert str(error.value) == message("layers/rg_lru:a_mask_is_refused")
