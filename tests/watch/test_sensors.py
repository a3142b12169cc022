"""The sensors that need a GPU, as far as they can be shown without one: their callbacks are fired, and their sources
faked, by hand.
"""

import ctypes
import threading
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch._utils import CallbackRegistry

from gpubound.errors import BudgetError
from gpubound.watch import events, events as source_line, ops, pretend, sensors, watch
from tests.messages import message

from ..kernels.apart import apart


def syncs(ledger):
    return [row for row in ledger.rows if row.kind == "sync"]


def test_gputrace_callbacks_from_another_thread_and_from_backward():
    from torch.cuda import _gpu_trace as gputrace

    def driver_waits():
        gputrace.StreamSynchronizationCallbacks.fire_callbacks(7)

    def work():
        driver_waits()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            driver_waits()
            return g

    with watch(gputrace=True) as ledger:
        thread = threading.Thread(target=work, name="loader")
        thread.start()
        thread.join()
        Waits.apply(torch.ones(2, requires_grad=True)).sum().backward()
        gputrace.DeviceSynchronizationCallbacks.fire_callbacks()
        gputrace.EventSynchronizationCallbacks.fire_callbacks(3)
    gputrace.StreamSynchronizationCallbacks.fire_callbacks(7)  # nobody listens now
    found = {(row.what, row.place.site.function, row.place.thread, row.place.node) for row in syncs(ledger)}
    here = "test_gputrace_callbacks_from_another_thread_and_from_backward"
    assert found == {
        ("stream synchronize", "driver_waits", "loader", ""),
        ("stream synchronize", "driver_waits", "", "WaitsBackward"),
        ("device synchronize", here, "", ""),
        ("event synchronize", here, "", ""),
    }


def test_gputrace_is_only_turned_on_when_asked():
    with watch() as ledger:
        pass
    assert ledger.absent["gputrace"] == "not asked for: watch(gputrace=True)"
    with watch(gputrace=False) as ledger:
        pass
    assert ledger.absent["gputrace"] == "left out with gputrace=False"


def call(entry: int, name: str) -> None:
    """As torch does: the object, the device type (1 is CUDA), and what it is about."""
    two = name.endswith(("_record", "_wait"))
    arguments = () if name.endswith("device_synchronization") else (7, 8) if two else (7,)
    signature = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int8, *[ctypes.c_size_t] * len(arguments))
    signature(entry)(None, 1, *arguments)


def test_torch_calls_python_at_synchronizations_alone(monkeypatch):
    """Python called at a free would lose the exception that is on its way up: see sensors.py."""
    from torch.cuda import _gpu_trace

    heard = []
    for name in [name for name in vars(_gpu_trace) if name.endswith("Callbacks")]:
        monkeypatch.setattr(_gpu_trace, name, registry := CallbackRegistry(name))
        registry.add_callback(lambda *values, name=name: heard.append((name, *values)))
    hook = sensors.Hook()
    hook.set(True)
    try:
        table = sensors._at(sensors._at(hook.pointer.value))  # as torch finds it
    finally:
        hook.set(False)
    for slot, name in enumerate(hook.names):
        if name.startswith("trace_gpu_"):
            call(sensors._at(table + slot * ctypes.sizeof(ctypes.c_void_p)), name)
    assert heard == [
        ("DeviceSynchronizationCallbacks",),
        ("StreamSynchronizationCallbacks", 7),
        ("EventSynchronizationCallbacks", 7),
    ]
    assert sum(name.startswith("trace_gpu_memory") for name in hook.names) == 2


def test_the_hook_is_off_once_the_last_ledger_has_left():
    hook = sensors._make()
    with watch(gputrace=True):
        assert hook.flag.value
        with watch() as inner:
            assert inner.runs("gputrace")
        assert hook.flag.value
    assert not hook.flag.value
    with watch() as after:
        assert not after.runs("gputrace")


def test_a_trace_that_another_turned_on_stays_on():
    """CUDA Sanitizer hears every allocation: its table stays in place, before, during and after a ledger."""
    code = """
import torch
from gpubound.watch import watch
from gpubound.watch import sensors
torch._C._activate_gpu_trace()
hook = sensors._make()
theirs = hook.pointer.value
with watch(gputrace=True):
    print(hook.flag.value, hook.pointer.value == theirs)
print(hook.flag.value, hook.pointer.value == theirs)
"""
    assert apart(code).split() == ["True"] * 4


def test_a_torch_whose_table_is_not_known_is_left_alone(monkeypatch):
    monkeypatch.setattr(sensors, "functions", lambda header: ["trace_gpu_memory_allocation"])
    monkeypatch.setattr(sensors, "_make", sensors._make.__wrapped__)
    with watch(gputrace=True) as ledger:
        pass
    assert "its header names no synchronizations" in ledger.absent["gputrace"]
    assert not sensors.Hook.listeners


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to count syncs on")
def test_gputrace_without_a_gpu_vouches_for_nothing():
    with watch(gputrace=True, device="cuda") as ledger:
        pass
    with pytest.raises(BudgetError, match=r"^not counted: syncs\. "):
        ledger.assert_within(syncs=0)


