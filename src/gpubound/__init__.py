"""gpubound: makes PyTorch transformers GPU-bound, and proves it.

place(model)                   a model on its device, through verified fused parts; the table says what and why
doctor(step)                   what makes the GPU wait in a step: each line, its price, what to write instead
capture(fn, *inputs)           a CUDA graph with a certificate
watch(), no_stall()            count, or forbid, what makes the GPU wait for the host
decoder(model)                 generation from the live weights, k tokens a launch
feed(source), Corpus           data on the device
TrainStep(model, loss, ...)    the whole optimizer step
train(config, **keys)          a whole run, as gpubound train
rl.train(policy, prompts, rewards)    reinforcement learning, as gpubound rl
kernels                        the fast ops as plain functions
lora                           low-rank adapters over a frozen model
distributed                    one run in many processes
strict()                       forbids every fallback
limit("24 GB")                 uses no more of the GPU's memory, as on a smaller card
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import *  # noqa: F403
from .formatting import suggest_keywords as _suggest_keywords
from .trace import strict as strict
from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import distributed as distributed, kernels as kernels, lora as lora, rl as rl
    from .cli.train import train as train  # the package is called, see train/__init__.py
    from .data import Corpus as Corpus, Feed as Feed, feed as feed
    from .decode import Draft as Draft, FastDecoder as FastDecoder, decoder as decoder
    from .device import limit as limit
    from .doctor import doctor as doctor
    from .graph import Captured as Captured, Certificate as Certificate, capture as capture
    from .layers import BatchInvariant as BatchInvariant
    from .models import (
        Decoder as Decoder,
        DecoderConfig as DecoderConfig,
        DraftHead as DraftHead,
        RichardsConfig as RichardsConfig,
        RichardsDecoder as RichardsDecoder,
    )
    from .place import Placement as Placement, place as place
    from .train import AdamW as AdamW, Schedule as Schedule, TrainStep as TrainStep
    from .watch import Ledger as Ledger, no_stall as no_stall, watch as watch

# Imported when first used: torch takes two seconds, and the pytest plugin is loaded in projects that may never ask for it.
_HOMES = {
    **dict.fromkeys(("Corpus", "Feed", "feed"), "data"),
    **dict.fromkeys(("Draft", "FastDecoder", "decoder"), "decode"),
    "BatchInvariant": "layers",
    "limit": "device",
    "doctor": "doctor",
    **dict.fromkeys(("Captured", "Certificate", "capture"), "graph"),
    **dict.fromkeys(("Decoder", "DecoderConfig", "DraftHead", "RichardsConfig", "RichardsDecoder"), "models"),
    **dict.fromkeys(("Placement", "place"), "place"),
    **dict.fromkeys(("AdamW", "Schedule", "TrainStep"), "train"),
    **dict.fromkeys(("Ledger", "no_stall", "watch"), "watch"),
}

_PACKAGES = ("kernels", "lora", "distributed", "rl", "train")
_EAGER = ("data", "distributed", "lora")  # they import what they export

__all__ = sorted([*_HOMES, *_PACKAGES, *(name for name in dir() if name.endswith("Error")), "__version__", "strict"])


_RESULTS = (
    "Captured",
    "Certificate",
    "FastDecoder",
    "Feed",
    "Ledger",
    "Placement",
    "Ranks",
    "Stats",
    "StepResult",
    "StepValues",
)
"""classes that only the library calls, some in every step"""
_exported = set[Any]()


def _export(package: str, name: str, value: Any) -> Any:
    """Return a public function or class whose refusal of a misspelt keyword names the right one.

    A function is wrapped, and pickled by its name in the package. Of a class, what makes objects is: no call of an object."""
    if name in _RESULTS or not callable(value) or isinstance(value, ModuleType) or value in _exported:
        return value
    if isinstance(value, type):
        for key, member in list(vars(value).items()):
            if key == "__init__":
                setattr(value, key, _suggest_keywords(member, name))
            elif isinstance(member, classmethod | staticmethod) and not key.startswith("_"):
                setattr(value, key, type(member)(_suggest_keywords(member.__func__, f"{name}.{key}")))
    else:
        value = _suggest_keywords(value, name)
        value.__module__ = package
    _exported.add(value)
    return value


def _lazy(package: str, modules: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports its names, from these modules, when they are first used."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = _export(package, name, getattr(import_module(f".{modules[name]}", package), name))
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *modules})


class _Front(ModuleType):
    """This package as users see it. place, watch and doctor are functions here, although packages of these names hold
    them: importing a package binds it to its name in its parent, and that alone is left undone."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _EAGER and isinstance(value, ModuleType):
            names = [key for key in vars(value) if not key.startswith("_")]
            vars(value).update({key: _export(value.__name__, key, getattr(value, key)) for key in names})
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f".{name}", __name__)
        if name not in _HOMES:
            raise AttributeError(f"module 'gpubound' has no attribute {name!r}")
        value = _export(__name__, name, getattr(import_module(f".{_HOMES[name]}", __name__), name))
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Front
