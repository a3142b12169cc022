"""Self-tests that begin early: the verdict that a door asks for is theirs, and each runs once."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from types import SimpleNamespace

import pytest
import torch

from gpubound.kernels import dispatch, registry, selftest, triton


@pytest.fixture
def tested(monkeypatch):
    """Pretend that there is a GPU, and record which self-tests run, in which thread."""
    runs: list[tuple[str, str]] = []

    def check(op, device, dtype, shape=(), forward=False):
        runs.append((op, threading.current_thread().name))
        return f"{op} is wrong" if op == "add_rows" else None

    monkeypatch.setattr(selftest, "check", check)
    monkeypatch.setattr(dispatch, "_verdicts", {})
    monkeypatch.setattr(dispatch, "_early", {})
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return runs


def test_a_verdict_waits_for_the_test_that_was_begun(tested):
    there = torch.device("cuda", 0)
    dispatch.start_self_tests([("quantize", ()), ("add_rows", ()), ("quantize", ())], there, torch.bfloat16)
    assert dispatch.verdict("quantize", there, torch.bfloat16) is None
    assert dispatch.verdict("add_rows", there, torch.bfloat16) == "add_rows is wrong"
    assert dispatch.verdict("add_rows", there, torch.bfloat16) == "add_rows is wrong"
    assert sorted(op for op, _ in tested) == ["add_rows", "quantize"]
    assert all(thread.startswith("gpubound-selftest") for _, thread in tested)


def test_one_thread_hashes_triton_while_another_builds_its_driver(tested, monkeypatch):
    """A key that another thread is computing is not known yet, and would be computed again."""
    order, building = list[str](), threading.Event()

    def hash_all():
        order.append("begin")
        assert building.wait(60)
        order.append("end")

    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=building.set))
    monkeypatch.setattr("triton.runtime.cache.triton_key", hash_all)
    monkeypatch.setattr(import_module("triton.runtime.driver"), "driver", driver)
    threads = cache(dispatch.threads.__wrapped__)
    monkeypatch.setattr(dispatch, "threads", threads)
    monkeypatch.setattr(selftest, "check", lambda *key: order.append("test"))
    dispatch.start_self_tests([(op, ()) for op in ("quantize", "add_rows", "rope")], torch.device("cuda", 0), torch.bfloat16)
    threads().shutdown()
    assert "".join(step[0] for step in order if step != "test") == "be" * (order.count("begin"))  # one after the other
    assert order.index("end") < order.index("test") and order.count("test") == 3


def test_what_was_not_begun_is_tested_when_asked_for(tested):
    there = torch.device("cuda", 0)
    dispatch.start_self_tests([("quantize", ())], there, torch.bfloat16)
    assert dispatch.verdict("quantize", there, torch.float32) is None  # another dtype is another kernel
    dispatch.verdict("quantize", there, torch.bfloat16)
    assert len(tested) == 2


def test_without_gradients_forward_alone_is_tested(monkeypatch, tested):
    there, asked = torch.device("cuda", 0), []
    monkeypatch.setattr(
        selftest, "check", lambda *key: asked.append(key[3:]) or ("it is wrong" if key[4:] == (False,) else None)
    )
    with torch.no_grad():
        for _ in range(2):
            assert dispatch.verdict("rms_norm", there, torch.bfloat16, (64,)) is None
    assert asked == [((64,), True)]
    assert dispatch.verdict("rms_norm", there, torch.bfloat16, (64,)) == "it is wrong"  # in backward
    with torch.no_grad():
        assert dispatch.verdict("rms_norm", there, torch.bfloat16, (64,)) == "it is wrong"
    assert asked == [((64,), True), ((64,), False)]
    dispatch.start_self_tests([("rope", ())], there, torch.bfloat16)
    with torch.no_grad():
        dispatch.verdict("rope", there, torch.bfloat16)
    assert len(asked) == 3  # the test that was begun


def test_nothing_begins_where_no_kernel_could_run(tested):
    dispatch.start_self_tests([("quantize", ())], torch.device("cpu"), torch.bfloat16)
    dispatch.start_self_tests([("quantize", ())], torch.device("cuda", 0), torch.float64)
    assert not tested and not dispatch._early


def test_a_test_in_one_shape_speaks_for_no_other(tested):
    there = torch.device("cuda", 0)
    dispatch.start_self_tests([("rms_norm", (64,))], there, torch.bfloat16)
    assert dispatch.verdict("rms_norm", there, torch.bfloat16, torch.Size([64])) is None
    assert len(tested) == 1
    assert dispatch.verdict("rms_norm", there, torch.bfloat16, torch.Size([128])) is None
    assert len(tested) == 2


def test_a_module_that_another_thread_is_importing_is_waited_for(monkeypatch):
    name, begun, go = "gpubound.kernels.triton.gated", threading.Event(), threading.Event()
    registry.load("triton", "swiglu")  # so that there is something to put back afterwards
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(triton, "gated")

    class Slow:
        """A finder whose module is in sys.modules for a while before it holds anything."""

        def find_spec(self, wanted, path, target=None):
            if wanted != name:
                return None
            spec = PathFinder.find_spec(wanted, path)
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (begun.set(), go.wait(60), execute(module))
            return spec

    monkeypatch.setattr(sys, "meta_path", [Slow(), *sys.meta_path])
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(registry.load, "triton", "swiglu")
        assert begun.wait(60)
        second = threads.submit(registry.load, "triton", "swiglu")
        threading.Timer(0.2, go.set).start()
        assert first.result() is second.result()


def test_a_self_test_that_asks_for_a_verdict_which_waits_for_a_thread(tested, monkeypatch):
    """The one thread runs the first test, and the second, which it asks for, would come after it."""
    there, first = torch.device("cuda", 0), selftest.check

    def check(op, device, dtype, shape=(), forward=False):
        begun.wait(60)
        if op == "quantize":
            dispatch.verdict("add_rows", device, dtype)
        return first(op, device, dtype, shape)

    begun, threads = threading.Event(), ThreadPoolExecutor(1, thread_name_prefix="gpubound-selftest")
    monkeypatch.setattr(selftest, "check", check)
    monkeypatch.setattr(dispatch, "threads", lambda: threads)
    dispatch.start_self_tests([("quantize", ()), ("add_rows", ())], there, torch.bfloat16)
    outer = dispatch._early[dispatch.Key("quantize", there, torch.bfloat16)]
    begun.set()
    assert outer.result(60) is None and sorted(op for op, _ in tested) == ["add_rows", "quantize"]
