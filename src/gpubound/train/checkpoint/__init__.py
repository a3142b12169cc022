"""Checkpoints of a run.

Checkpoints     the folder of a run's checkpoints: snapshot, write in the background, prune        checkpoints.py
Checkpoint      one checkpoint on disk                                                             checkpoints.py
files           state.json with sizes and checksums, and the safetensors file of one process       files.py
Staging         copies from the device to the host while training continues                        files.py
resume          RNG states of the ranks, and conversion between replicated and sharded tensors     checkpoints.py
"""

from .checkpoints import (
    Checkpoint as Checkpoint,
    Checkpoints as Checkpoints,
    joined as joined,
    open_checkpoint as open_checkpoint,
    path_from_here as path_from_here,
)
