"""One-line stalls, each on a line of its own marked `# here`, for any device: the ledger and the guard must name that
very line.
"""

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


class Kit:
    """What a plant needs, on the device, made before anything watches."""

    def __init__(self, device: torch.device):
        self.device = device
        self.module = getattr(torch, device.type)  # torch.cuda or torch.simgpu
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(8, generator=generator).to(device)
        self.y = self.x.clone()
        self.weight = torch.rand(8, generator=generator).to(device).requires_grad_()
        self.counts = torch.arange(8).to(device)
        self.mask = (torch.arange(8) % 2 == 0).to(device)
        self.scalar = torch.tensor(0.5).to(device)
        self.index = torch.tensor(3).to(device)
        self.matrix = torch.eye(3).to(device)
        self.host = torch.ones(8)
        self.pinned = torch.ones(8).pin_memory()
        self.stream = self.module.Stream()
        self.event = self.module.Event()
        self.event.record()
        self.optimizer = torch.optim.AdamW([self.weight], foreach=False)
        self.weight.grad = torch.ones_like(self.weight)
        self.optimizer.step()  # makes its state


@dataclass(frozen=True)
class Plant:
    run: Callable[[Kit], object]
    line: int

    @property
    def name(self) -> str:
        return self.run.__name__.strip("_")


PLANTS: list[Plant] = []


def plant(function):
    lines, first = inspect.getsourcelines(function)
    (offset,) = [number for number, text in enumerate(lines) if "# here" in text]
    PLANTS.append(Plant(function, first + offset))
    return function


@plant
def item(kit):
    return kit.scalar.item()  # here


@plant
def float_(kit):
    return float(kit.scalar)  # here


@plant
def int_(kit):
    return int(kit.index)  # here


@plant
def bool_(kit):
    return bool(kit.scalar)  # here


@plant
def branch(kit):
    if kit.scalar > 9:  # here
        return 1


@plant
def python_range(kit):
    return list(range(kit.index))  # here


@plant
def tolist(kit):
    return kit.x.tolist()  # here


@plant
def cpu(kit):
    return kit.x.cpu()  # here


@plant
def to_cpu(kit):
    return kit.x.to("cpu")  # here


@plant
def numpy(kit):
    return kit.x.cpu().numpy()  # here


@plant
def copy_to_host(kit):
    kit.host.copy_(kit.x)  # here


@plant
def to_device(kit):
    return kit.host.to(kit.device)  # here


@plant
def pinned_but_blocking(kit):
    return kit.pinned.to(kit.device)  # here


@plant
def new_constant(kit):
    return torch.tensor([1.0, 2.0], device=kit.device)  # here


@plant
def list_index(kit):
    return kit.x[[0, 2]]  # here


@plant
def set_one_element(kit):
    kit.x[0] = 5.0  # here


@plant
def number_at_indices(kit):
    kit.x[kit.counts[:2]] = 5.0  # here


@plant
def device_fill_value(kit):
    return kit.x.masked_fill(kit.mask, kit.scalar)  # here


@plant
def drawn(kit):
    return torch.normal(kit.x, kit.y)  # here


@plant
def host_choice(kit):
    return torch.where(kit.mask, kit.x, torch.tensor(0.0))  # here


@plant
def stacked_scalars(kit):
    return torch.tensor([kit.scalar])  # here


@plant
def f_string(kit):
    return f"{kit.scalar:.3f}"  # here


@plant
def printed(kit):
    print(kit.scalar)  # here


@plant
def boolean_mask(kit):
    return kit.x[kit.mask]  # here


@plant
def masked_assignment(kit):
    kit.x[kit.mask] = kit.scalar  # here


@plant
def nonzero(kit):
    return kit.mask.nonzero()  # here


@plant
def where(kit):
    return torch.where(kit.mask)  # here


@plant
def masked_select(kit):
    return torch.masked_select(kit.x, kit.mask)  # here


@plant
def unique(kit):
    return kit.counts.unique()  # here


@plant
def equal(kit):
    return torch.equal(kit.x, kit.y)  # here


@plant
def allclose(kit):
    return torch.allclose(kit.x, kit.y)  # here


@plant
def repeat_interleave(kit):
    return torch.repeat_interleave(kit.x, kit.counts)  # here


@plant
def one_hot(kit):
    return F.one_hot(kit.counts, -1)  # here


@plant
def device_index(kit):
    return kit.host[kit.index]  # here


@plant
def inverse(kit):
    return torch.linalg.inv(kit.matrix)  # here


@plant
def synchronize(kit):
    kit.module.synchronize()  # here


@plant
def stream_synchronize(kit):
    kit.stream.synchronize()  # here


@plant
def event_synchronize(kit):
    kit.event.synchronize()  # here


@plant
def clip_nonfinite(kit):
    torch.nn.utils.clip_grad_norm_([kit.weight], 1.0, error_if_nonfinite=True)  # here


@plant
def in_no_grad(kit):
    with torch.no_grad():
        return kit.weight.sum().item()  # here


@plant
def in_inference_mode(kit):
    with torch.inference_mode():
        return kit.weight.sum().item()  # here


@plant
def tensor_hook(kit):
    def hook(g):
        return g * 0 if g.isnan().any() else g  # here

    y = kit.weight * 2
    y.register_hook(hook)
    y.sum().backward()


@plant
def accumulate_hook(kit):
    def hook(p):
        p.grad.sum().item()  # here

    handle = kit.weight.register_post_accumulate_grad_hook(hook)
    (kit.weight * 2).sum().backward()
    handle.remove()


class _Custom(torch.autograd.Function):
    body: Callable

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return _Custom.body(g)


@plant
def function_backward(kit):
    def body(g):
        return g * float(g.max())  # here

    _Custom.body = body
    _Custom.apply(kit.weight).sum().backward()


@plant
def optimizer_step_on_device(kit):
    kit.optimizer.state[kit.weight]["step"] = torch.ones((), device=kit.device)
    kit.optimizer.step()  # here


@plant
def optimizer_hook(kit):
    def hook(optimizer, args, kwargs):
        kit.weight.sum().item()  # here

    handle = kit.optimizer.register_step_post_hook(hook)
    kit.optimizer.step()
    handle.remove()


@plant
def another_thread(kit):
    def work():
        kit.x.sum().item()  # here

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
