"""The captured step: the eager one bit for bit, the state untouched by capturing, shapes apart, reasons said."""

import gc
import sys
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules import module as nn_module

from gpubound.distributed import Ranks
from gpubound.errors import GraphError
from gpubound.graph import discover, guards, recording
from gpubound.models import Decoder, DecoderConfig
from gpubound.trace import fallbacks
from gpubound.train import AdamW, Schedule, TrainStep, graph_cache, step_inputs
from tests.messages import message

from ..graph.tape import TapeRunner
from ..place.models import place, tiny
from .conftest import cut, draw, named, small, spoiled, summed


def window(i: int, bad: bool) -> list:
    return [(*part, torch.tensor(float("nan") if bad and j == 1 else 1.0)) for j, part in enumerate(cut(draw(6, seed=i), 3))]


def twenty_steps(graph: str, precision: str, dropout: float = 0.0, device: str = "cpu"):
    """Three micro-batches, a clip that binds, a schedule, two steps that are not finite, a window of two at the end."""
    model = small(dropout=dropout).to(device)
    torch.manual_seed(7)
    step = TrainStep(
        model, spoiled, AdamW(lr=1e-2, betas=(0.9, 0.95)), accumulate=3, clip=0.3, precision=precision, graph=graph,
        schedule=Schedule("cosine", steps=20, warmup=0.2),
    )  # fmt: skip
    windows = [window(i, bad=i in (4, 11)) for i in range(20)]
    windows[-1].pop()
    values = [step([tuple(t.to(device) for t in batch) for batch in batches]).read() for batches in windows]
    return step, values, named(model)


def assert_same(graph: str, precision: str, dropout: float, device: str, captures: int) -> None:
    step, values, weights = twenty_steps(graph, precision, dropout, device)
    plain, want, weights_want = twenty_steps("off", precision, dropout, device)
    assert len(step.captured) == captures and not plain.captured
    assert values[-1].skipped == 2 and values[-1].updates == 18
    assert [repr(v) for v in values] == [
        repr(v) for v in want
    ]  # a skipped step's loss is NaN, which equals nothing but its name
    assert all(weights[name].equal(weights_want[name]) for name in weights)
    state, state_want = step.state_dict(), plain.state_dict()
    assert all(state[name].equal(state_want[name]) for name in state_want)


def ours():
    return Decoder(DecoderConfig(hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2, vocabulary=64))


def placed():
    place(model := tiny().train())
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [ours, placed])
def test_longer_rows_leave_the_shorter_ones_graph_as_it_is(make):
    """A longer batch wants a longer table of angles. Any module that is made has a graph look at all that it reads."""

    def losses(graph: str) -> list[float | None]:
        torch.manual_seed(0)
        step = TrainStep(make(), "causal_lm", AdamW(lr=1e-2), precision="fp32", graph=graph)
        found = []
        for tokens in (8, 40, 8, 90, 40, 8):
            torch.nn.Linear(1, 1)
            ids = torch.randint(64, (2, tokens), generator=torch.Generator().manual_seed(len(found)))
            found.append(step([{"input_ids": ids, "labels": ids}]).read().loss)
        return found

    assert losses("require") == losses("off")


@pytest.mark.parametrize(
    "precision, dropout", [("fp32", 0.2), ("bf16", 0.0), ("bf16-pure", 0.0), ("bf16-split", 0.0), ("fp16", 0.0)]
)
def test_captured_is_eager_bit_for_bit(precision, dropout):
    assert_same("require", precision, dropout, "cpu", captures=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "bf16-pure", "bf16-split", "fp16"])
def test_captured_is_eager_bit_for_bit_on_the_gpu(precision, dropout):
    torch.use_deterministic_algorithms(False)  # its NaN fill would be captured, too
    assert_same("require", precision, dropout, "cuda", captures=2)


