"""What an objective is: what a run minimises, and what it reports of the held-out data."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor


class Objective:
    """(model, batch) -> (sum of the losses of all items that count, their number), both on the device.

    A subclass is a dataclass in a file of its own here, and a line in OBJECTIVES (objectives/__init__.py). Its fields are its
    options: a recipe gives them as `objective_options`. A batch holds device tensors, so nothing here may wait for the device
    but `prepare` and `validate`.
    """

    name: ClassVar[str]
    of_corpus: ClassVar[bool] = True  # whether it takes batches as a Corpus cuts them: the labels are the next tokens

    def __call__(self, model: Any, batch: Any, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`scale` multiplies the sum. Training always gives one: gradients that are made in forward hold it, and backward then
        begins with 1."""
        raise NotImplementedError

    def prepare(self, model: Any, batch: Any) -> None:
        """Called before the step is captured: what must read the device once happens here."""

    def validate(self, model: Any, batches: Iterable[Any]) -> dict[str, float]:
        """What a record says of the held-out data. `held_out` is what the best weights are chosen by, the lower the better.

        Here it is the mean of the training's own loss.
        """
        total, count = torch.zeros(2, dtype=torch.float64)
        for batch in batches:
            loss, items = self(model, batch)
            total, count = total.to(loss.device) + loss.double(), count.to(loss.device) + items.double()
        return {"held_out": (total / count).item()}
