"""Under the name "cuda" the pretend device is what a script for CUDA expects, and gone after the block."""

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gpubound as gb
from gpubound.watch import watch
from gpubound.watch.pretend import COMPOSED, SimTensor
from gpubound.watch.pretend_cuda import cuda_is_pretended

CUDA = torch.device("cuda", 0)  # what this file sees, as any but gpubound's


@pytest.fixture
def cuda(sim) -> Iterator[torch.device]:
    with cuda_is_pretended():
        yield CUDA


SPELLINGS = [
    "torch.ones(2, device='cuda')",
    "torch.ones(2).cuda()",
    "torch.ones(2).to('cuda:0', non_blocking=True)",
    "torch.ones(2).to(torch.device('cuda'))",
    "torch.tensor([1.0, 2.0], device='cuda')",
    "torch.as_tensor([1, 2], device=torch.device('cuda', 0))",
    "torch.ones(2).cuda().new_zeros(2, device='cuda')",
    "torch.zeros_like(torch.ones(2), device='cuda')",
    "torch.ones(2).pin_memory().cuda(non_blocking=True)",
    "torch.empty(2, pin_memory=True).cuda()",
    "torch.tril_indices(3, 3, device='cuda')",
    "torch.randn(2, device='cuda', generator=torch.Generator('cuda').manual_seed(1))",
    "nn.Linear(2, 2).cuda().weight",
    "nn.Linear(2, 2, device='cuda').bias",
    "torch.ones(2).to(torch.accelerator.current_accelerator())",
    "torch.cuda.FloatTensor([[1.0], [2.0]])",
    "torch.cuda.LongTensor(2, 3).fill_(0)",
    "torch.cuda.FloatTensor(torch.Size([2]))",
    "torch.ones(2).type(torch.cuda.HalfTensor)",
    "torch.ones(2).type('torch.cuda.LongTensor')",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_the_pretend_device(cuda, spelling):
    tensor = eval(spelling)
    assert isinstance(tensor, SimTensor) and tensor.device == cuda and tensor.is_cuda


def test_a_script_sees_cuda_and_gpubound_does_not(cuda):
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.is_bf16_supported()
    assert torch.accelerator.current_accelerator().type == "cuda"
    assert torch.cuda.mem_get_info()[0] > 0 and torch.cuda.memory_allocated() == 0 and torch.cuda.current_device() == 0
    assert torch.Generator("cuda").device.type == "cuda" and torch.Generator().device.type == "cpu"
    pretend = torch.device("simgpu", 0)
    assert gb.device.accelerator() == torch.device("simgpu") and gb.device.resolve("cuda") == pretend == gb.device.resolve(
        "auto"
    )


def test_nothing_of_it_remains_after_the_block(sim):
    functions = dict(vars(torch.cuda)), torch.Tensor.to, torch.empty, torch.load, torch.compile, torch.Generator
    with cuda_is_pretended():
        kept = torch.ones(2, device="cuda")
    assert (dict(vars(torch.cuda)), torch.Tensor.to, torch.empty, torch.load, torch.compile, torch.Generator) == functions
    assert torch.cuda.is_available() is False and kept.device == sim and not kept.is_cuda
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        torch.empty(2, device="cuda")


def test_a_conversion_to_the_same_device_is_none(cuda):
    x = torch.ones(2, device=cuda)
    assert x.to("cuda") is x and x.cuda() is x and x.to(torch.device("cuda:0")) is x and x.to("cpu").device.type == "cpu"
    model = nn.Linear(2, 2)
    weight = model.weight
    assert model.cuda().weight is weight and model.to("cuda").weight is weight


def test_types_of_older_scripts(cuda):
    """They choose a type once, and make and convert everything by it."""
    x = torch.ones(2).type(torch.cuda.FloatTensor)
    assert x.type() == "torch.cuda.FloatTensor" and isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x, torch.cuda.LongTensor) and not isinstance(torch.ones(2), torch.cuda.FloatTensor)
    assert x.type(torch.FloatTensor).device.type == "cpu" and x.type(torch.int64).is_cuda and x.type(x.type()) is x
    assert torch.ones(2).type() == "torch.FloatTensor" and torch.ones(2).type(torch.LongTensor).dtype == torch.int64
    with watch(device=torch.device("simgpu", 0)) as ledger:
        torch.cuda.FloatTensor(4, 4)
        assert not ledger.rows
        torch.cuda.FloatTensor([1.0, 2.0])
    assert [(row.kind, row.place.site.code) for row in ledger.rows if row.kind == "h2d"] == [
        ("h2d", "torch.cuda.FloatTensor([1.0, 2.0])")
    ]
    try:
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
        assert torch.zeros(2).is_cuda and torch.zeros(2).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.cuda.current_stream(device=cuda).query() and torch.cuda.memory_stats(device=cuda)["x"] == 0


