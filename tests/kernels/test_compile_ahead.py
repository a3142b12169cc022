"""Kernels that are compiled ahead: each kind once, in threads, not launched, before any self-test."""

import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from gpubound.kernels import dispatch, dispatch as ahead
from gpubound.kernels.dispatch import compile_ahead

from .apart import apart

THERE = torch.device("cuda", 0)


@pytest.fixture
def kernel(monkeypatch):
    """Pretend that there is a GPU and a kernel (x, length, BLOCK), which records what happens to it."""
    monkeypatch.setattr(ahead, "entered", lambda device: nullcontext())
    monkeypatch.setattr(ahead, "interpreted", lambda: False)
    monkeypatch.setattr(ahead, "has_triton", lambda: True)

    class Kernel:
        params: ClassVar = [SimpleNamespace(name=name, is_constexpr=name == "BLOCK") for name in ("x", "length", "BLOCK")]
        happened: ClassVar[list[tuple]] = []

        def run(self, *arguments, grid, warmup, **options):
            thread = threading.current_thread().name.partition("_")[0]
            self.happened.append(("compile" if warmup else "launch", thread, *arguments[1:], *options.values()))
            loaded = property(lambda _: self.happened.append(("load", thread)))
            return type("Compiled", (), {"run": loaded})()

    monkeypatch.setattr(ahead, "import_module", lambda name: SimpleNamespace(JITFunction=Kernel))
    Kernel.happened = []
    return Kernel()


def test_each_kind_is_compiled_and_loaded_once_and_none_launched(kernel):
    x, other = torch.zeros(4), torch.zeros(4, dtype=torch.float16)

    def call():
        for tensor, length in ((x, 33), (torch.zeros(8), 35), (x, 48), (other, 33)):
            kernel.run(tensor, length, grid=(1,), warmup=False, BLOCK=16)
        kernel.run(x, 33, grid=(1,), warmup=False, BLOCK=32)

    compile_ahead(call, THERE)()
    pool = "gpubound-selftest"
    assert [entry for entry in kernel.happened if entry[0] == "load"] == [("load", pool)] * 4
    compiled = [entry for entry in kernel.happened if entry[0] == "compile"]
    assert sorted(entry[2:] for entry in compiled) == [(33, 16), (33, 16), (33, 32), (48, 16)]
    assert len(kernel.happened) == 8 and {entry[1] for entry in compiled} == {pool}
    kernel.run(x, 33, grid=(1,), warmup=False, BLOCK=16)
    assert kernel.happened[-1] == ("launch", "MainThread", 33, 16)


def test_kernels_are_compiled_while_the_call_goes_on(kernel):
    """A decoding step names its first kernels long before it has passed all layers."""
    compiled = threading.Event()
    type(kernel).run = lambda *arguments, **options: compiled.set()

    def call():
        kernel.run(None, 1, grid=(1,), warmup=False, BLOCK=16)
        assert compiled.wait(60)

    compile_ahead(call, THERE)()


def test_a_kernel_that_threads_need_at_a_time_is_compiled_once(monkeypatch):
    compiling, waiting, compiled = threading.Event(), threading.Event(), list[str]()

    class Waited(Future):
        def result(self, timeout=None):
            if not self.done():
                waiting.set()
            return super().result(60)

    class Kernel:
        fn, cache_key = staticmethod(lambda: None), ""

        def _do_compile(self, key, signature, device, warmup):
            compiling.set()
            assert key == "wrong" or waiting.wait(60)
            compiled.append(f"{key} on {device}")
            if key == "wrong":
                raise ValueError("out of shared memory")
            return compiled[-1]

    monkeypatch.setattr(dispatch, "Future", Waited)
    dispatch.compile_once(Kernel)
    kernel = Kernel()
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(kernel._do_compile, "key", {}, 0, warmup=True)
        assert compiling.wait(60)
        others = [threads.submit(kernel._do_compile, "key", {}, device, warmup=False) for device in (0, 1)]
        assert [one.result() for one in (first, *others)] == ["key on 0", "key on 0", "key on 1"]
    assert sorted(compiled) == ["key on 0", "key on 1"]
    for _ in range(2):  # what failed is tried again
        with pytest.raises(ValueError, match="out of shared memory"):
            kernel._do_compile("wrong", {}, 0, warmup=True)
    assert compiled.count("wrong on 0") == 2


