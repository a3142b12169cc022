"""Whatever would make a replay lie raises, inputs that are not as captured too: the tensor's name, and what to do."""

import copy
import math
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpubound.errors import GraphError
from gpubound.graph import capture, guards
from tests.messages import message

from .cases import drawn, perceptron, said, training_step


def moved(name):
    return message("graph/held:moved", name)


def replaced(name, got):
    return message("graph/held:replaced", name, got)


def baked(name, got, wanted):
    return message("graph/held:baked", name, got, wanted)


def gradient(name):
    return message("graph/held:gradient", name)


@pytest.fixture
def model():
    return perceptron()


@pytest.fixture
def captured(model):
    return capture(model, drawn(5, 4))


def move(model):
    model[0].weight.data = model[0].weight.data.clone()


def replace_parameter(model):
    model[0].weight = nn.Parameter(drawn(8, 4))


def replace_module(model):
    model[0] = nn.Linear(4, 8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (move, moved("0.weight")),
        (nn.Module.double, moved("0.weight")),
        (replace_parameter, replaced("0.weight", "another tensor")),
        (replace_module, replaced("0.weight", "another tensor")),
        (lambda model: model.load_state_dict(perceptron().state_dict(), assign=True), replaced("0.weight", "another tensor")),
        (nn.Module.eval, baked("training", "False", "True")),
    ],
    ids=["moved", "moved to another dtype", "parameter", "module", "load_state_dict by assignment", "evaluation mode"],
)
def test_a_changed_model(captured, model, change, text):
    change(model)
    for _ in range(2):
        assert said(captured, drawn(5, 4)) == text


def test_freed_weight(captured, model):
    model[3].bias.untyped_storage().resize_(0)
    assert said(captured, drawn(5, 4)) == message("graph/held:freed_weight")


def test_load_state_dict_in_place_is_followed(model, tape):
    captured = capture(model, drawn(5, 4))
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    assert torch.equal(captured(drawn(5, 4)), model(drawn(5, 4)))


def test_written_into_the_registry(captured, model):
    """No hook of torch sees this; the walk at every 256th call does."""
    model[0]._parameters["weight"] = nn.Parameter(drawn(8, 4))
    with pytest.raises(GraphError) as error:
        for _ in range(guards.WALK_EVERY):
            captured(drawn(5, 4))
    assert str(error.value) == replaced("0.weight", "another tensor")


def test_a_stale_tensor_in_the_closure():
    batch = torch.ones(3)
    captured = capture(lambda: batch * 2)
    batch = torch.zeros(3)
    assert said(captured) == replaced("batch", "another tensor")
    batch = None
    assert said(captured) == replaced("batch", "nothing")


def test_another_model_in_the_closure():
    model = perceptron()
    captured = capture(lambda x: model(x), drawn(5, 4))
    model = perceptron()
    assert said(captured, drawn(5, 4)) == replaced("model.0.weight", "another tensor")
    model = None
    assert said(captured, drawn(5, 4)) == replaced("model.0.weight", "nothing")


def test_a_model_and_an_optimizer_among_the_inputs():
    """They are no tensors to copy, so all that is watched in a closure's is watched in them."""
    model, x, y = perceptron(), drawn(5, 4), drawn(5, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    captured = capture(lambda model, optimizer, x, y: training_step(model, optimizer)(x, y), model, optimizer, x, y)
    model.eval()
    assert said(captured, model, optimizer, x, y) == baked("input 0.training", "False", "True")
    model.train()
    optimizer.param_groups[0]["lr"] = 0.2
    assert said(captured, model, optimizer, x, y) == baked("input 1.param_groups[0]['lr']", "0.2", "0.1")
    optimizer.param_groups[0]["lr"] = 0.1
    captured(model, optimizer, x, y)
    model[0].weight = nn.Parameter(drawn(8, 4))
    assert said(captured, model, optimizer, x, y) == replaced("input 0.0.weight", "another tensor")


def test_an_object_among_the_inputs_whose_tensor_is_replaced():
    batch = SimpleNamespace(x=torch.ones(3))
    captured = capture(lambda batch: batch.x * 2, batch)
    batch.x = torch.zeros(3)
    assert said(captured, batch) == replaced("input 0.x", "another tensor")


class Cache:
    def __init__(self):
        self.state, self.keys = torch.zeros(3), [torch.zeros(3)]

    def append(self, x):
        self.keys[0].add_(x)
        return self.state.mul_(0.5).add_(x) + self.keys[0] * 2


@pytest.mark.parametrize("name", ["self.state", "self.keys[0]"])
def test_an_attribute_or_item_that_is_rebound(name):
    cache = Cache()
    captured = capture(cache.append, torch.ones(3))
    assert set(captured.held) == {"self.state", "self.keys[0]", "input 0"}
    if name == "self.state":
        cache.state = torch.zeros(3)
    else:
        cache.keys[0] = torch.zeros(3)
    assert said(captured, torch.ones(3)) == replaced(name, "another tensor")


def test_optimizer_state_loaded_again(model):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    captured = capture(training_step(model, optimizer), drawn(5, 4), drawn(5, 1))
    optimizer.load_state_dict(optimizer.state_dict())  # keeps the tensors: no harm done
    captured(drawn(5, 4), drawn(5, 1))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert said(captured, drawn(5, 4), drawn(5, 1)) == replaced("optimizer.state[model.0.weight]['step']", "another tensor")


def test_learning_rate_set_by_a_scheduler(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=9)
    optimizer.param_groups[0]["lr"] = 0.5
    captured = capture(training_step(model, optimizer), drawn(5, 4), drawn(5, 1))
    captured(drawn(5, 4), drawn(5, 1))
    scheduler.optimizer.param_groups[0]["lr"] = 0.25
    assert said(captured, drawn(5, 4), drawn(5, 1)) == baked("optimizer.param_groups[0]['lr']", "0.25", "0.5")


def test_learning_rate_in_a_tensor_is_followed(model, tape):
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), fused=True)
    captured = capture(training_step(model, optimizer), drawn(5, 4), drawn(5, 1))
    optimizer.param_groups[0]["lr"].fill_(0.0)
    optimizer.param_groups[0]["weight_decay"] = 0.01  # the same value is no change
    before = model[0].weight.clone()
    captured(drawn(5, 4), drawn(5, 1))
    assert torch.equal(before, model[0].weight)


