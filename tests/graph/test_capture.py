"""A captured function computes what the function does, and capturing, or a refusal, leaves no trace."""

import copy
import doctest
import functools
import pickle
import re
import runpy
import threading
from math import inf, nan
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpubound.graph import capture, captured as captured_module
from gpubound.graph.guards import NotCopyable, ReentryGuard
from gpubound.graph.reachable import AccessPath, Reachable
from tests.messages import message, refusal

from .cases import contents, drawn, equal, perceptron, said, training_step
from .test_certificate import peek


def fused(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, **options)


def test_training_steps_equal_eager_ones(runner):
    model, twin = perceptron(), perceptron()
    captured = capture(training_step(model, optimizer := fused(model)), drawn(5, 4), drawn(5, 1, seed=1))
    eager = training_step(twin, other := fused(twin))
    for seed in range(4):
        x, y = drawn(5, 4, seed=seed), drawn(5, 1, seed=seed + 9)
        assert torch.equal(captured(x, y), eager(x, y))
    assert equal(contents(model, optimizer), contents(twin, other))
    assert captured.replays == 4
    assert captured.certificate.bitwise and captured.certificate.rounds == 2


def test_state_is_put_back_bit_for_bit(runner):
    model = perceptron(dropout=0.3)
    optimizer = fused(model)
    step = training_step(model, optimizer)
    step(drawn(5, 4), drawn(5, 1))  # the moments exist, and are not zero
    before, random = contents(model, optimizer), torch.get_rng_state()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    capture(step, drawn(5, 4, seed=3), drawn(5, 1, seed=4))
    assert equal(before, contents(model, optimizer))
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(old, parameter.grad) for old, parameter in zip(gradients, model.parameters()))


def test_state_made_by_the_first_call_starts_at_zero(runner):
    model = perceptron()
    optimizer = fused(model)
    capture(training_step(model, optimizer), drawn(5, 4), drawn(5, 1))
    state = optimizer.state[model[0].weight]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and not any(value.any() for value in state.values())
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_gradients_accumulate_in_place(runner):
    """fn only adds to the gradients, which do not exist before: they become buffers that start at zero."""
    model = nn.Linear(3, 2)

    def backward(x):
        model(x).square().sum().backward()

    captured = capture(backward, drawn(4, 3))
    buffer = model.weight.grad
    assert not buffer.any()
    captured(drawn(4, 3, seed=1))
    captured(drawn(4, 3, seed=2))
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    for seed in (1, 2):
        twin(drawn(4, 3, seed=seed)).square().sum().backward()
    assert model.weight.grad is buffer
    assert torch.equal(buffer, twin.weight.grad) and torch.equal(model.bias.grad, twin.bias.grad)
    assert set(captured.certificate.mutated) == {"model.weight.grad", "model.bias.grad"}


def test_dropout_draws_anew_and_a_seed_reproduces(runner):
    captured = capture(lambda x: torch.nn.functional.dropout(x, 0.5), torch.ones(64))
    x = torch.ones(64)
    torch.manual_seed(7)
    first, second = captured(x).clone(), captured(x).clone()
    torch.manual_seed(7)
    assert torch.equal(captured(x), first) and torch.equal(captured(x), second) and not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(torch.nn.functional.dropout(x, 0.5), first)
    assert captured.certificate.same_random_state


