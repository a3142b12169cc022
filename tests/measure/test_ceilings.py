"""What this machine does at best: measured once, kept in a folder of its own, and measured again when it is doubted."""

import errno
import json
import os
import tempfile
from dataclasses import replace

import pytest
import torch

from gpubound import measure, trace
from gpubound.errors import MeasureError
from gpubound.measure import Machine, ceiling, timing
from tests.messages import message

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
        torch.rand(1)
        return dict(FIGURES)

    monkeypatch.setattr(ceiling, "of_cpu", of_cpu)
    monkeypatch.setattr(trace, "_printed", set())
    monkeypatch.setattr(ceiling, "_unsaved", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


def kept(tmp_path):
    return sorted((tmp_path / "gpubound").glob("*"))


def test_ceilings_are_measured_once_and_kept(measured, tmp_path):
    drawn = torch.get_rng_state()
    first = measure.ceilings("cpu")
    assert torch.get_rng_state().equal(drawn)
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

    monkeypatch.setattr(ceiling, "of_cpu", of_cpu)
    return left


def test_a_ceiling_that_is_passed_is_measured_again_and_the_better_kept(measured, monkeypatch, tmp_path, capsys):
    under_load(monkeypatch, 0.25, 1.0, 0.5)
    assert measure.share(1.0e12, "read_bytes_per_s", "cpu") == pytest.approx(1.0 / (4.5 * 0.25))
    assert measure.ceilings("cpu", quick=True).measurements == 1
    assert measure.share(3.6e12, "read_bytes_per_s", "cpu") == pytest.approx(0.8)
    found = measure.ceilings("cpu", quick=True)
    assert (found.measurements, found.launch_us, found.bf16_flops_per_s) == (2, 8.0, 8.0e14)
    assert measure.share(4.4e12, "read_bytes_per_s", "cpu") == pytest.approx(44 / 45)
    assert len(capsys.readouterr().err.splitlines()) == 2, "a line for each measurement"
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


def test_refresh_on_a_busy_machine_forgets_nothing(measured, monkeypatch, tmp_path):
    measure.share(9.0e12, "read_bytes_per_s", "cpu")
    under_load(monkeypatch, 0.5, 2.0)
    found = measure.ceilings("cpu", refresh=True, quick=True)
    assert (found.measurements, found.read_bytes_per_s, found.launch_us) == (1, 4.5e12, 8.0)
    found = measure.ceilings("cpu", refresh=True, quick=True)
    assert (found.measurements, found.read_bytes_per_s, found.launch_us) == (1, 9.0e12, 4.0)
    assert measure.ceilings("cpu", quick=True) == found and len(kept(tmp_path)) == 1


def test_a_ceiling_that_is_nearly_reached_is_measured_a_second_time(measured, monkeypatch):
    """Nothing passes a ceiling that was measured under load, if the work is slowed by as much; but a share of 92 % is rare."""
    under_load(monkeypatch, 0.5, 1.0, 2.0)
    assert measure.share(2.07e12, "read_bytes_per_s", "cpu") == pytest.approx(0.46)
    assert measure.share(4.2e12, "read_bytes_per_s", "cpu") == pytest.approx(0.93, abs=0.01), "the second time it is believed"
    assert measure.ceilings("cpu", quick=True).measurements == 2


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
    assert f"gpubound: {file} is not readable as measured ceilings ({why}): measuring again.\n" in capsys.readouterr().err
    assert measure.ceilings("cpu") == again and len(measured) == 2  # and mended


@pytest.mark.parametrize("home", ["a file", "not there", "closed"])
def test_a_user_whose_home_takes_no_file_has_a_folder_among_temporary_ones(measured, monkeypatch, tmp_path, capsys, home):
    """Commands of a container without a home measure once, all together."""
    if home == "a file":
        (tmp_path / "gpubound").write_text("where the folder should be")
    elif home == "not there":  # a container may run under a number that no list of users has
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    first = measure.ceilings("cpu")
    monkeypatch.setattr(ceiling, "_unsaved", {})  # as another process begins
    assert measure.ceilings("cpu") == first and len(measured) == 1
    (file,) = (tmp_path / "temporary").glob("*/*")
    assert file == ceiling.cache_file(first.key) and file.parent.stat().st_mode & 0o777 == 0o700
    assert len([line for line in capsys.readouterr().err.splitlines() if str(file.parent) in line]) == 1


@pytest.mark.parametrize("strangers", ["another user's", "open to all", "no folder"])
def test_a_temporary_folder_of_others_is_not_used(measured, monkeypatch, tmp_path, capsys, strangers):
    folder = tmp_path / "temporary" / f"gpubound-{os.getuid()}"
    folder.symlink_to(tmp_path) if strangers == "no folder" else folder.mkdir(mode=0o700)
    if strangers == "open to all":
        folder.chmod(0o777)
    elif strangers == "another user's":
        mine = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
        folder.rename(folder.with_name(f"gpubound-{os.getuid()}"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert measure.ceilings("cpu") == measure.ceilings("cpu") and len(measured) == 1, "within a process"
    assert ceiling.cache_file("key") is None and not list(tmp_path.glob("temporary/*/*.json"))
    assert capsys.readouterr().err.count("measurements are not cached") == 1


def test_a_disk_that_refuses_the_cache_is_named(measured, monkeypatch, tmp_path, capsys):
    def refuse(source, target):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    assert measure.ceilings("cpu") == measure.ceilings("cpu") and len(measured) == 1, "within a process"
    assert capsys.readouterr().err.count("(Permission denied)") == 1
    assert list((tmp_path / "gpubound").iterdir()) == [], "and nothing half-written stays"


def test_matrix_rate_by_name_and_by_dtype(measured):
    found = measure.ceilings("cpu")
    assert found.flops_per_s("bf16") == found.flops_per_s(torch.bfloat16) == 8.0e14
    assert found.flops_per_s(torch.float32) == 5.0e13
    with pytest.raises(MeasureError) as missing:
        found.flops_per_s("fp8")
    assert str(missing.value) == message("measure/ceilings:matrix_rate_by_name_and", found.name)
    for wrong in ("int4", torch.int8):
        with pytest.raises(ValueError) as error:
            found.flops_per_s(wrong)
        assert str(error.value) == message("measure/ceilings:matrix_rate_by_name_and.2", repr(wrong))


def test_the_cpu_is_measured_whole(monkeypatch):
    monkeypatch.setattr(ceiling, "_cpu_buffer_bytes", lambda quick: 1 << 20)
    product_rate = ceiling._product_rate
    monkeypatch.setattr(ceiling, "_product_rate", lambda most, *rest: product_rate(64, *rest))
    found = ceiling.of_cpu(quick=True)
    assert found.keys() == FIGURES.keys()
    assert all(figure > 0 for figure in found.values())


@pytest.fixture
def slow_machine(monkeypatch):
    """slow_machine(flops_per_s) -> rows of the products that were multiplied, on a clock that only they move."""
    clock, rows = [0.0], []

    def pretend(flops_per_s):
        def matmul(a, b):
            rows.append(len(a))
            clock[0] += 2 * len(a) ** 3 / flops_per_s

        monkeypatch.setattr(torch, "matmul", matmul)
        monkeypatch.setattr(timing, "perf_counter", lambda: clock[0])
        return clock, rows

    return pretend


@pytest.mark.parametrize(
    ("gigaflops", "most", "seconds"), [(0.8, 512, 1.5), (1.5, 512, 1.5), (35, 1024, 1.5), (1000, 2048, 1.5), (0.05, 256, 1.5)]
)
def test_a_slow_machine_multiplies_smaller_matrices(slow_machine, gigaflops, most, seconds):
    """0.8 GFLOP/s is bf16 on a CPU with AVX2 alone: eight products of 2,048 rows would take it 172 s."""
    clock, rows = slow_machine(gigaflops * 1e9)
    cpu = torch.device("cpu")
    rate = ceiling._product_rate(2048, torch.float32, cpu, lambda fn: ceiling._timed(fn, cpu, 7, 0.5).low_s)
    assert rate == pytest.approx(gigaflops * 1e9) and max(rows) == most and clock[0] < seconds


@pytest.mark.parametrize(("memory_gib", "mib"), [(1, 64), (64, 1024)])
def test_the_cpus_buffers_leave_memory_free(monkeypatch, memory_gib, mib):
    real = measure.machine()
    monkeypatch.setattr(ceiling, "machine", lambda: Machine(**{**vars(real), "host_memory_bytes": memory_gib << 30}))
    assert ceiling._cpu_buffer_bytes(quick=False) <= mib << 20


def test_machine_facts():
    found = measure.machine()
    assert found.torch == torch.__version__ and found.cuda == torch.version.cuda
    assert found.cpu and found.threads == torch.get_num_threads()


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