@pytest.mark.parametrize("place_on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_placed_models_micro_batch_settles_in_two_watched_calls(place_on, monkeypatch):
    """On a GPU its kernels get tables of angles, and weights, of which they write none."""
    watched, copied, run = [], [], discover.Discovery.run
    copy = discover.StorageCopy

    def noted(self, call):
        result = run(self, call)
        watched.append(self.calls)
        gc.collect()
        return result

    monkeypatch.setattr(discover.Discovery, "run", noted)
    monkeypatch.setattr(discover, "StorageCopy", lambda tensor, *rest: copied.append(tensor) or copy(tensor, *rest))
    place(model := tiny().train(), place_on)
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0)).to(place_on)
    step = TrainStep(model, "causal_lm", AdamW(lr=1e-2), precision="fp32", graph="require")
    step([{"input_ids": ids, "labels": ids}])
    assert watched[:3] == [1, 2, 1]  # of the micro-batch, then of the update
    assert not any(isinstance(tensor, torch.nn.Parameter) for tensor in copied)


def test_a_micro_batch_only_reads_the_weights(monkeypatch):
    given, own = list[tuple[str, list[int]]](), graph_cache.capture

    def noted(part, *inputs, **options):
        given.append((part.__name__, [t.data_ptr() for t in options["reads"]]))
        return own(part, *inputs, **options)

    monkeypatch.setattr(graph_cache, "capture", noted)
    step = TrainStep(model := small(), spoiled, AdamW(lr=1e-2), graph="require")
    step([window(0, bad=False)[0]])
    weights = min(p.data_ptr() for p in model.parameters())
    assert given == [("micro_batch", [weights]), ("update", [])] and len(step.captured) == 2


def test_the_first_graph_of_a_shape_finds_sums_of_zero(monkeypatch):
    """Others would be copied, to host memory where they are large."""
    zero, own = [], graph_cache.capture

    def noted(part, *inputs, **options):
        zero.append((part.__name__, not step._graphs.step.accumulators.gradient.any()))
        return own(part, *inputs, **options)

    monkeypatch.setattr(graph_cache, "capture", noted)
    step = TrainStep(small(), summed, accumulate=2, precision="fp32", graph="require")
    for rows in (4, 6):
        step(cut(draw(rows), 2))
    assert zero == [("micro_batch", True), ("update", False), ("micro_batch", True)]


def test_a_shape_that_was_refused_costs_later_steps_no_memset(monkeypatch):
    def refused(*_, **__):
        raise GraphError("no graph for this")

    monkeypatch.setattr(graph_cache, "has_graphs", lambda device: True)
    monkeypatch.setattr(graph_cache, "capture", refused)
    step = TrainStep(small(), summed, precision="fp32")
    zero, sums = [], step._graphs.step.accumulators
    monkeypatch.setattr(sums, "zero", lambda own=sums.zero: (zero.append(1), own()))
    step(draw(4))
    first = len(zero)
    step(draw(4))
    assert first and len(zero) == first and fallbacks.pop(("train step as one graph", "no graph for this")) == 1


def test_a_models_passes_before_its_first_step_is_taken(monkeypatch):
    """Each is a forward of all layers, 0.4 s with backward on an H200 at 8B with adapters. They only go down."""
    attended, attend, layers = [], F.scaled_dot_product_attention, 2
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: attended.append(None) or attend(*a, **k))
    monkeypatch.setattr(recording, "runner_for", lambda device, pool: TapeRunner())
    place(model := tiny().train())
    # One of tokens and one of padded rows, before any swap and after all; the stack before and after its own; of each attention
    # three, each in two cases.
    assert len(attended) == (6 + 6) * layers
    step = TrainStep(model, "causal_lm", AdamW(lr=1e-2), precision="fp32", graph="require")
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    step([{"input_ids": ids, "labels": ids}])
    # Two of the objective's check, two watched calls, the capture, and one in each round of the certificate.
    assert len(attended) == (6 + 6 + 2 + 2 + 1 + 2) * layers


