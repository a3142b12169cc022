"""Continue a text, or chat, with a saved model, and print how fast it was.

gpubound generate path/to/checkpoint --prompt "Once"     a Hugging Face folder, or a run of gpubound train or demo
gpubound generate runs/first --chat                      Ctrl-C ends a reply, Ctrl-D the conversation
"""

import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from ..formatting import PRINTABLE
from ..generate.options import Generate, check, check_path, read_prompts
from . import arguments

if TYPE_CHECKING:
    from ..decode.request import Generated
    from ..generate.batches import Saved


def main(argv: Sequence[str], chat: bool = False) -> int:
    command = "chat" if chat else "generate"
    if any(word.partition("=")[0] == "--steps" for word in argv):
        raise ValueError(f"there is no option --steps; did you mean '--denoising-steps'? See gpubound {command} --help.")
    options = arguments(Generate, argv, command)
    options = replace(options, chat=options.chat or chat)
    check(options)
    check_path(options.ckpt)
    prompts = [] if options.chat else read_prompts(options)
    from ..generate.batches import check_decoding, load  # torch takes two seconds: options are read first

    check_decoding(options)
    if options.writes_lines:
        from ..generate.replicas import generate_lines

        return generate_lines(options, prompts)
    saved = load(options, options.device)
    if options.chat:
        from ..generate.chat import converse

        return converse(options, saved)
    return generate(options, saved, prompts)


def generate(options: Generate, saved: "Saved", prompts: list[str]) -> int:
    """Generate the sequences of every prompt, batch by batch."""
    from ..generate.batches import BatchGenerator, Speed

    batches = BatchGenerator(options, saved, prompts)
    speed, results = Speed(saved.device), []
    for first in range(0, len(prompts), batches.size):
        run = batches.start(first)
        with speed.counting(), closing(run.play()) as pieces:
            if options.json:
                deque(pieces, maxlen=0)
            else:
                print_in_order(batches.sequences(first), len(prompts) * options.n > 1, options, pieces, run.sequences)
        speed.add(run.result())
        results += batches.as_json(first, run.sequences)
    if options.json:
        about = {"model": str(saved.folder), "device": saved.device_label, "sequences": results}
        print(json.dumps(about | speed.as_dict(), indent=1))
    print(speed.line(), file=sys.stderr, flush=True)
    return 0


def print_in_order(
    sequences: list[tuple[int, str, int]],
    several: bool,
    options: Generate,
    pieces: Iterator[tuple[int, str]],
    results: "list[Generated]",
) -> None:
    """Print sequences to stdout one after the other: the first as it arrives, the next once it has ended."""
    safe = PRINTABLE if sys.stdout.isatty() else {}
    waiting, last = [""] * len(sequences), len(sequences) - 1
    for index, (number, prompt, copy) in enumerate(sequences):
        if several:
            label = f"{number + 1}.{copy + 1}" if options.n > 1 else str(number + 1)
            print(f"--- {label}: {prompt[:60]!r}{'...' if len(prompt) > 60 else ''}")
        if options.echo:
            print(prompt.translate(safe), end="")
        print(waiting[index].translate(safe), end="", flush=True)
        while index == last or not results[index].finish:
            row, piece = next(pieces, (None, ""))
            if row is None:
                break
            waiting[row] += piece
            if row == index:
                print(piece.translate(safe), end="", flush=True)
        print(flush=True)