def test_functions_are_hashed_before_the_kernels_that_call_them(monkeypatch):
    """Triton 3.6 gives a kernel two keys, by which of its functions were hashed before it."""
    order = list[str]()

    class Function:
        hash = None

        def __init__(self, code):
            self.fn = eval(f"lambda: {code}", functions)

        @property
        def cache_key(self):
            self.hash = self.hash or order.append(next(name for name in functions if functions[name] is self)) or "key"
            return self.hash

        def _do_compile(self, key, signature, device):
            order.append("compile")

    functions = dict[str, Function]()
    functions |= {"row": Function("1"), "product": Function("row() + max(1, 2)"), "kernel": Function("product() + row()")}
    dispatch.compile_once(Function)
    functions["kernel"]._do_compile("key", {}, 0)
    functions["kernel"]._do_compile("other", {}, 0)
    assert order == ["row", "product", "kernel", "compile", "compile"]


FORKED = """
import os, tempfile
from collections import defaultdict
os.environ["TRITON_CACHE_DIR"], here = tempfile.mkdtemp(), os.getpid()
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime.jit import JITFunction
from gpubound.kernels import dispatch
from gpubound.kernels.triton.adamw import _adamw_squares_kernel as kernel

def make_ir(source, *arguments):
    print("in this process" if os.getpid() == here else "in another", source.constants[3,], flush=True)
    return own(source, *arguments)

def compile_for(block):
    signature = {"x_ptr": "*bf16", "partial_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    compiled = kernel._do_compile(block, signature, 0, {(3,): block}, backend.parse_options({}), {}, True)
    assert compiled.asm["cubin"] and cache[block] is compiled

own, compiler.ASTSource.make_ir = compiler.ASTSource.make_ir, make_ir
dispatch.compile_once(JITFunction)
dispatch.START_TIMEOUT = dispatch.COMPILE_TIMEOUT = dispatch.IDLE_TIMEOUT = 1000
target, cache = GPUTarget("cuda", 90, 32), {}
kernel.compile, kernel.ASTSource, backend = compiler.compile, compiler.ASTSource, compiler.make_backend(target)
kernel.device_caches = {0: (cache, {}, target, backend, None)}
os.cpu_count = lambda: 2
compile_for(16)
dispatch._workers.cache_clear()
os.cpu_count = lambda: 4
for block in (32, 64, 32):
    compile_for(block)
processes = dispatch._workers()
gone = [processes.get() for _ in range(dispatch._at_a_time())]
for process in gone:
    process.close()
    processes.put(process)
for block in (128, 32):
    compile_for(block)
assert [processes.get() for _ in gone].count(None) == 1
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="nothing is forked elsewhere")
def test_kernels_are_compiled_in_other_processes():
    """On two cores in this one, and where the others are gone; what is in the cache is compiled nowhere."""
    assert apart(FORKED).splitlines() == ["in this process 16", "in another 32", "in another 64", "in this process 128"]


def test_other_threads_launch_meanwhile(kernel):
    def call():
        other = threading.Thread(target=kernel.run, args=(None, 1), kwargs={"grid": (1,), "warmup": False}, name="other")
        other.start()
        other.join()

    compile_ahead(call, THERE)()
    assert kernel.happened == [("launch", "other", 1)]


def test_self_tests_begin_and_are_not_waited_for(kernel, monkeypatch):
    monkeypatch.setattr(dispatch, "_verdicts", {})
    monkeypatch.setattr(dispatch, "_early", {})
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dispatch.selftest, "check", lambda *key: threading.current_thread().name.partition("_")[0])
    ask = partial(dispatch.verdict, "rms_norm", THERE, torch.bfloat16)
    answers = []
    compile_ahead(lambda: answers.append(ask()), THERE)()
    assert answers == [None] and [key[0] for key in dispatch._early] == ["rms_norm"] and ask() == "gpubound-selftest"


def test_kernels_of_a_test_are_compiled_before_it_and_launched_by_it(kernel, monkeypatch):
    monkeypatch.setattr(dispatch, "_verdicts", {})
    monkeypatch.setattr(dispatch, "_early", {})
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)

    def run(source, op, *key):
        for block in (16, 32):  # forward and backward
            kernel.run(None, 1, grid=(1,), warmup=False, BLOCK=block)
        if op == "rope":
            raise ValueError("only in its test")

    def check(op, *key):
        kernel.happened.append((op, threading.current_thread().name.partition("_")[0]))
        return None if op == "swiglu" else "it failed"

    monkeypatch.setattr(dispatch.selftest, "run", run)
    monkeypatch.setattr(dispatch.selftest, "check", check)
    ahead.start_self_tests([("swiglu", (8,)), ("rope", ()), ("swiglu", (8,))], THERE, torch.bfloat16, compile_first=True)
    tests = list(dispatch._early.values())
    assert not any(test.cancel() for test in tests)  # by who asks for its verdict
    asked = [dispatch.verdict(op, THERE, torch.bfloat16, shape) for op, shape in (("swiglu", (8,)), ("rope", ()))]
    assert asked == [None, "it failed"]
    for op in ("swiglu", "rope"):
        before = kernel.happened[: kernel.happened.index((op, "gpubound-selftest"))]
        assert {entry[3] for entry in before if entry[0] == "compile"} >= {16, 32} and "launch" not in {e[0] for e in before}
    assert [entry[0] for entry in kernel.happened].count("load") == 4


def test_no_reference_computes_in_place_of_a_kernel(kernel, monkeypatch):
    """An update's would write by numbers of kernels that were not launched."""
    monkeypatch.setattr(dispatch, "_verdicts", {dispatch.Key("adamw", THERE, torch.bfloat16): "it is wrong here"})
    monkeypatch.setattr(dispatch, "fallback", lambda *row: pytest.fail("counted"))
    computed = []

    def call():
        kernel.run(None, 1, grid=(1,), warmup=False)
        dispatch._source("adamw", THERE, torch.bfloat16, None)
        computed.append(True)

    compile_ahead(call, THERE)()
    assert not computed and [entry[0] for entry in kernel.happened] == ["compile", "load"]
    monkeypatch.setattr(dispatch, "fallback", lambda *row: None)
    assert dispatch._source("adamw", THERE, torch.bfloat16, None) == "reference"