def test_synchronize_calls_are_heard_while_somebody_listens():
    heard = []
    original = torch.cuda.Event.synchronize

    def listener(what, device):
        heard.append((what, device))
        raise InterruptedError  # before the driver, which may not be there, is reached

    ops.listen(listener)
    try:
        for call in (
            torch.cuda.synchronize,
            lambda: torch.cuda.Stream.synchronize(None),
            lambda: torch.cuda.Event.synchronize(None),
        ):
            with pytest.raises(InterruptedError):
                call()
    finally:
        ops.leave(listener)
    assert heard == [("torch.cuda.synchronize", "cuda"), ("stream.synchronize", "cuda"), ("event.synchronize", "cuda")]
    assert torch.cuda.Event.synchronize is original


def test_launching_driver_calls():
    names = [
        "cudaLaunchKernel",
        "cudaLaunchKernel",
        "cuLaunchKernelEx",
        "cudaGraphLaunch",
        "cudaMemcpyAsync",
        "vectorized_kernel",
    ]
    events = [SimpleNamespace(name=lambda n=n: n) for n in names]
    assert sensors.launch_calls(events) == {"cudaLaunchKernel": 2, "cuLaunchKernelEx": 1, "cudaGraphLaunch": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.interpreted
def test_triton_launches():
    triton = pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    @triton.jit
    def double(x, n: tl.constexpr):
        i = tl.arange(0, n)
        tl.store(x + i, tl.load(x + i) * 2)

    original, x = InterpretedFunction.run, torch.ones(4)
    with watch() as ledger:
        for _ in range(3):
            double[(1,)](x, 4)
    assert InterpretedFunction.run is original
    (row,) = [row for row in ledger.rows if row.kind == "launch"]
    assert (row.what, row.count, row.place.site.code) == ("double", 3, "double[(1,)](x, 4)")
    assert x.tolist() == [8.0] * 4


def test_triton_s_own_launch_hook(monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with watch() as ledger:
        knobs.runtime.launch_enter_hook(SimpleNamespace(data={"name": "rms_norm_forward"}))
    knobs.runtime.launch_enter_hook(SimpleNamespace(data={"name": "later"}))
    assert [(row.what, row.count) for row in ledger.rows if row.kind == "launch"] == [("rms_norm_forward", 1)]


def test_allocations_with_their_lines(monkeypatch):
    now = {"num_device_alloc": 3, "num_device_free": 1, "num_alloc_retries": 0}
    library = {"filename": torch.__file__, "line": 1, "name": "empty"}
    mine = {"filename": __file__, "line": 2, "name": "step"}
    trace = [
        {"action": "alloc", "size": 512, "frames": [mine]},
        {"action": "segment_alloc", "size": 2 << 20, "frames": [{"filename": "??", "line": 0, "name": "x"}, library, mine]},
        {"action": "segment_alloc", "size": 20 << 20, "frames": []},
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: dict(now))
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"num_host_alloc": now["num_device_alloc"]})
    called = []
    monkeypatch.setattr(torch.cuda, "init", lambda: called.append("init"))
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: bool(called.append("asked")), raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *a, **k: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [trace]})
    with watch(without=("kernels", "dispatch", "calls", "gputrace")) as ledger:
        now.update(num_device_alloc=6, num_device_free=2)
    assert called == ["init", "asked"], "torch has no allocators to ask before CUDA is initialized"
    rows = [
        (row.kind, row.what, row.count, row.bytes, row.place.site and row.place.site.line)
        for row in ledger.rows
        if row.kind != "gc"
    ]
    assert rows == [
        ("alloc", "cudaMalloc", 2, 20 << 20, None),
        ("alloc", "cudaMalloc", 1, 2 << 20, 2),
        ("free", "cudaFree", 1, 0, None),
        ("pin", "pinned allocation", 3, 0, None),
    ]
    assert ledger.totals["allocations"] == 3
    assert source_line.site_in([library]) is None


@pytest.mark.parametrize("build", [None, "cuda", "xpu"], ids=str)
def test_on_a_machine_without_a_device_syncs_cannot_pass(monkeypatch, build):
    """Also with a build for a device that is not there: a plain install on a laptop or in CI is a CUDA build."""
    only(monkeypatch, build, works=False)
    with watch() as ledger:
        torch.ones(3).sum().item()
    ledger.assert_within(fallbacks=0, recompiles=0)
    with pytest.raises(BudgetError, check=message("watch/sensors:on_a_machine_without_a_d")):
        ledger.assert_within(syncs=0)


