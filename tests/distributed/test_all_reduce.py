"""Gradients are summed while backward runs, by copy engines too, and texts of all ranks are matched as by one process."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from threading import Barrier

import pytest
import torch
from torch import nn
from torch.distributed import _symmetric_memory as symmetric

import gpubound as gb
from gpubound import trace
from gpubound.distributed import ALONE, Ranks, all_reduce, join
from gpubound.distributed.all_reduce import LATE, SymmetricSums, cannot, cut, shares, symmetric_sums
from gpubound.distributed.fsdp import shard
from gpubound.errors import GraphError, RankError
from gpubound.trace import fallbacks
from gpubound.train import graph_cache
from gpubound.train.objectives.pooled import Contrastive
from gpubound.train.offload import blocks_of
from tests.distributed.processes import each_on_ranks, on_ranks
from tests.distributed.test_fsdp import whole
from tests.distributed.test_replicas import WIDTH, WORDS, Tied, loss, nothing, reduction_of, window
from tests.messages import message, refusal
from tests.train.objectives.test_pooled import decoder, matches


@pytest.mark.parametrize("seed", range(10))
def test_buckets_cover_every_element_once(seed):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 50, (int(torch.randint(1, 30, (1,), generator=g)),), generator=g).tolist()
    starts = [0, *itertools.accumulate(sizes)][:-1]
    size, most = sum(sizes) + 7, 60  # 7: the buffer is aligned behind the last one
    order = [float(at) for at in torch.randperm(len(sizes), generator=g)]
    order = [LATE if at % 7 == 3 else at for at in order]
    borders = {start for start in starts if start % 5 == 0}
    buckets = cut(starts, size, borders, order, most)

    covered = sorted((bucket.start, bucket.stop) for bucket in buckets)
    assert [start for start, _ in covered] == [0, *(stop for _, stop in covered[:-1])] and covered[-1][1] == size
    assert sorted(n for bucket in buckets for n in bucket.members) == list(range(len(sizes)))
    assert [bucket.ready for bucket in buckets] == sorted(bucket.ready for bucket in buckets)
    for bucket in buckets:
        inside = [n for n, start in enumerate(starts) if bucket.start <= start < bucket.stop]
        assert tuple(inside) == bucket.members and not borders & {starts[n] for n in inside[1:]}
        assert bucket.stop - bucket.start <= most or len(inside) == 1
        late = {order[n] == LATE for n in inside}
        assert len(late) == 1 and bucket.ready == max(order[n] for n in inside)


class Noting(Ranks):
    """Notes when a sum begins."""

    def begin_sum(self, tensor):
        notes.append(f"sum of {tensor.numel()}")
        return super().begin_sum(tensor)


notes: list[str] = []


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def noted(optimizer):
    with join("cpu") as ranks:
        all_reduce.BUCKET = 64
        noting = Noting(ranks.rank, ranks.world, ranks.local, ranks.device, ranks.group, ranks.host)
        model = Deep()
        for number, layer in enumerate(model.layers):
            layer.register_full_backward_hook(lambda *_, number=number: notes.append(f"layer {number}"))
        step = gb.TrainStep(
            model, lambda m, x: (m(x).square().sum(), x.numel()), optimizer, accumulate=2, precision="fp32", ranks=noting
        )
        step([torch.randn(2, 8), torch.randn(2, 8)])  # the first also finds the order
        notes.clear()
        step([torch.randn(2, 8), torch.randn(2, 8)])
        return notes


def test_sums_begin_while_the_last_backward_runs():
    for said in on_ranks(2, noted, "adamw"):
        assert said[:3] == ["layer 2", "layer 1", "layer 0"], "of two micro-batches only the last"
        first, end = said.index("sum of 64"), len(said) - said[::-1].index("layer 0")
        assert first < end - 1 and said.count("sum of 64") == 3 and said[-1] == "sum of 3", said


class Broken:
    """A loss that fails on one rank at its calls number `at`, behind its forward, where other ranks go on."""

    def __init__(self, rank, at, error):
        self.rank, self.at, self.error = rank, at, error

    def __call__(self, model, batch):
        calls.append(1)
        result = loss(model, batch)
        if self.rank == 1 and len(calls) in self.at:
            raise self.error("no memory for this")
        return result


calls: list[int] = []


def broken(ranks, at, each, error=GraphError):
    """Two steps; the weights, how many graphs were captured, and the fallback's reason."""
    world = ranks.world
    calls.clear()
    fallbacks.clear()
    torch.manual_seed(0)
    all_reduce.BUCKET = WIDTH * WORDS
    graph_cache.has_graphs = lambda device: world > 1
    model = Tied()
    step = gb.TrainStep(model, Broken(ranks.rank, at, error), "adamw", accumulate=each, precision="fp32", ranks=ranks)
    for number in range(2):
        step([window(number, ranks.rank + ranks.world * i) for i in range(each)])
    step.assert_alike()
    said = [why for what, why in fallbacks if what == "train step as one graph"]
    return model.state_dict()["table.weight"].numpy(), len(step.captured), said


