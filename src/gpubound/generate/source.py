"""Find the files of a saved model: a Hugging Face folder, a model's name on the hub, an adapter, or a run's checkpoint."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError
from ..files import read_json

if TYPE_CHECKING:
    from ..train.checkpoint import Checkpoint

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
    from ..train.checkpoint.files import STATE
    from ..train.export_metadata import newer

    path = _download(str(path), trust_remote_code) if not Path(path).exists() and is_hub_name(path) else Path(path)
    check_path(path)
    if (path / STATE).exists():
        return open_checkpoint(path)
    exports = [path] if _is_model(path) else [path / name for name in EXPORTS if _is_model(path / name)]
    newest = newer(exports, Checkpoints(path / "checkpoints").latest() or Checkpoints(path).latest())
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
