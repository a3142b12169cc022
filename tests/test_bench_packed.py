"""`gpubound bench packed`: the fields of its batches agree, and dense rows hold the same tokens."""

import torch

from benchmarks import bench_packed
from benchmarks.packed_rows import ROW, batches, lengths, packed_fields
from benchmarks.train_worker import BATCHES
from gpubound.cli import guarded
from gpubound.layers.packed_attention import Segments


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
