"""`gpubound report`: one run, two compared, as figures, and what is not a run."""

import json

import pytest

from gpubound.cli import main
from gpubound.errors import DataError
from gpubound.monitor import RunTape
from tests.messages import message


def a_run(path, name, loss):
    tape = RunTape.create(path, name=name, config={"lr": 1e-3, "data": ["stdlib"], "tokenizer": None}, verdict="went well.")
    for step in range(1, 5):
        tape.append({"step": step, "loss": loss - 0.1 * step, "tokens_per_s": 1e4} | ({"held_out": loss} if step == 4 else {}))
    return path


def test_a_report_of_one_run(tmp_path, capsys):
    assert main(["report", str(a_run(tmp_path / "first", "first", 3.0))]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'first' / 'report.html'}\n"
    page = (tmp_path / "first" / "report.html").read_text()
    assert page.count("<svg") == 2, "held out belongs into the loss's chart"
    assert "first, held-out loss: last 3<" in page and "<td>data</td><td>stdlib</td>" in page and "tokenizer" not in page


def test_two_runs_of_one_name_are_told_apart(tmp_path, capsys):
    runs = [str(a_run(tmp_path / "a", "demo", 3.0)), str(a_run(tmp_path / "b", "demo", 4.0))]
    assert main(["report", *runs, "-o", str(tmp_path / "both.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'both.html'}\n"
    assert f"<title>{runs[0]} against {runs[1]} · gpubound</title>" in (tmp_path / "both.html").read_text()


def test_the_figures_as_json(tmp_path, capsys):
    runs = [str(a_run(tmp_path / "a", "one", 3.0)), str(a_run(tmp_path / "b", "two", 4.0))]
    assert main(["report", *runs, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert (first["run"], first["name"], first["steps"], first["tokens_per_s"], first["skipped"]) == (runs[0], "one", 4, 1e4, 0)
    assert first["loss"] == pytest.approx(2.6) and second["loss"] == pytest.approx(3.6) and first["held_out"] == 3.0
    assert first["verdict"] == "went well." and first["warnings"] == [] and "mfu" not in first
    assert first["started"].endswith("+00:00") and first["elapsed_s"] >= 0 and first["command"]


def test_a_figure_that_is_not_finite_is_null(tmp_path, capsys):
    tape = RunTape.create(tmp_path)
    tape.append({"step": 1, "loss": float("nan"), "skipped": 1})
    assert main(["report", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["runs"]
    assert run["loss"] is None and run["skipped"] == 1 and run["warnings"][0] == "the loss was never finite"


def test_what_is_no_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == message("cli_report:what_is_no_run", tmp_path)


def test_control_characters_of_a_run_are_not_in_its_page(tmp_path):
    """A terminal that shows the file would obey them."""
    run = a_run(tmp_path / "a", "one\x1b[2J\x9b", 3.0)
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "one\ufffd[2J\ufffd" in page and "\x1b" not in page and "\x9b" not in page


def test_where_the_run_cannot_be_written_to_the_option_is_named(tmp_path, capsys, monkeypatch):
    run = a_run(tmp_path / "a", "one", 3.0)

    def refused(path, text):
        raise DataError(f"{path}: cannot be written: Permission denied.")

    monkeypatch.setattr("gpubound.pages.write_atomic", refused)
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    assert str(run / "report.html") in error and "-o" in error


def test_a_page_replaces_no_file_that_is_none(tmp_path, capsys):
    run = a_run(tmp_path / "first", "first", 3.0)
    lines = (run / "steps.jsonl").read_text()
    for out, why in (
        (run / "steps.jsonl", f"{run / 'steps.jsonl'} exists"),
        (run, f"'{run}' is a folder; give a file such as report.html."),
        (tmp_path / "no" / "page.html", f"'{tmp_path / 'no' / 'page.html'}' is in a folder that does not exist; give a file"),
    ):
        assert main(["report", str(run), "--out", str(out)]) == 2
        assert capsys.readouterr().err.startswith(f"gpubound report: out: {why}")
    assert (run / "steps.jsonl").read_text() == lines
    (tmp_path / "theirs.html").write_text("<!doctype html><title>mine</title>")
    assert main(["report", str(run), "--out", str(tmp_path / "theirs.html")]) == 2
    for _ in range(2):
        assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0, "an older page is replaced"
