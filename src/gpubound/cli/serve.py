"""Train and sample many adapters of one model over HTTP.

gpubound serve path/to/base               on this machine alone, at port 8400
gpubound serve path/to/base --base nf4    the frozen weights in 4 bits
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..files import read_text
from ..generate.options import check_path
from ..serve.client import PORT, TOKEN, check_address
from . import arguments

LARGEST_TOKEN = 4096  # bytes of its file


@dataclass(frozen=True)
class Serve:
    """Serve a frozen base model, of which clients train and sample low-rank adapters: create, forward_backward, optim_step,
    sample, save_state and load_state, each by an HTTP request, in the order of their arrival.

    Ctrl-C finishes the call that runs, and prints which adapters have updates that are not saved.

    Examples: gpubound serve path/to/base --max-length 2048
              gpubound serve path/to/base --host 0.0.0.0 --token-file token.txt
    """

    ckpt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="BASE")]
    """A Hugging Face folder, a name on the hub (owner/model), or a run's folder."""
    host: str = "127.0.0.1"
    """The address to listen at. Any but this machine's own needs a token."""
    port: int = PORT
    """The port; 0 takes a free one, which is printed."""
    token_file: str | None = None
    """A file with the token that clients must send. Otherwise the environment variable GPUBOUND_TOKEN, if it is set."""
    folder: str = "policies"
    """The folder in which clients save adapters, and from which they load them."""
    base: str | None = None
    """Quantise the frozen weights: nf4, int8 or fp8."""
    max_length: int = 1024
    """The most tokens of a prompt with its answer."""
    max_batch: int = 64
    """Sequences that are sampled at once; their keys and values stay in memory."""
    rows: int | None = None
    """Rows of --max-length tokens that the model learns from at once; by default as many as have 8,192 tokens."""
    precision: str = "auto"
    """Of the adapters: auto (bf16 on a GPU, else fp32), fp32, tf32 or bf16."""
    graph: str = "auto"
    """Run the training as CUDA graphs: auto (where it can be), require, or off."""
    device: str = "auto"
    """auto, require, cpu, cuda or cuda:<index>."""


def main(argv: Sequence[str]) -> int:
    options = arguments(Serve, argv, "serve")
    for name, least in (("max_length", 2), ("max_batch", 1), ("port", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')}: got {getattr(options, name)}, wanted {least} or more.")
    check_path(options.ckpt)
    token = os.environ.get(TOKEN)
    if options.token_file is not None:
        token = read_text(Path(options.token_file), "write a token into it", LARGEST_TOKEN).strip()
        if not token:
            raise ValueError(f"--token-file: {options.token_file} is empty; write a token into it.")
    check_address(options.host, options.port, token)
    from .. import lora, place  # torch takes two seconds: options are read first
    from ..device import resolve
    from ..generate.batches import open_saved
    from ..serve import Policies, Server
    from ..trace import say

    saved = open_saved(options.ckpt, resolve(options.device))
    place(saved.model)
    if options.base is not None:
        lora.quantize_base(saved.model, options.base)
    length = min(options.max_length, saved.positions or options.max_length)
    policies = Policies(
        saved.model, saved.tokenizer, length, options.max_batch, options.rows,
        options.precision, options.graph, ends=saved.checked_ends(),
    )  # fmt: skip
    server = Server(policies, options.host, options.port, token, options.folder)
    say(f"serve: {Path(options.ckpt).name} at {server.address}{'' if token else ', without a token'}; Ctrl-C ends it.")
    server.serve()
    return 0
