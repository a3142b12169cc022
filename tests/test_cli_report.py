"""`gpubound report`: one run, two compared, as figures, and what is not a run."""

import json

from gpubound.cli import main
from gpubound.monitor import Tape


def a_run(path, name, loss):
    tape = Tape.create(path, name=name, config={"lr": 1e-3, "data": ["stdlib"], "tokenizer": None}, verdict="went well.")
    for step in range(1, 5):
        tape.append({"step": step, "loss": loss - 0.1 * step, "tokens_per_s": 1e4} | ({"held_out": loss} if step == 4 else {}))
    return path


def test_a_report_of_one_run(tmp_path, capsys):
    assert main(["report", str(a_run(tmp_path / "first", "first", 3.0))]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'first' / 'report.html'}\n"
    page = (tmp_path / "first" / "report.html").read_text()
    assert page.count("<svg") == 2, "held out belongs into the loss's chart"
    assert "first, held-out loss: last 3<" in page and "<span>data <b>stdlib</b></span>" in page and "tokenizer" not in page


def test_two_runs_of_one_name_are_told_apart(tmp_path, capsys):
    runs = [str(a_run(tmp_path / "a", "demo", 3.0)), str(a_run(tmp_path / "b", "demo", 4.0))]
    assert main(["report", *runs, "-o", str(tmp_path / "both.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'both.html'}\n"
    assert f"<title>{runs[0]} against {runs[1]} · gpubound</title>" in (tmp_path / "both.html").read_text()


def test_the_figures_as_json(tmp_path, capsys):
    runs = [str(a_run(tmp_path / "a", "one", 3.0)), str(a_run(tmp_path / "b", "two", 4.0))]
    assert main(["report", *runs, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["loss, last"] == {runs[0]: "2.6", runs[1]: "3.6"} and answer["steps"] == {runs[0]: "4", runs[1]: "4"}


def test_what_is_no_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"gpubound report: {tmp_path} is not a run: it has no run.json; give the folder that train or demo wrote.\n"
    )
