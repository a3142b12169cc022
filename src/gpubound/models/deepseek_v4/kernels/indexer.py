"""Lightning indexer of DeepSeek-V4, which chooses the compressed entries that a token attends to.

    score_s = Σ_h w_h · ReLU(q_h · k_s) · scale        for each visible entry s

`index_topk` chooses the k entries of the largest scores. Neither op synchronises with the host.

Legend: N tokens, consecutive within a row; B rows, H heads, L entries of the store, D width of a head and of a key.
"""

import torch
from torch import Tensor

from ....kernels.checks import require
from ....kernels.decode_product import WRITTEN
from ....kernels.dispatch import implementation
from ....kernels.registry import definition, draw, ints, zeros

SEEN = "it says how many entries each token sees"


def index_scores(q: Tensor, keys: Tensor, weights: Tensor, limit: Tensor, scale: float, out: Tensor) -> Tensor:
    """Write scores to out (N, L) fp32: -inf from entry `limit` on. Zero scores are +0, so that ties have equal bits.

    q        (N, H, D)
    keys     (B, L, D): a row's entries, for its N / B tokens
    weights  (N, H) fp32
    limit    (N,) int32: entries from `limit` on are not read
    """
    device = keys.device
    require("index_scores", "keys", keys, None, ("rows", "entries", "width"), device, "an entry's key follows the other's")
    (B, L, D), N = keys.shape, len(q)
    require("index_scores", "q", q, keys.dtype, (N, "heads", D), device, "it has heads as wide as the keys")
    if N % B:
        raise ValueError(f"index_scores: q must have as many tokens for each of {B} rows of keys, got {N} tokens.")
    require("index_scores", "weights", weights, torch.float32, tuple(q.shape[:2]), device, "it has one for each head")
    require("index_scores", "limit", limit, torch.int32, (N,), device, SEEN)
    require("index_scores", "out", out, torch.float32, (N, L), device, WRITTEN)
    return implementation("index_scores", keys)(q, keys, weights, limit, scale, out)


@definition(lambda g: (*(draw(g, *s) for s in ((4, 3, 24), (2, 70, 24))), draw(g, 4, 3).detach(), *_seen(0, 70, 1, 66)))
@torch.no_grad()
def index_scores_reference(q: Tensor, keys: Tensor, weights: Tensor, limit: Tensor, scale: float, out: Tensor) -> Tensor:
    wide = torch.promote_types(keys.dtype, torch.float32)
    products = torch.einsum("bthd,bsd->bths", q.to(wide).unflatten(0, (len(keys), -1)), keys.to(wide)).flatten(0, 1)
    scores = (products.relu() * scale * weights[..., None]).sum(1) + 0.0
    hidden = torch.arange(keys.shape[1], device=keys.device) >= limit[:, None]
    return out.copy_(scores.masked_fill_(hidden, float("-inf")))


def index_topk(scores: Tensor, limit: Tensor, ids: Tensor) -> Tensor:
    """Write the indices of each row's k largest scores before `limit` to ids (N, k) int32, ascending and padded with -1.

    Ties go to the lower index, so the choice is the same in any shape and batch. A score of -inf is never chosen; NaN counts as
    the largest.

    scores  (N, L) fp32
    limit   (N,) int32: scores from `limit` on are not read
    """
    require("index_topk", "scores", scores, torch.float32, ("tokens", "entries"), scores.device, "index_scores writes it")
    require("index_topk", "limit", limit, torch.int32, (len(scores),), scores.device, SEEN)
    require("index_topk", "ids", ids, torch.int32, (len(scores), "slots"), scores.device, WRITTEN)
    return implementation("index_topk", scores)(scores, limit, ids)


@definition(lambda g: (draw(g, 4, 40).detach().round(decimals=1), ints(0, 40, 5, 39), ints(*[7] * 24).view(4, 6)))
@torch.no_grad()
def index_topk_reference(scores: Tensor, limit: Tensor, ids: Tensor) -> Tensor:
    places, slots = scores.shape[1], ids.shape[1]
    hidden = torch.arange(places, device=scores.device) >= limit[:, None]
    scores = scores.masked_fill(scores.isnan(), float("inf")).masked_fill(hidden, float("-inf"))
    found = scores.sort(dim=-1, descending=True, stable=True)
    place = torch.where(found.values > float("-inf"), found.indices, places)[:, :slots].sort(dim=-1).values
    ids[:, place.shape[1] :] = -1
    ids[:, : place.shape[1]] = torch.where(place < places, place, -1)
    return ids


def _seen(*limit: int) -> tuple:
    return ints(*limit), 0.25, zeros(len(limit), 70)
