import gzip
import json
import tracemalloc

import pytest

from gpubound.doctor.price.idle import idle_times
from gpubound.doctor.price.prices import Replay
from gpubound.doctor.record import kineto
from gpubound.doctor.record.kineto import call_kind, read_trace
from gpubound.doctor.record.tape import Tape
from gpubound.errors import DataError
from tests.messages import message

from .tapes import AUTOGRAD, MAIN, Synthetic

BASE = 4535116811822.0  # torch writes times since some start of the month


def x(cat: str, name: str, ts: float, dur: float, pid=100, tid=MAIN, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": BASE + ts, "dur": dur, "args": args}


def as_kineto(tape: Tape, hip: bool = False) -> dict:
    """What the profiler would have written of this tape: every fact where Kineto puts it."""
    events = [{"ph": "M", "name": "process_name", "pid": 100, "tid": 0, "ts": BASE, "args": {"name": "python"}}]
    copies = {"h2d": "HtoD ({} -> Device)", "d2h": "DtoH (Device -> {})", "d2d": "DtoD (Device -> Device)"}
    for call in tape.calls:
        name = call.name.replace("cuda", "hip") if hip else call.name
        events.append(x("cuda_runtime", name, call.start, call.end - call.start, tid=call.thread, correlation=call.correlation))
        if call.kind == "sync" or call.name == "cudaStreamWaitEvent":
            source = next((c for c in tape.calls if call.record and c.correlation == call.record), None)
            where = {
                "stream": -1 if call.stream is None else call.stream,
                "device": call.device,
                "correlation": call.correlation,
            }
            if source is not None:
                where |= {"wait_on_stream": source.stream, "wait_on_cuda_event_record_corr_id": call.record}
            events.append(x("cuda_sync", "Sync", call.start, 1.0, pid=0, tid=7, **where))
    for work in tape.work:
        kind = copies.get(work.kind)
        category = "gpu_memcpy" if kind else "kernel"
        name = f"Memcpy {kind.format('Pageable' if work.pageable else 'Pinned')}" if kind else work.name
        facts = {"device": work.device, "stream": work.stream, "correlation": work.correlation, "bytes": work.bytes}
        events.append(x(category, name, work.start, work.end - work.start, pid=work.device, tid=work.stream, **facts))
    names = {"data": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "gc": "Python GC"}
    for span in tape.spans:
        events.append(x("user_annotation", names[span.kind], span.start, span.end - span.start, tid=span.thread))
    for mark in tape.marks:
        events.append(x("user_annotation", f"stall|{mark.site}", mark.at, 3.0, tid=mark.thread))
    for number, (start, end) in enumerate(tape.steps):
        events.append(x("user_annotation", f"ProfilerStep#{number}", start, end - start))
    events.append({"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": BASE, "dur": 1})
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "traceEvents": events,
        "traceName": "/x",
    }


def everything() -> Tape:
    made = Synthetic()
    for _ in range(3):
        made.mark("a.py:3").doing("data", 40).copy(pageable=True).launch(times=2).record("e").wait_event("e", 20)
        made.launch(stream=20).hand(AUTOGRAD).item(thread=AUTOGRAD).hand(MAIN, AUTOGRAD).stop("free").graph().sync(event="e")
        made.sync(None).step()
    return made.tape()


def written(path, content) -> str:
    text = json.dumps(content, indent=2)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("hip", [False, True])
def test_a_trace_gives_the_tape_that_it_was_written_from(tmp_path, name, hip, monkeypatch):
    monkeypatch.setattr(kineto, "CHUNK", 997)  # so that events are cut everywhere
    tape, read = everything(), read_trace(written(tmp_path / name, as_kineto(everything(), hip)))
    assert len(read.calls) == len(tape.calls) and len(read.work) == len(tape.work)
    for got, was in zip(read.calls, tape.calls):
        assert (got.kind, got.thread, got.correlation, got.blocks, got.record, got.waits) == (
            was.kind, was.thread, was.correlation, was.blocks, was.record, was.waits,
        )  # fmt: skip
        assert got.stream == was.stream or (was.kind in ("alloc", "free") and got.stream is None)
        assert got.end - got.start == pytest.approx(was.end - was.start, abs=0.01)
    assert [w.kind for w in read.work] == [w.kind for w in tape.work] and read.work[0].pageable
    assert [m.site for m in read.marks] == ["a.py:3"] * 3 and [s.kind for s in read.spans] == ["data"] * 3
    assert read.about == {"source": "torch.profiler", "devices": ["NVIDIA H200"]}
    assert idle_times(read).shares == pytest.approx(idle_times(tape).shares, abs=0.01)
    got, was = Replay(read), Replay(tape)
    assert got.saved(got.waits) == pytest.approx(was.saved(was.waits), abs=1e-3) and was.saved(was.waits) > 0.1


