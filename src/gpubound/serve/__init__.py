"""Many adapters on one base model, sampled and trained in one process, from Python or over HTTP.

    Policies       adapters by name, each with its optimizer: forward_backward, optim_step, sample, save_state    policies.py
    Server         the same calls as a local HTTP service, which the command `gpubound serve` runs               server.py
    Client         the same calls from another process; it needs the standard library alone                      client.py

docs/rl.md has the calls.
"""

from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .client import Client as Client
    from .policies import Policies as Policies
    from .server import Server as Server

_MODULES = {"Client": "client", "Policies": "policies", "Server": "server"}  # imported when first used: a client needs no torch

__all__ = list(_MODULES)
__getattr__, __dir__ = _lazy(__name__, _MODULES)
