"""TrainStep: the right update for any cut of the batch, in every precision; bad steps skipped; state resumes; errors."""

import copy
import gc
import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpubound import trace
from gpubound.data import feed
from gpubound.distributed import ALONE, Ranks
from gpubound.graph.memory import CopyBudget, StorageCopy
from gpubound.kernels.adamw import join_fp32
from gpubound.train import AdamW, AdamW8bit, Schedule, TrainStep
from gpubound.train.adamw import Weights
from gpubound.train.loop import Ema
from tests.messages import message

from .conftest import cut, draw, named, small, spoiled, summed, usual_step

SIXTEEN_BITS = ("bf16", "bf16-pure", "bf16-split", "fp16")


@pytest.mark.parametrize("graph", ["off", "require"])
def test_the_halves_of_a_call_are_the_call(graph):
    """Micro-batches by `add`, more than `accumulate` at first, then one: the bits of lists that hold them."""
    (whole, want), (halves, got) = [
        (model, TrainStep(model, summed, AdamW(lr=1e-2), accumulate=n, clip=0.5, precision="fp32", graph=graph))
        for model, n in ((small(), 4), (small(), 2))
    ]
    for count in (4, 1, 3):
        batches = cut(draw(2 * count, seed=count), count)
        expected = want(batches).read()
        for batch in batches:
            got.add(batch)
        assert repr(got.update().read()) == repr(expected)
    assert all(torch.equal(named(whole)[name], weight) for name, weight in named(halves).items())
    with pytest.raises(ValueError, match=r"add\(micro_batch\)"):
        got.update()
    got.add(batches[0])
    with pytest.raises(ValueError, match=r"update\(\)"):
        got(batches[0])
    with pytest.raises(ValueError, match="accumulate=1"):
        TrainStep(small(), summed).add(batches[0])


def test_gradients_of_a_failed_half_are_dropped():
    model, other = small(), small()
    step, alone = (TrainStep(m, summed, AdamW(lr=1e-2), accumulate=2, precision="fp32", graph="off") for m in (model, other))
    batch = draw(4, seed=1)
    step.add(batch)
    refused = Exception()

    def fail(*_):
        raise refused

    hook = model.register_forward_hook(fail)
    with pytest.raises(Exception) as caught:
        step.add(batch)
    assert caught.value is refused
    hook.remove()
    step.add(batch)
    alone.add(batch)
    assert step.update().read().tokens == alone.update().read().tokens
    assert all(torch.equal(named(other)[name], weight) for name, weight in named(model).items())


def test_ten_updates_are_torch_adamw():
    """Against the usual loop over the whole batch: mean loss, clip_grad_norm_, torch.optim.AdamW with a no-decay group."""
    model = small()
    theirs = copy.deepcopy(model)
    decaying = [p for p in theirs.parameters() if p.dim() > 1]
    rest = [p for p in theirs.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decaying}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1)
    step = TrainStep(model, summed, AdamW(lr=1e-2, weight_decay=0.1), accumulate=3, clip=0.5, precision="fp32", graph="off")
    for i in range(10):
        loss, norm = usual_step(theirs, draw(16, seed=i), optimizer)
        values = step(cut(draw(16, seed=i), 3)).read()
        assert values.grad_norm == pytest.approx(norm, rel=1e-5)
        assert values.loss == pytest.approx(loss, rel=1e-5)
    for (name, got), want in zip(model.named_parameters(), theirs.parameters()):
        assert (got - want).norm() <= 1e-6 * want.norm(), name


@pytest.mark.parametrize("precision, dtype", [(n, torch.float16 if n == "fp16" else torch.bfloat16) for n in SIXTEEN_BITS])
def test_16_bit_weights_follow_fp32_training(precision, dtype):
    losses = {}
    for kind in ("fp32", precision):
        model = small(tied=False)
        step = TrainStep(model, summed, AdamW(lr=3e-2), accumulate=2, precision=kind, graph="off")
        losses[kind] = [step(cut(draw(8), 2)).read().loss for i in range(40)]
    assert all(p.dtype == dtype for p in model.parameters())
    assert losses["fp32"][-1] < 0.7 * losses["fp32"][0]
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.02)


def down(model, batch):
    return model(batch).float().sum(), 1


