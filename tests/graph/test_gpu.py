"""The same on a GPU, where the graph is CUDA's: certificates, pools, generators, streams, failed captures, the checks' cost."""

import pytest
import torch
import triton
import triton.language as tl
from torch import nn

from gpubound.graph import capture
from gpubound.graph.runner import capture_stream
from gpubound.watch import ops, watch
from tests.messages import message

from .cases import contents, drawn, equal, perceptron, said, training_step

pytestmark = pytest.mark.gpu

cuda = torch.device("cuda", 0)


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True, **options)


# torch 2.13 says at the eager steps that capturable=True is wasted on them; 2.11 does not
@pytest.mark.filterwarnings("ignore:.*capturable=True.*:UserWarning")
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["single", "foreach", "fused"])
def test_adamw_steps_equal_eager_ones(options):
    model, twin = perceptron(cuda), perceptron(cuda)
    optimizer, other = adam(model, **options), adam(twin, **options)
    captured = capture(training_step(model, optimizer), drawn(5, 4, device=cuda), drawn(5, 1, device=cuda))
    assert captured.mode == "graph" and captured.certificate.bitwise and captured.certificate.same_random_state
    eager = training_step(twin, other)
    eager(drawn(5, 4, device=cuda), drawn(5, 1, device=cuda))
    twin.load_state_dict(perceptron(cuda).state_dict())
    for state in other.state.values():
        for value in state.values():
            value.zero_()
    for seed in range(4):
        x, y = drawn(5, 4, seed=seed, device=cuda), drawn(5, 1, seed=seed + 9, device=cuda)
        assert torch.equal(captured(x, y), eager(x, y))
    assert equal(contents(model, optimizer), contents(twin, other))


def test_state_is_put_back_bit_for_bit():
    model = perceptron(cuda, dropout=0.3)
    optimizer = adam(model)
    before, random = contents(model), torch.cuda.get_rng_state(cuda)
    capture(training_step(model, optimizer), drawn(5, 4, device=cuda), drawn(5, 1, device=cuda))
    assert equal(before, contents(model)) and torch.equal(random, torch.cuda.get_rng_state(cuda))
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())


def test_optimizer_that_counts_on_the_host():
    model = perceptron(cuda)
    step = training_step(model, torch.optim.AdamW(model.parameters(), foreach=False))
    assert "`optimizer.step()` at tests/graph/cases.py:" in said(
        capture, step, drawn(5, 4, device=cuda), drawn(5, 1, device=cuda)
    )
    assert said(capture, step, drawn(5, 4, device=cuda), drawn(5, 1, device=cuda)).endswith(
        "build the optimizer with capturable=True (on a CPU: fused=True)."
    )


def test_dropout_replays_differ_and_a_seed_reproduces():
    model = perceptron(cuda, dropout=0.5)
    captured = capture(model, drawn(64, 4, device=cuda))
    x = drawn(64, 4, seed=1, device=cuda)
    torch.cuda.manual_seed(7)
    first, second = captured(x).clone(), captured(x).clone()
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(7)
    assert torch.equal(captured(x), first) and torch.equal(captured(x), second)
    torch.cuda.manual_seed(7)
    assert torch.equal(model(x), first) and torch.equal(model(x), second)


def test_a_generator_of_the_users_own():
    generator = torch.Generator(cuda).manual_seed(3)
    captured = capture(lambda x: x + torch.rand(4, generator=generator, device=cuda), torch.zeros(4, device=cuda))
    want = [torch.rand(4, generator=torch.Generator(cuda).manual_seed(3), device=cuda)]
    zeros = torch.zeros(4, device=cuda)
    first = captured(zeros).clone()
    assert torch.equal(first, want[0]) and not torch.equal(captured(zeros), first)


def test_two_functions_share_a_pool():
    small, large = perceptron(cuda), perceptron(cuda)
    first = capture(small, drawn(512, 4, device=cuda))
    second = capture(large, drawn(256, 4, device=cuda), pool=first.pool)
    assert second.pool == first.pool and second.certificate.bitwise
    for seed in range(3):
        x, y = drawn(512, 4, seed=seed, device=cuda), drawn(256, 4, seed=seed, device=cuda)
        assert torch.equal(first(x), small(x))
        assert torch.equal(second(y), large(y))


