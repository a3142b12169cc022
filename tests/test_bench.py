"""What the benchmarks do: nothing wrong is ever timed or kept, and every case's peer computes what ours does."""

import sys
from collections import Counter
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench_blocks, bench_graph, bench_kernels, bench_lora, bench_place, doors, harness, liger_ops
from benchmarks.door import Door, Drawer
from benchmarks.doors import DOORS, attention, gated_mlp, linear_cross_entropy
from benchmarks.families import FAMILIES
from benchmarks.harness import Bench, compile_sources
from benchmarks.quantized_folders import FOLDERS
from benchmarks.results import read
from benchmarks.shapes import SHAPES
from gpubound import trace
from gpubound.cli import guarded
from gpubound.measure import Prepared
from tests.messages import message

CPU = torch.device("cpu")


# --- the harness ---


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A bench that keeps its lines in tmp_path and takes three rounds."""
    made = Bench("kernels", CPU, "gpubound bench kernels", folder=tmp_path)
    monkeypatch.setattr(made, "rounds", 3)
    return made


def three(x=3.0):
    return torch.full((4,), x)


def test_a_case_keeps_a_line_a_peer_and_one_for_the_ceiling(bench, tmp_path, capsys):
    works = {"ours": three, "eager": lambda: three() + 0.0}
    bench.case("c", works, unit="GB/s", amount=16.0, ceiling=("copy rate", 1e15), gates={"copy rate": 0.5, "eager": 1e-9})
    kept = {line.peer_name: line for line in read(tmp_path)}
    assert kept.keys() == {"eager", "copy rate"}
    ceiling = kept["copy rate"]
    assert ceiling.peer == 1e6 and ceiling.gate == 0.5 and ceiling.short
    assert ceiling.ratio == pytest.approx(ceiling.ours / ceiling.peer, rel=1e-3)
    assert kept["eager"].gate == 1e-9 and not kept["eager"].short
    capsys.readouterr()
    assert bench.finish() == 1
    said = capsys.readouterr().err
    assert (
        said.startswith("SHORT  kernels: c: ")
        and message("bench:a_case_keeps_a_line_a_pe").within(said)
        and said.count("\n") == 1
    )


def test_results_that_disagree_are_never_timed(bench, tmp_path, capsys):
    timed = []
    works = {"ours": three, "liger": lambda: timed.append(1) or three(3.1)}
    assert bench.case("c", works, unit="GB/s", amount=1.0) is None
    assert len(timed) == 1 and not list(tmp_path.iterdir())
    assert bench.finish() == 1
    assert message("bench:results_that_disagree_ar").within(capsys.readouterr().err)


@pytest.mark.parametrize("wrong", [lambda: three(float("nan")), lambda: torch.ones(5)], ids=["nan", "shape"])
def test_nan_and_another_shape_disagree(bench, wrong):
    assert bench.case("c", {"ours": three, "peer": wrong}, unit="ms", amount=1) is None
    assert bench.wrong == [message("bench:nan_and_another_shape_di")]


def broken():
    raise RuntimeError("CUDA error: illegal address\nmore")


def test_a_gated_peer_that_fails_is_not_green(bench, capsys):
    assert bench.case("c", {"ours": three, "liger": broken}, unit="ms", amount=1, gates={"liger": 1.0}) is None
    assert bench.finish() == 3
    assert capsys.readouterr().err == message("bench:a_gated_peer_that_fails")


def test_ours_that_fails_is_wrong_and_the_next_case_goes_on(bench):
    assert bench.case("c", {"ours": broken, "eager": three}, unit="ms", amount=1) is None
    assert bench.case("d", {"ours": three, "eager": three}, unit="ms", amount=1) is not None
    assert bench.wrong == [message("bench:ours_that_fails_is_wrong")] and bench.finish() == 1


def test_a_door_that_falls_back_is_not_measured_as_ours(bench):
    def fallen():
        trace.fallback("rms_norm", "its self-test failed")
        return three()

    bench.case("c", {"ours": fallen, "eager": three}, unit="ms", amount=1)
    assert bench.wrong[0].startswith("c: ours raised FallbackError: rms_norm: would fall back: its self-test failed.")


def test_a_count_is_said_as_a_count(bench, capsys):
    bench.figure("host syncs", "syncs", 0, {"budget": 0, "liger": 3}, {"budget": 1.0})
    bench.figure("more host syncs", "syncs", 1, {"budget": 0}, {"budget": 1.0})
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["host", "syncs", "0", "syncs", "budget", "0", "liger", "3"]
    assert second.split()[3:] == ["1", "syncs", "budget", "0", "SHORT"] and bench.finish() == 1


def test_a_dry_run_keeps_nothing(tmp_path, capsys):
    bench = Bench("kernels", CPU, "gpubound bench kernels --dry", dry=True, folder=tmp_path)
    bench.case("c", {"ours": three, "eager": three}, unit="ms", amount=1, gates={"eager": 1e9})
    assert bench.finish() == 0 and not list(tmp_path.iterdir())
    assert capsys.readouterr().out.endswith("kernels: 1 lines, nothing kept (dry); 1 of 1 gates hold\n")


def test_what_a_peer_writes_over_its_inputs_does_not_reach_the_next(bench):
    """As Liger does: the gradient lands in the upstream gradient's memory, the rotated queries in the queries'."""
    source = torch.arange(1.0, 5.0)
    x = source.clone()

    def in_place(t):
        return t.mul_(2.0)

    works = {"ours": Prepared(lambda: x.copy_(source), lambda t: t * 2.0), "liger": Prepared(lambda: x.copy_(source), in_place)}
    assert bench.case("c", works, unit="ms", amount=1) is not None and not bench.wrong


# --- the cases ---


def test_shapes_count_the_weights_that_enter_products():
    """350m: 24 · (2·1024² + 2·1024·256 + 3·1024·4096) + 32768·1024, as counted by hand."""
    assert SHAPES["350m"].matrix_params == 398_458_880
    assert SHAPES["350m"].train_flops_per_token(1024) == 6 * 398_458_880 + 6 * 24 * 1024 * 1024


# (forward, backward) in elements moved, for T = 8 tokens, H = 64, I = 128, 4 + 2 + 2 heads of 16, V = 256. N = 8 · 64 = 512.
ELEMENTS = {
    "rms_norm": (512 + 64 + 512, 3 * 512 + 2 * 64),  # x, w | y; dy, x, w | dx, dw
    "add_rms_norm": (4 * 512 + 64, 4 * 512 + 2 * 64),  # x, r, w | y, s; dy, ds, s, w | dx, dw
    "layer_norm": (2 * 512 + 2 * 64, 3 * 512 + 3 * 64),  # x, w, b | y; dy, x, w | dx, dw, db
    "group_norm": (2 * 512 + 2 * 64, 3 * 512 + 3 * 64),
    "dynamic_tanh": (2 * 512 + 2 * 64 + 1, 3 * 512 + 3 * 64 + 1),
    "rope": (2 * (512 + 256) + 2 * 32, 2 * (512 + 256) + 2 * 32),  # q, k, cos, sin | q, k, and back
    "rope_qkv": (2 * 1024 + 2 * 32, 2 * 1024 + 2 * 32),
    "swiglu": (3 * 1024, 5 * 1024),  # gate, up | y; dy, gate, up | dgate, dup
    "swiglu_packed": (3 * 1024, 5 * 1024),
    "geglu": (3 * 1024, 5 * 1024),
    "richards_glu": (3 * 1024 + 4 + 3, 5 * 1024 + 2 * (4 + 3)),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_bytes_are_counted_once_each(name):
    door = DOORS[name](SHAPES["tiny"], Drawer(CPU, torch.float32, 2, 4))
    assert (door.forward_bytes // 4, door.backward_bytes // 4) == ELEMENTS[name]


def test_cross_entropy_reads_the_logits_once_and_writes_their_gradient_once():
    door = doors.cross_entropy(SHAPES["tiny"], Drawer(CPU, torch.float32, 2, 4))
    assert door.both_bytes == 2 * 8 * 256 * 4 + 8 * 8  # and eight labels
    assert set(DOORS) == set(ELEMENTS) | {"cross_entropy"}


PRODUCTS = {build.__name__: build for build in (linear_cross_entropy, gated_mlp, attention)}


@pytest.mark.parametrize("name", [*DOORS, *PRODUCTS])
def test_every_cases_peer_computes_what_ours_does(name, monkeypatch):
    """On the reference kernels, which are what fp64 takes: the benchmark's own eager forms and argument orders are right."""
    monkeypatch.setattr(trace, "fallbacks", Counter())
    door = (DOORS | PRODUCTS)[name](SHAPES["tiny"], Drawer(CPU, torch.float64, 2, 4))
    for make in (door.both,) if door.whole else (door.forward, door.backward):
        got, want = harness._tensors(make(door.ours)), harness._tensors(make(door.eager))
        assert max(harness._error(g, w) for g, w in zip(got, want, strict=True)) < 1e-6


