"""View of a model's weights for the fused kernels, or the reason why they cannot read the model.

The family's reader says which tensors are which (models/reader.py). The tensors are the model's own parameters, without a
copy: the next launch sees an optimizer's step, a load or a merge in place. `WeightView.moved` finds tensors that were replaced
or moved (`.to()`, `assign=True`, resharding, tying anew).

`HostView` is a model in host memory as a decoder on a GPU reads it: its matrices are packed there individually, the rest is
copied.

The embedding, norms and biases are copies on the GPU. The matrices of the layers and the head stay where they are: a weight
format rounds them part by part, and keeps the packed numbers alone. So a model whose 16-bit weights do not fit the GPU can be
decoded in 4 bits. As of any other model, weights that change are found at the next request, and all is packed again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from logging import WARNING
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..errors import GenerateError
from ..kernels.decode_product import Norm
from ..kernels.row_ops import LayerNorm
from ..layers import MLP, Attention, LMLoss, RopeTable
from ..layers.fused_weights import Projecting, Stacked, describe, give_own_storages, has_reader, hooked, site_of
from ..layers.linear_product import format_of
from ..lora.adapter import LowRank
from ..lora.layers import active_in, adapted_layers, is_wrapper, names_in, parameters_of, wrappers
from ..models.decoding import AttentionWeights, DenseWeights, LayerWeights, Linear, norm_tensors
from ..models.reader import Reader, linear_of, text_stack, weight_of
from ..models.registry import reader_of, role_of
from ..trace import notice
from ..watch.pretend import PARAMETERS
from .kv_cache import CachedLayer, cached_layers
from .model_watch import TensorWatch, WeightVersions, model_tensors, scalars_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALED = ("TextScaledWordEmbedding", "ScaledWordEmbedding")  # roles of embeddings with a factor, which a reader's shape has
ANYWHERE = "anywhere"  # devices of a model that will be moved: see `readable_model`


class WeightView:
    """The shape and the current weights of a model."""

    sliced = False

    @property
    def original(self) -> "WeightView":
        """The view of the model where it is."""
        return self

    def __init__(self, model: nn.Module, reader: Reader, max_length: int, neighbours: bool, spread: bool) -> None:
        self.model, self.reader, self.max_length, self.spread = model, reader, max_length, spread
        self.shape = reader.shape()
        self._stacks: defaultdict[tuple[int, int], Stacked] | None = (
            defaultdict(Stacked) if neighbours or reader.ADJACENT else None
        )
        self._read()
        self._check_words()

    def refresh(self) -> None:
        """Read the weights again, after `moved` or when a module was replaced."""
        changed = "decoder: the model has changed since its decoder was built"
        reader = readable_model(self.model, self.max_length, self.spread)
        if isinstance(reader, str):
            raise GenerateError(f"{changed}: {reader}; build a new one.")
        if _devices(reader) != self.layer_devices:
            raise GenerateError("decoder: layers are on other devices than when their decoder was built; build a new one.")
        shape, embed = reader.shape(), weight_of(reader.embedding)
        for name in (field.name for field in fields(shape) if field.name != "vocab"):
            before, after = getattr(self.shape, name), getattr(shape, name)
            if before != after:
                raise GenerateError(f"{changed}: its {name} was {before}, is {after}; build a new one.")
        if (shape, embed.dtype, embed.device) != (self.shape, self.dtype, self.device):
            raise GenerateError(
                f"decoder: the weights are now {embed.dtype} on {embed.device} with {shape.vocab} words, the decoder was built "
                f"for {self.dtype} on {self.device} with {self.shape.vocab}; build a new one."
            )
        if _cached(reader.layers()) != _cached(self.layers):
            raise GenerateError(f"{changed}: its layers have other keys and values; build a new one.")
        self.reader = reader
        self._read()

    def _read(self) -> None:
        reader = self.reader
        for module in self.model.modules():  # a first forward would join weights into one buffer, and so move them
            if isinstance(module, (Attention, MLP)):
                module.stacked.joined(module.projections())
        self.coded = any(
            format_of(one.weight).coded for layer in reader.layers() for part in layer.parts for one in part.linears()
        )
        if self.coded and self._stacks is None:  # codes that are multiplied as one are read in place
            self._stacks = defaultdict(Stacked)
        self.apart = None if self._stacks is None else _make_neighbours(reader, self._stacks)
        watch = TensorWatch(self.model, "_parameters")
        self.moved = watch.moved  # the name of the first weight that was replaced or moved, or None
        self.embed: Tensor = weight_of(reader.embedding)
        self.norm = reader.final_norm()
        self.head = Linear(weight_of(reader.model.lm_head), reader.model.lm_head._parameters.get("bias"))
        self.positions = reader.positions()
        self.layers, self.layer_inputs = reader.layers(), reader.layer_inputs()
        self.copied = WeightVersions(self.model) if reader.copies else None
        self.dtype, self.device = self.embed.dtype, self.embed.device
        self.layer_devices = _devices(reader)

    def _check_words(self) -> None:
        """Refuse a head that gives tokens which a table has no row for: on a GPU a lookup beyond it ends the process."""
        tables = {"its embedding": self.embed}
        if self.layer_inputs is not None:
            tables["its layers' own embedding"] = self.layer_inputs.table
        for name, table in tables.items():
            if len(table) < self.shape.vocab:
                raise ValueError(
                    f"decoder: model: got a head of {self.shape.vocab:,} tokens, of which {name} holds {len(table):,}; wanted "
                    f"all of them. Check the vocabulary sizes in its config."
                )

    def refresh_copies(self) -> None:
        """Copy the weights again that the kernels do not read in place, if any has changed."""
        if self.copied is not None and self.copied.changed():
            self.reader.copies.refresh()
            self.copied = WeightVersions(self.model)

    @property
    def adapted(self) -> bool:
        return any(one.adapters for layer in self.layers for part in layer.parts for one in part.linears())

    def numbers(self) -> Any:
        """Return what is read from the model, without its tensors."""
        reader = self.reader
        why = reader.refusal(self.max_length)
        angles = [angles.stamp() for angles in reader.angles()]
        return why or (reader.shape(), scalars_of(reader.layers()), scalars_of(reader.layer_inputs()), angles)

    def bytes_read(self) -> int:
        """Return the bytes of the weights that a step reads in full: all except the embedding and the experts."""
        tensors = [t for layer in self.layers for part in layer.parts for t in part.tensors()]
        tensors += [*norm_tensors(self.norm), *self.head.tensors()]
        tensors += self.layer_inputs.tensors() if self.layer_inputs else []
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())

    def tables(self, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return cos and sin (length, pairs) in fp32 of every position, for each kind of rotary angles."""
        positions = torch.arange(length, device=self.device)[None]
        tables = (RopeTable(angles).at(positions) for angles in self.reader.angles())
        return [(cos[0].contiguous(), sin[0].contiguous()) for cos, sin in tables]


