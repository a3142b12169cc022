"""What decoding does to where the weights lie: for many rows, what reads one input lies side by side; the parameters stay."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_model

import gpubound as gb
from tests.messages import message

from . import cases


def spans(model, *names: str) -> list[tuple[int, int]]:
    weights = [model.get_parameter(f"model.layers.1.{name}.weight") for name in names]
    return [(w.data_ptr(), w.data_ptr() + w.nbytes) for w in weights]


def adjoin(found: list[tuple[int, int]]) -> bool:
    return all(end == begin for (_, end), (begin, _) in pairwise(found))


QKV = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
GATE_UP = "mlp.gate_proj", "mlp.up_proj"


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_many_rows_bring_neighbours_together(kind, tmp_path):
    model = cases.build(kind)
    before, places = {k: v.clone() for k, v in model.state_dict().items()}, dict(model.named_parameters())
    assert not adjoin(spans(model, *QKV))
    fast = gb.decoder(model, 9, cases.ROOM)
    assert adjoin(spans(model, *QKV)) and adjoin(spans(model, *GATE_UP))
    assert all(parameter is places[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    given = cases.prompts(*range(3, 12))
    assert (
        fast.generate(given, max_new_tokens=6).tokens
        == cases.shared(kind, max_batch=16).generate(given, max_new_tokens=6).tokens
    )
    save_model(model, str(tmp_path / "model.safetensors"))  # which refuses a part of a storage
    model.model.layers[1].self_attn.q_proj.weight = torch.nn.Parameter(model.model.layers[1].self_attn.q_proj.weight.clone())
    fast.generate(given, max_new_tokens=1)
    assert adjoin(spans(model, *QKV)), "a weight put in another's place joins them at the next request"


@pytest.mark.parametrize("kind", ["Llama", "own"])
def test_a_decoder_that_is_refused_leaves_them_apart(kind, tmp_path):
    """By its room before it is built, or by its certificate behind that: safetensors takes no views of one memory."""
    model = cases.build(kind)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"are free on"):
        gb.decoder(model, 9, 10**9)
    save_model(model, str(tmp_path / "first.safetensors"))
    handle = model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 1.5)
    with pytest.raises(gb.GenerateError):
        gb.decoder(model, 9, cases.ROOM)
    assert not adjoin(spans(model, *QKV)) and not adjoin(spans(model, *GATE_UP))
    save_model(model, str(tmp_path / "second.safetensors"))
    handle.remove()
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    assert gb.decoder(model, 9, cases.ROOM).body.live.apart is None, "the next one joins them"


def test_few_rows_leave_every_weight_where_it_is():
    model = cases.build("Llama")
    before = spans(model, *QKV, *GATE_UP)
    gb.decoder(model, 2, cases.ROOM)
    assert spans(model, *QKV, *GATE_UP) == before
    gb.decoder(model, 2, cases.ROOM, speculate=3)
    assert spans(model, *QKV, *GATE_UP) == before


@pytest.mark.parametrize("kind", ["Llama", "own"])
def test_two_tensors_over_the_same_memory_stay_together(kind):
    """They are one weight to the user; side by side with its neighbours, one had moved away from the other."""
    model = cases.build(kind)
    first, second = (block.self_attn.q_proj for block in model.model.layers)
    second.weight = torch.nn.Parameter(first.weight.data)
    fast = gb.decoder(model, 9, cases.ROOM)
    assert first.weight.data_ptr() == second.weight.data_ptr()
    assert fast.body.live.apart.startswith("a weight and another layer's are two tensors over the same memory")


def test_weights_in_a_buffer_of_somebody_elses_stay_there():
    """A trainer's flat buffer, say; they are multiplied one by one, and the table says why."""
    model = cases.build("Llama")
    parameters = [p for name, p in model.named_parameters() if "layers" in name and p.dim() > 1]
    flat = torch.cat([p.detach().flatten() for p in reversed(parameters)])
    for p, part in zip(reversed(parameters), flat.split([p.numel() for p in reversed(parameters)])):
        p.data = part.view(p.shape)
    before = spans(model, *QKV, *GATE_UP)
    fast = gb.decoder(model, 9, cases.ROOM)
    assert spans(model, *QKV, *GATE_UP) == before
    assert message("decode/live:weights_in_a_buffer_of_s").within(str(fast))
    given = cases.prompts(*range(3, 12))
    assert (
        fast.generate(given, max_new_tokens=6).tokens
        == cases.shared("Llama", max_batch=16).generate(given, max_new_tokens=6).tokens
    )