@pytest.mark.parametrize("optimizer, graph, names", [
    ("adamw", "auto", ["micro_batch"]),
    ("adamw8bit", "auto", ["micro_batch"]),
    ("adamw", "require", ["micro_batch", "update"]),
    ("muon", "auto", ["micro_batch", "update"]),
])  # fmt: skip
def test_a_long_update_of_few_launches_is_no_graph(optimizer, graph, names, monkeypatch):
    monkeypatch.setattr(graph_cache, "LONG", 0)
    monkeypatch.setattr(graph_cache, "has_graphs", lambda device: True)
    steps = [TrainStep(small(), summed, optimizer, clip=0.3, precision="fp32", graph=g) for g in (graph, "off")]
    for i in range(3):
        got, want = (step(draw(2, seed=i)).read() for step in steps)
        assert got == want
    assert [captured.name for captured in steps[0].captured] == names
    assert all(a.equal(b) for a, b in zip(*(step.model.parameters() for step in steps)))


@pytest.mark.parametrize(("long", "names"), [(0, ["micro_batch"]), (1, ["micro_batch", "update"])])
def test_frozen_weights_count_for_the_length_of_a_step(long, names, monkeypatch):
    """As those below adapters: a launched update is hidden behind the micro-batch, which reads them."""

    def step_of() -> TrainStep:
        model = small()
        for parameter in frozen(model):
            parameter.requires_grad_(False)
        return TrainStep(model, summed, precision="fp32")

    def frozen(model):
        return [*model.parameters()][1:]

    monkeypatch.setattr(graph_cache, "has_graphs", lambda device: True)
    first = step_of()
    state, others = first._graphs.step.state(), frozen(first.model)
    monkeypatch.setattr(graph_cache, "LONG", sum(t.nbytes for t in (*state, *others)) - 1 + long)
    (step := step_of())(draw(2))
    assert [captured.name for captured in step.captured] == names


