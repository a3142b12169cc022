"""Examples of the Richards family as they stand, but shorter."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from gpubound import device as facts
from gpubound.cli import main

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("name, falls", [("richards", 1.0), ("diffusion", 0.5)])
def test_it_learns_in_two_phases(name, falls, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(facts, "interpreted", lambda: False)
    monkeypatch.chdir(ROOT)
    text = (ROOT / "examples" / "train_from_yaml" / f"{name}.yaml").read_text()
    for whole, short in (("steps: 80", "steps: 20"), ("steps: 60", "steps: 12")):
        assert whole in text
        text = text.replace(whole, short)
    (tmp_path / "c.yaml").write_text(text)
    assert main(["train", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run"), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"]
    records = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [record["phase"] for record in records] == ["pretrain"] * 20 + ["instruct"] * 12
    first, last = (fmean(record["loss"] for record in part) for part in (records[:4], records[-4:]))
    assert last < first - falls