def test_products_are_counted_once_each(bench, monkeypatch):
    """T = 8 tokens of H = 64 and I = 128; 2 rows of 4 tokens, which attend to 1 + 2 + 3 + 4 keys, of 4 heads of 16."""
    kept = {}
    monkeypatch.setattr(bench, "case", lambda case, works, amount, **_: kept.update({case: (amount, [*works])}))
    for name in ("gated_mlp", "attention"):
        bench_kernels.MEASURED[name](bench, "tiny", Drawer(CPU, torch.float32, 2, 4), ["eager", "quack"], 1e12)
    mlp, attending = 2 * 8 * 64 * 3 * 128, 2 * 2 * 2 * 10 * 4 * 16
    assert kept == {
        "gated_mlp forward tiny": (mlp, ["ours", "eager", "quack"]),
        "gated_mlp backward tiny": (2 * mlp, ["ours", "eager", "quack"]),
        "attention forward tiny": (attending, ["ours", "eager"]),
        "attention backward tiny": (2 * attending, ["ours", "eager"]),
    }


def test_a_library_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr(bench_kernels, "importable", lambda module: module.startswith("liger_kernel"))
    assert bench_kernels.installed(["eager", "liger", "quack"]) == ["eager", "liger"]
    assert capsys.readouterr().err == "quack is not installed (pip install 'quack-kernels[cu13]'): measuring without it\n"