WHY = ["rank 1: no memory for this"]
CAPTURES = [  # micro-batches, calls that fail, error, graphs, reasons
    (1, (), GraphError, 1, []),
    (1, (4,), GraphError, 2, WHY),  # in the graph of all; then around the sums
    (1, (4,), torch.OutOfMemoryError, 2, WHY),
    (1, (4, 5), GraphError, 0, WHY),
    (2, (), GraphError, 2, []),
    (2, (4,), torch.OutOfMemoryError, 0, WHY),  # in a micro-batch's
]


def all_broken():
    with join("cpu") as ranks:
        return [broken(ranks, at, each, error) for each, at, error, *_ in CAPTURES]


def test_a_capture_that_one_rank_cannot_have(monkeypatch):
    monkeypatch.setattr(all_reduce, "BUCKET", all_reduce.BUCKET)
    monkeypatch.setattr(graph_cache, "has_graphs", graph_cache.has_graphs)
    want = {each: broken(ALONE, (), 2 * each)[0] for each in (1, 2)}
    for ranks in on_ranks(2, all_broken):
        for (each, _, _, captured, reasons), (weight, number, said) in zip(CAPTURES, ranks, strict=True):
            assert (number, said) == (captured, reasons)
            torch.testing.assert_close(torch.from_numpy(weight), torch.from_numpy(want[each]), rtol=1e-5, atol=1e-6)


class Experts(Tied):
    """A micro-batch goes through one of two experts."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, words):
        return self.experts[words.shape[1] % 2](self.table(words)) @ self.table.weight.t()


def expert_steps(world):
    with join("cpu") if world > 1 else nothing() as ranks:
        torch.manual_seed(0)
        model = Experts()
        step = gb.TrainStep(model, loss, gb.AdamW(lr=1e-2), accumulate=2 // world, precision="fp32", graph="off", ranks=ranks)
        for number in range(2):
            words, labels = window(number, ranks.rank)
            mine = (words, labels), (words[:, 1:], labels[:, 1:])
            step([mine[(ranks.rank + number) % 2]] if world > 1 else [part(number, rank) for rank in range(2)])
        step.assert_alike()
        return [p.detach().numpy() for p in model.parameters()]


def part(number, rank):
    words, labels = window(number, rank)
    return (words[:, 1:], labels[:, 1:]) if (rank + number) % 2 else (words, labels)


def test_what_one_rank_does_not_use_is_summed_too():
    want = expert_steps(1)
    for got in on_ranks(2, expert_steps, 2):
        for a, b in zip(got, want):
            torch.testing.assert_close(torch.from_numpy(a), torch.from_numpy(b), rtol=1e-5, atol=1e-6)


KINDS = [
    ("adamw", "bf16-pure", "none"), ("adamw8bit", "bf16", "none"), ("muon", "fp32", "blocks"),
    (torch.optim.SGD, "fp32", "none"), ("adamw", "fp16", "none"), ("adamw", "fp8", "none"),
]  # fmt: skip


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def kinds():
    with join("cpu") as ranks:
        drawn = []
        for optimizer, precision, recompute in KINDS:
            torch.manual_seed(3)
            step = gb.TrainStep(
                Blocks(), lambda m, x: (m(x).float().square().sum(), x.numel()), optimizer,
                precision=precision, recompute=recompute, ranks=ranks,
            )  # fmt: skip
            drawn.append(torch.rand(1).item())
            for _ in range(2):
                step(torch.randn(16, 16))
            assert step(torch.randn(16, 16)).read().updates > 0 or precision == "fp16"
            step.assert_alike()
            step.close()
        return drawn


def test_replicas_stay_the_same_and_draw_apart():
    first, second = on_ranks(2, kinds)
    assert all(a != b for a, b in zip(first, second)), "dropout differs between ranks"


def test_alone_nothing_is_hooked():
    model = Deep()
    step = gb.TrainStep(model, lambda m, x: (m(x).square().sum(), x.numel()), precision="fp32", ranks=ALONE)
    step(torch.randn(2, 8))
    assert len(reduction_of(step).buckets) == 1


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


@pytest.mark.parametrize("start, stop, world", [(0, 1000, 2), (64, 65, 4), (5, 5, 3), (32, 4099, 8), (0, 64, 2)])
def test_each_element_is_one_ranks(start, stop, world):
    found = shares(start, stop, world)
    assert len(found) == world and found[0][0] == start and found[-1][1] == stop
    assert all(first <= last for first, last in found) and all(a[1] == b[0] for a, b in pairwise(found))
    assert max(last - first for first, last in found) <= -(-(stop - start) // world) + all_reduce.ALIGNED


@pytest.mark.parametrize("world", [2, 3, 5])
def test_all_ranks_have_the_sum_with_the_same_bits(world, monkeypatch):
    """Of the stretches that they ask for, in pieces of 40 elements; the rest stays each one's own."""
    monkeypatch.setattr(all_reduce, "PIECE", 40)
    drawn = torch.randn(world, 700, generator=torch.Generator().manual_seed(world))
    buffers, meeting = list(drawn.clone()), Barrier(world)

    def work(rank):
        mine = SymmetricSums(buffers, rank, lambda: meeting.wait(60) and None)
        for wait in (mine.begin(100, 650), mine.begin(0, 33), mine.end()):
            wait()
        return mine.mine

    with ThreadPoolExecutor(world) as many:
        found = list(many.map(work, range(world)))
    wanted = drawn.double().sum(0)
    for rank, sums in enumerate(found):
        for summed in (slice(100, 650), slice(0, 33)):
            torch.testing.assert_close(sums[summed].double(), wanted[summed], rtol=1e-6, atol=1e-6)
            assert torch.equal(sums[summed], found[0][summed])
        for kept in (slice(33, 100), slice(650, 700)):
            assert torch.equal(sums[kept], drawn[rank, kept])


