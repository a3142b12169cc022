"""A state_dict whose tensors have a storage each: the same memory, live, tied ones together."""

import pytest
import torch
from torch import nn

from gpubound.layers.fused_weights import give_own_storages


def storages(state):
    return [t.untyped_storage().data_ptr() for t in state.values()]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.bool]
)
def test_parts_of_one_memory(device, dtype):
    model = nn.Module()
    whole = torch.zeros(10, 3, device=device).to(dtype)
    for name, part in {"first": whole[:4], "second": whole[4:], "turned": whole[:3].t()}.items():
        model.register_buffer(name, part)
    model.register_buffer("alone", torch.zeros(2, device=device))
    give_own_storages(model)
    give_own_storages(model)  # once is enough
    state = model.state_dict()
    assert [t.untyped_storage().nbytes() for t in state.values()] == [t.nbytes for t in state.values()]
    for name, tensor in state.items():
        kept = getattr(model, name)
        assert (tensor.data_ptr(), tensor.shape, tensor.dtype) == (kept.data_ptr(), kept.shape, kept.dtype)
    state["second"].fill_(1)
    assert whole[4:].float().eq(1).all() and whole[:4].float().eq(0).all()
    assert model.second._version == state["second"]._version > 0, "who watches the weight sees the write"


def test_tied_weights_keep_one_storage_and_a_models_own_tensors_theirs(device):
    model, memory = nn.Module(), torch.arange(12.0, device=device)
    model.one, model.other = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
    model.tied = model.one
    give_own_storages(model)
    one, other, tied = storages(model.state_dict())
    assert one == tied != other
    assert all(t is getattr(model, name) for name, t in model.state_dict(keep_vars=True).items())
    assert len(set(storages(dict(model.named_parameters())))) == 1, "the model's own lie where they lay"
    model.load_state_dict({"one": torch.ones(4), "other": torch.ones(8), "tied": torch.ones(4)})
    assert memory.eq(1).all()