def test_what_calls_are():
    kinds = {
        "cudaLaunchKernel": "launch", "cuLaunchKernelEx": "launch", "hipExtModuleLaunchKernel": "launch",
        "hipModuleLaunchKernel": "launch", "cudaLaunchCooperativeKernel": "launch", "cudaMemsetAsync": "launch",
        "cudaLaunchHostFunc": "other", "cudaGraphLaunch": "graph", "hipGraphLaunch": "graph", "cudaMemcpyAsync": "copy",
        "hipMemcpyWithStream": "copy", "cuMemcpyDtoHAsync_v2": "copy", "cudaStreamSynchronize": "sync",
        "hipDeviceSynchronize": "sync", "cuCtxSynchronize": "sync",
        "cudaEventQuery": "other", "cudaMalloc": "alloc", "cuMemCreate": "alloc", "cudaFree": "free",
        "cuMemUnmap": "free", "cudaMallocAsync": "other", "cudaFreeAsync": "other",
        "cudaHostAlloc": "pin", "cudaFreeHost": "pin",
        "hipHostMalloc": "pin", "cudaMallocHost": "pin", "cudaEventRecordWithFlags": "event", "cudaStreamWaitEvent": "event",
        "cudaStreamIsCapturing": "other", "cudaFuncGetAttributes": "other",
    }  # fmt: skip
    assert {name: call_kind(name) for name in kinds} == kinds


def test_a_drivers_call_inside_the_runtimes_is_one_call(tmp_path):
    events = [
        x("cuda_runtime", "cudaLaunchKernelExC", 0, 10, correlation=1),
        x("cuda_driver", "cuLaunchKernelEx", 2, 5, correlation=2),
        x("kernel", "triton", 20, 5, pid=0, tid=7, device=0, stream=7, correlation=2),
    ]
    tape = read_trace(written(tmp_path / "t.json", events))
    assert [(call.name, call.correlation, call.stream) for call in tape.calls] == [("cudaLaunchKernelExC", 2, 7)]
    assert idle_times(tape).shares["unlocated"] == 0


def test_an_older_trace_of_rocm(tmp_path):
    """Whole microseconds, streams as addresses, and External id instead of a correlation."""
    tid = {"tid": 9, "stream": "0x0"}
    events = [{**x("cuda_runtime", "hipMemcpyWithStream", 2, 3), "args": {"External id": 3, **tid}}]
    events += [{**x("cuda_runtime", "hipLaunchKernel", at, 1), "args": {"External id": at, **tid}} for at in (5, 6, 7)]
    events += [{**x("kernel", "Cijk", 10 * at, 9, pid=2, tid=0), "args": {"External id": at}} for at in (5, 6, 7)]
    events += [{**x("gpu_memcpy", "CopyDeviceToHost", 3, 1, pid=2, tid=0), "args": {"External id": 3}}]
    tape = read_trace(written(tmp_path / "t.json", {"traceEvents": [{**each, "ts": int(each["ts"])} for each in events]}))
    assert [(call.kind, call.blocks, call.device) for call in tape.calls] == [("copy", True, 2)] + [("launch", False, 2)] * 3
    assert idle_times(tape).shares["unlocated"] == 0 and [work.kind for work in tape.work] == ["d2h"] + ["kernel"] * 3


def test_steps_and_spans_by_their_names(tmp_path):
    spans = {
        "Optimizer.step#AdamW.step": "optimizer", "_compile.compile_inner (dynamo_timed)": "compile", "Python GC": "gc",
        "span|checkpoint|save|a": "checkpoint", "autograd::engine::evaluate_function: MmBackward0": "backward",
        "mine": "annotation",
    }  # fmt: skip
    events = [x("user_annotation", name, 100 * n + k, 10) for n in range(3) for k, name in enumerate(spans)]
    events += [
        x("cpu_op", "aten::mm", 5, 1),
        x("python_function", "short", 6, 20),
        x("python_function", "/home/me/its/long", 7, 200),
    ]
    tape = read_trace(written(tmp_path / "t.json", {"traceEvents": events}))
    names = spans | {"aten::mm": "op", "its/long": "python", "save|a": "checkpoint"}
    assert {span.name: span.kind for span in tape.spans} == {k: v for k, v in names.items() if not k.startswith("span|")}
    assert tape.steps == ((10, 110), (110, 210))  # from one end of Optimizer.step to the next
    assert read_trace(tmp_path / "t.json", step="mine").steps == ((5, 15), (105, 115), (205, 215))


