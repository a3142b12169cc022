"""Generation from the live weights: gpubound.decoder(model), and of masked diffusion models MaskedSampler."""

from importlib import import_module
from typing import Any

from .generate import FastDecoder as FastDecoder, decoder as decoder
from .request import Generation as Generation
from .rollout import Rollout as Rollout
from .rollout_request import RolloutSequence as RolloutSequence
from .speculation import Draft as Draft


def __getattr__(name: str) -> Any:
    if name == "MaskedSampler":  # of a family, above this package
        return import_module("gpubound.models.diffusion").MaskedSampler
    raise AttributeError(f"module 'gpubound.decode' has no attribute {name!r}")
