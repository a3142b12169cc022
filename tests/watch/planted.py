"""One-line stalls, for any device: the ledger and the guard must name that very line."""

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
    name: str
    run: Callable[[Kit], object]
    line: int


SIMPLE = {
    "item": lambda kit: kit.scalar.item(),
    "float": lambda kit: float(kit.scalar),
    "int": lambda kit: int(kit.index),
    "bool": lambda kit: bool(kit.scalar),
    "python_range": lambda kit: list(range(kit.index)),
    "tolist": lambda kit: kit.x.tolist(),
    "cpu": lambda kit: kit.x.cpu(),
    "to_cpu": lambda kit: kit.x.to("cpu"),
    "numpy": lambda kit: kit.x.cpu().numpy(),
    "copy_to_host": lambda kit: kit.host.copy_(kit.x),
    "to_device": lambda kit: kit.host.to(kit.device),
    "pinned_but_blocking": lambda kit: kit.pinned.to(kit.device),
    "new_constant": lambda kit: torch.tensor([1.0, 2.0], device=kit.device),
    "list_index": lambda kit: kit.x[[0, 2]],
    "set_one_element": lambda kit: kit.x.__setitem__(0, 5.0),
    "number_at_indices": lambda kit: kit.x.__setitem__(kit.counts[:2], 5.0),
    "device_fill_value": lambda kit: kit.x.masked_fill(kit.mask, kit.scalar),
    "drawn": lambda kit: torch.normal(kit.x, kit.y),
    "host_choice": lambda kit: torch.where(kit.mask, kit.x, torch.tensor(0.0)),
    "stacked_scalars": lambda kit: torch.tensor([kit.scalar]),
    "f_string": lambda kit: f"{kit.scalar:.3f}",
    "printed": lambda kit: print(kit.scalar),
    "boolean_mask": lambda kit: kit.x[kit.mask],
    "masked_assignment": lambda kit: kit.x.__setitem__(kit.mask, kit.scalar),
    "nonzero": lambda kit: kit.mask.nonzero(),
    "where": lambda kit: torch.where(kit.mask),
    "masked_select": lambda kit: torch.masked_select(kit.x, kit.mask),
    "unique": lambda kit: kit.counts.unique(),
    "equal": lambda kit: torch.equal(kit.x, kit.y),
    "allclose": lambda kit: torch.allclose(kit.x, kit.y),
    "repeat_interleave": lambda kit: torch.repeat_interleave(kit.x, kit.counts),
    "one_hot": lambda kit: F.one_hot(kit.counts, -1),
    "device_index": lambda kit: kit.host[kit.index],
    "inverse": lambda kit: torch.linalg.inv(kit.matrix),
    "synchronize": lambda kit: kit.module.synchronize(),
    "stream_synchronize": lambda kit: kit.stream.synchronize(),
    "event_synchronize": lambda kit: kit.event.synchronize(),
    "clip_nonfinite": lambda kit: torch.nn.utils.clip_grad_norm_([kit.weight], 1.0, error_if_nonfinite=True),
}

PLANTS = [Plant(name, run, run.__code__.co_firstlineno) for name, run in SIMPLE.items()]


def plant(function):
    """Register a function with its line marked `# here`."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = [number for number, text in enumerate(lines) if "# here" in text]
    PLANTS.append(Plant(function.__name__, function, first + offset))
    return function


@plant
def branch(kit):
    if kit.scalar > 9:  # here
        return 1


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
