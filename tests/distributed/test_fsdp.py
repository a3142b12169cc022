"""Ranks that each hold their rows of every parameter take the steps of one process, and begin with its model's values."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import gpubound as gb
from gpubound.distributed import ALONE, join
from gpubound.distributed.fsdp import shard, shard_deferred
from gpubound.errors import GraphError
from gpubound.layers.linear_product import LEAST_BYTES
from gpubound.models.diffusion.objective import MaskedDiffusion
from gpubound.models.llama import Decoder, DecoderConfig
from gpubound.models.richards import RichardsConfig, RichardsDecoder
from gpubound.train import sharding
from gpubound.train.adamw import AdamW8bit, Muon
from gpubound.train.loop import Ema
from gpubound.train.offload import blocks_of, recompute_from
from tests.distributed.processes import each_on_ranks, on_ranks

STEPS, WORDS = 3, 26
ADAMW = gb.AdamW(lr=1e-2, weight_decay=0.1, eps=1e-4)  # with 1e-8 a gradient of nothing but noise moves by the rate

SGD = partial(torch.optim.SGD, lr=0.3)


def llama(seed: int) -> nn.Module:
    """26 words and 6 rows of a key: over 4 ranks the last one has fewer rows of the table, and none of the key."""
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(24, 40, 2, 4, 1, WORDS, tied=True))


def batch(step: int, number: int) -> dict[str, torch.Tensor]:
    """Micro-batch `number` of a step: another one has other words, and another count of valid ones."""
    g = torch.Generator().manual_seed(100 * step + number)
    words, labels = torch.randint(WORDS, (2, 6), generator=g), torch.randint(WORDS, (2, 6), generator=g)
    labels[:, 6 - number % 4 :] = -100
    return {"input_ids": words, "labels": labels}


class SeededDiffusion(MaskedDiffusion):
    """Masks that follow from the batch, whichever process draws them."""

    def __call__(self, model, batch, scale=None):
        torch.manual_seed(int(batch["input_ids"].sum()))
        return super().__call__(model, batch, scale)

    def split(self, batch):
        return super().split(batch | {"labels": batch["input_ids"]})


def hugging_face(seed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    return gb.place(LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, **sizes)).train(), "cpu").model


def mixture(seed):
    """Three experts, which two ranks do not divide, and a loss that wants their load even."""
    torch.manual_seed(seed)
    return RichardsDecoder(RichardsConfig(16, 24, 2, 2, 2, WORDS, mlp="moe", experts=3, balance=0.5))


def denoiser(seed):
    torch.manual_seed(seed)
    return RichardsDecoder(RichardsConfig(16, 24, 2, 2, 2, WORDS, causal=False))


def wider(seed):
    """What the kernels of a GPU take."""
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(64, 128, 2, 4, 2, 256, tied=True))


def trained(
    world: int, each: int, optimizer=ADAMW, precision="fp32", full=False, make=llama, objective="next_token", device="cpu",
    least=LEAST_BYTES, **options,
):  # fmt: skip
    """Three steps of `world` ranks with `each` micro-batches a step: the whole weights, the reports, and what a rank holds.

    `full`: as a GPU with a hundredth of its memory left. `least`: bytes of a result that is computed again.
    """
    with counted_sums(full) as sums, join(device) if world > 1 else nullcontext(ALONE) as ranks:
        model = make(ranks.rank).to(device if world == 1 else ranks.device)  # the first rank's weights are everyone's
        if world > 1:
            shard(model, blocks_of(model), ranks, DTYPES[precision])
        step = gb.TrainStep(
            model, objective, optimizer, accumulate=each, clip=0.5, precision=precision, graph="off", ranks=ranks, **options
        )
        recompute_from(model, least)
        average = Ema(step, 0.9)
        reports = []
        for number in range(STEPS):
            micro_batches = [batch(number, ranks.rank + world * i) for i in range(each)]
            if objective != "next_token":  # tokens in their own places
                for one in micro_batches:
                    one["labels"] = one["input_ids"].where(one["labels"] != -100, -100)
            said = step([{k: t.to(step.device) for k, t in one.items()} for one in micro_batches]).read()
            average.update()
            sums.append(0)
            reports.append((said.loss, said.grad_norm, said.tokens, said.skipped))
        state = {name: whole(tensor) for name, tensor in step.state_dict().items()}
        state |= {f"average.{name}": whole(tensor) for name, tensor in average.state().items()}
        step.close()
        weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
        return weights, reports, state, step.memory | {"sums": sums}


@contextmanager
def counted_sums(full=False):
    """How often FSDP sums gradients, in the last number of a list."""
    counts, original = [0], _fsdp_param_group.foreach_reduce

    def reduced(*args):
        counts[-1] += 1
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, "foreach_reduce", reduced)
        if full:
            patch.setattr(sharding, "memory_used", lambda device: (99, 100))
        yield counts


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().float().cpu().numpy().copy()


def equal(wanted, got, rtol=1e-6, atol=1e-6):
    assert wanted.keys() == got.keys()
    for name in wanted:
        torch.testing.assert_close(torch.from_numpy(got[name]), torch.from_numpy(wanted[name]), rtol=rtol, atol=atol, msg=name)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("world, each, full", [(4, 1, False), (2, 4, False), (2, 2, True)])
def test_ranks_that_share_the_rows_are_one_process(world, each, full):
    """Two blocks and the rest are summed apart: with each micro-batch of the first step, and then, if there is room, once."""
    weights, reports, state, memory = trained(1, world * each)
    for theirs, said, their_state, their_memory in on_ranks(world, partial(trained, full=full), world, each):
        assert their_memory["sums"] == [3 * each] + [3 * each if full else 3] * (STEPS - 1) + [0]
        for a, b in zip(reports, said):
            assert b == pytest.approx(a, rel=2e-6)
        equal(weights, theirs)
        equal(state, their_state)
        for part in ("weights", "gradient", "moments"):
            padding = len(weights) * 64 * 4 * (2 if part == "moments" else 1)  # each begins at a multiple of 64
            assert their_memory[part] <= memory[part] / world + padding


WAYS: dict[str, dict] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "8 bits": {"optimizer": AdamW8bit(1e-2, eps=1e-4)},
    "recompute": {"recompute": "blocks"},
    "computed again": {"least": 0},
    "computed again, placed": {"make": hugging_face, "objective": "causal_lm", "least": 0},
    "experts": {"make": mixture},
    "diffusion": {"make": denoiser, "objective": SeededDiffusion(mask_token=WORDS - 1)},
}


@pytest.fixture(scope="module")
def two_ranks():
    return each_on_ranks(2, {name: partial(trained, 2, 1, **way) for name, way in WAYS.items()})


@pytest.mark.parametrize("name, off", [("bf16", 0.2), ("fp16", 0.2), ("8 bits", 0.2), ("recompute", 1e-4)])
def test_shards_in_other_numbers_are_one_process_in_those(name, off, two_ranks):
    """Held to how far the weights have moved. bf16: two gradients are rounded before they are added. 8 bits: blocks of 256
    numbers begin elsewhere."""
    near(trained(1, 2, **WAYS[name]), two_ranks[name], llama(0), off)


@pytest.mark.parametrize("name", ["computed again", "computed again, placed", "experts", "diffusion"])
def test_other_losses_and_results_that_are_computed_again_are_those_of_one_process(name, two_ranks):
    weights, reports, state, _ = trained(1, 2, **WAYS[name])
    for theirs, said, their_state, _ in two_ranks[name]:
        for one, other in zip(reports, said):
            assert other == pytest.approx(one, rel=2e-6)
        equal(weights, theirs)
        equal(state, their_state)


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_shards_on_gpus_are_one_gpu():
    """Over NCCL, in bf16, with two micro-batches, whose sums wait for the last one from the second step on. Results of any size
    are computed again."""
    options = {"precision": "bf16", "make": wider, "device": "cuda", "least": 0}
    ranks = on_ranks(2, partial(trained, **options), 2, 2)
    near(trained(1, 4, **options), ranks, wider(0), 0.2)
    assert all(memory["sums"] == [6, 3, 3, 0] for *_, memory in ranks)


def near(alone, ranks, began, off):
    """Reports are one process's, and weights, beside how far they have moved."""
    weights, reports, _, _ = alone
    moved = distance(weights, {name: tensor.numpy() for name, tensor in began.state_dict().items()})
    for theirs, said, _, _ in ranks:
        for one, other in zip(reports, said):
            assert other[:2] == pytest.approx(one[:2], rel=max(off / 10, 1e-5)) and other[2:] == one[2:]
        assert distance(weights, theirs) < off * moved


