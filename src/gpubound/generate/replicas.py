"""`gpubound generate --gpus N`: distribute prompts over replicas of the model; write answers in the order of the prompts.

The groups of prompts, and the random draw within each, do not depend on the number of replicas, nor on where a run was
interrupted: an interrupted run can be resumed. When a replica ends, the run ends, and the same command completes its output.
"""

import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO
from zlib import crc32

import torch

from ..device import look
from ..errors import GenerateError
from ..files import explain_disk_full, flock, regular, writing
from ..formatting import shown
from ..trace import logger, notice
from ..train.checkpoint import Checkpoint
from ..train.checkpoint.checkpoints import ORIGIN
from ..train.checkpoint.files import STATE
from .batches import BatchGenerator, group_size, load
from .options import Generate, base_of_adapter, find_source, is_adapter

# Options that do not change an answer.
UNRELATED = ("prompt", "file", "whole", "gpus", "split", "out", "device", "ckpt", "verify", "k")
PATHS = ("adapter", "tokenizer")
MODEL_FILES = (".safetensors", ".bin", ".json")
SAMPLES, BLOCK = 64, 1 << 20  # a file's checksum is that of so many blocks of so many bytes
PROGRESS = 10.0  # seconds between lines of progress
BEGIN = b'{"number": '  # of a line


def generate_lines(options: Generate, prompts: list[str]) -> int:
    """Generate and write the answers of all prompts that have none in the output yet."""
    devices, size = replica_devices(options), group_size(options, len(prompts))
    lines = OrderedLines(options.out, prompts, options.n, fingerprint(options))

    def name(first: int) -> str:
        last = min(first + size, len(prompts))
        return f"prompt {last}" if last == first + 1 else f"prompts {first + 1} to {last}"

    advice = "the answers before are in it. Free space, then give the same command again."
    with explain_disk_full(options.out or "stdout", advice), closing(lines), ExitStack() as stack:
        groups = [
            first
            for first in range(0, len(prompts), size)
            if not all(lines.answered(number) for number in range(first, min(first + size, len(prompts))))
        ]
        if groups and len(groups) < len(devices):
            count = "1 batch" if len(groups) == 1 else f"{len(groups)} batches"
            notice(
                f"generate: {count} of up to {size} prompts for {len(devices)} replicas: the rest of them is idle; "
                f"a smaller --batch makes more batches."
            )
        answered = answers(groups, len(devices), start_replica, options, prompts, devices)
        _collect(stack.enter_context(closing(answered)), options, lines)
        if left := [first for first in groups if not lines.answered(first)]:
            missing = ", ".join(map(name, left[:5])) + (", ..." if len(left) > 5 else "")
            raise GenerateError(
                f"not answered: {missing}, because a replica ended; with --out FILE, the same command answers what is missing."
            )
    return 0


def answers(
    groups: list[int], count: int, start: Callable[..., Any], *args: Any
) -> Generator[tuple[int, list[dict[str, Any]]], None, None]:
    """Yield (group, its sequences) in the order in which up to `count` replicas complete them, until one of these ends.

    start  a module-level function: start(number of the replica, *args) returns the function that answers a group
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([start.__module__])  # imported once for all workers
    numbers = context.SimpleQueue()
    for number in range(count):
        numbers.put(number)
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(count, context, _begin, (numbers, start, args))
    try:
        group_of = {pool.submit(_answer_group, group): group for group in groups}
        for future in as_completed(group_of):
            with suppress(BrokenProcessPool):  # groups that were answered before may follow
                yield group_of[future], future.result()
    finally:
        for worker in multiprocessing.active_children():
            if worker not in others:
                worker.kill()
        pool.shutdown(cancel_futures=True)


_answer: Callable[[], Callable[[int], list[dict[str, Any]]]]


def _begin(numbers: Any, start: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Prepare a worker process, which ends with Ctrl-C and with its parent. Its first group loads the replica."""
    global _answer
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    number = numbers.get()
    if number:
        logger.setLevel(logging.WARNING)  # the first worker logs for all, except for warnings
    _answer = cache(partial(start, number, *args))


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _answer_group(first: int) -> list[dict[str, Any]]:
    return _answer()(first)


