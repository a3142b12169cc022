"""Read and write the folder of a LanguageModel: config.json, model.safetensors and generation_config.json.

The family defines config.json. The tensors are checked against it before a model is allocated.

`fill` fills a model from a quantised folder: one layer at a time is in memory in more bits than the folder has.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from stat import S_IMODE
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..data import Tokenizer
from ..data.tokenizer import ends_of_turn
from ..errors import DataError
from ..files import check_replaceable, make_folder, partial, write_atomic
from ..formatting import readable
from ..layers.embedding_and_head import head_of
from ..layers.linear_product import multiply_by_records
from ..layers.quantized_base import Base, dequantised
from ..lora.files import plain_state
from ..trace import fallback, notice
from .decoding import ends_of
from .folder import (
    CURE,
    FLOATS,
    GENERATION,
    INDEX,
    SPECIAL_IDS,
    WEIGHTS,
    Stored,
    check_layers,
    decoder_name,
    dtype_of,
    opened,
    read_config,
    read_generation,
    stored_tensors,
    weight_files,
)
from .language_model import LanguageModel
from .quantized.scheme import Coded, Scheme, Weight
from .quantized.schemes import numbers_stored, scheme_of

Filled = TypeVar("Filled", bound=nn.Module)
CAUSAL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"  # ends of transformers' class names
BUFFERS = "rotary_emb.inv_freq"  # in old checkpoints; computed from the config
PART, PARTS = "model-{:05d}-of-{:05d}.safetensors", "model-?????-of-?????.safetensors"
LARGEST_FILE = 5_000_000_000  # bytes of a model that are in host memory while it is written

Weights = Iterable[tuple[str, Tensor]]
"""unsharded tensors of `stored_state` by name, in its order"""

Model = TypeVar("Model", bound=LanguageModel)

Part = tuple[Tensor, tuple[slice, ...]]
"""a destination, and the slice of the stored tensor that is read to it; () is all of it"""


def read_model(
    path: Path,
    kind: Callable[..., Model],
    config_of: Callable[[dict[str, Any], Path], Any],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    layers: str = "num_hidden_layers",
) -> Model:
    """Load the model in a folder. `dtype` None keeps the saved one.

    config_of  converts config.json to the model's config
    layers     field of config.json with the number of layers
    """
    empty = unread_model(path, kind, config_of, layers)
    model = kind(empty.config, device=device, dtype=dtype or dtype_of(read_config(path), path))
    if empty.classes:
        model.classify(empty.classes)
    model.generation, model.name_or_path = empty.generation, empty.name_or_path
    read_parts(path, {name: (tensor, ()) for name, tensor in stored_state(model).items()})
    return model


def unread_model(
    path: Path,
    kind: Callable[..., Model],
    config_of: Callable[[dict[str, Any], Path], Any],
    layers: str = "num_hidden_layers",
) -> Model:
    """Return the folder's model on the meta device, after a check that the folder has its tensors. `read_parts` fills it."""
    about = read_config(path)
    config, scheme = config_of(about, path), scheme_of(path, about)
    stored = stored_tensors(path) if scheme is None else numbers_stored(scheme)
    generation = read_generation(path, about)
    check_layers(path / "config.json", [(layers, config.layers)], stored)
    model = kind(config, device="meta")
    if names := _classes(path, about):
        model.classify(names)
    _check_tensors(path, stored_state(model), stored, model.config.tied)
    model.generation, model.name_or_path = generation, str(path.resolve())
    return model


def allocate(part: nn.Module, device: torch.device, dtype: torch.dtype, leave: Collection[nn.Module] = ()) -> None:
    """Replace tensors on the meta device by tensors on `device`: parameters in `dtype`, a tied one once.

    leave  modules whose own tensors stay on the meta device
    """
    allocated: dict[int, nn.Parameter] = {}
    for module in (m for m in part.modules() if m not in leave):
        for key, p in module._parameters.items():
            if p is not None and p.is_meta:
                if (new := allocated.get(id(p))) is None:
                    zeros = torch.zeros(p.shape, dtype=dtype, device=device)
                    new = allocated[id(p)] = nn.Parameter(zeros, requires_grad=p.requires_grad)
                module._parameters[key] = new
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)