def test_a_generator_of_the_users_own_is_put_back(runner):
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    captured = capture(lambda x: x + torch.rand(4, generator=generator), torch.zeros(4))
    assert torch.equal(before, generator.get_state())
    want = torch.rand(4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(captured(torch.zeros(4)), want)


def test_nested_inputs_outputs_and_constants(runner):
    def fn(batch, pair, scale):
        ids, (a, b) = batch["ids"], pair
        return {"sum": a * scale + b, "picked": [a[ids], scale]}

    batch, pair = {"ids": torch.tensor([2, 0, 1])}, (drawn(3), drawn(3, seed=1))
    captured = capture(fn, batch, pair, 2.0)
    other, new = {"ids": torch.tensor([1, 1, 0])}, (drawn(3, seed=5), drawn(3, seed=6))
    got, want = captured(other, new, 2.0), fn(other, new, 2.0)
    assert torch.equal(got["sum"], want["sum"]) and torch.equal(got["picked"][0], want["picked"][0])
    assert got["picked"][1] == 2.0
    assert captured.certificate.inputs == 3 and captured.certificate.unvaried == ()


def test_a_list_of_micro_batches(runner):
    model = perceptron()

    def step(batches):
        model.zero_grad()
        return sum(backward(x, y) for x, y in batches)

    def backward(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss.detach()

    batches = [(drawn(5, 4, seed=i), drawn(5, 1, seed=i + 9)) for i in range(3)]
    captured = capture(step, batches)
    assert torch.equal(captured(batches), step(batches))


def test_no_inputs_and_a_counter_on_the_device(runner):
    count = torch.zeros((), dtype=torch.int64)
    captured = capture(lambda: count.add_(1) * 2)
    assert count.item() == 0
    assert [captured().item() for _ in range(3)] == [2, 4, 6] and count.item() == 3
    assert captured.certificate.mutated == ("count",)


def test_module_partial_and_method(runner):
    model = perceptron()
    x = drawn(5, 4)
    want = model(x).detach()
    assert torch.equal(capture(model, x)(x), want)
    assert torch.equal(capture(functools.partial(model.forward), x)(x), want)
    assert capture(model, x).held == ["0.weight", "0.bias", "3.weight", "3.bias", "input 0"]


def test_gradient_of_an_input(runner):
    x = drawn(3).requires_grad_()
    captured = capture(lambda x: torch.autograd.grad(x.pow(3).sum(), x)[0], x)
    new = drawn(3, seed=4)
    assert torch.allclose(captured(new), 3 * new**2)


def test_batch_norm_statistics_are_found(runner):
    norm = nn.BatchNorm1d(4)
    captured = capture(norm, drawn(6, 4))
    assert not norm.running_mean.any() and norm.num_batches_tracked == 0
    assert {"running_mean", "running_var", "num_batches_tracked"} <= set(captured.certificate.mutated)
    captured(drawn(6, 4))
    assert norm.num_batches_tracked == 1 and norm.running_mean.any()


def test_what_surrounds_a_replay_does_not_reach_it():
    weight = drawn(4, 4).requires_grad_()
    captured = capture(lambda x: torch.autograd.grad((x @ weight).sum(), weight)[0], drawn(4, 4))
    want = captured(drawn(4, 4)).clone()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(captured(drawn(4, 4)), want)


def test_inference_mode_around_one_of_capture_and_replay():
    model, x = perceptron(), drawn(5, 4)
    with torch.inference_mode():
        inside = capture(model, drawn(5, 4, seed=1))
    assert torch.equal(inside(x), model(x))
    step = capture(lambda x: torch.autograd.grad(model(x).sum(), model[0].weight)[0], drawn(5, 4, seed=1))
    want = step(x).clone()
    with torch.inference_mode():
        assert torch.equal(step(x), want) and torch.equal(inside(x), model(x))


def test_autocast_around_the_capture():
    with torch.autocast("cpu", torch.bfloat16):
        sentence = said(capture, perceptron(), drawn(5, 4))
    assert sentence == message("graph/capture:autocast_around_the_capt")


def test_outputs_are_overwritten_unless_cloned():
    captured, cloning = (capture(lambda x: x * 2, torch.ones(2), clone=clone) for clone in (False, True))
    first, kept = captured(torch.ones(2)), cloning(torch.ones(2))
    captured(torch.zeros(2)), cloning(torch.zeros(2))
    assert first.tolist() == [0, 0] and kept.tolist() == [2, 2]


def test_a_static_buffer_is_not_copied():
    captured = capture(lambda x: x * 2, torch.ones(2))
    (buffer,) = captured.inputs
    buffer.copy_(torch.tensor([3.0, 4.0]))
    assert captured(buffer).tolist() == [6, 8]


def test_what_it_says_of_itself(tape):
    weight = nn.Parameter(torch.ones(3))

    def scale(x):
        return x * weight

    captured = capture(scale, torch.ones(3))
    captured(torch.ones(3))
    assert repr(captured) == message("graph/capture:what_it_says_of_itself")
    assert captured.held == ["weight", "input 0"] and captured.mode == "tape" and captured.pool is None
    assert captured.memory_bytes == 24
    text = str(captured.certificate).splitlines()
    assert text[:3] == [
        message("graph/capture:what_it_says_of_itself.2"),
        message("graph/capture:what_it_says_of_itself.3"),
        "1 of 1 input varied",
    ]
    assert text[3].endswith(" s, no snapshot was needed; the graph holds 24 B")


def test_unverified_says_so(said):
    captured = capture(lambda x: x + 1, torch.ones(2), verify=False)
    assert captured.certificate is None and "not verified" in repr(captured)
    assert said() == message("graph/capture:unverified_says_so")


def test_recapture_follows_a_moved_weight(runner):
    model = perceptron()
    captured = capture(model, drawn(5, 4))
    model[0].weight.data = drawn(8, 4, seed=8)
    captured.recapture()
    assert torch.equal(captured(drawn(5, 4)), model(drawn(5, 4)))
    captured.recapture(drawn(7, 4))
    assert captured(drawn(7, 4)).shape == (7, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"fn": 3}, message("graph/capture:wrong_fn")),
        ({"pool": torch.ones(1)}, message("graph/capture:wrong_pool")),
        *(({"tolerance": value}, message("graph/capture:wrong_tolerance", repr(value))) for value in (-1.0, inf, nan, "1e-3")),
        ({"other_inputs": torch.ones(2)}, message("graph/capture:wrong_other_inputs")),
        ({"state": [torch.ones(2), 3]}, message("graph/capture:wrong_state")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments(arguments, text):
    arguments = {"fn": lambda x: x, **arguments}
    assert refusal(ValueError, lambda: capture(arguments.pop("fn"), torch.ones(2), **arguments)) == text


def test_docstring_example():
    assert doctest.testmod(captured_module).attempted == 3
    assert doctest.testmod(captured_module).failed == 0


def test_numpy_input():
    assert refusal(ValueError, lambda: capture(lambda x: x, torch.ones(2).numpy())) == message("graph/capture:numpy_input")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors need Triton's interpreter")
@pytest.mark.interpreted
def test_a_table_that_the_first_call_makes_and_triton_reads():
    """A kernel's arguments may be written; this one is not, so it is no state, and capture needs no call beforehand."""
    from gpubound.kernels import rope

    class Turn:
        table = None

        def __call__(self, q):
            made.append(self)
            if self.table is None:
                angle = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.5])
                self.table = angle.cos(), angle.sin()
            return rope(q, q, *self.table)[0]

    made = list[Turn]()
    turn, later, together = Turn(), Turn(), Turn()
    later(torch.randn(1, 4, 2, 4))
    captured = capture(turn, torch.randn(1, 4, 2, 4))
    other = torch.randn(1, 4, 2, 4)
    capture(later, other)
    capture(together, other, gate=lambda: None)
    assert made.count(turn) == made.count(later) - 1  # no call more than with a table that was there before
    assert made.count(together) == made.count(turn) + 2  # of two tables, on each rank, whatever it finds
    assert torch.equal(captured(other), turn(other)) and captured.certificate.bitwise


