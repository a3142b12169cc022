"""The benchmark house: what a line says, which gates hold, what README shows, and that nothing wrong is ever timed or kept."""

import doctest
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks import bench_graph, bench_kernels, bench_place, doors, figures, gates, harness, results
from benchmarks.doors import DOORS, Drawer, linear_cross_entropy
from benchmarks.harness import Bench
from benchmarks.results import Line, append, newest, ratio, read
from benchmarks.shapes import SHAPES
from gpubound import trace
from gpubound.cli import guarded
from gpubound.measure import Prepared

CPU = torch.device("cpu")
LINE = Line(
    bench="kernels",
    case="rms_norm forward 8b",
    ours=3912.0,
    peer=3600.0,
    peer_name="liger",
    unit="GB/s",
    ratio=1.087,
    gate=1.0,
    moonshot=None,
    spread=0.006,
    percent_of_ceiling=91.4,
    gpu="NVIDIA H200",
    driver="580.95.05",
    torch="2.11.0+cu130",
    triton="3.6.0",
    commit="0a55bec",
    dirty=False,
    date="2026-11-21T10:00:00+00:00",
    command="gpubound bench kernels",
)


@pytest.mark.parametrize("module", [results, gates], ids=lambda m: m.__name__)
def test_docstring_examples(module):
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


# --- lines ---


@pytest.mark.parametrize(
    ("unit", "ours", "peer", "wanted"),
    [
        ("GB/s", 3.0, 2.0, 1.5),
        ("tok/s", 1.0, 2.0, 0.5),
        ("ms", 2.0, 3.0, 1.5),
        ("GiB", 4.0, 2.0, 0.5),
        ("syncs", 0, 0, 1.0),
        ("syncs", 0, 2, 3.0),
        ("syncs", 1, 0, 0.5),
    ],
)
def test_above_one_is_better_whatever_the_unit(unit, ours, peer, wanted):
    assert ratio(unit, ours, peer) == wanted


def test_an_unknown_unit():
    with pytest.raises(ValueError) as error:
        ratio("furlongs", 1.0, 1.0)
    assert str(error.value) == (
        "ratio: unknown unit 'furlongs', wanted one of %, GB/s, GiB, TFLOP/s, ms, s, steps/s, syncs, tok/s, us."
    )


def test_lines_are_appended_to_their_gpus_file(tmp_path):
    other = replace(LINE, gpu="NVIDIA B200 (SXM)")
    append([LINE], tmp_path)
    append([other, LINE], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["nvidia-b200-sxm.jsonl", "nvidia-h200.jsonl"]
    assert read(tmp_path) == [other, LINE, LINE]
    assert read(tmp_path / "nvidia-h200.jsonl") == [LINE, LINE]


def test_the_newest_of_each_case_and_peer_counts():
    later = replace(LINE, date="2026-11-22T10:00:00+00:00", ratio=1.2)
    eager = replace(LINE, peer_name="eager", ratio=3.0)
    same_second = replace(later, ratio=1.3)
    assert newest([LINE, eager, later]) == [later, eager]
    assert newest([later, LINE]) == [later]
    assert newest([later, same_second]) == [same_second]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{'a': 1}", "not a JSON line (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); "),
        ('{"bench": "kernels"}', "the fields differ from a result line's: "),
        ("3", "the fields differ from a result line's: int."),
    ],
)
def test_a_foreign_line_is_named(tmp_path, text, sentence):
    file = tmp_path / "h200.jsonl"
    file.write_text(json.dumps(asdict(LINE)) + "\n" + text + "\n")
    with pytest.raises(ValueError) as error:
        read(file)
    assert str(error.value).startswith(f"h200.jsonl:2: {sentence}")


def test_provenance_of_this_tree(monkeypatch, tmp_path):
    here = results.provenance(CPU, "gpubound bench kernels")
    assert here["torch"] == torch.__version__ and here["command"] == "gpubound bench kernels"
    assert here.keys() | {"bench", "case", "ours"} <= asdict(LINE).keys()
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")  # no repository there
    assert results._commit() == ("unknown", False)


