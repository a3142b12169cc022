"""`gpubound generate --output FILE`: the answers as lines of JSON, in the order of the prompts.

A batch and the random draw in it do not depend on where a run was interrupted, so an interrupted file is resumed.
"""

import json
import os
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TextIO
from zlib import crc32

from ..files import explain_disk_full, flock, regular, writing
from ..formatting import shown
from ..train.checkpoint import Checkpoint
from ..train.checkpoint.files import STATE
from ..train.export_metadata import ORIGIN
from .batches import BatchGenerator, batch_size, load
from .options import Generate
from .source import base_of_adapter, find_source, is_adapter

# Options that do not change an answer.
UNRELATED = ("prompt", "file", "whole", "gpus", "split", "output", "device", "ckpt", "verify", "k")
PATHS = ("adapter", "tokenizer")
MODEL_FILES = (".safetensors", ".bin", ".json")
SAMPLES, BLOCK = 64, 1 << 20  # a file's checksum is that of so many blocks of so many bytes
PROGRESS = 10.0  # seconds between lines of progress
BEGIN = b'{"number": '  # of a line


def write_answers(options: Generate, prompts: list[str]) -> int:
    """Generate and write the answers of all prompts that have none in the file yet."""
    assert options.output is not None
    path, mark = Path(options.output), fingerprint(options)
    advice = "the answers before are in it. Free space, then give the same command again."
    with explain_disk_full(path, advice), open_answers(path, prompts, options.n, mark) as out:
        lines = path.read_bytes().count(b"\n")
        begun, size = lines // options.n, batch_size(options)
        if begun == len(prompts):
            report(f"0 of {begun:,} prompts answered now: all were before")
            return 0
        batches = BatchGenerator(options, load(options, options.device), prompts)
        started = reported = time.perf_counter()
        tokens = 0
        for first in range(begun // size * size, len(prompts), size):
            run = batches.start(first)
            deque(run.play(), maxlen=0)
            answers = batches.as_json(first, run.sequences)
            for at, one in enumerate(answers, first * options.n):
                if at >= lines:
                    print(json.dumps({"number": at // options.n + 1, **one, "run": mark}), file=out)
            out.flush()
            tokens += sum(len(one["tokens"]) for one in answers)
            if (now := time.perf_counter()) - reported > PROGRESS:
                reported = now
                report(f"{min(first + size, len(prompts)):,} prompts answered, {tokens / (now - started):,.1f} tokens/s")
    rate = tokens / (time.perf_counter() - started)
    report(f"{len(prompts) - begun:,} of {len(prompts):,} prompts answered now, {tokens:,} tokens, {rate:,.1f} tokens/s")
    return 0


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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


def open_answers(path: Path, prompts: list[str], n: int, mark: str) -> TextIO:
    """Open and lock a file of answers: two processes would write every answer twice. An incomplete last line is removed.

    Raise ValueError for a file with other lines than answers of these prompts, `n` of each, by the model and settings `mark`.
    """
    if path.exists():
        regular(path)
    with writing(path), ExitStack() as on_error:
        out = on_error.enter_context(open(path, "a", encoding="utf-8", newline="\n"))
        if not flock(out.fileno(), path, "make sure that no other process writes there"):
            raise ValueError(f"output: another process writes to {path}; wait until it has ended, or name another file.")
        *lines, rest = path.read_bytes().split(b"\n")
        for at, line in enumerate(lines):
            _check_line(path, at + 1, line, prompts[at // n] if at < n * len(prompts) else None, at // n + 1, mark)
        if not rest.startswith(BEGIN[: len(rest)]):  # neither a whole nor an incomplete line of ours
            raise ValueError(_not_ours(path, len(lines) + 1))
        out.truncate(sum(len(line) + 1 for line in lines))
        on_error.pop_all()
    return out


def _check_line(path: Path, count: int, line: bytes, prompt: str | None, number: int, mark: str) -> None:
    """Raise ValueError unless line `count` of the file is an answer to this prompt."""
    try:
        entry = json.loads(line)
        got, answered, written = entry["number"], entry["prompt"], entry["run"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(_not_ours(path, count)) from error
    if got != number or answered != prompt:
        raise ValueError(
            f"output: line {count} of {path} answers {shown(answered)}, which is not prompt {number} here; "
            f"give the prompts that it was begun with, or name another file."
        )
    if written != mark:
        raise ValueError(
            f"output: line {count} of {path} was written by another model or with other settings; "
            f"give those that it was begun with, or name another file."
        )


def _not_ours(path: Path, count: int) -> str:
    return f"output: line {count} of {path} is no answer of gpubound generate; name another file."
