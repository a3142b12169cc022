"""What a step holds: its first one, warm-up and capture included, and activation checkpointing, which keeps less."""

import doctest
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpubound as gb
from gpubound.graph import memory
from gpubound.models import Decoder, DecoderConfig
from gpubound.train import AdamW, AdamW8bit, TrainStep, offload
from gpubound.train.adamw import FlatAdamW
from gpubound.train.offload import blocks_of, drops_out, find_blocks, parse, recompute_blocks
from tests.messages import message, refusal

from ..graph.cases import elsewhere
from .conftest import draw, small, summed
from .objectives.test_causal_lm import batch, llama

ALLOWED = 1.05  # of what a step takes
RESERVED = 1.2  # of what lasts: blocks between those of a warm-up; 1.16 and 1.12 measured on an H200


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors, made inside, that were alive at once. Copies are counted apart, in lent memory or not."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.most = self.copied = self.lent = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        own = memory.CopyBudget.allocate

        def allocate(budget, live):
            copy = own(budget, live)
            self._live.pop(copy.untyped_storage()._cdata, None)
            if memory.storage_key(copy) in budget.lenders:
                self.lent += copy.numel()
            else:
                self.copied += copy.numel()
            return copy

        monkeypatch.setattr(memory.CopyBudget, "allocate", allocate)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor | torch.UntypedStorage)]
        before = {(t.untyped_storage() if isinstance(t, Tensor) else t)._cdata for t in given}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and (key := t.untyped_storage()._cdata) not in before:
                self._live[key] = StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return out


def peaks(monkeypatch, make: Callable[[str], TrainStep], batch) -> tuple[int, int, int, int]:
    """Return the bytes of a step that is not captured, of the first captured step, of the copies in it, and of those in lent
    memory."""
    monkeypatch.setattr(memory, "CHUNK", 1 << 14)  # of the buffers that copies pass through
    monkeypatch.setattr(memory, "PART", 1 << 14)
    monkeypatch.setattr(memory, "COMPARED", 1 << 12)
    found = []
    for graph in ("off", "require"):
        step = make(graph)
        with LiveBytes(monkeypatch) as live:
            assert step(batch).read().updates == 1
        found.append(live.most + sum(step.memory.values()))
    return (*found, live.copied, live.lent)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-3), AdamW8bit(lr=1e-3)], ids=["adamw", "adamw8bit"])
def test_the_first_step_needs_no_more_than_a_step(optimizer, monkeypatch):
    elsewhere(monkeypatch)

    def make(graph: str) -> TrainStep:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        return TrainStep(model.bfloat16(), summed, optimizer, precision="bf16", graph=graph)

    a_step, first, copied, lent = peaks(monkeypatch, make, draw(256))
    assert first <= ALLOWED * a_step
    weights = sum(p.numel() for p in make("off").model.parameters())
    # Of the micro-batch the 16-bit weights; of the update these, their masters and the gradient. For the comparison the
    # gradient, in the memory of the moments, or, as these take 2 bytes in 8 bits, of the masters.
    assert copied <= 1.02 * (2 + 2 + 4 + 4) * weights and 4 * weights <= lent <= 1.02 * 4 * weights


@pytest.mark.slow
def test_frozen_weights_that_are_stacked_are_not_copied(monkeypatch):
    """The matrix that they are stacked in is no parameter, and was taken for a state that a kernel may write."""
    elsewhere(monkeypatch)

    def make(graph: str) -> TrainStep:
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(hidden=32, intermediate=128, layers=2, heads=4, kv_heads=2, vocabulary=64))
        gb.lora.add(model, 2, 4.0)
        return TrainStep(model, "causal_lm", AdamW(lr=1e-3), precision="fp32", graph=graph)

    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    _, _, copied, _ = peaks(monkeypatch, make, {"input_ids": ids, "labels": ids})
    trained = sum(p.numel() for p in make("off").model.parameters() if p.requires_grad)
    assert copied <= 1.1 * (4 + 4 + 4) * trained


@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-3), AdamW8bit(lr=1e-3)], ids=["adamw", "adamw8bit"])
def test_lent_state_is_made_again(optimizer):
    """Moments after an update are not lent, nor are masters that are no copies of their weights."""
    step = TrainStep(small().bfloat16(), summed, optimizer, precision="bf16", graph="off")
    lend, before = step._graphs._lend_state, {name: tensor.clone() for name, tensor in step.state_dict().items()}
    with torch.no_grad(), lend() as lent:
        assert len(lent) == 3, "two moments and the masters"
        for tensor in lent:
            memory.bytes_of(tensor).fill_(77)
    assert all(tensor.equal(before[name]) for name, tensor in step.state_dict().items())
    step(draw(2))
    with lend() as lent:
        assert not lent