def test_masters_keep_what_16_bits_lose():
    """Each update is 1e-4, and the next bf16 below one is 1 - 2^-8: ten updates must still be there."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    step = TrainStep(model, down, AdamW(lr=1e-4, weight_decay=0.0), precision="bf16", graph="off")
    for _ in range(10):
        step(torch.ones(1, 4))
    assert step.state_dict()["master.weight"].flatten().tolist() == pytest.approx([1 - 1e-3] * 4, abs=1e-5)
    assert model.weight.eq(1).all()
    for _ in range(30):
        step(torch.ones(1, 4))
    assert model.weight.eq(1 - 2**-8).all(), "1 - 0.004 rounds to the next bf16 below one"


@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-3), AdamW8bit(lr=1e-3)], ids=lambda config: type(config).__name__)
def test_a_weight_and_its_remainder_are_the_master(optimizer):
    """The bits of fp32 masters, in half of their bytes, where the gradient does not depend on the weights' rounding."""

    def weighted(model, batch):
        return sum((p.float() * g).sum() for p, g in zip(model.parameters(), batch)), 1

    masters, steps = {}, {}
    for precision in ("bf16", "bf16-split"):
        model = small()
        steps[precision] = step = TrainStep(model, weighted, optimizer, precision=precision, graph="off")
        for i in range(20):
            generator = torch.Generator().manual_seed(i)
            step(tuple(torch.randn(p.shape, generator=generator) for p in model.parameters()))
        state = step.state_dict()
        for name, parameter in model.named_parameters():
            if precision == "bf16-split":
                rest = state[f"remainder.{name}"]
                assert join_fp32(parameter.detach(), rest).equal(masters[name]) and rest.dtype == torch.int16
            else:
                masters[name] = state[f"master.{name}"].clone()
    assert steps["bf16-split"].memory["masters"] == steps["bf16"].memory["masters"] // 2


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_that_are_written_stay_finite_numbers(zero):
    """A zero and a negative remainder of the weight that was there would be the bits of NaN. A step sees no write to .data."""
    step = TrainStep(small(), summed, AdamW(lr=1e-3), precision="bf16-split", graph="off")
    step(draw(4))
    ((_, flat, remainder),) = step.flat_weights.rounded
    assert (remainder < 0).any()
    for parameter in step.model.parameters():
        parameter.data.fill_(zero)
    step(draw(4))
    assert flat.isfinite().all() and flat.abs().max() < 2e-3 and join_fp32(flat, remainder).isfinite().all()


def test_a_certificate_compares_masters_not_remainders():
    """A remainder is a part of its weight's last place: the numbers that two of them stand for are near."""
    step = TrainStep(small(), summed, AdamW(lr=1e-3), precision="bf16-split", graph="off")
    ((_, flat, remainder),) = step.flat_weights.rounded
    kept = StorageCopy(remainder, "remainder", CopyBudget(torch.device("cpu")))
    other = torch.arange(len(remainder)).mul_(997).remainder_(1 << 16).sub_(1 << 15)
    remainder.copy_(torch.where(flat == 0, 0, other))
    difference = kept.difference()
    assert not difference.bitwise and difference.relative < 2.0**-7


def test_the_average_is_that_of_the_fp32_weights():
    model = small()
    step = TrainStep(model, summed, AdamW(lr=1e-3), precision="bf16-split", graph="off")
    ema = Ema(step, 0.5)

    def fp32() -> dict[str, torch.Tensor]:
        state = step.state_dict()
        return {name: join_fp32(p.detach(), state[f"remainder.{name}"]) for name, p in model.named_parameters()}

    want = fp32()
    for i in range(3):
        step(draw(4, seed=i))
        ema.update()
        want = {name: want[name].lerp(weight, 1 - min(0.5, (2 + i) / (11 + i))) for name, weight in fp32().items()}
    for name, average in ema.average.items():
        torch.testing.assert_close(average, want[name], rtol=1e-6, atol=1e-9)


