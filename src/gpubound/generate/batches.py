"""Load a saved model and generate texts with it, batch by batch, by a decoder or the sampler of a masked diffusion model.

The model is a Hugging Face folder, a model on the hub, or a run of `gpubound train` or `demo`. The speed is in tokens per
second, and the fraction of the rate at which this machine can read weights and cache.
"""

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import lora, measure
from ..data import Tokenizer
from ..data.tokenizer import adapt, has_tokenizer
from ..decode import FastDecoder, decoder
from ..decode.layer import GEMV_ROWS
from ..decode.placement.plan import SPLITS
from ..decode.request import SAMPLING, Choice, Generated, Generation, describe_sampling, model_sampling
from ..decode.text import TextCodec
from ..device import host_bytes, label, limit, resolve, usable_bytes
from ..errors import DataError, MeasureError
from ..formatting import quantity
from ..layers.embedding_and_head import head_of
from ..layers.quantized_base import numbers_of
from ..models.decoding import ends_of
from ..models.diffusion import MaskedSampler
from ..models.folder import (
    MASK_ID,
    Beyond,
    attempt,
    dtype_asked,
    needs_transformers,
    read_config,
    read_generation,
)
from ..models.hf_loading import load_foreign
from ..models.quantized.schemes import scheme_of
from ..models.registry import family_of, is_named, is_quantized
from ..trace import fallback, notice
from ..train.adapters import base_of, check_base, load_trained_state, merge, trained_state
from ..train.checkpoint import Checkpoint, path_from_here
from ..train.objectives import objective_named
from ..train.prepare import build_model
from ..train.recipe import Recipe
from ..watch.ledger import SENSORS, watch
from .options import VERIFY, Generate, base_of_adapter, find_source, is_adapter

SLOW = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")  # tokenizers that only transformers reads


@dataclass(frozen=True)
class Saved:
    """A model on its device, in eval mode, and what its files specify for generation."""

    model: nn.Module
    tokenizer: Tokenizer
    folder: Path
    ends: tuple[int, ...]
    """Tokens that end a text: the tokenizer's, and those in the model's files."""
    generation: dict[str, Any]
    """The model's generation_config.json."""
    positions: int | None
    """Context length that the model's config names."""
    devices: tuple[torch.device, ...]
    """Devices that share the model; tokens are chosen on the first."""
    started: float
    """Time when loading began."""

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def device_label(self) -> str:
        return label(self.device) if len(self.devices) == 1 else f"{len(self.devices)} x {label(self.device)}"

    def checked_ends(self) -> list[int]:
        """Return the tokens that end a text. Raise ValueError for one outside the model's vocabulary: it would end none."""
        size = head_of(self.model).weight.shape[0]
        for token in self.ends:
            if not 0 <= token < size:
                raise ValueError(
                    f"{self.folder}: eos_token_id: got {token}, outside the model's vocabulary of {size}; correct it in "
                    f"generation_config.json, config.json or the tokenizer, or give --ignore-eos."
                )
        return list(self.ends)


