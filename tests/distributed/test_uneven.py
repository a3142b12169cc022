"""The data of one rank ends before the others', or one leaves while they wait for it."""

from functools import partial
from itertools import islice

import pytest
import torch

import gpubound as gb
from gpubound import trace
from gpubound.distributed import join
from gpubound.distributed.fsdp import shard
from gpubound.errors import RankError
from gpubound.train.checkpoint import Checkpoints
from tests.distributed.processes import each_on_ranks, on_ranks
from tests.distributed.test_all_reduce import Blocks
from tests.distributed.test_replicas import Tied, loss, nothing, window
from tests.messages import message

SGD = partial(torch.optim.SGD, lr=0.1)
LENGTHS = {1: (4, 2), 2: (5, 3), 4: (9, 2)}
"""Micro-batches of two ranks, by `accumulate`."""


def trained(world, accumulate, options):
    """Weights and losses of ranks with iterators of unequal lengths, or of one process with all of a step's."""
    trace._printed.clear()
    with join("cpu") if world > 1 else nothing() as ranks:
        torch.manual_seed(0)
        model = Tied()
        each = accumulate if world > 1 else 2 * accumulate
        step = gb.TrainStep(model, loss, accumulate=each, ranks=ranks, **options)
        losses = []
        if world == 1:
            theirs = [[window(rank, number) for number in range(length)] for rank, length in enumerate(LENGTHS[accumulate])]
            iterators = [iter(one) for one in theirs]
            while batches := [batch for one in iterators for batch in islice(one, accumulate)]:
                losses.append(step(batches).read().loss)
        else:
            mine = iter([window(ranks.rank, number) for number in range(LENGTHS[accumulate][ranks.rank])])
            while (result := step(mine)) is not None:
                losses.append(result.read().loss)
            assert step(mine) is None, "and again"
            step.assert_alike()
        said = [line for line in trace._printed if "the data of rank" in line]
        return {name: t.float().numpy() for name, t in model.state_dict().items()}, losses, said


CASES = [
    (1, {"optimizer": gb.AdamW(lr=1e-2), "precision": "fp32", "graph": "off"}),
    (1, {"optimizer": gb.AdamW(lr=1e-2), "precision": "fp32", "graph": "require"}),
    (2, {"optimizer": gb.AdamW(lr=1e-2), "precision": "fp32", "graph": "require", "clip": 0.1}),
    (4, {"optimizer": SGD, "precision": "fp32"}),
    (2, {"optimizer": "muon", "precision": "fp32"}),
]


