"""A saved model and its decoder, as the options of `gpubound generate` ask for them.

The model is a Hugging Face folder, one by its name on the hub, a run of `gpubound train` or `demo`, or one of its checkpoints.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import lora
from ..data import Tokenizer
from ..data.tokenizer import adapt
from ..decode import FastDecoder, decoder
from ..decode.request import SAMPLING, describe_sampling, model_sampling
from ..decode.runner import host_bytes
from ..decode.text import TextCodec
from ..device import label
from ..errors import DataError
from ..formatting import quantity
from ..layers.embedding_and_head import head_of
from ..layers.quantized_base import numbers_of
from ..models.deepseek_v4.checkpoint import is_coded
from ..models.folder import Beyond, dtype_asked, ends_of, read_config, read_generation
from ..models.foreign import attempt, load_foreign, needs_transformers
from ..models.registry import family_of, is_named
from ..train.adapters import base_of, check_base, kept_state, load_kept_state, merge
from ..train.build_model import build_model
from ..train.checkpoint import Checkpoint, path_from_here
from ..train.objectives import objective_named
from ..train.recipe import Recipe
from .prompts import VERIFY
from .sources import base_named_in, is_adapter, source_of

if TYPE_CHECKING:
    from .generate import Generate

SLOW = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")  # tokenizers that transformers alone can read
POSITIONS = 4096  # of a model that does not say for how many it is made


@dataclass(frozen=True)
class Saved:
    """A model on its device, in eval mode, and what its files say about using it."""

    model: nn.Module
    tokenizer: Tokenizer
    folder: Path  # where the weights were read
    ends: tuple[int, ...]  # tokens that end a text: the tokenizer's, and those that the model's files name
    generation: dict[str, Any]  # the model's generation_config.json
    positions: int  # tokens that the model is made for
    devices: tuple[torch.device, ...]  # where it is run: several share it
    begun: float  # when it was asked for

    @property
    def device(self) -> torch.device:
        """Where tokens are chosen."""
        return self.devices[0]

    @property
    def where(self) -> str:
        """The devices in words."""
        return label(self.device) if len(self.devices) == 1 else f"{len(self.devices)} x {label(self.device)}"


def open_saved(
    path: str | Path,
    device: torch.device | Sequence[torch.device],
    dtype: str = "auto",
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    adapter: str | Path | None = None,
    split: str = "layers",
) -> Saved:
    """`device`: several are to share the model, by `split`. Its decoder gives each a part; until then it lies in the host's
    memory. Layers in codes are read onto the devices, where they stay; slices are cut from the host's memory, if it has room.

    `dtype` auto is the one that was saved. `tokenizer`: another folder's instead of its own. `adapter`: a folder with one,
    which becomes part of the weights."""
    begun, kind = time.perf_counter(), dtype_asked(dtype)
    devices = (device,) if isinstance(device, torch.device) else tuple(device)
    lies = devices[0] if len(devices) == 1 else torch.device("cpu")
    own = Tokenizer.load(tokenizer) if tokenizer else None
    source = source_of(path, trust_remote_code)
    if isinstance(source, Path) and is_adapter(source):
        if adapter is not None:
            raise ValueError(f"adapter: got {adapter}, and {source} is an adapter itself; give the base in its place.")
        adapter = source
        source = source_of(base_named_in(source), trust_remote_code)
    if isinstance(source, Checkpoint):
        own = own or _run_tokenizer(source)
        model, folder = _from_checkpoint(source, own, lies, kind), source.path
        told: dict[str, Any] = {}
    else:
        about = read_config(source)
        own, told = own or _folder_tokenizer(source, trust_remote_code), read_generation(source, about)
        staying = len(devices) > 1 and is_coded(about) and (split == "layers" or not _host_has_room(source))
        onto = devices if staying else lies
        model, folder = _from_folder(source, about, onto, kind, trust_remote_code, devices[0]), source
    if adapter is not None:
        lora.load(model, adapter, name="given")
    if lora.parameters(model):
        merge(model)
    ends = [*([] if own.eos is None else [own.eos]), *ends_of(told)]
    return Saved(model.eval(), own, folder, tuple(dict.fromkeys(ends)), told, _positions(model), devices, begun)


def _host_has_room(folder: Path) -> bool:
    """For the weights of a folder as they are saved."""
    free = host_bytes()
    return free is None or sum(file.stat().st_size for file in folder.glob("*.safetensors")) < free


def _from_folder(
    folder: Path, about: dict[str, Any], device: Any, dtype: torch.dtype | None, trust_remote_code: bool, computes: torch.device
) -> nn.Module:
    """By the loader of a family of ours; what none of them reads, by transformers. `device` and `computes` of a folder in
    codes as of `load_coded`."""
    if (foreign := _foreign(folder, about)) is None:
        return family_of(str(folder)).load(folder, device, dtype)
    needs_transformers(f"{folder}: {foreign}")
    return load_foreign(folder, device, dtype, trust_remote_code, computes)


def _foreign(folder: Path, about: dict[str, Any]) -> str | None:
    """None for a model of ours, else what kind it is."""
    if "quantization_config" in about:
        return "its weights are quantised"
    try:
        family_of(str(folder)).config_of(about, folder)
    except Beyond:
        return f"it is a {about.get('model_type')!r} model beyond our own decoder"
    return None


def _from_checkpoint(found: Checkpoint, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """What the run would have exported at that step: the average of its weights if it keeps one."""
    facts, weights = found.facts["recipe"], dict[str, Tensor]()
    model = facts["model"] if is_named(facts["model"]) else path_from_here(found, facts["model"])
    recipe = Recipe(model=model, seq=facts["seq"], lora=facts.get("lora", {}))
    if not is_named(recipe.model) and not Path(recipe.model).is_dir():
        raise DataError(
            f"{found.path}: its run began with the model in {recipe.model}, which is not there; put it back, or start this in "
            f"the folder where the run began."
        )
    if recipe.lora:
        check_base(recipe.model, base_of(recipe.model), found)
    tensors = found.tensors(device, begin=("model.", "average."))  # it holds moments and masters, too
    for part in ("model.", "average."):
        weights |= {name.removeprefix(part): t for name, t in tensors.items() if name.startswith(part)}
    stored = next(t.dtype for name, t in tensors.items() if name.startswith("model."))
    made = build_model(recipe, tokenizer, device)
    if recipe.adapters is not None:
        recipe.adapters.add(made)
    first: dict[int, str] = {}
    for name, tensor in kept_state(made).items():  # an average holds a tied weight under its first name alone
        weights[name] = weights[first.setdefault(tensor.data_ptr(), name)]
    load_kept_state(made.to(dtype or stored), weights)
    return made


def _folder_tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    if (folder / "tokenizer.json").exists():
        return Tokenizer.load(folder)
    if not any((folder / name).exists() for name in SLOW):
        raise ValueError(f"{folder} has no tokenizer.json, and texts must become tokens; give one with --tokenizer FOLDER.")
    needs_transformers(f"{folder}: its tokenizer is not a tokenizer.json")
    from transformers import AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    found = attempt(folder, lambda: AutoTokenizer.from_pretrained(folder, **options))
    return adapt(found)  # type: ignore[return-value]  # what has a backend_tokenizer becomes a Tokenizer


def _run_tokenizer(found: Checkpoint) -> Tokenizer:
    """The one that the run was trained with: beside its corpus, or where its recipe says."""
    recipe, run = found.facts["recipe"], found.path.parent.parent
    told = [recipe.get("tokenizer"), recipe["model"], *recipe["data"]]
    reached = [Path(path_from_here(found, name)) for name in told if name]
    for folder in (
        run / "corpus",
        *sorted((run / "corpus").glob("*")),
        *reached,
    ):
        if folder.name == "tokenizer.json" or (folder / "tokenizer.json").exists():
            return extended(recipe, Tokenizer.load(folder))
    raise ValueError(f"{found.path}: the tokenizer of its run is not in {run / 'corpus'}; give it with --tokenizer FOLDER.")


def extended(recipe: dict[str, Any], tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer` with the tokens that the objectives of a run's recipe, as its checkpoints hold it, have added to it."""
    for stage in (recipe, *recipe.get("phases", ())):
        if (name := stage.get("objective")) is not None:
            tokenizer = objective_named(name, stage.get("objective_options", {})).extended(tokenizer)
    return tokenizer


