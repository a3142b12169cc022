"""Low-rank adapters on the layers of a model, in place: added, listed, switched off, removed, chosen by rows of a batch.

PEFT creates the adapters and owns them (`pip install gpubound[hf]`): its layers are put around the model's layers, its configs
are in `model.peft_config`, and its methods work on the model. gpubound computes their products (layers.py). Their kernel calls
in a training step are named before it runs, so that the kernels are compiled in parallel.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..device import collecting_new_objects, without_autocast
from ..kernels.dispatch import SIXTEEN_BITS, Call, start_self_tests
from ..kernels.lora import blocks_of, product_size
from ..kernels.norms import norm_shape
from ..layers.block import RMSNorm
from ..layers.fused_weights import Projecting, has_reader, own_storages, plain, site_of
from ..layers.linear_product import DENSE, Format, format_of, is_sharded, multiply_by_records, shape_of
from .adapter import LowRank, Routing, pack_adapters
from .base import by, check, check_no_step, kind_of, layers_of, quantize_base, select_layers
from .layers import TOKENS, active_in, adapted_layers, fuse, names_in, parameters_of, tokens_of, unusual, wrappers

UNKNOWN_TOKENS = 1 << 20  # for a batch that does not show how many it has
EXPECTED_TOKENS = 1 << 13  # of a batch that is not there yet


def calls_of_any_batch(model: nn.Module, planned: Mapping[Any, LowRank] | None = None, coded: bool = False) -> Iterator[Call]:
    """Yield the calls of any batch: of layers with one adapter each, or routed ones, and of the norms between them.

    planned  adapters that plain layers will get, while all other weights are frozen
    coded    the frozen weights will be stored in fewer bits
    """
    for lows, format, _ in _sites(model, planned or {}):
        yield from _of_every_batch(lows, coded or format is not DENSE)
    for norm in model.modules():
        if isinstance(norm, RMSNorm) and (planned or not norm.weight.requires_grad):
            yield from ((op, norm_shape(len(norm.weight), norm.weight.detach())) for op in norm.OPS)


def _planned(layers: Iterable[Any], rank: int, scale: float, dropout: float) -> dict[Any, LowRank]:
    """Return adapters without values for the plain ones of these layers."""
    planned = {}
    for layer in layers:
        if plain(layer):
            outputs, inputs = shape_of(layer.weight)
            a, b = (torch.empty(shape, device="meta", dtype=torch.float32) for shape in ((rank, inputs), (outputs, rank)))
            planned[layer] = LowRank(a, b, scale, nn.Dropout(dropout))
    return planned


def calls_of_batch(model: nn.Module, batch: Any) -> Iterator[Call]:
    """Yield the products with adapters of this batch."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    tokens = ids.numel() if isinstance(ids, Tensor) and ids.dim() else UNKNOWN_TOKENS
    for lows, format, biased in _sites(model, {}):
        if format is DENSE:
            yield from _products(lows, biased, tokens)


def calls_of_large_batch(model: nn.Module, planned: Mapping[Any, LowRank]) -> Iterator[Call]:
    """Yield the products with adapters that are large in a batch of EXPECTED_TOKENS. The first batch's own were begun when it
    came, and a first step waited for them for 0.8 s at 1B."""
    for lows, format, biased in _sites(model, planned):
        if format is DENSE:
            yield from (call for call in _products(lows, biased, EXPECTED_TOKENS) if call[1][0] == 2)


def _sites(model: nn.Module, planned: Mapping[Any, LowRank]) -> Iterator[tuple[list[LowRank], Format, bool]]:
    """Yield the adapters that are computed together, the format of their weights, and whether a bias is added."""
    sites = {id(layer): site for layer in model.modules() if has_reader(layer) and len((site := site_of(layer)).adapters) == 1}
    sites |= {id(layer): site_of(layer)._replace(adapters=[low]) for layer, low in planned.items()}
    for part in model.modules():
        if isinstance(part, Projecting):
            together = [sites.get(id(layer)) for layer in part.projections()]
            lows: list[Any] = [site.adapters[0] for site in together if site is not None]
            same = len(lows) == len(together) and len({(low.scale, low.routing) for low in lows}) == 1
            if same and blocks_of([low.b for low in lows]):
                yield lows, format_of(together[0].weight), any(site.bias is not None for site in together)  # type: ignore[union-attr]
                for layer in part.projections():
                    sites.pop(id(layer), None)
    for site in sites.values():
        yield [site.adapters[0]], format_of(site.weight), site.bias is not None  # type: ignore[list-item]


