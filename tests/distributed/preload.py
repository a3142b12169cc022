"""What the server of tests/distributed/processes.py imports once, for all ranks that it forks."""

import gc

import torch._inductor.config  # torch.use_deterministic_algorithms imports it, in each rank for 0.45 s of CPU
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

import gpubound.train  # noqa: F401
import tests.conftest  # noqa: F401 - Triton's interpreter, before anything imports triton

gc.freeze()  # a rank's own collections would read, and so copy, all that it shares with the server: 0.2 s of CPU each
