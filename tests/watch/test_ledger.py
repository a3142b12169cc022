"""The ledger on the pretend device: every planted stall on its own line; its table and budgets; causes and remedies."""

import functools
import gc
import inspect
import json
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _device

from gpubound import trace
from gpubound.errors import BudgetError, StallError
from gpubound.watch import events, no_stall, ops, pretend, watch
from gpubound.watch.ledger import SENSORS, TOTALS
from gpubound.watch.sensors import Dispatch
from tests.messages import message, refusal

from .planted import PLANTS, Kit


def of(ledger, kind):
    return [row for row in ledger.rows if row.kind == kind]


def test_there_are_enough_plants():
    assert len(PLANTS) >= 40


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_each_planted_sync_is_counted_once_on_its_line(plant, sim, capsys):
    kit = Kit(sim)
    with watch() as ledger:
        plant.run(kit)
    found = [(row.count, row.place.site.line) for row in of(ledger, "sync")]
    assert found == [(1, plant.line)]
    assert of(ledger, "sync")[0].place.site.file.endswith("planted.py")
    assert ledger.totals["syncs"] == 1


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(13, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.qkv = torch.nn.Linear(8, 24)
        self.head = torch.nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + y.transpose(1, 2).flatten(2))


def make_step(device, model, optimizer, batch):
    def step():
        tokens = batch.to(device, non_blocking=True)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"capturable": True}], ids=str)
def test_a_clean_training_step_has_no_sync(sim, options):
    """Single-tensor AdamW reads its step count from CPU tensors: those .item() are not syncs."""
    model = Block().to(sim)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    step = make_step(sim, model, optimizer, (torch.arange(12).view(2, 6) % 13).pin_memory())
    step()
    with watch() as ledger:
        for _ in range(2):
            step()
            ledger.step()
    ledger.assert_within(
        syncs=0, d2h_bytes=0, pageable_copies=0, h2d_bytes=2 * 12 * 8, h2d_copies=2, dead_clones=0, fallbacks=0
    )
    assert ledger.totals["launches"] > 50


def test_a_cpu_tensor_is_no_sync(sim):
    x = torch.ones(3)
    with watch() as ledger:
        x.sum().item(), bool(x.sum()), x[x > 0], x.tolist(), x.unique()
        str(x)
    assert ledger.totals["syncs"] == 0


def test_work_on_the_cpu_is_counted_apart(sim):
    a, b, step = torch.ones(4, 4), torch.ones(4, 4), torch.zeros(())
    with watch() as ledger:
        a @ b
        step + 1
    assert [(row.what, row.count) for row in of(ledger, "cpu_op")] == [("mm", 1)]


def test_copies_with_bytes_and_manner(sim):
    pageable, pinned = torch.ones(16), torch.ones(16).pin_memory()
    there = torch.ones(16).to(sim)
    with watch() as ledger:
        pageable.to(sim)
        pinned.to(sim, non_blocking=True)
        pageable.to(sim, non_blocking=True)
        pinned.to(sim, torch.float16, non_blocking=True)  # torch converts it on the device
        pinned.to(sim, torch.float16)  # and here on the host, in pageable memory
        pinned.view(4, 4)[:, :2].to(sim, non_blocking=True)  # so is a tensor with gaps
        there.cpu()
        there.to("cpu", non_blocking=True)
    assert [(row.detail, row.count, row.bytes) for row in of(ledger, "h2d")] == [
        ("pageable, blocking", 1, 64),
        ("pinned, non_blocking", 1, 64),
        ("pageable, non_blocking", 1, 64),
        ("pinned, non_blocking", 1, 64),
        ("pageable, blocking", 1, 32),
        ("pageable, non_blocking", 1, 32),
    ]
    assert [(row.detail, row.bytes) for row in of(ledger, "d2h")] == [("pageable, blocking", 64), ("pinned, non_blocking", 64)]
    totals = ledger.totals
    assert (totals["syncs"], totals["h2d_bytes"], totals["d2h_bytes"], totals["pageable_copies"]) == (3, 320, 128, 5)


def test_the_same_storage_uploaded_again(sim):
    constant, batch = torch.arange(6.0), torch.arange(6.0)
    ring = torch.zeros(6).pin_memory()
    with watch() as ledger:
        for n in range(3):
            constant.to(sim)
            batch.add_(1).to(sim)  # written: another version
            ring.numpy()[:] = n + 1  # written behind the version counter
            ring.to(sim, non_blocking=True)
    repeated = of(ledger, "repeat")
    assert [(row.count, row.bytes, row.place.site.code) for row in repeated] == [(2, 48, "constant.to(sim)")]


