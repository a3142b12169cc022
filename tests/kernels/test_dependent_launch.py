"""Whether launches are chained: by the step that says so, on its thread, where the GPU can; and what tests itself then."""

import threading

import pytest
import torch

from gpubound.kernels import decode_product, dispatch
from gpubound.kernels.decode_product import EARLY, chain_mode, chained


@pytest.fixture
def able(monkeypatch):
    monkeypatch.setattr(decode_product, "can_chain", lambda device: True)


def test_a_step_says_it_once(able):
    seen = []
    with chained(torch.device("cpu")):
        assert chain_mode() == EARLY
        other = threading.Thread(target=lambda: seen.append(chain_mode()))
        other.start()
        other.join()
    assert chain_mode() == 0 and seen == [0], "another thread's launches are its own business"
    with pytest.raises(RuntimeError), chained(torch.device("cpu")):
        raise RuntimeError
    assert chain_mode() == 0


def test_a_self_test_launches_as_its_caller(able, monkeypatch):
    """Or the kernels that it compiles are nobody's."""
    seen = []
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(dispatch.selftest, "check", lambda *given: seen.append(chain_mode()))
    with chained(torch.device("cpu")):
        dispatch._test("swiglu", torch.device("cpu"), torch.float32, ())
    dispatch._test("swiglu", torch.device("cpu"), torch.float32, ())
    assert seen == [EARLY, 0]


def test_a_cpu_cannot():
    with chained(torch.device("cpu")):
        assert chain_mode() == 0
