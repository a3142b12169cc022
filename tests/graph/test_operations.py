"""What no graph can hold is refused before the capture, with its line; and the audit of a model's readiness."""

import _thread
import ctypes
import inspect
import re
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from gpubound.errors import GraphError
from gpubound.graph import capture, recording
from gpubound.graph.audit import audit
from gpubound.graph.runner import GraphRunner, open_gate
from gpubound.models.registry import cache_in, cache_word
from gpubound.watch.events import Place, site_of
from tests.graph.tape import TapeRunner
from tests.messages import message

from . import one_liners
from .cases import drawn, perceptron, said, training_step

READ = (
    "reads the device from the host; keep the value on the device (torch.where, masks), "
    "or read it a step later from pinned memory"
)
PRINTS = "prints a tensor, which reads the device from the host; return it and print after the replay"
HOST = "copies the device to the host; return the tensor and read it after the replay"
BUILT = "builds a tensor from host data; make it before the capture, or from sizes alone (torch.full, torch.arange)"
SHAPE = "makes a shape that depends on the values; "
NUMBER = (
    "copies a Python number from the host into one place; write x[i : i + 1] = number; at an index that is a tensor "
    "index_fill_, at a mask masked_fill_"
)
COUNT = SHAPE + "count with scatter_add into a tensor of fixed size"
NONZERO = SHAPE + "use torch.where(condition, a, b), or torch.nonzero_static with a fixed size"
MASK = SHAPE + "use torch.where or multiply by the mask instead of indexing with it"

EXPECTED = {
    "item": READ,
    "branch": READ,
    "number": READ,
    "as_list": READ,
    "as_numpy": HOST,
    "to_host": HOST,
    "printed": PRINTS,
    "formatted": PRINTS,
    "nonzero": NONZERO,
    "where": NONZERO,
    "mask": MASK,
    "assign": MASK,
    "selected": SHAPE + "use torch.where, or multiply by the mask",
    "unique": COUNT,
    "equal": READ,
    "close": READ,
    "counted": SHAPE + "use scatter_add into torch.zeros(bins)",
    "repeated": SHAPE + "pass output_size=",
    "built": BUILT,
    "listed": BUILT,
    "inverted": "checks a factorisation from the host; use the _ex form (torch.linalg.inv_ex, solve_ex, cholesky_ex)",
    "sliced": READ,
    "element": NUMBER,
    "scattered": NUMBER,
    "backward": READ,
    "hooked": READ,
}


def marked(name: str) -> tuple[int, str]:
    """(number, text) of the line marked in the function, or of the one marked with its name."""
    lines, first = inspect.getsourcelines(getattr(one_liners, name))
    for number, text in enumerate(lines, first):
        if "# LINE" in text:
            return number, text.strip()
    everything = inspect.getsource(one_liners).splitlines()
    number = next(i for i, text in enumerate(everything, 1) if f"# LINE {name}" in text)
    return number, everything[number - 1].strip()


@pytest.mark.parametrize("name", EXPECTED)
def test_each_line_is_named(name, capsys):
    number, text = marked(name)
    sentence = said(capture, getattr(one_liners, name), drawn(4).abs())
    first = re.sub(rf"cannot capture {name}, \d places stop it:\n  ", f"cannot capture {name}: ", sentence).splitlines()[0]
    assert first == message("graph/operations:each_line_is_named", name, text, number, EXPECTED[name])


def test_every_line_is_in_the_list():
    functions = {name for name, value in vars(one_liners).items() if inspect.isfunction(value)}
    assert functions == set(EXPECTED)


@pytest.mark.parametrize("name", ["branch", "where", "sliced"])
def test_in_inference_mode_what_is_made_of_other_operations_is_looked_into(name):
    """It arrives whole there: `is_nonzero`, and not the read inside it."""
    number, text = marked(name)
    sentence = said(capture, torch.inference_mode()(getattr(one_liners, name)), drawn(4).abs())
    assert sentence == message("graph/operations:in_inference_mode_what_i", name, text, number, EXPECTED[name])


def test_all_places_are_listed():
    def fn(x):
        x = x * x.max().item()
        return x[x > 0]

    line = inspect.getsourcelines(fn)[1]
    assert said(capture, fn, drawn(4)) == message("graph/operations:all_places_are_listed", line + 1, READ, line + 2, MASK)


def test_an_optimizer_that_counts_on_the_host():
    model = perceptron()
    step = training_step(model, torch.optim.AdamW(model.parameters()))
    line = inspect.getsourcelines(step)[1] + 4
    assert said(capture, step, drawn(5, 4), drawn(5, 1)) == message("graph/operations:an_optimizer_that_counts", line)


def test_clipping_that_looks():
    model = perceptron()

    def fn(x):
        model.zero_grad()
        model(x).sum().backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    line = inspect.getsourcelines(fn)[1] + 3
    assert said(capture, fn, drawn(5, 4)) == message("graph/operations:clipping_that_looks", line)


def harmless(x):
    """Looks like the above, and is not."""
    y = x.clone()
    y[y > 0] = 1.0  # masked_fill
    y[0:1] = 2.0
    y[0].fill_(2.0)
    y = torch.where(y > 0, y, torch.zeros_like(y)) * torch.tensor(2.0)  # one number is a constant
    y = y[torch.arange(4)] + y[torch.argsort(x)] + x.masked_fill(x > 0, 0.0)
    torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(y)], 1.0)
    return y.repeat_interleave((x > -9).long(), output_size=4), len(x), x.shape[0]


