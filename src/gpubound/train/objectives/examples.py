"""Sums over the examples of a batch, and each token's share of them. An example is a row, or a part of a packed row."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Examples:
    """The examples of a batch, S in all. A packed row has room for as many as the fullest one holds, a multiple of `group`.

    present  (S,), whether there is such an example
    """

    def __init__(self, inputs: Mapping[str, Any], labels: Tensor, group: int = 1):
        self.labels, self.member, self.present = labels, None, labels.new_ones(len(labels), dtype=torch.bool)
        if "segment_ids" in inputs:
            rows, segments = len(labels), inputs["segment_ids"]
            most = (len(inputs["cu_seqlens"]) - 1) // rows if "cu_seqlens" in inputs else labels.shape[1]
            numbers = torch.arange(most + -most % group, device=labels.device)
            self.member = segments.unsqueeze(1) == numbers.unsqueeze(1)  # (rows, examples of a row, tokens)
            self.segments = segments.clamp_min(0)
            self.present = self.member.any(-1).flatten()

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of values (B, T) over each example (S,). Ratios are small differences of large sums."""
        if self.member is None:
            return values.sum(1, dtype=torch.float64)
        return torch.where(self.member, values.unsqueeze(1), 0).sum(-1, dtype=torch.float64).flatten()

    def at_tokens(self, values: Tensor) -> Tensor:
        """Return the value of each token's example (B, T)."""
        if self.member is None:
            return values.unsqueeze(1).expand(self.labels.shape).contiguous()
        return values.view(len(self.labels), -1).gather(1, self.segments)
