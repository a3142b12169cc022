"""Steps of a masked diffusion request: which block each fills, how many tokens it writes, and which positions it computes."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...decode.request import check_count


@dataclass(frozen=True)
class FillSchedule:
    """Steps of a request: step s writes `reveals[s]` tokens of the block that begins `begins[s]` positions after the prompt."""

    tokens: int
    block: int
    begins: list[int]
    reveals: list[int]
    threshold: float | None = None  # probability of tokens that any step writes; a full block skips the rest of its steps
    refresh: int | None = 1  # steps of a block after which all positions are computed; None: at its first step alone

    def by_block(self) -> Iterator[tuple[int, range]]:
        """Yield (where a block begins, numbers of its steps)."""
        for begin in range(0, self.tokens, self.block):
            first = self.begins.index(begin)
            yield begin, range(first, first + self.begins.count(begin))

    def refreshes(self, number: int) -> bool:
        """Return whether a step, counted in its block, computes all positions."""
        return number == 0 if self.refresh is None else number % self.refresh == 0

    @property
    def partial(self) -> bool:
        """True if some step computes the block's positions alone."""
        return any(not self.refreshes(number) for _, numbers in self.by_block() for number in range(len(numbers)))


def fill_schedule(
    tokens: int, steps: int | None, block: int | None, threshold: float | None = None, refresh: int | None = 1
) -> FillSchedule:
    """Split `steps` among the blocks, and the tokens of a block among its steps. None: a step per token, one block."""
    check_count("tokens", tokens)
    if threshold is not None and steps is not None:
        raise ValueError(
            f"generate: steps: got {steps}, but with a threshold they follow from the probabilities; leave one out."
        )
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"generate: threshold: got {threshold!r}, wanted a probability above 0, and 1 at most.")
    steps, block = tokens if steps is None else steps, tokens if block is None else block
    check_count("steps", steps)
    check_count("block", block)
    if refresh is not None:
        check_count("refresh", refresh)
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
        block_steps = _share(steps, count, number)
        begins += [number * block] * block_steps
        reveals += [_share(block, block_steps, step) for step in range(block_steps)]
    return FillSchedule(tokens, block, begins, reveals, threshold, refresh)


def _share(total: int, parts: int, part: int) -> int:
    return total // parts + (part < total % parts)
