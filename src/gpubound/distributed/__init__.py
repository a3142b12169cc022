"""One run in many processes, with PyTorch's own engine: torchrun's agent, NCCL and gloo, FSDP2, distributed checkpoints.

ranks.py                the rank of this process, communication between the hosts of all ranks, models wrapped in DDP
rendezvous.py           connect the processes of a run; versions that must agree; texts through the store
launch.py               start a command as several processes
failures.py             one sentence for the failure of a run; ends a run whose ranks do not make progress
all_reduce.py           all-reduce of gradients, bucket by bucket during backward, by NCCL or by copy engines
local_shard.py          the part of a tensor on this rank
fsdp.py                 shard a model with fully_shard, also one that fits no rank
sharded_checkpoint.py   tensors of several ranks on disk, read by any other number of ranks
"""

from .ranks import ALONE as ALONE, Ranks as Ranks, join as join
from .rendezvous import launched as launched
