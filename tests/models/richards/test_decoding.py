"""Texts token by token: by the fused kernels where they know the parts, else by the model's own layers."""

import pytest
import torch

import gpubound as gb
from tests.decode.cases import assert_greedy
from tests.messages import message

from .test_model import inputs, made, reference_kernels  # noqa: F401

WAYS = {
    "fused": {},
    "without positions": {"rope": False},
    "experts": {"mlp": "moe", "experts": 5},
    "own layers": {"fused": False},
    "polynomial": {"attention": "poly", "gates": True, "window": 4},
    "richards": {"mlp": "richards_glu"},
    "dynamic tanh": {"norm": "dyt"},
    "recurrent": {"attention": "rg_lru"},
    "experts, own layers": {"mlp": "moe", "experts": 5, "fused": False},
}

FUSED = ("fused", "without positions", "experts")


def greedy(model, ids, count):
    """`count` tokens behind ids (T,), the whole text read anew for each."""
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids[None])[0, -1].argmax()[None]])
    return ids[-count:].tolist()


@pytest.mark.parametrize("name", WAYS)
def test_tokens_are_those_of_the_whole_text_read_anew(name):
    options = dict(WAYS[name])
    fused = options.pop("fused", True)
    model = made(torch.float32, **options).eval()
    texts = [ids[:length] for ids, length in zip(inputs(model, 3), (9, 4, 1))]
    fast = gb.decoder(model, 3, 32, fused=fused)
    assert (fast.path == "") == (fused and name in FUSED)
    got = assert_greedy(fast, [ids.tolist() for ids in texts], 8)
    assert fast.generate([texts[2].tolist()], max_new_tokens=8, stop=()).tokens == got[2:]
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(-1)  # the next request reads the weights as they are now
    assert assert_greedy(fast, [texts[0].tolist()], 8) != got[:1]
    scores = model(texts[0][None])[0].log_softmax(-1)[:-1].gather(-1, texts[0][1:, None])[:, 0]
    assert fast.score([texts[0].tolist()])[0] == pytest.approx(scores.tolist(), abs=1e-4)


def test_bytes_of_a_step():
    """The head, two layers without six of eight experts, what three places keep; the table is no product."""
    model = made(torch.float32, mlp="moe", experts=8, slots=2, norm="dyt").eval()
    body = gb.decoder(model, 1, 16, verify=False).body
    experts = 2 * 3 * 24 * 20 * 8
    whole = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel()
    assert body.bytes_a_step([3]) == 4 * (whole - experts * 6 // 8 + 3 * 2 * 2 * 2 * 6)


def test_what_is_not_decoded():
    model = made(torch.float32, causal=False)
    with pytest.raises(ValueError) as error:
        gb.decoder(model, 1, 16)
    why = "its tokens attend to later tokens (causal=False)"
    assert str(error.value) == message("models/richards/decoding:what_is_not_decoded", why)