def test_a_real_trace_of_this_torch(tmp_path):
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, record_function("stall|a.py:3"):
        torch.ones(4).sum().item()
    profiler.export_chrome_trace(str(tmp_path / "t.json.gz"))
    tape = read_trace(tmp_path / "t.json.gz")
    assert [mark.site for mark in tape.marks] == ["a.py:3"] and not tape.work
    assert {"aten::sum", "aten::item"} <= {span.name for span in tape.spans}


@pytest.mark.parametrize(
    "content, name",
    [
        (b"\x00\x01 nothing", "no_json"),
        (b"SQLite format 3\x00", "nsight"),
        (b'{"findings": []}', "no_events"),
        (b'{"traceEvents": [{"ph": "X", "cat": "MyTool"}]}', "another_tool"),
    ],
)
def test_other_files_are_named(tmp_path, content, name):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_trace(path)
    texts = {
        "no_json": message("doctor/kineto:no_json", path, kineto.WANTED),
        "nsight": message("doctor/kineto:nsight", path, kineto.WANTED),
        "no_events": message("doctor/kineto:no_events", path, kineto.WANTED),
        "another_tool": message("doctor/kineto:another_tool", path, kineto.WANTED),
    }
    assert str(error.value) == texts[name]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_that_was_cut_off_is_named(tmp_path, name):
    path = written(tmp_path / name, as_kineto(everything()))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.8)])
    with pytest.raises(DataError, check=message("doctor/kineto:a_trace_that_was_cut_off")):
        read_trace(path)


def test_damage_is_named(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + '{"ph": "X", "cat": "kernel", "name": "k" "ts": 1},' * 50_000 + "]}")
    with pytest.raises(DataError, check=message("doctor/kineto:damage_is_named")):
        read_trace(path)
    written(path, [x("kernel", "k", 0, 1, stream=7, device="first")])
    with pytest.raises(DataError, check=message("doctor/kineto:damage_is_named.2")):
        read_trace(path)
    with pytest.raises(DataError, check=message("doctor/kineto:damage_is_named.3")):
        read_trace(tmp_path / "none.json")


def test_the_text_is_never_held(tmp_path, monkeypatch):
    """0.5 MB of text in events that the reader passes over need less than a third of this."""
    monkeypatch.setattr(kineto, "CHUNK", 1 << 14)
    path = tmp_path / "t.json"
    with open(path, "w") as file:
        file.write('{"traceEvents": [')
        for number in range(3_000):
            file.write(json.dumps(x("overhead", "Buffer Flush" * 5, number, 1)) + ",\n")
        file.write(json.dumps(x("kernel", "k", 0, 1, stream=7, device=0)) + "]}")
    assert path.stat().st_size > 4.5e5
    tracemalloc.start()
    assert len(read_trace(path).work) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5e5


def test_a_compilation_is_one_span_with_the_name_of_its_line(tmp_path):
    """Torch times its parts; the doctor's own span inside says where it was. Another thread's is another one."""
    timed = [("_compile", 0, 90), ("entire_frame", 10, 50), ("backend", 20, 30), ("_compile", 100, 40), ("inductor", 110, 10)]
    events = [x("user_annotation", f"{name} (dynamo_timed)", at, us) for name, at, us in timed]
    events += [
        x("user_annotation", "span|compile|compile (3)", 5, 1),
        x("user_annotation", "a (dynamo_timed)", 20, 5, tid=AUTOGRAD),
    ]
    tape = read_trace(written(tmp_path / "t.json", {"traceEvents": events}))
    assert [(span.name, span.start, span.end) for span in tape.spans if span.kind == "compile"] == [
        ("compile (3)", 0, 90), ("a (dynamo_timed)", 20, 25), ("_compile (dynamo_timed)", 100, 140),
    ]  # fmt: skip
