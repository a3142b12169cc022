"""Matching texts of all ranks: the loss and the steps of one process that has all of their micro-batches in one."""

from functools import partial

import pytest
import torch

import gpubound as gb
from gpubound.distributed import join
from gpubound.distributed.fsdp import shard
from gpubound.errors import GraphError, RankError
from gpubound.train.objectives.pooled import Contrastive
from gpubound.train.offload import blocks_of
from tests.distributed.processes import each_on_ranks
from tests.distributed.test_fsdp import whole
from tests.distributed.test_replicas import nothing
from tests.messages import refusal
from tests.train.objectives.test_pooled import decoder, matches

CASES = {
    "positives": {"negatives": 0},
    "negatives of all": {"negatives": 2},
    "symmetric, by mean, in chunks": {"negatives": 1, "symmetric": True, "pooling": "mean", "chunk": 4},
    "of a sharded model": {"negatives": 1},
}


def joined(*batches: dict) -> dict:
    return {name: torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels")}


def trained(world: int, accumulate: int, options: dict, sharded: bool = False):
    """Losses of three steps and the weights after them; of one process with the micro-batches of two ranks in one."""
    with join("cpu") if world > 1 else nothing() as ranks:
        model, losses = decoder(classes=0), []
        if sharded:
            shard(model, blocks_of(model), ranks, torch.float32)
        objective = Contrastive(0.1, gather_across_ranks=world > 1, **options)
        step = gb.TrainStep(model, objective, gb.AdamW(lr=1e-2), accumulate=accumulate, precision="fp32", ranks=ranks)
        for number in range(3):
            seeds = [[100 * number + 10 * part + rank for rank in range(2)] for part in range(accumulate)]
            of_ranks = [[matches(seed, options["negatives"]) for seed in both] for both in seeds]
            given = [joined(*both) if world == 1 else joined(both[ranks.rank]) for both in of_ranks]
            losses.append(step(given).read().loss)
        step.assert_alike()
        return losses, {name: whole(t) for name, t in model.state_dict().items()}


def refused():
    """What ranks refuse: other numbers of micro-batches and of rows, in the first and in a later micro-batch, and a graph."""
    with join("cpu") as ranks:
        batch = joined(matches(negatives=0))

        def more(times: int) -> dict:
            return joined(*[batch] * times)

        def make(**options):
            objective = Contrastive(gather_across_ranks=True)
            return gb.TrainStep(decoder(classes=0), objective, precision="fp32", ranks=ranks, accumulate=2, **options)

        step = make()
        step([batch, more(2)])  # all ranks' rows change together
        return (
            refusal(RankError, lambda: make()([batch] * (2 - ranks.rank))),
            refusal(ValueError, lambda: make()([more(1 + ranks.rank)])),
            refusal(GraphError, lambda: make(graph="require")),
            refusal(RankError, lambda: step([more(2), more(3 + ranks.rank)])),
        )


@pytest.fixture(scope="module")
def two_ranks():
    works = {
        name: partial(trained, 2, 1 + number % 2, options, sharded="sharded" in name)
        for number, (name, options) in enumerate(CASES.items())
    }
    return each_on_ranks(2, works | {"refused": refused})


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_process_with_all_texts(name, two_ranks):
    losses, weights = trained(1, 1 + list(CASES).index(name) % 2, CASES[name])
    for theirs, tensors in two_ranks[name]:
        assert theirs == pytest.approx(losses, rel=1e-5)
        for key, tensor in weights.items():
            torch.testing.assert_close(torch.from_numpy(tensors[key]), torch.from_numpy(tensor), rtol=1e-4, atol=1e-5, msg=key)


def test_what_ranks_refuse(two_ranks):
    for counts, rows, graph, later in two_ranks["refused"]:
        assert "as many on every rank" in counts and "embeddings of all ranks" in counts
        assert "rows is 12" in rows and "rank 0's 6" in rows
        assert "graph='auto'" in graph
        assert "18, 24 rows" in later and "gather_across_ranks" in later