def test_implementations_of_liger_stand_beside_each_other(monkeypatch, tmp_path):
    """Each has classes of its own, and the functions that call them are the same."""
    (tmp_path / "fakes.py").write_text("class Norm: name = 'Triton'\ndef norm(x): return f'{Norm.name} {x}'\n")
    (tmp_path / "liger_kernel/ops/cutile").mkdir(parents=True)
    (tmp_path / "liger_kernel/ops/cutile/ops.py").write_text("class Norm: name = 'cuTile'\n__all__ = ['Norm']\n")
    for module in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(liger_ops, "FUNCTIONS", "fakes")
    monkeypatch.setattr(liger_ops, "_functions", liger_ops._functions.__wrapped__)
    door = Door([], ours=three, eager=three, liger=lambda x: liger_ops.function("norm")(x))
    works = bench_kernels._functions("rms_norm", door, ["liger", "liger-cutile"])
    assert [works[who](1) for who in ("liger-cutile", "liger", "liger-cutile")] == ["cuTile 1", "Triton 1", "cuTile 1"]
    assert "liger-cutile" not in bench_kernels._functions("group_norm", door, ["liger", "liger-cutile"])


def test_the_host_cost_of_a_replay_is_measured(tmp_path, capsys):
    bench_graph.measure_host_cost(Bench("graph", CPU, "gpubound bench graph --dry", dry=True, folder=tmp_path))
    assert "whole call" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.interpreted
def test_bench_kernels_dry(capsys):
    assert bench_kernels.main(["--dry", "--only", "rms_norm,cross_entropy"]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "rms_norm forward tiny",
        "rms_norm backward tiny",
        "cross_entropy tiny",
        message("bench:bench_kernels_dry"),
    ]


@pytest.mark.parametrize("module", [bench_kernels, bench_blocks, bench_lora], ids=lambda module: module.__name__)
def test_a_dry_run_begins_again_in_a_process_of_the_interpreter(module, monkeypatch):
    """Triton reads the variable when it is imported."""
    begun = []
    run = lambda command, env: begun.append((command, env["TRITON_INTERPRET"])) or SimpleNamespace(returncode=7)  # noqa: E731
    monkeypatch.setattr(module.subprocess, "run", run)
    assert module.main(["--dry"]) == 7
    assert begun == [([sys.executable, "-m", module.__name__, "--dry"], "1")]


