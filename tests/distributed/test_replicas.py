"""Ranks that each hold all weights take the steps that one process takes with all of their micro-batches."""

from functools import partial

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.distributed import ALONE, all_reduce, join
from gpubound.errors import RankError
from gpubound.train import Muon
from gpubound.train.sharding import check_replicas_equal
from tests.distributed.processes import RankFailed, each_on_ranks, on_ranks
from tests.messages import message

STEPS, WIDTH, WORDS = 3, 16, 24


class Tied(nn.Module):
    """Words to words: one table at both ends, and a gain that no word of an empty micro-batch reaches."""

    def __init__(self):
        super().__init__()
        self.table, self.inner, self.gain = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, words):
        x = self.table(words)
        return (torch.tanh(self.inner(x)) * self.gain + x + self.shift) @ self.table.weight.t()


def loss(model, batch):
    words, labels = batch
    summed = nn.functional.cross_entropy(model(words).flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=-1)
    return summed, (labels >= 0).sum()


def window(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batch `number` of a step: another one has other words, and another count of valid ones."""
    g = torch.Generator().manual_seed(100 * step + number)
    words, labels = torch.randint(WORDS, (2, 5), generator=g), torch.randint(WORDS, (2, 5), generator=g)
    labels[:, 5 - number % 4 :] = -1
    return words, labels


def trained(world: int, each: int, options: dict):
    """Three steps of `world` ranks with `each` micro-batches a step; the weights, losses and norms of rank 0."""
    with join("cpu") if world > 1 else nothing() as ranks:
        torch.manual_seed(ranks.rank)  # the first rank's weights are everyone's
        all_reduce.BUCKET = WIDTH * WORDS  # elements: several sums a step; at world 1 there is none
        model = Tied()
        config = gb.AdamW(lr=1e-2, weight_decay=0.1)
        step = gb.TrainStep(model, loss, config, accumulate=each, clip=0.5, precision="fp32", ranks=ranks, **options)
        reports, sums = [], reduction_of(step)
        for number in range(STEPS):
            mine = [window(number, ranks.rank + ranks.world * i) for i in range(each)]
            said = step(mine).read()
            reports.append((said.loss, said.grad_norm, said.tokens))
        step.assert_alike()
        assert ranks.alone or sum(bucket.ready < all_reduce.LATE for bucket in sums.buckets) > 1
        captured = len(step.captured)
        step.close()
        return {name: tensor.numpy() for name, tensor in model.state_dict().items()}, reports, captured


def reduction_of(step):
    return step._graphs.step.reduction


class nothing:
    def __enter__(self):
        return ALONE

    def __exit__(self, *error):
        pass


@pytest.mark.parametrize("world, each", [(2, (1, 4)), (4, (1,))])
def test_many_ranks_are_one_process_with_all_micro_batches(world, each):
    works = {
        f"{number} {graph}": partial(trained, world, number, {"graph": graph})
        for number in each for graph in ("off", "require")
    }  # fmt: skip
    for name, ranks in each_on_ranks(world, works).items():
        number, graph = name.split()
        weights, reports, _ = trained(1, world * int(number), {"graph": "off"})
        check(weights, reports, ranks, graph)


def check(weights, reports, ranks, graph):
    for theirs, said, captured in ranks:
        assert bool(captured) == (graph == "require")
        for (loss_a, norm_a, tokens_a), (loss_b, norm_b, tokens_b) in zip(reports, said):
            assert (loss_b, norm_b) == pytest.approx((loss_a, norm_a), rel=1e-6) and tokens_a == tokens_b
        for name, tensor in weights.items():
            torch.testing.assert_close(torch.from_numpy(theirs[name]), torch.from_numpy(tensor), rtol=1e-6, atol=1e-7, msg=name)


def skipped():
    with join("cpu") as ranks:
        model = Tied()
        step = gb.TrainStep(model, loss, "adamw", precision="fp32", ranks=ranks)
        before = model.state_dict()["inner.weight"].clone()
        with torch.no_grad():
            words, labels = window(0, ranks.rank)
        hook = model.inner.register_forward_hook(lambda m, i, out: out * (float("nan") if ranks.rank else 1.0))
        first = step((words, labels)).read()
        hook.remove()
        same = before.equal(model.inner.weight)
        second = step((words, labels)).read()
        return first.skipped, same, second.skipped, before.equal(model.inner.weight)


def test_what_is_not_finite_on_one_rank_is_skipped_on_all():
    assert on_ranks(2, skipped) == [(1, True, 1, False)] * 2


def unequal(what: str):
    with join("cpu") as ranks:
        model = Tied()
        if what == "shape" and ranks.rank:
            model.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        step = gb.TrainStep(model, loss, "adamw", precision="fp32", ranks=ranks)
        check_replicas_equal(model.named_parameters(), ranks)
        if ranks.rank:
            with torch.no_grad():
                model.inner.weight[3, 4] += 1e-3
        try:
            check_replicas_equal(model.named_parameters(), ranks)
        except RankError as error:
            return str(error)
        step.close()


def test_ranks_that_differ_are_named():
    said = on_ranks(2, unequal, "value")
    assert said[0] == said[1] and said[0].startswith("rank 1 has other values in inner.weight than rank 0")
    with pytest.raises(RankFailed, check=message("parallel/replicas:ranks_that_differ_are_na")):
        on_ranks(2, unequal, "shape")


def settings_apart(rank: int):
    """Optimizers and schedules whose second one is rank 1's, and what is said of them."""
    odd = 0.5 if rank else 1.0
    return [
        (gb.AdamW(lr=1e-3 * odd), None, "optimizer.lr is 0.0005, rank 0's 0.001"),
        (Muon(rest=gb.AdamW(lr=1e-3, eps=odd)), None, "optimizer.rest.eps is 0.5, rank 0's 1.0"),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9 * odd), None, "optimizer (group 0).momentum is 0.45, rank 0's 0.9"),
        (gb.AdamW(), gb.Schedule("cosine", steps=10, final=odd), "schedule.final is 0.5, rank 0's 1.0"),
    ]


def refused():
    with join("cpu") as ranks:
        said = []
        for config, schedule, _ in settings_apart(ranks.rank):
            with pytest.raises(ValueError) as error:
                gb.TrainStep(Tied(), loss, config, precision="fp32", schedule=schedule, ranks=ranks)
            said.append(str(error.value))
        gb.TrainStep(Tied(), loss, gb.AdamW(decays=lambda name, p: True), precision="fp32", ranks=ranks).close()
        return said


def test_ranks_with_other_rates_are_refused():
    """Their weights would part at the first step. Functions are not compared: each process has its own."""
    want = [
        f"TrainStep: rank 1 has another one than rank 0: {said}. Start all ranks with the same."
        for *_, said in settings_apart(0)
    ]
    assert on_ranks(2, refused) == [want, want]