@torch.no_grad()
def read_parts(path: Path, parts: Mapping[str, Part]) -> None:
    """Read a slice of each named tensor to its destination. Nothing else is read."""
    for file in weight_files(path):
        with opened(file) as tensors:
            for name in (name for name in tensors.keys() if decoder_name(name) in parts):  # noqa: SIM118 (it is no dict)
                memory, part = parts[decoder_name(name)]
                if memory.numel():
                    memory.copy_(tensors.get_slice(name)[part] if part else tensors.get_tensor(name))


def write_model(
    model: LanguageModel,
    config: dict[str, Any],
    path: Path,
    tokenizer: Tokenizer | None = None,
    weights: Weights | None = None,
    overwrite: bool = False,
    named: Callable[[str], str] = str,
) -> Path:
    """Write the model's folder. An existing model is replaced only with `overwrite`.

    weights  iterator over the weights, for a sharded model, each gathered when it is reached; None: the model's. Those of one
             file are in memory at a time
    named    (name of a tensor) -> its name in the folder
    """
    own = ("config.json", GENERATION, WEIGHTS, INDEX, *(part.name for part in path.glob(PARTS)))
    check_replaceable(path, "save", own, overwrite=overwrite)
    make_folder(path)
    state = {named(name): tensor for name, tensor in stored_state(model).items()}
    generation = dict(model.generation) | (special_ids(model, tokenizer) if tokenizer else {})
    # Without these fields transformers takes bos = 1 and eos = 2, whatever those tokens are.
    config = config | {name: generation.get(name) for name in SPECIAL_IDS}
    if model.classes:
        config |= {"architectures": [name.replace(CAUSAL, CLASSIFIER) for name in config["architectures"]]}
        config |= {"id2label": dict(enumerate(model.classes)), "label2id": {name: n for n, name in enumerate(model.classes)}}
        if config["pad_token_id"] is None:  # transformers finds the last token of a row by it
            config["pad_token_id"] = next(iter(ends_of(generation)), None)
    _write_weights(path, state, iter(state.items()) if weights is None else ((named(name), tensor) for name, tensor in weights))
    for name, content in (("config.json", config), (GENERATION, generation)):
        write_atomic(path / name, json.dumps(content, indent=2) + "\n")
    if tokenizer:
        tokenizer.save(path, overwrite=overwrite)
    return path


def _classes(path: Path, about: Mapping[str, Any]) -> list[str]:
    """Return the names of the classes in a config.json; none of a model that predicts tokens."""
    architectures, names = about.get("architectures"), about.get("id2label")
    if not (isinstance(architectures, list) and architectures and str(architectures[0]).endswith(CLASSIFIER)):
        return []
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
        raise DataError(f"{path / 'config.json'}: id2label: got {names!r}, wanted a name for each class, counted from 0.")
    return [str(names[str(number)]) for number in range(len(names))]


def stored_state(model: Any) -> dict[str, Tensor]:
    """Return the tensors that a model's folder has, in order."""
    state = plain_state(model)
    if getattr(model, "classes", ()):
        return {f"score{name.removeprefix('lm_head')}" if name.startswith("lm_head.") else name: t for name, t in state.items()}
    if getattr(getattr(model, "config", None), "tied", False):
        del state["lm_head.weight"]  # the same tensor as the embedding
    return state