def test_pure_bf16_is_right_on_average():
    """The same without masters: rounding to the nearest would stay at one for ever, rounding at random arrives."""
    model = nn.Linear(4000, 1, bias=False)
    nn.init.ones_(model.weight)
    step = TrainStep(model, down, AdamW(lr=1e-4, weight_decay=0.0), precision="bf16-pure", graph="off")
    for _ in range(100):
        step(torch.ones(1, 4000))
    assert "master.weight" not in step.state_dict()
    assert model.weight.float().mean().item() == pytest.approx(1 - 1e-2, abs=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_step_is_skipped_and_counted(bad):
    """One micro-batch of three is not finite: nothing changes bit for bit but the count, and the next step goes on."""
    model, schedule = small(), Schedule("linear", steps=9)
    step = TrainStep(model, spoiled, accumulate=3, clip=1.0, precision="bf16", graph="off", schedule=schedule)

    def window(factors):
        return [(*part, torch.tensor(f)) for part, f in zip(cut(draw(6), 3), factors)]

    assert step(window([1.0, 1, 1])).read().skipped == 0
    before, weights = {k: v.clone() for k, v in step.state_dict().items()}, named(model)
    values = step(window([1.0, bad, 1])).read()
    assert (values.skipped, values.updates) == (1, 1)
    after = step.state_dict()
    assert after.pop("state").tolist() == [1, 1, 1, 0]
    before.pop("state")
    assert all(after[name].equal(before[name]) for name in before)
    assert all(p.equal(weights[name]) for name, p in model.named_parameters())
    values = step(window([1.0, 1, 1])).read()
    assert (values.skipped, values.updates) == (1, 2)
    assert values.lr == pytest.approx(1e-3 * 8 / 9), "a skipped step uses no rate up"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_without_items_changes_nothing_and_is_not_skipped(precision):
    model = small()
    step = TrainStep(model, summed, precision=precision, graph="off", schedule=Schedule("linear", steps=9))
    step(draw(2))
    ids, labels = draw(2)
    before, state = named(model), {name: t.clone() for name, t in step.state_dict().items()}
    values = step((ids, torch.full_like(labels, -100))).read()
    assert (values.skipped, values.updates, values.tokens) == (0, 1, 0) and math.isnan(values.loss)
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    assert all(t.equal(state[name]) for name, t in step.state_dict().items())


def test_the_average_moves_only_with_the_weights():
    """A step that is not finite, and one without items, leave it and its decay as they were: against the recurrence."""
    model = small()
    step = TrainStep(model, spoiled, precision="fp32", graph="off")
    average, (name, weight) = Ema(step, 0.9), next(model.named_parameters())
    wanted, (ids, labels) = weight.detach().clone(), draw(2)
    updates = 0
    for factor, labels_now in ((1.0, labels), (float("nan"), labels), (1.0, torch.full_like(labels, -100)), (2.0, labels)):
        step((ids, labels_now, torch.tensor(factor)))
        average.update()
        if factor == factor and (labels_now != -100).any():
            updates += 1
            decay = min(0.9, (1 + updates) / (10 + updates))
            wanted = decay * wanted + (1 - decay) * weight.detach()
        torch.testing.assert_close(average.average[name], wanted, rtol=1e-6, atol=1e-7)
    assert updates == 2


def test_fp16_scale_halves_until_it_fits_and_the_update_does_not_feel_it():
    model, twin = small(tied=False), small(tied=False)
    ours = TrainStep(model, summed, precision="fp16", graph="off", clip=1.0)
    other = TrainStep(twin, summed, precision="fp16", graph="off", clip=1.0)
    other.state_dict()["state"][2] = 2.0**30  # overflows fp16
    first = ours(draw(8)).read()
    values = [other(draw(8)).read() for _ in range(25)]
    skipped = values[-1].skipped
    assert 5 < skipped < 25 and values[skipped - 1].updates == 0
    assert values[skipped].grad_norm == pytest.approx(first.grad_norm, rel=1e-2)
    assert values[skipped].loss == pytest.approx(first.loss, rel=1e-3)
    assert values[-1].loss_scale == 2.0 ** (30 - skipped)


def test_a_frozen_part_of_another_dtype_is_named():
    model = small()
    model.mix.requires_grad_(False)
    step = TrainStep(model, summed, AdamW(lr=1e-2), precision="bf16", graph="off")
    with pytest.raises(ValueError, match=r"mix.weight is frozen and torch.float32, .* torch.bfloat16"):
        step(draw(4))
    step.close()
    model.mix.to(torch.bfloat16)
    step = TrainStep(model, summed, AdamW(lr=1e-2), precision="bf16", graph="off")
    assert step(draw(4)).read().updates == 1


def test_ragged_last_window_from_an_iterator():
    """Seven batches in windows of three: the last holds one, and is that batch's own step."""
    batches = [draw(2, seed=i) for i in range(7)]
    model = small()
    step = TrainStep(model, summed, AdamW(lr=1e-2), accumulate=3, precision="fp32", graph="off")
    source, tokens = iter(batches), []
    while (result := step(source)) is not None:
        tokens.append(result.read().tokens)
    counts = [(labels != -100).sum().item() for _, labels in batches]
    assert tokens == [sum(counts[:3]), sum(counts[3:6]), counts[6]]
    twin = small()
    again = TrainStep(twin, summed, AdamW(lr=1e-2), accumulate=3, precision="fp32", graph="off")
    for window in (batches[:3], batches[3:6], batches[6:]):
        again(window)
    assert all(a.equal(b) for a, b in zip(model.parameters(), twin.parameters()))


def test_a_feed_is_drawn_from_epoch_after_epoch():
    batches = [draw(2, seed=i) for i in range(5)]
    counts = [(labels != -100).sum().item() for _, labels in batches] * 2
    source = feed(batches, device="cpu")
    step = TrainStep(small(), summed, accumulate=2, precision="fp32", graph="off")
    assert [step(source).read().tokens for _ in range(4)] == [counts[i] + counts[i + 1] for i in (0, 2, 4, 6)]
    assert (source.epoch, source.batch) == (1, 3)


def test_results_are_this_steps_own():
    model = small()
    step = TrainStep(model, summed, precision="fp32", graph="off")
    results = [step(draw(2, seed=i)) for i in range(12)]
    losses = [float(r.loss) for r in results]
    assert len(set(losses)) == 12
    assert [r.read().loss for r in results] == losses
    assert [r.read().updates for r in results] == list(range(1, 13))


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("precision", ["fp32", *SIXTEEN_BITS])
def test_state_resumes_bit_for_bit(precision, weights_first):
    def fresh():
        model = small()
        schedule = Schedule("cosine", steps=12, warmup=3)
        return model, TrainStep(
            model, summed, AdamW(lr=1e-2), accumulate=2, clip=0.5, precision=precision, graph="off", schedule=schedule
        )

    def run(step, start, stop):
        return [step(cut(draw(4, seed=i), 2)).read() for i in range(start, stop)]

    model, step = fresh()
    run(step, 0, 5)
    saved = {k: v.clone() for k, v in step.state_dict().items()}, {k: v.clone() for k, v in model.state_dict().items()}
    want = run(step, 5, 10)
    again, resumed = fresh()
    loads = [lambda: again.load_state_dict(saved[1]), lambda: resumed.load_state_dict(saved[0])]
    for load in loads if weights_first else loads[::-1]:
        load()
    assert run(resumed, 5, 10) == want
    assert all(a.equal(b) for a, b in zip(model.parameters(), again.parameters()))


def test_weights_loaded_from_elsewhere_become_the_masters():
    model, other = small(), small(seed=1).bfloat16()
    step = TrainStep(model, summed, AdamW(lr=0.0), precision="bf16", graph="off")
    fine = step.state_dict()["master.mix.weight"].clone()
    model.embed.load_state_dict(other.embed.state_dict())
    step(draw(2))
    assert model.embed.weight.equal(other.embed.weight)
    assert step.state_dict()["master.embed.weight"].equal(other.embed.weight.float())
    assert step.state_dict()["master.mix.weight"].equal(fine), "untouched masters keep their precision"


def test_weights_have_storages_of_their_own_in_a_state_dict():
    """Who saves them knows tied ones by that: accelerate took all weights in one buffer for the first, and left them out."""
    model = small()
    step = TrainStep(model, summed, AdamW(lr=1e-2), precision="bf16", graph="off")
    tied = {"embed.weight", "head.weight"}
    for _ in range(2):
        with torch.inference_mode():
            state = model.state_dict()
        storages = {name: tensor.untyped_storage() for name, tensor in state.items()}
        assert len({storage._cdata for storage in storages.values()}) == len(state) - 1
        assert len({storages[name]._cdata for name in tied}) == 1
        assert all(storages[name].nbytes() == tensor.nbytes for name, tensor in state.items())
        state["mix.weight"].fill_(0.5)  # live, as torch's are
        assert model.mix.weight.eq(0.5).all()
        if not step._closed:
            step(draw(2))
            assert (step.weights["mix.weight"][1] - 0.5).abs().max() < 0.1, "their masters follow"
        step.close()


def test_a_state_dict_keeps_the_buffer_that_its_weights_lie_in():
    model = small()
    step = TrainStep(model, summed, AdamW(lr=1e-2), precision="fp32", graph="off")
    buffer, state = StorageWeakRef(model.mix.weight.untyped_storage()), model.state_dict()
    step.close()
    del model, step
    gc.collect()
    assert not buffer.expired()
    del state
    assert buffer.expired()


@pytest.mark.parametrize("graph", ["off", "auto"])
def test_only_somebody_elses_writes_are_read_back(graph, monkeypatch):
    """A step raises the weights' versions, for those who watch them; it once took that for news and read all weights back."""
    read = []
    monkeypatch.setattr(Weights, "_read_back", lambda self: read.append(self))
    model = small()
    step = TrainStep(model, summed, precision="bf16", graph=graph)
    versions = [p._version for p in model.parameters()]
    for seed in range(3):
        step(draw(2, seed=seed))
    assert not read and all(p._version > before for p, before in zip(model.parameters(), versions))
    with torch.no_grad():
        model.mix.weight.mul_(2)
    step(draw(2))
    step(draw(2))
    assert len(read) == 1


def test_a_rate_set_by_hand_holds():
    step = TrainStep(small(), summed, precision="fp32", graph="off", schedule=Schedule("linear", steps=4))
    assert step(draw(2)).read().lr == pytest.approx(1e-3)
    step.lr = 4e-3
    assert step(draw(2)).read().lr == pytest.approx(3e-3) and step.lr == 4e-3


def test_ranks_sum_once_before_the_norm():
    """Two ranks with the same data are one with each item twice: same mean, same norm, twice the tokens."""
    calls = []

    class Twice(Ranks):
        def begin_sum(self, tensor):
            calls.append(tensor.shape)
            tensor.mul_(2)
            return super().begin_sum(tensor)

    alone, both = (
        TrainStep(small(), summed, accumulate=3, precision="fp32", graph="off", ranks=ranks)(cut(draw(6), 3)).read()
        for ranks in (ALONE, Twice())
    )
    assert len(calls) == 2, "the gradient, and the totals"
    assert (both.loss, both.grad_norm) == pytest.approx((alone.loss, alone.grad_norm), rel=1e-6)
    assert both.tokens == 2 * alone.tokens


def test_floating_point_inputs_are_cast():
    def squares(model, batch):
        x, y = batch
        return (model(x).float() - y).square().sum(), y.numel()

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    step = TrainStep(model, squares, AdamW(lr=1e-2), precision="bf16", graph="off")
    batch = torch.randn(8, 3), torch.randn(8, 2)
    losses = [step(batch).read().loss for _ in range(50)]
    assert losses[-1] < 0.9 * losses[0]
    average = copy.deepcopy(model)
    assert average(batch[0]).dtype == torch.bfloat16
    assert average.float()(batch[0]).equal(nn.Sequential(*average)(batch[0])), "a copy that is kept in fp32 is given fp32"
    step.close()
    assert not model._forward_pre_hooks


def test_memory_is_told_before(capsys):
    model = nn.Linear(64, 32)
    step = TrainStep(model, summed, precision="bf16", graph="off")
    flat = 64 * 32 + 64  # the bias of 32 takes a slot of 64
    assert step.memory == {"weights": 2 * flat, "masters": 4 * flat, "gradient": 4 * flat, "moments": 8 * flat}
    assert message("train/step:memory_is_told_before").within(capsys.readouterr().err)


def test_a_step_that_is_dropped_gives_the_model_back():
    """Its hooks held the flat buffers for ever, and gradients of a usual loop went into them: .grad stayed None."""
    model = small()
    step = TrainStep(model, summed, precision="bf16", graph="off")
    step(draw(2))
    sums = StorageWeakRef(model.mix.weight.main_grad.untyped_storage())
    del step
    gc.collect()
    assert not any(hasattr(p, "main_grad") for p in model.parameters()) and not model._forward_pre_hooks
    assert sums.expired()
    TrainStep(model, summed, precision="bf16", graph="off")(draw(2))
    summed(model, draw(2))[0].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_optimizer_that_moves_nothing_is_told_of(said):
    model = small()
    usual, step = torch.optim.SGD(model.parameters(), lr=0.1), TrainStep(model, summed, precision="fp32", graph="off")
    step(draw(2))
    assert "moves nothing" not in said()
    summed(model, draw(2))[0].backward()
    usual.step()
    assert message("train/step:an_optimizer_that_moves").within(said())
    step.close()
    summed(model, draw(2))[0].backward()
    before = model.mix.weight.detach().clone()
    usual.step()
    assert "moves nothing" not in said() and not model.mix.weight.equal(before)


def test_nothing_fell_back(monkeypatch):
    """A few steps of each precision, counted by themselves."""
    monkeypatch.setattr(trace, "fallbacks", Counter())
    for precision in ("fp32", *SIXTEEN_BITS):
        step = TrainStep(small(), summed, precision=precision, accumulate=2, clip=1.0)
        assert step(cut(draw(4), 2)).read().updates == 1
    assert not trace.fallbacks