@pytest.fixture(scope="module")
def two_ranks():
    works = {str(number): partial(trained, 2, *case) for number, case in enumerate(CASES)}
    return each_on_ranks(2, works)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_rank_without_data_adds_nothing_to_the_steps_of_the_others(number, two_ranks):
    accumulate, options = CASES[number]
    weights, losses, _ = trained(1, accumulate, options)
    first, second = two_ranks[str(number)]
    for theirs, said, _ in (first, second):
        assert said == pytest.approx(losses, rel=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(torch.from_numpy(theirs[name]), torch.from_numpy(tensor), rtol=1e-5, atol=1e-6, msg=name)
    begun = {1: 3, 2: 3, 4: 2}[accumulate]
    assert first[2] == [] and len(second[2]) == 1
    assert message("parallel/uneven:a_rank_without_data_adds", begun).within(second[2][0])


def kinds():
    updates = []
    with join("cpu") as ranks:
        for optimizer, precision in (("adamw", "fp16"), ("adamw", "fp8"), ("adamw8bit", "bf16"), ("adamw", "bf16-pure")):
            torch.manual_seed(0)
            step = gb.TrainStep(Blocks(), square, optimizer, accumulate=2, precision=precision, ranks=ranks)
            mine = iter(torch.randn(5 - 4 * ranks.rank, 16, 16))
            while (result := step(mine)) is not None:
                last = result.read()
            step.assert_alike()
            updates.append(last.updates + last.skipped)
            step.close()
    return updates


def square(model, x):
    return model(x).float().square().sum(), x.numel()


def test_replicas_of_every_precision_stay_the_same():
    assert on_ranks(2, kinds) == [[3] * 4] * 2


def first_step():
    with join("cpu") as ranks:
        step = gb.TrainStep(Tied(), loss, accumulate=2, precision="fp32", ranks=ranks)
        assert step(iter([])) is None, "no rank has any"
        with pytest.raises(RankError) as error:
            step(iter([window(0, 0), window(0, 1)][: 2 - 2 * ranks.rank]))
        assert step([window(0, ranks.rank)]).read().updates == 1
        return str(error.value)


def test_a_first_step_wants_a_micro_batch_on_every_rank():
    first, second = on_ranks(2, first_step)
    assert first == second
    assert first.startswith(
        "step 1: the data of rank 1 ended: it has no micro-batches, and rank 0 has 2 micro-batches; wanted one at least on "
        "every rank in the first step"
    )


def of_shards(lengths, frozen):
    """How many steps the ranks of a sharded model took, and the error that ended them."""
    done = 0
    try:
        with join("cpu") as ranks:
            torch.manual_seed(0)
            model = gb.Decoder(gb.DecoderConfig(24, 40, 2, 4, 1, 26))
            if frozen:
                gb.lora.add(model, rank=2)
            shard(model, model.model.layers, ranks, dtype=torch.float32)
            step = gb.TrainStep(model, "causal_lm", accumulate=2, precision="fp32", ranks=ranks)
            ids = torch.arange(12).view(2, 6)
            mine = iter([{"input_ids": ids, "labels": ids}] * lengths[ranks.rank])
            while step(mine) is not None:
                done += 1
            return done, ""
    except RankError as error:
        return done, str(error)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("lengths, steps, has", [((5, 3), 1, "1 micro-batch"), ((4, 2), 1, "no micro-batches")])
def test_shards_want_as_many_micro_batches_on_every_rank(lengths, steps, has, frozen):
    (_, first), (done, second) = on_ranks(2, of_shards, lengths, frozen)
    assert done == steps
    assert second.startswith(
        f"step 2: the data of rank 1 ended: it has {has}, and rank 0 has 2 micro-batches; wanted as many on every rank"
    )
    assert first == message("parallel/uneven:shards_want_as_many_micr", second)


def test_shards_may_all_end_in_a_smaller_step():
    assert on_ranks(2, of_shards, (3, 3), False) == [(2, "")] * 2


def over(folder):
    with join("cpu") as ranks:
        step = gb.TrainStep(Tied(), loss, precision="fp32", ranks=ranks)
        store = Checkpoints(folder, ranks=ranks)
        own = Checkpoints(folder / f"of-{ranks.rank}")
        own.save(1, {"a": torch.ones(1)}, {}, wait=True)
    said = [line for line in trace._printed if "saves into" in line]
    for late in (lambda: step(window(0, 0)), lambda: store.save(1, {}, {}), lambda: ranks.gather(1), ranks.wait):
        with pytest.raises(ValueError, check=message("parallel/uneven:over")):
            late()
    return said


def test_ranks_end_with_their_block_and_one_that_saves_without_them_is_told(tmp_path):
    first, (second,) = on_ranks(2, over, tmp_path)
    assert first == [] and second.startswith(f"checkpoint: rank 1 of 2 saves into {tmp_path / 'of-1'} without ranks")


def leaving(how):
    def one(model, batch):
        if how == "raises" and ranks.rank and len(done) == 2:
            raise KeyError("no such column")
        return loss(model, batch)

    done = []
    try:
        with join("cpu") as ranks:
            step = gb.TrainStep(Tied(), one, precision="fp32", ranks=ranks)
            for number in range(3 if how == "leaves" and ranks.rank else 4):
                done.append(step(window(number, ranks.rank)).read().loss)
    except (RankError, KeyError) as error:
        return str(error)


def test_a_rank_that_waits_in_vain_says_what_became_of_the_other():
    said, _ = on_ranks(2, leaving, "raises")
    assert said == message("parallel/uneven:a_rank_that_waits_in_vai")


def test_a_rank_that_leaves_before_the_others():
    said, none = on_ranks(2, leaving, "leaves")
    assert none is None and said == message("parallel/uneven:a_rank_that_leaves_befor")