def special_ids(model: LanguageModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of generation_config.json with special tokens. eos are all tokens that end a text or a chat turn."""
    ends = ends_of(model.generation)
    ends = [*([] if tokenizer.eos is None else [tokenizer.eos]), *ends_of_turn(tokenizer), *ends]
    ends = [end for end in dict.fromkeys(ends) if end < model.config.vocabulary]
    fields = {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    for name in ("bos", "pad"):
        token = tokenizer.special.get(f"{name}_token")
        fields[f"{name}_token_id"] = None if token is None else tokenizer.inner.token_to_id(token)
    return fields


def _check_tensors(path: Path, state: dict[str, Tensor], stored: dict[str, Stored], tied: bool) -> None:
    """Raise DataError if the tensors are not those of the config."""
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    names = {name for name in stored if not name.endswith(BUFFERS)}
    if tied:
        names.discard("lm_head.weight")
    missing, extra = sorted(wanted.keys() - names), sorted(names - wanted.keys())
    if missing or extra:
        raise DataError(
            f"{path}: its tensors are not those of its config: missing {missing[:3] or 'none'}, unknown {extra[:3] or 'none'} "
            f"({len(missing)} and {len(extra)} in all); check that config.json belongs to these weights."
        )
    coded = [name for name in wanted if stored[name].dtype not in FLOATS]
    if coded:
        raise DataError(
            f"{stored[coded[0]].file}: {coded[0]} is {stored[coded[0]].dtype}, wanted one of {', '.join(FLOATS)}; quantised "
            "weights need a quantization_config in config.json, and transformers."
        )
    wrong = [name for name in wanted if stored[name].shape != wanted[name]]
    if wrong:
        raise DataError(
            f"{stored[wrong[0]].file}: {wrong[0]} has the shape {stored[wrong[0]].shape}, but config.json wants "
            f"{wanted[wrong[0]]} ({len(wrong)} such tensors); check that config.json belongs to these weights."
        )


def _write_weights(path: Path, state: dict[str, Tensor], weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write one file, or several and their index, as transformers does. An old model is unchanged until all are written."""
    parts = _parts(state)
    files = [path / (WEIGHTS if len(parts) == 1 else PART.format(n, len(parts))) for n in range(1, len(parts) + 1)]
    with ExitStack() as undo:
        temporary = [undo.enter_context(partial(file)) for file in files]
        for names, file in zip(parts, temporary):
            write_tensors(dict(_on_host(names, weights)), file)
        for old in (path / INDEX, *path.glob(PARTS)):  # an old index would mix old and new files
            old.unlink(missing_ok=True)
        if len(parts) > 1:
            (path / WEIGHTS).unlink(missing_ok=True)  # it has priority over an index
        for whole, file in zip(temporary, files):
            os.replace(whole, file)
    if len(parts) > 1:
        size = sum(t.numel() * t.itemsize for t in state.values())
        table = {name: file.name for names, file in zip(parts, files) for name in names}
        write_atomic(path / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": table}, indent=2) + "\n")


def _parts(state: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of each file's tensors."""
    parts: list[list[str]] = [[]]
    room = LARGEST_FILE
    for name, tensor in state.items():
        size = tensor.numel() * tensor.itemsize
        if size > room and parts[-1]:
            parts.append([])
            room = LARGEST_FILE
        parts[-1].append(name)
        room -= size
    return parts


def _on_host(names: list[str], weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        got, tensor = next(weights)
        assert got == name, f"got {got}, wanted {name}"
        yield name, tensor.detach().contiguous().cpu()
        del tensor  # free it before the next one is gathered


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file with the permissions of the umask; save_file would let only the owner read it."""
    file.touch()
    mode = S_IMODE(file.stat().st_mode)
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


@torch.no_grad()
def fill(model: Filled, scheme: Scheme, device: torch.device, dtype: torch.dtype) -> Filled:
    """Read the folder's weights into a model whose linear layers are on the meta device. Quantised embeddings and heads are
    dequantised to `dtype`."""
    layers = _quantised_layers(model, scheme)
    allocate(model, device, dtype, leave={*layers.values()})

    def take(name: str) -> Tensor:
        return scheme.raw(name).to(device)

    coded = {f"{name}.weight" for name in layers}
    plain, read, missing, widened = scheme.plain_names(), set[int](), [], 0
    for name, tensor in stored_state(model).items():
        if name in coded:
            continue
        stem = name.removesuffix(".weight")
        if name in plain:
            values = scheme.dense(name, take)
            _check_shape(scheme, name, tuple(tensor.shape), tuple(values.shape))
            tensor.copy_(values)
        elif stem in scheme.layers:
            values = numbers(scheme.read(stem, take), scheme.layers[stem], dtype)
            _check_shape(scheme, name, tuple(tensor.shape), tuple(values.shape))
            tensor.copy_(values)
            widened += 1
        else:
            missing.append((name, tensor.data_ptr()))
            continue
        del values  # an embedding is as large as ten layers, which are read next
        read.add(tensor.data_ptr())
    if absent := [name for name, address in missing if address not in read]:  # a tied one was read under another name
        raise DataError(f"{scheme.folder} lacks {absent[:3]} ({len(absent)} tensors in all); {CURE}.")
    formats, reasons = Counter[str](), dict[str, list[str]]()
    nbytes = of_modules = scheme.read_modules(model, take)
    for name, layer in layers.items():
        kind, why = _fill_layer(name, layer, scheme, take, device, dtype)
        formats[kind] += 1
        nbytes += sum(t.nbytes for t in (layer.weight, *layer.buffers()))
        if why:
            reasons.setdefault(why, []).append(name)
    multiply_by_records(model, everywhere=True)
    precision = str(dtype).removeprefix("torch.")
    for why, names in reasons.items():
        rest = f" and {len(names) - 1} others" if len(names) > 1 else ""
        fallback(f"{scheme.folder.name}: {len(names)} quantised weights", f"{names[0]}{rest} are read in {precision}: {why}")
    summary = ", ".join(f"{count} weights in {kind}" for kind, count in formats.items() if kind)
    dequantised_note = f"; embedding or head in {precision}" * bool(widened)
    if of_modules:
        summary = ", ".join(filter(None, (summary, "experts")))
    if summary:
        notice(f"{scheme.folder.name}: {scheme.name}: {summary} as published, {readable(nbytes)}{dequantised_note}.")
    return model


def _quantised_layers(model: nn.Module, scheme: Scheme) -> dict[str, Any]:
    """Return the linear layers that stay quantised, by name: all but the head."""
    modules, head = dict(model.named_modules()), head_of(model)
    layers = {name: layer for name in scheme.layers if type(layer := modules.get(name)) is nn.Linear and layer is not head}
    for name, layer in layers.items():
        _check_shape(scheme, f"{name}.weight", tuple(layer.weight.shape), scheme.layers[name])
    return layers


class Held(NamedTuple):
    """Bytes of a weight in memory, of its codes or its numbers and of the scales."""

    codes: int
    scales: int


@torch.no_grad()
def stored_weights(model: nn.Module, scheme: Scheme, dtype: torch.dtype) -> dict[str, Held]:
    """Return the bytes that `fill` makes of each quantised layer's weight. Of the layers that are stored alike one is read."""
    known, held = dict[Any, Held](), dict[str, Held]()
    for layer, module in _quantised_layers(model, scheme).items():
        stored = [scheme.stored[name] for name in scheme.tensors(layer)]
        form = tuple(module.weight.shape), *((each.dtype, tuple(each.shape)) for each in stored)
        if form not in known:
            weight = scheme.read(layer, scheme.raw)
            known[form] = Held(dtype.itemsize * module.weight.numel(), 0)
            if isinstance(weight, Coded):
                known[form] = Held(weight.codes.nbytes, sum(t.nbytes for t in weight.scales.values()))
        held[layer] = known[form]
    return held


def _fill_layer(name: str, layer: Any, scheme: Scheme, take: Any, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Read a quantised layer. Return the name of its format, or '' and why it is dequantised."""
    weight = scheme.read(name, take)
    if layer.bias is not None:
        bias = torch.empty(layer.bias.shape, dtype=dtype, device=device)
        layer.bias = nn.Parameter(bias.copy_(scheme.dense(f"{name}.bias", take)))
    if isinstance(weight, Coded):
        base = Base(layer, weight.kind, (weight.codes, weight.scales), dtype)
        base.rounds_inputs = False
        return weight.kind.name, ""
    layer.weight = nn.Parameter(weight.values.to(dtype))
    return "", weight.why


def numbers(weight: Weight, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the dequantised numbers of a weight."""
    if not isinstance(weight, Coded):
        return weight.values.to(dtype)
    layer = nn.Linear(shape[1], shape[0], bias=False, device="meta")
    Base(layer, weight.kind, (weight.codes, weight.scales), dtype)
    return dequantised([layer.weight], dtype)


def _check_shape(scheme: Scheme, name: str, wanted: tuple[int, ...], got: tuple[int, ...]) -> None:
    if wanted != got:
        raise DataError(f"{scheme.folder}: {name}: got {got}, wanted {wanted}, by config.json; {CURE}.")
