"""Examples of the Richards family as they stand, but shorter: two phases, and a comparison of parts."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from gpubound import device as facts
from gpubound.cli import main
from gpubound.cli.session import make_variants
from gpubound.cli.train_options import from_file
from gpubound.models.richards.checkpoint import MODELS

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


@pytest.mark.slow
def test_a_comparison_of_parts(tmp_path, monkeypatch, capsys):
    """Each variant is another model; two of them are trained, in small."""
    monkeypatch.setattr(facts, "interpreted", lambda: False)
    (tmp_path / "text.txt").write_text("".join(f"The square of {n} is {n * n}.\n" for n in range(300)))
    text = (ROOT / "examples" / "train_from_yaml" / "compare.yaml").read_text().replace("richards-10m", "richards-tiny")
    (tmp_path / "c.yaml").write_text(text)
    options = from_file(str(tmp_path / "c.yaml"))
    recipes = make_variants(options.recipe(), options.compare, options.variants, options.seeds)
    assert len(recipes) == len({str(MODELS[own.model]) for own in recipes.values()}) == 7
    short = f"--out {tmp_path / 'run'} --data {tmp_path / 'text.txt'} --vocabulary 300 --seq 16 --micro-batch 2 --steps 1"
    short += " --seeds 1 --compare baseline,both --device cpu --json"
    assert main(["train", str(tmp_path / "c.yaml"), *short.split()]) == 0
    _, other = json.loads(capsys.readouterr().out)["variants"]
    assert abs(other["difference"]) > 1e-6
