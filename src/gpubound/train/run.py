"""A training run: its phases, its state, and what it does between steps. train/prepare.py builds one from a recipe.

`gpubound train` and `gpubound demo` put a screen around it.
"""

import dataclasses
import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import lora
from ..data import Tokenizer
from ..distributed import ALONE, Ranks, local_shard
from ..errors import DataError
from ..models.placing import mode, put_back
from ..models.registry import family_of
from ..models.storing import stored_state
from ..place import Placement
from . import export_metadata
from .adapters import kept_state, load_kept_state
from .checkpoint.checkpoints import WHERE, Checkpoint, Checkpoints, joined
from .checkpoint.resume import convert_tensors, restore_rng, rng_states
from .data import Stage
from .ema import Ema
from .loop import Loop, Record, Stop
from .objectives import Objective
from .price import Price, price_of
from .recipe import Recipe
from .step import TrainStep

SETTLED = 3  # steps, behind which a run has all the memory that its steps need
HOPELESS = 100  # steps skipped in a row; fp16 halves its loss scale at each, and 2^-100 helps nobody


@dataclass
class Run:
    """A recipe made ready. `go` trains; `save` and `restore` carry all of its state."""

    recipe: Recipe
    folder: Path
    device: torch.device
    tokenizer: Tokenizer
    stages: list[Stage]
    model: nn.Module
    placement: Placement
    checkpoints: Checkpoints
    base: dict[str, int] = field(default_factory=dict)  # checksums of the frozen model's files
    where: str = field(default_factory=os.getcwd)  # the folder in which relative paths of its recipe begin
    ranks: Ranks = ALONE  # all of them make every call, and do the same at the same step
    id: str = field(default_factory=lambda: secrets.token_hex(8))  # marks its exports; kept in its checkpoints
    phase: int = 0
    began: int = 0  # the last step before this phase
    over: bool = False  # this phase has ended, early or not
    done: int = 0
    evaluations: dict[int, float] = field(default_factory=dict)
    diverged: bool = False  # ended because step after step was skipped
    step: TrainStep = field(init=False)
    average: Ema | None = field(init=False, default=None)
    objective: Objective = field(init=False)
    _saved: tuple[int, int, bool] | None = field(init=False, default=None)

    @property
    def stage(self) -> Stage:
        return self.stages[self.phase]

    @property
    def steps(self) -> int:
        """How many there are in all, should no phase end early."""
        return self.began + sum(stage.recipe.steps for stage in self.stages[self.phase :])

    @property
    def finished(self) -> bool:
        return self.over and self.phase == len(self.stages) - 1

    def enter(self, phase: int) -> None:
        """Make phase number `phase` ready, from the weights as they are, with a fresh objective and optimizer."""
        if hasattr(self, "step"):
            self.step.close()
        self.phase, self.began, self.over = phase, self.done, False
        self.feed, self.held_out = self.stage.feed(self.device, self.ranks), self.stage.held_out_feed(self.device)
        self.objective = self.stage.recipe.new_objective(self.tokenizer)
        self.step = self.stage.recipe.make_step(self.model, self.objective, self.device, self.ranks)
        self.average = Ema(self.step, self.recipe.ema) if self.recipe.ema else None

    def go(self, on_record: Callable[[Record], None], stop: Stop | None = None) -> int:
        """Train phase after phase to the end, or until `stop` is asked; saves either way. Returns the last step done.

        Each step's record goes to `on_record` before a checkpoint of it is written. A run that has diverged is not saved.
        """
        stop = stop or Stop(self.ranks)
        self.checkpoints.warn_if_disk_is_full(sum(tensor.nbytes for tensor in self._state().values()))
        while not self.finished and not self.diverged:
            if self.over:
                if self.average:
                    self.average.settle()  # what the phase has made is its average
                self.enter(self.phase + 1)
            self._train(on_record, stop)
            if not self.diverged:
                self.save(wait=True)
            if stop.agreed():
                break
        self.ranks.rest()
        return self.done

    def _train(self, on_record: Callable[[Record], None], stop: Stop) -> None:
        """This phase, from where it is."""
        recipe, first, last = self.stage.recipe, self.done, self.began + self.stage.recipe.steps
        loop = Loop(self.step, self._heard(on_record), self.ranks)
        while self.done < last and not (self.over or self.diverged or stop.agreed()):
            self.ranks.at(self.done + 1, "training")
            loop.launch(self.done + 1, self.feed)  # hands out the record of the step before, so that step may be written
            self.checkpoints.write()
            self.done += 1
            if self.average:
                self.average.update()
            if recipe.save_every or recipe.evaluate_every:
                self._expect_saves(self.done - first)
            improved = (self.done == last or self._due(recipe.evaluate_every)) and self._evaluate(loop)
            if self.done < last and (improved or self._due(recipe.save_every)):
                self.save()
        loop.finish()
        self.over = self.over or (self.done >= last and not self.diverged)

    def _expect_saves(self, steps: int) -> None:
        """After so many steps of this phase: give back what placing and capturing have left, then see what steps need."""
        if steps == SETTLED and self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif steps == 2 * SETTLED:
            self.checkpoints.expect(self._state())

    def _due(self, every: int) -> bool:
        return every > 0 and self.done % every == 0

    def _heard(self, on_record: Callable[[Record], None]) -> Callable[[Record], None]:
        """`on_record`, told the phase too; notices when step after step is skipped."""
        named = {"phase": self.stage.name} if self.stage.name else {}
        skipped, in_a_row = None, 0

        def heard(record: Record) -> None:
            nonlocal skipped, in_a_row
            in_a_row = in_a_row + 1 if skipped is not None and record["skipped"] > skipped else 0
            skipped, self.diverged = record["skipped"], in_a_row >= HOPELESS
            on_record(record | named)

        return heard

    def _evaluate(self, loop: Loop) -> bool:
        """Note the held-out loss; True when it is this phase's best. Out of patience, go back to the best and end the phase."""
        self.ranks.at(self.done, "evaluating")
        measured = self.ranks.of_first(self.validate())  # one rank's, or they might part over the last bit
        self.evaluations[self.done] = measured["held_out"]
        loop.note(**measured)
        if self.best == self.done:
            return True
        patience = self.stage.recipe.patience
        if patience and self.best and sum(step > self.best for step in self.evaluations) >= patience:
            self._return_to(self.best)
        return False

    @property
    def best(self) -> int | None:
        """The step of this phase with the lowest held-out loss; of equal ones the first. None where no loss was finite."""
        here = {step: loss for step, loss in self.evaluations.items() if step > self.began and math.isfinite(loss)}
        return min(here, key=lambda step: (here[step], step), default=None)

    def _return_to(self, step: int) -> None:
        """Take the weights that an earlier step of this phase had, and end the phase with them."""
        self.checkpoints.wait()
        self._load(convert_tensors(self.checkpoints.at(step), self._state()))
        self.evaluations[self.done] = self.evaluations[step]
        self.over = True

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """What the objective says of the first held-out batches, always the same ones."""
        self.held_out.seek(0)
        with mode(self.model, training=False), self.average.applied() if self.average else nullcontext():
            held_out = islice(self.held_out, self.stage.held_out_batches)
            return self.step.with_weights(lambda: self.objective.validate(self.model, held_out))

    @contextmanager
    def best_weights(self) -> Iterator[int]:
        """Inside, the model has the weights, or their average, of this phase's lowest held-out loss. Gives their step."""
        best = self.best or self.done
        with self.average.applied() if self.average else nullcontext():
            if best == self.done:
                yield best
                return
            with put_back(kept_state(self.model).values()):
                average = {name: torch.empty_like(t) for name, t in self.average.state().items()} if self.average else {}
                like = joined(model=kept_state(self.model), average=average)
                tensors = self.checkpoints.at(best).tensors(like=like, begin=("model.", "average."))
                load_kept_state(self.model, _part(tensors, "model."))
                with torch.no_grad():
                    for name, parameter in self.model.named_parameters():
                        parameter.copy_(tensors.get(f"average.{name}", parameter))
                yield best

    def price(self) -> Price:
        """What the adapters of a finished run cost. No step can follow."""
        assert self.ranks.alone, "the other ranks take no part in it"
        at, recipe = self.feed.state_dict(), self.stage.recipe
        batches = [self.feed.take()] * recipe.accumulate
        self.feed.load_state_dict(at)
        return price_of(
            self.step, lambda: recipe.make_step(self.model, recipe.new_objective(self.tokenizer), self.device), batches
        )

    def export(self, path: str | Path, merge: bool = False, overwrite: bool = False) -> Path:
        """The best weights (see `best_weights`) and the tokenizer as the family writes them: a Hugging Face folder.

        Of a run with adapters, these in PEFT's files; with `merge`, the whole model that they are part of. The first rank
        writes. A folder that holds anything but an earlier export of this run is refused, unless `overwrite`.
        """
        self.ranks.together(lambda: export_metadata.claim(Path(path), self.id, overwrite) if self.ranks.first else None)
        with self.best_weights() as step:
            if self.recipe.adapters is not None:
                self.ranks.together(lambda: self._write_adapted(Path(path), merge) if self.ranks.first else None)
            else:
                save = partial(family_of(self.recipe.model).save, self.model, path, self.tokenizer, overwrite=True)
                local_shard.export(save, stored_state(self.model), self.ranks)
        if self.ranks.first:
            export_metadata.note(Path(path), self.id, step, self.done)
        return Path(path)

    def _write_adapted(self, path: Path, merge: bool) -> None:
        if not merge:
            lora.save(self.model, path, overwrite=True)
            self.tokenizer.save(path, overwrite=True)
            return
        adapters, family = self.recipe.adapters, family_of(self.recipe.model)
        assert adapters is not None
        model = adapters.merged(family.load(self.recipe.model, "cpu"), kept_state(self.model))
        family.save(model, path, self.tokenizer, overwrite=True)

    def save(self, wait: bool = False) -> None:
        """Snapshot the state. It is written behind the training once the newest record is out; `wait` writes it at once."""
        now = (self.done, self.phase, self.over)
        if now != self._saved:
            self._saved = now
            self.ranks.at(self.done, "saving")
            self.step.assert_alike()
            self._snapshot()
        if wait:
            self.checkpoints.write()
            self.checkpoints.wait()

    def _snapshot(self) -> None:
        tensors = self._state() | joined(random=rng_states(self.ranks, self.device))
        facts = {name: getattr(self, name) for name in ("id", "phase", "began", "over", "evaluations", "base", WHERE)}
        facts |= {"recipe": dataclasses.asdict(self.recipe), "feed": self.feed.state_dict()}
        loss = self.evaluations.get(self.done)
        known = loss is not None and math.isfinite(loss)
        score = [-self.phase, loss] if known else None  # the best of a later phase before any of an earlier one
        self.checkpoints.snapshot(self.done, tensors, facts, score)

    def _state(self) -> dict[str, Tensor]:
        """All that moves from step to step, where it lies."""
        average = self.average.state() if self.average else {}
        return joined(model=kept_state(self.model), step=self.step.state_dict(), average=average)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where `checkpoint` was taken, bit for bit. Its phase must have been entered."""
        facts = checkpoint.facts
        if facts["feed"]["corpus"] != self.feed.state_dict()["corpus"]:  # built anew, from other texts, in the place of the old
            raise DataError(
                f"{self.stage.training.path}: holds other tokens than the corpus that this run was trained on up to step "
                f"{checkpoint.step}; put that one back, or its texts, or give another --out to begin anew."
            )
        tensors = convert_tensors(checkpoint, self._state())
        self.done, self.began, self.over = checkpoint.step, facts["began"], facts["over"]
        self.id = facts.get("id", self.id)  # checkpoints of earlier versions have none
        self._load(tensors)
        self.feed.load_state_dict(facts["feed"])
        restore_rng(_part(tensors, "random."), self.ranks, self.device, self.recipe.seed, self.done)
        self.evaluations = {int(step): loss for step, loss in facts["evaluations"].items()}

    def _load(self, tensors: dict[str, Tensor]) -> None:
        load_kept_state(self.model, _part(tensors, "model."))
        self.step.load_state_dict(_part(tensors, "step."))
        if self.average:
            self.average.load(_part(tensors, "average."))


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
