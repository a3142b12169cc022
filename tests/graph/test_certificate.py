"""The certificate: a graph that ignores, bakes in or leaves out something does not pass, and the error says what."""

import ctypes
import random
import time
from itertools import count

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gpubound.errors import GraphError
from gpubound.graph import capture, certify, recording
from gpubound.graph.certify import perturb
from gpubound.graph.memory import difference
from tests.messages import message, refusal

from .cases import drawn, elsewhere, said
from .tape import TapeRunner

IGNORES = (
    "the replay ignores {}, which fn takes from the host (a Python number, a NumPy copy, a cached tensor); "
    "compute from the input's tensor inside fn."
)


@pytest.fixture(params=["here", "elsewhere"], autouse=True)
def places(request, monkeypatch):
    """Each test with copies beside the state, and with fingerprints in place of copies on the host."""
    if request.param == "elsewhere":
        elsewhere(monkeypatch)


def peek(tensor: torch.Tensor) -> float:
    """Read a tensor's first value behind torch's back, as a NumPy array that shares its memory would."""
    return ctypes.c_float.from_address(tensor.data_ptr()).value


def test_an_ignored_input(tape):
    def scaled(x, scale):
        return x * peek(scale)

    sentence = said(capture, scaled, drawn(3), torch.ones(1))
    assert sentence.startswith("scaled: output 0 of the replay is off by ") and sentence.endswith(
        " in round 1 of 2: " + IGNORES.format("input 1")
    )


def test_an_ignored_input_that_only_reaches_state(tape):
    total = torch.zeros(3)

    def add(x):
        total.add_(peek(x))

    sentence = said(capture, add, drawn(3))
    assert sentence.startswith("add: total of the replay is off by ") and sentence.endswith(IGNORES.format("input 0"))
    assert not total.any()


def test_a_gradient_that_ignores_an_input(tape):
    weight = torch.ones(3, requires_grad=True)

    def backward(x, scale):
        weight.grad = None
        (weight * x * peek(scale)).sum().backward()

    sentence = said(capture, backward, drawn(3), torch.ones(1))
    assert sentence.startswith("backward: weight.grad of the replay is off by ") and IGNORES.format("input 1") in sentence


def test_a_counter_on_the_host(runner):
    calls = []

    def counted(x):
        calls.append(1)
        return x * len(calls)

    sentence = said(capture, counted, torch.ones(3))
    assert sentence.endswith(
        "eager itself gives another result at each call from one state, so fn keeps something on the host between calls "
        "(a number, a list, an attribute that it rebinds); keep it in a tensor and update it in place."
    )


def test_every_second_call_differs(tape):
    """The second round goes on where the first ended, but a host-side switch has been left where the capture found it."""
    turn = iter(range(10**6))

    def alternating(x):
        return x if next(turn) % 2 else -x

    assert "on the host between calls" in said(capture, alternating, torch.ones(3))


def test_a_python_result(tape):
    sizes = iter(range(10**6))

    def counting(x):
        return x, next(sizes)

    assert said(capture, counting, torch.ones(3)).startswith(
        "output 1: the graph always returns 2, eager returns 3 with other inputs"
    )


def test_a_graph_that_recorded_nothing(monkeypatch):
    """What torch.cuda.graph makes of a capture on another device than its default stream's: a replay that does nothing."""

    class Empty(TapeRunner):
        def replay(self):
            pass

    monkeypatch.setattr(recording, "runner_for", lambda device, pool: Empty())
    sentence = said(capture, lambda x: x * 2, torch.ones(3))
    assert sentence == (
        "<lambda>: output 0 of the replay is off by inf (inf of the largest value) from eager in round 1 of 2: "
        + IGNORES.format("input 0")
    )


HOST_READS = {
    "random": lambda x: x * random.random(),
    "numpy": lambda x: x * float(np.random.rand()),
    "a choice": lambda x: x * random.choice(range(1000)),
}


@pytest.mark.parametrize("name", HOST_READS)
def test_what_is_read_from_the_host(runner, name):
    sentence = said(capture, HOST_READS[name], torch.ones(3))
    assert sentence.startswith("<lambda>: output 0 of the replay is off by ")
    assert "random" in sentence


