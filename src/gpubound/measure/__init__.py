"""Measurement: timing, comparison with a peer, and the limits of this machine.

    time(fn)                      how long one thing takes: median and quartiles, warmed up, on the device's own clock
    compare({"ours": f, ...})     two or more callables, interleaved in random order, with an interval on their ratio
    ceilings()                    this machine's measured limits: the denominators of every percentage the project prints
    share(achieved, figure)       that percentage, never above 100: a limit that is passed is measured again
    mfu                           the share of a matrix rate that a step reaches

docs/comparison.md says how to use them and what each leaves out.
"""

from ..formatting import in_words as in_words
from .ceiling import (
    Ceilings as Ceilings,
    Machine as Machine,
    ceilings as ceilings,
    gpus as gpus,
    machine as machine,
    mfu as mfu,
    share as share,
    train_flops_per_token as train_flops_per_token,
)
from .timing import (
    Comparison as Comparison,
    Prepared as Prepared,
    Ratio as Ratio,
    Timing as Timing,
    Work as Work,
    compare as compare,
    compare_samples as compare_samples,
    run_once as run_once,
    time as time,
)
