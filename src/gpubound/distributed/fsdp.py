"""Shard a model's parameters over the ranks with PyTorch's FSDP2 (fully_shard).

Each rank has some rows of every parameter. The parameters of a block are gathered just before their use, in the dtype of the
computation, and freed after it; gradients are reduce-scattered in fp32. So a rank keeps, updates and saves only its rows. Where
the number of ranks does not divide the rows, the last ranks have rows of zeros at the end, so that all have equal sizes.

Low-rank adapters stay whole on every rank; only the frozen model under them is sharded.

A model that fits no rank is made on the meta device, where `InitRecorder` records how its tensors are filled. The fills are
then repeated on a real device, tensor by tensor and in their order, so that the generator yields the numbers of a model that is
made there at once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..device import grow_segments
from ..layers.linear_product import format_of, is_sharded
from ..layers.quantized_base import Base
from ..lora.layers import of_peft
from .fsdp_model import attach_gathered, fsdp_units, has_attached_state, share_tensor_state
from .local_shard import LocalShard, local_shard_of
from .ranks import Ranks, check_ranks

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    ranks: Ranks,
    dtype: torch.dtype = torch.bfloat16,
    keep: bool = False,
    whole: bool | None = None,
) -> None:
    """Shard every parameter in place, with the values of the first rank. One of `blocks` at a time is gathered.

    dtype  dtype of the computation; the shards are fp32
    keep   keep a gathered block until backward has used it: less traffic, and more memory
    whole  keep trained parameters whole on every rank, and shard only the frozen ones, in `dtype`. None: if the model has
           low-rank adapters, the library's or PEFT's
    """
    check_ranks(ranks, "shard")
    whole = has_attached_state(model) or any(map(of_peft, model.modules())) if whole is None else whole
    if not whole:
        special = [name for name, module in model.named_modules() if of_peft(module)]
        special += [name for name, parameter in model.named_parameters() if format_of(parameter).coded]
        if special:
            raise ValueError(
                f"shard: {special[0]} has a low-rank adapter or is in codes, and whole=False would shard all parameters alike; "
                f"leave whole=False out."
            )
    trained = {p for p in model.parameters() if p.requires_grad} if whole else set[Parameter]()
    if whole:
        for p in model.parameters():
            if p not in trained and not format_of(p).coded:
                p.data = p.data.to(dtype)
    else:
        model.to(torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            ranks.broadcast(tensor)
    _shard(model, blocks, ranks, dtype, keep, dtype if whole else torch.float32, whole=trained)
    if whole:
        share_tensor_state(model)


def shard_deferred(
    make: Callable[[torch.device], Model],
    blocks: Callable[[Model], Sequence[nn.Module]],
    ranks: Ranks,
    dtype: torch.dtype = torch.bfloat16,
    keep: bool = False,
    fill: Callable[[Mapping[str, LocalShard]], object] | None = None,
    frozen: bool = False,
    encode: Callable[[nn.Module], object] | None = None,
) -> Model:
    """Return make(device) in shards, for a model that fits no rank: one block, or one parameter while it is drawn, is whole.

    make    is called with the meta device
    blocks  returns the blocks of the model that are gathered one at a time; otherwise as in `shard`
    fill    is called with each rank's shards of parameters and buffers, by name, and fills them, from a file for example. None:
            the weights are those of make(device) in one process, bit for bit; all ranks draw them with the first's generator
    frozen  none of it will train, except for adapters that are added later: the shards are in `dtype`
    encode  is called with each whole block of a frozen model that `fill` fills, before it is sharded, to quantise it
    """
    check_ranks(ranks, "shard_deferred")
    if encode is not None and (fill is None or not frozen):
        raise ValueError("shard_deferred: encode takes weights of a frozen model that fill has read; add fill, frozen=True.")
    recorder = InitRecorder()
    with recorder:
        model = make(torch.device("meta"))
    names = {}
    for name, tensor in _tensors(model):
        if fill is None:
            recorder.check(name, tensor)
        names[key_of(tensor)] = name
    if frozen:
        model.requires_grad_(False)
    parts = blocks(model)

    def shards_of(tensors: Iterable[Tensor]) -> dict[str, LocalShard]:
        ids = {id(tensor) for tensor in tensors}
        return {name: local_shard_of(tensor) for name, tensor in _tensors(model) if id(tensor) in ids}

    def fill_and_encode(block: nn.Module) -> None:
        if fill is not None and encode is not None:
            fill(shards_of(t for _, t in _tensors(block)))
            encode(block)

    _shard(model, parts, ranks, dtype, keep, dtype if frozen else torch.float32, fill_and_encode)
    if fill is None:
        _draw(recorder, names, shards_of(t for _, t in _tensors(model)), ranks)
    else:
        done = {id(t) for part in parts for _, t in _tensors(part)} if encode else set[int]()
        fill(shards_of(t for _, t in _tensors(model) if id(t) not in done))
    if frozen:
        share_tensor_state(model)
    return model


def _draw(recorder: "InitRecorder", names: dict[int, str], shards: Mapping[str, LocalShard], ranks: Ranks) -> None:
    """Repeat the recorded fills, and keep this rank's shards. `names`: tensor names by their keys."""
    random = torch.cuda if ranks.device.type == "cuda" else torch
    state = torch.tensor(ranks.of_first(random.get_rng_state().tolist()), dtype=torch.uint8, device="cpu")
    random.set_rng_state(state)
    for key, values in recorder.values(ranks.device):
        if key in names:
            piece = shards[names[key]]
            piece.local.copy_(values[piece.slices])


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    ranks: Ranks,
    dtype: torch.dtype,
    keep: bool,
    stored: torch.dtype,
    ready: Callable[[nn.Module], object] = lambda block: None,
    whole: Set[Parameter] = frozenset(),
) -> None:
    """Shard the model; tensors on the meta device are allocated unit by unit first.

    dtype   dtype in which parameters are gathered
    stored  dtype of the shards
    ready   is called with each block before it is sharded
    whole   parameters that are not sharded
    """
    grow_segments(ranks.device)
    mesh = DeviceMesh.from_group(ranks.group, ranks.device.type)
    cast = None if stored == dtype else dtype  # no cast of equal dtypes: it would take quantised weights for numbers
    policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=torch.float32, cast_forward_inputs=False)
    apply = partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=set(whole))
    for block in blocks:
        _allocate(block, ranks.device, stored)
        ready(block)
        _view_as_fp32(block)
        apply(block, reshard_after_forward=not keep)
    _allocate(model, ranks.device, stored)
    _view_as_fp32(model)
    apply(model, reshard_after_forward=False)  # the head is used at once
    for unit in fsdp_units(model):
        attach_gathered(unit)  # the library's stacks do not call their blocks as modules
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()  # the segments of whole parameters