def test_timing_and_logging_are_no_reason(runner):
    took, seeds = [], []

    def fn(x):
        began = time.perf_counter()
        seeds.append(random.getstate())
        took.append(time.perf_counter() - began)
        return x * 2

    before = random.getstate()
    assert capture(fn, torch.ones(3)).certificate.bitwise
    assert random.getstate() == before and seeds[0] == before and before not in seeds[-2:-1] * (runner == "tape")


def test_other_inputs_are_used_and_named(tape):
    seen = []

    def fn(index, table):
        seen.append(index)
        return table[index]

    table = drawn(5)
    captured = capture(fn, torch.tensor([0]), table)
    assert captured.certificate.unvaried == ("input 0",)
    assert message("graph/certificate:other_inputs_are_used_an").within(str(captured.certificate))
    captured = capture(fn, torch.tensor([0]), table, other_inputs=[(torch.tensor([3]), table), (torch.tensor([4]), table)])
    assert captured.certificate.unvaried == ()
    assert {3, 4} <= {index.item() for index in seen}


def test_inputs_that_cannot_be_made_up():
    def checked(x):
        if peek(x) != 1.0:
            raise ValueError("only ones")
        return x * 2

    assert said(capture, checked, torch.ones(2)) == message("graph/certificate:inputs_that_cannot_be_ma")
    assert capture(checked, torch.ones(2), other_inputs=[(torch.ones(2),)]).certificate.rounds == 1


def test_other_inputs_must_fit():
    assert said(lambda: capture(lambda x: x, torch.ones(2), other_inputs=[(torch.ones(3),)])) == (
        message("graph/certificate:other_inputs_must_fit")
    )


def test_the_copies_in_words():
    total, zeros = drawn(1000), torch.zeros(3)
    without, some = capture(lambda x: x * 2, torch.ones(3)), capture(lambda x: total.add_(x.sum()), torch.ones(3))
    assert message("graph/certificate:the_copies_in_words").within(str(without.certificate))
    assert message("graph/certificate:the_copies_in_words.2").within(str(some.certificate))
    assert "snapshots in" not in str(capture(lambda x: zeros.zero_() + x, torch.ones(3)).certificate)


def test_a_failed_certificate_leaves_the_state(tape):
    state = drawn(3)
    before = state.clone()

    def fn(x):
        state.add_(x * peek(x))
        return state

    random = torch.get_rng_state()
    said(capture, fn, torch.ones(3))
    assert torch.equal(state, before) and torch.equal(random, torch.get_rng_state())


def test_noise_within_a_tolerance(tape):
    """A replay that differs in the last bits, as sums in another order do: refused bit for bit, accepted within a tolerance."""
    nudge = iter(range(10**6))

    def noisy(x):
        return x * (1 + 1e-6 * (next(nudge) % 7))

    sentence = said(capture, noisy, drawn(3))
    assert message("graph/certificate:noise_within_a_tolerance").within(sentence) and "pass tolerance=" in sentence
    certificate = capture(noisy, drawn(3), tolerance=1e-4).certificate
    assert not certificate.bitwise and 0 < certificate.worst.relative < 1e-5 and certificate.worst_name == "output 0"
    assert str(certificate).startswith("2 rounds of replay against eager agree within ")


@pytest.mark.parametrize(
    "example",
    [
        drawn(4, 3),
        torch.full((2,), 3.0),
        torch.tensor([0, -100, 5, 5]),
        torch.tensor([True, False, False]),
        torch.tensor([7]),
        torch.tensor([1.0, float("-inf"), 0.0]),
        drawn(3).to(torch.bfloat16),
        torch.complex(drawn(3), drawn(3, seed=1)),
        drawn(3).to(torch.float8_e4m3fn),
        torch.tensor(2.5),
        torch.tensor([True, True]),
    ],
    ids=str,
)
def test_other_values_of_the_same_kind(example):
    first, second = perturb([example], 0)[0][0], perturb([example], 1)[0][0]
    for new in (first, second):
        assert new.shape == example.shape and new.dtype == example.dtype and not difference(new, example).bitwise
        if not example.is_floating_point() and not example.is_complex():
            assert example.numel() < 2 or set(new.tolist()) <= set(example.tolist()) | {False}
        if example.is_floating_point():
            low, high = example.float().min().item(), example.float().max().item()
            assert all((0.0 if low == high else low) <= value <= high for value in new.float().flatten().tolist())