class TestShapes:
    def test_each_is_captured_once(self):
        step = TrainStep(small(), summed, accumulate=2, precision="fp32", graph="require")
        for rows in (2, 4, 2, 4):
            step(cut(draw(rows), 2))
        assert [(graph.name, graph.replays) for graph in step.captured] == [
            ("micro_batch", 4),
            ("update", 4),
            ("micro_batch", 4),
        ]
        assert all(graph.certificate.bitwise for graph in step.captured)
        assert step(cut(draw(4), 2)).read().updates == 5, "warm-up and certificate leave no trace"

    def test_windows_of_any_mixture_and_length_need_no_other_graph(self):
        batches = {rows: cut(draw(3 * rows, seed=rows), 3) for rows in (2, 3)}
        windows = [[2, 3, 3], [3, 2], [3], [2, 3, 2, 3], [2, 2, 2]]
        captured, plain = (
            TrainStep(small(), summed, AdamW(lr=1e-2), accumulate=4, clip=0.3, precision="fp32", graph=graph)
            for graph in ("require", "off")
        )
        for window in windows:
            micro_batches = [batches[rows][i % 3] for i, rows in enumerate(window)]
            assert captured(micro_batches).read() == plain(micro_batches).read()
        assert len(captured.captured) == 3 and not plain.captured
        weights = named(plain.model)
        assert all(parameter.equal(weights[name]) for name, parameter in captured.model.named_parameters())

    def test_constants_are_part_of_the_shape(self):
        def powered(model, batch):
            total, items = summed(model, batch["data"])
            return total * batch["factor"], items

        losses = {}
        step = TrainStep(small(), powered, AdamW(lr=0.0), precision="fp32", graph="require")
        for factor in (1.0, 2.0, 1.0):
            losses[factor] = step({"data": draw(2), "factor": factor}).read().loss
        assert losses[2.0] == pytest.approx(2 * losses[1.0]) and len(step.captured) == 2 + 1

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_a_model_in_another_mode_is_another_step(self, accumulate, monkeypatch):
        """In a part of it, too. Graphs went on in the old mode until they looked at all they hold, and then refused."""
        monkeypatch.setattr(guards, "WALK_EVERY", 1)
        runs = []
        for graph in ("require", "off"):
            model = small(dropout=0.5)
            step = TrainStep(model, summed, AdamW(lr=1e-2), accumulate=accumulate, precision="fp32", graph=graph)
            changes = [lambda: None, model.dropout.eval, model.eval, model.train]
            torch.manual_seed(3)
            runs.append([(change(), step(cut(draw(4), accumulate)).read())[1] for change in changes])
            captures = len(step.captured)
            assert captures == (0 if graph == "off" else 3 * 2), "back again, the first ones serve"
        assert runs[0] == runs[1]

    @pytest.mark.slow
    def test_hooks_that_come_and_go_make_another_graph(self):
        """On a module, on all modules, on a parameter; and a forward or a module without weights that is another since."""

        def replace(model):
            model.dropout = torch.nn.Identity()

        def patch(model):
            model.norm.forward = partial(torch.nn.LayerNorm.forward, model.norm)

        changes = [
            lambda model: model.mix.register_forward_hook(lambda module, inputs, y: 2 * y),
            lambda model: nn_module.register_module_forward_pre_hook(lambda module, inputs: None),
            lambda model: model.mix.weight.register_hook(lambda gradient: 2 * gradient),
            replace,
            patch,
        ]
        for change in changes:
            model = small()
            step = TrainStep(model, summed, precision="fp32", graph="require")
            step(draw(2))
            assert [graph.name for graph in step.captured] == ["micro_batch", "update"]
            handle = change(model)
            step(draw(2))
            assert [graph.name for graph in step.captured[2:]] == ["micro_batch", "update"]
            if handle is not None:
                handle.remove()
                step(draw(2))
                assert len(step.captured) == 4, "without the hook, the first one serves again"

    @pytest.mark.filterwarnings("ignore:.*torch.jit.* is (deprecated|not supported):DeprecationWarning")
    @pytest.mark.parametrize("compiled", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 8))])
    def test_parts_in_torchscript(self, compiled):
        """Their registries are wrappers in C++, which equal nothing and have no get()."""
        runs = []
        for graph in ("require", "off"):
            model = small()
            model.mix, model.dropout = compiled(model.mix), compiled(model.dropout)
            step = TrainStep(model, summed, precision="fp32", graph=graph)
            runs.append([step(draw(2, seed=i)).read() for i in range(3)])
            assert len(step.captured) == 2 * (graph == "require")
            model.dropout.eval()  # its mode lies in C++, too
            step(draw(2))
            assert len(step.captured) == 4 * (graph == "require")
        assert runs[0] == runs[1]

    def test_too_many(self, monkeypatch):
        monkeypatch.setattr(graph_cache, "MOST", 1)
        monkeypatch.setattr(graph_cache, "has_graphs", lambda device: True)
        require, auto = (TrainStep(small(), summed, precision="fp32", graph=mode) for mode in ("require", "auto"))
        require(draw(2)), auto(draw(2))
        with pytest.raises(GraphError) as error:
            require(draw(3))
        assert str(error.value) == message("train/graphs:too_many")
        assert auto(draw(3)).read().updates == 2
        assert fallbacks.pop(("train step as one graph", str(error.value))) == 1

    def test_a_model_that_keeps_changing_is_not_captured_for_ever(self, monkeypatch):
        monkeypatch.setattr(graph_cache, "MOST", 2)
        monkeypatch.setattr(graph_cache, "has_graphs", lambda device: True)
        monkeypatch.setattr(step_inputs, "MOST_SIGNATURES", 3)
        model = small()
        step = TrainStep(model, summed, precision="fp32")
        step(draw(2))
        for _ in range(6):
            hook = model.mix.register_forward_hook(lambda module, inputs, y: None)
            step(draw(2))
            hook.remove()
        assert len(step.captured) == 4 and not step._graphs._broken and len(step._guard._numbers) <= 3
        (reason,) = [key for key in fallbacks if key[0] == "train step as one graph"]
        assert fallbacks.pop(reason) == 1 and "2 shapes" in reason[1]

    def test_a_steady_step_compares_lists_and_looks_at_no_name(self, monkeypatch):
        """Of any number of modules: no Python function is called for each of them."""
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(40)))
        guard = step_inputs.ModelGuard(model)
        before, calls = guard.check(), []
        sys.setprofile(lambda frame, event, argument: calls.append(frame.f_code.co_name) if event == "call" else None)
        try:
            now = guard.check()
        finally:
            sys.setprofile(None)
        assert now == before and len(calls) < 12, calls
        changes = [
            lambda: model[3].register_forward_hook(lambda module, inputs, y: None),
            lambda: model[5].weight.register_post_accumulate_grad_hook(lambda parameter: None),
            lambda: model[7].eval(),
            lambda: setattr(model[9], "forward", lambda x: x),
        ]
        for change in changes:
            change()
            assert guard.check() != before
            before = guard.signature
            assert guard.check() == before


