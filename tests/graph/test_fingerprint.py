"""Fingerprints in place of copies: other bytes have others, and a certificate by them says what one by copies says."""

import random
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gpubound.errors import GraphError
from gpubound.graph import capture, certify, memory, recording
from gpubound.graph.memory import fingerprint as of

from ..train.test_build_model import peak
from .cases import drawn, elsewhere, said
from .tape import TapeRunner


def raw(count: int) -> torch.Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1000])
def test_any_other_bit_is_another(count):
    first, bits = raw(count), random.Random(0)
    seen = {of(first)}
    for _ in range(200):
        other = first.clone()
        other[bits.randrange(count)] ^= 1 << bits.randrange(8)
        assert of(other) not in seen or other.equal(first)
        assert of(other.clone()) == of(other)
    assert of(first) in seen


def test_the_order_of_words_counts():
    words = raw(64).view(8, 8)
    assert len({of(words[torch.randperm(8)].flatten()) for _ in range(50)} | {of(words.flatten())}) > 40


def test_how_many_bytes_there_are_counts():
    """Zeros behind the last byte are other bytes."""
    assert len({of(torch.zeros(count, dtype=torch.uint8)) for count in range(40)}) == 40


def test_sums_of_differences_do_not_cancel():
    """Of numbers in 16 bits, whose upper bytes alone differ: a plain weighted sum would see 16 of 64 bits."""
    first = drawn(4096).bfloat16()
    seen = set()
    for number in range(100):
        other = first.clone()
        other[[number, number + 1]] += torch.tensor([1.0, -1.0]).bfloat16()
        seen.add(of(other.view(torch.uint8)))
    assert len(seen) == 100


@pytest.mark.parametrize("part", [8, 24, 1 << 12])
def test_parts_in_another_order_and_any_bit_of_a_part_count(part, monkeypatch):
    monkeypatch.setattr(memory, "PART", part)
    first, seen = raw(3 * part + 11), set()
    a, b, rest = first[:part], first[part : 2 * part], first[2 * part :]
    for other in (first, torch.cat([b, a, rest]), torch.cat([a, a, rest]), torch.cat([a, b, rest, rest[-1:] * 0])):
        seen.add(of(other))
    for at in (0, part - 1, part, 3 * part, 3 * part + 10):
        other = first.clone()
        other[at] ^= 128
        seen.add(of(other))
    assert len(seen) == 4 + 5 and of(first.clone()) in seen


def test_intermediates_of_one_part_exist_at_a_time(monkeypatch):
    """What they take of a GPU stays reserved beside a step's graph: at 135m 0.1 of 3.3 GiB."""
    monkeypatch.setattr(memory, "PART", 1 << 20)
    monkeypatch.setattr(memory, "COMPARED", 1 << 19)
    first = raw(6 << 20)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        of(first)
    assert 3 << 20 < peak(profiled) < 4.5 * (1 << 20)
    pairs = [(torch.zeros(1 << 18, dtype=torch.bfloat16), torch.ones(1 << 18, dtype=torch.bfloat16))] * 3
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        memory._largest_difference(pairs)
    assert 4 << 20 < peak(profiled) < 5.5 * (1 << 20)


@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_a_certificate_without_second_copies(tape, rounds, monkeypatch):
    """A state that moves from round to round, and random numbers: each round begins where the last has ended."""
    total, count = drawn(3), torch.zeros(1)

    def fn(x):
        count.add_(1)
        total.mul_(0.5).add_(x * count).add_(torch.rand(3))
        return total.sum()

    others = [(drawn(3, seed=number),) for number in range(2, 2 + rounds)]
    before = capture(fn, drawn(3, seed=1), other_inputs=others).certificate
    elsewhere(monkeypatch)
    after = capture(fn, drawn(3, seed=1), other_inputs=others).certificate
    assert (before.rounds, before.mutated, before.bitwise) == (after.rounds, after.mutated, after.bitwise)
    assert (after.rounds, set(after.mutated), after.bitwise) == (rounds, {"total", "count"}, True)
    assert before.snapshot_bytes == 12 + 12 + 4 and after.snapshot_bytes == 12  # what holds zeros at first takes none
    assert total.equal(drawn(3)) and not count.any()


class Counts:
    """The keys of the storages that are copied in each attempt at the rounds, as names."""

    def __init__(self, monkeypatch):
        self.attempts, own = [], certify._run_rounds

        def run(recording, *args):
            self.attempts.append({recording.snapshot.copies[key].name for key in args[-1]})
            return own(recording, *args)

        monkeypatch.setattr(certify, "_run_rounds", run)