def _of_every_batch(lows: Sequence[LowRank], coded: bool) -> Iterator[Call]:
    rank, inputs, outputs, count = lows[0].a.shape[0], lows[0].a.shape[1], _outputs(lows), len(lows)
    ranks, dropping, routed = rank * count, lows[0].rate > 0, lows[0].routing is not None
    yield "lora_down", (ranks, dropping, routed, 1, True)
    yield "lora_down", (rank, False, routed, count, False)
    if coded:
        yield "lora_up", (rank, False, count, True)
        yield "lora_up", (ranks, dropping, 1, False)
    if routed:  # the gradients of a layer's b are adjacent columns
        yield from (("lora_gradients", (inputs, low.b.shape[0], rank, dropping, 1, True, False)) for low in lows)
    else:
        yield "lora_gradients", (inputs, outputs, rank, dropping, count, False, False)


def _products(lows: Sequence[LowRank], biased: bool, tokens: int) -> Iterator[Call]:
    """Yield the product of forward, then the one of the gradient of x."""
    rank, inputs, count, dropping, routing = *lows[0].a.shape, len(lows), lows[0].rate > 0, lows[0].routing
    own = (None if routing is None else routing.equal_layout(lows)) or (0, 0)
    yield "lora_product", (product_size(tokens, _outputs(lows)), rank, False, True, count, biased, *own)
    yield "lora_product", (product_size(tokens, inputs), rank * count, dropping, False, 1, False, *own)


def _outputs(lows: Sequence[LowRank]) -> int:
    return sum(low.b.shape[0] for low in lows)


INITS = (True, False, "gaussian", "orthogonal")


@torch.inference_mode(False)  # an adapter made inside could not be trained
def add(
    model: nn.Module,
    rank: int,
    alpha: float | None = None,
    targets: str | Sequence[str] = "all-linear",
    dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
    init: bool | str = True,
    name: str = "default",
    base: str | None = None,
) -> list[str]:
    """Give layers of `model` a low-rank adapter each, and freeze all other parameters. Return the layers' names.

    alpha    the scale's numerator: y += alpha / rank · dropout(x) aᵀ bᵀ. None: as large as the rank
    targets  "all-linear": every nn.Linear but the output layer; "all-linear-and-conv": every nn.Conv2d, too; the ends of
             names ("q_proj"); or a regular expression of whole names
    rslora   alpha / √rank instead
    dora     rows of the adapted weight get trained lengths (PEFT's DoRA)
    init     True: a at random, b zero; "gaussian": a normal with deviation 1 / rank; False: b at random, too;
             "orthogonal": both at random, and b a zero, for nn.Linear of an even rank
    name     several adapters may be on one layer under different names; all that are on are added
    base     "nf4", "int8" or "fp8": the format that `quantize_base` then gives the frozen weights

    Adapters are in fp32 over 16-bit weights, so that any optimizer keeps their small updates.
    """
    check_module(model, "lora.add")
    if init not in INITS:
        raise ValueError(f"lora.add: init must be True, False, 'gaussian' or 'orthogonal', got {init!r}.")
    if base is not None:
        check(model, kind_of(base, "lora.add: base"))
    if alpha == 0:  # an adapter in a file may have it, and adds nothing
        raise ValueError(
            "lora.add: alpha must not be 0, the scale's numerator: the adapters would add nothing and learn nothing."
        )
    alpha = rank if alpha is None else alpha
    layers = select_layers(model, targets, rank)
    for key, layer in layers.items():
        check_options(key, layer, rank, alpha, dropout, "lora.add")
    odd = isinstance(rank, int) and rank % 2
    if init == "orthogonal" and (other := [key for key, layer in layers.items() if odd or not isinstance(layer, nn.Linear)]):
        raise ValueError(f"lora.add: init 'orthogonal' is for nn.Linear of an even rank, got rank {rank} of {other[0]}.")
    if dora and base is not None:
        raise ValueError(f"lora.add: dora reads the weights, and base={base!r} stores them in codes; leave one of them out.")
    # in fp32 a step may compute in another dtype
    weight = next((p for p in model.parameters() if p.dtype in SIXTEEN_BITS), None) if model.training else None
    if weight is not None and not dora:  # before PEFT makes its layers, 1.2 s of 8b's 224
        planned = _planned(layers.values(), rank, alpha / rank, dropout)
        calls = [*calls_of_any_batch(model, planned, base is not None)]
        calls += calls_of_large_batch(model, planned) if base is None else ()
        start_self_tests(calls, weight.device, weight.dtype)
    options = {"lora_dropout": dropout, "use_rslora": rslora, "use_dora": dora, "init_lora_weights": init}
    device = next(model.parameters()).device
    with collecting_new_objects(device), without_autocast(device):  # it would round the lengths of rows
        attach(model, layers, {"r": rank, "lora_alpha": alpha, **options}, name, "lora.add")
    if base is not None:
        quantize_base(model, base)
    if weight is not None:
        start_self_tests(calls_of_any_batch(model), weight.device, weight.dtype)
    return list(layers)


