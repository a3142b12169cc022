"""Timing and comparison on a pretended clock, so that every figure is known; the cache of ceilings in a folder of its own."""

import doctest
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from gpubound import measure, trace, words
from gpubound.errors import DeviceError, MeasureError
from gpubound.measure import Machine, Prepared, Timing, arithmetic, ceiling, limits, timing


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock(seconds)` moves."""
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])

    def work(seconds):
        now[0] += seconds

    return work


@pytest.mark.parametrize("module", [arithmetic, words], ids=lambda m: m.__name__)
def test_docstring_examples(module):
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


def test_time_is_the_median_of_the_runs_after_the_warm_up(clock):
    costs = iter([100.0, 90.0, 80.0, 1.0, 2.0, 3.0, 4.0, 50.0])
    found = measure.time(lambda: clock(next(costs)), warmup=3, runs=5, device="cpu")
    assert found == Timing(median_s=3.0, low_s=2.0, high_s=4.0, runs=5, clock="perf_counter")
    assert found.spread == pytest.approx(2 / 3)


def test_one_run_has_no_spread(clock):
    assert measure.time(lambda: clock(2.0), warmup=0, runs=1, device="cpu") == Timing(2.0, 2.0, 2.0, 1, "perf_counter")


def test_preparation_goes_before_every_run_and_is_not_timed(clock):
    given = []

    def prepare():
        clock(1000.0)
        return len(given)

    def run(number):
        given.append(number)
        clock(0.5)

    found = measure.time(Prepared(prepare, run), warmup=2, runs=3, device="cpu")
    assert given == [0, 1, 2, 3, 4]
    assert (found.median_s, found.high_s) == (0.5, 0.5)


def test_timing_reads_as_text(clock):
    assert str(measure.time(lambda: clock(0.00123), runs=4, device="cpu")) == (
        "1.23 ms (1.23 ms to 1.23 ms, 4 runs, perf_counter)"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5, "2.5 s"),
        (3600.0, "3600 s"),
        (0.25, "250 ms"),
        (1.5e-3, "1.5 ms"),
        (2e-5, "20 µs"),
        (3.2e-8, "32 ns"),
        (0.0, "0 ns"),
    ],
)
def test_seconds_in_words(seconds, text):
    assert measure.in_words(seconds) == text


def test_compare_takes_the_ratio_inside_each_round(clock):
    """The machine slows down threefold while it is measured; the ratio stays what it is."""
    slow = [1.0]

    def cost(seconds):
        clock(seconds * slow[0])
        slow[0] *= 1.02

    found = measure.compare({"ours": lambda: cost(2.0), "peer": lambda: cost(3.0)}, rounds=30, warmup=1, device="cpu")
    assert found.ratio == pytest.approx(1.5, rel=0.021)  # within one step of the drift
    assert found.timings["ours"].spread > 0.3  # which the timings themselves show


def test_compare_of_exact_costs(clock):
    works = {"ours": lambda: clock(2e-3), "eager": lambda: clock(3e-3), "liger": lambda: clock(1e-3)}
    found = measure.compare(works, rounds=5, device="cpu")
    assert {name: (r.value, r.low, r.high, r.spread) for name, r in found.ratios.items()} == {
        "eager": pytest.approx((1.5, 1.5, 1.5, 0.0)),
        "liger": pytest.approx((0.5, 0.5, 0.5, 0.0)),
    }
    assert str(found) == (
        "ours       2 ms\neager      3 ms  ours is 1.500x (1.500 to 1.500)\nliger      1 ms  ours is 0.500x (0.500 to 0.500)"
    )


def test_compare_runs_everyone_once_a_round_in_changing_order(clock):
    called = []
    works = {name: lambda name=name: (called.append(name), clock(1.0)) for name in "abc"}
    measure.compare(works, rounds=20, warmup=0, device="cpu", seed=1)
    rounds = [tuple(called[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) > 3
    again = list(called)
    called.clear()
    measure.compare(works, rounds=20, warmup=0, device="cpu", seed=1)
    assert called == again


def test_the_interval_covers_the_median_and_is_reproducible():
    generator = torch.Generator().manual_seed(0)
    ours = (1 + 0.1 * torch.rand(40, generator=generator)).tolist()
    peer = (2 + 0.2 * torch.rand(40, generator=generator)).tolist()
    ratio = measure.compare_samples({"ours": ours, "peer": peer}).ratios["peer"]
    assert ratio.low < ratio.value < ratio.high
    assert ratio.low > 1.9 and ratio.high < 2.1
    assert ratio == measure.compare_samples({"ours": ours, "peer": peer}).ratios["peer"]


def test_an_error_names_the_work_that_raised_it():
    def broken():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError) as error:
        measure.compare({"ours": lambda: None, "liger": broken}, device="cpu")
    assert error.value.__notes__ == ["compare: raised by 'liger'"]


def nothing():
    pass


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: measure.time(nothing, runs=0), "time: runs must be an integer of at least 1, got 0."),
        (lambda: measure.time(nothing, warmup=-1), "time: warmup must be an integer of at least 0, got -1."),
        (lambda: measure.time(nothing, runs=2.5), "time: runs must be an integer of at least 1, got 2.5."),
        (
            lambda: measure.time(nothing, cold_l2=True, device="cpu"),
            "time: cold_l2=True needs a CUDA device, got cpu; leave it out.",
        ),
        (
            lambda: measure.time(nothing, graph=True, device="cpu"),
            "time: graph=True wants a plain callable on a CUDA device without cold_l2 and host_ahead, got function on cpu, "
            "cold_l2=False, host_ahead=False; leave one of them out.",
        ),
        (
            lambda: measure.compare({"ours": nothing}),
            "compare: got 1 callables, wanted ours and at least one peer, as in {'ours': f, 'peer': g}.",
        ),
        (
            lambda: measure.compare({"a": nothing, "b": nothing}, rounds=2),
            "compare: rounds must be an integer of at least 3, got 2.",
        ),
        (
            lambda: measure.compare({"a": nothing, "b": nothing}, host_ahead=True, device="cpu"),
            "compare: host_ahead=True needs a CUDA device, got cpu; leave it out.",
        ),
        (
            lambda: measure.compare_samples({"ours": [1.0, 2.0], "peer": [1.0]}),
            "compare_samples: got 2 rounds of 'ours', 1 rounds of 'peer'; "
            "wanted the same number for ours and at least one peer.",
        ),
        (
            lambda: measure.compare_samples({n: [1.0, 1.0] for n in ("ours", "a", "b")}).ratio,
            "comparison: 2 peers were timed (a, b); take one of comparison.ratios.",
        ),
        (lambda: measure.bandwidth(1e9, 0.0), "bandwidth: seconds must be positive, got 0.0; time more work in one run."),
        (lambda: measure.rate(1e9, -1.0), "rate: seconds must be positive, got -1.0; time more work in one run."),
        (
            lambda: measure.mfu(1e5, 1e9, 0.0),
            "mfu: flops_per_s must be positive, got 0.0; take it from measure.ceilings().",
        ),
    ],
)
def test_bad_input(call, sentence):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == sentence


def test_the_name_of_a_gpu_is_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for device in ("cuda", "cuda:3", torch.device("cuda", 0)):
        with pytest.raises(DeviceError, match="needs a GPU: CUDA_VISIBLE_DEVICES='' hides every GPU"):
            measure.time(lambda: None, device=device)
    with pytest.raises(ValueError, match=r"^device: got 'gpu', wanted cpu, cuda or cuda:<index>"):
        measure.compare({"a": lambda: None, "b": lambda: None}, device="gpu")


# --- ceilings ---

FIGURES = {
    "copy_bytes_per_s": 4.0e12,
    "read_bytes_per_s": 4.5e12,
    "fp32_flops_per_s": 5.0e13,
    "bf16_flops_per_s": 8.0e14,
    "launch_us": 8.0,
}


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """How often the CPU was measured; the cache lies in a folder of its own, and nothing has been said yet."""
    calls = []

    def of_cpu(quick):
        calls.append(quick)
        return dict(FIGURES)

    monkeypatch.setattr(limits, "of_cpu", of_cpu)
    monkeypatch.setattr(trace, "_said", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


def kept(tmp_path):
    return sorted((tmp_path / "gpubound").glob("*"))


def test_ceilings_are_measured_once_and_kept(measured, tmp_path):
    first = measure.ceilings("cpu")
    assert measure.ceilings("cpu") == first and measured == [False]
    (file,) = kept(tmp_path)
    assert file.name == f"ceilings-{first.key}.json" and json.loads(file.read_text())["copy_bytes_per_s"] == 4.0e12
    measure.ceilings("cpu", refresh=True)
    assert measured == [False, False]


def test_quick_figures_never_stand_for_full_ones(measured):
    assert measure.ceilings("cpu", quick=True).quick
    measure.ceilings("cpu", quick=True)
    assert not measure.ceilings("cpu").quick
    assert not measure.ceilings("cpu", quick=True).quick  # full ones are better
    assert measured == [True, False]


def under_load(monkeypatch, *shares):
    """Let each measurement find only a share of what the machine can do; the last one for the rest of them."""
    left = list(shares)

    def of_cpu(quick):
        share = left.pop(0) if len(left) > 1 else left[0]
        return {name: figure / share if name.endswith("_us") else figure * share for name, figure in FIGURES.items()}

    monkeypatch.setattr(limits, "of_cpu", of_cpu)
    return left


def test_a_ceiling_that_is_passed_is_measured_again_and_the_better_kept(measured, monkeypatch, tmp_path, capsys):
    under_load(monkeypatch, 0.25, 1.0, 0.5)
    assert measure.share(1.0e12, "read_bytes_per_s", "cpu") == pytest.approx(1.0 / (4.5 * 0.25))
    assert measure.ceilings("cpu", quick=True).measurements == 1
    assert measure.share(3.6e12, "read_bytes_per_s", "cpu") == pytest.approx(0.8)
    found = measure.ceilings("cpu", quick=True)
    assert (found.measurements, found.launch_us, found.bf16_flops_per_s) == (2, 8.0, 8.0e14)
    assert measure.share(4.4e12, "read_bytes_per_s", "cpu") == pytest.approx(44 / 45) and capsys.readouterr().err == ""
    assert measure.share(9e14, "bf16_flops_per_s", "cpu") is None
    assert measure.ceilings("cpu", quick=True).measurements == ceiling.MEASUREMENTS == 3
    assert measure.ceilings("cpu", quick=True).bf16_flops_per_s == 8.0e14, "the worse third one does not count"
    (file,) = kept(tmp_path)
    assert json.loads(file.read_text())["measurements"] == 3


def test_work_that_no_measurement_holds_has_no_share(measured, capsys):
    """A small model is read from a cache: after three measurements the machine is not measured for it any more."""
    for _ in range(3):
        assert measure.share(9.0e12, "read_bytes_per_s", "cpu") is None
    assert measured == [True] * 3
    said = capsys.readouterr().err
    assert said.count("no share of read_bytes_per_s: this work reaches 9e+12, and the best of 3 measurements") == 1


def test_a_full_measurement_is_made_better_by_a_full_one(measured):
    measure.ceilings("cpu")
    measure.share(9.0e12, "read_bytes_per_s", "cpu")
    assert measured == [False] * 3 and not measure.ceilings("cpu").quick


def test_the_better_of_two_measurements():
    one = ceiling.Ceilings("cuda", "H", "k", "d", False, **FIGURES, item_us=9.0, missing={"fp8_flops_per_s": "busy"})
    other = replace(one, read_bytes_per_s=5e12, launch_us=9.0, item_us=None, fp8_flops_per_s=1e15, missing={"item_us": "x"})
    found = ceiling._better(one, other)
    assert (found.read_bytes_per_s, found.launch_us, found.item_us, found.fp8_flops_per_s) == (5e12, 8.0, 9.0, 1e15)
    assert found.missing == {} and found.measurements == 2 and found.tf32_flops_per_s is None


def test_refresh_forgets_what_was_measured_before(measured, monkeypatch):
    measure.share(9.0e12, "read_bytes_per_s", "cpu")
    under_load(monkeypatch, 0.5)
    found = measure.ceilings("cpu", refresh=True, quick=True)
    assert (found.measurements, found.read_bytes_per_s) == (1, 2.25e12)


def test_another_torch_is_another_machine(measured, monkeypatch, tmp_path):
    first = measure.ceilings("cpu")
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert measure.ceilings("cpu").key != first.key
    assert measured == [False, False] and len(kept(tmp_path)) == 2


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda row: '{"copy', "Unterminated string starting at: line 1 column 2 (char 1)"),
        (lambda row: "[]", "its fields are not this version's: list"),
        (lambda row: json.dumps(row | {"old_gbps": 1.0}), "its fields are not this version's: old_gbps"),
        (lambda row: json.dumps(row | {"launch_us": -1.0}), "launch_us is -1.0"),
        (lambda row: json.dumps(row | {"copy_bytes_per_s": "fast"}), "copy_bytes_per_s is 'fast'"),
    ],
)
def test_a_corrupt_cache_is_measured_again_and_said(measured, tmp_path, capsys, spoil, why):
    found = measure.ceilings("cpu")
    (file,) = kept(tmp_path)
    file.write_text(spoil(json.loads(file.read_text())))
    again = measure.ceilings("cpu")
    assert measured == [False, False] and again.copy_bytes_per_s == found.copy_bytes_per_s
    assert capsys.readouterr().err == f"gpubound: {file} is not readable as measured ceilings ({why}): measuring again.\n"
    assert measure.ceilings("cpu") == again and len(measured) == 2  # and mended


def test_a_cache_that_cannot_be_written_costs_the_cache_only(measured, monkeypatch, tmp_path, capsys):
    (tmp_path / "gpubound").write_text("a file where the folder should be")
    found = measure.ceilings("cpu")
    assert found.launch_us == 8.0
    assert capsys.readouterr().err == (
        f"gpubound: the measured ceilings cannot be kept in {ceiling.cache_file(found.key)} (File exists): "
        "they will be measured again next time.\n"
    )


def test_matrix_rate_by_name_and_by_dtype(measured):
    found = measure.ceilings("cpu")
    assert found.flops_per_s("bf16") == found.flops_per_s(torch.bfloat16) == 8.0e14
    assert found.flops_per_s(torch.float32) == 5.0e13
    with pytest.raises(MeasureError) as missing:
        found.flops_per_s("fp8")
    assert str(missing.value) == f"no fp8 matrix rate for {found.name}: it is not measured on a cpu device."
    for wrong in ("int4", torch.int8):
        with pytest.raises(ValueError) as error:
            found.flops_per_s(wrong)
        assert str(error.value) == (
            f"flops_per_s: got {wrong!r}, wanted one of fp32, tf32, bf16, fp16, fp8 or a floating torch.dtype."
        )


def test_the_cpu_is_measured_whole(monkeypatch):
    monkeypatch.setattr(limits, "_cpu_buffer_bytes", lambda quick: 1 << 20)
    found = limits.of_cpu(quick=True)
    assert found.keys() == FIGURES.keys()
    assert all(figure > 0 for figure in found.values())


@pytest.mark.parametrize(("memory_gib", "mib"), [(1, 64), (64, 1024)])
def test_the_cpus_buffers_leave_memory_free(monkeypatch, memory_gib, mib):
    real = measure.machine()
    monkeypatch.setattr(limits, "machine", lambda: Machine(**{**vars(real), "host_memory_bytes": memory_gib << 30}))
    assert limits._cpu_buffer_bytes(quick=False) <= mib << 20


def test_machine_facts():
    found = measure.machine()
    assert found.torch == torch.__version__ and found.cuda == torch.version.cuda
    assert found.cpu and found.threads == torch.get_num_threads()


# --- what only a GPU can show ---


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("options", [{}, {"cold_l2": True, "host_ahead": True}, {"graph": True}], ids=str)
def test_the_ruler_on_a_known_length(options):
    """A spin of twice the cycles takes twice as long, by each way of timing it."""
    found = []
    for _ in range(5):
        short, long = (
            measure.time(lambda n=n: torch.cuda._sleep(n), runs=20, device="cuda", **options).median_s
            for n in (1_000_000, 2_000_000)
        )
        found.append(long / short)
        if abs(found[-1] - 2.0) <= 0.1:
            return
    pytest.fail(f"none of five tries came to 2.0: {found}")


@pytest.mark.gpu
@pytest.mark.alone
def test_host_ahead_leaves_launch_gaps_out():
    """Thirty tiny kernels behind a slow host: the events see the host's pauses unless the device was kept waiting for it."""
    from time import sleep

    x = torch.ones(16, device="cuda")

    def work():
        for _ in range(3):
            sleep(1e-3)
            x.add_(1)

    with_gaps = measure.time(work, runs=5, device="cuda").median_s
    without = measure.time(work, runs=5, device="cuda", host_ahead=True).median_s
    assert with_gaps > 2e-3 > without


@pytest.mark.gpu
def test_work_that_cannot_be_captured():
    """In a process of its own: a capture that breaks off can leave CUDA's random generator unusable."""
    script = (
        "import torch; from gpubound import measure; x = torch.ones(4, device='cuda')\n"
        "try: measure.time(lambda: x.sum().item(), graph=True)\n"
        "except measure.timing.MeasureError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip()
    assert said.startswith("time: graph=True, but this work cannot be captured: CUDA error: ")
    assert said.endswith(". Time it without graph.")


@pytest.mark.gpu
@pytest.mark.alone
def test_the_gpus_ceilings(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = torch.backends.cuda.matmul.fp32_precision
    found = measure.ceilings("cuda", quick=True)
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert found.device == "cuda" and found.name == torch.cuda.get_device_name()
    unmeasured = {name for name, value in found.as_dict().items() if value is None}
    assert unmeasured == set(found.missing)
    assert measure.ceilings("cuda", quick=True) == found
