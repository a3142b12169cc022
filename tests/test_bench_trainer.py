"""`gpubound bench trainer`: contestants train by transformers' Trainer, a round at a time, from the same weights."""

import io
import json
import sys

import pytest
import torch

from benchmarks import bench_trainer
from benchmarks.bench_place import SEEN

pytest.importorskip("accelerate")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Trainer's own
def test_contestants_begin_alike_and_answer_each_round(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(bench_trainer, "WARM", 1)
    monkeypatch.setattr(bench_trainer, "STEPS", 2)
    said = {}
    for name in ("ours", "trainer"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("go\n" * 2))
        assert bench_trainer.serve(name, bench_trainer.SETTINGS["tiny"], torch.device("cpu")) == 0
        lines = capsys.readouterr().out.splitlines()
        said[name] = [json.loads(line.removeprefix(SEEN)) for line in lines if line.startswith(SEEN)]
    for first, *rounds in said.values():
        assert len(rounds) == 2 and all(answer["seconds"] > 0 for answer in rounds)
        assert first == pytest.approx(said["trainer"][0], rel=1e-4)
    assert said["ours"][0].keys() == {"loss", "gradient_norm"}
