"""A model bound for the fused kernels: its weights, where they lie, and whether they still lie there.

How it is read is its family's affair (models/decoding.py). The tensors are the model's own parameters, taken without a copy: an
optimizer's step, a load in place, a merge is seen by the next launch. What puts another tensor in a place, or moves one
(`.to()`, `assign=True`, resharding, tying anew), is seen by `WeightView.moved`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from logging import WARNING
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .. import lora
from ..errors import GenerateError
from ..layers import MLP, Attention, LMLoss, RopeTable
from ..layers.fused_weights import Projecting, Stacked, describe, has_reader, hooked, site_of
from ..layers.linear_product import format_of
from ..layers.weight_memory import give_own_storages
from ..lora.adapter import LowRank
from ..lora.layers import active_in, adapted_layers
from ..models.decoding import Reader, linear_of, weight_of
from ..models.registry import decoded, reader_of, role_of
from ..trace import notice
from .model_watch import TensorWatch, model_tensors, scalars_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ANYWHERE = "anywhere"  # see `readable_model`


class WeightView:
    """A bound model: its shape, its weights as of now, and whether they still are where they were."""

    whole = True  # tensors/slices.py has slices

    def __init__(self, model: nn.Module, reader: Reader, max_length: int, neighbours: bool, spread: bool) -> None:
        self.model, self.reader, self.max_length, self.spread = model, reader, max_length, spread
        self.shape = reader.shape()
        self._stacks: defaultdict[tuple[int, int], Stacked] | None = defaultdict(Stacked) if neighbours else None
        self._read()

    def refresh(self) -> None:
        """Read the places again, after `moved` or when a module was replaced."""
        found = readable_model(self.model, self.max_length, self.spread)
        if isinstance(found, str):
            raise GenerateError(f"decoder: the model has changed since its decoder was built: {found}; build a new one.")
        if _places(found) != self.places:
            raise GenerateError("decoder: layers lie on other devices than when their decoder was built; build a new one.")
        embed = weight_of(found.trunk.embed_tokens)
        was, now = (self.shape, self.dtype, self.device), (found.shape(), embed.dtype, embed.device)
        for name, before, after in ((f.name, getattr(was[0], f.name), getattr(now[0], f.name)) for f in fields(was[0])):
            if before != after and name != "vocab":
                raise GenerateError(
                    f"decoder: the model has changed since its decoder was built: its {name} was {before}, is {after}; build a "
                    f"new one."
                )
        if now != was:
            raise GenerateError(
                f"decoder: the weights are now {now[1]} on {now[2]} with {now[0].vocab} words, the decoder was built for "
                f"{was[1]} on {was[2]} with {was[0].vocab}; build a new one."
            )
        self.reader = found
        self._read()

    def _read(self) -> None:
        reader = self.reader
        _settle(self.model)
        self.apart = None if self._stacks is None else _make_neighbours(reader, self._stacks)
        self._watched = TensorWatch(self.model, "_parameters")
        self.embed: Tensor = weight_of(reader.trunk.embed_tokens)
        self.norm = reader.norm(reader.trunk.norm)
        self.head: Tensor = weight_of(reader.model.lm_head)
        self.layers = reader.layers()
        self.dtype, self.device = self.embed.dtype, self.embed.device
        self.places = _places(reader)

    @property
    def adapted(self) -> bool:
        return any(one.adapters for layer in self.layers for part in layer for one in part.linears())

    def moved(self) -> str | None:
        """The name of the first weight that is another tensor than when it was bound, or lies elsewhere; None if all stayed."""
        return self._watched.moved()

    def numbers(self) -> Any:
        """What is read of the model now, without its tensors."""
        reader = self.reader
        why = reader.refusal(self.max_length)
        return why or (reader.shape(), scalars_of(reader.layers()), [angles.stamp() for angles in reader.angles()])

    def bytes_read(self) -> int:
        """Of weights, once each, in one step: all but the embedding, of which a step reads single rows, and the experts."""
        tensors = [t for layer in self.layers for part in layer for t in part.tensors()] + [self.norm.weight, self.head]
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())

    def tables(self, length: int) -> list[tuple[Tensor, Tensor]]:
        """cos and sin (length, pairs) in fp32 of every position, for each kind of angles that layers turn by."""
        positions = torch.arange(length, device=self.device)[None]
        found = (RopeTable(angles).at(positions) for angles in self.reader.angles())
        return [(cos[0].contiguous(), sin[0].contiguous()) for cos, sin in found]


def bind(model: nn.Module, max_length: int = 1, neighbours: bool = False, spread: bool = False) -> WeightView | str:
    """`model` for the fused kernels, or why they cannot decode it.

    max_length  of the texts
    neighbours  q, k and v of a block, and gate and up, lie one behind the other in memory afterwards, where that may be
    spread      its weights may lie on several devices
    """
    found = readable_model(model, max_length, spread)
    return found if isinstance(found, str) else WeightView(model, found, max_length, neighbours, spread)


def readable_model(model: nn.Module, max_length: int, spread: bool | str = False) -> Reader | str:
    """How it is read, or why not: what `bind` does before it takes anything.

    spread  ANYWHERE: of a model that will be moved, whose weights may lie on devices of any kind now
    """
    reader = reader_of(model)
    if reader is None:
        return _unknown(model)
    return reader.refusal(max_length) or _unreadable(model, spread) or _unread(model, reader) or _uneven(reader) or reader


def _unknown(model: Any) -> str:
    """Return why the fused kernels do not read a model that has no reader."""
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    families = ", ".join(f"{prefix}ForCausalLM" for prefix in decoded())
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if text is not config:
        return f"{name} wraps a text model ({text.model_type}), and the fused kernels read text models alone ({families})"
    return f"{name} is none of the families with fused kernels ({families})"


def _places(reader: Reader) -> list[torch.device]:
    """Where each block lies."""
    return [next(block.parameters()).device for block in reader.trunk.layers]


def _settle(model: nn.Module) -> None:
    """Let parts that keep their weights in one buffer fill it now: their first forward would move the weights later."""
    for module in model.modules():
        if isinstance(module, (Attention, MLP)):
            module.stacked.joined(module.projections())


def _make_neighbours(reader: Reader, stacks: Mapping[tuple[int, int], Stacked]) -> str | None:
    """Put what reads the same input side by side, the parameters slices of one buffer. None, or why some stay apart.

    For many rows they are one product then: at batch 32, three and a concatenation took 0.3 ms a step of a 1b model, a fifth.
    """
    why, others = None, list(reader.model.parameters())
    give_own_storages(reader.model)
    for number, block in enumerate(reader.trunk.layers):
        for at, group in enumerate(reader.together(block)):
            sites = [linear_of(layer) for layer in group]
            biases = [site.bias for site in sites if site.bias is not None]
            why = stacks[number, at].repack([site.weight for site in sites], biases, others) or why
    for device in {weight_of(reader.model.lm_head).device, *_places(reader)}:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.empty_cache()  # where they were: blocks too small for what comes
    return why


@contextmanager
def restore_on_error(*models: nn.Module) -> Iterator[None]:
    """What is refused inside leaves no weights side by side that lay apart."""
    plain = [p for model in models for p in model.parameters() if type(p) is nn.Parameter]
    before = [p.data_ptr() for p in plain]
    try:
        yield
    except BaseException:
        moved = {id(p) for p, address in zip(plain, before) if p.data_ptr() != address}
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, Projecting) and moved & set(map(id, module.parameters())):
                module.stacked.forget()
        with suppress(torch.OutOfMemoryError):  # the refusal says that already
            for p in plain:
                if id(p) in moved and p.untyped_storage().nbytes() > p.nbytes:
                    p.data = p.data.clone()
        raise


def _of_adapters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of adapters, whether they are on or not."""
    return lora.parameters(model)


