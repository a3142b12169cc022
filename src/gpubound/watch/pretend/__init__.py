"""A pretend GPU, so that a project can assert "this step has no host sync" in CI on a machine without one.

    from gpubound.watch.pretend import simgpu

    device = simgpu()                     # torch.device("simgpu:0")
    model.to(device); batch.to(device)    # the values are right; the speed says nothing

Tensors there hold a CPU tensor and compute with it, but torch treats them as lying on a device of their own: mixing them
with CPU tensors is refused, reading a value needs a copy, and backward runs on a device thread, as on CUDA (on the calling
thread, if this process ran a backward before it called `simgpu()`). Every op, in whatever thread, is told to `observers` before
it runs.

Not pretended: streams (work runs in order), a generator of its own (the CPU's is used), `torch.empty(pin_memory=True)`
(`.pin_memory()` works), resizing in place, torch.compile, fused LSTM cells, DLPack. Tensors are saved as CPU tensors.
"""

from .backend import ready as ready
from .backend import simgpu as simgpu
from .tensor import NAME as NAME
from .tensor import SimTensor as SimTensor
from .tensor import observers as observers