def open_saved(
    path: str | Path,
    device: torch.device | Sequence[torch.device],
    dtype: str = "auto",
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    adapter: str | Path | None = None,
    split: str = "layers",
    rounds: bool = False,
) -> Saved:
    """Load the model that `path` names.

    device     one device, or several that share the model by `split`. Shared weights stay in host memory until the decoder
               gives each device a part. Quantised weights are read onto the devices directly if they are split by layers, or
               if the host's memory has no room for them.
    dtype      "auto" is the dtype that was saved
    rounds     the decoder will round the weights: a folder's that would not fit a GPU besides stay in host memory
    tokenizer  a folder with another tokenizer than the model's
    adapter    a folder with an adapter, which is merged into the weights if they can hold all of it
    """
    started, dtype_ = time.perf_counter(), dtype_asked(dtype)
    devices = (device,) if isinstance(device, torch.device) else tuple(device)
    target = devices[0] if len(devices) == 1 else torch.device("cpu")
    tok = Tokenizer.load(tokenizer) if tokenizer else None
    source = find_source(path, trust_remote_code)
    if isinstance(source, Path) and is_adapter(source):
        if adapter is not None:
            raise ValueError(f"adapter: got {adapter}, and {source} is an adapter itself; give the base in its place.")
        adapter = source
        source = find_source(base_of_adapter(source), trust_remote_code)
    if isinstance(source, Checkpoint):
        tok, generation, folder = tok or _run_tokenizer(source), dict[str, Any](), source.path
        model = _from_checkpoint(source, tok, target, dtype_)
    else:
        config, folder = read_config(source), source
        tok, generation = tok or _folder_tokenizer(source, trust_remote_code), read_generation(source, config)
        size, host = sum(file.stat().st_size for file in source.glob("*.safetensors")), host_bytes()
        # beside their rounded copies, of at most half their size, and 1 GiB
        if rounds and len(devices) == 1 and target.type == "cuda" and 1.5 * size + (1 << 30) >= usable_bytes(target):
            target = torch.device("cpu")
        direct = len(devices) > 1 and is_quantized(config) and (split == "layers" or (host is not None and size >= host))
        model = _from_folder(source, config, devices if direct else target, dtype_, trust_remote_code, devices[0])
    if adapter is not None:
        lora.load(model, adapter, name="given")
    if lora.parameters(model):
        try:
            merge(model)
        except ValueError as error:  # nothing was merged: it adds a bias, or has a copy of a tied embedding
            fallback("generate: an adapter merged into the weights", str(error))
    ends = [*([] if tok.eos is None else [tok.eos]), *ends_of(generation)]
    return Saved(model.eval(), tok, folder, tuple(dict.fromkeys(ends)), generation, _positions(model), devices, started)


def _from_folder(
    folder: Path,
    config: dict[str, Any],
    device: Any,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
    computes: torch.device,
) -> nn.Module:
    """Load a folder with the loader of one of the library's families, or with transformers. `device` and `computes` of
    quantised weights: see `load_coded`."""
    reason = None
    try:
        family_of(str(folder)).config_of(config, folder)
        scheme_of(folder, config)
    except Beyond:
        reason = f"it is a {config.get('model_type')!r} model beyond our own decoder"
    if reason is None:
        return family_of(str(folder)).load(folder, device, dtype)
    needs_transformers(f"{folder}: {reason}")
    return load_foreign(folder, device, dtype, trust_remote_code, computes)