def test_what_does_not_compile_is_left_to_the_launch(kernel):
    def fail(*arguments, **options):
        raise ValueError("out of shared memory")

    type(kernel).run = fail
    compile_ahead(lambda: kernel.run(None, 1, grid=(1,), warmup=False), THERE)()


def test_a_cpu_has_nothing_to_compile():
    assert compile_ahead(lambda: pytest.fail("called"), torch.device("cpu"))() is None


@pytest.mark.gpu
def test_a_self_test_compiles_no_kernel_that_was_not_named(device, monkeypatch):
    """Of widths that no other test has, so that all are compiled, or read from a cache, here."""
    jit = import_module("triton.runtime.jit").JITFunction
    compiled, compile_kernel = list[str](), jit._do_compile

    def note(kernel, *arguments, **options):
        compiled.append(threading.current_thread().name)
        return compile_kernel(kernel, *arguments, **options)

    monkeypatch.setattr(jit, "_do_compile", note)
    calls = [("rms_norm", (328,)), ("add_rms_norm", (328,)), ("swiglu", (344, True)), ("rope_qkv", (7, 1, 56, 28))]
    there = torch.empty(0, device=device).device
    ahead.start_self_tests(calls, there, torch.bfloat16, compile_first=True)
    assert [dispatch.verdict(op, there, torch.bfloat16, shape) for op, shape in calls] == [None] * len(calls)
    assert len(compiled) >= 6 and {name.partition("_")[0] for name in compiled} == {"gpubound-selftest"}
    assert "gpubound-selftest" not in compiled  # the name of a test's own thread, which those of the pool number


BESIDE_A_GPU = """
import os, tempfile
os.environ["TRITON_CACHE_DIR"], here = tempfile.mkdtemp(), os.getpid()
import torch
from triton.compiler import compiler
from gpubound.kernels import dispatch

def make_ir(source, *arguments):
    os.write(1, b"in this process\\n" if os.getpid() == here else b"in another\\n")  # at once: several processes do
    return own(source, *arguments)

own, compiler.ASTSource.make_ir = compiler.ASTSource.make_ir, make_ir
dispatch.START_TIMEOUT = dispatch.COMPILE_TIMEOUT = dispatch.IDLE_TIMEOUT = 1000
there, calls = torch.ones(8, device="cuda").device, [("rms_norm", (328,)), ("swiglu", (344, True))]
dispatch.start_self_tests(calls, there, torch.bfloat16, compile_first=True)
assert [dispatch.verdict(op, there, torch.bfloat16, shape) for op, shape in calls] == [None] * 2
"""


@pytest.mark.gpu
@pytest.mark.alone  # beside 15 others, each of which forks as many processes as the machine has cores, one kernel was not
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 4, reason="kernels are compiled in one process there")
def test_kernels_are_compiled_in_processes_forked_beside_a_gpu():
    """No kernel is compiled twice, and those of the tests agree with their references."""
    lines = apart(BESIDE_A_GPU).splitlines()
    assert set(lines) == {"in another"} and len(lines) >= 4