@pytest.mark.parametrize(
    ("name", "option", "wanted"),
    [
        ("kernels", "--only=rmsnorm", "got 'rmsnorm', wanted some of rms_norm, add_rms_norm, "),
        ("place", "--shapes=2b", "got '2b', wanted some of 1b, 350m, 8b, tiny."),
        ("graph", "--shape=2b", "got '2b', wanted one of 135m, 350m, 1b, 8b, tiny."),
        ("families", "--only=llama", f"got 'llama', wanted some of {', '.join([*FAMILIES, *FOLDERS])}."),
        ("families", "--parts=end", "got 'end', wanted some of decode, train, folders."),
        ("families", "--peer=liger", "got 'liger', wanted graph or none."),
        ("lora", "--parts=row", "got 'row', wanted some of train, linear, rows, peft, start."),
        ("lora", "--profile=x", "got 'x', wanted some of ours, ours-lora, ours-peft, ours-rows, floor, "),
        (
            "decode",
            "--parts=x",
            "got 'x', wanted some of start, speed, far, prefill, packed, cache, adapters, host, stages, draft, cpu.",
        ),
        ("decode", "--parts=speed,cpu", "cpu is measured by itself; leave the others out."),
        ("decode", "--batch=1,x", "got 'x', wanted batch sizes by comma, such as 1,32."),
        ("decode", "--rounds=2", "got 2, wanted at least 3, or there is no median to speak of."),
        ("deepseek", "--parts=end", "got 'end', wanted some of step, codes, streams, flash."),
        ("deepseek", "--split=rows", "got 'rows', wanted layers or tensors."),
        ("blocks", "--parts=seeds", "got 'seeds', wanted some of seed, large, poly, steps."),
    ],
)
def test_what_is_refused_before_anything_is_measured(capsys, name, option, wanted):
    assert guarded("bench", import_module(f"benchmarks.bench_{name}").main, [option]) == 2
    assert capsys.readouterr().err.startswith(f"gpubound bench: {option.partition('=')[0]}: {wanted}")


def test_bench_place_takes_turns_and_checks_the_loss(monkeypatch, tmp_path):
    """The contest on pretended workers: who disagrees is not timed, everyone is stopped."""
    stopped = []

    class Pretend:
        def __init__(self, name, setting, dry):
            self.name = name

        def read(self):
            if self.name == "compile":
                return None  # it could not start
            loss = {"ours": 5.0, "eager": 5.001, "liger": 5.5}[self.name]
            phases = {"first step": {"allocated": 6 * 2**30, "reserved": 7 * 2**30}}
            if self.name == "ours":
                phases["place"] = {"allocated": 3 * 2**30, "reserved": 4 * 2**30}
            return {"loss": loss, "gradient_norm": 1.0, "peak_gib": 1.0, "weights": 2**30, "phases": phases}

        def round(self):
            return {"ours": 0.1, "eager": 0.2}[self.name]

        def stop(self):
            stopped.append(self.name)

    monkeypatch.setattr(bench_place, "Worker", Pretend)
    bench = Bench("place", CPU, "gpubound bench place", folder=tmp_path)
    names = ["ours", "liger", "eager", "compile"]
    bench_place.contest(bench, bench_place.SETTINGS["1b"], names, rounds=3, flops_per_s=800e12)
    case = "1b seq 2048 micro 4 forward+backward"
    assert bench.wrong == [message("bench:bench_place_takes_turns", case)]
    assert bench.unmeasured == [f"{case}: compile could not start"] and stopped == names
    memory = [(line.case, line.ours, line.peer_name, line.peer, line.gate) for line in bench.lines if line.unit == "GiB"]
    assert memory == [
        (f"{case} memory, first step", 7, "allocated", 6, None),
        (f"{case} memory, first step", 7, "eager", 7, None),
        (f"{case} memory, place", 4, "the weights and 1.5 GiB", 2.5, 1.0),
        (f"{case} memory, place", 4, "allocated", 3, None),
    ]
    found = {line.peer_name: line for line in bench.lines if line.unit != "GiB"}
    assert found.keys() == {"eager", "bf16 rate"} and found["eager"].ratio == 2.0
    assert found["eager"].ours == pytest.approx(8192 / 0.1)
    assert found["bf16 rate"].ratio == pytest.approx(8192 / 0.1 * SHAPES["1b"].train_flops_per_token(2048) / 800e12, rel=1e-3)


def test_a_first_step_finds_bytecode_as_an_installed_package_does(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    source = tmp_path / "module.py"
    source.write_text("value = 1\n")
    compile_sources(tmp_path)
    assert Path(cache_from_source(str(source))).exists()