def _allocate(part: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace tensors on the meta device by tensors on `device`: parameters in `dtype`, a tied one once."""
    allocated: dict[int, Any] = {}
    for module in part.modules():
        for key, p in module._parameters.items():
            if p is not None and p.is_meta:
                new = allocated.get(id(p))
                if new is None:
                    zeros = torch.zeros(p.shape, dtype=dtype, device=device)
                    new = allocated[id(p)] = Parameter(zeros, requires_grad=p.requires_grad)
                module._parameters[key] = new
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)


def _view_as_fp32(part: nn.Module) -> None:
    """View quantised weights as fp32: fully_shard takes no integers in torch 2.11, and gloo no 8-bit floats. After gathering
    they are viewed as quantised weights again (layers/quantized_base.py)."""
    for module in part.modules():
        if isinstance(module, Base) and not is_sharded(weight := module.layer.weight):
            weight.data = weight.data.view(torch.float32)


aten = torch.ops.aten
FILLS = {aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.zero_.default}
FACTORIES = {aten.ones.default, aten.zeros.default, aten.full.default}
EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default}


@dataclass(frozen=True)
class RecordedOp:
    """An op that writes a whole tensor."""

    op: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class RecordedInit:
    """A fill of a tensor, and the ops that changed it in place afterwards."""

    tensor: Tensor  # on the meta device; keeps its storage's address from reuse
    fill: RecordedOp
    changes: list[RecordedOp] = field(default_factory=list)

    def value(self, device: torch.device) -> Tensor:
        fill = self.fill
        if fill.op in FACTORIES:
            value = fill.op(*fill.args, **fill.kwargs | {"device": device})
        else:
            value = torch.empty_like(self.tensor, device=device)
            fill.op(value, *fill.args, **fill.kwargs)
        for change in self.changes:
            change.op(value, *change.args, **change.kwargs)
        return value


class InitRecorder(TorchDispatchMode):
    """Record how tensors on the meta device are filled."""

    def __init__(self) -> None:
        super().__init__()
        self.fills: list[RecordedInit] = []
        self._last: dict[int, RecordedInit] = {}
        self._computed: dict[int, str] = {}  # op that computed a tensor from others

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = (_meta_tensors(tree) for tree in ((args, kwargs), result))
        if len(outputs) == 1 and _is_whole(outputs[0]) and (fill := _fill_of(func, args, kwargs)) is not None:
            init = RecordedInit(outputs[0].detach(), fill)
            self._computed.pop(key_of(init.tensor), None)
            self._last[key_of(init.tensor)] = init
            self.fills.append(init)
        elif func in EMPTY:
            pass
        elif not func._schema.is_mutable:
            views = set(map(key_of, inputs))
            self._computed |= {key_of(one): func.name() for one in outputs if key_of(one) not in views}
        elif len(inputs) == 1 and args and inputs[0] is args[0] and _is_whole(args[0]) and self._may_repeat(func, args[0]):
            self._last[key_of(args[0])].changes.append(RecordedOp(func, args[1:], kwargs))
        else:
            self._computed |= {key_of(one): func.name() for one in (*outputs, *inputs)}
        return result

    def _may_repeat(self, func: Any, tensor: Tensor) -> bool:
        """Return whether `func` may be repeated right after the fill: random values must be drawn in their original order."""
        filled = key_of(tensor) in self._last and key_of(tensor) not in self._computed
        return filled and torch.Tag.nondeterministic_seeded not in func.tags

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise ValueError unless the values of `tensor` are those of a fill."""
        op = self._computed.get(key_of(tensor))
        if op is None and key_of(tensor) in self._last:
            return
        raise ValueError(
            f"shard_deferred: {name} is {f'computed by {op}' if op else 'never filled'}, wanted numbers written into all of "
            f"it by normal_, uniform_, fill_, zero_, ones, zeros, full or .to(device), and perhaps changed in place; make the "
            f"model whole, and give it to shard."
        )

    @torch.no_grad()
    def values(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Yield (key_of a tensor, its values), in the order of the last fills. Release each tensor before the next."""
        for init in self.fills:
            value = init.value(device)
            if self._last[key_of(init.tensor)] is init:
                yield key_of(init.tensor), value
            del value


def _fill_of(func: Any, args: tuple, kwargs: dict[str, Any]) -> RecordedOp | None:
    """Return the op with which `func` fills a tensor; None if it does not, or fills it from other meta tensors."""
    if func in FACTORIES:
        return RecordedOp(func, args, kwargs)
    if func in FILLS:
        return RecordedOp(func, args[1:], kwargs)
    if func is aten._to_copy.default and not args[0].is_meta:
        return RecordedOp(aten.copy_.default, (args[0].detach().clone(),), {})
    return None


def _meta_tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor) and one.is_meta]


def _is_whole(tensor: Tensor) -> bool:
    """Return whether the tensor covers its whole storage."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def key_of(tensor: Tensor) -> int:
    """Return a key that all tensors over one storage share."""
    return tensor.untyped_storage()._cdata