def test_a_refused_capture_keeps_nothing(monkeypatch):
    """Its error, which is kept, had led to the activations of the call that there was no room for."""
    monkeypatch.setattr(graph_cache, "has_graphs", lambda device: True)
    seen = []

    def runs_out(model, batch):
        guards = torch.zeros(9)
        seen.append((weakref.ref(guards), weakref.ref(batch[0])))
        if len(seen) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return summed(model, batch)

    step = TrainStep(small(), runs_out, precision="fp32")
    step(draw(2))
    gc.collect()
    assert fallbacks.pop(("train step as one graph", "CUDA out of memory.")) == 1
    assert all(reference() is None for references in seen for reference in references)


def test_what_cannot_be_captured(monkeypatch):
    """A loss that reads the device: refused with its line where a graph is required, run call by call and said otherwise."""

    def reads(model, batch):
        total, items = summed(model, batch)
        return total, items.item()

    before, model = None, small()
    step = TrainStep(model, reads, precision="fp32", graph="require")
    before = named(model)
    with pytest.raises(GraphError, match=r"test_graph_cache.py:\d+"):
        step(draw(2))
    assert all(p.equal(before[name]) for name, p in model.named_parameters()), "the refused attempt left no trace"
    monkeypatch.setattr(graph_cache, "has_graphs", lambda device: True)
    auto, off = (TrainStep(small(), reads, precision="fp32", graph=mode) for mode in ("auto", "off"))
    for i in range(3):
        assert auto(draw(2, seed=i)).read() == off(draw(2, seed=i)).read()
    (reason,) = [key for key in fallbacks if key[0] == "train step as one graph"]
    assert "test_graph_cache.py" in reason[1] and fallbacks.pop(reason) == 1 and not auto.captured


def test_an_update_that_cannot_be_captured(monkeypatch):
    """A reduction that reads the device, found behind micro-batches that were captured: all of it runs call by call then."""

    class Reads(Ranks):
        def begin_sum(self, tensor):
            tensor.mul_(1 + 0 * tensor[1].item())
            return super().begin_sum(tensor)

    monkeypatch.setattr(graph_cache, "has_graphs", lambda device: True)
    steps = {
        mode: TrainStep(small(), summed, AdamW(lr=1e-2), accumulate=2, precision="fp32", graph=mode, ranks=Reads())
        for mode in ("auto", "off", "require")
    }
    before = named(steps["require"].model)
    with pytest.raises(GraphError, match=r"update.*test_graph_cache.py:\d+"):
        steps["require"](cut(draw(4), 2))
    assert all(p.equal(before[name]) for name, p in steps["require"].model.named_parameters())
    for i in range(3):
        window = cut(draw(4, seed=i), 2)
        assert steps["auto"](window).read() == steps["off"](window).read()
    (reason,) = [key for key in fallbacks if key[0] == "train step as one graph"]
    assert "test_graph_cache.py" in reason[1] and fallbacks.pop(reason) == 1 and not steps["auto"].captured


def test_a_micro_batchs_graph_adds_to_no_sum_that_waits_to_be_written(monkeypatch):
    step = TrainStep(small(), summed, accumulate=2, precision="fp32", graph="require")
    step(cut(draw(4), 2))
    inner = step._graphs.step
    monkeypatch.setattr(inner, "begin", inner.accumulators.begin)
    with pytest.raises(GraphError, check=message("train/graphs:a_micro_batchs_graph_add")):
        step(cut(draw(4), 2))
    monkeypatch.undo()
    assert step(cut(draw(4), 2)).read().updates == 2


