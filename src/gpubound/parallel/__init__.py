"""One run in many processes, with PyTorch's own engine: torchrun's agent, NCCL and gloo, FSDP2, distributed checkpoints.

ranks.py    which process this is, and how the processes of a run speak to each other
"""

from .ranks import ALONE as ALONE, Ranks as Ranks, join as join, launched as launched
