"""The layers of a model that `add` adapts, and quantisation of their frozen weights, in place.

Frozen weights are QLoRA's NF4, int8, or fp8 with products in 8 bits. Layers are chosen: all of a class, by the ends of their
names, or by a regular expression.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from re import _parser  # type: ignore[attr-defined]  # the parsed pattern, of which `re` has no public form
from typing import Any, NamedTuple

import torch
from torch import nn

from ..formatting import readable
from ..kernels.accumulate import Taker, record_of, seen
from ..layers.embedding_and_head import head_of
from ..layers.fused_weights import release_stacks
from ..layers.linear_product import FORWARDS, format_of, is_sharded, multiply_by_records, shape_of
from ..layers.quantized_base import Base, Frozen, InFp8, InInt8, InNf4, OnlyCodes
from ..trace import fallback, notice
from .layers import TOKENS, adapted_layers, is_wrapper, of_peft

CLASSES = (nn.Linear, nn.Conv2d, nn.Embedding)
"""classes of layers that can be adapted, besides parameters of experts"""

ALL: dict[str, tuple[type[nn.Module], ...]] = {
    "all-linear": (nn.Linear,),
    "all-linear-and-conv": (nn.Linear, nn.Conv2d),
}
EXPERTS = ("gate_up_proj", "down_proj")  # of a module of experts of transformers': parameters (experts, outputs, inputs)


def layers_of(model: nn.Module, classes: tuple[type, ...] = CLASSES) -> dict[str, Any]:
    """Return layers by their names without PEFT's wrappers, and, for all classes, the parameters of experts."""
    layers, inside = dict[str, Any](), list[str]()
    for key, module in model.named_modules():
        if inside and key.startswith(tuple(inside)):
            continue
        if is_wrapper(module):  # what it trains whole gets no adapter
            inside.append(f"{key}.")
            continue
        if of_peft(module):
            inside.append(f"{key}.")
            module = module.get_base_layer()  # type: ignore[operator]
        if isinstance(module, classes):
            layers[key] = module
        elif classes is CLASSES:
            parameters = getattr(module, "_parameters", {})
            if all(isinstance(parameters.get(name), torch.Tensor) and parameters[name].dim() == 3 for name in EXPERTS):
                layers |= {f"{key}.{name}": parameters[name] for name in EXPERTS}
    return layers


def select_layers(model: nn.Module, targets: str | Sequence[str], rank: Any) -> dict[str, Any]:
    _check_no_peft(model)
    layers = layers_of(model)
    if key := next((key for key, layer in layers.items() if is_sharded(seen(getattr(layer, "weight", layer)))), None):
        raise ValueError(
            f"lora.add: the weight of {key} is sharded; add adapters first, and shard the model then, or create it sharded by "
            f"gpubound.distributed.fsdp.shard_deferred(frozen=True)."
        )
    if isinstance(targets, str) and targets in ALL:
        return _all(model, targets, rank)
    wanted = list(targets) if isinstance(targets, Iterable) and not isinstance(targets, str) else [targets]
    _check_words(targets, wanted)
    inside = re.compile(r"\.base_layer|(^|\.)lora_")  # of PEFT's layers
    named = {key: m for key, m in model.named_modules() if not inside.search(key)} | layers
    named.pop("", None)
    selected, regex = dict[str, Any](), isinstance(targets, str)
    for target in wanted:
        matches = [key for key in named if key == target or key.endswith(f".{target}") or (regex and re.fullmatch(target, key))]
        if not matches:
            ends = sorted({key.rpartition(".")[2] for key in layers})
            raise ValueError(
                f"lora.add: no layer of {type(model).__name__} is named {target!r}; those that can be adapted end in "
                f"{', '.join(ends)}."
            )
        selected.update((key, named[key]) for key in matches)
    never_called = in_encoder_layers(model)
    for key, module in selected.items():
        if why := unfit(module, never_called):
            raise ValueError(f"lora.add: {key} {why}; name other layers.")
    return selected


