"""What autograd keeps of a forward of a model, counted by its own hooks."""

import torch

from gpubound.models.llama.decoder import Decoder
from gpubound.train.objectives.causal_lm import NextToken

ROWS, SEQ = 2, 16


def kept(model: Decoder) -> int:
    """Bytes of all storages that autograd saves in one forward, but for parameters, codes and the batch."""
    batch = {name: torch.randint(model.config.vocabulary, (ROWS, SEQ)) for name in ("input_ids", "labels")}
    objective, scale = NextToken(), torch.ones(())
    objective.prepare(model, batch)
    angles = model.model.rope.first(SEQ, torch.device("cpu"))  # the model's own table
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch.values(), *angles, scale)}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (where := tensor.untyped_storage().data_ptr()) not in known:
            saved[where] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total, _ = objective(model, batch, scale=scale)
    size = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del total
    return size
