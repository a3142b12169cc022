"""Copies of state, bit for bit wherever they lie and few at once; memory that a cache lends to graphs and finds again."""

import ctypes
import gc
import weakref

import pytest
import torch
from torch import nn

from gpubound import trace
from gpubound.errors import GenerateError
from gpubound.graph import capture, memory, recording
from gpubound.graph.guards import ReentryGuard
from gpubound.graph.memory import EQUAL, CopyBudget, StorageCopy, difference, elements_of
from gpubound.graph.runner import LentMemory, released
from gpubound.kernels.accumulate import ensure_record
from tests.messages import message

from .cases import drawn, said
from .tape import TapeRunner

CPU = torch.device("cpu")


@pytest.fixture(params=["beside", "up", "down"])
def places(request, monkeypatch):
    """Once with copies where the memory is, else by way of bounce buffers, in parts that no tensor here is a multiple of."""
    if request.param != "beside":
        monkeypatch.setattr(memory, "on_two_devices", lambda one, other: True)
        monkeypatch.setattr(memory, "is_download", lambda source: request.param == "down")
    monkeypatch.setattr(memory, "CHUNK", 16)
    monkeypatch.setattr(memory, "PART", 8)
    monkeypatch.setattr(memory, "COMPARED", 8)


@pytest.mark.usefixtures("places")
class TestMemory:
    @pytest.mark.parametrize("first", [torch.zeros(7), -torch.zeros(7), drawn(7)], ids=["zeros", "negative zeros", "drawn"])
    def test_put_back_and_swap(self, first):
        first[0] = 0
        live = first.clone()
        kept = StorageCopy(live[2:5], "", CopyBudget(CPU))
        assert not kept.changed() and kept.difference() is EQUAL
        live.copy_(drawn(7, seed=1))
        assert kept.changed() and not kept.difference().bitwise
        kept.swap()
        assert elements_of(live).view(torch.uint8).equal(first.view(torch.uint8))
        kept.swap()
        assert live.equal(drawn(7, seed=1))
        kept.restore()
        assert live.view(torch.uint8).equal(first.view(torch.uint8))

    def test_dequantised_numbers_are_compared_a_few_at_a_time(self, monkeypatch):
        """The intermediates in fp64 are many times as large: of 16 million numbers at once they took 0.7 GB of a small GPU."""
        live, sizes, compare = torch.arange(-4, 5, dtype=torch.int8), [], memory._largest_difference

        def noting(pairs):
            pairs = list(pairs)
            sizes.extend(t.nbytes for pair in pairs for t in pair)
            return compare(pairs)

        monkeypatch.setattr(memory, "_largest_difference", noting)
        ensure_record(live).numbers = lambda raw, device: iter([raw.view(torch.int8).float() / 4])
        kept = StorageCopy(live, "", CopyBudget(CPU))
        live[6] = 3
        assert kept.difference().absolute == 1 / 4 and sum(sizes) == 2 * 9 * 4 and max(sizes) <= memory.COMPARED

    def test_zeros_take_nothing_until_they_change(self):
        live = torch.zeros(9, dtype=torch.int16)
        kept = StorageCopy(live, "", CopyBudget(CPU))
        assert kept.nbytes == 0
        live[8] = 3
        assert kept.difference().absolute == 3
        kept.save()
        assert kept.nbytes == 18 and not kept.changed()
        live.zero_()
        assert kept.changed()
        kept.save()
        assert kept.nbytes == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool])
    def test_the_difference_of_parts_is_that_of_the_whole(self, dtype, monkeypatch):
        live = (10 * drawn(11)).to(dtype)
        before, kept = live.clone(), StorageCopy(live, "", CopyBudget(CPU))
        live[[3, 10]] = (10 * drawn(2, seed=5)).to(dtype)
        live[0] = ~live[0] if dtype == torch.bool else live[0] + 1
        in_parts, of_tensors = kept.difference(), difference(live, before)
        monkeypatch.setattr(memory, "COMPARED", 1 << 20)
        monkeypatch.setattr(memory, "CHUNK", 1 << 20)
        assert in_parts == of_tensors == difference(live, before) and in_parts.absolute > 0


class Held:
    """The bytes of all copies alive at once, and the most there ever were."""

    def __init__(self, monkeypatch):
        self.now = self.most = 0
        own = CopyBudget.allocate

        def take(room, live):
            kept = own(room, live)
            self.now += kept.numel()
            self.most = max(self.most, self.now)
            weakref.finalize(kept, self.let_go, kept.numel())
            return kept

        monkeypatch.setattr(CopyBudget, "allocate", take)

    def let_go(self, count: int) -> None:
        self.now -= count


