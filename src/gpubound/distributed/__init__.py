"""One run in many processes, with PyTorch's own engine: torchrun's agent, NCCL and gloo, FSDP2, distributed checkpoints.

ranks.py                the rank of this process, and communication between the hosts of all ranks
rendezvous.py           how ranks find each other, and which versions must agree
launch.py               start a command as several processes
fsdp.py                 shard a model with fully_shard
fsdp_model.py           the shards of a model, as a training step uses them
deferred_init.py        initial weights of a model that fits no rank
local_shard.py          the part of a tensor on this rank
sharded_checkpoint.py   tensors of several ranks on disk, read by any other number of ranks
all_reduce.py           sums of gradients, bucket by bucket during backward
symmetric_memory.py     the same sums by copies between GPUs
collective_capture.py   CUDA graphs with collectives, captured on all ranks or on none
watchdog.py             end a run whose ranks do not make progress
failures.py             one sentence for the failure of a run
exit_messages.py        messages of a rank that leaves, for ranks that wait for it
store_messages.py       texts of all ranks for the first, through the rendezvous store
ddp_unwrap.py           models that a script has wrapped in DistributedDataParallel
worker_pool.py          independent worker processes
"""

from .ranks import ALONE as ALONE, Ranks as Ranks, join as join, launched as launched
