"""The tensor of the pretend device, and its kernels."""

import copy
import functools
from collections.abc import Callable
from operator import attrgetter

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from .ops import composite, mixes, on_host, tensors
from .python_calls import announce

NAME = "simgpu"

observers: list[Callable] = []
"""Called as observer(func, args, kwargs) before each op on the pretend device."""


class SimTensor(torch.Tensor):
    """A tensor of device simgpu:0 that holds a CPU tensor, `elem`, of the same shape and strides."""

    elem: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elem: torch.Tensor):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=torch.device(NAME, 0),
        )
        self.elem = elem
        return self

    # Without these two, Module.to would replace parameters instead of changing them, and tied weights would come apart.
    def __tensor_flatten__(self):
        return ["elem"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["elem"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        if composite(func):
            return func.decompose(*args, **kwargs)
        for observe in tuple(observers):
            observe(func, args, kwargs)
        return _run(func, args, kwargs)

    def __repr__(self, *, tensor_contents=None):
        if self.numel():
            announce("print", NAME)
        text = f"{repr(self.elem.detach())[:-1]}, device='{self.device}'"
        if self.grad_fn is not None:
            return f"{text}, grad_fn=<{self.grad_fn.name()}>)"
        return f"{text}, requires_grad=True)" if self.requires_grad else f"{text})"

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __setitem__(self, index, value):
        if isinstance(value, (bool, int, float)):  # as on CUDA, a number comes as a CPU scalar, and so may cost a copy
            value = torch.tensor(value, dtype=self.dtype, device="cpu")
        super().__setitem__(index, value)

    def tolist(self):
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False):
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy it to the host first."
            )
        return self.detach().cpu().numpy()

    def __array__(self, dtype=None):
        return self.numpy()

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def untyped_storage(self):
        return self.elem.untyped_storage()

    def __reduce_ex__(self, protocol):
        return self.detach().cpu().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
        twin: torch.Tensor = SimTensor(self.elem.detach().clone()).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, self.requires_grad)
        twin.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = twin
        return twin


def _run(func, args, kwargs):
    """Compute `func` on the CPU tensors inside, and wrap what comes out, sharing storage where the op does."""
    if func.namespace not in ("aten", "prims") and _has_kernel(func.name()):  # a custom op's body runs on the device, too
        return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1), *args, **kwargs)
    if not mixes(func):
        strays = [t for t in tensors(args) if on_host(t) and t.dim() > 0]
        if strays and any(isinstance(t, SimTensor) for t in tensors(args)):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func._opname} got one on {NAME}:0 and one of shape "
                f"{tuple(strays[0].shape)} on {strays[0].device}"
            )
    inner = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    target = inner.get("device")
    if target is not None:
        inner["device"] = torch.device("cpu") if torch.device(target).type == NAME else target
    out = func(*tree_map_only(SimTensor, attrgetter("elem"), args), **tree_map_only(SimTensor, attrgetter("elem"), inner))
    if target is not None and torch.device(target).type != NAME:
        return out
    if func._opname == "copy_" and not isinstance(args[0], SimTensor):
        return args[0]
    return return_and_correct_aliasing(func, args, kwargs, tree_map_only(torch.Tensor, SimTensor, out))


@functools.cache
def _has_kernel(name: str) -> bool:
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "PrivateUse1")


# Kernels for calls that reach the device without passing SimTensor: factories, and torch.tensor(), which dispatches nothing.


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return SimTensor(torch.ops.aten.empty.memory_format(size, dtype=dtype, device="cpu", memory_format=memory_format))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return SimTensor(torch.ops.aten.empty_strided.default(size, stride, dtype=dtype, device="cpu"))


def _dispatched(op) -> Callable:
    return lambda *args: SimTensor.__torch_dispatch__(op, (), args)


KERNELS = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "copy_": _dispatched(torch.ops.aten.copy_.default),
    "_local_scalar_dense": _dispatched(torch.ops.aten._local_scalar_dense.default),
}

_pinned: dict[int, StorageWeakRef] = {}  # CPU storages that we call pinned


def pin_memory(self, device=None):
    twin = torch.empty_like(self).copy_(self)
    for key in [key for key, storage in _pinned.items() if storage.expired()]:
        del _pinned[key]
    reference = StorageWeakRef(twin.untyped_storage())
    _pinned[reference.cdata] = reference
    return twin


def is_pinned(self, device=None) -> bool:
    reference = _pinned.get(self.untyped_storage()._cdata)
    return reference is not None and not reference.expired()
