"""The audit of readiness: planted hazards are told at their line and module, and clean ones pass."""

import ctypes
import inspect

import pytest
import torch
import transformers
from torch import nn

from gpubound.graph import recording
from gpubound.graph.audit import audit
from gpubound.models.registry import cache_in, cache_word
from tests.graph.tape import TapeRunner


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.after = nn.Linear(4, 4), nn.Sigmoid()  # positive for any weights: a ReLU's zeros would hide hazards

    def forward(self, x):
        return self.after(self.inner(x))


class ReadsAValue(Block):
    def forward(self, x):
        return self.inner(x) * x.abs().max().item()


class Branches(Block):
    def forward(self, x):
        if x.sum() > 0:
            return self.inner(x)
        return x


class Masks(Block):
    def forward(self, x):
        return self.inner(x) + x[x[:, 0] > 0].sum()


class MakesATensor(Block):
    def forward(self, x):
        return self.inner(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])


class Counts(Block):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.calls


class Grows(Block):
    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(1, 4)

    def forward(self, x):
        self.kept = torch.cat([self.kept, self.inner(x)])
        return self.kept.sum(0)


HAZARDS = [
    (ReadsAValue, "item()", "reads the device from the host; keep the value on the device"),
    (Branches, "if x.sum()", "reads the device from the host; keep the value on the device"),
    (Masks, "> 0]", "makes a shape that depends on the values; use torch.where"),
    (MakesATensor, "torch.tensor(", "builds a tensor from host data; make it before the capture"),
    (Grows, "torch.cat", "write into it with copy_()"),
    (Counts, None, "keep it in a tensor"),
]


def stopped(found) -> dict[str, list]:
    return {part.name: part.obstacles for part in found.parts if part.obstacles}


@pytest.mark.parametrize("hazard, line, remedy", HAZARDS, ids=lambda value: getattr(value, "__name__", None))
def test_a_hazard_is_told_at_its_module_and_line_with_the_form_to_use(hazard, line, remedy):
    model = nn.Sequential(Block(), hazard(), Block())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = audit(model, torch.randn(3, 4).abs())
    ((name, (stop, *_)),) = stopped(found).items()
    assert name == "1" and remedy in stop.reason
    if line is not None:
        lines, first = inspect.getsourcelines(hazard)
        at = first + next(number for number, text in enumerate(lines) if line in text)
        assert f"test_audit.py:{at}" in stop.reason
    assert not found.ready
    assert {part.name for part in found.parts if part.ready} >= {"0", "0.inner", "1.inner", "2"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_one_line_in_many_layers_is_told_once():
    found = audit(nn.Sequential(*(ReadsAValue() for _ in range(4)), Block(), ReadsAValue()), torch.randn(3, 4))
    assert [line for line in str(found).splitlines() if line.startswith("NOT READY  ")] == ["NOT READY  * (5)"]
    assert "1 reason; 8 of 14 parts" in str(found)


def test_a_replay_on_other_inputs_is_what_counts(monkeypatch):
    """A tape replays what was recorded, as a graph does: what depends on the first input shows only there."""
    monkeypatch.setattr(recording, "runner_for", lambda device, pool: TapeRunner())

    class Peeks(Block):
        def forward(self, x):
            return self.inner(x) * ctypes.c_float.from_address(x.data_ptr()).value

    found = audit(nn.Sequential(nn.Sigmoid(), Peeks()), torch.randn(3, 4))  # a ReLU's zero would hide what it reads
    assert list(stopped(found)) == ["1"] and "replay is off by" in str(found)


def test_without_a_gpu_nothing_found_is_no_proof():
    found = audit(Block(), torch.randn(3, 4))
    assert found.ready and not found.captured
    assert "no GPU" in str(found)
    assert found.parts[1].name == "inner" and found.parts[1].within == "Block"


def test_a_wait_that_only_a_gpu_has_is_named_though_the_call_fails():
    def step(x):
        torch.cuda.synchronize()
        return x

    if torch.cuda.is_available():
        pytest.skip("the call does not fail there")
    found = audit(step, torch.randn(3))
    assert "`torch.cuda.synchronize()`" in str(found) and "waits for the device" in str(found) and not found.ready


def test_what_gives_no_tensor_is_not_called_audit():
    found = audit(lambda x: None, torch.randn(3))
    assert not found.ready and "return its tensors" in str(found)


def test_a_function_names_the_modules_that_it_calls():
    one, two = Block(), ReadsAValue()
    found = audit(lambda x: two(one(x)), torch.randn(3, 4))
    assert list(stopped(found)) == ["ReadsAValue"]
    assert {part.name for part in found.parts} >= {"Block", "ReadsAValue.inner"}


def test_something_that_cannot_be_called_is_refused():
    with pytest.raises(ValueError, match="audit: fn: got Tensor"):
        audit(torch.ones(1))


@torch.no_grad()
def test_a_cache_that_grows_is_told_in_the_attention_and_left_as_it_was():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    cache = cache_in(model(torch.arange(5)[None], use_cache=True))
    given = {"input_ids": torch.tensor([[7]]), cache_word(model.forward): cache, "use_cache": True}
    found = audit(model, kwargs=given)
    assert list(stopped(found)) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert "cache_utils.py" in str(found) and "write into it with copy_()" in str(found)
    assert cache.get_seq_length() == 5
    assert "model.layers.*.mlp (2)  with 4 inside" in str(found)


@pytest.mark.gpu
def test_on_a_gpu_parts_are_captured():
    found = audit(nn.Linear(4, 4).cuda(), torch.randn(3, 4, device="cuda"))
    assert found.captured and "READY: one graph" in str(found)
    found = audit(nn.Sequential(Block(), ReadsAValue()).cuda(), torch.randn(3, 4, device="cuda"))
    assert list(stopped(found)) == ["1"]