def test_lines_of_another_machine_are_added_with_their_commit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "append", lambda lines: append(lines, tmp_path / "kept"))
    brought = tmp_path / "brought.jsonl"
    brought.write_text("".join(json.dumps(asdict(replace(LINE, commit=c))) + "\n" for c in ("unknown", "abc1234")))
    assert results.main(["add", str(brought), "--commit", "fff0000"]) == 0
    assert [line.commit for line in read(tmp_path / "kept")] == ["fff0000", "abc1234"]
    assert capsys.readouterr().out == "2 lines added to nvidia-h200.jsonl\n"
    assert results.main(["merge"]) == 2


# --- gates ---


def test_gates_hold(tmp_path, capsys):
    append([LINE, replace(LINE, peer_name="eager", gate=None, ratio=0.1)], tmp_path)
    assert gates.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "1 of 1 gates hold\n"


def test_a_case_that_falls_short_is_listed_with_its_gap(tmp_path, capsys):
    short = replace(LINE, peer_name="copy rate", ratio=0.765, gate=0.85)
    append([LINE, short], tmp_path)
    assert gates.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == (
        "SHORT  kernels: rms_norm forward 8b: 0.765 of copy rate, gate 0.85, short by 10.0%, spread ±0.6% "
        "(3,912 GB/s, NVIDIA H200, 0a55bec, gpubound bench kernels)\n1 of 2 gates hold\n"
    )


def test_a_newer_measurement_clears_the_gate(tmp_path):
    append([replace(LINE, ratio=0.9), replace(LINE, date="2026-11-22T00:00:00+00:00", ratio=1.1)], tmp_path)
    assert gates.main([str(tmp_path)]) == 0


def test_nothing_measured_is_not_green(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gates, "FOLDER", tmp_path / "results")  # a fresh clone has none
    assert gates.main([]) == 3
    capsys.readouterr()
    append([replace(LINE, gate=None)], tmp_path)
    assert gates.main([str(tmp_path)]) == 3
    assert capsys.readouterr().err == "no gate was measured: run `make bench ARGS=kernels` on a GPU first\n"


def test_a_ratio_that_is_no_number_is_short():
    assert replace(LINE, ratio=float("nan")).short


# --- README's figures ---

BLOCK = """\
Ratios are ours over the peer in the same run: above 1 is better; bold falls short of its gate.

| kernels | ours | × liger | × copy rate |
|---|---|---|---|
| rms_norm forward 8b | 3,912 GB/s | 1.09 | **0.77** (gate 0.85) |
| linear_cross_entropy H1024 V32768 host syncs | 0 syncs | 3.00 |  |

NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, 2026-11-21, commit 0a55bec: `gpubound bench kernels`
"""


def test_the_block_shows_wins_and_losses():
    case = "linear_cross_entropy H1024 V32768 host syncs"
    lines = [
        LINE,
        replace(LINE, peer_name="copy rate", ratio=0.765, gate=0.85),
        replace(LINE, case=case, unit="syncs", ours=0, peer=2, ratio=3.0, spread=None),
    ]
    assert figures.block(lines) == BLOCK


def test_a_long_table_is_folded():
    text = figures.block([replace(LINE, case=f"case {i}") for i in range(13)])
    assert "<details><summary>kernels: 13 cases on NVIDIA H200</summary>" in text and text.count("| case ") == 13


def test_figures_rewrite_the_block_and_only_it(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"# top\n{figures.BEGIN}\nstale words\n{figures.END}\nrest\n")
    append([LINE], tmp_path / "results")
    assert figures.main(["--check"], readme, tmp_path / "results") == 1
    assert capsys.readouterr().err == "README.md's figures are not those of the results: run `make figures`.\n"
    assert figures.main([], readme, tmp_path / "results") == 0
    text = readme.read_text()
    assert text.startswith(f"# top\n{figures.BEGIN}\n") and text.endswith(f"{figures.END}\nrest\n")
    assert "stale" not in text and "3,912 GB/s" in text
    assert figures.main(["--check"], readme, tmp_path / "results") == 0


