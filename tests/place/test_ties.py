"""Weights that are one: tied inside a fused group, between groups, as whole modules, or as tensors over one memory."""

import pytest
import torch

from gpubound.place import candidates
from gpubound.place.candidates import Fused

from .models import assert_close, batch, place, rows, tiny, twin


def attention(model, layer=0):
    return model.model.layers[layer].self_attn


def mlp(model, layer=0):
    return model.model.layers[layer].mlp


def tie(one, other, *names):
    for name in names or ("weight",):
        setattr(one, name, getattr(other, name))


def tie_every_projection(m):
    for name in ("q_proj", "k_proj", "v_proj"):
        tie(getattr(attention(m, 1), name), getattr(attention(m, 0), name), "weight", "bias")


INSIDE = {
    "k = v": lambda m: tie(attention(m).k_proj, attention(m).v_proj),
    "q = k = v": lambda m: [tie(p, attention(m).v_proj) for p in (attention(m).q_proj, attention(m).k_proj)],
    "k and v one module": lambda m: setattr(attention(m), "k_proj", attention(m).v_proj),
    "bias of k = v": lambda m: tie(attention(m).k_proj, attention(m).v_proj, "bias"),
    "gate = up": lambda m: tie(mlp(m).gate_proj, mlp(m).up_proj),
    "gate and up one module": lambda m: setattr(mlp(m), "gate_proj", mlp(m).up_proj),
    "bias of gate = up": lambda m: tie(mlp(m).gate_proj, mlp(m).up_proj, "bias"),
}
BETWEEN = {
    "q of two layers": lambda m: tie(attention(m, 1).q_proj, attention(m, 0).q_proj),
    "q, k, v of two layers": tie_every_projection,
    "q of one, k of another": lambda m: tie(attention(m, 1).k_proj, attention(m, 0).q_proj),
    "q and o": lambda m: tie(attention(m).o_proj, attention(m).q_proj),
    "gate of one, up of another": lambda m: tie(mlp(m, 0).gate_proj, mlp(m, 1).up_proj),
    "an MLP in two layers": lambda m: setattr(m.model.layers[1], "mlp", mlp(m, 0)),
    "a norm in two layers": lambda m: setattr(m.model.layers[1], "input_layernorm", m.model.norm),
    "gains of two norms": lambda m: tie(m.model.layers[1].input_layernorm, m.model.norm),
    "head and table": lambda m: tie(m.lm_head, m.model.embed_tokens),
}
ALIASED = {  # torch has no word for these: two Parameters, or a buffer, over one memory
    "k over v": lambda m: setattr(attention(m).k_proj.weight, "data", attention(m).v_proj.weight.data),
    "q over another layer's": lambda m: setattr(attention(m, 1).q_proj.weight, "data", attention(m, 0).q_proj.weight.data),
    "o over q": lambda m: setattr(attention(m).o_proj.weight, "data", attention(m).q_proj.weight.data),
    "a buffer over q": lambda m: mlp(m).register_buffer("seen", attention(m).q_proj.weight.data),
}


def made(how):
    model = tiny("llama biased", num_key_value_heads=4)
    how(model)
    return model


def stepped(model):
    """Two steps of SGD: a tie that was torn shows in the second."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = {}
    for number in range(2):
        loss = model.train()(**batch(seed=number)).loss
        loss.backward()
        found[f"loss {number}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("name", [*INSIDE, *BETWEEN, *ALIASED])
def test_a_tie_trains_as_it_did(name):
    """Layers of a group that share a parameter are called one by one, and tensors over one memory are not moved; the table has
    the reason."""
    how = (INSIDE | BETWEEN | ALIASED)[name]
    model, other = made(how), made(how)
    shared = candidates.shared_memory(model)
    placement = place(model)
    assert placement.verified and placement.swapped >= 8
    table = rows(placement)
    if name in INSIDE:
        (row,) = [r for r in table.values() if "share one parameter" in r.why]
        assert row.module in ("model.layers.0.self_attn", "model.layers.0.mlp")
        assert row.kernel.startswith("separate projections")
        assert isinstance(model.get_submodule(row.module), Fused) and "as one product" in table["model.layers.1.mlp"].kernel
    if name in ALIASED:
        why = {row.why for row in table.values() if "over the same memory" in row.why}
        assert shared and why and all(any(name in reason for name in shared) for reason in why)
        assert candidates.shared_memory(model) == shared
    assert_close(stepped(model), stepped(other))


def test_what_is_no_tie():
    model = tiny("llama tied")
    first = place(model)
    assert not candidates.shared_memory(model), (
        "one Parameter in two modules is one tensor; neighbours in a buffer do not overlap"
    )
    first.undo()
    assert place(model).refused == 0


def test_copies_of_a_placed_model_keep_its_ties():
    model = made(INSIDE["k = v"])
    place(model)
    copied = twin(model)
    assert attention(copied).k_proj.weight is attention(copied).v_proj.weight
    assert_close(stepped(copied), stepped(model))
