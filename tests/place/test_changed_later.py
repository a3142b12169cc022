"""What is changed on a placed model changes what it computes, as on one that is not placed."""

import pytest
import torch

from .models import assert_close, batch, place, placed, tiny, tokens, training_run, twin


def set_eps(model):
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            setattr(module, "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps", 0.5)


def of_attention(name, value):
    def change(model):
        setattr(model.model.layers[0].self_attn, name, value)

    return change


def of_config(name, value):
    return lambda model: setattr(model.config, name, value)


def of_dropouts(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5


class Turned(torch.nn.Module):
    """Another rotary_emb."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def forward(self, x, position_ids, *layer_type):
        return self.other(x, position_ids * 2, *layer_type)


def other_rotary(model):
    model.model.rotary_emb = Turned(model.model.rotary_emb)


def hooked_rotary(model):
    model.model.rotary_emb.register_forward_hook(lambda module, given, found: (found[0] * 0.5, found[1] * 0.5))


def patched_rotary(model):
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda *args, **kwargs: tuple(t * 0.5 for t in forward(*args, **kwargs))


def other_scaling(name):
    return lambda model: setattr(model.model.rotary_emb, name, 2.0)


class Wrapped(torch.nn.Module):
    """A layer inside another module, as torch's CheckpointWrapper has it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.layer_type = getattr(layer, "layer_type", None)

    def forward(self, x, *args, **kwargs):
        return self.layer(x, *args, **kwargs) * 0.5


def wrapped_layer(model):
    model.model.layers[0] = Wrapped(model.model.layers[0])


def layer_of_another_class(model):
    kind = type(model.model.layers[0])
    forward = lambda self, *args, **kwargs: kind.forward(self, *args, **kwargs) * 0.5  # noqa: E731
    model.model.layers[0].__class__ = type("Halved", (kind,), {"forward": forward})


def of_another_class(path):
    """The module there gets a class of its own, below the one that it has."""

    def change(model):
        module = model.get_submodule(path)
        kind = type(module)
        forward = lambda self, *args, **kwargs: shifted(kind.forward(self, *args, **kwargs))  # noqa: E731
        module.__class__ = type(kind.__name__, (kind,), {"forward": forward})

    return change


def shifted(found):
    return (shifted(found[0]), *found[1:]) if isinstance(found, tuple) else found * 0.5 + 0.1


def swapped_layers(model):
    model.model.layers = torch.nn.ModuleList(reversed(model.model.layers))


def narrowed(layer, rows, columns=slice(None)):
    """The layer with some of its rows and columns alone."""
    weight, bias = layer.weight.detach()[rows][:, columns], layer.bias
    other = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        other.weight.copy_(weight)
        if bias is not None:
            other.bias.copy_(bias[rows])
    return other


def pruned_heads(model):
    """Layer 0 keeps the first key head of two, and the two query heads that read it."""
    attention = model.model.layers[0].self_attn
    wide, narrow = slice(2 * attention.head_dim), slice(attention.head_dim)
    attention.q_proj, attention.k_proj = narrowed(attention.q_proj, wide), narrowed(attention.k_proj, narrow)
    attention.v_proj, attention.o_proj = narrowed(attention.v_proj, narrow), narrowed(attention.o_proj, slice(None), wide)


def pruned_query_heads(model):
    """Layer 0 has one query head for each key head."""
    attention = model.model.layers[0].self_attn
    kept = torch.arange(4 * attention.head_dim).view(4, -1)[::2].flatten()
    attention.q_proj, attention.o_proj = narrowed(attention.q_proj, kept), narrowed(attention.o_proj, slice(None), kept)
    attention.num_key_value_groups = 1


def pruned_heads_of_phi3(model):
    model.config.num_attention_heads = 2
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.num_key_value_heads = attention.config.num_key_value_heads = 1
        rows = torch.arange(8 * attention.head_dim).view(8, -1)[[0, 1, 4, 6]].flatten()
        attention.qkv_proj = narrowed(attention.qkv_proj, rows)
        attention.o_proj = narrowed(attention.o_proj, slice(None), slice(2 * attention.head_dim))


def pruned_mlp(model):
    mlp, kept = model.model.layers[0].mlp, slice(24)
    mlp.gate_proj, mlp.up_proj = narrowed(mlp.gate_proj, kept), narrowed(mlp.up_proj, kept)
    mlp.down_proj = narrowed(mlp.down_proj, slice(None), kept)


CHANGES = {
    "heads pruned": ("llama", pruned_heads),
    "heads pruned, with biases": ("llama biased", pruned_heads),
    "heads pruned of qwen3": ("qwen3", pruned_heads),
    "heads pruned of smollm3": ("smollm3", pruned_heads),
    "heads pruned of phi3": ("phi3", pruned_heads_of_phi3),
    "query heads pruned": ("llama", pruned_query_heads),
    "query heads pruned of gemma2": ("gemma2", pruned_query_heads),
    "MLP pruned": ("llama", pruned_mlp),
    "eps of llama": ("llama", set_eps),
    "eps of qwen3, heads too": ("qwen3", set_eps),
    "eps of gemma": ("gemma", set_eps),
    "eps of olmo2": ("olmo2", set_eps),
    "is_causal": ("llama", of_attention("is_causal", False)),
    "is_causal of phi3": ("phi3", of_attention("is_causal", False)),
    "attention_dropout": ("llama", of_attention("attention_dropout", 0.5)),
    "attention_dropout of gemma2": ("gemma2", of_attention("attention_dropout", 0.5)),
    "use_rope": ("smollm3", of_attention("use_rope", 0)),
    "rotary_emb put in": ("llama", other_rotary),
    "rotary_emb put in to gemma3": ("gemma3", other_rotary),
    "hook on rotary_emb": ("llama", hooked_rotary),
    "forward patched onto rotary_emb": ("gemma3", patched_rotary),
    "attention_scaling of rotary_emb": ("llama", other_scaling("attention_scaling")),
    "attention_scaling of gemma3's": ("gemma3", other_scaling("full_attention_attention_scaling")),
    "layer wrapped": ("llama", wrapped_layer),
    "layer wrapped in olmo2": ("olmo2", wrapped_layer),
    "layer of another class": ("llama", layer_of_another_class),
    "mlp of another class": ("llama", of_another_class("model.layers.0.mlp")),
    "attention of another class": ("llama", of_another_class("model.layers.0.self_attn")),
    "attention of another class in gemma2": ("gemma2", of_another_class("model.layers.1.self_attn")),
    "norm of another class": ("qwen3", of_another_class("model.layers.0.input_layernorm")),
    "norm behind a part of another class": ("olmo2", of_another_class("model.layers.0.post_feedforward_layernorm")),
    "final norm of another class": ("phi3", of_another_class("model.norm")),
    "rotary_emb of another class": ("llama", of_another_class("model.rotary_emb")),
    "layers by turns": ("gemma3", swapped_layers),
    "sliding_window of mistral": ("mistral", of_config("sliding_window", 4)),
    "sliding_window of phi3": ("phi3", of_config("sliding_window", 4)),
    "layer_types": ("gemma3", of_config("layer_types", ["full_attention"] * 2)),
    "is_causal of the config": ("llama", of_config("is_causal", False)),
    "use_bidirectional_attention": ("gemma3", of_config("use_bidirectional_attention", True)),
    "final_logit_softcapping": ("gemma2", of_config("final_logit_softcapping", 1.0)),
    "dropout of blocks": ("phi3", of_dropouts),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_heeded(name):
    kind, change = CHANGES[name]
    model, other = map(twin, placed(kind)[:2])
    before = training_run(model, batch())["loss"]
    for each in (model, other):
        change(each)
    torch.manual_seed(0)
    want = training_run(other, batch())
    torch.manual_seed(0)
    got = training_run(model, batch())
    assert abs(want["loss"] - before) > 1e-4, "the change changes something"
    assert_close(got, want)
    with torch.no_grad():
        logits = [each.eval()(tokens(), use_cache=False).logits for each in (model, other)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


PATCHED = {
    "mlp": ("llama", "model.layers.0.mlp"),
    "attention": ("llama", "model.layers.0.self_attn"),
    "attention of gemma2": ("gemma2", "model.layers.0.self_attn"),
    "norms": ("qwen3", "model.norm"),
    "layers": ("llama", "model.layers.0"),
    "rotary_emb": ("llama", "model.rotary_emb"),
    "trunk": ("llama", "model"),
    "model": ("llama", ""),
}


@pytest.mark.parametrize("name", PATCHED)
def test_a_forward_set_on_a_class_is_heeded(name, monkeypatch):
    """As libraries of kernels do, for all models of a family."""
    kind, path = PATCHED[name]
    model, plain, placement = placed(kind)
    before, counted = training_run(model, batch())["loss"], placement.fallbacks
    patched = type(plain.get_submodule(path))
    forward = patched.forward

    def changed(self, *args, **kwargs):
        found = forward(self, *args, **kwargs)
        for part in ("loss", "last_hidden_state"):
            if getattr(found, part, None) is not None:
                found[part] = shifted(found[part])
                return found
        return shifted(found)

    monkeypatch.setattr(patched, "forward", changed)
    want = training_run(plain, batch())
    assert abs(want["loss"] - before) > 1e-4
    assert_close(training_run(model, batch()), want)
    assert placement.fallbacks > counted
    assert any("forward" in why or "rotary_emb" in why for row in placement.rows for why in row.reasons)
    monkeypatch.undo()
    torch.testing.assert_close(training_run(model, batch())["loss"], before)


def test_a_call_for_hidden_states_slows_no_later_call():
    """transformers leaves hooks on the layers, which do nothing in other calls."""
    model = tiny()
    placement = place(model, "cpu")
    ids = tokens()
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        assert not placement.fallbacks
        states = model(ids, use_cache=False, output_hidden_states=True).hidden_states
        assert placement.fallbacks and any(layer._forward_hooks for layer in model.model.layers)
        before = placement.fallbacks
        got = model(ids, use_cache=False).logits
    assert placement.fallbacks == before and torch.equal(got, wanted)
    again = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    assert len(again) == len(states) == 3 and all(torch.equal(a, b) for a, b in zip(again, states))
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)
    model(ids, use_cache=False)
    assert placement.fallbacks > before + 1, "a hook of the user's own still counts"
