"""A model of which each rank holds a part of every parameter, by PyTorch's FSDP2 (fully_shard).

A parameter's rows are dealt to the ranks. What a block computes with is gathered just before it is used, in the precision that
it computes in, and freed behind it; its gradient is added up over the ranks as it is dealt to them again, in fp32. So a rank
keeps, updates and saves its own rows alone. Where the ranks do not divide the rows, the last of them hold rows of zeros behind
their own, as FSDP gathers them: every rank's memory is laid out alike.

Low-rank adapters stay whole on every rank, over a frozen model of which it holds its rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import Parameter

from ..device import grow_segments
from ..layers.linear_product import format_of, is_sharded
from ..layers.quantized_base import Base
from ..lora.layers import of_peft
from .deferred_init import InitRecorder, key_of
from .fsdp_model import give_gathered, has_parts, join_records, units
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
    """Deal every parameter's rows to the ranks, in place. One of `blocks` at a time is gathered.

    dtype  what the model computes in; the rows themselves are fp32
    keep   whether a gathered block stays until backward has used it: less traffic, and more memory
    whole  whether what trains stays whole on every rank, and only what is frozen is dealt, its rows in `dtype`. None: where
           the model has low-rank adapters, ours or PEFT's

    The rows are those of the first rank's weights.
    """
    check_ranks(ranks, "shard")
    whole = has_parts(model) or any(map(of_peft, model.modules())) if whole is None else whole
    if not whole and (odd := _with_parts(model)) is not None:
        raise ValueError(
            f"shard: {odd} has a low-rank adapter or is in codes, and whole=False would shard all parameters alike; leave "
            f"whole=False out."
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
            ranks.spread(tensor)
    _deal(model, blocks, ranks, dtype, keep, dtype if whole else torch.float32, whole=trained)
    if whole:
        join_records(model)


def _with_parts(model: nn.Module) -> str | None:
    """Return the first layer with adapters, or the first parameter in codes."""
    adapted = (name for name, module in model.named_modules() if of_peft(module))
    coded = (name for name, parameter in model.named_parameters() if format_of(parameter).coded)
    return next(adapted, None) or next(coded, None)


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
    """make(device) in shards, for a model that fits no rank: a block, or a parameter while it is drawn, is whole at a time.

    make    is called with the meta device
    blocks  of the model that it made, which are gathered one at a time; the rest of `shard` holds
    fill    is given each rank's pieces of parameters and buffers, by name, and fills them, from a file, say. None: the weights
            are those of make(device) in one process, to the last bit; all ranks draw them, with the first one's generator
    frozen  whether none of it will train, but adapters that are added behind this: then its rows are in `dtype`
    encode  of a frozen model that `fill` fills: is given each block, whole, before its rows are dealt, to put it into codes
    """
    check_ranks(ranks, "shard_deferred")
    if encode is not None and (fill is None or not frozen):
        raise ValueError("shard_deferred: encode takes weights of a frozen model that fill has read; add fill, frozen=True.")
    drawing = InitRecorder()
    with drawing:
        model = make(torch.device("meta"))
    homes = {}
    for name, tensor in _tensors(model):
        if fill is None:
            drawing.check(name, tensor)
        homes[key_of(tensor)] = name
    if frozen:
        model.requires_grad_(False)
    parts = blocks(model)

    def coded(block: nn.Module) -> None:
        if fill is not None and encode is not None:
            fill(_pieces(model, _all_of(block)))
            encode(block)

    _deal(model, parts, ranks, dtype, keep, dtype if frozen else torch.float32, coded)
    if fill is None:
        _draw(drawing, homes, _pieces(model, _all_of(model)), ranks)
    else:
        done = {id(t) for part in parts for t in _all_of(part)} if encode else set[int]()
        fill(_pieces(model, (t for t in _all_of(model) if id(t) not in done)))
    if frozen:
        join_records(model)
    return model


def _pieces(model: nn.Module, tensors: Iterable[Tensor]) -> dict[str, LocalShard]:
    """Return this rank's shards of these tensors, by their names in the model."""
    wanted = {id(tensor) for tensor in tensors}
    return {name: local_shard_of(tensor) for name, tensor in _tensors(model) if id(tensor) in wanted}


def _all_of(part: nn.Module) -> Iterator[Tensor]:
    return (tensor for _, tensor in _tensors(part))


def _draw(drawing: InitRecorder, homes: dict[int, str], pieces: Mapping[str, LocalShard], ranks: Ranks) -> None:
    """Each rank's part of what is drawn. `homes`: the name of what has that key."""
    random = torch.cuda if ranks.device.type == "cuda" else torch
    state = torch.tensor(ranks.of_first(random.get_rng_state().tolist()), dtype=torch.uint8, device="cpu")
    random.set_rng_state(state)
    for key, values in drawing.values(ranks.device):
        if key in homes:
            piece = pieces[homes[key]]
            piece.local.copy_(values[piece.slices])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _deal(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    ranks: Ranks,
    dtype: torch.dtype,
    keep: bool,
    rows: torch.dtype,
    ready: Callable[[nn.Module], object] = lambda block: None,
    whole: Set[Parameter] = frozenset(),
) -> None:
    """Shard the model; tensors on the meta device are allocated unit by unit first.

    dtype  dtype in which parameters are gathered
    rows   dtype in which shards are stored
    ready  is called with each block before it is sharded
    whole  parameters that are not sharded
    """
    grow_segments(ranks.device)
    mesh = DeviceMesh.from_group(ranks.group, ranks.device.type)
    gathered = None if rows == dtype else dtype  # as they are: a cast would take codes for numbers
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
    deal = partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=set(whole))
    for block in blocks:
        _give_room(block, ranks.device, rows)
        ready(block)
        _as_floats(block)
        deal(block, reshard_after_forward=not keep)
    _give_room(model, ranks.device, rows)
    _as_floats(model)
    deal(model, reshard_after_forward=False)  # the head is used as soon as it is there
    for unit in units(model):
        give_gathered(unit)  # our stacks do not call their blocks as modules
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()  # the segments of what was whole


def _give_room(part: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Tensors on `device` in place of those on the meta device: parameters in `dtype`, a tied one once."""
    made: dict[int, Any] = {}
    for module in part.modules():
        for key, p in module._parameters.items():
            if p is not None and p.is_meta:
                new = made.get(id(p))
                if new is None:
                    room = torch.zeros(p.shape, dtype=dtype, device=device)
                    new = made[id(p)] = Parameter(room, requires_grad=p.requires_grad)
                module._parameters[key] = new
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)


def _as_floats(part: nn.Module) -> None:
    """Codes as fp32 numbers of the same bits: fully_shard takes no integers in torch 2.11, and gloo no numbers of 8 bits. Where
    they are gathered they become codes again (layers/quantized_base.py)."""
    for module in part.modules():
        if isinstance(module, Base) and not is_sharded(weight := module.layer.weight):
            weight.data = weight.data.view(torch.float32)