def _cached(layers: Sequence[LayerWeights]) -> list[Any]:
    """Return what is cached of each layer, whatever its window."""
    return [one._replace(window=0) if isinstance(one, CachedLayer) else one for one in cached_layers(layers).values()]


def bind(model: nn.Module, max_length: int = 1, neighbours: bool = False, spread: bool = False) -> WeightView | str:
    """Return the view of a model for the fused kernels, or why they cannot decode it.

    max_length  of the texts
    neighbours  store q, k and v of a block, and gate and up, one after the other in memory, where that is possible
    spread      its weights may be on several devices
    """
    reader = readable_model(model, max_length, spread)
    return reader if isinstance(reader, str) else WeightView(model, reader, max_length, neighbours, spread)


def readable_model(model: nn.Module, max_length: int, spread: bool | str = False) -> Reader | str:
    """Return the reader of a model, or why the fused kernels cannot decode it. Nothing is changed.

    spread  ANYWHERE: the model will be moved, so its weights may be on devices of any kind
    """
    reader = reader_of(model)
    if reader is None:
        return _unknown(model)
    why = _unreadable(reader, spread) or reader.refusal(max_length) or _unread(model, reader) or _uneven(reader)
    return why or _unlike(reader.layers()) or reader


def _unknown(model: Any) -> str:
    """Return why the fused kernels do not read a model that has no reader."""
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    inside = "" if text is config else f" around {text.model_type}"
    return f"{name}{inside} is none of the families with fused kernels, which docs/models.md lists"


