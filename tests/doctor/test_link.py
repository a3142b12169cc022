"""A pageable copy is held against a copy from pinned memory, whose rate is measured where the tape was recorded."""

from dataclasses import replace

import pytest
import torch

from gpubound.doctor.price.prices import Replay
from gpubound.doctor.record.run import BYTES, pinned_rate

from .tapes import Synthetic


@pytest.mark.parametrize(("rate", "left"), [(None, 2000.0), (50_000.0, 1000.0), (100_000.0, 500.0)])
def test_a_copy_is_left_with_what_the_link_takes(rate, left):
    """50 MB in 4 ms: on a link of 50 GB/s it would take 1 ms. Without a rate a trace is taken for one of a slower link."""
    made = Synthetic()
    for _ in range(6):
        made.launch(run=100).copy(run=4000, bytes=50_000_000, pageable=True).step()
    tape = made.tape()
    tape = replace(tape, about={"pinned": rate}) if rate else tape
    replay = Replay(tape)
    assert replay.saved(replay.waits) == pytest.approx((4000 - left) / 1e3, rel=0.03)


@pytest.mark.gpu
def test_the_rate_is_that_of_a_bus(device):
    rate = pinned_rate()
    assert BYTES >= 1 << 20 and rate is not None and 1e3 < rate < 1e6  # 1 GB/s to 1 TB/s


def test_a_full_device_has_no_rate(monkeypatch):
    def full(*size, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    assert pinned_rate() is None
