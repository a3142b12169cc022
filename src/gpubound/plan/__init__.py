"""What a training run will take, before it runs and without a GPU: memory, bytes on the wire, time, and the best way to cut it.

setting.py   one way to run a step: the model's outline, rows, recomputing, how many GPUs and how they share
kept.py      what backward finds kept, byte for byte
memory.py    memory of one GPU, part by part
wire.py      what the ranks send each other in a step, and how long that takes
pace.py      the time of a step, part by part
cards.py     the rates that the predictions stand on: measured ones, and named assumptions
propose.py   all ways to cut a step, and which of those that fit is fastest
check.py     the predictions beside committed measurements
"""

from .cards import CARDS as CARDS, Card as Card, Network as Network, card_named as card_named
from .propose import Proposal as Proposal, proposals as proposals
from .setting import Setting as Setting, setting_of as setting_of