def test_poison_and_a_shared_pool():
    model = perceptron(cuda)
    first = capture(model, drawn(512, 4, device=cuda))
    second = capture(model, drawn(256, 4, device=cuda), pool=first.pool)
    for seed in range(3):
        for captured, rows in ((first, 512), (second, 256)):
            x = drawn(rows, 4, seed=seed, device=cuda)
            captured._recording.poison_results()
            assert torch.equal(captured(x), model(x))


def test_poison_reaches_the_pool():
    from gpubound.graph.runner import poison_pool

    captured = capture(lambda x: (x * 2).sin().cos() + 1, torch.ones(1 << 16, device=cuda))
    assert poison_pool(captured.pool, cuda) >= 1 << 18
    x = drawn(1 << 16, device=cuda)
    assert torch.equal(captured(x), (x * 2).sin().cos() + 1)


@triton.jit
def add_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=mask) + tl.load(out_ptr + at, mask=mask), mask=mask)


def test_a_triton_write_is_found():
    total = torch.zeros(100, device=cuda)

    def fn(x):
        add_kernel[(1,)](x, total, 100, 128)
        return total * 2

    captured = capture(fn, drawn(100, device=cuda))
    assert not total.any() and captured.certificate.mutated == ("total",) and captured.certificate.bitwise
    x = drawn(100, seed=2, device=cuda)
    assert torch.equal(captured(x), x * 2)


def test_gradients_accumulate_in_place():
    model = nn.Linear(3, 2, device=cuda)
    captured = capture(lambda x: model(x).square().sum().backward(), drawn(4, 3, device=cuda))
    buffer = model.weight.grad
    captured(drawn(4, 3, seed=1, device=cuda))
    once = buffer.clone()
    captured(drawn(4, 3, seed=1, device=cuda))
    assert model.weight.grad is buffer and torch.equal(buffer, 2 * once) and once.any()


def test_a_baked_in_number_fails_its_certificate():
    """Each address gets a number of its own: the graph keeps that of its static buffer."""
    numbers: dict[int, int] = {}

    def keyed(x):
        return x * (1 + numbers.setdefault(x.data_ptr(), len(numbers)))

    assert message("graph/gpu:a_baked_in_number_fails").within(said(capture, keyed, drawn(3, device=cuda)))


ONE_LINERS = {
    "item": lambda x: x * x.sum().item(),
    "mask": lambda x: x[x > 0],
    "upload": lambda x: x + torch.ones(4).to(cuda),
    "constant": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=cuda),
    "download": lambda x: x.cpu(),
    "element": lambda x: x.clone().__setitem__(0, 2.0),
    "wait": lambda x: (x * 2, torch.cuda.current_stream().synchronize()),
}


@pytest.mark.parametrize("name", ONE_LINERS)
def test_what_cannot_be_captured_is_named_and_leaves_no_harm(name):
    """After a refusal the process can draw random numbers, allocate and capture."""
    line = ONE_LINERS[name].__code__.co_firstlineno
    sentence = said(capture, ONE_LINERS[name], drawn(4, device=cuda))
    assert sentence.startswith("cannot capture <lambda>") and f"at tests/graph/test_gpu.py:{line}" in sentence
    torch.rand(4, device=cuda)
    assert capture(lambda x: torch.nn.functional.dropout(x * 2), drawn(4, device=cuda)).certificate.bitwise


def test_a_wait_is_named_after_a_ledger_was_used():
    """A ledger's hook must be off again: at a free it would lose the error that is on its way up."""
    with watch(gputrace=True):
        torch.ones(4, device=cuda).sum().item()
    test_what_cannot_be_captured_is_named_and_leaves_no_harm("wait")


def test_a_hidden_wait_is_named(monkeypatch):
    """The wait is inside an operation that the table does not list: torch's own sync detector sees it."""
    monkeypatch.delitem(ops._LOOKS, "histc")

    def fn(x):
        return torch.histc(x, bins=4)  # without min and max it reads them from the host

    line = fn.__code__.co_firstlineno + 1
    sentence = said(capture, fn, drawn(64, device=cuda))
    assert (
        sentence.startswith("cannot capture fn: `return torch.histc(x, bins=4)")
        and f"tests/graph/test_gpu.py:{line} " in sentence
    )


def test_a_read_in_a_backward_hook_is_named():
    """Autograd runs it on a thread of its own."""

    def fn(x):
        x = x.detach().requires_grad_()
        y = x * 2
        y.register_hook(lambda gradient: gradient if gradient.max() > 0 else None)
        return torch.autograd.grad(y.sum(), x)[0]

    line = fn.__code__.co_firstlineno + 3
    assert message("graph/gpu:a_read_in_a_backward_hoo", line).within(said(capture, fn, drawn(4, device=cuda)))


