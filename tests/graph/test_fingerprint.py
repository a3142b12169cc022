"""Fingerprints in place of copies: other bytes have others, and a certificate by them says what one by copies says."""

import random

import pytest
import torch

from gpubound.graph import capture, certify, memory
from gpubound.graph.memory import fingerprint as of

from .cases import drawn, elsewhere, said


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
def test_the_size_of_parts_does_not_count(part, monkeypatch):
    want = of(raw(1003))
    monkeypatch.setattr(memory, "PART", part)
    assert of(raw(1003)) == want


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


def test_fingerprints_that_differ_ask_for_copies(tape, monkeypatch):
    """A replay that is off within the tolerance: how far, only copies say."""
    elsewhere(monkeypatch)
    total = torch.ones(3)
    captured = capture(lambda x: total.add_(x).sum(), drawn(3))
    runs = []

    def run(*args, fingerprints):
        runs.append(fingerprints)
        return run_rounds(*args, fingerprints=fingerprints)

    run_rounds, changed = certify._run_rounds, memory.StorageFingerprint.changed
    monkeypatch.setattr(certify, "_run_rounds", run)
    monkeypatch.setattr(memory.StorageFingerprint, "changed", lambda mark: not changed(mark))
    assert capture(lambda x: total.add_(x).sum(), drawn(3)).certificate.bitwise
    assert runs == [True, False]
    assert captured.certificate.snapshot_bytes == 12 and total.eq(1).all()


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
