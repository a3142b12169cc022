"""What a function reads and writes is found, whichever way it does it."""

import gc

import pytest
import torch
import triton
import triton.language as tl
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from gpubound.graph import capture, discover as discovery
from gpubound.graph.memory import Generators, Snapshot, StorageCopy
from tests.messages import message

from .cases import drawn, said


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=mask) + tl.load(y_ptr + at, mask=mask), mask=mask)


def launch_add(x, y, out):
    add_kernel[(1,)](x, y, out, x.numel(), 16)
    return out


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors need Triton's interpreter")
@pytest.mark.interpreted
class TestTriton:
    def test_a_write_no_dispatcher_sees(self, runner):
        total = torch.zeros(10)
        captured = capture(lambda x: launch_add(x, total, total) * 2, drawn(10))
        assert not total.any()
        assert captured.certificate.mutated == ("total",) and captured.held == ["total", "input 0"]
        x = drawn(10, seed=2)
        assert torch.equal(captured(x), x * 2) and torch.equal(total, x)

    def test_a_weight_that_is_only_read_is_not_copied(self, monkeypatch):
        weight = nn.Parameter(drawn(10), requires_grad=False)
        captured = capture(lambda x: launch_add(x, weight, torch.empty_like(x)), drawn(10))
        assert captured.held == ["weight", "input 0"]
        assert captured.certificate.snapshot_bytes == 0

    def test_a_weight_that_is_written(self, runner):
        weight = nn.Parameter(drawn(10), requires_grad=False)
        captured = capture(lambda x: launch_add(x, weight, weight), drawn(10))
        assert torch.equal(weight, drawn(10)) and captured.certificate.mutated == ("weight",)

    def test_something_large_is_copied_only_when_it_changes(self, runner, monkeypatch):
        monkeypatch.setattr(discovery, "LARGE", 16)
        table, total = drawn(10), torch.ones(10)
        captured = capture(lambda x: launch_add(x, table, total), drawn(10))
        assert captured.certificate.mutated == ("total",) and captured.certificate.snapshot_bytes == 80
        assert total.eq(1).all()

    def test_an_input_that_is_written(self):
        assert said(capture, lambda x: launch_add(x, x, x), drawn(10)).startswith(
            "input 0: fn writes into it at tests/graph/test_discover.py:"
        )

    def test_inside_a_custom_op(self, runner):
        library = torch.library.Library("gpubound_test_discover", "DEF")
        library.define("add(Tensor x, Tensor y) -> Tensor")
        library.impl("add", lambda x, y: launch_add(x, y, torch.empty_like(x)), "CPU")
        weight = drawn(10)
        captured = capture(lambda x: torch.ops.gpubound_test_discover.add(x, weight), drawn(10))
        assert captured.held == ["weight", "input 0"]
        x = drawn(10, seed=3)
        assert torch.equal(captured(x), x + weight)

    def test_a_kernel_of_ours_is_tried_with_one_weight(self, runner, monkeypatch):
        """Its op would bump the version of what it writes; of another kernel nobody knows what a further launch writes."""
        from gpubound.kernels import rms_norm

        compared = list[str]()
        monkeypatch.setattr(
            discovery, "StorageCopy", lambda tensor, *rest: compared.append(tensor.shape[0]) or StorageCopy(tensor, *rest)
        )
        ours, theirs = (nn.ParameterList([drawn(*size), drawn(*size, seed=1)]).requires_grad_(False) for size in ((8,), (2, 4)))

        def fn(x):
            for own, other in zip(ours, theirs):
                x = launch_add(rms_norm(x, own), other, torch.empty(8))
            return x

        captured = capture(fn, drawn(1, 8))
        assert compared.count(8) == 1 and compared.count(2) >= 4 and not captured.certificate.mutated
        assert {"ours.0", "ours.1", "theirs.0", "theirs.1"} <= {*captured.held}

    @pytest.mark.parametrize("alters, calls", [(False, 2), (True, 3)])
    def test_a_table_that_a_kernel_gets_is_compared_in_the_second_call(self, alters, calls, monkeypatch):
        watched, run, kept = list[int](), discovery.Discovery.run, {}

        def noted(self, call):
            result = run(self, call)
            watched.append(self.calls)
            gc.collect()  # the interpreter's launches keep their arguments in a cycle
            return result

        monkeypatch.setattr(discovery.Discovery, "run", noted)

        def fn(x):
            table = kept.get("table")
            if table is None:
                table = kept["table"] = torch.arange(10.0).cos()
            return launch_add(x, table, table if alters else torch.empty_like(x))

        if alters:
            assert "its first value is lost" in said(capture, fn, drawn(10))
        else:
            assert capture(fn, drawn(10)).certificate.bitwise
        assert watched == [*range(1, calls + 1)]

    def test_weights_without_a_storage_of_their_own(self, runner):
        """A wrapper's tensors are compared, and a sparse weight is left alone."""
        from gpubound.kernels import rms_norm

        gains = nn.ParameterList([torch.ones(8), torch.ones(8)]).requires_grad_(False)
        wrapper = nn.Parameter(TwoTensor(drawn(8), drawn(8, seed=1)), requires_grad=False)
        sparse = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)

        def fn(x):
            return rms_norm(rms_norm(x, gains[0]), gains[1]) * (wrapper * 2).b + sparse.shape[0]

        x = drawn(1, 8)
        torch.testing.assert_close(capture(fn, x)(x), fn(x))

    def test_a_weight_that_a_kernel_of_ours_writes_where_it_only_read_another(self, runner, monkeypatch):
        """No kernel of ours does, without its op's bumping the version: what it has left would be taken for what it leaves."""
        monkeypatch.setattr(discovery, "OURS", launch_add.__module__)
        first, second = (nn.Parameter(drawn(10, seed=seed), requires_grad=False) for seed in (1, 2))

        same = first.detach().clone()

        def fn(x):
            launch_add(torch.zeros(10), same, first)
            launch_add(x, same, second)

        assert said(capture, fn, drawn(10)).replace("second", "weight") == message("graph/memory:a_write_into_what_is_only")

    def test_a_weight_that_one_of_our_kernels_writes_from_the_second_call_on(self, runner, monkeypatch):
        from gpubound.kernels import add_rows

        weight, ids, factor = nn.Parameter(torch.ones(2, 8), requires_grad=False), torch.tensor([1]), torch.zeros(())

        def fn(x):
            add_rows(weight.detach(), ids, x * factor)
            factor.fill_(1.0)

        captured = capture(fn, drawn(1, 8))
        assert torch.equal(weight, torch.ones(2, 8)) and "weight" in captured.certificate.mutated

    def test_our_kernels_train(self, runner):
        from gpubound.kernels import rms_norm

        weight = nn.Parameter(torch.ones(8))
        weight.main_grad = torch.zeros(8)

        def fn(x):
            weight.grad = None
            loss = rms_norm(x, weight).square().sum()
            loss.backward()
            if weight.grad is not None:
                weight.main_grad.add_(weight.grad)
            return loss.detach()

        captured = capture(fn, drawn(3, 8))
        assert not weight.main_grad.any()
        assert "weight.main_grad" in captured.certificate.mutated


