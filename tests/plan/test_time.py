"""Predicted time against committed measurements; collectives against those of two ranks."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import gpubound as gb
from benchmarks import check_plan
from benchmarks.bench_ranks import CASES as RANKS_CASES
from benchmarks.bench_train import CASES as TRAIN_CASES
from benchmarks.lora_train import CASES as LORA_CASES
from gpubound.distributed import Ranks, join
from gpubound.distributed.fsdp import shard
from gpubound.distributed.local_shard import is_sharded
from gpubound.models.llama.decoder import Decoder, DecoderConfig
from gpubound.plan import costs
from gpubound.plan.costs import Collective, collectives, memory, seconds
from gpubound.plan.step import GPUS, META, StepConfig, outlined, step_of
from gpubound.train import AdamW, TrainStep
from gpubound.train.fields import Lora
from gpubound.train.offload import blocks_of
from gpubound.train.recipe import Recipe
from tests.distributed.processes import on_ranks

H200 = GPUS["h200"]
BASE = step_of(Recipe(model="350m", seq=1024, micro_batch=4, accumulate=64), 8)


@pytest.mark.slow
def test_predictions_hold_on_the_committed_measurements():
    rows = list(check_plan.compared())
    assert [str(row) for row in rows if not row.holds] == []
    units = {(bench, case, unit) for bench, case in check_plan.CASES for unit in ("tok/s", "GiB")}
    assert {(row.bench, row.case, row.unit) for row in rows if row.gpu == "h200"} == units
    assert {(row.case, row.unit) for row in rows if row.gpu == "h100"} >= {("350m", "tok/s"), ("350m", "GiB")}


def test_a_prediction_that_is_off_is_found(monkeypatch):
    monkeypatch.setitem(GPUS, "h200", replace(H200, flops={kind: 2 * rate for kind, rate in H200.flops.items()}))
    monkeypatch.setattr(check_plan, "CASES", dict(list(check_plan.CASES.items())[:2]))
    assert {row.unit for row in check_plan.compared() if not row.holds} == {"tok/s"}


@pytest.mark.slow
@pytest.mark.parametrize("name", check_plan.CASES, ids=" ".join)
def test_a_checked_case_is_the_one_that_the_benchmark_measures(name):
    bench, case = name
    measured = {"train": TRAIN_CASES, "lora": LORA_CASES, "ranks": RANKS_CASES}[bench][case.partition(" on ")[0]]
    preset, seq, rows, _ = check_plan.CASES[name]
    step = check_plan.step_of_case(name)
    assert (measured.shape, measured.seq) == (preset, seq)
    if "-lora" not in case:
        assert (measured.recompute == step.recompute and measured.micro * measured.accumulate == rows * step.accumulate) or (
            rows in getattr(measured, "rows", {}).get(measured.ours, ())
        )
    base = None if step.adapters is None else step.adapters.base
    assert measured.ours.endswith(base or "") and ("fsdp" in measured.ours) == step.sharded


def test_the_rates_are_those_that_were_measured():
    """The best copy and bf16 rates of the committed lines, within 2 %."""
    for gpu, name in check_plan.FILES.items():
        rates: dict[str, float] = {}
        for line in (check_plan.RESULTS / name).read_text().splitlines():
            row = json.loads(line)
            if row["bench"] == "kernels" and row["peer_name"] in ("copy rate", "bf16 rate"):
                rates[row["peer_name"]] = max(rates.get(row["peer_name"], 0.0), row["peer"])
        assert GPUS[gpu].copy == pytest.approx(rates["copy rate"] * 1e9, rel=0.02)
        assert GPUS[gpu].flops["bf16"] == pytest.approx(rates["bf16 rate"] * 1e12, rel=0.02)


def test_slower_links_and_memory_and_recomputing_take_longer(monkeypatch):
    def total(gpu=H200, **changes) -> float:
        return sum(seconds(replace(BASE, **changes), gpu).values())

    assert total(recompute="none") < total(recompute="cheap") < total(recompute="12") < total(recompute="blocks")
    assert total(replace(H200, copy=H200.copy / 2)) > total()
    assert total(captured=False, rows=1, accumulate=32) > total(rows=1, accumulate=32)
    before = [total(), total(sharded=True)]
    monkeypatch.setattr(costs, "NVLINK", 1e9)
    assert total() > before[0] and total(sharded=True) > before[1]


@pytest.mark.slow
def test_adapters_cost_less_than_weights_and_more_where_their_rank_is_large():
    adapted = check_plan.step_of_case(("lora", "8b"))

    def parts(rank: int = 16, **changes) -> dict[str, float]:
        step = replace(adapted, **changes)
        ranks = dict.fromkeys(step.adapters.ranks, rank)
        return seconds(replace(step, adapters=replace(step.adapters, ranks=ranks)), H200)

    full = seconds(replace(adapted, adapters=None), H200)
    assert full["matrix products"] / parts()["matrix products"] == pytest.approx(6 / 4, rel=0.04)
    assert parts(8)["adapters"] == parts()["adapters"] and parts(1024)["adapters"] > 3 * parts()["adapters"]
    eager = parts(seq=512, captured=False)
    assert parts(seq=512)["launches"] < 0.01 and sum(eager.values()) >= 32 * 4 * 1.3e-3


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_ring_sends_what_a_collective_says(world):
    """Simulated chunk by chunk: ranks add what they receive, then pass the sums on."""
    sent, size = [0] * world, 64 * world
    chunks = [[{rank} for _ in range(world)] for rank in range(world)]
    for phase in ("add", "copy"):
        for hop in range(world - 1):
            for rank in range(world):
                which = (rank - hop + (phase == "copy")) % world
                chunks[(rank + 1) % world][which] |= chunks[rank][which]
                sent[rank] += size // world
    assert all(parts == set(range(world)) for own in chunks for parts in own)
    assert [4 * elements for elements in sent] == [Collective("gradient", "all-reduce", 4 * size, 1).sent(world)] * world


# --- against two ranks ---

WORLD, WIDTH, EACH, SEQ = 2, 64, 2, 16
SMALL = DecoderConfig(WIDTH, 48, 3, 2, 1, 64)  # three blocks, whose parameters are those of Blocks
ADAPTED = DecoderConfig(64, 128, 3, 4, 2, 96)
KINDS = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce"}
LOSSES = 3 * 8  # beside the gradient: the sum of the losses, their number and that of idle ranks, in fp64
COUNTS = 8 * WORLD  # between hosts: how many micro-batches each rank of a sharded model has, in int64


class Recorder(TorchDispatchMode):
    """Counts the bytes of all tensors that collectives gather, scatter or sum."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name.startswith("c10d::"):
            tensors = [t for argument in args[:2] for t in ([argument] if isinstance(argument, torch.Tensor) else [])]
            lists = [t for argument in args[:1] if isinstance(argument, list) for t in argument]
            self.bytes[KINDS.get(name[6:], name)] += max(t.nbytes for t in [*tensors, *lists])
        return function(*args, **(kwargs or {}))


