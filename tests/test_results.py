"""Benchmark results: what a line says, which gates hold, and what README and docs show."""

import doctest
import importlib
import json
from dataclasses import asdict, replace
from itertools import pairwise
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import bars, bench_wanted, beside, curves, figures, gates, results, scaling, tables, wanted
from benchmarks.results import FLOOR, Line, append, newest, ratio, read

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
        ("syncs", 0, 2, 1.0),
        ("syncs", 1, 0, 0.0),
    ],
)
def test_above_one_is_better_whatever_the_unit(unit, ours, peer, wanted):
    assert ratio(unit, ours, peer) == wanted


def test_an_unknown_unit():
    with pytest.raises(ValueError) as error:
        ratio("furlongs", 1.0, 1.0)
    assert str(error.value) == (
        "ratio: unknown unit 'furlongs', wanted one of %, % off, GB/s, GiB, TFLOP/s, launches, ms, s, steps/s, syncs, tok/s, "
        "us."
    )


def test_lines_are_appended_to_their_gpus_file(tmp_path):
    other = replace(LINE, gpu="NVIDIA B200 (SXM)")
    append([LINE], tmp_path)
    append([other, LINE], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["nvidia-b200-sxm.jsonl", "nvidia-h200.jsonl"]
    assert read(tmp_path) == [other, LINE, LINE]
    assert read(tmp_path / "nvidia-h200.jsonl") == [LINE, LINE]


def test_half_a_line_swallows_no_other(tmp_path):
    """A benchmark that is killed while it writes leaves one; what is measured later has a line of its own."""
    append([LINE], tmp_path)
    file = results.file_of(LINE.gpu, tmp_path)
    file.write_text(file.read_text() + '{"bench": "ker')
    append([LINE, LINE], tmp_path)
    with pytest.raises(ValueError, match=r"^nvidia-h200.jsonl:2: not a JSON line .*; remove it, or measure the case again\.$"):
        read(tmp_path)
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")))
    assert read(tmp_path) == [LINE] * 3


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


def test_a_count_is_printed_as_a_count(tmp_path, capsys):
    """No ratio stands behind "0 syncs, 4.00 x": its denominator would be invented."""
    counts = {"case": "350m host syncs", "unit": "syncs", "peer_name": "budget", "peer": 0.0, "gate": 1.0, "spread": None}
    over = replace(LINE, ours=2.0, ratio=ratio("syncs", 2, 0), **counts)
    held = replace(LINE, ours=0.0, ratio=ratio("syncs", 0, 0), **counts)
    append([over], tmp_path)
    assert gates.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == (
        "SHORT  kernels: 350m host syncs: 2 syncs, budget 0 syncs (NVIDIA H200, 0a55bec, gpubound bench kernels)\n"
        "0 of 1 gates hold\n"
    )
    assert not held.short and gates.beside(held) == "budget 0" and gates.beside(over) == "budget 0 SHORT"
    liger = replace(held, peer_name="liger", peer=3.0, ratio=4.0, gate=None)  # as an older line has it
    assert gates.beside(liger) == "liger 3" and gates.beside(LINE) == "liger 1.09"


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


class Reached(Exception):
    """A command line was taken, and its benchmark would begin."""


@pytest.mark.parametrize("command", sorted({one.command for one in wanted.WANTED}))
def test_what_is_wanted_has_a_command(command, monkeypatch):
    def begin(kind):
        raise Reached

    name, *options = command.split()
    module = importlib.import_module(f"benchmarks.bench_{name}")
    monkeypatch.setattr(module, "resolve", begin)
    with pytest.raises(Reached):
        module.main(options)


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ({}, 0),
        ({"gate": 0.9}, 1),  # held to less
        ({"gate": None}, 1),
        ({"peer": 3000.0}, 1),  # an older goal
        ({"gpu": "NVIDIA H100 80GB HBM3"}, 1),
        ({"case": "rms_norm forward 350m"}, 1),
    ],
)
def test_what_is_wanted_is_measured_by_a_line_that_is_held_to_it(line, left):
    one = wanted.Wanted(LINE.bench, LINE.case, LINE.peer_name, "kernels", gate=1.0, budget=3600.0)
    assert len(wanted.unmeasured([replace(LINE, **line)], [one])) == left