EXAMPLE = Path(__file__).parents[2] / "examples" / "capture_a_step.py"


def test_the_example(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 3 and losses[-1] < 1.0  # from a variance of 16
    assert "agree bit for bit" in printed
    assert message("graph/example:the_example").within(printed)


def test_one_caller_at_a_time_in_whatever_thread():
    turn, heard = ReentryGuard(KeyError, "busy"), []

    def other():
        try:
            with turn:
                heard.append("inside")
        except KeyError as error:
            heard.append(error.args[0])

    with turn:
        for call in (other, lambda: in_a_thread(other)):
            call()
        assert turn.taken
    in_a_thread(other)
    assert heard == ["busy", "busy", "inside"] and not turn.taken


def test_a_generator_may_end_in_another_thread_than_it_began():
    turn = ReentryGuard(KeyError, "busy")

    def taking():
        with turn:
            yield

    running = taking()
    next(running)
    in_a_thread(running.close)
    assert not turn.taken


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copy_is_made(make):
    class Step(NotCopyable):
        INSTEAD = "copy the model"

    with pytest.raises(TypeError, check=message("single:no_copy_is_made")):
        make(Step())


def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


class Cell(nn.Module):
    """It rebinds all that it holds, and is refused for what it reads at last."""

    def __init__(self, read):
        super().__init__()
        self.read, self.last, self.table, self.length, self.calls = read, None, torch.zeros(1), 1, []
        self.register_buffer("mean", torch.zeros(3))
        self.pair, self.cache, self.rows = (torch.zeros(3), torch.ones(3)), {"keys": torch.zeros(3)}, [torch.zeros(3)]

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.pair, self.cache["keys"], self.rows[0] = x * 2, (x * 3, x * 4), x * 5, x * 6
        self.cache["values"], self.mean = x * 7, x.mean(0).expand(3) * 8
        if self.length < len(x):
            self.table, self.length = torch.zeros(len(x)), len(x)
        self.calls.append(len(x))
        return self.read(self.last) + self.table


def of_the_host(x):
    return x * x.sum().item()


def test_what_it_held_is_there_again(runner):
    assert_there_again(Cell(of_the_host))


def test_where_the_certificate_fails(tape):
    assert_there_again(Cell(lambda x: x * peek(x)))


def assert_there_again(cell):
    before, cache, rows = dict(vars(cell)), dict(cell.cache), list(cell.rows)
    mean, values = cell.mean, copy.deepcopy(cell.state_dict())
    said(capture, cell, torch.ones(3))
    assert all(vars(cell)[name] is value for name, value in before.items()) and vars(cell).keys() == before.keys()
    assert cell.cache == cache and cell.rows == rows and cell.mean is mean
    assert all(torch.equal(value, cell.state_dict()[name]) for name, value in values.items())
    assert len(cell.calls) >= 3  # a list without tensors is somebody's account


def test_names_around_it(runner):
    kept, begun = torch.zeros(3), None

    def step(x):
        nonlocal kept, begun
        global WORN
        kept, begun, WORN = kept + x, x * 2, WORN + x
        return of_the_host(kept + WORN)

    before, worn = kept, WORN
    said(capture, step, torch.ones(3))
    assert kept is before and begun is None and WORN is worn


WORN = torch.zeros(3)


def test_moments_that_it_made(runner):
    """They had seen gradients of the watched calls, and went on from there."""
    layer = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)

    def step(x):
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return of_the_host(loss)

    said(capture, step, drawn(5, 4))
    assert not optimizer.state


def test_what_a_capture_that_holds_has_bound_stays(runner):
    class Last:
        value = None

        def step(self, x):
            self.value = x * 2
            return self.value + 1

    last = Last()
    captured = capture(last.step, torch.ones(3))
    captured(torch.full((3,), 4.0))
    assert last.value is not None


def test_no_path_is_made_to_numbers_and_to_objects_seen_before(monkeypatch):
    made, to = list[str](), AccessPath.to
    monkeypatch.setattr(AccessPath, "to", lambda path, label, *steps: made.append(label) or to(path, label, *steps))
    module = nn.Linear(2, 2)
    module.numbers, module.again, module.other = [*range(100), "name", None], [module, module], {"weight": module.weight}
    found = Reachable(lambda: module(torch.ones(2)), None)
    assert sorted(made) == sorted([".training", ".weight", ".bias", ".numbers", ".again", ".other", "['weight']"])
    assert [path.name for path, _ in found.tensors] == ["module.weight", "module.bias", "module.other['weight']"]
