"""A line of a benchmark: what it says, and how it is kept."""

import doctest
import json
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks import gates, results
from benchmarks.results import append, newest, ratio, read
from tests.messages import message, refusal

from .example import LINE

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
