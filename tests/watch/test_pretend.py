"""The pretend device computes what the CPU computes, attention and autocast included, and refuses what a device refuses."""

import copy
import io

import pytest
import torch
from torch.nn import functional, functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from gpubound.errors import DeviceError
from gpubound.watch import pretend, watch
from gpubound.watch.pretend import FP32, LOWER, WIDEST, SimTensor, simgpu
from tests.messages import message

from ..kernels.apart import apart
from .test_ledger import Block, make_step


def test_it_is_a_device_of_its_own(sim):
    assert sim == simgpu() == torch.device("simgpu:0")
    x = torch.ones(2, 3, device="simgpu")
    assert x.device == sim and x.is_simgpu and not x.is_cpu and isinstance(x, SimTensor)
    for made in (
        torch.zeros(2),
        torch.arange(3),
        torch.full((2,), 3.0),
        torch.randn(2),
        torch.randint(0, 5, (3,)),
        torch.eye(2),
    ):
        assert torch.equal(made.to(sim).cpu(), made)
    for make in (
        lambda device: torch.arange(3, device=device),
        lambda device: torch.arange(1.0, 8.0, 2.0, device=device),
        lambda device: torch.eye(2, 3, device=device),
        lambda device: torch.triu_indices(3, 3, device=device),
    ):
        made, wanted = make(sim), make("cpu")
        assert made.shape == wanted.shape and made.dtype == wanted.dtype and made.tolist() == wanted.tolist()
    assert torch.tensor([1.5, 2.5], device=sim).tolist() == [1.5, 2.5]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_training_gives_the_cpu_s_losses(sim, options):
    """Within rounding: torch takes other code for the same optimizer on another device. In fp64, because Adam's first steps
    follow a gradient's sign, however small it is.
    """
    losses = {}
    for device in (torch.device("cpu"), sim):
        torch.manual_seed(0)
        model = Block().double().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        step = make_step(device, model, optimizer, torch.arange(12).view(2, 6) % 13)
        losses[device.type] = [step().item() for _ in range(3)]
    assert losses["simgpu"] == pytest.approx(losses["cpu"], rel=1e-9)
    assert losses["cpu"][-1] < losses["cpu"][0]


