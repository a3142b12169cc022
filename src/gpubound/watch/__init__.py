"""Count, or forbid, what makes the GPU wait for the host.

    with watch() as ledger: ...      counts syncs, copies, launches, allocations, ... each with the user's line
    with no_stall(): ...             raises at the line where the host would wait
    pretend.simgpu()                 a pretend GPU, so that both work in CI on a machine without one
    pytest_plugin                    the fixture host_budget

The names below are imported when they are first used: pytest loads this package as a plugin before anyone chose how torch
and Triton start.
"""

from typing import TYPE_CHECKING

from .. import _lazy

if TYPE_CHECKING:
    from .guard import no_stall
    from .ledger import Ledger, watch

__all__ = ["Ledger", "no_stall", "watch"]
__getattr__, __dir__ = _lazy(__name__, {"Ledger": "ledger", "watch": "ledger", "no_stall": "guard"})