def test_mixed_precision_clipping_and_dropout():
    model = perceptron(cuda, dropout=0.2)
    optimizer = adam(model, fused=True)

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(x) - y).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), norm

    captured = capture(step, drawn(64, 4, device=cuda), drawn(64, 1, device=cuda))
    assert captured.certificate.bitwise and len(captured.certificate.mutated) == 4 + 12 + 4


def test_a_function_that_fails_while_captured_leaves_no_harm():
    state = torch.zeros(3, device=cuda)

    def fn(x):
        state.add_(torch.rand(3, device=cuda))
        if torch.cuda.is_current_stream_capturing():
            raise KeyError("mine")
        return x + state

    with pytest.raises(KeyError, match="mine"):
        capture(fn, torch.ones(3, device=cuda))
    assert not state.any()
    torch.rand(3, device=cuda)
    assert capture(lambda x: x + torch.rand(3, device=cuda), torch.ones(3, device=cuda)).certificate.bitwise


def test_inputs_on_the_cpu():
    model = perceptron(cuda)
    assert said(capture, model, drawn(5, 4)) == message("graph/gpu:inputs_on_the_cpu")
    captured = capture(model, drawn(5, 4, device=cuda))
    assert said(captured, drawn(5, 4)) == message("graph/gpu:inputs_on_the_cpu.2")


def test_weights_that_move_or_are_replaced():
    model = perceptron(cuda)
    captured = capture(model, drawn(5, 4, device=cuda))
    model.cpu()
    assert said(captured, drawn(5, 4, device=cuda)).startswith("0.weight: got other memory than captured")
    model.to(cuda)
    assert said(captured, drawn(5, 4, device=cuda)).startswith("0.weight: got other memory than captured")
    captured.recapture()
    assert torch.equal(captured(drawn(5, 4, device=cuda)), model(drawn(5, 4, device=cuda)))
    model[0].weight = nn.Parameter(drawn(8, 4, device=cuda))
    assert said(captured, drawn(5, 4, device=cuda)).startswith("0.weight: got another tensor")
    captured.recapture()
    model[3].weight.untyped_storage().resize_(0)
    assert said(captured, drawn(5, 4, device=cuda)).startswith("3.weight: got freed memory")


def test_gradients_dropped_outside():
    model = perceptron(cuda)
    optimizer = adam(model)
    captured = capture(training_step(model, optimizer), drawn(5, 4, device=cuda), drawn(5, 1, device=cuda))
    optimizer.zero_grad()
    assert said(captured, drawn(5, 4, device=cuda), drawn(5, 1, device=cuda)).startswith("model.0.weight.grad: ")


def test_a_cpu_tensor_baked_in_and_written_later():
    scale = torch.tensor(2.0)
    captured = capture(lambda x: x * scale, torch.ones(3, device=cuda))
    assert captured(torch.ones(3, device=cuda)).tolist() == [2, 2, 2]
    scale.fill_(3.0)
    assert said(captured, torch.ones(3, device=cuda)) == message("graph/gpu:a_cpu_tensor_baked_in_an")


def test_replay_on_another_stream():
    captured = capture(lambda x: x * 2 + 1, torch.ones(1 << 20, device=cuda))
    stream = torch.cuda.Stream(cuda)
    x = drawn(1 << 20, device=cuda)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = captured(x).clone()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, x * 2 + 1)


@pytest.mark.two_gpus
def test_a_second_device_has_its_own_stream():
    """With torch's own default stream, which belongs to the first device used, the second replay does nothing."""
    for index in (0, 1):
        there = torch.device("cuda", index)
        model = perceptron(there)
        captured = capture(training_step(model, adam(model)), drawn(5, 4, device=there), drawn(5, 1, device=there))
        assert captured.device == there and captured.certificate.bitwise
        before = model[0].weight.clone()
        captured(drawn(5, 4, device=there), drawn(5, 1, device=there))
        assert not torch.equal(before, model[0].weight)
    assert capture_stream(torch.device("cuda", 0)) is not capture_stream(torch.device("cuda", 1))


def test_the_graph_of_a_pool_frees_its_memory():
    x = torch.ones(1 << 22, device=cuda)
    captured = capture(lambda x: (x * 2).sin() + 1, x)
    assert captured.memory_bytes >= x.nbytes
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    del captured
    assert torch.cuda.memory_allocated() < held