def test_a_fresh_training_step_is_copied_once_and_a_third(runner, monkeypatch):
    """A weight, a gradient and two moments that are zero at first: 4 of 16 bytes for the snapshot, 16 for the rounds."""
    held = Held(monkeypatch)
    weight = nn.Parameter(drawn(1000))
    gradient, m, v = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)

    def step(x):
        loss = (weight * x).square().sum()
        gradient.copy_(torch.autograd.grad(loss, weight)[0])
        with torch.no_grad():
            m.lerp_(gradient, 0.1)
            v.lerp_(gradient.square(), 0.01)
            weight.sub_(m / (v.sqrt() + 1e-3))
        return loss.detach()

    captured = capture(step, drawn(1000, seed=1), state=[weight, gradient, m, v])
    assert set(captured.certificate.mutated) == {"weight", "gradient", "m", "v"} and captured.certificate.bitwise
    assert held.most == captured.certificate.snapshot_bytes == 4000 + 16000
    assert weight.equal(drawn(1000)) and not any(t.any() for t in (gradient, m, v))


def written_by(pointer: bool):
    """Return a weight, and a function that reads it and, where bad[0], adds to it: by its address, or by an operation."""
    weight, bad = nn.Parameter(drawn(4)), [True]

    def loss(x):
        result = (weight * x).sum()
        if bad[0] and pointer:
            ctypes.c_float.from_address(weight.data_ptr()).value += 1
        elif bad[0]:
            weight.data.add_(1)
        return result.detach()

    return weight, bad, loss


def test_what_is_only_read_is_not_copied(monkeypatch):
    weight, bad, loss = written_by(pointer=True)
    bad[0], held = False, Held(monkeypatch)
    captured = capture(loss, drawn(4, seed=1), state=[weight], reads=[weight])
    assert held.most == captured.certificate.snapshot_bytes == 0 and not captured.certificate.mutated
    assert "weight" in captured.held  # its address is checked
    weight.data.add_(1)  # as an update does
    assert captured(drawn(4, seed=1)).equal((weight * drawn(4, seed=1)).sum())


def test_a_write_into_what_is_only_read():
    weight, _, loss = written_by(pointer=False)
    captured = capture(loss, drawn(4, seed=1), state=[weight], reads=[weight])
    assert captured.certificate.mutated == ("weight",) and weight.equal(drawn(4))  # seen, so it was copied first, and restored
    weight, _, loss = written_by(pointer=True)
    sentence = said(lambda: capture(loss, drawn(4, seed=1), state=[weight], reads=[weight], tolerance=9.0))
    assert sentence == message("graph/memory:a_write_into_what_is_only")


class Wrong(TapeRunner):
    """Replays that go wrong from the second on."""

    replays = 0

    def replay(self):
        self.replays += 1
        if self.replays == 1:
            super().replay()


@pytest.mark.parametrize("start", [torch.zeros(3), drawn(3)], ids=["zeros", "drawn"])
def test_the_second_round_goes_on_from_the_first(start, monkeypatch):
    total = start.clone()
    monkeypatch.setattr(recording, "runner_for", lambda device, pool: Wrong())
    sentence = said(capture, lambda x: total.add_(x).sum() * 0, drawn(3))
    assert sentence.startswith("<lambda>: output 0 of the replay is off by") or message(
        "graph/memory:the_second_round_goes_on"
    ).within(sentence)
    assert "in round 2 of 2" in sentence and total.equal(start)


def test_eager_and_replay_start_from_one_state_in_both_rounds(monkeypatch):
    """Also where they end apart, within the tolerance."""
    total, starts = torch.ones(3), []

    class Noisy(TapeRunner):
        def run(self, call):
            starts.append(total.clone())
            return super().run(call)

        def replay(self):
            starts.append(total.clone())
            super().replay()
            total.mul_(1.01)

    monkeypatch.setattr(recording, "runner_for", lambda device, pool: Noisy())
    certificate = capture(lambda x: total.add_(x).sum() * 0, torch.ones(3), tolerance=0.1).certificate
    assert certificate.worst.relative == pytest.approx(0.01, rel=1e-4)
    first, first_replay, second, second_replay = starts[-4:]
    assert first.equal(torch.ones(3)) and first_replay.equal(first)
    assert not second.equal(first) and second_replay.equal(second)


def test_a_state_of_zeros_that_the_graph_forgets_is_refused(monkeypatch):
    """Eager moves the counter, the replay does not: what was no copy at first is compared all the same."""

    class Forgets(TapeRunner):
        def replay(self):
            kept = count.clone()
            super().replay()
            count.copy_(kept)

    count = torch.zeros(3)
    monkeypatch.setattr(recording, "runner_for", lambda device, pool: Forgets())
    sentence = said(capture, lambda x: (count.add_(1), x * 2)[1], drawn(3))
    assert sentence.startswith("<lambda>: count of the replay is off by 1 (1.0e+00 of the largest value) from eager in round 1")
    assert not count.any()