def test_views_share_one_copy(runner):
    flat = torch.zeros(8)
    first, second = flat[:4], flat[4:]

    def fn(x):
        first.add_(x)
        second.copy_(first)

    captured = capture(fn, torch.ones(4))
    assert not flat.any()
    assert captured.held == ["first", "second", "input 0"]
    captured(torch.ones(4))
    assert flat.tolist() == [1.0] * 8


def test_out_arguments_and_foreach(runner):
    out, moments = torch.zeros(3), [torch.zeros(3), torch.zeros(3)]

    def fn(x):
        torch.mul(x, 2, out=out)
        torch._foreach_add_(moments, 1.0)

    captured = capture(fn, torch.ones(3))
    assert set(captured.certificate.mutated) == {"out", "moments[0]", "moments[1]"}
    assert not out.any() and not moments[1].any()


def test_an_input_that_is_written():
    def fn(x):
        x.add_(1)
        return x

    line = fn.__code__.co_firstlineno + 1
    assert said(capture, fn, torch.ones(3)) == message("graph/discover:an_input_that_is_written", line)


def test_an_input_that_is_given_a_gradient():
    x = torch.ones(3, requires_grad=True)
    assert said(capture, lambda x: x.square().sum().backward(), x) == message("graph/discover:an_input_that_is_given_a")