def _check_words(targets: Any, wanted: Sequence[Any]) -> None:
    if not wanted or not all(isinstance(target, str) for target in wanted):
        raise ValueError(
            f"lora.add: targets must be {', '.join(map(repr, ALL))}, a regular expression, or a list of names' ends, got "
            f"{targets!r}."
        )
    if isinstance(targets, str):
        check_pattern(targets, f"lora.add: targets is {targets!r}", "list names", ValueError)


STEPS = 10**7  # of a match, about 50 ms
LENGTH = 100  # characters of a name


def check_pattern(pattern: str, where: str, do: str, error: type[Exception]) -> None:
    """Raise `error` for an invalid pattern, and for one that may take more than STEPS on a name of LENGTH characters.

    Python's `re` backtracks, without a limit: `(a+)+b` takes 2^n steps on n characters.
    """
    try:
        re.compile(pattern)
        steps = _most_steps(_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as raised:
        raise error(f"{where}, no regular expression ({raised}); {do}.") from raised
    if steps > STEPS:
        raise error(f"{where}, which could take {steps:.0e} steps to match one name, limit {STEPS:.0e}; {do}.")


def _most_steps(parsed: Any) -> float:
    """Return an upper bound of the number of matches of a parsed pattern with prefixes of LENGTH characters."""
    matches, open_ended = 1.0, 0
    for op, value in parsed:
        name = str(op)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, body = int(value[0]), min(int(value[1]), LENGTH), _most_steps(value[2])
            if body == 1 and most == LENGTH:
                open_ended += 1
            elif body == 1:
                matches *= max(most - least + 1, 1)
            else:
                matches *= body**most if most * math.log10(body) < 300 else math.inf
        elif name == "BRANCH":
            matches *= sum(_most_steps(branch) for branch in value[1])
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT", "ATOMIC_GROUP"):
            matches *= _most_steps(value if name == "ATOMIC_GROUP" else value[-1])
        elif name == "GROUPREF_EXISTS":
            matches *= sum(_most_steps(branch) for branch in value[1:] if branch)
    return matches * math.comb(LENGTH + open_ended, open_ended)  # the positions that divide the unbounded repeats


def _all(model: nn.Module, targets: str, rank: Any) -> dict[str, Any]:
    head, never_called = output_layer(model), in_encoder_layers(model)
    layers = {key: layer for key, layer in layers_of(model, ALL[targets]).items() if layer is not head}
    left = {key: why for key, layer in layers.items() if (why := unfit(layer, never_called) or _too_small(layer, rank))}
    if len(left) == len(layers):
        classes = " or ".join(f"nn.{one.__name__}" for one in ALL[targets])
        raise ValueError(
            f"lora.add: {type(model).__name__} has no {classes} below its head that takes an adapter of rank {rank}; name as "
            f"targets what takes one: linear layers, 2d convolutions, embeddings, experts."
        )
    for key, why in left.items():
        fallback(f"lora.add: {targets}", f"{key} {why}, so it gets no adapter")
    if coded := [key for key, module in model.named_modules() if isinstance(module, OnlyCodes) and module.linear]:
        others = f" and {len(coded) - 1} more linear layers" if len(coded) > 1 else ""
        fallback(
            f"lora.add: {targets}", f"the weights of {coded[0]}{others} are quantised and no parameters: no adapter for them"
        )
    return {key: layer for key, layer in layers.items() if key not in left}


def output_layer(model: nn.Module) -> Any:
    """Return the layer that computes the logits, or None.

    A model without `get_output_embeddings`: the last nn.Linear that shares its weight with an nn.Embedding, or else that has
    as many outputs as the largest nn.Embedding has rows.
    """
    if hasattr(model, "get_output_embeddings"):
        return head_of(model)
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tied = [layer for layer in linear if any(layer.weight is table.weight for table in tables)]
    vocabulary = max((table.num_embeddings for table in tables), default=None)
    return next(reversed(tied or [layer for layer in linear if layer.out_features == vocabulary]), None)


def _too_small(layer: Any, rank: Any) -> str | None:
    """Return why a layer cannot have this rank: the last convolution of a diffusion model has four channels."""
    outputs, *inputs = shape_of(layer.weight)
    if not isinstance(rank, int) or rank <= min(outputs, math.prod(inputs)):
        return None
    return f"has a weight of {by((outputs, *inputs))}, too small for rank {rank}"


def by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def in_encoder_layers(model: nn.Module) -> set[int]:
    """Return the ids of the linear layers that an nn.TransformerEncoderLayer in eval mode reads without calling them."""
    encoders = [layer for layer in model.modules() if isinstance(layer, nn.TransformerEncoderLayer)]
    return {id(linear) for layer in encoders for linear in (layer.linear1, layer.linear2)}


def unfit(module: Any, never_called: set[int]) -> str | None:
    """Return why `module` cannot have an adapter. never_called: `in_encoder_layers` of its model"""
    if isinstance(module, torch.Tensor):  # of experts
        return None
    if type(module) not in CLASSES:
        *others, last = (f"nn.{one.__name__}" for one in CLASSES)
        return f"is a {type(module).__module__.split('.')[0]}.{type(module).__name__}, not an {', '.join(others)} or {last}"
    weight = seen(module.weight)
    if type(weight) is not nn.Parameter or not (weight.is_floating_point() or format_of(weight).coded):
        return "has a weight that is not a plain parameter of floating-point numbers"
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        return f"has groups = {module.groups}, and adapters are for convolutions of one group"
    if "forward" in vars(module) and getattr(module.forward, "func", None) not in FORWARDS:
        return "has another forward"
    if id(module) in never_called:
        return "is in an nn.TransformerEncoderLayer, which in eval mode reads its weight without calling it"
    return None


def _check_no_peft(model: nn.Module) -> None:
    for key, module in model.named_modules():
        if type(module).__module__ in ("peft.peft_model", "peft.mixed_model") or (
            of_peft(module) and not type(module).__module__.startswith("peft.tuners.lora.") and not key.endswith(TOKENS)
        ):
            raise ValueError(
                f"lora.add: {key or 'the model'} is a {type(module).__name__} of PEFT's; add the adapter to it by PEFT's "
                f"add_adapter, or call merge_and_unload() first."
            )


FORMATS: dict[str, type[Frozen]] = {kind.name: kind for kind in (InNf4, InInt8, InFp8)}


@torch.inference_mode(False)
def quantize_base(model: nn.Module, format: str) -> list[str]:
    """Quantise and freeze the weights of all nn.Linear but the head: "nf4", "int8" or "fp8". Return the layers' names.

    Layers are quantised individually, without a second copy of the model. A weight that the format cannot store is left out, a
    fallback with its reason; so is a weight that trains, where others are frozen already.
    """
    kind = kind_of(format, "lora.quantize_base: format")
    check(model, kind)
    release_stacks(model)
    codes = encode(model, kind)
    multiply_by_records(model, everywhere=True)
    experts = sum(stack.nbytes for stack in layers_of(model).values() if isinstance(stack, torch.Tensor))
    report_quantised([codes], format, output_layer(model) is not None, experts)
    return codes.names


class InCodes(NamedTuple):
    """Names of layers that were quantised, and the bytes of their weights before and after."""

    names: list[str]
    before: int
    after: int


def encode(part: nn.Module, kind: type[Frozen], name: str = "") -> InCodes:
    """Quantise the weights of a model, or of its part of that name."""
    names, before, after = [], 0, 0
    for key, layer, why in _candidates(part, kind):
        key = f"{name}.{key}" if name else key
        if why is not None:
            fallback("lora.quantize_base", f"{key} {why}, so it is not quantised")
            continue
        before += layer.weight.nbytes
        base = Base(layer, kind)
        after += sum(t.nbytes for t in (layer.weight, *base.buffers()))
        names.append(key)
    return InCodes(names, before, after)


def report_quantised(parts: Sequence[InCodes], format: str, has_head: bool, experts: int = 0) -> None:
    """Print the number of weights and bytes. experts: the bytes of experts that are parameters, which are not quantised"""
    count = sum(len(part.names) for part in parts)
    before, after = sum(part.before for part in parts), sum(part.after for part in parts)
    if count:
        rest = "; the head is not quantised" * has_head
        if experts:
            rest = f"; {'the head and ' * has_head}the experts, {readable(experts)}, are not quantised"
        notice(f"lora: {count} weights in {format}: {readable(after)} instead of {readable(before)}{rest}.")


def suited(model: nn.Module, kind: type[Frozen]) -> list[str]:
    """Return the names of the layers that `encode` would quantise."""
    return [key for key, _, why in _candidates(model, kind) if why is None]


@torch.inference_mode(False)
def dequantize_base(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Undo `quantize_base`, in `dtype` or the model's. The weights keep its rounding errors."""
    _check_closed(model, "lora.dequantize_base")
    undo = multiply_by_records(model, everywhere=True)
    release_stacks(model)
    for base in [module for module in model.modules() if isinstance(module, Base)]:
        base.dissolve(dtype)
    undo()


def kind_of(format: str, who: str) -> type[Frozen]:
    """Return the format of this name. who: the caller and its argument, for the error"""
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"{who} must be one of {', '.join(map(repr, FORMATS))}, got {format!r}.")
    return FORMATS[format]


def _candidates(model: nn.Module, kind: type[Frozen]) -> Iterator[tuple[str, nn.Linear, str | None]]:
    """Yield the layers below the head that are not quantised yet, and why one of them cannot be."""
    head, uses = output_layer(model), Counter(id(p) for module in model.modules() for p in module._parameters.values())
    layers = {key: layer for key, layer in layers_of(model, (nn.Linear,)).items() if layer is not head}
    variants = {id(layer.get_base_layer()) for _, layer in adapted_layers(model) if getattr(layer, "lora_variant", None)}
    never_called = in_encoder_layers(model)
    some_frozen = any(not layer.weight.requires_grad for layer in layers.values())
    for key, layer in layers.items():
        if not format_of(layer.weight).coded:
            why: str | None
            if id(layer) in variants:
                why = "carries an adapter that reads its weight, such as DoRA"
            elif (why := unfit(layer, never_called)) is None and uses[id(layer.weight)] > 1:
                why = "shares its weight with another module"
            elif why is None and some_frozen and layer.weight.requires_grad:
                why = "trains, as other layers do not"
            yield key, layer, why or kind.refusal(layer.weight)


def check(model: nn.Module, kind: type[Frozen]) -> None:
    """Raise ValueError where the model cannot be quantised now."""
    _check_closed(model, "lora.quantize_base")
    for key, layer in adapted_layers(model):
        if layer.merged_adapters:
            raise ValueError(
                f"lora.quantize_base: an adapter is merged into the weight of {key}, which could not be unmerged; call "
                f"gb.lora.unmerge first."
            )
    for key, module in model.named_modules():
        if isinstance(module, Base) and module.kind is not kind:
            layer = key.rpartition(".")[0].removesuffix(".base_layer")
            raise ValueError(
                f"lora.quantize_base: {layer} is in {module.kind.name} already; call gb.lora.dequantize_base first."
            )


def _check_closed(model: nn.Module, who: str) -> None:
    if sharded := next((key for key, layer in layers_of(model, (nn.Linear,)).items() if is_sharded(layer.weight)), None):
        raise ValueError(f"{who}: the weight of {sharded} is sharded; call it before the model is sharded.")
    check_no_step(model, who)


def check_no_step(model: nn.Module, who: str) -> None:
    """Raise ValueError for a model in a TrainStep or another trainer, which would ignore a change of its parameters."""
    for name, p in model.named_parameters():
        record_of(p)  # of a parameter that was pickled in a step, it removes the main_grad
        if not hasattr(p, "main_grad"):
            continue
        if any(isinstance(hook, Taker) for hook in (p._post_accumulate_grad_hooks or {}).values()):  # type: ignore[attr-defined]
            raise ValueError(f"{who}: the model is in a TrainStep, whose graphs hold its weights; close that first.")
        raise ValueError(
            f"{who}: {name} has a main_grad, in which another library sums its gradients; call {who} before it takes the model."
        )