def test_a_call_that_finds_no_memory_leaves_the_state(tape):
    total, calls = drawn(3), []

    def fn(x):
        calls.append(1)
        total.add_(x)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return total * 2

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        capture(fn, torch.ones(3))
    assert total.equal(drawn(3))


cuda = torch.device("cuda", 0)


LAYERS = 128


def deep(x: torch.Tensor) -> torch.Tensor:
    """LAYERS tensors as large as x are kept for backward."""
    leaf = x.detach().requires_grad_()
    y = leaf
    for _ in range(LAYERS):
        y = y.sin()
    return torch.autograd.grad(y.sum(), leaf)[0].sum()


@pytest.mark.gpu
def test_activations_are_not_held_twice():
    """The eager calls of the certificate live in the graph's own memory.

    Beside it lie what they are given and what that was drawn from, in fp64: some 14 times x, which is small for that reason.
    """
    x = torch.ones(1 << 20, device=cuda)  # 4 MiB
    activations = LAYERS * x.nbytes  # 512 MiB
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    captured = capture(deep, x)
    assert captured.certificate.bitwise
    assert captured.memory_bytes > activations
    beside = torch.cuda.memory_reserved() - before - captured.memory_bytes
    assert beside < activations / 2, "held twice, they would be another 512 MiB"


@pytest.mark.gpu
def test_a_kernel_that_the_capture_leaves_out_is_seen():
    """Eager does it, and leaves the right values where the replay, which does not, will look: they are wiped in between."""

    def fn(x):
        y = torch.empty_like(x)
        if not torch.cuda.is_current_stream_capturing():
            torch.mul(x, 2, out=y)
        return y + 1

    assert message("graph/memory:a_kernel_that_the_captur").within(said(capture, fn, drawn(1000, device=cuda)))


@pytest.mark.gpu
def test_gradients_that_eager_makes_survive_the_replay():
    weight = torch.ones(1000, device=cuda, requires_grad=True)

    def backward(x):
        weight.grad = None
        (weight * x).square().sum().backward()

    certificate = capture(backward, drawn(1000, device=cuda)).certificate
    assert certificate.bitwise and certificate.mutated == ("weight.grad",)


@pytest.mark.gpu
def test_copies_on_the_host_are_the_same_comparison(monkeypatch):
    """As where the device has no room: put back bit for bit, in parts, by way of pinned memory."""
    own = CopyBudget.__init__

    def full(room, device, **options):
        own(room, device, **options)
        room.left = 0

    monkeypatch.setattr(CopyBudget, "__init__", full)
    monkeypatch.setattr(memory, "CHUNK", 1 << 10)
    total = drawn(1000, device=cuda)
    captured = capture(lambda x: total.add_(x) * 2, drawn(1000, device=cuda, seed=1))
    assert captured.certificate.snapshot_on == "host memory" and captured.certificate.mutated == ("total",)
    assert total.equal(drawn(1000, device=cuda)) and captured.certificate.bitwise


@pytest.mark.gpu
def test_snapshots_leave_a_device_that_is_too_small():
    """Memory for the state and the activations, but not for a copy of the state beside them. The limit is this process's own:
    what filled the device would break whoever else is on it."""
    torch.cuda.empty_cache()
    state = torch.ones(1 << 28, device=cuda)  # 1 GiB; fn takes 1.5 more
    allowed = torch.cuda.memory_reserved(cuda) + int(2.2 * state.nbytes)

    def fn(x):
        state.mul_(x)
        return torch.cat([state[: 3 << 26] * 2, x]).sum()

    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info(cuda)[1], cuda)
    try:
        captured = capture(fn, torch.full((1,), 1.5, device=cuda))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert captured.certificate.snapshot_on == "host memory" and captured.certificate.mutated == ("state",)
    assert state.eq(1).all()


def test_a_large_storage_is_compared_in_few_parts(monkeypatch):
    """Each part is ten launches: in parts of 4 MiB, launches took half of the comparison of 14.7 GB."""
    live, counts = torch.zeros(1 << 16), []
    kept = StorageCopy(live, "", CopyBudget(CPU))
    live[-1] = 3.0
    monkeypatch.setattr(memory, "COMPARED", 1 << 10)
    monkeypatch.setattr(memory, "PARTS", 8)
    own = memory._largest_difference
    monkeypatch.setattr(memory, "_largest_difference", lambda pairs: own(counts.append(1) or pair for pair in pairs))
    assert kept.difference().absolute == 3.0 and len(counts) == 8