def _devices(reader: Reader) -> list[torch.device]:
    """Return the device of each block."""
    return [next(block.parameters()).device for block in reader.blocks]


def _make_neighbours(reader: Reader, stacks: Mapping[tuple[int, int], Stacked]) -> str | None:
    """Make parameters that read the same input slices of one buffer. Return why some stay apart, or None.

    For many rows they are one product then: at batch 32, three and a concatenation took 0.3 ms a step of a 1b model, a fifth.
    """
    why, others = None, list(reader.model.parameters())
    give_own_storages(reader.model)
    for number, block in enumerate(reader.blocks):
        for at, group in enumerate(reader.together(block)):
            sites = [linear_of(layer) for layer in group]
            biases = [site.bias for site in sites if site.bias is not None]
            why = stacks[number, at].repack([site.weight for site in sites], biases, others) or why
    for device in {weight_of(reader.model.lm_head).device, *_devices(reader)}:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.empty_cache()  # of the old buffers, which are too small for what follows
    return why


@contextmanager
def restore_on_error(*models: nn.Module) -> Iterator[None]:
    """Give parameters that were joined their own storages again where the block raises."""
    plain = [p for model in models for p in model.parameters() if type(p) in PARAMETERS]
    before = [p.data_ptr() for p in plain]
    try:
        yield
    except BaseException:
        moved = {id(p) for p, address in zip(plain, before) if p.data_ptr() != address}
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, Projecting) and moved & set(map(id, module.parameters())):
                module.stacked.forget()
        with suppress(torch.OutOfMemoryError):  # the error that is raised says more
            for p in plain:
                if id(p) in moved and p.untyped_storage().nbytes() > p.nbytes:
                    p.data = p.data.clone()
        raise


def _unread(model: nn.Module, reader: Reader) -> str | None:
    """Return why the kernels cannot add the model's adapters."""
    read = [low for layer in reader.layers() for part in layer.parts for one in part.linears() for low in one.adapters]
    known = {id(low.a) for low in read}
    parts: Any = reader.trunk, model.lm_head
    inside = {id(module) for part in parts for module in part.modules()}  # not the part for images
    layers = [(key, layer, site_of(layer).adapters) for key, layer in adapted_layers(model) if id(layer) in inside]
    if other := [key for key, layer, _ in layers if not has_reader(layer) and active_in(layer)]:
        return f"{other[0]}: it carries a low-rank adapter, and is no projection of a layer"
    if missed := [key for key, _, extra in layers for low in extra if id(low.parameters[0]) not in known]:
        return f"{missed[0]}: it carries a low-rank adapter, and is no projection of a layer"
    if types := sorted({type(low).__name__ for low in read} - {LowRank.__name__}):
        return f"one of its adapters is a {types[0]}, which a step has no kernel for"
    if len(dtypes := {half.dtype for low in read for half in (low.a, low.b)}) > 1 or not dtypes <= set(DTYPES):
        return f"its adapters are {' and '.join(sorted(map(str, dtypes)))}; the kernels take fp32, fp16 or bf16, one of them"
    return "the rows of an adapter's a are not dense" if any(low.a.stride(1) != 1 for low in read) else None