def test_clones_whose_source_dies(sim):
    x = torch.rand(4, 4).to(sim)
    with watch() as ledger:
        a = (x * 2).clone()
        b = (x * 2).t().contiguous()  # changes the layout: it does work
        c = (x * 2)[:2].clone()  # keeps half so that the rest can be freed
        d = x.clone()  # x lives on
        e = x * 3
        f = e.clone()
        e.add_(1)  # used afterwards
        del e
        g = (x * 2).detach().clone()
    assert [(row.count, row.bytes, row.place.site.code) for row in of(ledger, "clone")] == [
        (1, 64, "a = (x * 2).clone()"),
        (1, 64, "g = (x * 2).detach().clone()"),
    ]
    assert all(t.device == sim for t in (a, b, c, d, f, g))


def test_a_sync_inside_a_cpp_node_leads_back_to_the_forward_line(sim):
    w, mask = torch.rand(6).to(sim).requires_grad_(), torch.tensor([True, False] * 3).to(sim)
    threads = []
    w.register_hook(lambda g: threads.append(threading.get_ident()))
    with watch() as ledger:
        y = w * 2
        z = y[mask]  # its backward scatters through the mask, which waits again
        z.sum().backward()
    forward, backward = sorted(of(ledger, "sync"), key=lambda row: row.place.node)
    assert (forward.what, forward.place.site.code[:11], forward.place.node) == ("boolean mask", "z = y[mask]", "")
    assert backward.place.site is None
    assert (backward.what, backward.place.node, backward.place.built) == ("boolean mask", "IndexBackward0", forward.place.site)
    assert backward.place.thread == ("autograd" if threads != [threading.get_ident()] else "")


def test_a_hook_knows_its_node(sim):
    w = torch.rand(6).to(sim).requires_grad_()
    with watch() as ledger:
        y = w * 2
        y.register_hook(lambda g: g * float(g.sum()))
        y.sum().backward()
    (row,) = of(ledger, "sync")
    assert row.place.site.function == "<lambda>"
    assert (row.place.node, row.place.built.code) == ("MulBackward0", "y = w * 2")


def test_library_frames_are_walked_to_the_user(sim):
    w = torch.rand(6).to(sim).requires_grad_()
    w.grad = torch.ones_like(w)
    with watch() as ledger:
        torch.nn.utils.clip_grad_norm_([w], 1.0, error_if_nonfinite=True)
    (row,) = of(ledger, "sync")
    assert row.place.site.function == "test_library_frames_are_walked_to_the_user"
    assert row.place.via.in_package.startswith("torch/nn/utils/clip_grad.py:")


