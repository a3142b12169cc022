"""What the server of tests/parallel/processes.py imports once, for all ranks that it forks."""

import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

import gpubound.train  # noqa: F401
import tests.conftest  # noqa: F401 - Triton's interpreter, before anything imports triton