def _from_checkpoint(
    checkpoint: Checkpoint, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype | None
) -> nn.Module:
    """Load the weights that the run would have exported at that step: their average, if the run keeps one."""
    facts, weights = checkpoint.facts["recipe"], dict[str, Tensor]()
    name = facts["model"] if is_named(facts["model"]) else path_from_here(checkpoint, facts["model"])
    recipe = Recipe(model=name, seq=facts["seq"], lora=facts.get("lora", {}))
    if not is_named(recipe.model) and not Path(recipe.model).is_dir():
        raise DataError(
            f"{checkpoint.path}: its run began with the model in {recipe.model}, which does not exist; restore it, or start "
            f"this in the folder where the run began."
        )
    if recipe.lora:
        check_base(recipe.model, base_of(recipe.model), checkpoint)
    tensors = checkpoint.tensors(device, begin=("model.", "average."))  # without moments and master weights
    for prefix in ("model.", "average."):
        weights |= {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    stored = next(t.dtype for name, t in tensors.items() if name.startswith("model."))
    model = build_model(recipe, tokenizer, device)
    if recipe.adapters is not None:
        recipe.adapters.add(model)
    first: dict[int, str] = {}
    for name, tensor in trained_state(model).items():  # an average holds a tied weight only under its first name
        weights[name] = weights[first.setdefault(tensor.data_ptr(), name)]
    load_trained_state(model.to(dtype or stored), weights)
    return model


def _folder_tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    if has_tokenizer(folder):
        return Tokenizer.load(folder)
    if not any((folder / name).exists() for name in SLOW):
        raise ValueError(f"{folder} has no tokenizer.json, and texts must become tokens; give one with --tokenizer FOLDER.")
    needs_transformers(f"{folder}: its tokenizer is not a tokenizer.json")
    from transformers import AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    loaded = attempt(folder, lambda: AutoTokenizer.from_pretrained(folder, **options))
    return adapt(loaded)  # type: ignore[return-value]  # a backend_tokenizer becomes a Tokenizer


def _run_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer of the checkpoint's run: from its corpus, or from a folder in its recipe. Tokens that the objectives
    of the recipe add are added."""
    recipe, corpus = checkpoint.facts["recipe"], checkpoint.path.parent.parent / "corpus"
    named = [recipe.get("tokenizer"), recipe["model"], *recipe["data"]]
    for folder in (corpus, *sorted(corpus.glob("*")), *(Path(path_from_here(checkpoint, name)) for name in named if name)):
        if folder.name == "tokenizer.json" or (folder / "tokenizer.json").exists():
            break
    else:
        raise ValueError(f"{checkpoint.path}: the tokenizer of its run is not in {corpus}; give it with --tokenizer FOLDER.")
    tokenizer = Tokenizer.load(folder)
    for stage in (recipe, *recipe.get("phases", ())):
        if (objective := stage.get("objective")) is not None:
            tokenizer = objective_named(objective, stage.get("objective_options", {})).extended(tokenizer)
    return tokenizer


def _positions(model: Any) -> int | None:
    config = model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else model.config
    return getattr(config, "positions", None) or getattr(config, "max_position_embeddings", None)


NEW_TOKENS = 256  # by default
POSITIONS = 4096  # of a model whose config names no limit
ANSWER, BLOCK = 128, 32  # tokens of a masked diffusion model's answer, and of a block where they divide the answer
DECODER_ONLY = (
    "top_k", "top_p", "min_p", "repetition_penalty", "stop", "logprobs", "max_length", "k", "weights",
    "cache", "speculate", "split", "fused", "verify", "table",
)  # fmt: skip
DIFFUSION_ONLY = ("denoising_steps", "block", "threshold", "block_cache")
GROUP, GROUPS = 8, 16
MANY = 4096  # sequences: so many take seconds until the first word


def check_decoding(options: Generate) -> None:
    """Raise ValueError for options that the decoder would refuse."""
    Choice(seed=options.seed, **explicit_sampling(options))
    if options.split is not None and options.split not in SPLITS:
        raise ValueError(f"split: got {options.split!r}, wanted {' or '.join(SPLITS)}.")
    if options.split == "tensors" and options.n > GEMV_ROWS:
        raise ValueError(
            f"n: got {options.n}, but --split tensors writes up to {GEMV_ROWS} sequences at once, and those of a prompt are "
            f"written together; give a smaller --n, or --split layers."
        )


def load(options: Generate, device: str) -> Saved:
    """Load the model that the options name onto `device`, or onto the devices that share it."""
    names = ("dtype", "tokenizer", "trust_remote_code", "adapter")
    if options.memory is not None:
        limit(options.memory)
    devices = split_devices(options) if options.split is not None else [resolve(device)]
    chosen = {name: getattr(options, name) for name in names}
    saved = open_saved(options.ckpt, devices, **chosen, split=options.split or "layers", rounds=options.weights is not None)
    kind, unused = ("a masked diffusion model", DECODER_ONLY) if is_diffusion(saved) else ("a causal model", DIFFUSION_ONLY)
    for field in fields(options):
        if field.name in unused and field.default is not MISSING and getattr(options, field.name) != field.default:
            name = field.name.replace("_", "-")
            raise ValueError(f"{name}: {saved.folder} is {kind}, for which it has no effect; leave it out.")
    return saved


def is_diffusion(saved: Saved) -> bool:
    return getattr(saved.model.config, "causal", True) is False


def split_devices(options: Generate) -> list[torch.device]:
    """Return the devices that share one model."""
    device, visible = resolve(options.device), torch.cuda.device_count()
    if device.type == "cuda" and options.device.startswith("cuda:"):
        raise ValueError(
            f"device: got {options.device}, a single GPU, and with --split several share the model; leave --device out."
        )
    if options.gpus is None and (device.type == "cpu" or visible < 2):
        found = f"{visible} GPU{' is' if visible == 1 else 's are'} visible" if device.type == "cuda" else "no GPU is used"
        raise ValueError(f"split: {found}, and at least 2 devices share the model; name more GPUs, or give --gpus.")
    count = options.gpus or visible
    if device.type == "cuda" and count > visible:
        raise ValueError(f"gpus: got {count}, wanted at most the {visible} GPUs that are visible.")
    return [device] * count if device.type == "cpu" else [torch.device("cuda", number) for number in range(count)]


def batch_size(options: Generate) -> int:
    """Return the number of prompts of a batch."""
    sequences = min(options.batch, GEMV_ROWS) if options.split == "tensors" else options.batch
    return max(1, sequences // options.n)


def group_size(options: Generate, prompts: int) -> int:
    """Return the number of prompts that a replica takes at once: up to GROUP batches, but enough groups for GROUPS replicas."""
    size = batch_size(options)
    return size * max(1, min(GROUP, prompts // (GROUPS * size)))


class BatchGenerator:
    """Generates the sequences of the prompts batch by batch. A batch is named by the index of its first prompt."""

    def __init__(self, options: Generate, saved: Saved, prompts: list[str]):
        self.options, self.prompts, self.size = options, prompts, batch_size(options)
        codec = TextCodec(saved.tokenizer)
        self.ids = [codec.encode(prompt) for prompt in prompts]
        self.engine: FastDecoder | MaskedSampler
        if is_diffusion(saved):
            self.engine, self.settings = build_sampler(options, saved, self.ids[: self.size]), sampler_settings(options)
            return
        self.settings = decoder_settings(options, saved) | {"max_new_tokens": options.max_new_tokens or NEW_TOKENS}
        # a multiple of 64: caches of one size for similar prompts
        needed = min(-(-(max(map(len, self.ids)) + self.settings["max_new_tokens"]) // 64) * 64, saved.positions or POSITIONS)
        length = needed if options.max_length is None else longest(options.max_length, saved)
        if options.n > MANY:
            notice(f"generate: n: {options.n:,} sequences are written at once: the first words come after a token of each.")
        check_lengths(self.ids, length)
        self.engine = build_decoder(options, saved, self.ids[: self.size], length)

    def start(self, first: int) -> Any:
        """Return the batch's generation, which its play() runs."""
        settings = self.settings | {"seed": self.options.seed + first}  # the same prompt in another batch is drawn anew
        return self.engine.start(self.ids[first : first + self.size], **settings)

    def answer(self, first: int) -> list[dict[str, Any]]:
        """Return the sequences of a group of prompts as they are in the JSON: of a decoder by a rollout, else by batches."""
        last, n = min(first + group_size(self.options, len(self.ids)), len(self.ids)), self.options.n
        if isinstance(self.engine, FastDecoder) and self.engine.refills:
            settings = {"temperature": 0.0} | self.settings | {"seed": self.options.seed + first}
            rollout = self.engine.rollout(self.ids[first:last], **settings)
            results = [one.as_generated(self.ids[first + one.prompt], settings["stop"]) for one in rollout.sequences]
            return [entry for at in range(0, len(results), n) for entry in self.as_json(first + at // n, results[at : at + n])]
        entries = []
        for start in range(first, last, self.size):
            run = self.start(start)
            deque(run.play(), maxlen=0)
            entries += self.as_json(start, run.sequences)
        return entries

    def sequences(self, first: int) -> list[tuple[int, str, int]]:
        """Return (index of its prompt, the prompt, index among the prompt's sequences) of every sequence of the batch."""
        numbers = range(first, min(first + self.size, len(self.ids)))
        return [(number, self.prompts[number], copy) for number in numbers for copy in range(self.options.n)]

    def as_json(self, first: int, results: list[Generated]) -> list[dict[str, Any]]:
        """Return the batch's sequences as they are in the JSON."""
        return [
            vars(result) | {"prompt": prompt, "prompt_tokens": result.prompt}
            for (_, prompt, _), result in zip(self.sequences(first), results)
        ]


def longest(length: int, saved: Saved) -> int:
    """Return --max-length, with a line where the model's config names fewer positions."""
    if saved.positions is not None and length > saved.positions:
        notice(
            f"generate: max_length: got {length:,}, and {saved.folder} has {saved.positions:,} positions by its config: tokens "
            f"after these may make no sense."
        )
    return length


def check_lengths(ids: list[list[int]], length: int) -> None:
    """Raise ValueError for an unusable prompt of any batch, before the first batch runs."""
    for number, prompt in enumerate(ids, 1):
        if not prompt:
            raise ValueError(f"prompt {number} has no tokens, by this tokenizer; give it at least one to go on from.")
        if len(prompt) >= length:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, which leaves no room in max_length={length}; shorten it, or give a "
                "larger --max-length."
            )


def build_decoder(options: Generate, saved: Saved, probe: list[list[int]], length: int) -> FastDecoder:
    """Return a decoder for batches like `probe`, in sequences of `length` tokens, and log a line that describes it."""
    # On a CPU a launch of many steps saves nothing, and the first token would wait for the last.
    k = int(options.k) if options.k != "auto" else 1 if saved.device.type == "cpu" else "auto"
    tokenizer = TextCodec(saved.tokenizer, skip_special=not options.special)
    chosen: dict[str, Any] = {"fused": options.fused, "verify": VERIFY[options.verify]}
    chosen |= {"speculate": options.speculate, "weights": options.weights, "cache": options.cache}
    if options.split is not None:
        chosen |= {"devices": list(saved.devices), "split": options.split}
    elif options.weights is not None:
        chosen["device"] = saved.device  # the model may be in host memory
    engine = decoder(saved.model, len(probe) * options.n, length, k, tokenizer=tokenizer, **chosen)
    for _ in range(2 if saved.device.type == "cuda" else 0):  # compile, then capture, before the clock starts
        new = min(sum(engine.ladder), length - max(map(len, probe)))
        engine.generate(probe, **decoder_settings(options, saved) | {"max_new_tokens": new, "stop": ()})
    _print_ready(saved, saved.device_label, f"its own forward ({engine.path})" if engine.path else engine.kernels)
    if saved.generation.get("do_sample") or any(model_sampling(saved.generation).values()):
        print(describe_sampling(saved.generation, explicit_sampling(options)), file=sys.stderr, flush=True)
    if options.table:
        print(engine, file=sys.stderr, flush=True)
    return engine


def decoder_settings(options: Generate, saved: Saved) -> dict[str, Any]:
    """Return the arguments of the decoder's generate(). A stop that names a special token becomes its id."""
    special = {token.content: i for i, token in saved.tokenizer.inner.get_added_tokens_decoder().items() if token.special}
    ends = [] if options.ignore_eos else saved.checked_ends()
    stops = [*ends, *options.stop_id, *(special.get(text, text) for text in options.stop)]
    names = ("seed", "n", "logprobs", "max_new_tokens")
    sampling = model_sampling(saved.generation) | explicit_sampling(options)
    return {name: getattr(options, name) for name in names} | sampling | {"stop": tuple(dict.fromkeys(stops))}


def explicit_sampling(options: Generate) -> dict[str, Any]:
    """Return the sampling options that the command line has."""
    return {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}


def build_sampler(options: Generate, saved: Saved, probe: list[list[int]], more: Sequence[int] = ()) -> MaskedSampler:
    """Return a sampler for batches like `probe`, and log a line that describes it. more: tokens that end an answer, too"""
    tokenizer = saved.tokenizer
    if tokenizer.mask is None and getattr(saved.model, "generation", {}).get(MASK_ID) is None:
        raise ValueError(
            f"{saved.folder}: its tokenizer has no mask_token, and the model fills masks; give --tokenizer FOLDER."
        )
    ends = [] if options.ignore_eos else [*saved.checked_ends(), *more]
    codec = TextCodec(tokenizer, skip_special=not options.special)
    sampler = MaskedSampler(saved.model, codec, ends=[*ends, *options.stop_id])
    if probe and saved.device.type == "cuda":  # compile and capture before the clock starts
        sampler.generate(probe, **sampler_settings(options) | {"steps": None})
    _print_ready(saved, label(saved.device), "fills masks")
    return sampler


def sampler_settings(options: Generate) -> dict[str, Any]:
    """Return the arguments of the sampler's start()."""
    tokens = options.max_new_tokens or ANSWER
    block = options.block or (BLOCK if tokens % BLOCK == 0 else None)
    settings = {name: getattr(options, name) for name in ("threshold", "seed", "n")}
    settings |= {"steps": options.denoising_steps, "cache": options.block_cache, "tokens": tokens, "block": block}
    return settings | {"temperature": options.temperature or 0.0}


def _print_ready(saved: Saved, device: str, path: str) -> None:
    dtype = str(next(saved.model.parameters()).dtype).removeprefix("torch.")
    size, seconds = quantity(numbers_of(saved.model)), time.perf_counter() - saved.started
    line = f"{saved.folder}: {size} parameters, {dtype} on {device}, {path}, ready in {seconds:.2f} s"
    print(line, file=sys.stderr, flush=True)


# The only sensor that does not slow a loop of a few small launches: a dispatch mode costs 20 µs an op.
WITHOUT = tuple(name for name in SENSORS if name != "gputrace")

FIGURES = (
    "tokens", "seconds", "tokens_per_s", "first_token_s", "steps", "bytes_a_step", "read_bytes_per_s", "roofline", "syncs",
)  # fmt: skip


class Speed:
    """Totals of one or several generations."""

    def __init__(self, device: torch.device):
        self.device = device
        self.tokens = self.steps = self.bytes_read = 0
        self.seconds = self.device_bytes = 0.0  # bytes that one device read, where several read at once
        self.concurrent = 1  # maximum number of devices that read at once
        self.first_token_s: float | None = None  # of the first generation
        self.syncs: int | None = None
        self.uncounted = "no GPU" if device.type == "cpu" else "nothing was generated"
        self._rate: float | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the host syncs inside, where there is a GPU to wait for."""
        if self.device.type == "cpu":
            yield
            return
        with watch(gputrace=True, without=WITHOUT) as ledger:
            yield
        if "syncs" in ledger.totals:
            self.syncs = (self.syncs or 0) + int(ledger.totals["syncs"])
        else:
            self.uncounted = ledger.absent.get("gputrace", "no sensor ran")

    def add(self, result: Generation) -> None:
        self.tokens += result.count
        # Launches go on after the last token; these reads have no use.
        longest = max((len(sequence.tokens) for sequence in result.sequences), default=0)
        wanted = result.steps if result.wanted is None else result.wanted  # the steps that `bytes_read` counts
        needed = min(round(longest / max(result.tokens_a_step, 1)), wanted)
        self.steps += needed
        self.seconds += result.seconds
        read = result.bytes_read * needed // max(wanted, 1)
        self.bytes_read += read
        self.device_bytes += read / result.at_once
        self.concurrent = max(self.concurrent, result.at_once)
        if self.first_token_s is None and result.first_token_s:
            self.first_token_s = result.first_token_s

    def merge(self, other: "Speed") -> None:
        """Add the totals of another one."""
        for name in ("tokens", "steps", "seconds", "bytes_read", "device_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.concurrent = max(self.concurrent, other.concurrent)
        if self.first_token_s is None:
            self.first_token_s = other.first_token_s
        if other.syncs is not None:
            self.syncs = (self.syncs or 0) + other.syncs
        self.uncounted = other.uncounted

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def bytes_a_step(self) -> float | None:
        """Return the bytes that a step must read; None if unknown."""
        return self.bytes_read / self.steps if self.steps and self.bytes_read else None

    @property
    def read_bytes_per_s(self) -> float | None:
        """Return the read rate of one device, measured once, times the devices that read at once. None, with a notice, if it
        cannot be measured."""
        if self._rate is None:
            try:
                self._rate = measure.ceilings(self.device, quick=True).read_bytes_per_s
            except MeasureError as error:
                notice(f"the share of the roofline is left out: {error}")
        if self._rate is None or not self.device_bytes:
            return self._rate
        return self._rate * self.bytes_read / self.device_bytes

    @property
    def roofline(self) -> float | None:
        """Return the shortest time for reading the weights and the live cache once per token, over the time that it took."""
        if not self.bytes_read or not (rate := self.read_bytes_per_s) or not self.seconds:
            return None
        if (read := self.bytes_read / self.seconds) <= rate:
            return read / rate
        share = measure.share(self.device_bytes / self.seconds, "read_bytes_per_s", self.device)
        self._rate = None  # it was measured again
        return share

    def line(self) -> str:
        """Return all figures in one line."""
        parts = [f"{self.tokens:,} tokens", f"{self.tokens_per_s:,.1f} tokens/s"]
        share = self.roofline
        if (read := self.bytes_a_step) is not None and (rate := self.read_bytes_per_s):
            by = f" by {self.concurrent} GPUs at once" if self.concurrent > 1 else ""
            of = "faster than" if share is None else f"{share:.1%} of"
            parts.append(f"{of} the roofline ({quantity(read, 'B')} a step / {quantity(rate, 'B/s')} read here{by})")
        if self.first_token_s is not None:
            parts.append(f"first token after {measure.in_words(self.first_token_s)}")
        parts.append(f"host syncs: {f'not counted ({self.uncounted})' if self.syncs is None else self.syncs}")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIGURES}