def distance(one, other):
    return sum(((other[name] - one[name]) ** 2).sum() for name in one) ** 0.5


class Own(nn.Module):
    """A user's: a bias of 3, so that of 4 ranks one has nothing of it, and layers of one class that are called as modules."""

    def __init__(self):
        super().__init__()
        self.blocks, self.last = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7)), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.blocks(x)))


def own_loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)


def rows_of(step, rank):
    g = torch.Generator().manual_seed(10 * step + rank)
    n = 2 + rank  # ranks have different numbers of items: the mean over all is not the mean of their means
    return torch.randn(n, 5, generator=g), torch.randint(3, (n,), generator=g)


def own(optimizer, recast=False, graph="auto"):
    with join("cpu") as ranks:
        torch.manual_seed(0)
        model = Own()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if recast else MixedPrecisionPolicy()
        for block in (*model.blocks, model):
            fully_shard(block, mp_policy=policy)
        said = ""
        try:
            step = gb.TrainStep(model, own_loss, optimizer, precision="fp32", graph=graph)
        except (ValueError, GraphError) as error:
            said = str(error)
            step = None
        losses = [step(rows_of(number, ranks.rank)).read().loss for number in range(STEPS)] if step else []
        if step:
            step.close()
        return losses, {name: whole(p) for name, p in model.named_parameters()}, said