def _uneven(reader: Reader) -> str | None:
    """Return which layer has another number of heads than the config, as one whose heads were pruned."""
    for number, (block, (attention, *_)) in enumerate(zip(reader.blocks, reader.layers())):
        if not isinstance(attention, AttentionWeights):
            continue
        heads = [len(one.weight) // attention.head_dim for one in attention.inputs.values()]
        heads[0] = attention.query_heads
        count, kv_heads = reader.heads(reader.attention_of(block))
        wanted = [count, kv_heads, kv_heads][: len(heads)]
        if heads != wanted:
            words = [[*map(str, one)] for one in (attention.inputs, heads, wanted)]
            of, got, want = (" and ".join(filter(None, (", ".join(one[:-1]), one[-1]))) for one in words)
            return f"model.layers.{number}.self_attn has {got} heads of {of}, and the config says {want}"
    return None


def _unlike(layers: Sequence[LayerWeights]) -> str | None:
    """Return which layers that read one input differ in a way that no step multiplies together; None where all fit."""
    for number, (attention, mlp, *_) in enumerate(layers):
        parts = (f"model.layers.{number}.self_attn", attention), (f"model.layers.{number}.mlp", mlp)
        groups: list[tuple[str, Sequence[Linear]]] = [(name, group) for name, part in parts for group in part.groups()]
        for name, group in groups:
            if len({layer.bias is None for layer in group}) > 1:
                return f"{name}: only some of the layers that read its input have a bias"
            coded = {format_of(layer.weight).coded for layer in group}
            if len(coded) > 1:
                return f"{name}: only some of the layers that read its input are quantised"
    return None


def unadded(model: nn.Module) -> str | None:
    """Return which projection has adapters, for a step that adds none."""
    name = next((key for key, layer in adapted_layers(model) if site_of(layer).adapters), None)
    return None if name is None else f"{name}: it carries a low-rank adapter, which its own step does not add"


def _closed(layer: nn.Module, coded: bool = False) -> str | None:
    """Return why a projection's weight cannot be read in place. coded: a quantised one can"""
    site = site_of(layer)
    return site.why or (describe(getattr(layer, "base_layer", layer)) if format_of(site.weight).coded and not coded else None)


def closed_projection(
    model: nn.Module, known: Callable[[nn.Module], bool] = lambda module: False, coded: bool = False
) -> str | None:
    """Return the first module below the head whose weight cannot be read in place, and why.

    known  returns True for a family's own projections
    coded  whether quantised weights can be read
    """
    trunk: Any = text_stack(model)
    prefix = next(name for name, module in model.named_modules() if module is trunk)
    for name, module in trunk.named_modules(prefix=prefix):
        if is_wrapper(module):
            return f"{name}: PEFT trains a copy or rows of it"
        projects = isinstance(module, nn.Linear) or has_reader(module) or name.endswith("_proj")
        if projects and not known(module) and (why := _closed(module, coded)):
            return f"{name}: {why}"
        if isinstance(vars(module).get("weight"), Tensor) or is_parametrized(module, "weight"):  # not a parameter
            return f"{name}: its weight is computed anew at each call (a parametrization, or pruning)"
    return None


def warn_about_hooks(model: nn.Module) -> None:
    """Warn of hooks that a step does not call, since it reads weights alone. The certificate finds hooks that change tokens."""
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if type(module) is not nn.Linear and not all(map(_is_internal, hooks)):  # a linear layer's were called, or refused
            notice(
                f"decoder: {name or type(model).__name__} carries hooks, which do not run while the decoder generates: a step "
                f"reads the weights and does not call it. Call the model itself where they are needed.",
                WARNING,
            )
            return


def _is_internal(hook: Any) -> bool:
    """Return whether a hook is gpubound's, or one by which transformers records outputs."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.partition(".")[0] in ("gpubound", "transformers")


def _unreadable(reader: Reader, spread: bool | str = False) -> str | None:
    """Return why the kernels cannot read the parameters in place."""
    model, trunk = reader.model, reader.trunk
    if why := closed_projection(model, reader.projects, coded=not spread):
        return why
    if type(reader.embedding) is not nn.Embedding and role_of(reader.embedding) not in SCALED:
        return f"its embedding is {type(reader.embedding).__name__}, not nn.Embedding"
    head: Any = model.lm_head
    own = type(head) is LMLoss and not hooked(head)  # a linear layer that can compute a loss, too
    if not own and (why := _closed(head)):
        return f"lm_head: {why}"
    adapted = [layer for _, layer in (*adapted_layers(model), *wrappers(model))]
    apart = {id(p) for layer in adapted for name in names_in(layer) for p in parameters_of(layer, name)}
    if trunk is not getattr(model, "model", trunk):  # a step does not read the part for images
        apart |= {id(p) for p in model.parameters()} - {id(p) for part in (trunk, head) for p in part.parameters()}
    dense = (one for one in model_tensors(model, "_parameters") if not format_of(one.tensor).coded)
    weights = {one.name: one.tensor for one in dense if id(one.tensor) not in apart}
    where = (lambda device: None) if spread == ANYWHERE else (lambda device: (device.type, None if spread else device.index))
    if len({(t.dtype, where(t.device)) for t in weights.values()}) > 1:
        names = ", ".join(sorted({f"{t.dtype} on {t.device.type if spread else t.device}" for t in weights.values()}))
        move = spread and len({t.dtype for t in weights.values()}) == 1  # as after a `.to` that ran out of memory half-way
        return f"its weights differ in dtype or device: {names}{'; move all of it to the CPU, or to GPUs' if move else ''}"
    if (dtype := next(iter(weights.values())).dtype) not in DTYPES:
        return f"its weights are {dtype}; the kernels take fp32, fp16 and bf16"
    loose = [name for name, t in weights.items() if not t.is_contiguous() or type(t) not in PARAMETERS]
    return f"{loose[0]} is not a plain, contiguous parameter" if loose else None


class HostView:
    """A WeightView on another device than its model's."""

    sliced, adapted, apart, positions, layer_inputs = False, False, None, None, None

    def __init__(self, original: WeightView, device: torch.device) -> None:
        if any(type(layer.mlp) is not DenseWeights or layer.extra is not None for layer in original.layers):
            raise ValueError(
                f"decoder: device: got {device} for a model on {original.device} whose MLPs are experts or have no gate or an "
                f"input besides, wanted one with dense, gated MLPs; move the model."
            )
        self.original, self.device, self.dtype = original, device, original.dtype
        self.model, self.shape, self.coded = original.model, original.shape, original.coded
        self.numbers, self.bytes_read = original.numbers, original.bytes_read
        self._read()

    @property
    def copied(self) -> Any:
        return self.original.copied

    def refresh_copies(self) -> None:
        self.original.refresh_copies()

    def refresh(self) -> None:
        """Read the weights again, after `moved` or when a module was replaced."""
        self.original.refresh()
        self._read()

    def _read(self) -> None:
        live = self.original
        self.reader, self.moved = live.reader, live.moved  # which is another one after a refresh
        self.layers = [self._layer(layer) for layer in live.layers]
        self.embed, self.norm, self.head = self._copy(live.embed), self._moved(live.norm), live.head

    def tables(self, length: int) -> list[tuple[Tensor, Tensor]]:
        return [(cos.to(self.device), sin.to(self.device)) for cos, sin in self.original.tables(length)]

    def _layer(self, layer: LayerWeights) -> LayerWeights:
        factor = None if layer.factor is None else self._copy(layer.factor)
        return layer.mapped(self._moved)._replace(factor=factor)

    def _moved(self, value: Any) -> Any:
        """Return a norm, a vector, or a linear layer with its bias, on the device."""
        if isinstance(value, Tensor):
            return self._copy(value)
        if isinstance(value, Norm | LayerNorm):
            value = value._replace(weight=self._copy(value.weight))
        if isinstance(value, Norm):
            return value
        return value if value.bias is None else value._replace(bias=self._copy(value.bias))

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device)