@pytest.mark.parametrize(("options", "together"), [({}, True), ({"foreach": False}, False)], ids=str)
def test_many_tensors_are_updated_and_clipped_at_once_as_on_cuda(sim, options, together):
    weights = [torch.nn.Parameter(torch.ones(2, device=sim)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones(2, device=sim)
    optimizer = torch.optim.AdamW(weights, **options)
    with watch(device=sim) as ledger:
        torch.nn.utils.clip_grad_norm_(weights, 1.0, **options)
        optimizer.step()
        ledger.step()
    names = {row.what for row in ledger.rows if row.kind == "launch"}
    assert (names >= {"_foreach_addcdiv_", "_foreach_norm"}) is together, names
    assert ("addcdiv_" not in names) is together, names


def test_a_module_keeps_its_parameters_and_their_ties(sim):
    model = Block()
    weight = model.head.weight
    model.to(sim)
    assert model.head.weight is model.embed.weight is weight
    assert isinstance(weight, torch.nn.Parameter) and weight.device == sim
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight is not weight
    assert torch.equal(twin.qkv.weight, model.qkv.weight)


def test_data_takes_over_the_values_and_the_dtype(sim):
    """As a flat buffer of all weights does: an update of the buffer is one of the parameter."""
    flat, weight = torch.zeros(4, dtype=torch.bfloat16, device=sim), torch.nn.Parameter(torch.ones(2, 2, device=sim))
    weight.data = flat.view(2, 2)
    flat.fill_(3.0)
    assert weight.dtype == torch.bfloat16 and weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert (weight.detach() * 2).tolist() == [[6.0, 6.0], [6.0, 6.0]] and weight.data.data_ptr() == flat.data_ptr()


def test_checkpoints_hold_cpu_tensors(sim):
    model, file = Block().to(sim), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert {value.device.type for value in state.values()} == {"cpu"}
    other = Block().to(sim)
    other.load_state_dict(state)
    assert torch.equal(other.qkv.weight, model.qkv.weight)


def test_views_share_storage(sim):
    x = torch.zeros(2, 3, device=sim)
    x.view(-1)[1:3].fill_(7.0)
    x.t()[2, 1] = 5.0
    x[1].add_(1.0)
    assert x.tolist() == [[0.0, 7.0, 7.0], [1.0, 1.0, 6.0]]
    assert x[1].data_ptr() - x.data_ptr() == 12
    assert x.unsqueeze(0)[:, 1:].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_gradients_through_a_view_written_in_place(sim):
    grads = []
    for device in ("cpu", sim):
        x = torch.ones(2, 3).to(device).requires_grad_()
        y = x * 2
        y[1].mul_(x[0])
        y.sum().backward()
        grads.append(x.grad.tolist())
    assert grads[0] == grads[1]


BACKWARD = """
import threading, torch
from gpubound.watch import watch
from gpubound.watch.pretend import simgpu

{before}
x, threads = torch.ones(3, device=simgpu()).requires_grad_(), []
y = x * 2
y.register_hook(lambda g: threads.append(threading.get_ident()))
with watch() as ledger:
    y[x > 0].sum().backward()
inner = torch.utils.checkpoint.checkpoint(lambda z: z.sin(), x, use_reentrant=True)
inner.sum().backward()
print(threads == [threading.get_ident()], x.grad.tolist() == (2 + x.cos()).tolist(), ledger.totals["syncs"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("earlier", "here"), [("", False), ("torch.ones(2, requires_grad=True).sum().backward()", True)])
def test_the_thread_of_a_backward(earlier, here):
    """A device thread, as on CUDA. Autograd makes none after the process's first backward: then it is the calling thread."""
    assert apart(BACKWARD.format(before=earlier)) == f"{here} True 2\n"


def test_an_exception_in_a_hook_comes_out_of_backward(sim):
    """Torch 2.11 to 2.13 would end the process here (the device guard is asked for its type while the exception is pending)."""
    for n in range(20):  # more often than the interpreter takes to specialise the call that finds it
        x = torch.ones(3, device=sim).requires_grad_()
        y = x * 2

        def hook(g, n=n):
            raise KeyError(f"hook {n}")

        y.register_hook(hook)
        with pytest.raises(KeyError, match=f"hook {n}"):
            y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(sim, reentrant):
    linear = torch.nn.Linear(3, 3).to(sim)
    x = torch.rand(2, 3).to(sim).requires_grad_()
    torch.utils.checkpoint.checkpoint(lambda z: linear(z).sin(), x, use_reentrant=reentrant).sum().backward()
    again, plain = linear.weight.grad.clone(), copy.deepcopy(linear)
    plain.zero_grad()
    plain(x.detach()).sin().sum().backward()
    torch.testing.assert_close(again, plain.weight.grad)


def test_autocast(sim):
    linear, x = torch.nn.Linear(3, 3).to(sim), torch.rand(2, 3).to(sim)
    with torch.autocast("simgpu", dtype=torch.bfloat16):
        y = linear(x)
        loss = torch.nn.functional.cross_entropy(y, torch.tensor([0, 1]).to(sim))
    assert (y.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    loss.backward()
    assert linear.weight.grad.dtype == torch.float32


def test_pinned_memory(sim):
    x = torch.arange(6.0)
    pinned = x.pin_memory()
    assert not x.is_pinned() and pinned.is_pinned() and pinned[2:].is_pinned() and torch.equal(pinned, x)
    assert not torch.ones(2, device=sim).is_pinned()
    for batch in torch.utils.data.DataLoader(x, batch_size=3, pin_memory=True):
        assert batch.is_pinned()


def test_printing_and_reading(sim):
    x = torch.tensor([1.0, 2.0], device=sim)
    assert repr(x) == "tensor([1., 2.], device='simgpu:0')"
    assert repr(x.clone().requires_grad_()) == "tensor([1., 2.], device='simgpu:0', requires_grad=True)"
    assert f"{x.sum():.1f}" == "3.0" and x.numpy(force=True).tolist() == [1.0, 2.0]
    with pytest.raises(TypeError, check=message("watch/pretend:printing_and_reading")):
        x.numpy()


def test_what_a_script_asks_of_any_accelerator(sim):
    """`gpubound doctor --dry-run` takes scripts whose device is torch.accelerator.current_accelerator()."""
    with watch() as ledger:
        torch.accelerator.synchronize()
    found = [(row.what, row.count) for row in ledger.rows if row.kind == "sync"]
    assert found == [("torch.accelerator.synchronize", 1)]
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    assert (torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()) == (0, 0)


def test_devices_do_not_mix(sim):
    x = torch.ones(3, device=sim)
    with pytest.raises(RuntimeError) as error:
        x + torch.ones(3)
    assert str(error.value) == message("watch/pretend:devices_do_not_mix")
    assert (x + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]


def refused(monkeypatch, backend: str, gpu: bool) -> str:
    """What simgpu() says in a process that has this backend, and a GPU or none."""
    monkeypatch.setattr(pretend, "_registered", [])
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: backend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(DeviceError) as error:
        simgpu()
    return str(error.value)


def test_another_backend_in_its_place(monkeypatch):
    assert refused(monkeypatch, "npu", gpu=False) == message("watch/pretend:another_backend_in_its_p")


def test_beside_a_real_gpu(monkeypatch):
    assert refused(monkeypatch, "privateuseone", gpu=True) == message("watch/pretend:beside_a_real_gpu")


def test_importing_registers_nothing():
    assert apart(
        "import torch, gpubound.watch.pretend, gpubound.watch.guard, gpubound.watch.ledger\n"
        "print(torch._C._get_privateuse1_backend_name(), torch.accelerator.current_accelerator())"
    ).startswith("privateuseone")


def test_packed_sequences(sim):
    """Their lengths stay on the host, as on CUDA; reading the lengths from the device is a wait."""
    made = {}
    for device in (torch.device("cpu"), sim):
        torch.manual_seed(0)
        rnn = torch.nn.GRU(3, 4, batch_first=True, bidirectional=True)
        x, lengths = torch.rand(3, 5, 3), torch.tensor([5, 2, 3])
        rnn, x = rnn.to(device), x.to(device).requires_grad_()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        assert packed.data.device == device and packed.batch_sizes.device.type == "cpu"
        out, _ = pad_packed_sequence(rnn(packed)[0], batch_first=True)
        out.sum().backward()
        made[device.type] = [t.detach().cpu() for t in (out, x.grad, rnn.weight_ih_l0.grad)]
    for ours, wanted in zip(made["simgpu"], made["cpu"]):
        torch.testing.assert_close(ours, wanted)


def test_resizing_in_place_is_refused(sim):
    with pytest.raises(NotImplementedError, match="resizing"):
        torch.add(torch.ones(3, device=sim), 1, out=torch.empty(0, device=sim))


MASKS = {"bool": torch.arange(30).view(5, 6) % 3 > 0, "float": torch.arange(30.0).view(5, 6) / 30}
CASES = {
    "plain": ({}, None), "causal": ({"is_causal": True}, None), "scaled": ({"scale": 0.3}, None),
    "grouped heads": ({"enable_gqa": True}, None), "a mask": ({}, "bool"), "a bias": ({}, "float"),
}  # fmt: skip


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def computed(device, settings: dict, mask: str | None) -> list[torch.Tensor]:
    """(the output, the gradients of queries, keys, values and of a bias)."""
    torch.manual_seed(0)
    shapes = (2, 4, 5, 8), *((2, 2 if "enable_gqa" in settings else 4, 6, 8) for _ in range(2))
    inputs = [torch.rand(shape).to(device).requires_grad_() for shape in shapes]
    bias = None if mask is None else MASKS[mask].to(device)
    if mask == "float":
        inputs.append(bias := bias.detach().requires_grad_())
    out = functional.scaled_dot_product_attention(*inputs[:3], attn_mask=bias, **settings)
    out.square().sum().backward()
    return [out.detach().cpu(), *(t.grad.cpu() for t in inputs)]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_torch_s(case):
    for wanted, got in zip(computed("cpu", *CASES[case]), computed(simgpu(), *CASES[case]), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_it_is_one_launch_forward_and_one_backward_unless_math_is_asked_for():
    q = torch.rand(1, 2, 4, 8, device=simgpu(), requires_grad=True)
    with Ops() as ops:
        functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert sum("attention" in name for name in ops.names) == 2 and "bmm" not in ops.names
    with Ops() as ops, sdpa_kernel(SDPBackend.MATH):
        functional.scaled_dot_product_attention(q, q, q)
    assert "bmm" in ops.names


def test_dropout_drops_the_same_weights_in_backward():
    """Of one key each weight is 1: kept and doubled, or dropped, so that the gradient of the value counts the kept ones."""
    torch.manual_seed(3)
    q, k = torch.rand(1, 64, 8, device=simgpu()), torch.rand(1, 1, 8, device=simgpu())
    v = torch.ones(1, 1, 8, device=simgpu()).requires_grad_()
    out = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    out.sum().backward()
    assert set(out.detach().cpu().flatten().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(v.grad.cpu(), out.detach().cpu().sum(1, keepdim=True))


def test_no_grad_inference_and_autocast_keep_their_dtype():
    q = torch.rand(1, 2, 4, 8, device=simgpu())
    with torch.inference_mode(), torch.autocast("simgpu", dtype=torch.bfloat16):
        assert functional.scaled_dot_product_attention(q, q, q).dtype == torch.bfloat16
    with torch.no_grad():
        assert functional.scaled_dot_product_attention(q, q, q).shape == q.shape


def test_cuda_s_autocast_has_these_ops_too():
    """A build for the CPU has CUDA's table. cross_entropy_loss is made of two ops that are in it."""
    for name in {*LOWER, *FP32, *WIDEST} - {"cross_entropy_loss"}:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA"), name


def test_products_losses_and_mixed_dtypes():
    device = simgpu()
    image, weight = torch.rand(1, 2, 4, 4, device=device), torch.rand(2, 3, 2, 2, device=device, requires_grad=True)
    with torch.autocast("simgpu", dtype=torch.bfloat16):
        half = F.conv2d(image, torch.rand(2, 2, 1, 1, device=device))
        up = F.conv_transpose2d(half, weight, stride=2)
        assert half.dtype == up.dtype == torch.bfloat16 and up.shape == (1, 3, 8, 8)
        assert F.smooth_l1_loss(up, torch.zeros_like(up)).dtype == F.interpolate(up, scale_factor=2).dtype == torch.float32
        assert torch.addcmul(image, half, half).dtype == torch.float32
        assert torch.addcmul(half, half, half).dtype == torch.bfloat16
        up.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
