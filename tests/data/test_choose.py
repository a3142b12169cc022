"""Devices compared rightly, sizes read rightly, the budget's arithmetic."""

import re

import pytest
import torch

from gpubound import device as policy
from gpubound.data import feed
from gpubound.data.feeds import SHARE, allowance, free_bytes, parse_bytes, target
from gpubound.device import Sight
from gpubound.errors import DeviceError
from tests.messages import message, refusal


@pytest.mark.parametrize(
    "spec, current, want",
    [("cuda", 0, "cuda:0"), ("cuda", 2, "cuda:2"), ("cuda:1", 0, "cuda:1"), ("cpu", None, "cpu"), ("cpu:0", None, "cpu")],
)
def test_devices_as_tensors_report_them(spec, current, want, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(policy, "look", lambda: Sight(3, "3 visible"))
    monkeypatch.setattr(policy, "_tested", lambda index: None)
    assert target(torch.device(spec)) == torch.device(want)


def test_target_on_this_machine():
    assert target("meta") == target("meta:0") == torch.ones(1, device="meta").device
    assert target("cpu") == target(torch.device("cpu")) == torch.ones(1).device
    with pytest.raises(ValueError, match=r"device: got 'cuda:x'"):
        target("cuda:x")


@pytest.mark.parametrize("text, want", [(7, 7), ("7", 7), ("2 GB", 2 * 10**9), ("1.5GiB", 1536 * 2**20), ("10 b", 10)])
def test_sizes(text, want):
    assert parse_bytes("budget", text) == want


@pytest.mark.parametrize("text", ["two", "3 apples", "-1", True, None])
def test_sizes_that_are_none(text):
    assert refusal(ValueError, lambda: parse_bytes("budget", text)) == message("data/choose:sizes_that_are_none", repr(text))


def test_allowance():
    assert allowance("auto", None, 1000) == 1000 // SHARE
    assert allowance("auto", 300, 1000) == 700
    assert allowance("auto", 3000, 1000) == 0
    assert allowance("auto", None, None) is None
    assert allowance("1 kB", None, 50) == 1000
    assert refusal(ValueError, lambda: allowance(5, 5, 5)) == message("data/choose:allowance")


def test_free_memory_of_the_cpu_is_measured():
    assert free_bytes(torch.device("cpu")) > 10**6


@pytest.mark.parametrize("device", ["mars", "cpu:x", torch.device("cuda", 99)])
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises((ValueError, DeviceError), match=re.escape(str(device))):
        feed([torch.ones(1)], device)