def test_a_users_own_sharded_model_takes_the_steps_of_plain_torch():
    world = 4
    torch.manual_seed(0)
    model, wanted = Own().double(), []
    for number in range(STEPS):
        x, y = (torch.cat(parts) for parts in zip(*(rows_of(number, rank) for rank in range(world))))
        mean = nn.functional.cross_entropy(model(x.double()), y)
        wanted.append(mean.item())
        for p, grad in zip(model.parameters(), torch.autograd.grad(mean, list(model.parameters()))):
            p.data -= 0.3 * grad
    for losses, weights, said in on_ranks(world, own, SGD):
        assert not said and losses == pytest.approx(wanted, rel=1e-5)
        equal({name: whole(p) for name, p in model.named_parameters()}, weights, 1e-5)


def test_what_cannot_train_in_shards_is_refused_with_the_way_out():
    refused = {
        (Muon(),): "TrainStep: Muon makes whole matrices orthogonal, and this model is sharded: a rank has some rows",
        (torch.optim.Adafactor,): "TrainStep: Adafactor looks at whole matrices, or at all of them, and this model is",
        ("adamw", True): "parameters: fully_shard of blocks.0.weight computes in torch.bfloat16, sums gradients in torch.bfl",
        ("adamw", False, "require"): "TrainStep: the model is sharded, and its gathering of weights is not captured; take",
    }
    ranks = each_on_ranks(2, {sentence: partial(own, *given) for given, sentence in refused.items()})
    assert all(said.startswith(sentence) for sentence, found in ranks.items() for *_, said in found)


SHAPE = DecoderConfig(24, 40, 2, 4, 1, 26, tied=True, qkv_bias=True)
SMALL = 16, 24, 2, 2, 2, 26


class Computed(nn.Module):
    """Its weight is a product of random numbers."""

    def __init__(self, device):
        super().__init__()
        layer = nn.Linear(3, 3, device=device)
        layer.weight = nn.Parameter(torch.empty(3, 3, device=device).normal_().matmul(torch.ones(3, 3, device=device)))
        self.layers = nn.ModuleList([layer])


def made(make):
    with join("cpu") as ranks:
        torch.manual_seed(ranks.rank)  # the first rank's generator is everyone's
        model = shard_deferred(make, lambda model: getattr(model, "model", model).layers, ranks, torch.float32)
        drawn = torch.rand(3).tolist()
        weights = {name: p.full_tensor().detach().numpy().copy() for name, p in model.named_parameters()}
        if not isinstance(model, Decoder):
            return weights, drawn, None
        step = gb.TrainStep(model, "causal_lm", precision="fp32", ranks=ranks)
        return weights, drawn, step(words()).read().loss


def words():
    ids = torch.arange(12).view(2, 6)
    return {"input_ids": ids, "labels": ids}


def untied(device):
    return Decoder(replace(SHAPE, tied=False), device=device)


def tied(device):
    return Decoder(SHAPE, device=device)


@pytest.mark.parametrize("make", [tied, untied, Computed])
def test_shards_are_those_of_the_model_that_the_first_rank_makes(make):
    """Also of values that are computed, and from then on all generators are the first rank's."""
    torch.manual_seed(0)
    model = make("cpu")
    wanted, after = dict(model.named_parameters()), torch.rand(3).tolist()
    for theirs, drawn, loss in on_ranks(2, made, make):
        assert theirs.keys() == wanted.keys() and drawn == after
        for name, parameter in wanted.items():
            torch.testing.assert_close(torch.from_numpy(theirs[name]), parameter.data, rtol=0, atol=0, msg=name)
        if isinstance(model, Decoder):
            assert loss == pytest.approx(model.loss(**words()).item(), rel=1e-6)