class Noisy(TapeRunner):
    """Replays that are off by a little, of `off` alone."""

    def __init__(self, off):
        self.off = off

    def replay(self):
        super().replay()
        self.off.mul_(1.01)


def test_fingerprints_that_differ_ask_for_copies_of_these_alone(monkeypatch):
    """How far a replay is off within the tolerance, only copies say; a state that no call changes needs none."""
    elsewhere(monkeypatch)
    counts, total, weights = Counts(monkeypatch), torch.ones(3), drawn(3)
    monkeypatch.setattr(recording, "runner_for", lambda device, pool: Noisy(total))
    captured = capture(lambda x: total.add_(x * weights).sum() * 0, drawn(3), state=[total, weights], tolerance=0.1)
    assert counts.attempts == [set(), {"total"}] and captured.certificate.worst_name == "total"
    assert captured.certificate.worst.relative == pytest.approx(0.01, rel=1e-4)
    assert captured.certificate.snapshot_bytes == 12 + 12 + 12 and total.eq(1).all() and weights.equal(drawn(3))


def test_sums_from_zero_are_copied_into_lent_memory(monkeypatch):
    """In the first attempt, for their bits differ at each call on a GPU. What fn uses is not taken, though it is lent."""
    elsewhere(monkeypatch)
    counts, total, used, spare = Counts(monkeypatch), torch.zeros(3), drawn(99), torch.zeros(64)
    monkeypatch.setattr(recording, "runner_for", lambda device, pool: Noisy(total))

    @contextmanager
    def lend():
        yield used, spare
        assert spare.any() and used.equal(drawn(99))
        spare.zero_()

    captured = capture(lambda x: total.add_(x * used[:3]).sum() * 0, drawn(3), state=[total], tolerance=0.1, lend=lend)
    assert counts.attempts == [{"total"}] and captured.certificate.worst.relative == pytest.approx(0.01, rel=1e-4)
    with pytest.raises(GraphError, match="off by"):
        capture(lambda x: total.add_(x * used[:3]).sum() * 0, drawn(3), state=[total], tolerance=0.001, lend=lend)
    assert not total.any()


def test_next_to_a_copy_a_state_that_changes_is_copied_too(monkeypatch):
    """Its second round could not begin where the first has ended: a replay would not make the same state again."""
    elsewhere(monkeypatch)
    counts, total, count = Counts(monkeypatch), torch.ones(3), torch.ones(1)
    monkeypatch.setattr(recording, "runner_for", lambda device, pool: Noisy(total))
    captured = capture(lambda x: total.add_(x * count.add_(1)).sum() * 0, drawn(3), tolerance=0.1)
    assert counts.attempts == [set(), {"total"}, {"total", "count"}]
    assert captured.certificate.worst.relative == pytest.approx(0.01, rel=1e-4) and count.eq(1).all()


@pytest.mark.parametrize("replay, call", [(2, 99), (3, 99), (99, 5), (99, 6)])
def test_a_state_that_only_a_replay_or_only_eager_changes_is_refused(replay, call, monkeypatch):
    """Planted next to noise, in the first and in the second round: a state that no call was to change keeps its bytes."""
    elsewhere(monkeypatch)
    total, weights, replays, calls = torch.ones(3), drawn(3), [], []  # calls: 2 warm-ups, the recording, 1 before copies, 2

    class Plants(Noisy):
        def replay(self):
            super().replay()
            replays.append(1)
            if len(replays) >= replay:
                weights.mul_(2)

    def fn(x):
        calls.append(1)
        if len(calls) >= call:
            weights.mul_(2)
        return total.add_(x * 0).sum() * 0

    monkeypatch.setattr(recording, "runner_for", lambda device, pool: Plants(total))
    sentence = said(lambda: capture(fn, drawn(3), state=[total, weights], tolerance=0.1))
    assert sentence.startswith("fn: weights of the replay is off by") and weights.equal(drawn(3))


def test_a_state_that_no_call_writes_is_not_copied_back(tape, monkeypatch):
    elsewhere(monkeypatch)
    copies = []
    own = memory.copy_bytes
    monkeypatch.setattr(memory, "copy_bytes", lambda source, target: (copies.append(source.numel()), own(source, target)))
    weights, total = drawn(100), torch.ones(3)
    capture(lambda x: total.add_(weights[:3] * x).sum(), drawn(3), state=[weights, total])
    assert copies.count(400) == 1  # into the snapshot


def test_what_a_certificate_refuses_reads_alike(tape, monkeypatch):
    def fn(x):
        total.add_(x.numel() and float(x.detach().numpy()[0]))

    total = torch.zeros(3)
    here = said(capture, fn, drawn(3))
    elsewhere(monkeypatch)
    assert said(capture, fn, drawn(3)) == here and not total.any()