def test_a_line_of_before_a_change_does_not_count():
    one = wanted.Wanted(LINE.bench, LINE.case, LINE.peer_name, "kernels", since="2026-11-27T08:30")
    days = {"2026-11-27T08:29:59+00:00": 1, "2026-11-27T08:30:00+00:00": 0, "2027-01-01T00:00:00+00:00": 0}
    assert {day: len(wanted.unmeasured([replace(LINE, date=day)], [one])) for day in days} == days


def test_what_is_wanted_is_of_a_benchmark_that_can_be_asked_for():
    assert {one.bench for one in wanted.WANTED} <= set(bench_wanted.BENCHES)


def test_what_is_not_measured_is_told_with_its_command(tmp_path, capsys, monkeypatch):
    append([LINE], tmp_path)
    monkeypatch.setattr(gates, "FOLDER", tmp_path)
    one = wanted.Wanted("ranks", "1b on 2", "one GPU", "ranks --only 1b", gpus=2)
    monkeypatch.setattr(gates, "unmeasured", lambda lines: [one])
    assert gates.main([]) == 1
    assert capsys.readouterr().out == (
        "UNMEASURED  ranks: 1b on 2, beside one GPU (2 NVIDIA H200s, gpubound bench ranks --only 1b)\n"
        "1 of 1 gates hold; 1 more are not measured\n"
    )


def test_what_is_wanted_is_measured_one_command_after_the_other(tmp_path, monkeypatch, capsys):
    """Each once, those of other machines not at all, and all of them though one fails."""
    ran = []

    def run(command):
        ran.append(command[3:])
        return SimpleNamespace(returncode=len(ran) % 2)

    known = [wanted.Wanted(*of, gpus=gpus) for of, gpus in (
        (("decode", "1b far", "budget", "decode --only 1b"), 2), (("decode", "1b syncs", "budget", "decode --only 1b"), 2),
        (("train", "8b", "budget", "train --only 8b"), 2), (("ranks", "8b", "budget", "ranks"), 4),
    )]  # fmt: skip
    monkeypatch.setattr(bench_wanted, "unmeasured", lambda lines: known)
    monkeypatch.setattr(bench_wanted, "resolve", lambda kind: None)
    monkeypatch.setattr(bench_wanted.subprocess, "run", run)
    assert bench_wanted.main(["--gpus", "2", "--results", str(tmp_path)]) == 1
    assert ran == [["bench", *words.split(), "--results", str(tmp_path)] for words in ("decode --only 1b", "train --only 8b")]
    assert "[1 of 2] gpubound bench decode --only 1b\n    exit code 1, 0 s\n" in capsys.readouterr().out
    assert bench_wanted.main(["--gpus", "2", "--only", "ranks,lora"]) == 0 and len(ran) == 2
    assert bench_wanted.main(["--gpus", "4", "--dry"]) == 0 and len(ran) == 2
    assert capsys.readouterr().out == "[1 of 1] gpubound bench ranks\n"


def test_the_page_names_what_is_not_measured():
    one = wanted.Wanted("ranks", "1b on 2", "peft-compile", "ranks --only 1b", gpus=2)
    found = tables.page([LINE], missing=[one])
    assert "| ranks: 1b on 2 | PEFT, torch.compile | 2 NVIDIA H200s | `ranks --only 1b` |\n" in found
    assert "Asked for" not in tables.page([LINE])
    assert "0 of 1 gates hold, 3 more wait to be measured:\n" in figures.shown([TRAIN], 3)


def test_a_ratio_that_is_no_number_is_short():
    assert replace(LINE, ratio=float("nan")).short


# --- what README and docs show ---

SYNCS = replace(LINE, case="loss host syncs", unit="syncs", ours=0, peer=3, ratio=4.0, spread=None)
MISSED = replace(LINE, peer_name="copy rate", ratio=0.765, gate=0.85)


