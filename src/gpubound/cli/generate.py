"""Continue a text, or chat, with a saved model, and print how fast it was.

gpubound generate path/to/checkpoint --prompt "Once"     a Hugging Face folder, or a run of gpubound train or demo
gpubound generate runs/first --chat                      Ctrl-C ends a reply, Ctrl-D the conversation
"""

import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from . import arguments
from .many import check_timeout
from .prompts import HARMLESS, VERIFY, check_text, read_prompts
from .sources import check_path

if TYPE_CHECKING:
    from ..decode.result import Generated
    from .saved import Saved

STEPS = 1024  # a launch, at most: each is room in a buffer, and a text is shown launch by launch


@dataclass(frozen=True)
class Generate:
    """Continue a text with a saved model, or chat with it.

    CKPT is a Hugging Face folder, a model's name on the Hugging Face hub, or the folder of a run of gpubound train or demo. The
    prompt comes from --prompt, --file or stdin. What the model writes goes to stdout as it arrives; its speed goes to stderr.

    Examples: gpubound generate demo-run --prompt "def main(" --temperature 0.7
              gpubound generate demo-run --file prompts.txt --json
              gpubound generate path/to/checkpoint --chat
              gpubound generate path/to/checkpoint --file prompts.jsonl --gpus 8 --output answers.jsonl
              gpubound generate path/to/large --prompt "Once" --gpus 4 --split tensors
    """

    ckpt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CKPT")]
    """A Hugging Face folder, a name on the hub (owner/model), a run's folder, or one of its checkpoints."""
    adapter: str | None = None
    """A folder with a low-rank adapter in PEFT's layout, which is merged into CKPT's weights. A CKPT that is such a folder
    itself finds its base on its own."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text to continue. Repeat the option for several texts."""
    file: str | None = None
    """A file of prompts, one a line; - is stdin. In a .jsonl each line is a text in quotes, or an object with a "prompt"."""
    whole: bool = False
    """Take the whole file as one prompt."""
    chat: bool = False
    """Hold a conversation in the model's chat template. Each reply sees all that was said before."""
    system: str | None = None
    """The system message that the conversation begins with."""
    json: bool = False
    """Print one JSON document at the end, and no text before it."""
    echo: bool = False
    """Print each prompt before what follows it."""
    special: bool = False
    """Print special tokens such as <|endoftext|>."""
    max_new_tokens: int | None = None
    """How many tokens to write: 256 by default, in a conversation as many as fit."""
    temperature: float | None = None
    """0 takes the likeliest token each time. Above 0, tokens are drawn at random; higher is more varied. This and the next
    four: by default as the model's generation_config.json says, else 0 and off."""
    top_k: int | None = None
    """Draw among this many of the likeliest tokens; 0 is off."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together have this probability; 1 is off."""
    min_p: float | None = None
    """Draw among tokens at least this likely, relative to the likeliest; 0 is off."""
    repetition_penalty: float | None = None
    """Above 1, tokens that are already in the text become less likely; 1 is off."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Stop at this text, or at the special token of this name. Repeat the option for several."""
    stop_id: tyro.conf.UseAppendAction[tuple[int, ...]] = ()
    """Stop at the token with this number. Repeat the option for several."""
    ignore_eos: bool = False
    """Do not stop at the model's own end of text."""
    seed: int = 0
    """Seed of the random draw: the same seed gives the same tokens."""
    n: int = 1
    """How many sequences to write for each prompt."""
    logprobs: bool = False
    """Add the log-probability of each token to the JSON."""
    batch: int = 32
    """How many sequences to write at once. The rest follow batch by batch."""
    max_length: int | None = None
    """The most tokens of a sequence, prompt included. The default is what the prompts need, up to the model's own limit."""
    k: str = "auto"
    """Steps per launch: auto, or a number. A text is shown launch by launch. auto is 1 on a CPU and up to 32 on a GPU."""
    weights: str | None = None
    """int8, int4 or fp8: round the weights, so that each token reads less memory. Meant for GPUs."""
    cache: str | None = None
    """int8 or fp8: keep keys and values in 8 bits, which saves memory with long texts and many sequences."""
    speculate: int | None = None
    """Guess this many tokens from the text so far and check them in one step. The result is the same. Repetitive texts are
    written faster."""
    gpus: int | None = None
    """Deal the prompts to this many copies of the model, one on each GPU; with --device cpu, so many processes. What they write
    comes as one line of JSON for each sequence, in the order of the prompts, the same as of one copy."""
    split: str | None = None
    """The GPUs share one copy of the model. layers: each has some layers, for a model that one has no room for. tensors: each
    has a slice of every layer, so that a text comes sooner; up to 8 sequences at once. --gpus says how many GPUs; by default
    all that are visible."""
    timeout: float = 10.0
    """With --gpus or --output: minutes in which a copy may give no sign of life, while it loads or writes. One that hangs is
    ended, and another goes on with its prompts."""
    output: str | None = None
    """A file for these lines. One that holds some of the answers already is gone on with."""
    device: str = "auto"
    """auto, require, cpu, cuda or cuda:<index>."""
    dtype: str = "auto"
    """auto (as saved), float32, bfloat16 or float16."""
    tokenizer: str | None = None
    """A folder whose tokenizer.json to use instead of the model's."""
    trust_remote_code: bool = False
    """Run the Python code that the model's folder brings. Only for folders that you trust: it can do what you can."""
    fused: bool = True
    """--no-fused runs transformers' own forward instead of our kernels."""
    verify: str = "full"
    """How much the decoder checks of its own tokens and logits before it writes: full, quick or none."""
    table: bool = False
    """Print on stderr which kernels run and what was checked."""
    steps: int | None = None
    """Of a masked diffusion model: how often it is run for an answer. By default once for each token."""
    block: int | None = None
    """Of a masked diffusion model: tokens that are filled before the next ones, from the left. By default 32, or all of an
    answer that is no multiple of 32."""
    guidance: float = 0.0
    """Of a masked diffusion model: how far to move away from what is likely without the prompt; 0 is off."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Generate, argv, "generate")
    check(options)
    check_path(options.ckpt)
    prompts = [] if options.chat else read_prompts(options)
    check_choice(options)
    if dealt(options):
        from .answers import answer

        return answer(options, prompts)
    from .writer import opened

    saved = opened(options, options.device)
    if options.chat:
        from .chat import converse

        return converse(options, saved)
    return write(options, saved, prompts)


def dealt(options: Generate) -> bool:
    """Whether the prompts are dealt to copies of the model, which write lines."""
    return (options.split is None and options.gpus is not None) or options.output is not None


def check(options: Generate) -> None:
    """What can be refused before a checkpoint is read."""
    for name in ("max_new_tokens", "n", "batch", "max_length", "steps", "block", "gpus"):
        value, least = getattr(options, name), 2 if name == "max_length" else 1
        if value is not None and value < least:
            raise ValueError(f"{name}: got {value}, wanted at least {least}.")
    check_timeout(options.timeout)
    if options.verify not in VERIFY:
        raise ValueError(f"verify: got {options.verify!r}, wanted one of {', '.join(VERIFY)}.")
    if options.k != "auto" and not (options.k.isdecimal() and 0 < int(options.k) <= STEPS):
        raise ValueError(f"k: got {options.k!r}, wanted auto or a number of steps a launch, 1 to {STEPS}.")
    for name, texts in (("prompt", options.prompt), ("stop", options.stop), ("system", (options.system or "",))):
        for text in texts:
            check_text(name, text)
    if options.chat and options.n > 1:
        raise ValueError(f"n: got {options.n}, but a conversation has one reply a turn; leave --n out.")
    if options.system is not None and not options.chat:
        raise ValueError("system: it begins a conversation; give --chat with it.")
    if options.whole and options.file is None:
        raise ValueError("whole: it takes a file as a single prompt; give --file with it.")
    check_split(options)
    if options.logprobs and not options.json and not dealt(options):
        raise ValueError("logprobs: they are a part of the JSON; give --json, --gpus or --output with it.")
    for name in ("chat", "echo", "json", "table") if dealt(options) else ():
        if getattr(options, name):
            raise ValueError(f"{name}: --gpus and --output write a line of JSON for each sequence; leave --{name} out.")
    if sum((bool(options.prompt), options.file is not None, options.chat)) > 1:
        raise ValueError("prompt: give one of --prompt, --file and --chat.")


def check_choice(options: Generate) -> None:
    """Refuse what the decoder would refuse. This imports torch, which takes two seconds."""
    from ..decode.layer import GEMV_ROWS
    from ..decode.request import Choice
    from ..decode.stages.spread import SPLITS
    from .saved import explicit_sampling

    Choice(seed=options.seed, **explicit_sampling(options))
    if options.split is not None and options.split not in SPLITS:
        raise ValueError(f"split: got {options.split!r}, wanted {' or '.join(SPLITS)}.")
    if options.split == "tensors" and options.n > GEMV_ROWS:
        raise ValueError(
            f"n: got {options.n}, but --split tensors writes up to {GEMV_ROWS} sequences at once, and those of a prompt are "
            f"written together; give a smaller --n, or --split layers."
        )


def check_split(options: Generate) -> None:
    if options.split is None:
        return
    if options.output is not None:
        raise ValueError(
            "output: it takes what several copies of the model write, and --split has one copy; leave --output out."
        )
    if options.gpus == 1:
        raise ValueError("gpus: got 1, but with --split at least 2 share the model; leave --split out.")
    alone = {"weights": options.weights is not None, "speculate": options.speculate is not None, "no-fused": not options.fused}
    if name := next((name for name, given in alone.items() if given), None):
        raise ValueError(f"{name}: it is for a model on a single GPU; leave --{name} or --split out.")


def write(options: Generate, saved: "Saved", prompts: list[str]) -> int:
    """Every prompt's sequences, a batch after the other."""
    from .speed import Speed
    from .writer import Writer

    writer = Writer(options, saved, prompts)
    speed, found = Speed(saved.device), []
    for first in range(0, len(prompts), writer.together):
        run = writer.start(first)
        with speed.counting(), closing(run.play()) as pieces:
            if options.json:
                deque(pieces, maxlen=0)
            else:
                print_in_order(writer.rows(first), len(prompts) * options.n > 1, options, pieces, run.sequences)
        speed.add(run.result())
        found += writer.told(first, run.sequences)
    if options.json:
        about = {"model": str(saved.folder), "device": saved.where, "sequences": found}
        print(json.dumps(about | speed.as_dict(), indent=1))
    print(speed.line(), file=sys.stderr, flush=True)
    return 0


def print_in_order(
    rows: list[tuple[int, str, int]], many: bool, options: Generate, pieces: Iterator[tuple[int, str]], found: "list[Generated]"
) -> None:
    """Sequences on stdout one after the other: the first as it arrives, the next once it has ended."""
    safe = HARMLESS if sys.stdout.isatty() else {}
    waiting, last = [""] * len(rows), len(rows) - 1
    for at, (number, prompt, copy) in enumerate(rows):
        if many:
            which = f"{number + 1}.{copy + 1}" if options.n > 1 else str(number + 1)
            print(f"--- {which}: {prompt[:60]!r}{'...' if len(prompt) > 60 else ''}")
        if options.echo:
            print(prompt.translate(safe), end="")
        print(waiting[at].translate(safe), end="", flush=True)
        while at == last or not found[at].finish:
            row, piece = next(pieces, (None, ""))
            if row is None:
                break
            waiting[row] += piece
            if row == at:
                print(piece.translate(safe), end="", flush=True)
        print(flush=True)