def _positions(model: Any) -> int:
    config = model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else model.config
    return getattr(config, "positions", None) or getattr(config, "max_position_embeddings", None) or POSITIONS


def build(options: "Generate", saved: Saved, probe: list[list[int]], length: int) -> FastDecoder:
    """The decoder for prompts like `probe` in sequences of `length` tokens, and a line on stderr that says what it is."""
    # On a CPU a launch of many steps saves nothing, and the first token would wait for the last.
    k = int(options.k) if options.k != "auto" else 1 if saved.device.type == "cpu" else "auto"
    tokenizer = TextCodec(saved.tokenizer, skip_special=not options.special)
    way: dict[str, Any] = {"fused": options.fused, "verify": VERIFY[options.verify]}
    way |= {"speculate": options.speculate, "weights": options.weights, "cache": options.cache}
    if options.split is not None:
        way |= {"devices": list(saved.devices), "split": options.split}
    made = decoder(saved.model, len(probe) * options.n, length, k, tokenizer=tokenizer, **way)
    for _ in range(2 if saved.device.type == "cuda" else 0):  # what such a request compiles, then captures: not on its clock
        made.generate(probe, **settings_of(options, saved) | {"max_new_tokens": sum(made.ladder), "stop": ()})
    first = next(saved.model.parameters())
    parts = [
        f"{saved.folder}: {quantity(numbers_of(saved.model))} parameters",
        f"{str(first.dtype).removeprefix('torch.')} on {saved.where}",
        f"its own forward ({made.path})" if made.path else made.kernels,
        f"ready in {time.perf_counter() - saved.begun:.2f} s",
    ]
    print(", ".join(parts), file=sys.stderr, flush=True)
    if saved.generation.get("do_sample") or any(model_sampling(saved.generation).values()):
        print(describe_sampling(saved.generation, explicit_sampling(options)), file=sys.stderr, flush=True)
    if options.table:
        print(made, file=sys.stderr, flush=True)
    return made