def row(text: str, case: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {case} |")]
    return found


def test_the_page_shows_wins_and_losses():
    text = tables.page([LINE, MISSED, replace(LINE, peer_name="eager", ratio=0.9, gate=None)])
    assert row(text, "rms_norm forward 8b") == "| rms_norm forward 8b | 3,912 GB/s | 1.09 | **76%** (gate 85%) | 0.90 |"
    losses = text[text.index("## Where it falls short") : text.index("## Kernels")]
    assert "1 of 2 gates hold" in losses
    assert "| kernels: rms_norm forward 8b | 3,912 GB/s | copy rate | 76% | 85% |" in losses
    assert "| kernels: rms_norm forward 8b | 3,912 GB/s | 3,600 GB/s | torch, eager | 0.90 |" in losses


def test_each_gpu_has_its_own_losses_and_the_one_with_the_most_cases_comes_first():
    text = tables.page([replace(MISSED, gpu="NVIDIA H100"), LINE, MISSED])
    first, second = (text.index(f"## Where it falls short{where}\n") for where in ("", ", NVIDIA H100"))
    assert "1 of 2 gates hold" in text[first:second] and "0 of 1 gates hold" in text[second:]
    assert text.index("## Kernels\n") < text.index("## Kernels, NVIDIA H100\n")
    assert "Sections that name no GPU are those of the NVIDIA H200." in text


def test_a_miss_by_a_hair_does_not_look_like_a_pass():
    assert "**0.998** (gate 1.00)" in tables.page([replace(LINE, ratio=0.998)])


def test_counts_and_budgets_are_shown_as_such_never_as_ratios():
    first = replace(LINE, case="first step", unit="s", ours=12.4, peer=10.0, peer_name="budget", ratio=0.81)
    text = tables.page([SYNCS, first])
    assert row(text, "loss host syncs") == "| loss host syncs | 0 syncs | 3 syncs |"
    assert row(text, "first step") == "| first step | 12.4 s | **at most 10.0 s** |"
    assert "4.00" not in text


def test_a_floor_is_told_in_multiples_of_it():
    """And is nobody that a user could run instead."""
    priced = {"unit": "us", "peer_name": FLOOR, "spread": None, "ours": 20.0, "peer": 10.0}
    over = replace(LINE, **priced, ratio=0.5, gate=1 / 1.8)
    held = replace(LINE, **priced, case="wide", ratio=0.8, gate=1 / 1.35)
    assert gates.beside(held) == f"{FLOOR} 1.25 x" and gates.beside(over) == f"{FLOOR} 2.00 x SHORT"
    assert f": 2.00 x of {FLOOR}, gate 1.80 x, short by 10.0% (20.0 us, " in gates.sentence(over)
    text = tables.page([over, held])
    assert row(text, "wide") == "| wide | 20.0 us | 1.25 x |"
    assert row(text, "rms_norm forward 8b") == "| rms_norm forward 8b | 20.0 us | **2.00 x** (gate 1.80 x) |"
    assert "a peer is ahead" not in text and not tables.is_peer(held)


def test_whole_work_stands_beside_every_kind_of_rival():
    """The fastest of each kind; limits, budgets, other units and single kernels are not there."""
    work = replace(LINE, unit="tok/s", ours=100.0, gate=None)
    steps = replace(work, bench="train", case="350m x8")
    lines = [
        replace(work, bench="decode", case="350m batch 16", peer_name="graph", ratio=4.5),
        replace(work, bench="decode", case="350m batch 2", peer_name="graph", ratio=5.6),
        replace(steps, peer_name="liger-autocast", ratio=1.4),
        replace(steps, peer_name="liger", ratio=0.98),
        replace(steps, peer_name="hf", ratio=17.2),
        replace(steps, peer_name="bf16 rate", ratio=0.6),
        replace(steps, unit="GiB", peer_name="liger", ratio=0.5),
        LINE,
    ]
    said = [line for line in beside.table(lines).splitlines() if line.startswith("|")]
    assert said == [
        "| work | ours | torch, eager | Liger | a CUDA graph by hand |",
        "|---|---|---|---|---|",
        "| training 350m x8 | 100 tok/s | 17 | **0.98** |  |",
        "| decoding 350m batch 2 | 100 tok/s |  |  | 5.60 |",
        "| decoding 350m batch 16 | 100 tok/s |  |  | 4.50 |",
    ]
    assert beside.table([LINE]) == ""


def test_every_run_that_a_figure_is_from_is_named():
    older = [replace(LINE, case=f"case {i}", commit="1de191e", date=f"2026-11-20T1{i}:00:00+00:00") for i in range(3)]
    other = replace(LINE, case="another", command="gpubound bench kernels --only rope", date="2026-11-19T10:00:00+00:00")
    said = [line for line in tables.page([other, *older, LINE]).splitlines() if "commit" in line]
    machine = "- NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0"
    assert said == [
        f"{machine}, 2026-11-21, commit 0a55bec: `gpubound bench kernels`",
        f"{machine}, 2026-11-20, commit 1de191e: `gpubound bench kernels`",
        f"{machine}, 2026-11-19, commit 0a55bec: `gpubound bench kernels --only rope`",
    ]


TRAIN = replace(LINE, bench="train", case="350m", unit="tok/s", ours=190_000, peer=170_000, ratio=1.118, gate=1.15)


def test_bars_are_as_long_as_the_ratio_of_one_run_says():
    older = replace(TRAIN, peer_name="hf", ours=180_000, peer=90_000, ratio=2.0, gate=None, date="2026-11-20T10:00:00+00:00")
    limits = [replace(TRAIN, peer_name=name, ratio=0.6) for name in ("bf16 rate", "budget")]
    ((_, found),) = bars.panels([TRAIN, older, *limits, replace(TRAIN, unit="GiB")])
    assert [(bar.name, round(bar.share, 3)) for bar in found] == [("gpubound", 1.0), ("Liger", 0.894), ("Hugging Face", 0.5)]
    assert found[0].words == "190,000 tok/s" and found[2].words == "90,000 tok/s  (gpubound 180,000: 2.00 x)"
    near = replace(older, ours=188_000, ratio=2.09)
    assert bars.panels([TRAIN, near])[0][1][2].words == "90,000 tok/s  (gpubound: 2.09 x)"


def test_a_faster_peer_has_the_longest_bar():
    found = bars.panels([replace(TRAIN, peer=380_000, ratio=0.5)])
    root = ElementTree.fromstring(bars.picture(found, "dark"))
    ours, peer = [int(rect.get("width")) for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert peer == bars.LONGEST and ours * 2 == peer


def decoding(rows, peer, ours, theirs):
    return replace(
        LINE, bench="decode", case=f"1b batch {rows}", unit="tok/s", peer_name=peer, ours=ours, peer=theirs, gate=None
    )


def test_a_curve_goes_through_what_was_measured():
    lines = [decoding(rows, "graph", 900.0 * rows, 300.0 * rows) for rows in (1, 2, 4, 8)]
    lines += [decoding(rows, "roofline", 900.0 * rows, 1_800.0 * rows) for rows in (1, 8)]
    assert curves.curves(lines[:3]) == []  # three sizes make no curve
    other = replace(decoding(1, "graph", 5.0, 5.0), case="1b batch 1 int4")
    (found,) = drawn = curves.curves([*lines, other, replace(lines[0], bench="deepseek")])
    assert found.lines["gpubound"] == {1: 900, 2: 1800, 4: 3600, 8: 7200} and found.lines["roofline"] == {1: 1800, 8: 14400}
    assert "Hugging Face in a CUDA graph 1: 300, 2: 600, 4: 1,200, 8: 2,400" in curves.told(drawn)
    root = ElementTree.fromstring(curves.picture(drawn, "light"))
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    ours, theirs = dots[:4], dots[4:]
    steps = {round(a[0] - b[0]) for line in (ours, theirs) for a, b in pairwise(line)}
    assert len(steps) == 1  # rows double from dot to dot
    assert all(high[1] < low[1] for high, low in zip(ours, theirs))
    assert 'fill="none"' in curves.picture(drawn, "dark") and "1b" in curves.picture(drawn, "dark")


def test_the_curve_stands_above_the_table_of_decoding(tmp_path):
    a_readme(tmp_path)
    append([decoding(rows, "graph", 900.0 * rows, 300.0 * rows) for rows in (1, 2, 4, 8)], tmp_path / "results")
    assert figures.main([], tmp_path, tmp_path / "results") == 0
    page = (tmp_path / "docs/figures.md").read_text()
    assert page.index("## Decoding") < page.index("images/decoding-dark.svg#only-dark") < page.index("| 1b batch 1 |")
    assert all((tmp_path / f"docs/images/decoding-{theme}.svg").exists() for theme in ("light", "dark"))


def a_readme(folder):
    begin, end = figures.MARKERS["figures"]
    trainer, scaling = ("".join(figures.MARKERS[name]) for name in ("trainer", "scaling"))
    text = f"# top\n{begin}stale words\n{end}\nmiddle\n{trainer}\n{scaling}\nrest\n"
    (folder / "README.md").write_text(text)
    return folder / "README.md"


def test_figures_write_the_page_the_pictures_and_only_the_marked_parts_of_readme(tmp_path, capsys):
    readme = a_readme(tmp_path)
    append([TRAIN, MISSED], tmp_path / "results")
    assert figures.main(["--check"], tmp_path, tmp_path / "results") == 1
    assert "README.md, docs/figures.md, docs/images/speed-light.svg" in capsys.readouterr().err
    assert figures.main([], tmp_path, tmp_path / "results") == 0
    text = readme.read_text()
    assert text.startswith("# top\n<!-- figures -->\n<picture>") and "\nmiddle\n" in text and text.endswith("\nrest\n")
    assert "stale" not in text and "0 of 2 gates hold" in text and "190,000 tok/s" in (tmp_path / "docs/figures.md").read_text()
    assert figures.main(["--check"], tmp_path, tmp_path / "results") == 0


def ranks(case, peer, ours, theirs):
    return replace(
        LINE, bench="ranks", case=case, unit="tok/s", peer_name=peer, ours=ours, peer=theirs, ratio=ours / theirs, gate=None
    )


def test_several_gpus_are_drawn_together_beside_one_of_them(tmp_path):
    lines = [ranks(f"350m on {world}", "one GPU", 90.0, 100.0) for world in (2, 4)]
    lines += [ranks("350m on 4", "ddp-liger", 90.0, 60.0), ranks("8b on 2", "fsdp-liger", 10.0, 10.0)]
    lines += [ranks("8b on 4", "fsdp-liger", 11.0, 22.0), ranks("8b on 4 speed", "wanted", 11.0, 9.0)]
    (title, replicas), (of_shards, shards) = scaling.panels(lines)
    assert "350M" in title and [(bar.name, bar.words) for bar in replicas] == [
        ("1 GPU", "100 tok/s"), ("2 GPUs", "180 tok/s  (1.80 x one)"), ("4 GPUs", "360 tok/s  (3.60 x one)")
    ]  # fmt: skip
    assert [bar.share for bar in replicas] == pytest.approx([100 / 360, 0.5, 1.0])
    assert "of 4 GPUs" in of_shards and [(bar.name, bar.share) for bar in shards] == [("gpubound", 1.0), ("FSDP2, Liger", 2.0)]
    readme = a_readme(tmp_path)
    append(lines, tmp_path / "results")
    assert figures.main([], tmp_path, tmp_path / "results") == 0
    assert "<!-- scaling -->\n<picture>" in readme.read_text() and "3.60 x one" in readme.read_text()
    assert all((tmp_path / f"docs/images/scaling-{theme}.svg").exists() for theme in ("light", "dark"))


def test_what_one_line_in_a_trainer_script_brought_is_told_once_it_is_measured():
    line = replace(TRAIN, bench="trainer", case=bars.TRAINER, peer_name="trainer", ours=148_700, peer=91_800, ratio=1.62)
    assert figures.trainer([TRAIN]) == ""
    assert "91,800 tok/s → 148,700 tok/s" in figures.trainer([TRAIN, line])


@pytest.mark.parametrize("text", ["nothing", "<!-- /figures --> <!-- figures -->\n", "<!-- figures -->\n"])
def test_a_readme_without_the_markers(tmp_path, capsys, text):
    (tmp_path / "README.md").write_text(text)
    assert figures.main([], tmp_path, tmp_path) == 2
    assert "wanted one line <!-- figures --> and after it one <!-- /figures -->" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == text