def test_a_default_device_reaches_modules_and_host_data(cuda):
    with torch.device("cuda"):
        assert nn.Linear(2, 2).weight.device == torch.tensor([1.0]).device == torch.zeros(2).device == cuda


def test_autocast_of_cuda_casts_there(cuda):
    x = torch.ones(2, 2, device=cuda)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16 and torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled()
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype == torch.float32
    with torch.autocast("cuda"):
        assert (x @ x).dtype == torch.get_autocast_dtype("cuda") == torch.float16
    assert not torch.is_autocast_enabled()


def test_a_grad_scaler_waits_once_and_synchronize_is_one_wait(cuda):
    model = nn.Linear(2, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    before = model.weight.tolist()
    with watch() as ledger:
        scaler.scale(model(torch.ones(4, 2, device="cuda")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()
        torch.cuda.current_stream().synchronize()
    waits = {row.what: row.count for row in ledger.rows if row.kind == "sync"}
    assert waits == {"item": 1, "torch.cuda.synchronize": 1, "stream.synchronize": 1}
    assert model.weight.tolist() != before


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers_have_the_cpu_s_values_and_gradients(cuda, kind, bias):
    torch.manual_seed(0)
    on_cpu = kind(3, 4, num_layers=2, bias=bias, bidirectional=True).double()
    there = copy.deepcopy(on_cpu).cuda()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    got, want = (model(x.to(device))[0] for model, device in ((there, cuda), (on_cpu, "cpu")))
    torch.testing.assert_close(got.cpu(), want)
    for out in (got, want):
        out.square().sum().backward()
    for theirs, mine in zip(there.parameters(), on_cpu.parameters()):
        torch.testing.assert_close(theirs.grad.cpu(), mine.grad)


def test_a_cell_s_state_may_have_no_gradient():
    """autograd passes None for the state that a loss does not use."""
    gates, cx = torch.randn(2, 12, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    gates.requires_grad_()
    hy, cy, workspace = COMPOSED["_thnn_fused_lstm_cell"](gates, torch.zeros_like(gates), cx)
    for grads in ((torch.ones_like(hy), None), (None, torch.ones_like(cy))):
        output = hy if grads[1] is None else cy
        (want,) = torch.autograd.grad(output.sum(), gates, retain_graph=True)
        got, _, _ = COMPOSED["_thnn_fused_lstm_cell_backward_impl"](*grads, cx, cy, workspace, False)
        torch.testing.assert_close(got, want)


def test_recomputation_runs_on_the_device(cuda):
    model, x = nn.Linear(2, 2).cuda(), torch.ones(2, 2, device=cuda, requires_grad=True)
    for reentrant in (True, False):
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert x.grad is not None and model.weight.grad.device == cuda


def test_a_checkpoint_is_loaded_onto_the_device(cuda):
    file = io.BytesIO()
    torch.save({"model": nn.Linear(2, 2).cuda().state_dict()}, file)
    for where, device in (("cuda", cuda), (torch.device("cuda:0"), cuda), ("cpu", torch.device("cpu"))):
        file.seek(0)
        assert torch.load(file, map_location=where)["model"]["weight"].device == device


def test_compilation_is_left_out_and_graphs_are_refused(cuda):
    def double(x):
        return x * 2

    before = gb.trace.fallbacks.copy()
    model = nn.Linear(2, 2)
    model.compile()
    assert torch.compile(double) is double and torch.compile(mode="reduce-overhead")(double) is double
    assert sum((gb.trace.fallbacks - before).values()) == 3
    with pytest.raises(NotImplementedError, match="pretend device"):
        torch.cuda.CUDAGraph()


def test_data_parallel_on_its_one_device_runs_the_module(cuda):
    model = nn.DataParallel(nn.Linear(2, 2)).cuda()
    assert model(torch.ones(4, 2)).device == cuda


def test_accelerate_takes_the_device(cuda):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # the device of the process's first Accelerator
    try:
        accelerator = accelerate.Accelerator()
        model = accelerator.prepare(nn.Linear(2, 2))
        assert accelerator.device == torch.device("cuda") and model.weight.device == cuda
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_placing_takes_the_device(cuda):
    placed = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    assert gb.place(placed, device="auto").device == torch.device("simgpu", 0) and placed[1].weight.device == cuda


def test_a_train_step_trains_there(cuda):
    torch.manual_seed(0)
    model = nn.Linear(4, 1).cuda()
    step = gb.TrainStep(model, squares, gb.AdamW(lr=1e-2), precision="fp32")
    x = torch.randn(8, 4).cuda()
    losses = [step([(x, x.sum(1, keepdim=True))]).loss.item() for _ in range(5)]
    assert losses[-1] < losses[0] and model.weight.device == cuda


def squares(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(), y.numel()
