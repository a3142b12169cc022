"""Lines of results: what is kept, pictures and marked parts that are made of them, and what is asked for but not measured."""

import doctest
import importlib
import json
from dataclasses import asdict, replace
from itertools import pairwise
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import bars, bench_wanted, curves, figures, gates, results, scaling, tables, wanted
from benchmarks.results import append, newest, ratio, read
from tests.messages import message, refusal

from .example import LINE, MISSED, TRAIN

CPU = torch.device("cpu")


@pytest.mark.parametrize("module", [results, gates], ids=lambda m: m.__name__)
def test_docstring_examples(module):
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


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
    assert refusal(ValueError, lambda: ratio("furlongs", 1.0, 1.0)) == message("results/lines:an_unknown_unit")


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
    with pytest.raises(ValueError, check=message("results/lines:half_a_line_swallows_no")):
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


def test_bars_are_as_long_as_the_ratio_of_one_run_says():
    older = replace(TRAIN, peer_name="hf", ours=180_000, peer=90_000, ratio=2.0, gate=None, date="2026-11-20T10:00:00+00:00")
    limits = [replace(TRAIN, peer_name=name, ratio=0.6) for name in ("bf16 rate", "budget")]
    ((_, found),) = bars.panels([TRAIN, older, *limits, replace(TRAIN, unit="GiB")])
    assert [(bar.name, round(bar.share, 3)) for bar in found] == [("gpubound", 1.0), ("Liger", 0.894), ("Hugging Face", 0.5)]
    assert found[0].words == "190,000 tok/s" and found[2].words == message("results/pictures:bars_are_as_long_as_the")
    near = replace(older, ours=188_000, ratio=2.09)
    assert bars.panels([TRAIN, near])[0][1][2].words == message("results/pictures:bars_are_as_long_as_the.2")


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
    assert message("results/pictures:a_curve_goes_through_wha").within(curves.told(drawn))
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
    text = f"# top\n{figures.BEGIN}stale words\n{figures.END}\nmiddle\nrest\n"
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
    assert "stale" not in text and "190,000 tok/s" in (tmp_path / "docs/figures.md").read_text()
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
    a_readme(tmp_path)
    append(lines, tmp_path / "results")
    assert figures.main([], tmp_path, tmp_path / "results") == 0
    assert "3.60 x one" in (tmp_path / "docs/images/scaling-light.svg").read_text()
    assert all((tmp_path / f"docs/images/scaling-{theme}.svg").exists() for theme in ("light", "dark"))


@pytest.mark.parametrize("text", ["nothing", "<!-- /figures --> <!-- figures -->\n", "<!-- figures -->\n"])
def test_a_readme_without_the_markers(tmp_path, capsys, text):
    (tmp_path / "README.md").write_text(text)
    assert figures.main([], tmp_path, tmp_path) == 2
    assert message("results/pictures:a_readme_without_the_mar").within(capsys.readouterr().err)
    assert (tmp_path / "README.md").read_text() == text


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
    assert capsys.readouterr().out == message("results/wanted:what_is_not_measured_is")


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
    assert message("results/wanted:what_is_wanted_is_measur").within(capsys.readouterr().out)
    assert bench_wanted.main(["--gpus", "2", "--only", "ranks,lora"]) == 0 and len(ran) == 2
    assert bench_wanted.main(["--gpus", "4", "--dry"]) == 0 and len(ran) == 2
    assert capsys.readouterr().out == message("results/wanted:what_is_wanted_is_measur.2")


def test_the_page_names_what_is_not_measured():
    one = wanted.Wanted("ranks", "1b on 2", "peft-compile", "ranks --only 1b", gpus=2)
    found = tables.page([LINE], missing=[one])
    assert message("results/wanted:the_page_names_what_is_n").within(found)
    assert "Asked for" not in tables.page([LINE])
    assert message("results/wanted:the_page_names_what_is_n.2").within(figures.shown([TRAIN]))
