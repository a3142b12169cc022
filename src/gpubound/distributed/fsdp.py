"""Shard a model's parameters over the ranks with PyTorch's FSDP2 (fully_shard).

Each rank has some rows of every parameter. The parameters of a block are gathered just before their use, in the dtype of the
computation, and freed after it; gradients are reduce-scattered in fp32. So a rank keeps, updates and saves only its rows. Where
the number of ranks does not divide the rows, the last ranks have rows of zeros at the end, so that all have equal sizes.

Low-rank adapters stay whole on every rank; only the frozen model under them is sharded.

A model that fits no rank next to its optimizer state is made on the meta device. The first rank alone makes it whole, too, on
its device or in host memory, and broadcasts it tensor by tensor.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import Parameter

from ..device import grow_segments, label, usable_bytes
from ..formatting import readable
from ..layers.linear_product import format_of, is_sharded
from ..layers.quantized_base import Base
from ..lora.layers import of_peft
from ..models.storing import allocate
from ..trace import notice
from .fsdp_model import attach_gathered, fsdp_units, has_attached_state, share_tensor_state
from .local_shard import LocalShard, local_shard_of
from .ranks import Ranks, check_ranks

Model = TypeVar("Model", bound=nn.Module)


def shard(model: nn.Module, blocks: Sequence[nn.Module], ranks: Ranks, dtype: torch.dtype = torch.bfloat16) -> None:
    """Shard every parameter in place, with the values of the first rank. One of `blocks` at a time is gathered.

    If the model has low-rank adapters, the library's or PEFT's, what trains stays whole on every rank, and the frozen
    parameters alone are sharded, in `dtype`.

    dtype  dtype of the computation; the shards are fp32
    """
    check_ranks(ranks, "shard")
    whole = has_attached_state(model) or any(map(of_peft, model.modules()))
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
    _shard(model, blocks, ranks, dtype, dtype if whole else torch.float32, whole=trained)
    if whole:
        share_tensor_state(model)


def shard_deferred(
    make: Callable[[torch.device], Model],
    blocks: Callable[[Model], Sequence[nn.Module]],
    ranks: Ranks,
    dtype: torch.dtype = torch.bfloat16,
    fill: Callable[[Mapping[str, LocalShard]], object] | None = None,
    frozen: bool = False,
    encode: Callable[[nn.Module], object] | None = None,
) -> Model:
    """Return make(device) in shards, for a model whose training fits no rank: one block at a time is whole.

    make    is called with the meta device, and without `fill` on the first rank with a real one
    blocks  returns the blocks of the model that are gathered one at a time; otherwise as in `shard`
    fill    is called with each rank's shards of parameters and buffers, by name, and fills them, from a file for example. None:
            the weights are those of make(device) on the first rank, bit for bit
    frozen  none of it will train, except for adapters that are added later: the shards are in `dtype`
    encode  is called with each whole block of a frozen model that `fill` fills, before it is sharded, to quantise it
    """
    check_ranks(ranks, "shard_deferred")
    if encode is not None and (fill is None or not frozen):
        raise ValueError("shard_deferred: encode takes weights of a frozen model that fill has read; add fill, frozen=True.")
    model = make(torch.device("meta"))
    initial = {} if fill is not None else _initial_tensors(make, model, ranks)
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

    _shard(model, parts, ranks, dtype, dtype if frozen else torch.float32, fill_and_encode)
    if fill is None:
        _scatter(initial, shards_of(t for _, t in _tensors(model)), ranks)
    else:
        done = {id(t) for part in parts for _, t in _tensors(part)} if encode else set[int]()
        fill(shards_of(t for _, t in _tensors(model) if id(t) not in done))
    if frozen:
        share_tensor_state(model)
    return model


def _initial_tensors(make: Callable[[torch.device], Model], outline: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Return the tensors of the model that the first rank makes, by name; {} on the others, with the generator after it."""

    def first() -> dict[str, Tensor]:
        if not ranks.first:
            return {}
        device, need = ranks.device, 2 * sum(tensor.nbytes for _, tensor in _tensors(outline))  # twice: shards begin as zeros
        if device.type == "cuda" and need > usable_bytes(device):
            notice(f"shard_deferred: {readable(need)} are not free on {label(device)}: the model is made in host memory.")
            device = torch.device("cpu")
        return dict(_tensors(make(device)))

    tensors, random = ranks.together(first), torch.cuda if ranks.device.type == "cuda" else torch
    state = ranks.of_first(random.get_rng_state().tolist())
    random.set_rng_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))
    return tensors


@torch.no_grad()
def _scatter(initial: dict[str, Tensor], shards: Mapping[str, LocalShard], ranks: Ranks) -> None:
    """Fill the shards with the first rank's tensors, which it releases individually. All pass through one buffer: the thread of
    a broadcast keeps its tensor for some time."""
    sizes = {name: math.prod(piece.shape) * piece.local.itemsize for name, piece in shards.items()}
    buffer = torch.empty(max(sizes.values(), default=0), dtype=torch.uint8, device=ranks.device)
    for name, piece in shards.items():
        values = buffer[: sizes[name]].view(piece.local.dtype).view(piece.shape)
        if ranks.first:
            tensor = initial.pop(name)
            values.copy_(tensor)
            tensor.data = tensor.new_empty(0)
        ranks.broadcast(values)
        piece.local.copy_(values[piece.slices])


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    ranks: Ranks,
    dtype: torch.dtype,
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
        allocate(block, ranks.device, stored)
        ready(block)
        _view_as_fp32(block)
        apply(block, reshard_after_forward=True)
    allocate(model, ranks.device, stored)
    _view_as_fp32(model)
    apply(model, reshard_after_forward=False)  # the head is used at once
    for unit in fsdp_units(model):
        attach_gathered(unit)  # the library's stacks do not call their blocks as modules
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()  # the segments of whole parameters


def _view_as_fp32(part: nn.Module) -> None:
    """View quantised weights as fp32: fully_shard takes no integers in torch 2.11, and gloo no 8-bit floats. After gathering
    they are viewed as quantised weights again (layers/quantized_base.py)."""
    for module in part.modules():
        if isinstance(module, Base) and not is_sharded(weight := module.layer.weight):
            weight.data = weight.data.view(torch.float32)
