"""`gpubound demo` on a few steps: what it leaves, what it says, and that it removes nothing that is not its own."""

import json
from pathlib import Path

import pytest
import torch

from gpubound import device as facts
from gpubound.cli import main
from gpubound.cli.demo import PROMPT, Demo, recipe_for
from gpubound.train.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The reference kernels, and 100 kB of Python to learn from instead of 3 MB."""
    monkeypatch.setattr(facts, "interpreted", lambda: False)
    from gpubound.train import data

    whole = data.python_stdlib_texts
    monkeypatch.setattr(data, "python_stdlib_texts", lambda limit: whole(100_000))


def demo(out: Path, *options: str) -> int:
    return main(["demo", "--out", str(out), "--steps", "8", "--device", "cpu", *options])


def test_the_whole_path(tmp_path, capsys):
    out = tmp_path / "demo"
    assert demo(out) == 0
    said = capsys.readouterr().err
    tape = json.loads((out / "run.json").read_text())
    assert tape["finished"] and tape["sample"].startswith(PROMPT) and tape["sample"] in said
    losses = [json.loads(line)["loss"] for line in (out / "steps.jsonl").read_text().splitlines()]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert f"export: {out / 'model'} (a Hugging Face folder)\nreport: {out / 'report.html'}\n" in said
    page = (out / "report.html").read_text()
    assert "What it writes" in page and "<svg" in page and "http" not in page.replace("http://www.w3.org", "")
    assert (out / "model" / "model.safetensors").exists()


def test_a_finished_demo_is_replaced(tmp_path):
    assert demo(tmp_path / "demo") == 0
    for old in ("checkpoints/step-00000001", "corpus/old", "model/old"):
        (tmp_path / "demo" / old).mkdir()
    assert demo(tmp_path / "demo") == 0
    assert len(lines(tmp_path / "demo")) == 8 and not list((tmp_path / "demo").glob("*/old"))
    assert [p.name for p in (tmp_path / "demo" / "checkpoints").iterdir()] == ["step-00000008"]


def test_interrupted_and_gone_on_with(tmp_path, capsys, monkeypatch):
    """Ctrl-C after the third step, as the loop sees it; the next plain demo would not throw the checkpoint away."""
    from gpubound.train.loop import Stop

    out = tmp_path / "demo"
    asked = property(
        lambda self: "SIGINT" if (out / "steps.jsonl").exists() and len(lines(out)) >= 2 else None, lambda *_: None
    )
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "asked", asked, raising=False)
        assert demo(out) == 0
    said = capsys.readouterr().err
    assert f"stopped by SIGINT, checkpoint of step 3 in {out / 'checkpoints'}" in said
    assert f"go on with: gpubound demo --out {out} --resume --steps 8\n" in said
    assert Checkpoints(out / "checkpoints").latest().step == 3
    assert demo(out) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"gpubound demo: demo: {out} holds an unfinished demo; go on with --resume, or give another folder with --out."
    )
    assert demo(out, "--resume") == 0
    assert [json.loads(line)["step"] for line in lines(out)] == list(range(1, 9))


def lines(out: Path) -> list[str]:
    return (out / "steps.jsonl").read_text().splitlines()


def test_what_is_not_the_demos_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert demo(tmp_path) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"gpubound demo: demo: {tmp_path} holds 'thesis.txt', which no demo wrote; give another folder with --out."
    )
    assert demo(tmp_path / "thesis.txt") == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"gpubound demo: demo: {tmp_path / 'thesis.txt'} is a file; give a folder with --out."
    )
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_recipes_are_valid_for_both_kinds_of_device():
    assert recipe_for(torch.device("cpu"), Demo()).steps == 1200
    assert recipe_for(torch.device("cuda", 0), Demo(steps=5)).steps == 5


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.undo()
    assert main(["demo", "--out", str(tmp_path / "demo"), "--device", "cuda", "--steps", "60"]) == 0
    records = [json.loads(line) for line in lines(tmp_path / "demo")]
    assert records[-1]["held_out"] < 6 and next(r for r in records if "syncs" in r)["syncs"] == 0
    assert {"gpu_busy", "host_lead_ms", "mfu"} <= records[-1].keys()
