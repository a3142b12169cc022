"""On a CUDA GPU: the same plants, by GPUTrace and by the sensors that stand in for it; copies, allocations, a clean step."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from gpubound.errors import StallError
from gpubound.watch import no_stall, watch

from .planted import PLANTS, Kit
from .test_ledger import Block, make_step

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")

# CUDA waits more than once in these calls: a print formats value by value, unique sorts and then counts, repeat_interleave
# reads the sum of its counts and then whether one is negative.
SEVERAL = {
    "printed",
    "unique",
    "nonzero",
    "where",
    "boolean_mask",
    "masked_assignment",
    "masked_select",
    "stacked_scalars",
    "one_hot",
    "repeat_interleave",
    "drawn",
}


def lines(ledger):
    return {(row.place.site.file.rsplit("/", 1)[-1], row.place.site.line) for row in ledger.rows if row.kind == "sync"}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_by_the_stand_in_sensors(plant, capsys):
    """Without GPUTrace: dispatch and calls find every plant but the one on another thread."""
    kit = Kit(CUDA)
    plant.run(Kit(CUDA))
    torch.cuda.synchronize()
    with watch(gputrace=False) as ledger:
        plant.run(kit)
    if plant.name == "another_thread":
        assert ledger.totals["syncs"] == 0
    else:
        assert lines(ledger) == {("planted.py", plant.line)}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_by_gputrace(plant, capsys):
    kit = Kit(CUDA)
    plant.run(Kit(CUDA))  # lazy loading of a kernel may synchronize by itself
    torch.cuda.synchronize()
    with watch(gputrace=True) as ledger:
        plant.run(kit)
    assert lines(ledger) == {("planted.py", plant.line)}, str(ledger)
    if plant.name not in SEVERAL:
        assert ledger.totals["syncs"] == 1, str(ledger)


TABLED = {
    "multinomial": lambda x, n: x.softmax(0).multinomial(2),
    "multinomial_with_replacement": lambda x, n: x.softmax(0).multinomial(2, replacement=True),
    "bincount": lambda x, n: n.bincount(),
    "unique_consecutive": lambda x, n: n.unique_consecutive(),
    "linalg_inv": lambda x, n: torch.linalg.inv(torch.eye(3, device=x.device)),
    "repeat_interleave_sized": lambda x, n: torch.repeat_interleave(x, n, output_size=28),
    "masked_fill_by_index": lambda x, n: x.__setitem__(n > 3, 1.0),
    "host_index": lambda x, n: x[torch.tensor([0, 2])],
    "linalg_inv_ex": lambda x, n: torch.linalg.inv_ex(torch.eye(3, device=x.device)),
    "cumsum_sort_topk": lambda x, n: (x.cumsum(0), x.sort(), x.topk(2), n.count_nonzero()),
    "histc": lambda x, n: x.histc(4, 0, 1),
    "set_slice": lambda x, n: x.__setitem__(slice(2, 4), 1.0),
    "index_by_tensor": lambda x, n: x[n],
    "isin": lambda x, n: torch.isin(n, n[:2]),
    "host_mask": lambda x, n: x[torch.arange(8) > 3],
    "host_mask_put": lambda x, n: x.__setitem__(torch.arange(8) > 3, x[0].clone()),
    "histc_without_bounds": lambda x, n: x.histc(4),
    "linspace_to_a_device_scalar": lambda x, n: torch.linspace(0.0, x[0], 4, device=x.device),
    "to_sparse": lambda x, n: x.view(2, 4).to_sparse(),
    "linalg_pinv": lambda x, n: torch.linalg.pinv(torch.eye(3, device=x.device)),
    "linalg_lstsq": lambda x, n: torch.linalg.lstsq(torch.eye(3, device=x.device), torch.eye(3, device=x.device)),
    "number_at_a_host_mask": lambda x, n: x.__setitem__(torch.arange(8) > 3, 1.0),
    "added_number": lambda x, n: x.index_put_((n,), torch.tensor(1.0), accumulate=True),
    "fill_by_a_host_scalar": lambda x, n: (x.fill_(torch.tensor(1.0)), x.masked_fill(n > 3, torch.tensor(1.0))),
    "index_fill_by_a_device_scalar": lambda x, n: x.index_fill(0, n[:2], x[0]),
    "number_of_where": lambda x, n: torch.where(n > 3, x, 0.0),
    "normal_of_a_number": lambda x, n: torch.normal(x, 1.0),
    "linalg_eigh": lambda x, n: torch.linalg.eigh(torch.eye(3, device=x.device)),
    "linalg_svd": lambda x, n: torch.linalg.svd(torch.eye(3, device=x.device)),
    "masked_scatter_backward": lambda x, n: (
        torch.zeros_like(x).masked_scatter(n > 3, x.clone().requires_grad_()).sum().backward()
    ),
}


@pytest.mark.parametrize("name", TABLED)
def test_the_table_agrees_with_cuda(name):
    """events.WAITING_OPS and its kin say that an op waits exactly where GPUTrace sees it wait."""
    x, n = torch.rand(8, device=CUDA), torch.arange(8, device=CUDA)
    TABLED[name](x, n)
    torch.cuda.synchronize()
    with watch(gputrace=True) as truth:
        TABLED[name](x, n)
    with watch(gputrace=False) as table:
        TABLED[name](x, n)
    assert (table.totals["syncs"] > 0) == (truth.totals["syncs"] > 0), f"{truth}\n{table}"


def test_unique_along_a_dimension_is_in_the_table_alone():
    """It waits inside thrust, which tells GPUTrace nothing: there the table cannot be held against it."""
    n = torch.arange(8, device=CUDA).view(2, 4)
    n.unique(dim=0)
    with watch(gputrace=False) as ledger:
        n.unique(dim=0)
    assert ledger.totals["syncs"] == 1


@pytest.mark.parametrize("plant", [p for p in PLANTS if p.name != "another_thread"], ids=lambda plant: plant.name)
def test_the_guard_raises_at_the_line(plant):
    kit = Kit(CUDA)
    with pytest.raises(StallError, match=rf"planted\.py:{plant.line} in \S+: `"), no_stall():
        plant.run(kit)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": True}, {"foreach": False}], ids=str)
def test_a_clean_training_step(options):
    model = Block().to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    step = make_step(CUDA, model, optimizer, (torch.arange(12).view(2, 6) % 13).pin_memory())
    for _ in range(3):
        step()
    with watch(gputrace=True) as ledger, no_stall():
        for _ in range(4):
            step()
            ledger.step()
    ledger.assert_within(
        syncs=0,
        d2h_bytes=0,
        pageable_copies=0,
        h2d_bytes=4 * 12 * 8,
        allocations=0,
        alloc_retries=0,
        pinned_allocations=0,
        fallbacks=0,
    )


class RunsOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g + too_large(g * 2)


def too_large(x):
    return torch.empty(1 << 50, dtype=torch.uint8, device=x.device)


def nothing_there(x):
    raise KeyError("nothing there")


def refused(x):
    with no_stall():
        torch.linalg.inv(x.repeat(4, 1))


def in_backward(x):
    RunsOut.apply(x.clone().requires_grad_() * 2).sum().backward()


def in_a_hook(function):
    def run(x):
        z = x.clone().requires_grad_() * 2
        z.register_hook(lambda g: torch.add(g * 2, function(g)))
        (z * 3).sum().backward()

    return run


# Each frees memory of the device while its exception is on the way up: an argument that waits, an operation's temporaries.
FAILING = {
    "out_of_memory": (lambda x: torch.add(x * 2, too_large(x * 3)), torch.OutOfMemoryError),
    "python": (lambda x: torch.add(x * 2, nothing_there(x * 3)), KeyError),
    "in_an_operation": (refused, StallError),
    "in_backward": (in_backward, torch.OutOfMemoryError),
    "in_a_hook": (in_a_hook(too_large), torch.OutOfMemoryError),
    "in_a_hook_python": (in_a_hook(nothing_there), KeyError),
}


@pytest.mark.parametrize("thread", [False, True], ids=["here", "on_a_thread"])
@pytest.mark.parametrize("when", ["during", "after"])
@pytest.mark.parametrize("name", FAILING)
def test_an_exception_arrives_as_itself(name, when, thread):
    """GPUTrace as torch has it calls Python at each free, and the exception is lost: a SystemError arrives."""
    run, wanted = FAILING[name]
    x, met = torch.rand(4, device=CUDA), []

    def caught():
        for _ in range(3):
            try:
                run(x)
            except BaseException as error:
                met.append(type(error))

    with watch(gputrace=True) as ledger:
        x.sum().item()
        if when == "during":
            alone(caught) if thread else caught()
    if when == "after":
        alone(caught) if thread else caught()
    assert met == [wanted] * 3
    assert ledger.totals["syncs"] >= 1


def alone(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_after_a_ledger_an_allocation_calls_no_python():
    from torch.cuda import _gpu_trace

    heard = []
    with watch(gputrace=True) as ledger:
        _gpu_trace.MemoryAllocationCallbacks.add_callback(heard.append)
        torch.rand(1 << 20, device=CUDA).sum().item()
    _gpu_trace.StreamSynchronizationCallbacks.add_callback(heard.append)
    torch.rand(1 << 20, device=CUDA).sum().item()
    _gpu_trace.MemoryAllocationCallbacks.callback_list.clear()
    _gpu_trace.StreamSynchronizationCallbacks.callback_list.clear()
    assert heard == [] and ledger.totals["syncs"] == 1


def test_a_sync_in_a_cpp_node_leads_to_its_forward_line():
    w, mask = torch.rand(6, device=CUDA, requires_grad=True), torch.tensor([True, False] * 3, device=CUDA)
    with watch(gputrace=True) as ledger:
        z = (w * 2)[mask]
        z.sum().backward()
    (row,) = [row for row in ledger.rows if row.kind == "sync" and row.place.node]
    assert row.place.site is None and row.place.built.code == "z = (w * 2)[mask]"


def test_pageable_and_pinned():
    pageable, pinned = torch.ones(1 << 20), torch.ones(1 << 20).pin_memory()
    with watch(gputrace=True) as ledger:
        pageable.to(CUDA)
        pageable.to(CUDA, non_blocking=True)
        pinned.to(CUDA)
        pinned.to(CUDA, non_blocking=True)
    rows = {row.detail: (row.count, row.bytes) for row in ledger.rows if row.kind == "h2d"}
    assert rows == dict.fromkeys(
        ("pageable, blocking", "pageable, non_blocking", "pinned, blocking", "pinned, non_blocking"), (1, 4 << 20)
    )
    assert ledger.totals["syncs"] == 2


def test_who_converts_is_who_the_ledger_says():
    """A blocking copy of another dtype is converted on the host, into pageable memory; one for later on the device: the tape
    of torch's own profiler has the memory that the bytes came from."""
    pinned = torch.ones(1 << 20, dtype=torch.float64).pin_memory()
    for later, size, memory in ((False, 2 << 20, "Pageable"), (True, 8 << 20, "Pinned")):
        with torch.profiler.profile(acc_events=True) as profile:
            pinned.to(CUDA, torch.bfloat16, non_blocking=later)
            torch.cuda.synchronize()
        with watch() as ledger:
            pinned.to(CUDA, torch.bfloat16, non_blocking=later)
        (row,) = [row for row in ledger.rows if row.kind == "h2d"]
        assert row.bytes == size and bool(row.pageable) == (memory == "Pageable")
        assert any("HtoD" in event.name and memory in event.name for event in profile.events())