def test_a_cpu_and_one_that_is_alone_have_none():
    assert symmetric_sums(ALONE, 100) is None
    assert on_ranks(2, found_on_cpus) == [True, True]


def test_gpus_that_do_not_see_each_other_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other != 2)
    assert cannot(0, [0, 1]) is None
    assert cannot(1, [0, 1, 2]) == message("parallel/peers:gpus_that_do_not_see_eac")
    assert cannot(0, [0, 0]) == message("parallel/peers:gpus_that_do_not_see_eac.2")


def found_on_cpus():
    with join("cpu") as ranks:
        return symmetric_sums(ranks, 100) is None


def without(stage):
    """A driver that gives rank 1 no shared memory, or shows nobody the others'."""
    with join("cpu") as ranks:
        torch.cuda.can_device_access_peer = lambda own, other: True
        torch.cuda.memory_reserved = lambda device: 0
        symmetric.empty = lambda elements, dtype, device: failing("no memory") if stage == ranks.rank else torch.zeros(elements)
        symmetric.rendezvous = lambda buffer, group: failing("no fabric")
        ours = replace(ranks, device=torch.device("cuda", ranks.rank))  # as if: nothing runs there
        return symmetric_sums(ours, 100), [line for line in trace._printed if line.startswith("parallel: ")]


def failing(said):
    raise RuntimeError(f"{said}\nand a long explanation")


@pytest.mark.parametrize("stage, why", [(1, "no memory"), (None, "no fabric")])
def test_where_one_rank_cannot_none_does_and_a_line_says_why(stage, why):
    said = f"parallel: gradients are summed by NCCL's kernels, not by copies between GPUs: {why}."
    assert on_ranks(2, without, stage) == [(None, [said])] * 2


def summed_on_gpus(elements):
    with join("cuda") as ranks:
        sums = symmetric_sums(ranks, elements)
        g = torch.Generator("cuda").manual_seed(ranks.rank)
        sums.mine.copy_(torch.randn(elements, device="cuda", generator=g))
        wanted = sums.mine.clone()
        ranks.sum(wanted)
        found = []
        for _ in range(3):  # nobody may still read what the next round writes
            sums.mine.copy_(torch.randn(elements, device="cuda", generator=g.manual_seed(ranks.rank)))
            for wait in (sums.begin(0, 1000), sums.begin(1000, elements), sums.end()):
                wait()
            found.append(torch.equal(sums.mine, wanted))
        return found


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_two_gpus_have_the_sum_that_nccl_gives():
    """Of two terms there is one sum, whoever adds."""
    assert on_ranks(2, summed_on_gpus, 9_000_001) == [[True] * 3] * 2