def _collect(answered: Iterator[tuple[int, list[dict[str, Any]]]], options: Generate, lines: "OrderedLines") -> None:
    """Write the sequences of the replicas, and lines of progress."""
    started = reported = time.perf_counter()
    prompts = tokens = 0
    for first, sequences in answered:
        for start in range(0, len(sequences), options.n):
            lines.put(first + start // options.n, sequences[start : start + options.n])
        prompts, tokens = prompts + len(sequences) // options.n, tokens + sum(len(one["tokens"]) for one in sequences)
        if (now := time.perf_counter()) - reported > PROGRESS:
            reported = now
            print(f"{prompts:,} prompts answered, {tokens / (now - started):,.1f} tokens/s", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started
    print(
        f"{prompts:,} of {len(lines.prompts):,} prompts answered now, {tokens:,} tokens, "
        f"{tokens / seconds:,.1f} tokens/s with loading",
        file=sys.stderr,
        flush=True,
    )


def start_replica(
    number: int, options: Generate, prompts: list[str], devices: list[str]
) -> Callable[[int], list[dict[str, Any]]]:
    """Load replica `number`, and return its function that answers a group of prompts."""
    if devices[number] == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // len(devices)))
    return BatchGenerator(options, load(options, devices[number]), prompts).answer


def replica_devices(options: Generate) -> list[str]:
    gpus, sight = options.gpus or 1, look()
    if options.device.startswith("cuda:") and gpus > 1:
        raise ValueError(f"gpus: got {gpus} and --device {options.device}, a single one; leave --device out.")
    if options.device == "cpu" or options.device.startswith("cuda:") or not sight.count:
        return [options.device] * gpus
    if gpus > sight.count:
        raise ValueError(f"gpus: got {gpus}, wanted at most the {sight.count} GPUs that are visible.")
    return [f"cuda:{number}" for number in range(gpus)]


def fingerprint(options: Generate) -> str:
    """Return a hash of the model's files and of all options that change an answer."""
    settings = {name: value for name, value in asdict(options).items() if name not in (*UNRELATED, *PATHS)}
    sources = [source := find_source(options.ckpt, options.trust_remote_code)]
    if isinstance(source, Path) and is_adapter(source):
        sources.append(find_source(base_of_adapter(source), options.trust_remote_code))
    folders = [source.path if isinstance(source, Checkpoint) else source for source in sources]
    named = [*folders, *(getattr(options, name) for name in PATHS)]
    paths = [path and os.path.realpath(path) for path in named]
    content = [_content(Path(path)) for path in paths if path]
    return sha256(json.dumps([paths, settings, content], sort_keys=True).encode()).hexdigest()[:12]


def _content(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and checksum of each model file: an export of the same run to the same folder changes the answers."""
    files = [path]
    if (path / STATE).exists():
        files = [path / STATE]  # holds the checksums of a checkpoint's tensors
    elif not path.is_file():
        files = [file for file in path.glob("*") if file.suffix in MODEL_FILES and file.name != ORIGIN]
    return [(file.name, file.stat().st_size, _checksum(file)) for file in sorted(files) if file.is_file()]


def _checksum(file: Path) -> int:
    """Return a checksum of evenly spaced blocks; a large model's whole files would take a minute."""
    step, crc = max(file.stat().st_size // SAMPLES, BLOCK), 0
    with open(file, "rb") as opened:
        while block := opened.read(BLOCK):
            crc = crc32(block, crc)
            opened.seek(step - BLOCK, os.SEEK_CUR)
    return crc


class OrderedLines:
    """Writes a line of JSON for each sequence, in the order of the prompts, to the file `path` or to stdout.

    n        sequences per prompt
    mark     fingerprint of model and settings, which every line has

    A file of an interrupted run is resumed: it holds the lines of the first prompts and perhaps an incomplete line, which is
    removed. A run that had to leave prompts out has written the lines of the others.
    """

    def __init__(self, path: str | None, prompts: list[str], n: int, mark: str):
        self.prompts, self.n, self.mark = prompts, n, mark
        self.written = 0  # number of first prompts whose lines are written
        self._waiting: dict[int, list[str]] = {}
        self._out: TextIO = sys.stdout if path is None else self._open(Path(path))

    def answered(self, number: int) -> bool:
        return number < self.written or number in self._waiting

    def put(self, number: int, sequences: list[dict[str, Any]]) -> None:
        """Add the sequences of one prompt; lines are written once those of all prompts before are."""
        if not self.answered(number):
            self._waiting[number] = [json.dumps({"number": number + 1, **one, "run": self.mark}) for one in sequences]
        while self.written in self._waiting:
            self._write(self.written)
            self.written += 1

    def close(self) -> None:
        """Write waiting lines, too: a prompt before them has no answer."""
        try:
            for number in sorted(self._waiting):
                self._write(number)
        finally:
            if self._out is not sys.stdout:
                self._out.close()

    def _write(self, number: int) -> None:
        print("\n".join(self._waiting.pop(number)), file=self._out, flush=True)

    def _open(self, path: Path) -> TextIO:
        """Open and lock the file: two processes would write every answer twice."""
        if path.exists():
            regular(path)
        with writing(path), ExitStack() as on_error:
            out = on_error.enter_context(open(path, "a", encoding="utf-8", newline="\n"))
            if not flock(out.fileno(), path, "make sure that no other process writes there"):
                raise ValueError(f"out: another process writes to {path}; wait until it has ended, or name another file.")
            out.truncate(self._resume(path))
            on_error.pop_all()
        return out

    def _resume(self, path: Path) -> int:
        """Return the number of bytes to keep: the lines up to the first gap. Lines after it become waiting lines."""
        lines_of: dict[int, list[str]] = {}
        *lines, rest = path.read_bytes().split(b"\n")
        for count, line in enumerate(lines, 1):
            lines_of.setdefault(self._number(path, count, line), []).append(line.decode())
        if not rest.startswith(BEGIN[: len(rest)]):  # neither a whole nor an incomplete line of ours
            raise ValueError(_not_ours(path, len(lines) + 1))
        self._waiting = {number: lines for number, lines in lines_of.items() if len(lines) == self.n}
        size = 0
        while self.written in self._waiting:
            size += sum(len(line.encode()) + 1 for line in self._waiting.pop(self.written))
            self.written += 1
        return size

    def _number(self, path: Path, count: int, line: bytes) -> int:
        """Return the index of the prompt that line `count` of the file answers."""
        try:
            entry = json.loads(line)
            number, prompt, mark = entry["number"] - 1, entry["prompt"], entry["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(_not_ours(path, count)) from error
        if not 0 <= number < len(self.prompts) or prompt != self.prompts[number]:
            raise ValueError(
                f"out: line {count} of {path} answers {shown(prompt)}, which is not prompt {number + 1} here; "
                f"give the prompts that it was begun with, or name another file."
            )
        if mark != self.mark:
            raise ValueError(
                f"out: line {count} of {path} was written by another model or with other settings; "
                f"give those that it was begun with, or name another file."
            )
        return number


def _not_ours(path: Path, count: int) -> str:
    return f"out: line {count} of {path} is no answer of gpubound generate; name another file."
