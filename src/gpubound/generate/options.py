"""Options of `gpubound generate`, their checks, the prompts that they name, and the files of the saved model that they name: a
Hugging Face folder, a model's name on the hub, an adapter, or a run's checkpoint. This module does not import torch.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..errors import DataError
from ..files import read_json, reading
from ..formatting import shown

if TYPE_CHECKING:
    from ..train.checkpoint import Checkpoint


MAX_STEPS = 1024  # per launch: each is room in a buffer, and a text is shown launch by launch
VERIFY: dict[str, bool | str] = {"full": True, "quick": "quick", "none": False}


@dataclass(frozen=True)
class Generate:
    """Continue a text with a saved model, or chat with it.

    CKPT is a Hugging Face folder, a model's name on the Hugging Face hub, or the folder of a run of gpubound train or demo. The
    prompt comes from --prompt, --file or stdin. Generated text goes to stdout as it arrives; its speed goes to stderr.

    Examples: gpubound generate demo-run --prompt "def main(" --temperature 0.7
              gpubound generate demo-run --file prompts.txt --json
              gpubound chat path/to/checkpoint
              gpubound generate path/to/model --file a.jsonl --gpus 8 -o b.jsonl
              gpubound generate path/to/large --prompt "Once" --split tensors
    """

    ckpt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CKPT")]
    """A Hugging Face folder, a name on the hub (owner/model), a run's folder, or one of its checkpoints."""
    adapter: str | None = None
    """A folder with a low-rank adapter in PEFT's layout, which is merged into CKPT's weights. If CKPT itself is such a folder,
    its base is found by the name in it."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text to continue. Repeat the option for several texts."""
    file: str | None = None
    """A file of prompts, one a line; - is stdin. In a .jsonl each line is a text in quotes, or an object with a "prompt"."""
    whole: bool = False
    """Take the whole file as one prompt."""
    chat: bool = False
    """Hold a conversation in the model's chat template. Each reply sees the whole conversation."""
    system: str | None = None
    """The system message that the conversation begins with."""
    json: bool = False
    """Print one JSON document at the end, and no text before it."""
    echo: bool = False
    """Print each prompt before its continuation."""
    special: bool = False
    """Print special tokens such as <|endoftext|>."""
    max_new_tokens: int | None = None
    """How many tokens to generate: 256 by default, in a conversation as many as fit."""
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
    """Do not stop at the model's end of text."""
    seed: int = 0
    """Seed of the random draw: the same seed gives the same tokens."""
    n: int = 1
    """How many sequences to generate for each prompt."""
    logprobs: bool = False
    """Add the log-probability of each token to the JSON."""
    batch: int = 32
    """How many sequences to generate at once. The rest follow batch by batch."""
    max_length: int | None = None
    """The most tokens of a sequence, prompt included. The default is what the prompts need, up to the model's limit."""
    k: str = "auto"
    """Steps per launch: auto, or a number. A text is shown launch by launch. auto is 1 on a CPU and up to 32 on a GPU."""
    weights: str | None = None
    """int8, int4 or fp8: round the weights, so that each token reads less memory. Meant for GPUs."""
    cache: str | None = None
    """int8 or fp8: keep keys and values in 8 bits, which saves memory with long texts and many sequences."""
    speculate: int | None = None
    """Guess this many tokens from the text so far and check them in one step. The result is the same. Repetitive texts are
    generated faster."""
    gpus: int | None = None
    """Distribute the prompts over this many replicas of the model, one per GPU; with --device cpu, one per process. The output
    is one line of JSON for each sequence, in the order of the prompts, and independent of the number of replicas."""
    split: str | None = None
    """Share one model between the GPUs. layers: each has some layers, for a model that does not fit on one. tensors: each
    has a slice of every layer, so that a text comes sooner; up to 8 sequences at once. --gpus says how many GPUs; by default
    all that are visible."""
    out: Annotated[str | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = None
    """Write these lines to a file. An existing file is resumed."""
    device: str = "auto"
    """auto, require, cpu, cuda or cuda:<index>."""
    memory: str | None = None
    """Use no more of a GPU than a card of this size has: "8 GB", "7.5 GiB", or a number of GiB. With --weights a model that
    does not fit in its own precision stays in host memory, and only its rounded weights are on the GPU."""
    dtype: str = "auto"
    """auto (as saved), float32, bfloat16 or float16."""
    tokenizer: str | None = None
    """A folder whose tokenizer.json to use instead of the model's."""
    trust_remote_code: bool = False
    """Run the Python code that the model's folder brings. Only for folders that you trust: it can do what you can."""
    fused: bool = True
    """--no-fused runs transformers' forward instead of our kernels."""
    verify: str = "full"
    """How much the decoder checks of its tokens and logits before it generates: full, quick or none."""
    table: bool = False
    """Print on stderr which kernels run and what was checked."""
    denoising_steps: int | None = None
    """Masked diffusion: how often the model is run for an answer (default: once for each token)."""
    block: int | None = None
    """Masked diffusion: block size in tokens, filled from the left (default 32; the whole answer if not divisible by 32)."""
    threshold: float | None = None
    """Masked diffusion: each run writes every token of at least this probability, and one at least. Leave steps out then."""
    block_cache: bool = False
    """Masked diffusion: compute only the block, with cached keys and values of all else. Faster, and approximate."""

    @property
    def writes_lines(self) -> bool:
        """Return whether replicas of the model write lines of JSON."""
        return (self.split is None and self.gpus is not None) or self.out is not None


def check(options: Generate) -> None:
    """Raise ValueError for options that can be refused before a checkpoint is read."""
    for name in ("max_new_tokens", "n", "batch", "max_length", "denoising_steps", "block", "gpus"):
        value, least = getattr(options, name), 2 if name == "max_length" else 1
        if value is not None and value < least:
            raise ValueError(f"{name}: got {value}, wanted at least {least}.")
    if options.verify not in VERIFY:
        raise ValueError(f"verify: got {options.verify!r}, wanted one of {', '.join(VERIFY)}.")
    if options.k != "auto" and not (options.k.isdecimal() and 0 < int(options.k) <= MAX_STEPS):
        raise ValueError(f"k: got {options.k!r}, wanted auto or a number of steps a launch, 1 to {MAX_STEPS}.")
    for name, texts in (("prompt", options.prompt), ("stop", options.stop), ("system", (options.system or "",))):
        for text in texts:
            check_utf8(name, text)
    if options.chat and options.n > 1:
        raise ValueError(f"n: got {options.n}, but a conversation has one reply a turn; leave --n out.")
    if options.system is not None and not options.chat:
        raise ValueError("system: it begins a conversation; give --chat with it.")
    if options.whole and options.file is None:
        raise ValueError("whole: it takes a file as a single prompt; give --file with it.")
    if options.split is not None:
        if options.out is not None:
            raise ValueError("out: it is for replicas of the model, and --split has only one model; leave it out.")
        if options.gpus == 1:
            raise ValueError("gpus: got 1, but with --split at least 2 share the model; leave --split out.")
        single = {"weights": options.weights is not None, "speculate": options.speculate is not None}
        for name in (name for name, present in (single | {"no-fused": not options.fused}).items() if present):
            raise ValueError(f"{name}: it is for a model on a single GPU; leave --{name} or --split out.")
    if options.logprobs and not options.json and not options.writes_lines:
        raise ValueError("logprobs: they are a part of the JSON; give --json, --gpus or --out with it.")
    for name in ("chat", "echo", "json", "table") if options.writes_lines else ():
        if getattr(options, name):
            raise ValueError(f"{name}: --gpus and --out write a line of JSON for each sequence; leave --{name} out.")
    if sum((bool(options.prompt), options.file is not None, options.chat)) > 1:
        raise ValueError("prompt: give one of --prompt, --file and --chat.")


def read_prompts(options: Generate) -> list[str]:
    """Return the prompts of the command line, of a file or of stdin; none is empty."""
    if options.prompt:
        prompts, where = list(options.prompt), "prompt"
    elif options.file is not None:
        where = "stdin" if options.file == "-" else options.file
        text = "".join(stdin_lines()) if options.file == "-" else _read(options.file)
        if options.whole:
            prompts = [text.removesuffix("\n")]
        elif options.file.endswith(".jsonl"):
            lines = enumerate(text.split("\n"), 1)
            prompts = [_prompt_of(line, f"{where}:{number}") for number, line in lines if line.strip()]
        else:
            prompts = [line for line in text.split("\n") if line.strip()]
    elif not sys.stdin.isatty():
        prompts, where = ["".join(stdin_lines()).removesuffix("\n")], "stdin"
    else:
        raise ValueError("prompt: got none; give --prompt TEXT or --file FILE, pipe a text in, or --chat.")
    if not prompts or not all(prompts):
        raise ValueError(f"{where}: the prompt is empty; give it at least one character to go on from.")
    return prompts


def _prompt_of(line: str, where: str) -> str:
    """Return the prompt in a line of a .jsonl file; `where` is its position."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: nested a thousand deep
        message = f"{where}: {shown(line)} is not JSON ({error}); a .jsonl has a line of JSON for each prompt."
        raise ValueError(message) from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else entry
    if not isinstance(prompt, str):
        raise ValueError(f'{where}: {shown(line)} has no prompt; write {{"prompt": "..."}}, or a text in quotes.')
    if not prompt:
        raise ValueError(f"{where}: the prompt is empty; give it at least one character to go on from, or leave the line out.")
    check_utf8(where, prompt)
    return prompt


def _read(file: str) -> str:
    try:
        with reading(Path(file)):
            return Path(file).read_text(encoding="utf-8-sig")  # sig: without a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8: {error}; convert it first, as iconv -t utf-8 does.") from error


def check_utf8(where: str, text: str) -> None:
    """Raise ValueError for bytes that are not UTF-8: they reach Python as surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: is not a text in UTF-8 (at character {error.start + 1}); convert it first.") from error


def stdin_lines() -> Iterator[str]:
    """Yield every line of stdin, with its end."""
    try:
        for line in sys.stdin:
            check_utf8("stdin", line)
            yield line
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not a text in UTF-8: {error}.") from error


ADAPTER = "adapter_config.json"
WANTED = "wanted a Hugging Face folder, a model's name on the hub (owner/model), or a run of gpubound train or demo"
EXPORTS = ("model", "hf")  # where `demo` and `train --export hf` write the trained model
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # owner/model
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")


def find_source(path: str | Path, trust_remote_code: bool = False) -> "Path | Checkpoint":
    """Return the folder or checkpoint with the weights of `path`: of a run its export, or a later checkpoint.

    A model that is named by its hub name is downloaded first.
    """
    from ..train.checkpoint import Checkpoints, open_checkpoint
    from ..train.checkpoint.checkpoints import newer_export
    from ..train.checkpoint.files import STATE

    path = _download(str(path), trust_remote_code) if not Path(path).exists() and is_hub_name(path) else Path(path)
    check_path(path)
    if (path / STATE).exists():
        return open_checkpoint(path)
    exports = [path] if _is_model(path) else [path / name for name in EXPORTS if _is_model(path / name)]
    newest = newer_export(exports, Checkpoints(path / "checkpoints").latest() or Checkpoints(path).latest())
    if newest is None:
        raise ValueError(f"{path} holds neither a config.json nor a whole checkpoint; {WANTED}.")
    return newest


def _is_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.json", ADAPTER)) or any(folder.glob("*.gguf"))


def is_adapter(folder: Path) -> bool:
    """Return whether the folder holds an adapter without a model."""
    return (folder / ADAPTER).exists() and not (folder / "config.json").exists()


def base_of_adapter(adapter: Path) -> str:
    """Return the path or hub name of the model that the adapter belongs to."""
    base = read_json(adapter / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not (Path(base).exists() or is_hub_name(base)):
        raise DataError(f"{adapter}: the base of this adapter, {base}, is not there; give BASE --adapter {adapter}.")
    return base


def check_path(path: str | Path) -> None:
    """Raise ValueError unless `path` is a folder or may be a name on the hub."""
    if not Path(path).is_dir() and not (is_hub_name(path) and not Path(path).exists()):
        raise ValueError(f"{path}: {'this is a file' if Path(path).exists() else 'there is no such folder'}; {WANTED}.")


def is_hub_name(path: str | Path) -> bool:
    """Return whether `path` could be a model's name on the hub. A folder of that name takes precedence."""
    return HUB_NAME.fullmatch(str(path)) is not None and ".." not in str(path) and not Path(path).parent.exists()


def _download(name: str, trust_remote_code: bool) -> Path:
    """Return the folder in the hub's cache that holds the model `name`."""
    if find_spec("huggingface_hub") is None:
        raise ValueError(
            f"{name}: there is no such folder, and a model of this name on the Hugging Face hub is read with transformers, "
            "which is not installed: pip install 'gpubound[hf]'."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[*HUB_FILES, *(["*.py"] if trust_remote_code else [])]))
    except GatedRepoError as error:
        raise DataError(f"{name}: the hub gives this model only to users it knows; accept its terms and log in.") from error
    except RepositoryNotFoundError as error:
        raise DataError(f"{name}: there is no such folder, and no such model on the Hugging Face hub.") from error
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"{name}: there is no such folder, the cache of the Hugging Face hub does not hold the model, and the hub cannot "
            "be reached; give the folder of a downloaded model."
        ) from error
    except Exception as error:  # errors of whichever library makes the connection
        raise DataError(f"{name}: the Hugging Face hub did not give the model ({type(error).__name__}: {error}).") from error