def test_a_custom_op_is_looked_into(sim):
    @torch.library.custom_op("gpubound_test::waits", mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    with watch() as ledger:
        waits(torch.ones(3, device=sim))
    (row,) = of(ledger, "sync")
    assert row.place.site.code == "return x * x.sum().item()"


def test_collector_pauses():
    with watch() as ledger:
        gc.collect()
    full = [row for row in of(ledger, "gc") if row.what == "generation 2" and row.place.site.code == "gc.collect()"]
    assert [row.count for row in full] == [1]
    assert ledger.totals["gc_ms"] > 0


def test_fallbacks_are_heard_by_every_listener(monkeypatch):
    counted = []
    monkeypatch.setattr(trace, "fallbacks", type(trace.fallbacks)())
    with trace.listening(lambda *what: counted.append(what)), watch() as ledger:
        trace.fallback("rms_norm", "no kernel here")
        trace.fallback("rms_norm", "no kernel here")
        trace.count("feed.batches")
    rows = of(ledger, "fallback")
    assert [(row.what, row.detail, row.count) for row in rows] == [("rms_norm", "no kernel here", 1)] * 2
    assert counted == [("fallback", 1), ("fallback", 1), ("feed.batches", 1)]


def test_recompiles():
    from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

    with watch() as ledger:
        for number in ("0/0", "0/1"):
            callback_handler.run_start_callbacks(CallbackArgs(CallbackTrigger.DYNAMO, number))
    assert [row.what for row in of(ledger, "compile")] == ["compile 0/0", "recompile 0/1"]
    callback_handler.run_start_callbacks(CallbackArgs(CallbackTrigger.DYNAMO, "0/2"))
    assert ledger.totals["recompiles"] == 2


@pytest.mark.slow
def test_a_ledger_does_not_keep_code_from_being_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    with watch() as ledger:
        compiled(torch.ones(3))
    assert [(row.what[-4:], row.place.site.code) for row in of(ledger, "compile")] == [(" 0/0", "compiled(torch.ones(3))")]


def test_nothing_is_left_behind(sim):
    from torch.cuda import _gpu_trace as gputrace

    calls = (torch.cuda.synchronize, torch.cuda.Stream.synchronize, torch._tensor_str._str, torch.tensor)
    with watch(gputrace=True):
        assert torch.tensor is not calls[3]
    assert (torch.cuda.synchronize, torch.cuda.Stream.synchronize, torch._tensor_str._str, torch.tensor) == calls
    assert pretend.observers == [] and trace._listeners == []
    assert gputrace.StreamSynchronizationCallbacks.callback_list == []
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not any("gpubound" in getattr(callback, "__module__", "") for callback in gc.callbacks)


def test_a_default_device_that_is_first_set_within_a_ledger_remains_one(sim, monkeypatch):
    """Torch caches its functions then, torch.tensor among them, which a ledger replaces."""
    monkeypatch.setattr(torch, "tensor", inspect.unwrap(torch.tensor))  # a process that answers to "cuda" has replaced it
    functions = functools.lru_cache(_device._device_constructors.__wrapped__)  # as in a process that has called none
    monkeypatch.setattr(_device, "_device_constructors", functions)
    places = []
    for ledger in (watch(), nullcontext()):
        with ledger, torch.device("meta"):
            places.append(torch.tensor([1.0]).device.type)
    assert places == ["meta", "meta"]


def test_a_sensor_that_cannot_start_leaves_nothing_behind(sim, monkeypatch):
    def fail(self, ending):
        raise OSError("no")

    monkeypatch.setattr(Dispatch, "start", fail)
    with pytest.raises(OSError), watch():
        pass
    assert pretend.observers == [] and trace._listeners == []


def test_ledgers_nest(sim):
    with watch() as outer:
        torch.ones(2, device=sim).sum().item()
        with watch() as inner:
            torch.ones(2, device=sim).sum().item()
    assert (outer.totals["syncs"], inner.totals["syncs"]) == (2, 1)


def test_a_ledger_may_end_on_another_thread(sim):
    """As in a doctor's run of a script whose steps are made in threads. Torch takes a mode off its own thread's stack alone."""
    ledger = watch().__enter__()
    leaving = threading.Thread(target=lambda: failed.append(ledger.__exit__(None, None, None)))
    failed: list = []
    leaving.start()
    leaving.join()
    counted = ledger.as_dict()
    torch.ones(2).add(1)
    torch.ones(2, device=sim).sum().item()
    assert failed == [None] and ledger.as_dict() == counted
    with watch():
        pass
    assert torch._C._len_torch_dispatch_stack() == 0


def test_ledgers_that_end_in_another_order(sim):
    first, second = watch().__enter__(), watch().__enter__()
    first.__exit__(None, None, None)
    torch.ones(2).add(1)
    second.__exit__(None, None, None)
    assert (first.totals["cpu_ops"], second.totals["cpu_ops"]) == (0, 1)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_pretend_device_that_is_not_there(sim):
    with watch(device="simgpu:3") as ledger:
        torch.ones(2, device=sim).sum().item()
    assert ledger.absent["simgpu"] == "device='simgpu:3' is not here"
    with pytest.raises(BudgetError, match=r"^not counted: syncs\."):
        ledger.assert_within(syncs=0)


def test_a_device_filter(sim):
    with watch(device="cuda") as ledger:
        torch.ones(2, device=sim).sum().item()
    assert "syncs" not in ledger.totals
    assert ledger.absent["simgpu"] == "device='cuda' was asked for"


def test_an_op_inside_another_gives_the_name_back():
    """A wait that torch reports in between has the name of the op that is running."""
    ledger, x = watch(), torch.ones(2)
    sensor = Dispatch(ledger)
    with sensor.seeing(torch.ops.aten.mul.Tensor, (x, x), {}):
        with sensor.seeing(torch.ops.aten.add.Tensor, (x, x), {}):
            assert ledger.now.op == "add"
        assert ledger.now.op == "mul"
    assert ledger.now.op == ""


def test_a_limit_may_be_passed_by_less_than_one():
    with watch(without=[name for name in SENSORS if name != "gc"]) as ledger:
        ledger.record("gc", "generation 2", ms=1.25)
    ledger.assert_within(gc_ms=1000)
    with pytest.raises(BudgetError, check=message("watch/ledger:a_limit_may_be_passed_by")):
        ledger.assert_within(gc_ms=1)


def test_every_kind_that_a_ledger_counts_has_a_cause_and_a_remedy():
    kinds = {kind for kinds, _ in TOTALS.values() for kind in kinds.split()}
    assert kinds == events.KINDS.keys()
    causes = [*events.KINDS.values(), *events.WAITING_CALLS.values(), *events.THROUGH.values()]
    for cause in (*causes, *(cause for _, cause in events.WAITING_OPS.values())):
        assert cause.does and cause.remedy and not str(cause).endswith(".")


@pytest.mark.parametrize(
    ("kind", "what", "through", "cause"),
    [
        ("sync", "item", "", events.READ),
        ("sync", "boolean mask", "", events.MASK),
        ("sync", "item", "torch/optim/", events.THROUGH["torch/optim/"]),
        ("sync", "stream synchronize", "", events.WAIT),
        ("h2d", "copy to device", "torch/optim/", events.UPLOAD),
        ("gc", "generation 2", "", events.KINDS["gc"]),
    ],
)
def test_the_cause_of_an_event(kind, what, through, cause):
    assert events.cause_of(kind, what, through) == cause


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (lambda x: x[x > 0], events.MASK),
        (lambda x: x.nonzero(), events.WAITING_OPS["nonzero"][1]),
        (
            lambda x: torch.nn.utils.clip_grad_norm_([x.requires_grad_()], 1.0, error_if_nonfinite=True),
            events.THROUGH["torch/nn/utils/clip_grad"],
        ),
        (print, events.PRINT),
        (lambda x: x.histc(4), events.BOUNDS),
        (lambda x: torch.linspace(0.0, x[0], 4, device=x.device), events.READ),
        (lambda x: torch.linalg.pinv(x[None]), events.FACTORISED),
        (lambda x: torch.normal(x, x), events.DEVIATION),
        (lambda x: x.masked_fill(x > 0, x[0]), events.FILL_VALUE),
    ],
)
def test_a_guard_says_what_to_write_instead(sim, line, cause):
    x = torch.ones(4, device=sim)
    x.grad = torch.ones_like(x)
    with pytest.raises(StallError) as error, no_stall():
        line(x)
    assert message("watch/events:a_guard_says_what_to_wri", cause.remedy).within(str(error.value))