def settings_of(options: "Generate", saved: Saved) -> dict[str, Any]:
    """Return the arguments of the decoder's generate(). A stop that names a special token becomes its id."""
    special = {token.content: i for i, token in saved.tokenizer.inner.get_added_tokens_decoder().items() if token.special}
    ends = [] if options.ignore_eos else checked_ends(saved)
    stops = [*ends, *options.stop_id, *(special.get(text, text) for text in options.stop)]
    names = ("seed", "n", "logprobs", "max_new_tokens")
    sampling = model_sampling(saved.generation) | explicit_sampling(options)
    return {name: getattr(options, name) for name in names} | sampling | {"stop": tuple(dict.fromkeys(stops))}


def explicit_sampling(options: "Generate") -> dict[str, Any]:
    """Return the sampling options that the command line has."""
    return {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}


def checked_ends(saved: Saved) -> list[int]:
    """Return the tokens that end a text. One outside the model's vocabulary would never end any."""
    size = head_of(saved.model).weight.shape[0]
    for token in saved.ends:
        if not 0 <= token < size:
            raise ValueError(
                f"{saved.folder}: eos_token_id: got {token}, outside the model's vocabulary of {size}; correct it in "
                f"generation_config.json, config.json or the tokenizer, or give --ignore-eos."
            )
    return list(saved.ends)