def only(monkeypatch, build: str | None, works: bool, count: int = 1) -> None:
    """Let torch be built for the accelerator `build`, and see `count` of it or none."""

    def current(check_available=False):
        return torch.device(build) if build and (works or not check_available) else None

    monkeypatch.setattr(pretend, "ready", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: build == "cuda" and works)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count if works else 0)


@pytest.mark.parametrize(
    ("device", "counted"), [(None, True), ("xpu", True), ("xpu:1", True), ("xpu:2", False), ("cuda", False)]
)
def test_a_device_that_is_not_here_is_not_vouched_for(monkeypatch, device, counted):
    only(monkeypatch, "xpu", works=True, count=2)
    with watch(device=device, gputrace=True) as ledger:
        pass
    if counted:
        return ledger.assert_within(syncs=0, launches=0)
    with pytest.raises(BudgetError, check=message("watch/sensors:a_device_that_is_not_her", device)):
        ledger.assert_within(syncs=0)


def test_the_pretend_device_must_be_made_first(monkeypatch):
    only(monkeypatch, None, works=False)
    with pytest.raises(ValueError, check=message("watch/sensors:the_pretend_device_must")):
        watch(device="simgpu")


@pytest.mark.parametrize("works", [False, True])
def test_a_synchronize_waits_for_an_accelerator_that_works(monkeypatch, works):
    only(monkeypatch, "xpu", works)
    heard = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    ops.listen(listener := lambda *what: heard.append(what))
    try:
        torch.accelerator.synchronize()
    finally:
        ops.leave(listener)
    assert heard == [("torch.accelerator.synchronize", "xpu")] * works


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        (__file__, source_line.USER),
        (torch.__file__, source_line.TORCH),
        (torch._ops.__file__, source_line.PLUMBING),
        (torch.optim.__file__, source_line.READER),
        (getattr(find_spec("triton"), "origin", torch._ops.__file__), source_line.PLUMBING),
        (ops.__file__.replace("watch/ops", "graph/runner"), source_line.PLUMBING),
        (ops.__file__.replace("watch/ops", "trace"), source_line.PLUMBING),
        (threading.__file__, source_line.STDLIB),
        (pytest.__file__, source_line.LIBRARY),
        (ops.__file__, source_line.OWN),
        (ops.__file__.replace("watch/ops", "device"), source_line.LIBRARY),
        ("<string>", source_line.UNNAMED),
        ("<stdin>", source_line.USER),
        ("<ipython-input-3-abc>", source_line.USER),
        ("<frozen runpy>", source_line.UNNAMED),
    ],
)
def test_whose_file(file, whose):
    assert source_line.owner(file) is whose


def test_packages_in_a_folder_of_sys_path_are_libraries_and_the_files_beside_them_are_not(tmp_path, monkeypatch):
    """As `pip install --target` leaves them."""
    (tmp_path / "dep-1.0.dist-info").mkdir()
    (tmp_path / "dep-1.0.dist-info" / "RECORD").write_text("dep/__init__.py,sha256=x,1\nsingle.py,sha256=y,2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {
        name: source_line.owner(str(tmp_path / name)) for name in ("dep/inner/core.py", "single.py", "train.py", "de/x.py")
    }
    assert found == {
        "dep/inner/core.py": source_line.LIBRARY,
        "single.py": source_line.LIBRARY,
        "train.py": source_line.USER,
        "de/x.py": source_line.USER,
    }


def test_code_run_as_main_from_a_string_is_the_users():
    code = compile("def f():\n    return here()\nplace = f()", "<string>", "exec")
    space = {"__name__": "__main__", "here": source_line.here}
    exec(code, space)
    assert (space["place"].site.function, space["place"].site.line) == ("f", 2)


def test_a_statement_over_several_lines():
    place = (
        source_line.here()
    )  # fmt: skip
    assert place.site.code.startswith("source_line.here()")


def test_origins_of_another_thread_s_nodes_are_not_believed():
    origins = source_line.Origins()
    x = torch.ones(2, requires_grad=True)
    node = (x * 2).grad_fn
    origins._built[node._sequence_nr()] = ("addmm", source_line.here().site)
    assert origins.of(node) is None
    origins._built[node._sequence_nr()] = ("mul", source_line.here().site)
    assert origins.of(node).function == "test_origins_of_another_thread_s_nodes_are_not_believed"


def test_dense():
    x = torch.zeros(4, 6)
    assert ops.dense(x) and ops.dense(x.t()) and ops.dense(x[1:]) and ops.dense(torch.zeros(()))
    assert not ops.dense(x[:, 1:]) and not ops.dense(x.expand(3, 4, 6))


def test_names_of_the_table_exist():
    """A name that torch no longer has would silently stop being seen."""
    for name in (*ops._LOOKS, *events.WAITING_OPS):
        assert hasattr(torch.ops.aten, name), name
