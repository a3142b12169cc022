"""Training: the optimizer step as one call, and the parts it is made of, each usable alone on any nn.Module.

    gpubound.train(config, **keys) trains as the command `gpubound train` does            cli/train.py
    TrainStep      micro-batches in, weights updated, a launch a micro-batch, if captured    step.py
    AdamW, Muon    the numbers of an optimizer                                  adamw.py
    Schedule       learning rates, counted in updates                                         schedule.py
    Accumulators   exact fp32 gradient sums in one flat buffer, as parameter.main_grad        accumulate.py
    StepResult     device scalars; read() gives StepValues without holding the device up      device_step.py

docs/training.md tells how they fit together.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import _lazy

if TYPE_CHECKING:
    from .accumulate import Accumulators as Accumulators
    from .adamw import AdamW as AdamW, AdamW8bit as AdamW8bit, Muon as Muon
    from .device_step import StepResult as StepResult, StepValues as StepValues
    from .schedule import Schedule as Schedule
    from .step import TrainStep as TrainStep

# Imported when first used: commands read a recipe's options from this package before they import torch.
_MODULES = {
    "Accumulators": "accumulate",
    "AdamW": "adamw",
    "AdamW8bit": "adamw",
    "Muon": "adamw",
    "Schedule": "schedule",
    "StepResult": "device_step",
    "StepValues": "device_step",
    "TrainStep": "step",
}

__all__ = list(_MODULES)
__getattr__, __dir__ = _lazy(__name__, _MODULES)


class _Callable(ModuleType):
    """This package, which `gpubound.train(...)` calls as a function."""

    def __call__(self, *arguments: Any, **keys: Any) -> Any:
        return import_module("gpubound.cli.train").train(*arguments, **keys)


sys.modules[__name__].__class__ = _Callable