def test_a_cpu_can_stand_for_the_device_whose_waits_count():
    mask, x = torch.tensor([True, False]), torch.ones(2)
    index, cpu = torch.ops.aten.index.Tensor, torch.device("cpu")
    assert not ops.moves(index, (x, [mask]), {})
    assert [(move.kind, move.cause) for move in ops.moves(index, (x, [mask]), {}, home=cpu)] == [("sync", events.MASK)]
    assert not ops.moves(index, (x, [torch.tensor([0])]), {}, home=cpu)
    item = torch.ops.aten._local_scalar_dense.default
    assert not ops.moves(item, (x[0],), {}) and len(ops.moves(item, (x[0],), {}, home=cpu)) == 1
    repeat = torch.ops.aten.repeat_interleave.Tensor
    assert not ops.moves(repeat, (torch.tensor([1]),), {"output_size": 1}, home=cpu)
    assert len(ops.moves(repeat, (torch.tensor([1]),), {}, home=cpu)) == 1


def test_the_backward_of_a_masked_scatter_waits(sim):
    source, mask = torch.ones(4, device=sim).requires_grad_(), (torch.arange(4) % 2 == 0).to(sim)
    with watch() as ledger:
        torch.zeros(4, device=sim).masked_scatter(mask, source).sum().backward()
    (row,) = [row for row in ledger.rows if row.kind == "sync"]
    assert events.cause_of(row.kind, row.what) == events.WAITING_OPS["masked_scatter_backward"][1]


@pytest.mark.parametrize(
    "line",
    [
        lambda x, index: x.masked_fill(x > 0, torch.tensor(1.0)),
        lambda x, index: x.fill_(torch.tensor(1.0)),
        lambda x, index: torch.normal(x, 1.0),
        lambda x, index: torch.where(x > 0, x, 0.0),
        lambda x, index: x.index_fill_(0, index, 1.0),
        lambda x, index: x.__setitem__(x > 0, 1.0),
        lambda x, index: x[torch.arange(4) > 1],
        lambda x, index: x.histc(4, 0, 1),
        lambda x, index: torch.linspace(0.0, 1.0, 4, device=x.device),
    ],
)
def test_a_number_that_becomes_an_argument_of_the_kernel_does_not_wait(sim, line):
    x, index = torch.ones(4, device=sim), torch.tensor([1, 2]).to(sim)
    with no_stall():
        line(x, index)


