"""Put a model on the device through verified kernels, and print what runs where.

The model is a Hugging Face folder or a function of yours that builds one; nothing is written back.
"""

import importlib.util
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..errors import DataError, PlaceError
from ..formatting import readable
from ..trace import notice
from . import arguments

if TYPE_CHECKING:
    import torch

MAX_LAYERS = 1024  # of a model without weights; the deepest published ones have some 130


@dataclass(frozen=True)
class PlaceOptions:
    """Put a model on the device through verified kernels, and print what runs where.

    TARGET is a folder with a config.json, MODULE:FUNCTION or FILE.py:FUNCTION. If the folder has no weights, random ones are
    placed. The function takes no arguments and returns a model, or a model and an example batch. Exit code 1: --strict was
    given, and a module was not swapped. 3: the model was placed, but not verified as a whole; the last line says why.

    Examples: gpubound place path/to/checkpoint --json
              gpubound place train:build_model --device require
    """

    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    """A checkpoint's folder, MODULE:FUNCTION or FILE.py:FUNCTION."""
    device: str = "auto"
    """Where to: auto, require, cpu, cuda or cuda:<index>."""
    dtype: str = "auto"
    """The parameters' dtype: auto (as stored), float32, bfloat16 or float16. Folders only."""
    fuse: bool = True
    """Swap modules for fused ones; --no-fuse only moves the model and runs it."""
    strict: bool = False
    """Fail when any module that could be swapped is not."""
    trust_remote_code: bool = False
    """Run the Python code that the model's folder brings. Only for folders that you trust: it can do what you can."""
    json: bool = False
    """Print one JSON document instead of the table."""


def main(argv: Sequence[str]) -> int:
    options = arguments(PlaceOptions, argv, "place")
    check_target(options.target)
    from ..place import place  # torch takes two seconds: options are read first

    model, example = load(options.target, options.dtype, options.trust_remote_code)
    try:
        placement = place(model, options.device, fuse=options.fuse, strict=options.strict, example=example)
    except PlaceError as error:
        print(f"gpubound place: {str(error).removeprefix('place: ')}", file=sys.stderr)
        return 1
    print(json.dumps(placement.as_dict(), indent=1) if options.json else placement)
    return 0 if placement.verified else 3


def check_target(target: str) -> None:
    module, _, function = target.partition(":")
    if not (Path(target) / "config.json").is_file() and not (module and function.isidentifier()):
        raise ValueError(f"target: got {target!r}, wanted a folder with a config.json, MODULE:FUNCTION or FILE.py:FUNCTION.")


def load(target: str, dtype: str = "auto", trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Return (model, example or None) of the target."""
    from ..models.folder import dtype_asked

    check_target(target)
    if (Path(target) / "config.json").is_file():
        return _from_folder(Path(target), dtype_asked(dtype), trust_remote_code), None
    if dtype != "auto":
        raise ValueError(f"--dtype {dtype} is for a folder's model; {target} builds its own: give it that dtype there.")
    built = call(target)
    if not isinstance(built, tuple):
        return built, None
    if len(built) != 2:
        raise ValueError(f"{target} returned a tuple of {len(built)}, wanted a model, or a model and an example batch.")
    return built


def _from_folder(folder: Path, dtype: "torch.dtype | None", trust_remote_code: bool) -> Any:
    import torch

    from ..models.folder import Beyond, attempt, needs_transformers, read_config
    from ..models.hf_loading import load_foreign
    from ..models.registry import family_of

    about, family = read_config(folder), family_of(str(folder))
    if not family.FOREIGN:
        return family.load(folder, "cpu", dtype)
    with suppress(Beyond):  # a model of another family, whose fields transformers knows
        if not family.config_of(about, folder).causal:  # LLaDA and Dream, which transformers does not have
            return family.load(folder, "cpu", dtype)
    needs_transformers(folder)
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return load_foreign(folder, torch.device("cpu"), dtype, trust_remote_code)
    notice(f"{folder} holds no weights: placing random ones.")
    return attempt(folder, lambda: _random(folder, about, dtype, trust_remote_code))


def _random(folder: Path, about: dict[str, Any], dtype: "torch.dtype | None", trust_remote_code: bool) -> Any:
    import torch
    from transformers import AutoConfig

    from ..measure import machine
    from ..models.folder import auto_class, layer_counts

    for name, layers in layer_counts(about):  # no tensors limit them: building a billion layers would not end
        if not 1 <= layers <= MAX_LAYERS:
            raise DataError(f"{folder / 'config.json'}: {name}: got {layers}, wanted 1 to {MAX_LAYERS}.")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    auto = auto_class(about)
    options = {"dtype": dtype or config.dtype, "trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        need = sum(p.nbytes for p in auto.from_config(config, **options).parameters())
    have = machine().host_memory_bytes
    if have is not None and need > have:  # some systems grant any amount, and kill the process that uses it
        raise DataError(
            f"{folder / 'config.json'} describes a model of {readable(need)}, and this machine has {readable(have)} of memory. "
            "Take a smaller configuration."
        )
    return auto.from_config(config, **options)


def call(target: str) -> Any:
    """Return the result of a call, without arguments, of what MODULE:NAME or FILE.py:NAME names.

    Modules are imported as `python -m` would, where the working directory comes first, and for a file its own folder.
    """
    where, _, name = target.rpartition(":")
    folder = str(Path(where).resolve().parent) if where.endswith(".py") else ""
    sys.path.insert(0, folder)
    try:
        return getattr(_run_file(where) if folder else import_module(where), name)()
    except (Exception, SystemExit) as error:  # the user's own code may raise anything, or end; the cause is kept
        raise ValueError(f"{target} raised {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)


def _run_file(file: str) -> Any:
    name = Path(file).stem
    while name in sys.modules:  # of another file
        name += "_"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # its name ends with .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