def check_options(key: str, layer: Any, rank: Any, alpha: Any, dropout: Any, who: str) -> None:
    weight: Any = getattr(layer, "weight", None)  # a parameter of experts is one itself
    shape = tuple(layer.shape[-2:]) if weight is None else shape_of(weight)
    most = min(shape[0], int(torch.Size(shape[1:]).numel()))
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= most:
        raise ValueError(
            f"{who}: rank must be an integer from 1 to {most} for {key}, whose weight is {by(shape)}, got {rank!r}."
        )
    if not is_number(alpha):
        raise ValueError(f"{who}: alpha must be a finite number, got {alpha!r}.")
    if not is_number(dropout) or not 0 <= dropout < 1:
        raise ValueError(f"{who}: dropout must be from 0 up to, not including, 1, got {dropout!r}.")
    if dropout and not isinstance(layer, nn.Module):
        raise ValueError(f"{who}: {key} takes no dropout, got {dropout}; adapt experts in a separate call.")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def attach(model: nn.Module, layers: Mapping[str, Any], config: dict[str, Any], name: str, who: str) -> None:
    """Inject PEFT's adapters into these layers of the model. Everything is checked before anything is changed.

    layers   by their names: modules, or parameters of experts
    config   of PEFT's LoraConfig, without its targets
    """
    lora_config = config_class(who)
    if not isinstance(name, str) or not name or "." in name:
        raise ValueError(f"{who}: name must be a word without dots, got {name!r}.")
    if hasattr(nn.ModuleDict, name):
        raise ValueError(f"{who}: torch's modules have an attribute named {name!r}; give the adapter another name.")
    if name in adapter_names(model):
        raise ValueError(
            f"{who}: the model already has an adapter named {name!r}; give another name, or call gb.lora.remove first."
        )
    check_no_step(model, who)
    _check_apart(model, layers, who)
    check_outside({key.rpartition(".")[0]: p for key, p in model.named_parameters()}, who)
    modules = [key for key, layer in layers.items() if isinstance(layer, nn.Module)]
    parameters = [key for key in layers if key not in modules]
    for key in modules if config.get("use_dora") else ():  # which reads the weight itself
        weight: Any = layers[key].weight
        if format_of(weight).coded or is_sharded(weight):
            kind = "quantised" if format_of(weight).coded else "sharded"
            raise ValueError(f"{who}: dora reads the weight of {key}, which is {kind}; leave dora out.")
        if getattr(model.get_submodule(key), "merged_adapters", ()):
            raise ValueError(
                f"{who}: another adapter is merged into {key}, over whose weight DoRA would begin; call gb.lora.unmerge first."
            )
    # A regular expression of these names alone: a list of PEFT's would match the ends of other names, too.
    pattern = "|".join(key.replace(".", r"\.") for key in modules)
    peft_config = lora_config(**config, target_modules=pattern or [], target_parameters=parameters or None)
    inject(model, peft_config, name, who)
    ends = {key.rpartition(".")[2] for key in modules}
    others = [key for key in layers_of(model) if key not in layers and key.rpartition(".")[2] in ends]
    peft_config.target_modules = set(modules if others else ends)


def config_class(who: str) -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError(f"{who}: adapters are PEFT's, which is not installed; call pip install gpubound[hf].") from error
    return LoraConfig


