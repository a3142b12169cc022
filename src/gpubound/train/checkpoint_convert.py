"""From a checkpoint into a run's tensors, where one of them was or is sharded and the other is not.

Replicas keep 16-bit weights with fp32 masters behind them. The rows of a sharded model are fp32 and their own masters. So the
fp32 weights of one are called step.master.NAME, those of the other model.NAME.
"""

from torch import Tensor

from .checkpoint import Checkpoint

MASTER, MODEL = "step.master.", "model."
SCALE = "step.scale."  # of moments in 8 bits: by rank, so another number of ranks needs those of all


def convert_tensors(checkpoint: Checkpoint, live: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors by the names of `live`, each of which is filled where it lies; others come beside them."""
    there = checkpoint.shapes()
    weights = {name: MODEL + name.removeprefix(MASTER) for name in (*there, *live) if name.startswith(MASTER)}
    from_masters = {m: live[w] for m, w in weights.items() if m in there and m not in live and w in live}
    to_masters = {w: live[m] for m, w in weights.items() if m in live and m not in there and w in there}
    fitting = {name: tensor for name, tensor in live.items() if not name.startswith(SCALE)}
    tensors = checkpoint.tensors(like=fitting, but=tuple(from_masters))
    checkpoint.read(from_masters)
    checkpoint.read(to_masters)
    return tensors | {m: live[m] for m, w in weights.items() if w in to_masters}
