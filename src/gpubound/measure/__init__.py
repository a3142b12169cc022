"""Honest measurement: timing, comparison beside a peer, and what this machine can do at best.

    time(fn)                      how long one thing takes: median and quartiles, warmed up, on the device's own clock
    compare({"ours": f, ...})     two or more things in turn, in random order, with an interval on their ratio
    ceilings()                    this machine's measured limits: the denominators of every percentage the project prints
    share(achieved, figure)       that percentage, never above 100: a limit that is passed is measured again
    bandwidth, rate, mfu          the arithmetic between seconds and those percentages

docs/measuring.md says how to use them and what each leaves out.
"""

from ..words import in_words as in_words
from .ceiling import Ceilings as Ceilings
from .ceiling import bandwidth as bandwidth
from .ceiling import ceilings as ceilings
from .ceiling import mfu as mfu
from .ceiling import rate as rate
from .ceiling import share as share
from .ceiling import train_flops_per_token as train_flops_per_token
from .comparison import Comparison as Comparison
from .comparison import Ratio as Ratio
from .comparison import compare as compare
from .comparison import compare_samples as compare_samples
from .limits import Machine as Machine
from .limits import gpus as gpus
from .limits import machine as machine
from .timing import Prepared as Prepared
from .timing import Timing as Timing
from .timing import Work as Work
from .timing import run_once as run_once
from .timing import time as time