@pytest.mark.parametrize("text", ["nothing", "<!-- /figures --> <!-- figures -->", "<!-- figures -->"])
def test_a_readme_without_the_markers(tmp_path, capsys, text):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert figures.main([], readme, tmp_path) == 2
    assert capsys.readouterr().err == (
        "README.md: wanted one <!-- figures --> and after it one <!-- /figures -->; put them where the figures go.\n"
    )
    assert readme.read_text() == text


# --- the harness ---


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A bench that keeps its lines in tmp_path and takes three rounds."""
    made = Bench("kernels", CPU, "gpubound bench kernels", folder=tmp_path)
    monkeypatch.setattr(made, "rounds", 3)
    return made


def three(x=3.0):
    return torch.full((4,), x)


def test_a_case_keeps_a_line_a_peer_and_one_for_the_ceiling(bench, tmp_path):
    works = {"ours": three, "eager": lambda: three() + 0.0}
    bench.case("c", works, unit="GB/s", amount=16.0, ceiling=("copy rate", 1e15), gates={"copy rate": 0.5, "eager": 1e-9})
    kept = {line.peer_name: line for line in read(tmp_path)}
    assert kept.keys() == {"eager", "copy rate"}
    ceiling = kept["copy rate"]
    assert ceiling.peer == 1e6 and ceiling.gate == 0.5 and ceiling.short
    assert ceiling.ratio == pytest.approx(ceiling.ours / ceiling.peer, rel=1e-3)
    assert kept["eager"].gate == 1e-9 and not kept["eager"].short
    assert bench.finish() == 1  # a gate is short


def test_results_that_disagree_are_never_timed(bench, tmp_path, capsys):
    timed = []
    works = {"ours": three, "liger": lambda: timed.append(1) or three(3.1)}
    assert bench.case("c", works, unit="GB/s", amount=1.0) is None
    assert len(timed) == 1 and not list(tmp_path.iterdir())
    assert bench.finish() == 1
    assert "WRONG       c: ours and liger differ by 3.3e-02 (limit 1e-02); not timed\n" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [lambda: three(float("nan")), lambda: torch.ones(5)], ids=["nan", "shape"])
def test_nan_and_another_shape_disagree(bench, wrong):
    assert bench.case("c", {"ours": three, "peer": wrong}, unit="ms", amount=1) is None
    assert bench.wrong == ["c: ours and peer differ by inf (limit 1e-02); not timed"]


def broken():
    raise RuntimeError("CUDA error: illegal address\nmore")


def test_a_gated_peer_that_fails_is_not_green(bench, capsys):
    assert bench.case("c", {"ours": three, "liger": broken}, unit="ms", amount=1, gates={"liger": 1.0}) is None
    assert bench.finish() == 3
    assert capsys.readouterr().err == (
        "UNMEASURED  c: liger raised RuntimeError: CUDA error: illegal address\n"
        "UNMEASURED  c: liger has a gate and was not timed\n"
    )


def test_ours_that_fails_is_wrong_and_the_next_case_goes_on(bench):
    assert bench.case("c", {"ours": broken, "eager": three}, unit="ms", amount=1) is None
    assert bench.case("d", {"ours": three, "eager": three}, unit="ms", amount=1) is not None
    assert bench.wrong == ["c: ours raised RuntimeError: CUDA error: illegal address"] and bench.finish() == 1


def test_a_door_that_falls_back_is_not_measured_as_ours(bench):
    def fallen():
        trace.fallback("rms_norm", "its self-test failed")
        return three()

    bench.case("c", {"ours": fallen, "eager": three}, unit="ms", amount=1)
    assert bench.wrong[0].startswith("c: ours raised FallbackError: rms_norm: would fall back: its self-test failed.")


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
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_bytes_are_counted_once_each(name):
    door = DOORS[name](SHAPES["tiny"], Drawer(CPU, torch.float32, 2, 4))
    assert (door.forward_bytes // 4, door.backward_bytes // 4) == ELEMENTS[name]


def test_cross_entropy_reads_the_logits_once_and_writes_their_gradient_once():
    door = doors.cross_entropy(SHAPES["tiny"], Drawer(CPU, torch.float32, 2, 4))
    assert door.both_bytes == 2 * 8 * 256 * 4 + 8 * 8  # and eight labels
    assert set(DOORS) == set(ELEMENTS) | {"cross_entropy"}


@pytest.mark.parametrize("name", [*DOORS, "linear_cross_entropy"])
def test_every_cases_peer_computes_what_ours_does(name, monkeypatch):
    """On the reference kernels, which are what fp64 takes: the benchmark's own eager forms and argument orders are right."""
    monkeypatch.setattr(trace, "fallbacks", Counter())
    build = DOORS.get(name, linear_cross_entropy)
    door = build(SHAPES["tiny"], Drawer(CPU, torch.float64, 2, 4))
    for make in (door.both,) if door.whole else (door.forward, door.backward):
        got, want = harness._tensors(make(door.ours)), harness._tensors(make(door.eager))
        assert max(harness._error(g, w) for g, w in zip(got, want, strict=True)) < 1e-6


