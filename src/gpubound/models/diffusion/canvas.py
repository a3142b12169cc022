"""The rows that a masked diffusion model fills, on the device, and one step that fills them further.

Legend: B rows, T places of a row, N places of a block, V words.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...decode.request import Choice, check_count, draws, to_device
from ...graph import Captured
from ...kernels import sample
from ...kernels.sampling import Into, Rows, Settings
from ...layers.embedding_and_head import head_of
from ..language_model import hidden_of, logits_of, told_places, told_time


@dataclass(frozen=True)
class Filling:
    """How an answer is filled: `reveals[s]` tokens of the block that begins `begins[s]` places behind the prompt, in step s."""

    tokens: int
    block: int
    begins: list[int]
    reveals: list[int]

    @property
    def block_ends(self) -> list[bool]:
        return [s + 1 == len(self.begins) or self.begins[s + 1] > begin for s, begin in enumerate(self.begins)]


def filling(tokens: int, steps: int | None, block: int | None) -> Filling:
    """`steps` in all, shared by the blocks; earlier ones get what is left over. None: a step for each token."""
    check_count("tokens", tokens)
    steps, block = tokens if steps is None else steps, tokens if block is None else block
    check_count("steps", steps)
    check_count("block", block)
    if tokens % block:
        raise ValueError(f"generate: block: got {block}, wanted a number that divides the {tokens} tokens to write.")
    count = tokens // block
    if not count <= steps <= tokens:
        raise ValueError(
            f"generate: steps: got {steps}, wanted {count} to {tokens}: at least one for each block of {block} tokens, and at "
            f"most one for each token."
        )
    begins, reveals = list[int](), list[int]()
    for number in range(count):
        own = _share(steps, count, number)
        begins += [number * block] * own
        reveals += [_share(block, own, step) for step in range(own)]
    return Filling(tokens, block, begins, reveals)


def _share(whole: int, parts: int, part: int) -> int:
    return whole // parts + (part < whole % parts)


class Canvas:
    """The rows of a shape on the device, and one step that fills them further."""

    def __init__(self, sampler: Any, rows: int, places: int, tokens: int, block: int, padded: bool, guided: bool):
        self.sampler, self.tokens, self.block, self.padded, self.guided = sampler, tokens, block, padded, guided
        device = sampler.device
        self.ids = torch.zeros(rows, places, device=device, dtype=torch.int64)
        self.start = torch.zeros(rows, 1, device=device, dtype=torch.int64)  # where a row's answer begins
        self.begins, self.reveals = torch.zeros(2, tokens, device=device, dtype=torch.int64)
        self.number = torch.zeros(1, device=device, dtype=torch.int64)  # of the step
        self.guidance = torch.zeros((), device=device, dtype=torch.float32)
        each = rows * block
        off = {name: torch.zeros(each, device=device, dtype=torch.float32) for name in ("temperature", "min_p")}
        on = {name: torch.ones(each, device=device, dtype=torch.float32) for name in ("top_p", "penalty")}
        top_k, row = torch.zeros(2, each, device=device, dtype=torch.int32)
        self.settings = Settings(**off, **on, top_k=top_k, row=row, seed=torch.zeros(each, device=device, dtype=torch.int64))
        self.stops = torch.full((1,), -1, device=device, dtype=torch.int32)
        self.lane = torch.arange(block, device=device)
        self.place = torch.arange(places, device=device)
        self.graph: Captured | None = None

    def fill(self, prompts: list[list[int]], how: Filling, choice: Choice, guidance: float) -> None:
        """Write a request: a few small copies, for none of which the host waits."""

        def write(target: Tensor, values: list) -> None:
            target.copy_(to_device(torch.tensor(values, dtype=target.dtype, device="cpu"), target.device))

        masks, width, steps = [self.sampler.mask_token] * self.tokens, self.ids.shape[1], len(how.begins)
        rows = [[*prompt, *masks] for prompt in prompts]
        write(self.ids, [row + [0] * (width - len(row)) for row in rows])
        write(self.start, [[len(prompt)] for prompt in prompts])
        write(self.begins[:steps], how.begins)
        write(self.reveals[:steps], how.reveals)
        write(self.settings.row, [row for row in draws(prompts) for _ in range(self.block)])
        self.number.zero_()
        self.guidance.fill_(guidance)
        self.settings.temperature.fill_(choice.temperature)
        self.settings.seed.fill_(choice.seed)

    def tensors(self) -> list[Tensor]:
        """All that a step reads or writes beside the model."""
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return [*own, *(t for t in self.settings if t is not None), self.sampler.barred]

    @torch.no_grad()
    def step(self) -> None:
        """The model once, and the surest tokens written."""
        number = self.number.clamp(max=self.tokens - 1)  # what a capture tries goes on behind the last
        at_BN = self.start + self.begins[number] + self.lane
        logits_BNV = self._logits(at_BN).float() + self.sampler.barred
        now_BN = self.ids.gather(1, at_BN)
        masked = now_BN == self.sampler.mask_token
        drawn, sureness = self._draw(logits_BNV.flatten(0, 1), masked.flatten(), number)
        drawn, known = drawn.view(now_BN.shape).long(), masked & (drawn >= 0).view(now_BN.shape)
        order = torch.where(known, sureness.view(now_BN.shape), -torch.inf).argsort(dim=1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(1, order, self.lane.expand_as(order))
        written = torch.where(known & (rank < self.reveals[number]), drawn, now_BN)
        self.ids.scatter_(1, at_BN, written)
        self.number.add_(1)

    def _logits(self, at_BN: Tensor) -> Tensor:
        """Of the places at_BN; under guidance, moved away from what is likely without the prompt."""
        if not self.guided:
            return self._ask(self.ids, at_BN)
        bare = self.ids.masked_fill(self.place < self.start, self.sampler.mask_token)
        told, free = self._ask(torch.cat([self.ids, bare]), at_BN.repeat(2, 1)).chunk(2)
        return told + self.guidance * (told - free)

    def _ask(self, ids: Tensor, at: Tensor) -> Tensor:
        model, start = self.sampler.model, self.start.repeat(len(ids) // len(self.start), 1)
        masks = (ids == self.sampler.mask_token) & (self.place >= start)
        inputs = {"input_ids": ids} | told_time(model, masks.sum(1) / self.tokens)
        if self.padded:
            inputs |= told_places(model, self.place < start + self.tokens)
        if self.sampler.whole:
            return _at(logits_of(model, inputs), at)
        return head_of(model)(_at(hidden_of(model, inputs), at))

    def _draw(self, logits: Tensor, masked: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """(a token for each masked row of `logits`, else -1; its log-probability). A draw hangs on the seed, the number of the
        row and of the step, and the place in the answer."""
        count, zero = len(logits), torch.zeros(len(logits), device=logits.device, dtype=torch.int32)
        lane = (self.begins[number] + self.lane).repeat(count // self.block)
        position = (number * self.tokens + lane).int()
        emitted, sureness = zero.clone(), torch.zeros(count, device=logits.device, dtype=torch.float32)
        rows = Rows(zero.clone(), position, masked.int(), torch.full_like(zero, 2**31 - 1), zero.clone(), self.stops)
        sample(logits, rows, self.settings, Into(emitted), sureness)
        return emitted, sureness


def _at(x: Tensor, at: Tensor) -> Tensor:
    """The places `at` (B, N) of x (B, T, width)."""
    return x.gather(1, at[..., None].expand(*at.shape, x.shape[-1]))
