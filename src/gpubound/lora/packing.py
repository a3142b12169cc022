"""Packing: adapters whose weights are multiplied as one are stored as one matrix, all a by rows, and so all b.

One product then reads x for all of them, and one launch adds all of their gradients. Separate storage costs a concatenation for
each operand and a launch for each adapter's gradients: 3 launches and 8 concatenations more in a block of a Llama model.

`.to()`, `copy.deepcopy` and `load_state_dict(assign=True)` give every parameter its own storage. So the addresses are compared
at each product, and before a TrainStep lays out its flat buffers; separate parameters are moved next to each other again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..kernels.accumulate import join

ROWS, COLUMNS = 0, 1


def pack(parameters: Sequence[Tensor], dim: int = ROWS, force: bool = False) -> str | None:
    """Make the parameters slices of one matrix, along `dim`. Return None if they are, else the reason against moving them.

    force: move slices of a larger buffer, too, as before a TrainStep, which moves every parameter
    """
    if len(parameters) == 1 or join([p.detach() for p in parameters], beside=dim == COLUMNS) is not None:
        return None
    if (why := _immovable(parameters, force)) is not None:
        return why
    with torch.inference_mode(False), torch.no_grad():
        turned = [p.detach().t() if dim == COLUMNS else p.detach() for p in parameters]
        for p, rows in zip(parameters, torch.cat(turned).split([t.shape[0] for t in turned])):
            p.data = rows.t() if dim == COLUMNS else rows
    return None


def _immovable(parameters: Sequence[Tensor], force: bool) -> str | None:
    if any(type(p) is not nn.Parameter or p.is_inference() for p in parameters):
        return "some of them are no plain parameters"
    if len({(p.dtype, p.device) for p in parameters}) > 1:
        return "they differ in dtype or device"
    if len({id(p) for p in parameters}) < len(parameters):
        return "two of them share one parameter"
    if any(hasattr(p, "main_grad") for p in parameters):
        return "a TrainStep holds them in its buffers; make a new TrainStep"
    if any(hasattr(p, "ds_id") or hasattr(p, "_fsdp_flattened") for p in parameters):
        return "DeepSpeed or FSDP manages their memory"
    if any(p.device.type == "cpu" and p.is_shared() for p in parameters):
        return "they are in memory shared between processes"
    if any(p.is_cuda for p in parameters) and torch.cuda.is_current_stream_capturing():
        return "their memory was moved, and a graph is being captured; run the model once before the capture"
    if not force and any(p.untyped_storage().nbytes() != p.nbytes for p in parameters):
        return "they are slices of a larger buffer"
    return None