def run_dry(*arguments):
    root = Path(harness.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def test_bench_kernels_dry():
    done = run_dry("benchmarks.bench_kernels", "--dry", "--only", "rms_norm,cross_entropy")
    assert done.returncode == 0, done.stderr
    assert [line.split("  ")[0] for line in done.stdout.splitlines()] == [
        "rms_norm forward tiny",
        "rms_norm backward tiny",
        "cross_entropy tiny",
        "kernels: 6 lines, nothing kept (dry); 0 of 0 gates hold",
    ]


@pytest.mark.parametrize(
    ("module", "arguments", "sentence"),
    [
        (
            bench_kernels,
            ("--only", "rmsnorm"),
            "gpubound bench: --only: got 'rmsnorm', wanted some of rms_norm, add_rms_norm, ",
        ),
        (bench_kernels, ("--peers", "lgr"), "gpubound bench: --peers: got 'lgr', wanted some of eager, compile, liger."),
        (bench_kernels, ("--widths", "9b"), "gpubound bench: --widths: got '9b', wanted some of 350m, 8b, tiny."),
        (bench_place, ("--shapes", "2b"), "gpubound bench: --shapes: got '2b', wanted some of 1b, 350m, tiny."),
        (bench_graph, ("--shape", "2b"), "gpubound bench: --shape: got '2b', wanted one of 135m, 350m, 1b, 8b, tiny."),
    ],
)
def test_unknown_names_are_refused_before_anything_is_measured(capsys, module, arguments, sentence):
    assert guarded("bench", module.main, arguments) == 2
    assert capsys.readouterr().err.startswith(sentence)


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
            return {"loss": loss, "gradient_norm": 1.0, "peak_gib": 1.0}

        def round(self):
            return {"ours": 0.1, "eager": 0.2}[self.name]

        def stop(self):
            stopped.append(self.name)

    monkeypatch.setattr(bench_place, "Worker", Pretend)
    bench = Bench("place", CPU, "gpubound bench place", folder=tmp_path)
    names = ["ours", "liger", "eager", "compile"]
    bench_place.contest(bench, bench_place.SETTINGS["1b"], names, rounds=3, flops_per_s=800e12)
    case = "1b seq 2048 micro 4 forward+backward"
    assert bench.wrong == [f"{case}: loss is 5 in ours, 5.5 in liger (limit 1%); not timed"]
    assert bench.unmeasured == [f"{case}: compile could not start"] and stopped == names
    found = {line.peer_name: line for line in bench.lines}
    assert found.keys() == {"eager", "bf16 rate"} and found["eager"].ratio == 2.0
    assert found["eager"].ours == pytest.approx(8192 / 0.1)
    assert found["bf16 rate"].ratio == pytest.approx(8192 / 0.1 * SHAPES["1b"].train_flops_per_token(2048) / 800e12, rel=1e-3)
