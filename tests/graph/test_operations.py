"""What no graph can hold is refused before the capture, with its line and what to write instead; what one can hold is not."""

import _thread
import inspect
import re
import threading
import warnings

import pytest
import torch

from gpubound.graph import capture
from gpubound.graph.runner import GraphRunner, open_gate
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


def runner_of_calls(gate=open_gate):
    runner = object.__new__(GraphRunner)
    runner.run, runner.gate = lambda call: call(), gate
    return runner


@pytest.mark.parametrize(("waiting", "gate", "calls"), [((), open_gate, 1), ((1,), open_gate, 2), ((), lambda: None, 2)])
def test_a_function_that_waits_once_is_called_again(waiting, gate, calls, monkeypatch):
    """As one that compiles. Where other processes are in fn, all make the same number of calls, whoever of them waits."""
    made = []
    for name in ("get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)

    def fn():
        made.append(None)
        if len(made) in waiting:
            warnings.warn("called a synchronizing CUDA operation (somewhere)", stacklevel=1)

    assert runner_of_calls(gate).waits(fn) == [] and len(made) == calls


def test_waits_come_with_their_lines_and_other_warnings_pass(monkeypatch):
    """torch's sync detector warns from inside an operation; here a warning of the same words stands for it."""
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    runner = runner_of_calls()

    def fn():
        if modes:
            warnings.warn("called a synchronizing CUDA operation (somewhere)", stacklevel=1)

    assert [place.line.at for place in runner.waits(fn)] == [f"tests/graph/test_operations.py:{fn.__code__.co_firstlineno + 2}"]
    assert modes == ["warn", 0] * 2
    with pytest.warns(UserWarning, match="the function's own"):
        assert runner.waits(lambda: warnings.warn("the function's own", stacklevel=1)) == []


@pytest.mark.parametrize("whose", ["autograd's", "another"])
def test_waits_of_other_threads_are_not_the_functions(monkeypatch, whose):
    """A self-test that is still under way waits for the device beside the function. Autograd's threads work for it."""
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
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
