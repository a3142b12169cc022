"""An objective is a file and a line in the registry: its name, its options, its loss, and what it says of held-out data."""

from dataclasses import dataclass

import pytest
import torch

from gpubound.train.objectives import OBJECTIVES, Objective, objective_named
from gpubound.train.objectives.word_loss import NextToken
from tests.messages import message

from ..runs import recipe, train

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(eq=False)
class Share(NextToken):
    """A part of the next token's loss; validation reports the whole, and one figure more."""

    part: float = 1.0

    def __call__(self, model, batch, scale=None):
        return super().__call__(model, batch, torch.tensor(self.part) if scale is None else scale * self.part)

    def validate(self, model, batches):
        batches = list(batches)
        return {"held_out": super().validate(model, batches)["held_out"] / self.part, "batches": len(batches)}


@pytest.fixture
def share(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "share", (__name__, Share.__name__))


@pytest.mark.slow
def test_a_run_takes_any_objective_by_its_name(share, corpus, tmp_path):
    changes = {"steps": 2, "objective": "share", "objective_options": {"part": 0.25}}
    run, records = train(recipe(corpus, tmp_path / "share", **changes))
    plain, plain_records = train(recipe(corpus, tmp_path / "plain", steps=2))
    assert records[0]["loss"] == pytest.approx(plain_records[0]["loss"] / 4)
    assert records[0]["grad_norm"] == pytest.approx(plain_records[0]["grad_norm"] / 4, rel=1e-5)
    assert records[-1]["batches"] > 0 and records[-1]["held_out"] == run.evaluations[2]
    # AdamW's first update does not hang on the gradient's size, its second hardly does.
    assert run.evaluations[2] == pytest.approx(plain.evaluations[2], rel=1e-3)

    with pytest.raises(ValueError, check=message("train/objectives/objective:a_run_takes_any_objectiv")):
        train(recipe(corpus, tmp_path / "share", **changes | {"steps": 3, "objective_options": {"part": 0.5}}), resume=True)
    again, _ = train(recipe(corpus, tmp_path / "share", **changes | {"steps": 3}), resume=True)
    assert again.done == 3


@pytest.mark.slow
def test_a_phase_has_an_objective_of_its_own(share, corpus, tmp_path):
    """Stopped in the second phase and resumed, it is still that phase's. The run's options are not another objective's."""
    phases = ({"name": "half", "steps": 2}, {"name": "whole", "steps": 3, "objective": "next_token"})
    changes = {"objective": "share", "objective_options": {"part": 0.25}, "phases": phases}
    run, records = train(recipe(corpus, tmp_path / "run", **changes), until=4)
    assert type(run.objective) is NextToken and run.done == 4
    ends = [record for record in records if "held_out" in record]
    assert "batches" in ends[0] and records[0]["loss"] < records[2]["loss"] / 3, "a quarter of the loss"
    resumed, more = train(recipe(corpus, tmp_path / "run", **changes), resume=True)
    assert type(resumed.objective) is NextToken and "batches" not in more[-1] and resumed.finished

    other = ({"name": "half", "steps": 2, "objective": "next_token"}, phases[1])
    with pytest.raises(ValueError, check=message("train/objectives/objective:a_phase_has_an_objective")):
        train(recipe(corpus, tmp_path / "run", **changes | {"phases": other}), resume=True)


def test_text_is_what_an_objective_writes(finished):
    asked = (finished.model, finished.tokenizer, "import ", 6, 8, 0.5)
    text = finished.objective.sample(*asked)
    assert text.startswith("import ") and text == finished.objective.sample(*asked) and finished.model.training
    assert Objective().sample(*asked) is None, "what is not a language model's objective writes nothing"


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("mask", {}, "recipe: objective: got 'mask', wanted one of {names}."),
        ("causal_lm", {}, "recipe: objective: got 'causal_lm', wanted one of {names}."),
        ("share", {"prt": 1.0}, "recipe: objective_options: 'prt' is no option of share; did you mean 'part'?"),
        ("next_token", {"part": 1.0}, "recipe: objective_options: 'part' is no option of next_token; its options are none."),
    ],
)
def test_refusals(share, name, options, sentence):
    with pytest.raises(ValueError) as error:
        objective_named(name, options)
    names = ", ".join(known for known in OBJECTIVES if known not in ("causal_lm", "policy"))  # of a Corpus
    assert str(error.value) == sentence.replace("{names}", names)


def test_validation_is_the_mean_over_all_items_of_all_batches():
    class Known(NextToken):
        def __call__(self, model, batch, scale=None):
            return torch.tensor(float(sum(batch))), torch.tensor(len(batch))

    assert Known().validate(None, [[1, 2, 3], [6]]) == {"held_out": 3.0}


def test_what_a_step_calls_for_its_loss_is_known_before():
    head = torch.nn.Linear(8, 300)
    head.get_output_embeddings = lambda: head
    assert list(NextToken().calls(head)) == [("linear_cross_entropy", (300, False, False, True, False))]
    assert not NextToken().calls(torch.nn.Linear(8, 300))  # it names no head