QUIET = ("gc", "compiles", "fallbacks", "triton", "calls", "dispatch", "kernels", "allocator", "gputrace")


def make(batch, sim):
    x = batch.to(sim)
    return x.sum().item()


def small_ledger(sim, monkeypatch, request):
    monkeypatch.chdir(request.path.parent)
    batch = torch.ones(512)
    with watch(without=QUIET) as ledger:
        for _ in range(2):
            make(batch, sim)
            ledger.step()
    return ledger


def test_the_table(sim, monkeypatch, request):
    first = make.__code__.co_firstlineno
    one, two = (f"test_ledger.py:{first + n} in make" for n in (1, 2))
    where = "where".ljust(len(one))
    assert str(small_ledger(sim, monkeypatch, request)) == message("watch/ledger_words:the_table", where, one, two)


def test_as_dict_goes_into_json(sim, monkeypatch, request):
    got = json.loads(json.dumps(small_ledger(sim, monkeypatch, request).as_dict()))
    assert got["version"] == 1 and got["steps"] == 2
    assert got["totals"]["h2d_bytes"] == 4096 and got["per_step"]["syncs"] == 2.0
    assert list(got["sensors"]) == ["simgpu"] and got["absent"]["gc"] == "left out"
    assert got["rows"][1] == {
        "kind": "sync",
        "what": "item",
        "detail": "",
        "count": 2,
        "bytes": 0,
        "ms": 0.0,
        "site": {
            "file": __file__,
            "line": make.__code__.co_firstlineno + 2,
            "function": "make",
            "code": "return x.sum().item()",
        },
        "via": "",
        "node": "",
        "built": None,
        "thread": "",
    }


def test_over_budget_shows_the_lines(sim, monkeypatch, request):
    ledger = small_ledger(sim, monkeypatch, request)
    ledger.assert_within(syncs=4, h2d_bytes=4096)
    with pytest.raises(BudgetError) as error:
        ledger.assert_within(syncs=3, d2h_bytes=0, repeated_uploads=0)
    first = make.__code__.co_firstlineno
    one, two = f"test_ledger.py:{first + 1} in make", f"test_ledger.py:{first + 2} in make"
    assert str(error.value).splitlines() == [
        message("watch/ledger_words:over_budget_shows_the_li"),
        message("watch/ledger_words:over_budget_shows_the_li.2", "where".ljust(len(one))),
        message("watch/ledger_words:over_budget_shows_the_li.3", one),
        message("watch/ledger_words:over_budget_shows_the_li.4", two),
        message("watch/ledger_words:over_budget_shows_the_li.5", one),
    ]
    assert isinstance(error.value, AssertionError)


def test_what_nobody_counted_cannot_pass(sim, monkeypatch, request):
    ledger = small_ledger(sim, monkeypatch, request)
    with pytest.raises(BudgetError) as error:
        ledger.assert_within(allocations=0)
    assert str(error.value) == message("watch/ledger_words:what_nobody_counted_cann")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: watch().assert_within(sync=0), message("watch/ledger_words:wrong_limit")),
        (lambda: watch().assert_within(syncs=-1), message("watch/ledger_words:wrong_number")),
        (lambda: watch(device="cpu"), message("watch/ledger_words:wrong_device")),
        (lambda: watch(device="gpu"), message("watch/ledger_words:no_device")),
        (lambda: watch(without="gputraces"), message("watch/ledger_words:wrong_sensor")),
        (lambda: watch(without=3), message("watch/ledger_words:no_sensor")),
        (lambda: watch(launches="all"), message("watch/ledger_words:wrong_launches")),
        (lambda: watch(gputrace="on"), message("watch/ledger_words:wrong_gputrace")),
    ],
)
def test_bad_arguments(call, text):
    assert refusal(ValueError, lambda: call()) == text


def test_no_limits():
    with pytest.raises(ValueError, check=message("watch/ledger_words:no_limits")):
        watch().assert_within()


def test_a_ledger_that_was_never_opened_has_counted_nothing():
    with pytest.raises(BudgetError, check=message("watch/ledger_words:a_ledger_that_was_never")):
        watch().assert_within(syncs=0)


def test_a_ledger_is_used_once():
    ledger = watch()
    with ledger:
        pass
    with pytest.raises(ValueError) as error, ledger:
        pass
    assert str(error.value) == message("watch/ledger_words:a_ledger_is_used_once")