def _unread(model: nn.Module, reader: Reader) -> str | None:
    """Why the kernels do not add what the model's adapters do."""
    read = [low for layer in reader.layers() for part in layer for one in part.linears() for low in one.adapters]
    known = {id(low.a) for low in read}
    layers = [(key, layer, site_of(layer).adapters) for key, layer in adapted_layers(model)]
    if other := [key for key, layer, _ in layers if not has_reader(layer) and active_in(layer)]:
        return f"{other[0]}: it carries a low-rank adapter, and is no projection of a layer"
    on = [(key, low.parameters[0]) for key, _, extra in layers for low in extra]
    if missed := [key for key, a in on if id(a) not in known]:
        return f"{missed[0]}: it carries a low-rank adapter, and is no projection of a layer"
    kinds = sorted({type(low).__name__ for low in read} - {LowRank.__name__})
    if kinds:
        return f"one of its adapters is a {kinds[0]}, which a step has no kernel for"
    if len(dtypes := {half.dtype for low in read for half in (low.a, low.b)}) > 1 or not dtypes <= set(DTYPES):
        return f"its adapters are {' and '.join(sorted(map(str, dtypes)))}; the kernels take fp32, fp16 or bf16, one of them"
    return "the rows of an adapter's a are not dense" if any(low.a.stride(1) != 1 for low in read) else None