def test_drawn_values_fit_their_dtype():
    wide = torch.tensor([448.0, -448.0, 0.0] * 100).to(torch.float8_e4m3fn)
    assert bool(perturb([wide], 0)[0][0].float().isfinite().all())


def test_probabilities_stay_probabilities():
    """Outside of 0 to 1 the loss raises, on a GPU by an assertion in its kernel that ends the process."""
    for targets in (torch.rand(8, 3, generator=torch.Generator().manual_seed(0)), torch.ones(4), torch.zeros(4)):
        fn = capture(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), torch.zeros_like(targets), targets)
        assert not fn.certificate.unvaried


def test_what_cannot_be_varied():
    assert perturb([torch.zeros(3, dtype=torch.int64), torch.ones(0)], 0)[1] == [0]
    assert perturb([torch.full((3,), float("nan"))], 0)[1] == [0]


def test_difference():
    nan = float("nan")
    assert difference(torch.tensor([1.0, nan]), torch.tensor([1.0, nan])).bitwise
    assert difference(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0])).absolute == float("inf")
    found = difference(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 4.0]))
    assert (found.bitwise, found.absolute, found.relative) == (False, 1.0, 0.25)
    assert not difference(torch.tensor([0.0]), torch.tensor([-0.0])).bitwise


def compared(eager: list, replayed: list, made: tuple = (None, None)) -> str:
    """What _compare says of these outputs and one gradient, from eager and from the replay."""
    one, other = certify.Results(eager, {"w.grad": made[0]}, []), certify.Results(replayed, {"w.grad": made[1]}, [])
    return refusal(GraphError, lambda: certify._compare(one, other))


@pytest.mark.parametrize(
    ("eager", "replayed", "sentence"),
    [
        ([torch.ones(2)], [], "outputs: eager returns 1, the graph 0"),
        ([1.0], [2.0], "output 0: the graph always returns 2.0, eager returns 1.0"),
        ([True], [1], "output 0: the graph always returns 1, eager returns True"),
        ([torch.ones(2)], [torch.ones(3)], "output 0: eager gives torch.float32 (2,) with other inputs, the graph"),
        ([torch.ones(2)], [torch.ones(2).double()], "output 0: eager gives torch.float32 (2,) with other inputs, the graph"),
    ],
)
def test_outputs_of_two_kinds_are_no_rounding_error(eager, replayed, sentence):
    assert compared(eager, replayed).startswith(sentence)


def test_a_gradient_that_only_one_of_them_makes():
    assert compared([], [], (torch.ones(1), None)).startswith("w.grad: eager makes this gradient, the replay does not")
    assert compared([], [], (None, torch.ones(1))).startswith("w.grad: the replay makes this gradient, eager does not")


def test_each_round_starts_from_what_the_replay_before_has_left(tape):
    """Within a tolerance eager and the replay drift apart; a round that began from eager's state would hide half of it."""
    state, steps = torch.zeros(1, dtype=torch.float64), count()

    def fn(x):
        state.add_(1 + next(steps) ** 2 / 1024)  # 2 warm-ups, the recording, then an eager call a round: 9 and 16 against 4
        return state + 0 * x

    found = capture(fn, torch.ones(1, dtype=torch.float64), tolerance=0.5).certificate
    assert not found.bitwise and found.worst.absolute == 12 / 1024


def test_what_is_true_of_one_round_alone(tape, monkeypatch):
    """The generators must agree in every round; an input that was varied in one of them has been varied."""
    rounds, varying = iter([([], False, set()), ([], True, set())]), iter([[0], []])
    monkeypatch.setattr(certify, "_round", lambda *_, **__: next(rounds))
    monkeypatch.setattr(certify, "perturb", lambda examples, turn: ([example.clone() for example in examples], next(varying)))
    found = capture(lambda x: x * 2, torch.ones(2)).certificate
    assert not found.same_random_state and found.unvaried == ()


def test_the_static_inputs_hold_the_example_again(runner):
    example = drawn(4)
    assert torch.equal(capture(lambda x: x * 2, example).inputs[0], example)