def inject(model: nn.Module, config: Any, name: str, who: str) -> None:
    """Put PEFT's layers of this config into the model. What it refuses leaves the model as it was."""
    from peft import inject_adapter_in_model

    before = {id(layer): active_in(layer) for _, layer in [*adapted_layers(model), *wrappers(model)]}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    ours = {id(p) for p in parameters(model)}
    try:
        with warnings.catch_warnings(), _torch_defaults():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            inject_adapter_in_model(config, model, name, low_cpu_mem_usage=any(p.is_meta for p in model.parameters()))
            _tie_rows(model, name)
    except Exception as error:
        take_out(model, [name])
        for p in model.parameters():
            p.requires_grad_(id(p) in trained)
        raise ValueError(f"{who}: PEFT refuses this adapter: {error}") from error
    new = {id(p) for p in parameters(model, name)}
    for p in model.parameters():
        p.requires_grad_(id(p) in new or (id(p) in ours and id(p) in trained))
    for _, layer in [*adapted_layers(model), *wrappers(model)]:
        for p in parameters_of(layer, name):  # PEFT creates them in the weight's dtype, which may have 16 bits
            p.data = p.data.to(torch.promote_types(p.dtype, torch.float32)) if hasattr(layer, "base_layer") else p.data
        set_active(layer, [*before.get(id(layer), []), *([name] if name in names_in(layer) else [])])
        if hasattr(layer, "base_layer"):
            layer.train(layer.base_layer.training)
        if own_storages not in layer._state_dict_hooks.values():
            layer.register_state_dict_post_hook(own_storages)
        fuse(layer)
    multiply_by_records(model, everywhere=True)
    pack_adapters(model)


def _tie_rows(model: nn.Module, name: str) -> None:
    """Let modules that share an embedding's weight read the rows that train: PEFT knows only models of transformers as tied."""
    from peft.utils.other import TrainableTokensWrapper

    for _, wrapper in wrappers(model):
        if (tokens := tokens_of(wrapper)) and tokens.tied_adapter is None and name in names_in(wrapper):
            weight = tokens.base_layer.weight
            for key, module in list(model.named_modules()):
                if module._parameters.get("weight") is weight and f"{TOKENS}." not in key:
                    tied = TrainableTokensWrapper(module, name, tokens.token_indices[name], tied_adapter=tokens)
                    model.get_submodule(key.rpartition(".")[0]).__setattr__(key.rpartition(".")[2], tied)