def test_the_former_memory_of_stacked_weights_goes_before_moments_are_made(monkeypatch):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(hidden=32, intermediate=128, layers=2, heads=4, kv_heads=2, vocabulary=64))
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    model.loss(ids, ids)  # q, k and v, gate and up move into one matrix each
    former = {p.untyped_storage()._weak_ref() for p in model.parameters()}
    expired = []

    def making(self, layout, begin=FlatAdamW._begin_moments):
        expired.append(sum(map(torch.UntypedStorage._expired, former)))
        begin(self, layout)

    monkeypatch.setattr(FlatAdamW, "_begin_moments", making)
    TrainStep(model, "causal_lm", precision="bf16", graph="off")
    assert expired == [len(former)]
    for reference in former:
        torch.UntypedStorage._free_weak_ref(reference)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_first_step_needs_no_more_than_a_step_on_the_gpu(accumulate):
    """Of the process: what lasts, and the graphs' pool."""
    torch.use_deterministic_algorithms(False)  # its NaN fill would be captured, too
    config = DecoderConfig(hidden=1024, intermediate=4096, layers=6, heads=16, kv_heads=4, vocabulary=32768)
    with torch.device("cuda"):
        model = Decoder(config)
    step = TrainStep(model, "causal_lm", AdamW(lr=1e-4), accumulate=accumulate, clip=1.0, graph="require")
    ids = torch.randint(config.vocabulary, (4, 1024), device="cuda")
    batches = [{"input_ids": ids, "labels": ids}] * accumulate
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step(batches)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    step(batches)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    lasts = torch.cuda.memory_reserved()  # with the pool
    certificates = [graph.certificate for graph in step.captured]
    assert allocated <= ALLOWED * lasts and reserved <= RESERVED * lasts, (allocated, reserved, lasts)
    assert {certificate.snapshot_on for certificate in certificates} >= {"cuda:0 and host memory"}


def test_a_step_of_one_micro_batch_compares_its_gradient_alone():
    step = TrainStep(small(), summed, precision="fp32", graph="require")
    step(draw(2))
    gradient, update = (graph.certificate for graph in step.captured)
    assert not {"m", "v"} & set(gradient.mutated) and len(gradient.mutated) < len(update.mutated)


class Stack(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 8)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def stack(**options) -> Stack:
    torch.manual_seed(0)
    return Stack(**options)


def squares(model, x):
    return model(x).square().sum(), x.numel()


def kept(model, x) -> int:
    """Elements that autograd saved for backward in a forward."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        model(x)
    return sum(sizes)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_same_steps(dropout):
    results = []
    for way in ("none", "blocks"):
        model = stack(dropout=dropout)
        step = TrainStep(model, squares, precision="fp32", graph="off", recompute=way)
        torch.manual_seed(1)
        results.append(([step(torch.randn(4, 8)).read() for _ in range(3)], [p.detach().clone() for p in model.parameters()]))
    (values, weights), (again, weights_again) = results
    assert values == again
    assert all(a.equal(b) for a, b in zip(weights, weights_again))


def test_hugging_face_blocks():
    plain, lean = llama(), llama()
    step = TrainStep(lean, "causal_lm", precision="fp32", graph="off", recompute="blocks")
    assert kept(lean.model, batch(0)["input_ids"]) < kept(plain.model, batch(0)["input_ids"]) / 2
    want = TrainStep(plain, "causal_lm", precision="fp32", graph="off")(batch(0)).read()
    assert step(batch(0)).read() == want
    step.close()
    assert not any(getattr(module, "gradient_checkpointing", False) for module in lean.modules())


def test_what_is_found():
    model = stack()
    assert find_blocks(model) == list(model.blocks)
    assert drops_out(stack(dropout=0.1)) and not drops_out(stack())
    assert drops_out(llama(attention_dropout=0.1)) and not drops_out(llama())
    assert refusal(ValueError, lambda: recompute_blocks(nn.Linear(2, 2))) == message("train/recompute:what_is_found")


def kinds():
    """(model, what runs it) by name: blocks that wrap themselves, and Hugging Face's protocol."""
    return {
        "plain": (stack(), lambda model: model(torch.ones(100, 8))),
        "hugging face": (llama(), lambda model: model.model(batch(0)["input_ids"])),
    }


@pytest.mark.parametrize("kind", kinds())
def test_the_first_so_many(kind):
    """Each more keeps less, the last as little as all of them; and undone, as much as before."""
    model, run = kinds()[kind]
    by_count = []
    for count in range(len(blocks_of(model)) + 1):
        undo = recompute_blocks(model, count)
        by_count.append(kept(run, model))
        undo()
    assert len(blocks_of(model)) == len(by_count) - 1 == {"plain": 3, "hugging face": 2}[kind]
    assert all(more > less for more, less in pairwise(by_count)) and kept(run, model) == by_count[0]
    undo = recompute_blocks(model)
    assert kept(run, model) == by_count[-1]
    undo()
    said = refusal(ValueError, lambda: recompute_blocks(model, 9))
    assert said == message("train/recompute:the_first_so_many", len(by_count) - 1)


def test_the_first_are_those_that_recompute():
    model = stack()
    recompute_blocks(model, 2)
    assert ["forward" in block.__dict__ for block in model.blocks] == [True, True, False]


def test_what_is_asked_for():
    assert doctest.testmod(offload).failed == 0
    assert [parse(word) for word in ("none", "blocks", "7", 7)] == [("none", 0), ("blocks", 0), ("count", 7), ("count", 7)]
    with pytest.raises(ValueError, match="40 GB"):
        parse("40 GB")
