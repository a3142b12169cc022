"""One run in many processes, with PyTorch's own engine: torchrun's agent, NCCL and gloo, FSDP2, distributed checkpoints.

ranks.py     which process this is, and how the processes of a run speak to each other
meeting.py   how they find each other, and what must be alike
launch.py    start a command as many processes
sharded.py   a model is dealt to the ranks, row by row
dealt.py     what a step knows of such a model
failing.py   one sentence for all of them when they fail
watchdog.py  who is behind when all wait
parting.py   what a rank that leaves tells those that wait for it
telling.py   what they tell the first when their script is over
wrapped.py   models that a script has wrapped for its ranks
copies.py    copies of one worker that wait for nobody
pieces.py    what a process holds of a tensor: all of it, or a shard
saved.py     tensors of many ranks on disk, and read by any other number of them
"""

from .ranks import ALONE as ALONE, Ranks as Ranks, join as join, launched as launched
