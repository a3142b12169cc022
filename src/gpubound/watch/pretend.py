"""A pretend GPU, so that a project can assert "this step has no host sync" in CI on a machine without one.

    from gpubound.watch.pretend import simgpu

    device = simgpu()                     # torch.device("simgpu:0")
    model.to(device); batch.to(device)    # the values are right; the speed means nothing

A tensor there holds a CPU tensor and computes with it, but torch treats it as a tensor of another device: mixing it with CPU
tensors is refused, reading a value needs a copy, and backward runs on a device thread, as on CUDA (on the calling thread, if
this process ran a backward before it called `simgpu()`). `observers` are called before every op.

Not pretended: streams (work runs in order), a separate generator (the CPU's is used), `torch.empty(pin_memory=True)`
(`.pin_memory()` works), resizing in place, torch.compile, DLPack. Tensors are saved as CPU tensors. `pretend_cuda.py` gives
this device the name "cuda".

The pretend device has attention, recurrent cells, and autocast to 16 bits in another way than a CPU. A GPU has attention as one
op forward and one backward; without these torch takes its math form on the pretend device, some twenty launches that no GPU
makes. Of recurrent cells torch has one op a time step, and its backward, for GPUs alone; a workspace is what the backward
needs, with the columns of CUDA's kernels. The tensors of both are those of the CPU inside.
"""

from __future__ import annotations

import atexit
import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import optimizer
from torch.utils import _foreach_utils, backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing

from ..device import PRETENDED
from ..errors import DeviceError
from .ops import announce, composite, mixes, on_host, tensors


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Run scaled_dot_product_attention as torch's op for backends that bring a kernel, unless sdpa_kernel(MATH) forbids it."""
    backends = torch.backends.cuda
    if not (backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled() or backends.cudnn_sdp_enabled()):
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    return fused(query, key, value, attn_mask, dropout_p, is_causal, False, scale=scale)[0]


