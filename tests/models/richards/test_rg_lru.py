"""The recurrent mixer: against plain torch, step by step, inside a block, and what it refuses."""

import pytest
import torch

from gpubound.layers import MLP, Block
from gpubound.models.richards.layers import RGLRU
from tests.messages import message

HIDDEN, WIDTH = 6, 4


def mixer(**options) -> RGLRU:
    torch.manual_seed(0)
    return RGLRU(HIDDEN, WIDTH, dtype=torch.float64, **options)


def x_of(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plain(m: RGLRU, x):
    """Token by token, by the modules as torch calls them."""
    h, out = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype), []
    for token in x.unbind(1):
        a = torch.sigmoid(m.decay) ** (8 * torch.sigmoid(m.r_proj(token)))
        h = a * h + (1 - a**2).sqrt() * torch.sigmoid(m.i_proj(token)) * m.x_proj(token)
        out.append(m.o_proj(h))
    return torch.stack(out, 1)


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_formula_with_all_gradients(bias):
    m, x = mixer(bias=bias), x_of(2, 5, HIDDEN).requires_grad_()
    got, want = m.mix(x), plain(m, x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    leaves, upstream = [x, *m.parameters()], x_of(2, 5, HIDDEN)
    for a, b in zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


def test_steps_go_on_where_the_text_ended():
    m, x = mixer(), x_of(2, 7, HIDDEN)
    whole = m.mix(x)
    first, state = m.step(x[:, :4], None)
    parts = [first]
    for t in range(4, 7):
        y, state = m.step(x[:, t : t + 1], state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-12)


def test_a_row_that_is_padded_has_the_state_behind_its_own_tokens():
    m, x = mixer(), x_of(3, 7, HIDDEN)
    lengths = torch.tensor([7, 2, 0])
    _, states = m.step(x, None, lengths)
    for row, length in enumerate(lengths.tolist()):
        want = m.step(x[row : row + 1, :length], None)[1][0] if length else torch.zeros(WIDTH)
        torch.testing.assert_close(states[row], want.to(states.dtype), rtol=1e-12, atol=1e-12)


def test_a_token_sees_none_behind_it():
    m, x = mixer(), x_of(1, 6, HIDDEN)
    other = x.clone()
    other[:, 4] += 1
    before, after = m.mix(x), m.mix(other)
    assert torch.equal(before[:, :4], after[:, :4]) and (before[:, 4:] != after[:, 4:]).all()


def test_at_first_a_channel_keeps_what_griffins_do():
    kept = torch.sigmoid(RGLRU(8, 4000).decay) ** 8
    assert 0.9 <= kept.min() < 0.91 and 0.998 < kept.max() <= 0.999 + 1e-6 and 0.94 < kept.mean() < 0.96


def test_it_stands_in_a_block():
    block = Block(mixer(), MLP(HIDDEN, 8, dtype=torch.float64), HIDDEN, dtype=torch.float64)
    x = x_of(2, 5, HIDDEN)
    h = x + plain(block.self_attn, block.input_layernorm(x))
    torch.testing.assert_close(block(x, None), h + block.mlp(block.post_attention_layernorm(h)), rtol=1e-9, atol=1e-12)


def test_a_mask_is_refused():
    with pytest.raises(ValueError) as error:
        mixer().mix(x_of(1, 2, HIDDEN), None, torch.ones(2, 2))
    assert str(error.value) == message("layers/rg_lru:a_mask_is_refused")