def test_python_values_in_the_closure():
    scale, mask = 2.0, None
    captured = capture(lambda x: x * scale if mask is None else x * mask, torch.ones(3))
    scale = 1.0 + 1.0  # equal, though another object
    captured(torch.ones(3))
    scale = 3.0
    assert said(captured, torch.ones(3)) == baked("scale", "3.0", "2.0")
    scale, mask = 2.0, torch.ones(3)
    assert said(captured, torch.ones(3)) == baked("mask", "a tensor", "None")


def test_a_count_that_the_function_keeps_for_itself(runner):
    calls = 0

    def fn(x):
        nonlocal calls
        calls += 1
        return x * 2

    captured = capture(fn, torch.ones(3))
    for value in (1.0, 2.0, 3.0):
        assert captured(torch.full((3,), value)).tolist() == [2 * value] * 3


def test_gradients_dropped_outside(tape, model):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    captured = capture(training_step(model, optimizer), drawn(5, 4), drawn(5, 1))
    optimizer.zero_grad()
    assert said(captured, drawn(5, 4), drawn(5, 1)) == gradient("model.0.weight.grad")


def test_accumulated_gradients_dropped_outside(runner, model):
    captured = capture(lambda x: model(x).sum().backward(), drawn(5, 4))
    captured(drawn(5, 4))
    model.zero_grad(set_to_none=False)
    captured(drawn(5, 4))
    model.zero_grad()
    assert said(captured, drawn(5, 4)) == gradient("model.0.weight.grad")


def test_unnamed_tensors_are_described():
    table = {id(object): torch.ones(3)}

    class Opaque:
        __slots__ = ("inside",)

    box = Opaque()
    box.inside = table.popitem()[1]
    captured = capture(lambda x: x + box.inside, torch.ones(3))
    box.inside.untyped_storage().resize_(0)
    assert said(captured, torch.ones(3)).startswith("the float32 tensor of shape (3,) used at tests/graph/test_guards.py:")


def test_guards_memory_outlives_its_owner(tape):
    """The graph keeps what it reads: a list emptied by its owner is an error, not a read of someone else's memory."""
    weights = [torch.full((3,), 2.0)]
    captured = capture(lambda x: x * weights[0], torch.ones(3))
    weights.clear()
    assert said(captured, torch.ones(3)) == replaced("weights[0]", "nothing")


def test_address_check_in_python_and_as_torch_does_it(monkeypatch):
    """CUDA builds have a loop of their own; a stand-in with its signature shows that it is tried before it is trusted."""
    asked = []

    def native(tensors, addresses, indices):
        asked.append(len(indices))
        return all(tensors[i].data_ptr() == addresses[i] for i in indices)

    for form in (None, native):
        monkeypatch.setattr(torch._C, "_tensors_data_ptrs_at_indices_equal", form, raising=False)
        tensors = [torch.ones(2), torch.ones(3)]
        same = guards.address_check(tensors, [tensor.data_ptr() for tensor in tensors])
        assert same() is True
        tensors[1].data = torch.ones(3)
        assert same() is False
    assert asked == [2] * 4
    monkeypatch.setattr(torch._C, "_tensors_data_ptrs_at_indices_equal", lambda *_: True)  # one that says yes to all
    tensors = [torch.ones(2)]
    same = guards.address_check(tensors, [tensors[0].data_ptr()])
    tensors[0].data = torch.ones(2)
    assert same() is False