def test_state_that_moves():
    class Recurrent:
        state = torch.zeros(3)

        def step(self, x):
            self.state = self.state * 0.5 + x
            return self.state

    cell = Recurrent()
    line = Recurrent.step.__code__.co_firstlineno + 1
    assert said(capture, cell.step, torch.ones(3)) == message("graph/discover:state_that_moves", line)


def test_a_third_call_is_watched_where_the_second_keeps_what_it_created(monkeypatch):
    watched, run = list[int](), discovery.Discovery.run
    monkeypatch.setattr(discovery.Discovery, "run", lambda self, call: (run(self, call), watched.append(self.calls))[0])
    weight, kept = nn.Parameter(torch.ones(3)), {}

    def keeps(x):
        weight.grad = None
        (weight * x).sum().backward()

    def settles(x):
        kept.setdefault("table", torch.arange(3.0))
        return (x * kept["table"]).exp().sum()

    for fn, calls in ((settles, 2), (keeps, 3)):
        watched.clear()
        capture(fn, torch.ones(3))
        assert watched == [*range(1, calls + 1)]


def test_moments_whose_first_value_is_lost():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()

    line = step.__code__.co_firstlineno + 3
    sentence = (
        f"optimizer.state[weight]['momentum_buffer']: made at tests/graph/test_discover.py:{line} by the first call and "
        "updated by later ones, so its first value is lost; call step once yourself before capture()."
    )
    assert said(capture, step, torch.ones(3)) == sentence
    assert torch.equal(weight, torch.ones(3))
    optimizer.state.clear()
    step(torch.ones(3))
    before = weight.detach().clone()
    capture(step, torch.ones(3))
    assert torch.equal(weight, before)


def test_a_table_made_once_is_kept(runner):
    tables = {}

    def fn(x):
        if "cos" not in tables:
            tables["cos"] = torch.arange(3.0).cos()
        return x * tables["cos"]

    captured = capture(fn, torch.ones(3))
    assert captured.held == ["tables['cos']", "input 0"]
    assert torch.equal(captured(torch.ones(3)), torch.arange(3.0).cos())


def test_a_workspace_made_once_is_let_pass(runner):
    workspace = {}

    def fn(x):
        if "partial" not in workspace:
            workspace["partial"] = torch.empty(3)
        return torch.mul(x, 3, out=workspace["partial"]) + 1

    assert capture(fn, torch.ones(3)).certificate.bitwise


def test_python_numbers_of_an_optimizer():
    weight = torch.ones(3)
    optimizer = torch.optim.SGD([nn.Parameter(weight)], lr=0.1)

    def fn(x):
        optimizer.param_groups[0]["lr"] *= 0.5
        return x * optimizer.param_groups[0]["lr"]

    assert said(capture, fn, torch.ones(3)) == message("graph/discover:python_numbers_of_an_opt")


def test_state_named_by_the_user(runner):
    hidden = torch.zeros(3)
    captured = capture(lambda x: x * 2, torch.ones(3), state={"cache": [hidden]})
    assert captured.held == ["state['cache'][0]", "input 0"]
    hidden.data = torch.zeros(3)
    assert said(captured, torch.ones(3)).startswith("state['cache'][0]: got other memory than captured")


def test_a_write_that_nothing_sees_is_found_through_state(tape):
    """As an extension's kernel would: it writes into memory directly, at capture. The replay does not."""
    import ctypes

    hidden = torch.zeros(1)

    def unseen(x):
        cell = ctypes.c_float.from_address(hidden.data_ptr())
        cell.value += 1.0
        return x * 2

    assert capture(unseen, torch.ones(3)).certificate.bitwise  # nothing says so: this is why state= exists
    hidden.zero_()
    assert said(lambda: capture(unseen, torch.ones(3), state=hidden)).startswith("unseen: hidden of the replay is off by 1 ")
    assert hidden.item() == 0.0


def test_memory_that_a_weight_moved_away_from_is_no_longer_outside():
    """Whatever is made next may lie at its address, and an output there would have been taken for the function's state."""
    weight, x = nn.Parameter(drawn(10)), drawn(10)
    watching = discovery.Discovery(torch.device("cpu"), [x], Snapshot(torch.device("cpu")), Generators(torch.device("cpu")))

    def moves_its_weight():
        y = x * weight
        weight.data = weight.detach().clone()
        return y * weight

    watching.run(moves_its_weight)
    assert not watching.external  # the new memory was made in the call