def _uneven(reader: Reader) -> str | None:
    """Which layer has other heads than all are said to have, as one whose heads were pruned."""
    shape = reader.shape()
    wanted = shape.heads, shape.kv_heads, shape.kv_heads
    for number, layer in enumerate(reader.layers()):
        found = (*(len(one.weight) // shape.head_dim for one in (layer.attention.q, layer.attention.k, layer.attention.v)),)
        if found != wanted:
            return (
                f"model.layers.{number}.self_attn has {found[0]}, {found[1]} and {found[2]} heads of q, k and v, and the "
                f"config says {wanted[0]}, {wanted[1]} and {wanted[2]}"
            )
    return None


def unadded(model: nn.Module) -> str | None:
    """Of a step that adds no adapters: which projection has some."""
    found = next((key for key, layer in adapted_layers(model) if site_of(layer).adapters), None)
    return None if found is None else f"{found}: it carries a low-rank adapter, which a step of its own does not add"


def _closed(layer: nn.Module) -> str | None:
    """Why a projection's weight may not be read in its place."""
    site = site_of(layer)
    return site.why or (describe(getattr(layer, "base_layer", layer)) if format_of(site.weight).coded else None)


def closed_projection(model: nn.Module, known: Callable[[nn.Module], bool] = lambda module: False) -> str | None:
    """The first module below the head whose weight may not be read in its place, and why; `known` tells a family's own
    projections."""
    trunk: Any = model.model
    for name, module in trunk.named_modules(prefix="model"):
        projects = isinstance(module, nn.Linear) or name.endswith("_proj")
        if projects and not known(module) and (why := _closed(module)):
            return f"{name}: {why}"
        if _computes(module):
            return f"{name}: its weight is computed anew at each call (a parametrization, or pruning)"
    return None


def warn_about_hooks(model: nn.Module) -> None:
    """Say which hooks nobody calls in a step that takes weights alone. One that changes the tokens fails the certificate."""
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if type(module) is not nn.Linear and not all(map(_of_libraries, hooks)):  # a linear layer's were called, or refused
            notice(
                f"decoder: {name or type(model).__name__} carries hooks, which do not run while the decoder generates: a step "
                f"reads the weights and does not call it. Call the model itself where they are needed.",
                WARNING,
            )
            return


def _of_libraries(hook: Any) -> bool:
    """Whether it is one of ours, or one of those by which transformers records what a call asks for."""
    where = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return where.partition(".")[0] in ("gpubound", "transformers")


def _computes(module: nn.Module) -> bool:
    """Whether what it calls its weight is no parameter, but made of some."""
    return isinstance(vars(module).get("weight"), Tensor) or is_parametrized(module, "weight")


def _unreadable(model: nn.Module, spread: bool | str = False) -> str | None:
    """Why the kernels may not read the parameters directly."""
    trunk: Any = model.model
    if why := closed_projection(model):
        return why
    if type(trunk.embed_tokens) is not nn.Embedding and role_of(trunk.embed_tokens) != "TextScaledWordEmbedding":
        return f"its embedding is {type(trunk.embed_tokens).__name__}, not nn.Embedding"
    head: Any = model.lm_head
    own = type(head) is LMLoss and not hooked(head)  # which is a linear layer that can give a loss, too
    if not own and (why := _closed(head)):
        return f"lm_head: {why}"
    if getattr(head, "bias", None) is not None:
        return "its head has a bias"
    apart = set(map(id, _of_adapters(model)))
    weights = {one.name: one.tensor for one in model_tensors(model, "_parameters") if id(one.tensor) not in apart}
    if why := _mixed(weights.values(), spread):
        return why
    if (dtype := next(iter(weights.values())).dtype) not in DTYPES:
        return f"its weights are {dtype}; the kernels take fp32, fp16 and bf16"
    loose = [name for name, t in weights.items() if not t.is_contiguous() or type(t) is not nn.Parameter]
    return f"{loose[0]} is not a plain, contiguous parameter" if loose else None


def _mixed(weights: Collection[Tensor], spread: bool | str) -> str | None:
    """Which dtypes and devices do not go together; None where all do."""
    where = (lambda device: None) if spread == ANYWHERE else (lambda device: (device.type, None if spread else device.index))
    if len({(t.dtype, where(t.device)) for t in weights}) == 1:
        return None
    told = ", ".join(sorted({f"{t.dtype} on {t.device.type if spread else t.device}" for t in weights}))
    move = spread and len({t.dtype for t in weights}) == 1  # as of a `.to` that ran out of memory half-way
    return f"its weights differ in dtype or device: {told}{'; move all of it to the CPU, or to GPUs' if move else ''}"
