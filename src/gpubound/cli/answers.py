"""`gpubound generate --gpus N`: prompts dealt to copies of the model, answers in the order of the prompts.

Batches are cut as one copy would cut them, and the draw in a batch depends on the number of its first prompt. So what is
written does not depend on the number of copies, nor on where a run was broken off.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from ..device import look
from ..distributed.worker_pool import WorkerPool
from ..errors import GenerateError
from ..trace import notice
from ..train.checkpoint import Checkpoint
from ..train.export_metadata import ORIGIN
from ..train.manifest import STATE
from .lines import Lines
from .saved import base_named_in, is_adapter, source_of
from .session import room
from .writer import Writer, opened, together

if TYPE_CHECKING:
    from .generate import Generate

# What changes no answer.
SAME = (
    "prompt", "file", "whole", "gpus", "split", "timeout", "output", "device", "ckpt", "verify", "k",
)  # fmt: skip
PATHS = ("adapter", "tokenizer")
MODEL = (".safetensors", ".bin", ".json")  # a model's files
SAMPLES, BLOCK = 64, 1 << 20  # of one of them
EVERY = 10.0  # seconds between lines of progress


def answer(options: "Generate", prompts: list[str]) -> int:
    """The command: every prompt that has no answer yet gets one."""
    devices, size = devices_of(options), together(options)
    lines = Lines(options.output, prompts, options.n, mark_of(options))
    advice = "the answers before are in it. Free space, then give the same command again."
    with room(options.output or "stdout", advice), closing(lines):
        firsts = [
            first
            for first in range(0, len(prompts), size)
            if not all(lines.answered(number) for number in range(first, min(first + size, len(prompts))))
        ]
        if firsts and len(firsts) < len(devices):
            batches = "1 batch" if len(firsts) == 1 else f"{len(firsts)} batches"
            notice(
                f"generate: {batches} of up to {size} prompts for {len(devices)} copies: the rest of them has nothing to "
                f"do; a smaller --batch makes more batches."
            )
        named, limit = _named(size, prompts), 60 * options.timeout
        copies = WorkerPool(firsts, len(devices), begin, options, prompts, devices, name=named, patience=limit)
        left = _play(copies, options, lines)
    if left:
        missing = ", ".join(map(named, left[:5])) + (", ..." if len(left) > 5 else "")
        raise GenerateError(
            f"not answered: {missing}. The others are; with --output FILE, the same command goes on with what is missing."
        )
    return 0


def _play(work: WorkerPool, options: "Generate", lines: Lines) -> list[int]:
    """Take what the copies write, until nobody has anything left to do; the batches that nobody has done."""
    begun = told = time.perf_counter()
    prompts = tokens = 0
    for first, sequences in work:
        for at in range(0, len(sequences), options.n):
            lines.put(first + at // options.n, sequences[at : at + options.n])
        prompts, tokens = prompts + len(sequences) // options.n, tokens + sum(len(one["tokens"]) for one in sequences)
        if (now := time.perf_counter()) - told > EVERY:
            told = now
            print(f"{prompts:,} prompts answered, {tokens / (now - begun):,.1f} tokens/s", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - begun
    print(
        f"{prompts:,} of {len(lines.prompts):,} prompts answered now, {tokens:,} tokens, "
        f"{tokens / seconds:,.1f} tokens/s with loading",
        file=sys.stderr,
        flush=True,
    )
    return work.left


def begin(
    number: int, options: "Generate", prompts: list[str], devices: list[str]
) -> Callable[[int, Callable[[], None]], list[dict[str, Any]]]:
    """Copy `number`, ready to answer a batch."""
    if devices[number] == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // len(devices)))
    saved = opened(options, devices[number])
    writer = Writer(options, saved, prompts)

    def work(first: int, alive: Callable[[], None]) -> list[dict[str, Any]]:
        run = writer.start(first)
        for _ in run.play():
            alive()
        return writer.told(first, run.sequences)

    return work


def devices_of(options: "Generate") -> list[str]:
    """What each copy runs on."""
    gpus, sight = options.gpus or 1, look()
    if options.device.startswith("cuda:") and gpus > 1:
        raise ValueError(f"gpus: got {gpus} and --device {options.device}, a single one; leave --device out.")
    if options.device == "cpu" or options.device.startswith("cuda:") or not sight.count:
        return [options.device] * gpus
    if gpus > sight.count:
        raise ValueError(f"gpus: got {gpus}, wanted at most the {sight.count} GPUs that are visible.")
    return [f"cuda:{number}" for number in range(gpus)]


def mark_of(options: "Generate") -> str:
    """What tells this model and these settings from others, in a few letters."""
    about = {name: value for name, value in asdict(options).items() if name not in (*SAME, *PATHS)}
    sources = [source := source_of(options.ckpt, options.trust_remote_code)]
    if isinstance(source, Path) and is_adapter(source):
        sources.append(source_of(base_named_in(source), options.trust_remote_code))
    folders = [source.path if isinstance(source, Checkpoint) else source for source in sources]
    named = [*folders, *(getattr(options, name) for name in PATHS)]
    places = [place and os.path.realpath(place) for place in named]  # however they are written
    content = [_content(Path(place)) for place in places if place]
    return sha256(json.dumps([places, about, content], sort_keys=True).encode()).hexdigest()[:12]


def _content(place: Path) -> list[tuple[str, int, int]]:
    """What tells the files that make the answers from others: a folder keeps its name when a run is exported to it again."""
    files = [place] if place.is_file() else [file for file in place.glob("*") if file.suffix in MODEL and file.name != ORIGIN]
    if (place / STATE).exists():
        files = [place / STATE]  # which has the checksums of a checkpoint's tensors
    return [(file.name, file.stat().st_size, _sample(file)) for file in sorted(files) if file.is_file()]


def _sample(file: Path) -> int:
    """The checksum of a megabyte here and there, of all in a small file: whole ones of a large model would take a minute."""
    step, crc = max(file.stat().st_size // SAMPLES, BLOCK), 0
    with open(file, "rb") as opened:
        while block := opened.read(BLOCK):
            crc = crc32(block, crc)
            opened.seek(step - BLOCK, os.SEEK_CUR)
    return crc


def _named(size: int, prompts: list[str]) -> Callable[[int], str]:
    """A batch in words, by the number of its first prompt."""

    def name(first: int) -> str:
        last = min(first + size, len(prompts))
        return f"prompt {last}" if last == first + 1 else f"prompts {first + 1} to {last}"

    return name