class Blocks(nn.Module):
    """A linear layer for each block of SMALL above a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(SMALL.layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(accumulate: int, once: bool = False) -> dict[str, int]:
    """Return what torch's own fully_shard sends in a step of `accumulate` micro-batches."""
    model = Blocks()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=policy)
    with Recorder() as recorder:
        for n in range(accumulate):
            model.set_requires_gradient_sync(not once or n == accumulate - 1)
            model(torch.arange(32)).float().sum().backward()
    return dict(recorder.bytes)


def replicated(accumulate: int, ranks: Ranks) -> dict[str, int]:
    """Return what a TrainStep on replicas sends in a step."""
    step = TrainStep(
        Blocks(), lambda m, x: (m(x).sum(), len(x)), torch.optim.SGD, accumulate=accumulate, precision="fp32", graph="off",
        ranks=ranks,
    )  # fmt: skip
    step([torch.arange(32)] * accumulate)  # the first one also finds the order of its buckets
    with Recorder() as recorder:
        step([torch.arange(32)] * accumulate)
    return dict(recorder.bytes)


def sent() -> tuple[dict[str, int], list[dict[str, int]]]:
    with join("cpu") as ranks:
        return replicated(2, ranks), [sharded(1), sharded(2), sharded(2, once=True)]


def totals(step: StepConfig) -> dict[str, int]:
    found: Counter[str] = Counter()
    for call in collectives(step):
        found[call.kind] += call.bytes * call.times
    return dict(found)


@pytest.mark.slow
def test_a_step_sends_what_its_collectives_say():
    """Two ranks: a TrainStep of replicas and torch's fully_shard, counted at torch's dispatcher."""

    def step(accumulate: int, **options) -> StepConfig:
        return StepConfig(
            SMALL, WIDTH * WIDTH + WIDTH, 32 * WIDTH, 0, AdamW(), "bf16", 8, 1, accumulate, world=WORLD, **options
        )

    replicas = {"all-reduce": totals(step(2))["all-reduce"] + LOSSES}
    shards = [totals(step(n, sharded=True, sum_once=once)) for n, once in ((1, False), (2, False), (2, True))]
    assert on_ranks(WORLD, sent) == [(replicas, shards)] * WORLD


def adapted_step(is_sharded_model: bool, base: str | None) -> tuple[dict[str, int], dict[str, int]]:
    """Return (bytes of a step's collectives, bytes that this rank has) for two micro-batches on each of two ranks."""
    with join("cpu") as ranks:
        torch.manual_seed(0)
        model = Decoder(ADAPTED)
        Lora(4, base=base).add(model)
        if is_sharded_model:
            shard(model, blocks_of(model), ranks, torch.float32)
        step = gb.TrainStep(model, "next_token", accumulate=EACH, precision="fp32", graph="off", ranks=ranks)
        batch = dict.fromkeys(("input_ids", "labels"), torch.arange(SEQ)[None])
        step([batch] * EACH)  # the first one also finds the order of its buckets
        with Recorder() as recorder:
            step([batch] * EACH)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        of_rank = sum((p.to_local() if is_sharded(p) else p).nbytes for p in frozen)  # type: ignore[attr-defined]
        sizes = {"frozen weights": of_rank, "scales of quantised weights": sum(b.nbytes for b in model.buffers())} | step.memory
        sizes["adapters"] = sizes.pop("weights")
        step.close()
        return dict(recorder.bytes), {name: size for name, size in sizes.items() if size}


@pytest.mark.slow
@pytest.mark.parametrize("base", [None, "nf4"])
@pytest.mark.parametrize("is_sharded_model", [False, True], ids=["ddp", "fsdp"])
def test_a_step_of_adapters_sends_and_has_what_the_plan_says(is_sharded_model, base):
    step = outlined(
        Decoder(ADAPTED, device=META), AdamW(), "fp32", SEQ, 1, EACH, captured=False, world=WORLD, sharded=is_sharded_model,
        lora=Lora(4, base=base),
    )  # fmt: skip
    want, parts = totals(step), memory(step)
    want["all-reduce"] += LOSSES + is_sharded_model * COUNTS
    for sent_bytes, sizes in on_ranks(WORLD, partial(adapted_step, is_sharded_model, base)):
        assert sent_bytes == want and sizes == {name: parts[name] for name in sizes}
