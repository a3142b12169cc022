"""Models by their names on the Hugging Face hub: from transformers' cache, downloaded into it where it lacks one."""

import re
from importlib.util import find_spec
from pathlib import Path

from ..errors import DataError

NAME = re.compile(r"[\w.-]+/[\w.-]+")  # owner/model
FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")


def is_name(path: str | Path) -> bool:
    """Whether `path` could be a model's name. A folder of that name goes first."""
    return NAME.fullmatch(str(path)) is not None and ".." not in str(path) and not Path(path).parent.exists()


def download(name: str, trust_remote_code: bool = False) -> Path:
    """The folder in the cache that holds the model `name`."""
    if find_spec("huggingface_hub") is None:
        raise ValueError(
            f"{name}: there is no such folder, and a model of this name on the Hugging Face hub is read with transformers, "
            "which is not installed: pip install 'gpubound[hf]'."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[*FILES, *(["*.py"] if trust_remote_code else [])]))
    except GatedRepoError as error:
        raise DataError(f"{name}: the hub gives this model only to users it knows; accept its terms and log in.") from error
    except RepositoryNotFoundError as error:
        raise DataError(f"{name}: there is no such folder, and no such model on the Hugging Face hub.") from error
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"{name}: there is no such folder, the cache of the Hugging Face hub does not hold the model, and the hub cannot "
            "be reached; give the folder of a downloaded model."
        ) from error
    except Exception as error:  # the connection's own errors, of whichever library speaks to it
        raise DataError(f"{name}: the Hugging Face hub did not give the model ({type(error).__name__}: {error}).") from error