def test_what_a_graph_can_hold_is_let_pass():
    assert capture(harmless, drawn(4)).certificate.bitwise


def test_what_the_first_call_alone_does_is_let_pass():
    ready = []

    def fn(x):
        if not ready:
            ready.append(x.sum().item())  # a self-test, say
        return x * 2

    assert capture(fn, drawn(4)).certificate.bitwise


def test_an_error_of_the_functions_own_stays_its_own():
    state = torch.zeros(3)

    def fn(x):
        state.add_(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture(fn, torch.ones(3))
    assert not state.any()


@pytest.fixture
def modes(monkeypatch):
    """The modes of torch's sync detector that are set."""
    modes: list = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def runner_of_calls(gate=open_gate):
    runner = object.__new__(GraphRunner)
    runner.run, runner.gate = lambda call: call(), gate
    return runner


@pytest.mark.parametrize(("waiting", "gate", "calls"), [((), open_gate, 1), ((1,), open_gate, 2), ((), lambda: None, 2)])
@pytest.mark.usefixtures("modes")
def test_a_function_that_waits_once_is_called_again(waiting, gate, calls):
    """As one that compiles. Where other processes are in fn, all make the same number of calls, whoever of them waits."""
    made = []

    def fn():
        made.append(None)
        if len(made) in waiting:
            warnings.warn("called a synchronizing CUDA operation (somewhere)", stacklevel=1)

    assert runner_of_calls(gate).waits(fn) == [] and len(made) == calls


def test_waits_come_with_their_lines_and_other_warnings_pass(modes):
    """torch's sync detector warns from inside an operation; here a warning of the same words stands for it."""
    runner = runner_of_calls()

    def fn():
        if modes:
            warnings.warn("called a synchronizing CUDA operation (somewhere)", stacklevel=1)

    assert [place.line.at for place in runner.waits(fn)] == [f"tests/graph/test_operations.py:{fn.__code__.co_firstlineno + 2}"]
    assert modes == ["warn", 0] * 2
    with pytest.warns(UserWarning, match="the function's own"):
        assert runner.waits(lambda: warnings.warn("the function's own", stacklevel=1)) == []


class BreaksOnce(TapeRunner):
    """Refuses the first capture, as a GPU does one that waits, or that loads a kernel."""

    def __init__(self, lines):
        self.lines, self.calls = lines, []

    def run(self, call):
        self.calls.append("run")
        return call()

    def waits(self, call):
        self.run(call)
        self.calls.append("waits")
        return self.lines

    def record(self, name, call, generators, external):
        self.calls.append("record")
        if self.calls.count("record") == 1:
            call()
            raise GraphError("operation not permitted when stream is capturing")
        return super().record(name, call, generators, external)


@pytest.mark.parametrize("waits", [False, True])
def test_a_capture_that_breaks_is_tried_again_after_a_call_that_is_not_watched(waits, monkeypatch):
    runner = BreaksOnce([Place(site_of(sys._getframe()))] if waits else [])
    monkeypatch.setattr(recording, "runner_for", lambda device, pool: runner)
    total, weight = torch.zeros(3), nn.Parameter(torch.ones(3))

    def fn(x):
        total.add_(x)
        loss = (x * weight).sum()
        loss.backward()
        return loss.detach()

    if waits:
        with pytest.raises(GraphError, match="waits for the device"):
            capture(fn, drawn(3))
    else:
        captured = capture(fn, drawn(3))
        assert captured.certificate.bitwise and set(captured.certificate.mutated) == {"total", "weight.grad"}
    at = runner.calls.index("record")
    assert runner.calls[at : at + 4] == ["record", "run", "waits", "record"][: 3 if waits else 4]
    assert not total.any() and (weight.grad is None) == waits


@pytest.mark.parametrize(("compilers", "gate", "needed"), [
    ({}, open_gate, False),
    ({1: None}, open_gate, False),
    ({1: None, 2: print}, open_gate, True),
    (None, open_gate, True),
    ({}, lambda: None, True),
])  # fmt: skip
def test_what_is_compiled_is_called_before_it_is_captured(compilers, gate, needed, monkeypatch):
    """Compiled functions run uncompiled while they are watched. Other processes make as many calls, whoever compiles."""
    module = SimpleNamespace() if compilers is None else SimpleNamespace(cached_backends=compilers)
    monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", module)
    assert runner_of_calls(gate).needs_plain_call() == needed


@pytest.mark.parametrize("whose", ["autograd's", "another"])
def test_waits_of_other_threads_are_not_the_functions(modes, whose):
    """A self-test that is still under way waits for the device beside the function. Autograd's threads work for it."""
    runner = runner_of_calls()

    def wait():
        warnings.warn("called a synchronizing CUDA operation (somewhere)", stacklevel=1)

    def fn():
        if not modes:
            return
        if whose == "another":
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
        else:  # one that Python did not start
            done = threading.Event()
            _thread.start_new_thread(lambda: (wait(), done.set()), ())
            assert done.wait(60)

    assert len(runner.waits(fn)) == (1 if whose == "autograd's" else 0)


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
        assert f"test_operations.py:{at}" in stop.reason
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