def _weights(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Return softmax(scale q k' + bias) in at least fp32; 0 in a row that is masked altogether."""
    scores = scale * query @ key.mT
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    return scores.softmax(-1).nan_to_num(0.0)


def _dropout_factor(weights: Tensor, dropout_p: float, seed: Tensor) -> Tensor | float:
    """Return the factor of each weight after dropout, the same one in backward."""
    if not dropout_p:
        return 1.0
    draw = torch.Generator(weights.device).manual_seed(int(seed))
    uniform = torch.rand(weights.shape, generator=draw, device=weights.device, dtype=torch.float32)
    return (uniform >= dropout_p) / (1 - dropout_p)


def _widened(query: Tensor, *others: Tensor) -> list[Tensor]:
    """Return keys and values in the query's wider type, one head for each of the query's."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[-3] // others[0].shape[-3] if query.dim() > 3 else 1
    return [query.to(dtype), *(t.to(dtype).repeat_interleave(groups, -3) if groups > 1 else t.to(dtype) for t in others)]


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple:  # fmt: skip
    seed = torch.randint(1 << 31, (), device="cpu") if dropout_p else torch.zeros((), dtype=torch.int64, device="cpu")
    q, k, v = _widened(query, key, value)
    weights = _weights(q, k, bias, is_causal, query.shape[-1] ** -0.5 if scale is None else scale)
    out = (weights * _dropout_factor(weights, dropout_p, seed) @ v).to(query.dtype)
    empty, sums = query.new_empty(0), query.new_zeros(query.shape[:-1], dtype=torch.float32)
    return out, sums, empty, empty, query.shape[-2], key.shape[-2], seed, torch.zeros_like(seed), empty


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, needs: list[bool], out: Tensor, sums: Tensor,
    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, seed: Tensor,
    offset: Tensor, *, scale: float | None = None,
) -> tuple:  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = _widened(query, key, value)
    weights, grad = _weights(q, k, bias, is_causal, scale), grad.to(q.dtype)
    mask = _dropout_factor(weights, dropout_p, seed)
    grad_weights = grad @ v.mT * mask
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    by_head = scale * grad_scores.mT @ q, (weights * mask).mT @ grad  # of keys and values, one for each of the query's heads
    grad_key, grad_value = (
        each.unflatten(-3, (t.shape[-3], -1)).sum(-3) if each.shape != t.shape else each
        for each, t in zip(by_head, (key, value))
    )
    grad_bias = grad_scores.sum_to_size(bias.shape).to(bias.dtype) if bias is not None and needs[3] else query.new_empty(0)
    return (scale * grad_scores @ k).to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_bias


def lstm_cell(gates: Tensor, hidden: Tensor, cx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None):
    gates = gates + hidden if input_bias is None or hidden_bias is None else gates + hidden + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
):
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_hy * o * (1 - t * t) + (0 if grad_cy is None else grad_cy)
    parts = (grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g), grad_hy * t * o * (1 - o))
    grad = torch.cat(parts, 1)
    return grad, grad_c * f, grad.sum(0) if has_bias else grad.new_empty(0)


def gru_cell(gates: Tensor, hidden: Tensor, hx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None):
    gates = gates if input_bias is None else gates + input_bias
    hidden = hidden if hidden_bias is None else hidden + hidden_bias
    (reset, update, new), (hidden_reset, hidden_update, hidden_new) = gates.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (reset + hidden_reset).sigmoid(), (update + hidden_update).sigmoid()
    n = (new + r * hidden_new).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hidden_new], 1)


def gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool):
    r, z, n, hx, hidden_new = workspace.chunk(5, 1)
    grad_z = grad * (hx - n) * z * (1 - z)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r = grad_n * hidden_new * r * (1 - r)
    of_input, of_hidden = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (grad.new_empty(0), grad.new_empty(0))
    return of_input, of_hidden, grad * z, *biases


COMPOSED = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "_scaled_dot_product_fused_attention_overrideable": attention_forward,
    "_scaled_dot_product_fused_attention_overrideable_backward": attention_backward,
}
"""Ops that a GPU has as one kernel, by their names in aten, and how they are computed on the CPU tensors inside."""


LOWER = (
    "linear", "matmul", "mm", "mv", "addmm", "addmv", "addr", "bmm", "addbmm", "baddbmm", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu",
    "scaled_dot_product_attention",
)  # fmt: skip
FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "group_norm",
    "norm.Scalar", "norm.ScalarOpt_dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss",
    "nll_loss2d", "cross_entropy_loss", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "softmax.int", "log_softmax.int",
    "cumsum", "cumprod", "prod", "prod.dim_int", "sum", "sum.dim_IntList", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
)  # fmt: skip
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot", "vdot",
)  # fmt: skip


def autocast(library: torch.library.Library) -> list[torch.library.Library]:
    """Let torch.autocast run ops of the pretend device as CUDA's does: in 16 bits, in fp32, or in their widest dtype. Return
    objects that must stay alive."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names in (LOWER, FP32, WIDEST):
        for name in names:
            library.impl(name, _casting(name, names), "AutocastPrivateUse1")
    return [rest]


def aten(name: str) -> torch._ops.OpOverload:
    """Return the op of a name as torch.library has it, such as "arange.start"."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _casting(name: str, names: tuple[str, ...]):
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
    op = aten(name)

    def is_cast(value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64

    def kernel(*args, **kwargs):
        fp32 = any(is_cast(value) and value.dtype == torch.float32 for value in (*args, *kwargs.values()))
        to = torch.float32 if names is FP32 or (names is WIDEST and fp32) else torch.get_autocast_dtype(PRETENDED)

        def cast(value):
            return value.to(to) if is_cast(value) else value

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return kernel


NAME = PRETENDED

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
        if "device" in kwargs:
            kwargs = {**kwargs, "device": own_device(kwargs["device"])}
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
        if isinstance(value, (bool, int, float)):  # as on CUDA, a number becomes a CPU scalar, which may cost a copy
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

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.elem = value.elem  # type: ignore[attr-defined]

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


PARAMETERS = (torch.nn.Parameter, SimTensor)
"""The types of a plain parameter: one on the pretend device is no torch.nn.Parameter."""


def own_device(where):
    """Return the pretend device for a spelling of a CUDA device (pretend_cuda.py), and anything else unchanged."""
    if isinstance(where, str):
        return torch.device(NAME, 0) if where.partition(":")[0] == "cuda" else where
    return torch.device(NAME, 0) if isinstance(where, torch.device) and where.type == "cuda" else where


def _run(func, args, kwargs):
    """Compute `func` on the CPU tensors inside, and wrap the results, sharing storage if the op does."""
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
    compute = COMPOSED.get(func._opname, func)
    out = compute(*map(_unwrap, args), **{name: _unwrap(value) for name, value in inner.items()})
    if target is not None and torch.device(target).type != NAME:
        return out
    if (result := kwargs.get("out")) is not None and result.shape != result.elem.shape:
        raise NotImplementedError(f"the pretend device has no resizing in place, as {func._opname} into a tensor wants")
    if func._opname == "copy_" and not isinstance(args[0], SimTensor):
        return args[0]
    if func._opname == "_pack_padded_sequence":  # the lengths stay on the host, as on CUDA
        return _wrap(out[0]), out[1]
    return return_and_correct_aliasing(func, args, kwargs, _wrap(out))


# An op's schema has no containers but lists. torch's pytree, which takes any, was two thirds of an op's time.


def _unwrap(value):
    if isinstance(value, SimTensor):
        return value.elem
    return type(value)(map(_unwrap, value)) if type(value) in (list, tuple) else value


def _wrap(value):
    if isinstance(value, torch.Tensor):
        return SimTensor(value)
    return type(value)(map(_wrap, value)) if type(value) in (list, tuple) else value


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


def _factory(op) -> Callable:
    """Return the kernel of a factory whose result torch resizes, which the pretend device cannot do in place."""

    def factory(*args, device=None, pin_memory=None, **kwargs):
        made = SimTensor(op(*args, device="cpu", **kwargs))
        for observe in tuple(observers):
            observe(op, args, {**kwargs, "device": made.device})
        return made

    return factory


RESIZED = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "tril_indices", "triu_indices")
FACTORIES = {"empty.memory_format": _empty, "empty_strided": _empty_strided} | {n: _factory(aten(n)) for n in RESIZED}
KERNELS = FACTORIES | {name: _dispatched(aten(name)) for name in ("copy_", "_local_scalar_dense")}

_pinned: dict[int, StorageWeakRef] = {}  # CPU storages that count as pinned


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


# Seconds. The device's thread in autograd calls Python once more after the backward that it ran, to leave the device. A
# program that ended just then had no interpreter for it, and was aborted: 7 of 81 starts of `gpubound doctor --dry-run` on a
# script of one line, three at a time on two cores.
SETTLE = 0.05


class SimStream:
    """Stream of the pretend device, where work is complete when it is requested: nothing needs an order."""

    def synchronize(self) -> None:
        announce("stream.synchronize", NAME)

    def wait_stream(self, stream) -> None: ...

    def wait_event(self, event) -> None: ...


class SimEvent:
    def __init__(self, enable_timing: bool = False): ...

    def record(self, stream=None) -> None: ...

    def wait(self, stream=None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        announce("event.synchronize", NAME)


class SimModule(getattr(backend_registration, "_DummyBackendModule", object)):  # type: ignore[misc]
    """Module `torch.simgpu`: torch's stand-in for one device that always exists, with the functions that it lacks."""

    __name__ = "torch.simgpu"
    Stream = SimStream
    Event = SimEvent

    def set_device(self, device) -> None: ...

    def current_stream(self, device=None):
        return SimStream()

    def synchronize(self, device=None) -> None:
        announce("torch.simgpu.synchronize", NAME)

    def manual_seed(self, seed: int) -> None: ...

    def get_rng_state(self, device=None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device=None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_pending: list[BaseException] = []
_raise_pending = functools.partial(int)  # any call that the interpreter does not inline


def _device_guard():
    class DeviceGuard(torch._C._acc.DeviceGuard):
        def type_(self):
            """Return the device type. Also called as an exception leaves a hook on an autograd thread (torch 2.11 to 2.13 at
            least).

            An answer with that exception pending would end the process. A call makes Python wrap it in a SystemError, which is
            caught and kept here; `_engine` raises it again in the caller of backward.
            """
            try:
                _raise_pending()
            except SystemError as error:
                if error.__cause__ is not None:
                    _pending.append(error.__cause__)
            return torch._C._autograd.DeviceType.PrivateUse1

    frames = torch._C._dynamo.eval_frame  # torch.compile would otherwise trace into type_, from any compiled function
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(DeviceGuard.type_.__code__, skip)
    return DeviceGuard()


def _has_thread() -> bool:
    """Return whether autograd has a thread for the pretend device; they are made at the process's first backward."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((), device=NAME, dtype=torch.float32).requires_grad_()
        try:
            torch.autograd.grad(x * 2, x)
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            return False
    return True


def _engine(run_backward, threaded: bool):
    """Return `run_backward` on the calling thread if the device has none, with the exceptions that `type_` above has kept."""

    @functools.wraps(run_backward)
    def _engine_run_backward(*args, **kwargs):
        try:
            with torch.autograd.set_multithreading_enabled(threaded and torch._C._is_multithreading_enabled()):
                return run_backward(*args, **kwargs)
        except SystemError:
            if not _pending:
                raise
            error, _pending[:] = _pending[0], ()
            raise error from None

    return _engine_run_backward


def _register() -> list[object]:
    """Register the backend with torch. Return objects that must stay alive."""
    guard = _device_guard()
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=SimModule(), device_guard=guard)
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")
    library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    library.impl("_pin_memory", pin_memory, "CPU")
    library.impl("is_pinned", is_pinned, "CPU")
    references = [library, guard, *autocast(library)]
    together: tuple[list, ...] = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    for types in together:
        types.append(SimTensor)  # as on CUDA: an optimizer and clipping take all tensors at once, not one after another
    # What torch.accelerator calls and a Python backend lacks. No work is pending, and the call has been announced (ops.py);
    # there is no allocator, whose peaks torch 2.11 resets without asking: statistics are 0, and empty_cache does nothing.
    torch._C._accelerator_synchronizeDevice = lambda device_index: None
    torch._C._accelerator_isAllocatorInitialized = lambda: False
    torch._C._accelerator_resetPeakStats = torch._C._accelerator_resetAccumulatedStats = lambda device_index: None
    atexit.register(time.sleep, SETTLE)
    torch.autograd._engine_run_backward = _engine(torch.autograd._engine_run_backward, _has_thread())
    return references


_registered: list[object] = []  # torch keeps no reference to a Python backend's parts


def simgpu() -> torch.device:
    """Make the pretend device usable in this process, and return it. Calling it again changes nothing."""
    if _registered:
        return torch.device(NAME, 0)
    backend_name = torch._C._get_privateuse1_backend_name()
    if backend_name != "privateuseone":
        raise DeviceError(
            f"simgpu: this process already has the backend {backend_name!r} in torch's one free place (PrivateUse1), "
            "which can be named once; run the pretend device in a separate process."
        )
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        raise DeviceError(
            f"simgpu: torch {torch.__version__} has no Python backends; the pretend device needs torch 2.11 or newer."
        )
    if torch.cuda.is_available():
        raise DeviceError(
            "simgpu: a CUDA GPU is visible, and a second accelerator would take over its streams and pinned memory in this "
            "process; start it with CUDA_VISIBLE_DEVICES= (empty) to hide the GPU, or watch the GPU itself."
        )
    _registered.extend(_register())
    return torch.device(NAME, 0)


def ready() -> bool:
    """Return whether `simgpu()` has been called in this process."""
    return bool(_registered)
