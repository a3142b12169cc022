"""An objective is a file and a line in the registry: its name, its options, its loss, and what it says of held-out data."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from gpubound.train.objectives import OBJECTIVES, objective_named
from gpubound.train.objectives.causal_lm import NextToken

from ..runs import recipe, train

pytestmark = pytest.mark.usefixtures("on_reference", "one_thread")


@dataclass(eq=False)
class Share(NextToken):
    """A part of the next token's loss; validation reports the whole, and one figure more."""

    name: ClassVar[str] = "share"
    part: float = 1.0

    def __call__(self, model, batch, scale=None):
        return super().__call__(model, batch, torch.tensor(self.part) if scale is None else scale * self.part)

    def validate(self, model, batches):
        batches = list(batches)
        return {"held_out": super().validate(model, batches)["held_out"] / self.part, "batches": len(batches)}


@pytest.fixture
def share(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, Share.name, (__name__, Share.__name__))


def test_a_run_takes_any_objective_by_its_name(share, corpus, tmp_path):
    changes = {"steps": 2, "objective": "share", "objective_options": {"part": 0.25}}
    run, records = train(recipe(corpus, tmp_path / "share", **changes))
    plain, plain_records = train(recipe(corpus, tmp_path / "plain", steps=2))
    assert records[0]["loss"] == pytest.approx(plain_records[0]["loss"] / 4)
    assert records[0]["grad_norm"] == pytest.approx(plain_records[0]["grad_norm"] / 4, rel=1e-5)
    assert records[-1]["batches"] > 0 and records[-1]["held_out"] == run.evaluations[2]
    # AdamW's first update does not hang on the gradient's size, its second hardly does.
    assert run.evaluations[2] == pytest.approx(plain.evaluations[2], rel=1e-3)

    with pytest.raises(ValueError, match=r"objective_options was \{'part': 0.25\}, is \{'part': 0.5\}"):
        train(recipe(corpus, tmp_path / "share", **changes | {"steps": 3, "objective_options": {"part": 0.5}}), resume=True)
    again, _ = train(recipe(corpus, tmp_path / "share", **changes | {"steps": 3}), resume=True)
    assert again.done == 3


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("mask", {}, "recipe: objective: got 'mask', wanted one of next_token, share."),
        ("causal_lm", {}, "recipe: objective: got 'causal_lm', wanted one of next_token, share."),
        ("share", {"prt": 1.0}, "recipe: objective_options: 'prt' is no option of share; did you mean 'part'?"),
        ("next_token", {"part": 1.0}, "recipe: objective_options: 'part' is no option of next_token; its options are none."),
    ],
)
def test_refusals(share, name, options, sentence):
    with pytest.raises(ValueError) as error:
        objective_named(name, options)
    assert str(error.value) == sentence


def test_validation_is_the_mean_over_all_items_of_all_batches():
    class Known(NextToken):
        def __call__(self, model, batch, scale=None):
            return torch.tensor(float(sum(batch))), torch.tensor(len(batch))

    assert Known().validate(None, [[1, 2, 3], [6]]) == {"held_out": 3.0}
