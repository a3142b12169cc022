"""Generate texts batch by batch with a saved model: a decoder, or the sampler of a masked diffusion model."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch

from ..decode import FastDecoder, decoder
from ..decode.layer import GEMV_ROWS
from ..decode.placement.plan import SPLITS
from ..decode.request import SAMPLING, Choice, Generated, describe_sampling, model_sampling
from ..decode.text import TextCodec
from ..device import label, limit, resolve
from ..formatting import quantity
from ..layers.quantized_base import numbers_of
from ..models.diffusion import MaskedSampler
from ..models.folder import MASK_ID
from ..trace import notice
from .load import Saved, open_saved
from .options import VERIFY, Generate

NEW_TOKENS = 256  # by default
POSITIONS = 4096  # of a model whose config names no limit
ANSWER, BLOCK = 128, 32  # tokens of a masked diffusion model's answer, and of a block where they divide the answer
DECODER_ONLY = (
    "top_k", "top_p", "min_p", "repetition_penalty", "stop", "logprobs", "max_length", "k", "weights",
    "cache", "speculate", "split", "fused", "verify", "table",
)  # fmt: skip
DIFFUSION_ONLY = ("denoising_steps", "block", "threshold", "block_cache", "guidance")
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

    def answer(self, first: int, heartbeat: Callable[[], None]) -> list[dict[str, Any]]:
        """Return the sequences of a group of prompts as they are in the JSON: of a decoder by a rollout, else by batches."""
        last, n = min(first + group_size(self.options, len(self.ids)), len(self.ids)), self.options.n
        if isinstance(self.engine, FastDecoder) and self.engine.refills:
            settings = {"temperature": 0.0} | self.settings | {"seed": self.options.seed + first}
            rollout = self.engine.rollout(self.ids[first:last], **settings)
            rollout.each_launch = heartbeat
            results = [one.as_generated(self.ids[first + one.prompt], settings["stop"]) for one in rollout.sequences]
            return [entry for at in range(0, len(results), n) for entry in self.as_json(first + at // n, results[at : at + n])]
        entries = []
        for start in range(first, last, self.size):
            run = self.start(start)
            for _ in run.play():
                heartbeat()
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
    settings = {name: getattr(options, name) for name in ("threshold", "guidance", "seed", "n")}
    settings |= {"steps": options.denoising_steps, "cache": options.block_cache, "tokens": tokens, "block": block}
    return settings | {"temperature": options.temperature or 0.0}


def _print_ready(saved: Saved, device: str, path: str) -> None:
    dtype = str(next(saved.model.parameters()).dtype).removeprefix("torch.")
    size, seconds = quantity(numbers_of(saved.model)), time.perf_counter() - saved.started
    line = f"{saved.folder}: {size} parameters, {dtype} on {device}, {path}, ready in {seconds:.2f} s"
    print(line, file=sys.stderr, flush=True)
