"""What a step costs the host, by the ledger: nothing but its launches, and the report that goes down behind it."""

import dataclasses

import pytest
import torch

from gpubound.data import Corpus
from gpubound.models import PRESETS, Decoder
from gpubound.train import AdamW, Schedule, TrainStep
from gpubound.watch import watch

from .runs import build_corpus


@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["require", "off"])
def test_a_window_of_eight_from_a_resident_corpus(tmp_path, graph):
    """No wait, no byte from the host, and no more than one deferred read a step, which is none while the step runs."""
    torch.use_deterministic_algorithms(False)
    cuda = torch.device("cuda", 0)
    corpus = Corpus.open(build_corpus(tmp_path / "corpus"))
    model = Decoder(dataclasses.replace(PRESETS["tiny"], vocabulary=320), device=cuda).train()
    feed = corpus.batches(32, 4, cuda)
    schedule = Schedule("cosine", steps=50, warmup=0.1)
    step = TrainStep(model, "next_token", AdamW(1e-3), accumulate=8, clip=1.0, schedule=schedule, graph=graph)
    for _ in range(3):
        step(feed)
    with watch() as ledger:
        results = [step(feed) for _ in range(5)]
    ledger.assert_within(syncs=0, h2d_bytes=0, h2d_copies=0, fallbacks=0, d2h_copies=len(results))
    assert bool(step.captured) == (graph == "require")
    assert [result.read().updates for result in results] == [4, 5, 6, 7, 8] and results[-1].read().tokens == 8 * 4 * 32