def test_no_rate_lets_a_certificate_pass_anything(monkeypatch):
    """Rates beside the largest weight: small ones widen the limit for what noise moves, no rate widens it to a value's size."""
    monkeypatch.setattr(graph_cache, "has_graphs", lambda device: True)
    limits = []
    for rate in (0.0, 1e-3, 1.0, 1e6):
        step = TrainStep(small(), summed, AdamW(lr=rate))
        limits.append(step._graphs._tolerance())
    assert (
        limits[0] == graph_cache.NOISE < limits[1] < 2 * graph_cache.NOISE
        and limits[2:] == [graph_cache.MOST_NOISE] * 2
        and limits[3] < 1
    )


def test_auto_runs_call_by_call_on_the_cpu():
    step = TrainStep(small(), summed, precision="fp32")
    step(draw(2))
    assert not step.captured


@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["require", "off"])
def test_no_host_sync(graph):
    """torch's own check raises at any wait inside the steps; results are read one step late, after."""
    torch.use_deterministic_algorithms(False)
    model = small().cuda()
    step = TrainStep(model, summed, accumulate=2, clip=1.0, graph=graph, schedule=Schedule("cosine", steps=50))
    windows = [[tuple(t.cuda() for t in part) for part in cut(draw(4, seed=i), 2)] for i in range(6)]
    step(windows[0]), step(windows[1])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [step(window) for window in windows]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [result.read().updates for result in results] == list(range(3, 9))


@pytest.mark.gpu
def test_results_reach_the_host_in_order():
    """Many steps in flight: no report is overwritten before it is read."""
    torch.use_deterministic_algorithms(False)
    step = TrainStep(small().cuda(), summed, precision="fp32")
    results = [step(tuple(t.cuda() for t in draw(2, seed=i))) for i in range(30)]
    losses = torch.stack([result.loss for result in results]).tolist()
    assert [result.read().loss for result in results] == losses
    assert [result.read().updates for result in results] == list(range(1, 31))


@pytest.mark.gpu
def test_fp32_accumulation_keeps_what_bf16_loses():
    """Micro-batches whose gradients are 256 and 1: 257 in the accumulator, 256 in a bf16 .grad."""
    torch.use_deterministic_algorithms(False)

    def times(model, batch):
        return (model.weight * batch).sum().float(), 1

    model = torch.nn.Linear(64, 64, bias=False).cuda()
    step = TrainStep(model, times, accumulate=2, precision="bf16", graph="require")
    step([torch.full((64, 64), value, device="cuda", dtype=torch.bfloat16) for value in (256.0, 1.0)])
    assert model.weight.main_grad.eq(257).all()
    plain = torch.nn.Parameter(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16))
    for value in (256.0, 1.0):
        (plain * value).sum().backward()
    assert plain.grad.eq(256).all()


def alternating(device, dtype):
    """Two steps of two models, taken alternately, the second's graphs in the pool of the first's; and each alone."""
    numbers, steps = [], []
    for share in (True, False):
        models = [small().to(device) for _ in range(2)]
        steps = [TrainStep(model, summed, AdamW(lr=1e-2), accumulate=2, precision=dtype, graph="require") for model in models]
        if share:
            steps[1].share_pool(steps[0])
            shared = steps
        batches = [[tuple(t.to(device) for t in batch) for batch in cut(draw(6, seed=i), 2)] for i in range(6)]
        numbers.append([[step(batches[i]).read().loss for step in steps] for i in range(6)])
    return shared, numbers


@pytest.mark.slow
def test_a_step_may_share_the_pool_of_another():
    (first, second), (shared, alone) = alternating("cpu", "fp32")
    assert shared == alone
    first.captured[0].pool = (0, 7)
    assert second._graphs.pool == (0, 7)
    with pytest.raises(ValueError, match="before the first step"):
        second.share_pool(first)
    first.close()
    assert second._graphs.pool is None and first.closed and not second.closed


@pytest.mark.gpu
def test_on_a_gpu_steps_that_share_a_pool_give_the_same_numbers():
    (first, second), (shared, alone) = alternating("cuda", "bf16")
    assert len({graph.pool for step in (first, second) for graph in step.captured}) == 1
    assert torch.tensor(shared).sub(torch.tensor(alone)).abs().max() < 1e-2