def test_allocations_have_their_lines():
    torch.cuda.empty_cache()
    free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # in segments that other tests' tensors hold
    with watch() as ledger:
        held = torch.empty((64 << 20) + free, dtype=torch.uint8, device=CUDA)
    del held
    rows = [row for row in ledger.rows if row.kind == "alloc"]
    assert ledger.totals["allocations"] == 1
    assert rows[0].place.site.code.startswith("held = torch.empty(")


def test_a_pinned_allocation_is_counted():
    torch.cuda.synchronize()
    torch._C._host_emptyCache()  # a block that another test gave back would be taken without an allocation
    with watch() as ledger:
        torch.empty(3 << 20).pin_memory()
    assert ledger.totals["pinned_allocations"] >= 1


def test_kernel_launches_by_kineto():
    x = torch.ones(8, device=CUDA)
    x.mul_(2).add_(1)
    with watch(launches="kernels") as ledger:
        for _ in range(5):
            x.mul_(2).add_(1)
    assert ledger.totals["launches"] == 10


def test_triton_launches():
    kernels = pytest.importorskip("gpubound.kernels")
    x, weight = torch.randn(4, 64, device=CUDA), torch.ones(64, device=CUDA)
    kernels.rms_norm(x, weight)
    with watch() as ledger:
        kernels.rms_norm(x, weight)
    assert ledger.totals["launches"] == 1


def test_a_captured_graph_replays_without_syncs():
    x = torch.ones(8, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    x * 2
    with torch.cuda.graph(graph):
        y = x * 2
    with watch(gputrace=True) as ledger:
        graph.replay()
    assert ledger.totals["syncs"] == 0
    assert y.tolist() == [2.0] * 8


def test_a_ledger_may_be_the_first_to_use_cuda():
    """torch's allocators do not exist before CUDA is initialized, and asking for their history ended the process."""
    code = "import torch; from gpubound.watch import watch\n"
    code += "with watch() as ledger: torch.ones(3, device='cuda').sum().item()\n"
    code += "print(ledger.totals['syncs'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and int(done.stdout) >= 1, done.stderr[-4000:]


def test_the_pretend_device_s_tests_with_the_gpu_hidden():
    """Both cannot live in one process, so on a GPU machine the CPU half of this folder runs in another."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/watch"],
        cwd=root,
        env={**alone, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:]