def test_the_memory_that_a_graph_writes_stays_alive_when_the_tensor_moves(tape):
    """A stale graph, replayed through an alias of the check, must not write into memory that is someone else's by now."""
    state = torch.zeros(4)
    captured = capture(lambda x: state.add_(x).clone(), torch.ones(4))
    old = StorageWeakRef(state.untyped_storage())
    captured._recording.runner.steps = []  # the tape itself holds its tensors; a CUDA graph holds addresses
    state.data = torch.zeros(4)
    assert not old.expired()


def test_a_released_graph_is_not_replayed_and_can_be_captured_again(captured):
    x = drawn(5, 4)
    wanted = captured(x).clone()
    captured.release()
    with pytest.raises(GraphError, check=message("graph/held:a_released_graph_is_not")):
        captured(x)
    captured.release()  # a second time does nothing
    torch.testing.assert_close(captured.recapture(x)(x), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), torch.jit.script])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_wrapper_that_keeps_training_elsewhere(wrap):
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    x = torch.ones(3, 4)
    captured = capture(wrap(model), x)
    torch.testing.assert_close(captured(x), model(x).detach())


@pytest.fixture
def captured_sum():
    return capture(
        lambda x, options: x * options["scale"] + options["bias"], torch.ones(3), {"scale": 2, "bias": torch.ones(3)}
    )


def given(x=None, scale=2, bias=None):
    return (torch.ones(3) if x is None else x, {"scale": scale, "bias": torch.ones(3) if bias is None else bias})


def test_as_captured(captured_sum):
    assert captured_sum(*given()).tolist() == [3, 3, 3]


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": torch.ones(4)}, message("graph/held_inputs:shape")),
        ({"bias": torch.ones(3).double()}, message("graph/held_inputs:dtype")),
        ({"x": torch.ones(3, device="meta")}, message("graph/held_inputs:device")),
        ({"x": freed()}, message("graph/held_inputs:dead_input")),
        ({"scale": 3}, message("graph/held_inputs:constant")),
        ({"scale": 2.0}, message("graph/held_inputs:constant_of_another_type")),
        ({"scale": torch.tensor(2)}, message("graph/held_inputs:tensor_for_a_constant")),
        ({"x": 1.5}, message("graph/held_inputs:constant_for_a_tensor")),
        ({"x": torch.ones(3).to_sparse()}, message("graph/held_inputs:a_sparse_tensor")),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_an_input_unlike_the_captured_one(captured_sum, changed, text):
    assert said(captured_sum, *given(**changed)) == text


def test_structure(captured_sum):
    assert said(captured_sum, torch.ones(3), (2, torch.ones(3))) == message("graph/held_inputs:structure")
    assert said(captured_sum, torch.ones(3)) == message("graph/held_inputs:structure.2")


def test_static_buffer_freed(captured_sum):
    buffer = captured_sum.inputs[0]
    buffer.untyped_storage().resize_(0)
    assert said(captured_sum, *given()) == message("graph/held_inputs:static_buffer_freed")


def test_a_dict_or_tuple_of_another_class_is_named():
    captured_sum = capture(lambda given: given["a"] * 2, OrderedDict(a=torch.ones(3)))
    assert said(captured_sum, {"a": torch.ones(3)}) == message("graph/held_inputs:a_dict_or_tuple_of_anoth")


def test_strides_are_kept_and_others_copied(captured_sum):
    matrix = torch.arange(6.0).reshape(2, 3).t()
    captured_sum = capture(lambda x: x + 1, matrix)
    assert captured_sum.inputs[0].stride() == (1, 3)
    assert torch.equal(captured_sum(matrix.contiguous()), matrix + 1)


def test_nan_is_the_constant_that_was_captured():
    captured_sum = capture(lambda x, fill: torch.where(x > 0, x, fill), torch.ones(3), math.nan)
    assert captured_sum(torch.ones(3), float("nan")).tolist() == [1, 1, 1]
    assert message("graph/held_inputs:nan_is_the_constant_that").within(said(captured_sum, torch.ones(3), 2.0))


@dataclass
class Holder:
    y: torch.Tensor


def test_a_dataclass_with_tensors_is_refused():
    with pytest.raises(ValueError, check=message("graph/held_inputs:a_dataclass_with_tensors")):
        capture(lambda holder: holder.y * 2, Holder(torch.ones(3)))
    with pytest.raises(ValueError, check=message("graph/held_inputs:a_dataclass_with_tensors.2")):
        capture(lambda x: (x, Holder(x * 2)), torch.ones(3))


def test_a_mapping_with_tensors_is_refused():
    """Hugging Face's BatchEncoding is one: the graph would keep its first tensors."""
    with pytest.raises(ValueError, check=message("graph/held_inputs:a_mapping_with_tensors_i")):
        capture(lambda batch: batch["x"] * 2, UserDict(x=torch.ones(3)))