@contextmanager
def _torch_defaults() -> Iterator[None]:
    """Create tensors on the CPU and in fp32: PEFT makes its weights by torch's defaults, which the caller may have changed."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:  # a device as context is asked at every call: 0.3 s of 8B's 224 adapters
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def set_active(layer: Any, names: Sequence[str]) -> None:
    """Switch on these of the layer's adapters, and no others. PEFT's own `set_adapter` also freezes the others."""
    if hasattr(layer, "base_layer"):
        layer._active_adapter, layer._disable_adapters = list(names), False
    else:
        layer._disable_adapters = not names
        if names:
            layer._active_adapter = list(names)
        if tokens := tokens_of(layer):
            set_active(tokens, names)


def _check_apart(model: nn.Module, layers: Mapping[str, Any], who: str) -> None:
    """Refuse a weight that another layer has, too: an adapter that is merged into it would change both."""
    weights, first = {id(getattr(layer, "weight", layer)) for layer in layers.values()}, dict[int, str]()
    for key, layer in layers_of(model).items():
        weight = getattr(layer, "weight", layer)
        other = first.setdefault(id(weight), key)
        if other != key and id(weight) in weights:
            ends = sorted({name.rpartition(".")[2] for name in layers if name not in (other, key)})
            others = f", or give targets={ends}" if ends else ""
            raise ValueError(
                f"{who}: {other} and {key} share one weight, so an adapter of one would change both; untie them{others}."
            )


def adapter_names(model: nn.Module) -> list[str]:
    layers = [*adapted_layers(model), *wrappers(model)]
    return list(dict.fromkeys(name for _, layer in layers for name in names_in(layer)))


def layers_with(model: nn.Module, name: str | None, who: str, some: bool = False) -> list[tuple[str, Any, list[str]]]:
    """Return (a layer's name, the layer, its adapters called `name`), all of them where that is None.

    some: raise ValueError if there is none at all
    """
    check_module(model, who)
    layers = []
    for key, layer in [*adapted_layers(model), *wrappers(model)]:
        if names := [word for word in names_in(layer) if name in (None, word)]:
            layers.append((key, layer, names))
    if name is not None and not layers:
        others = sorted(adapter_names(model))
        only = f"only {', '.join(map(repr, others))}" if others else "nor any other; call gb.lora.add first"
        raise ValueError(f"{who}: the model has no adapter named {name!r}, {only}.")
    if some and not layers:
        raise ValueError(f"{who}: the model has no adapter; call gb.lora.add first.")
    return layers


def parameters(model: nn.Module, name: str | None = None) -> list[nn.Parameter]:
    """Return the parameters of the adapters, or of those called `name`, for an optimizer."""
    layers = layers_with(model, name, "lora.parameters")
    return list({id(p): p for _, layer, names in layers for word in names for p in parameters_of(layer, word)}.values())


def remove(model: nn.Module, name: str | None = None) -> None:
    """Take adapters out, or those called `name`. What `add` froze stays frozen."""
    layers = layers_with(model, name, "lora.remove", some=True)
    check_no_step(model, "lora.remove")
    check_not_routed(layers, "lora.remove")
    check_not_merged(layers, "lora.remove")
    take_out(model, adapter_names(model) if name is None else [name])


def take_out(model: nn.Module, names: Sequence[str]) -> None:
    """Delete adapters, and restore the layers that have none left."""
    undo = multiply_by_records(model, everywhere=True)
    for key, layer in [*reversed(adapted_layers(model)), *wrappers(model)]:  # an inner layer before the one around it
        active = [name for name in active_in(layer) if name not in names]
        trained = [p for name in names_in(layer) for p in parameters_of(layer, name) if p.requires_grad]
        set_active(layer, active)  # or PEFT warns, and switches on another one
        for name in set(names) & set(names_in(layer)):
            layer.delete_adapter(name) if hasattr(layer, "base_layer") else layer.delete_adapter(name, None)
        if names_in(layer):
            for p in trained:
                p.requires_grad_(True)
        else:
            model.get_submodule(key.rpartition(".")[0]).__setattr__(
                key.rpartition(".")[2], layer.base_layer if hasattr(layer, "base_layer") else layer.original_module
            )
    configs = vars(model).get("peft_config", {})
    for name in names:
        configs.pop(name, None)
    if not configs:
        vars(model).pop("peft_config", None)
    undo()


class disable:
    """Switch adapters off, or those called `name`: until `enable`, or to the end of a `with` block.

    A graph that was captured before does not change.
    """

    def __init__(self, model: nn.Module, name: str | None = None):
        layers = layers_with(model, name, "lora.disable", some=True)
        check_not_merged(layers, "lora.disable")
        self._were_active = [(layer, active_in(layer)) for _, layer, _ in layers]
        for (_, layer, names), (_, active) in zip(layers, self._were_active):
            set_active(layer, [word for word in active if word not in names])

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for layer, active in self._were_active:
            set_active(layer, [word for word in names_in(layer) if word in active or word in active_in(layer)])


def enable(model: nn.Module, name: str | None = None) -> None:
    """Switch adapters on again, or those called `name`."""
    for _, layer, names in layers_with(model, name, "lora.enable", some=True):
        set_active(layer, [word for word in names_in(layer) if word in names or word in active_in(layer)])


class rows:
    """Let each row of a batch choose one of the adapters `names`: until `close`, or to the end of a `with` block.

    Each call of `model` takes `adapter_ids` then, integers (rows,) on its device: 1 is the second of `names`, -1 the model
    without any of them. Where the arguments of a call are not yours to choose, set `ids` instead. Adapters that are on and not
    named are added to all rows.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]):
        self._layers = _routable(model, names)
        self._routing = Routing(names)
        self._buffers: dict[tuple[int, torch.device], Tensor] = {}
        for layer in self._layers:
            layer.routing = self._routing
            fuse(layer)
        pack_adapters(model)
        entries = [model]  # that a batch is passed to: also the trunk below the head, for a loss without logits
        while isinstance(below := getattr(entries[-1], "base_model", None), nn.Module) and below is not entries[-1]:
            entries.append(below)
        self._hooks = [hook for entry in entries for hook in self._routing.watch(entry)]

    @property
    def ids(self) -> Tensor | None:
        """The ids of calls that pass none: copied to where captured graphs read them, once for each number of rows."""
        return self._routing.ids

    @ids.setter
    def ids(self, ids: Tensor | None) -> None:
        if ids is not None:
            self._routing.check(ids)
            at = len(ids), self._layers[0].base_layer.weight.device
            if at not in self._buffers:
                self._buffers[at] = ids.to(at[1], copy=True)
            ids = self._buffers[at].copy_(ids)
        self._routing.ids = ids

    def close(self) -> None:
        """Add all adapters that are on to all rows again."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            vars(layer).pop("routing", None)

    def __enter__(self) -> "rows":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _routable(model: nn.Module, names: Sequence[str]) -> list[Any]:
    """Return the layers with one of these adapters, or raise ValueError."""
    texts = isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(name, str) for name in names)
    if not texts or not names or len(set(names)) < len(names):
        raise ValueError(f"lora.rows: names must be different names of adapters, such as ['first', 'second'], got {names!r}.")
    layers: dict[int, Any] = {}
    for name in names:
        for key, layer, _ in layers_with(model, name, "lora.rows"):
            layers[id(layer)] = layer
            if why := _unroutable(key, layer, name):
                raise ValueError(f"lora.rows: the adapter {name!r} of {key} {why}.")
    return [layer for _, layer in adapted_layers(model) if id(layer) in layers]


def _unroutable(key: str, layer: Any, name: str) -> str | None:
    if "experts" in key.split("."):
        return "reads rows in a router's order, not the batch's; adapt other layers"
    if not hasattr(layer, "base_layer") or type(layer.get_base_layer()) is not nn.Linear:
        base = layer.get_base_layer() if hasattr(layer, "base_layer") else layer.original_module
        return f"is of an nn.{type(base).__name__}, and rows choose from adapters of nn.Linear alone"
    if name in layer.lora_variant:
        return "is no plain LoRA, and rows choose from plain LoRA alone"
    if name in layer.lora_B and (why := unusual(layer, name)):
        return f"{why}, and rows choose from plain LoRA alone"
    if "routing" in vars(layer):
        return "is one that rows choose from already; call close() of what gb.lora.rows returned first"
    if name in layer.merged_adapters:
        return "is merged; call gb.lora.unmerge first"
    if name not in active_in(layer):
        return "is switched off; call gb.lora.enable first"
    return None


def check_module(model: Any, who: str) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"{who}: model must be a torch.nn.Module, got a {type(model).__name__}; pass the model itself.")


def check_not_routed(layers: Sequence[tuple[str, Any, list[str]]], who: str) -> None:
    """Refuse adapters that rows of a batch choose from: a change would apply to some rows alone."""
    if key := next((key for key, layer, _ in layers if "routing" in vars(layer)), None):
        raise ValueError(
            f"{who}: rows of a batch choose from the adapters of {key}; call close() of what gb.lora.rows returned first."
        )


def check_not_merged(layers: Sequence[tuple[str, Any, list[str]]], who: str) -> None:
    """Refuse merged adapters: a change of the adapter would have no effect."""
    if key := next((key for key, layer, names in layers if set(names) & set(getattr(layer, "merged_adapters", ()))), None):
        raise ValueError(f"{who}: the adapter of {key} is merged into its weight; call gb.lora.unmerge first.")


def check_outside(weights: Mapping[str, Tensor], who: str) -> None:
    """Refuse weights that cannot be written, or kept for a backward."""
    if inside := [key for key, weight in weights.items() if weight.is_inference()]:
        raise ValueError(
            f"{who}: {inside[0]} was made inside torch.inference_mode(), and its weight cannot be written; "
            f"make or load the model outside of it."
        )


def check_values(weights: Mapping[str, Tensor], who: str) -> None:
    """Refuse weights without values, too: what is copied onto the meta device is lost silently."""
    check_outside(weights, who)
    if key := next((key for key, weight in weights.items() if weight.is_meta), None):
        raise ValueError(f"{who}: {key} is on the meta device, without values; load the model's weights first.")
