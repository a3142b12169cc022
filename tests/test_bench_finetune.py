"""Benchmarks of fine-tuning, packed rows, the Trainer, diffusion and steps: peers do the same, dry runs have their lines."""

import io
import json
import sys

import numpy as np
import pytest
import torch

from benchmarks import bench_diffusion, bench_finetune, bench_packed, bench_steps, bench_trainer
from benchmarks.bench_place import SEEN
from benchmarks.finetune_worker import CONTENDERS, rows, tokenizer
from benchmarks.packed_rows import ROW, batches, lengths, packed_fields
from benchmarks.plain_diffusion import PlainDecoder, generate
from benchmarks.shapes import SHAPES
from benchmarks.step_models import TASKS
from benchmarks.train_worker import BATCHES
from gpubound.cli import guarded
from gpubound.decode import MaskedSampler
from gpubound.layers.packed_attention import Segments


def test_each_contender_is_known():
    cases = {**bench_finetune.CASES, **bench_finetune.TINY}.values()
    assert {who for case in cases for who in case.micro} == set(CONTENDERS)
    assert all(set(case.gates) <= set(case.micro) for case in cases)


def test_rows_have_the_lengths_of_chats():
    job = bench_finetune.TINY["tiny-sft"].job("ours", "cpu")
    texts, encoder = rows(job, pairs=False), tokenizer(job)
    sizes = np.array([len(encoder(row["text"]).input_ids) for row in texts[:200]])
    assert sizes.max() <= job.seq and 4 < sizes.mean() < 9  # 400 of 4,096
    pair = rows(job, pairs=True)[0]
    assert pair.keys() == {"prompt", "chosen", "rejected"} and pair["chosen"] != pair["rejected"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_dry_run(capsys):
    pytest.importorskip("trl")
    assert guarded("bench", bench_finetune.main, ["--dry", "--peers", "trl-plain,trl-dpo-plain"]) == 0
    out = capsys.readouterr().out
    assert "trl-plain" in out and "trl-dpo-plain" in out


def test_lengths_are_those_of_chats():
    drawn = lengths(ROW)
    assert 390 < drawn.mean() < 410 and drawn.max() == ROW and drawn.min() >= 1


def test_the_bounds_are_those_of_the_positions():
    made = packed_fields(64, 3)
    assert len(made) == BATCHES and any((fields["segment_ids"] < 0).any() for fields in packed_fields(64, 3, most=2))
    assert len({fields["cu_seqlens"].shape for fields in made}) == 1
    for fields in made:
        bounds, positions = fields["cu_seqlens"].long(), fields["position_ids"]
        assert bounds[0] == 0 and bounds[-1] == positions.numel() and (bounds.diff() >= 0).all()
        assert torch.equal(bounds[bounds.diff(append=bounds[-1:]) > 0], (positions.flatten() == 0).nonzero().flatten())
        by_bounds = Segments.of(positions, None, fields["cu_seqlens"])
        assert torch.equal(by_bounds.mask(), Segments(fields["segment_ids"]).mask())


def test_dense_rows_hold_the_same_tokens():
    job = bench_packed.TINY["tiny"].job("packed", "cpu")
    for ours, dense in zip(batches(job, packed=True), batches(job, packed=False)):
        assert dense.keys() == {"input_ids", "labels"} and all(torch.equal(ours[name], dense[name]) for name in dense)


def test_a_dry_run_of_attention(capsys):
    assert guarded("bench", bench_packed.main, ["--dry", "--parts", "attention"]) == 0
    assert "tiny-lora attention, 64 bounds a row" in capsys.readouterr().out


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


def test_the_peer_is_the_same_algorithm():
    model = bench_diffusion.build(SHAPES["tiny"], torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    prompts = torch.randint(255, (2, 5), generator=torch.Generator().manual_seed(0))
    sampler, found = MaskedSampler(model, mask_token=255), []
    for cached in (False, True):
        want = sampler.generate(prompts, 8, steps=6, block=4, cache=cached).tokens
        found.append(generate(PlainDecoder(model, 13), prompts, 8, 4, 6, 255, cached))
        assert found[-1] == want
    assert found[0] != found[1]


def test_a_dry_run_of_diffusion(capsys):
    assert guarded("bench", bench_diffusion.main, ["--dry"]) == 0
    said = capsys.readouterr().out
    assert "tiny batch 2, 4 steps for 8 tokens, cached" in said and "positions computed: 128, cached 80" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gnn", "world"])
def test_a_dry_run_of_steps(name, capsys):
    assert guarded("bench", bench_steps.main, ["--dry", "--only", name]) == 0
    assert f"{name} fp32" in capsys.readouterr().out


def test_losses_that_differ_are_not_timed(monkeypatch, capsys):
    task = TASKS["gnn"]
    calls = []

    def drifting(model, batch):
        calls.append(model)
        return task.loss(model, batch) * (1 + len(calls))

    monkeypatch.setitem(bench_steps.TASKS, "gnn", task._replace(loss=drifting))
    assert guarded("bench", bench_steps.main, ["--dry", "--only", "gnn"]) == 1
    assert "not timed" in capsys.readouterr().err
