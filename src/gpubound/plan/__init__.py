"""What a training run will take, before it runs and without a GPU: memory, bytes on the wire, time, and the best way to cut it.

setting.py   one way to run a step: the model's outline, rows, recomputing, how many GPUs and how they share
reading.py   a recipe read as a setting
kept.py      what backward finds kept, byte for byte
memory.py    memory of one GPU, part by part
wire.py      what the ranks send each other in a step, and how long that takes
pace.py      the time of a step, part by part
cards.py     the rates that the predictions stand on: measured ones, and named assumptions
lora*.py     what the same are where low-rank adapters train over a frozen model
allocator.py what torch's allocator holds between tensors that stay
propose.py   all ways to cut a step, and which of those that fit is fastest
check.py     the predictions beside committed measurements
"""

from . import lora_memory as lora_memory, lora_pace as lora_pace
from .cards import CARDS as CARDS, Card as Card, Network as Network, card_named as card_named
from .propose import Proposal as Proposal, proposals as proposals
from .reading import setting_of as setting_of
from .setting import Setting as Setting
