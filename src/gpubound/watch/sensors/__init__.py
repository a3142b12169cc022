"""What the ledger listens to. Each sensor says what it counts, what it sees and what it is blind to; the ledger prints it.

kernels     Kineto           real launches, by driver call                        (asked for with launches="kernels")
allocator   statistics       cudaMalloc, cudaFree, retries, pinned allocations
gc          gc.callbacks     collector pauses
compiles    dynamo           every compilation
fallbacks   gpubound.trace   slow paths the library took
triton      launch hook      Triton launches
calls       wrapped calls    synchronize(), print(tensor)
simgpu      the device       everything on the pretend device, in every thread
dispatch    a mode           ops, copies, clones; syncs too where gputrace does not run
gputrace    torch's hooks    every sync that torch makes, in every thread        (asked for with gputrace=True)
"""

from .base import Sensor
from .gputrace import GpuTrace
from .kernels import Kernels, Triton
from .memory import Allocator
from .ops import Calls, Dispatch, SimGpu
from .runtime import Collector, Compiles, Fallbacks

# Started in this order and stopped in reverse: what synchronizes when it stops (Kineto) must not be heard by what counts syncs.
SENSORS: tuple[type[Sensor], ...] = (
    Kernels,
    Allocator,
    Collector,
    Compiles,
    Fallbacks,
    Triton,
    Calls,
    SimGpu,
    Dispatch,
    GpuTrace,
)

NAMES = tuple(sensor.name for sensor in SENSORS)