def guard():
    return ReentryGuard(GenerateError, "busy")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_tensors_share_one_block_and_come_back_as_zeros(dtype):
    codes, scales = torch.ones(3, 5, 7).to(dtype).transpose(0, 1), torch.ones(9)
    memory = LentMemory([codes, scales], guard())
    assert codes.shape == (5, 3, 7) and codes.stride() == (7, 35, 1) and codes.dtype == dtype and not memory.lent
    for _ in range(2):
        assert not codes.float().any() and not scales.any()
        codes.view(torch.uint8).fill_(1)
        assert not scales.any(), "they do not overlap"
        scales.fill_(torch.nan)
        memory.lend()
        memory.lend()
        assert memory.lent and codes.untyped_storage().nbytes() == scales.untyped_storage().nbytes() == 0
        memory.take_back()
        assert not memory.take_back(), "it is there"


def test_memory_in_use_is_not_lent():
    users = guard()
    memory = LentMemory([torch.ones(4)], users)
    with users, pytest.raises(AssertionError, match="while a request uses it"):
        memory.lend()
    memory.lend()
    assert memory.lent


def test_what_the_borrower_keeps_in_it_begins_as_zeros():
    sums = torch.ones(6)
    memory = LentMemory([torch.ones(4)], guard(), sums)
    for _ in range(2):
        memory.lend()
        assert not sums.any()
        sums.fill_(1)
        memory.take_back()
        assert sums.isnan().all(), "a GPU's are overwritten by the owner"


def test_a_tensor_has_no_memory_until_the_owner_has_its_own():
    sums = torch.ones(6)
    part = sums[2:]
    with released(None), released(sums):
        assert not sums.untyped_storage().nbytes()
    assert part.equal(torch.zeros(4))
    with released(sums):
        memory = LentMemory([torch.ones(4)], guard(), sums)
        assert sums.untyped_storage().nbytes()
    memory.lend()
    assert part.equal(torch.zeros(4))


SIZE = 1 << 28


def activations(x):
    """Up to seven eighths of the block at once."""
    parts = [x * number for number in range(5)]
    return sum(parts[1:], parts[0]).sum()


@pytest.mark.gpu
def test_a_graph_computes_in_it_and_its_owner_finds_it_where_it_was():
    cache, x = torch.zeros(SIZE, device="cuda", dtype=torch.uint8), torch.arange(SIZE // 32, device="cuda").float()
    memory = LentMemory([cache], guard())
    address, reserved = cache.data_ptr(), torch.cuda.memory_reserved()
    memory.lend()
    graph = capture(activations, x, pool=memory.pool, warm_in_pool=True, clone=True)
    assert graph.memory_bytes < SIZE // 2, "its activations take the block"
    want = graph(x).clone()
    for _ in range(2):
        assert not memory.take_back() and cache.data_ptr() == address and not cache.any()
        cache.fill_(255)  # NaN to the graph
        memory.lend()
        assert torch.equal(graph(x), want)
    torch.cuda.empty_cache()
    assert not memory.take_back(), "what is lent stays mapped"
    assert torch.cuda.memory_reserved() - reserved < SIZE // 2
    del graph, memory, cache
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved - SIZE // 2


@pytest.mark.gpu
def test_sums_that_a_graph_writes_lie_in_the_first_bytes():
    cache, x = torch.zeros(SIZE, device="cuda", dtype=torch.uint8), torch.arange(SIZE // 32, device="cuda").float()
    sums = torch.ones(1 << 22, device="cuda")
    part, allocated = sums[3:], torch.cuda.memory_allocated()
    with released(sums):
        assert torch.cuda.memory_allocated() == allocated - sums.nbytes
        memory = LentMemory([cache], guard(), sums)
    address = cache.data_ptr()
    assert sums.data_ptr() == address and part.data_ptr() == address + 12 and cache.nbytes == SIZE
    memory.lend()
    add = capture(lambda x: part.add_(activations(x)), x, pool=memory.pool, warm_in_pool=True)
    want = activations(x)
    for _ in range(2):
        assert not sums.any()
        add(x)
        assert bool((part == want).all()) and not sums[:3].any()
        assert not memory.take_back() and cache.data_ptr() == address and not cache.any()
        cache.fill_(255)
        memory.lend()


@pytest.mark.gpu
def test_what_a_graph_keeps_in_it_stays_and_the_tensors_move(monkeypatch):
    monkeypatch.setattr(trace, "fallbacks", type(trace.fallbacks)())
    cache, x = torch.zeros(SIZE, device="cuda", dtype=torch.uint8), torch.arange(SIZE // 32, device="cuda").float()
    memory = LentMemory([cache], guard())
    address = cache.data_ptr()
    memory.lend()
    graph = capture(lambda x: x * 2, x, pool=memory.pool, warm_in_pool=True)
    result = graph(x)  # the graph's own output, in the block
    assert address <= result.data_ptr() < address + SIZE
    assert memory.take_back() and cache.data_ptr() != address
    cache.fill_(255)
    assert torch.equal(result, x * 2)
    assert [what for what, _ in trace.fallbacks] == ["memory lent to graphs"]
