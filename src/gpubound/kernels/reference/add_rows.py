import torch
from torch import Tensor


@torch.no_grad()
def add_rows(table: Tensor, ids: Tensor, rows: Tensor, without: int) -> Tensor:
    """table[ids[i]] += rows[i] for every i, in the table's own dtype and in place, but where ids[i] is `without`.

    An id that is neither `without` nor in the table makes the table's first row NaN.
    """
    ids, rows = ids.flatten().long(), rows.reshape(-1, rows.shape[-1]).to(table.dtype)
    left_out, inside = ids == without, (ids >= 0) & (ids < len(table))
    rows = rows.masked_fill(left_out[:, None], 0).masked_fill(~(left_out | inside)[:, None], torch.nan)
    ids = torch.where(inside, ids, 0)
    # On a GPU index_add_ adds by atomics, in another order at every run.
    return table.index_put_((ids,), rows, accumulate=True) if table.is_cuda else table.index_add_(0, ids, rows)
