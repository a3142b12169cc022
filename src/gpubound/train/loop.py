"""The training loop: a run's phases, its steps, evaluations and checkpoints. train/prepare.py builds a Run from a recipe.

The host launches a step, then reads the result of the step before (records.py), so it never waits for the device. `gpubound
train` and `gpubound demo` display a run in the terminal.

`Ema` is the exponential moving average of the weights, for validation and export.
"""

import dataclasses
import math
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from .. import lora
from ..data import Tokenizer
from ..distributed import ALONE, Ranks, local_shard
from ..distributed.ranks import Poll
from ..errors import DataError
from ..measure.memory_phases import MemoryPhases
from ..models.registry import family_of, mode, put_back
from ..models.storing import stored_state
from ..place import Placement
from .adapters import add as add_adapters, load_trained_state, merge as merge_adapters, trained_state
from .checkpoint.checkpoints import (
    WHERE,
    Checkpoint,
    Checkpoints,
    claim_export,
    convert_tensors,
    joined,
    note_export,
    restore_rng,
    rng_states,
)
from .objectives import Objective
from .recipe import Recipe
from .records import Record, StepRecorder
from .stages import PART as REFERENCE, Stage, reference_values, stored_values
from .step import TrainStep


class Ema:
    """An exponential moving average of the weights, by parameter name, taken at each `update()` without a host sync.

    It reads the fp32 masters of 16-bit weights, and other weights themselves, from the step's flat buffers. A step that moved
    no weight (not finite, or without items) leaves the average unchanged: the device compares its count of updates t with
    the last one. The decay rises as (1 + t) / (10 + t), or the first random weights would stay in a short run's average.
    """

    def __init__(self, step: TrainStep, decay: float):
        self.decay, self._step = decay, step
        self._updates = step.updates  # a scalar on the device that each step writes
        self._included = self._updates.clone()
        self._weights = [weight for weight, _ in step.weights.values()]
        self._flat = [torch.zeros_like(flat, dtype=torch.float32) for flat in step.flat_weights.flat]
        step.flat_weights.add_to(self._flat, torch.ones_like(self._updates, dtype=torch.float32))
        groups = zip(step.flat_weights.layout.groups, self._flat)
        self.average = {
            slot.name: slot.view(flat, group.start)
            for group, flat in groups
            for slot in step.flat_weights.layout.slots_of(group)
        }

    @torch.no_grad()
    def update(self) -> None:
        decay = ((1 + self._updates) / (10 + self._updates)).clamp(max=self.decay)
        weight = torch.where(self._updates > self._included, 1 - decay, 0.0).float()
        self._step.flat_weights.add_to(self._flat, weight)
        self._included.copy_(self._updates)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the weights to the average while inside."""
        with put_back(self._weights):
            self.settle()
            yield

    def settle(self) -> None:
        """Set the weights to the average permanently."""
        torch._foreach_copy_(self._weights, list(self.average.values()))

    def state(self) -> dict[str, Tensor]:
        """Return the live average as a checkpoint stores it."""
        state = self._step.global_state(joined(average=self.average))
        return {name: state[f"average.{name}"] for name in self.average}

    def load(self, average: dict[str, Tensor]) -> None:
        """Continue from a state that `state()` gave, after the step's own state has been loaded."""
        self._included.copy_(self._updates)
        for name, tensor in self.state().items():
            tensor.copy_(average[name])


SETTLED = 3  # steps after which a run has allocated all the memory that its steps need
HOPELESS = 100  # steps skipped in a row; fp16 halves its loss scale at each, and 2^-100 helps no run


class Stop:
    """`with Stop() as stop:` turns Ctrl-C and SIGTERM into `stop.asked`, so that a run ends between two steps and saves.

    A second Ctrl-C interrupts at once. Outside the main thread signals cannot be caught; `stop.asked` may be set by the caller.
    A stop of one rank stops all of them at the same step: each calls `agreed` between two steps. On a busy machine a rank may
    receive its own Ctrl-C after the others' stop; that signal still counts as the first.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.asked: str | None = None
        self._signalled = False
        self._poll = Poll(ranks)
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def agreed(self) -> bool:
        """Return whether the run ends here. The other ranks' answers are one step old, so that no rank waits for them."""
        own = 0 if self.asked is None else signal.Signals.__members__.get(self.asked, 1)
        number = int(max(self._poll.ask(own), default=0))
        if number and self.asked is None:
            self.asked = signal.Signals(number).name
        return number > 0

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
        self.asked = self.asked or signal.Signals(number).name

    def __exit__(self, *_: object) -> None:
        expected = self.asked is not None and not self._signalled and not self._poll.ranks.alone
        for number, handler in self._handlers.items():
            signal.signal(number, self._on_late_signal if expected else handler)

    def _on_late_signal(self, number: int, frame: Any) -> None:
        """Ignore this rank's copy of a signal whose stop came from another rank, and restore the handlers."""
        for restored, handler in self._handlers.items():
            signal.signal(restored, handler)


@dataclass
class Run:
    """A recipe that is ready to train: `go` trains, `save` and `restore` carry all of its state.

    All ranks make every call, and do the same at the same step.
    """

    recipe: Recipe
    folder: Path
    device: torch.device
    tokenizer: Tokenizer
    stages: list[Stage]
    model: nn.Module
    placement: Placement
    checkpoints: Checkpoints
    base: dict[str, int] = field(default_factory=dict)  # checksums of the frozen model's files
    where: str = field(default_factory=os.getcwd)  # the folder that relative paths of the recipe start from
    ranks: Ranks = ALONE
    memory: MemoryPhases = field(default_factory=lambda: MemoryPhases(torch.device("cpu")))  # peaks by phase of the work
    id: str = field(default_factory=lambda: secrets.token_hex(8))  # marks its exports; stored in its checkpoints
    phase: int = 0
    began: int = 0  # the last step before this phase
    over: bool = False  # this phase has ended, early or not
    done: int = 0  # steps
    evaluations: dict[int, float] = field(default_factory=dict)  # held-out loss by step
    changes: list[str] = field(default_factory=list)  # of the recipe, when the run was resumed
    diverged: bool = False  # ended because too many steps in a row were skipped
    step: TrainStep = field(init=False)
    average: Ema | None = field(init=False, default=None)
    objective: Objective = field(init=False)
    references: list[Tensor] = field(init=False, default_factory=list)  # a value a row of the feed, then of each eval feed
    _saved: tuple[int, int, bool] | None = field(init=False, default=None)

    @property
    def stage(self) -> Stage:
        return self.stages[self.phase]

    @property
    def steps(self) -> int:
        """The number of steps in all, if no phase ends early."""
        return self.began + sum(stage.steps for stage in self.stages[self.phase :])

    @property
    def finished(self) -> bool:
        return self.over and self.phase == len(self.stages) - 1

    @property
    def best(self) -> int | None:
        """The step of this phase with the lowest held-out loss, the first of equal ones. None if no loss was finite."""
        losses = {step: loss for step, loss in self.evaluations.items() if step > self.began and math.isfinite(loss)}
        return min(losses, key=lambda step: (losses[step], step), default=None)

    def go(self, on_record: Callable[[Record], None], stop: Stop | None = None) -> int:
        """Train all phases to the end, or until `stop` is asked; save either way. Return the number of steps done.

        Each step's record goes to `on_record` before a checkpoint of that step is written. A diverged run is not saved.
        """
        stop = stop or Stop(self.ranks)
        self.checkpoints.warn_if_disk_is_full(sum(tensor.nbytes for tensor in self._state().values()))
        while not self.finished and not self.diverged:
            if self.over:
                if self.average:
                    self.average.settle()  # the result of a phase is its average
                self.enter(self.phase + 1)
            self._train(on_record, stop)
            if not self.diverged:
                self.save(wait=True)
            if stop.agreed():
                break
        self.ranks.idle()
        return self.done

    def enter(self, phase: int, checkpoint: Checkpoint | None = None, new_rows: bool = False) -> None:
        """Prepare a phase: the weights stay, objective and optimizer are new.

        checkpoint  of this phase, which is resumed: reference values of the weights that the phase began with are taken from it
        new_rows    as in `restore`
        """
        if hasattr(self, "step"):
            self.step.close()
        self.phase, self.began, self.over = phase, self.done, False
        self.objective = self.stage.recipe.new_objective(self.tokenizer)
        with self.memory("make step"):
            self.step = self.stage.recipe.make_step(self.model, self.objective, self.device, self.ranks)
        self.memory.known = self.step.memory
        self.references = []
        if self.objective.needs_reference(self.model):
            stored = stored_values(checkpoint, self.stage, new_rows) if checkpoint else None
            arguments = (self.model, self.objective, self.step, self.stage, self.device, self.ranks)
            self.references = stored or reference_values(*arguments)
        values: list[Tensor | None] = [*self.references] or [None] * (1 + len(self.stage.eval_sets))
        self.feed = self.stage.feed(self.device, self.ranks, values[0])
        self.eval_feeds = [each.feed(self.device, own) for each, own in zip(self.stage.eval_sets, values[1:])]
        self.average = Ema(self.step, self.recipe.ema) if self.recipe.ema else None

    def _train(self, on_record: Callable[[Record], None], stop: Stop) -> None:
        """Train the present phase from the present step on."""
        first, last = self.done, self.began + self.stage.steps
        phase = {"phase": self.stage.name} if self.stage.name else {}
        skipped, skipped_in_a_row = None, 0

        def record_step(record: Record) -> None:
            nonlocal skipped, skipped_in_a_row
            skipped_in_a_row = skipped_in_a_row + 1 if skipped is not None and record["skipped"] > skipped else 0
            skipped, self.diverged = record["skipped"], skipped_in_a_row >= HOPELESS
            on_record(record | phase)

        tokens = None if self.objective.counts_tokens else self.stage.tokens_per_step
        recorder = StepRecorder(self.step, record_step, self.ranks, tokens)
        with self.memory("steps"):
            self._take_steps(recorder, first, last, stop)
        recorder.finish()
        self.over = self.over or (self.done >= last and not self.diverged)

    def _take_steps(self, recorder: StepRecorder, first: int, last: int, stop: Stop) -> None:
        """Take the steps from `first` to `last`, with their evaluations and checkpoints."""
        recipe = self.stage.recipe
        while self.done < last and not (self.over or self.diverged or stop.agreed()):
            self.ranks.at(self.done + 1, "training")
            with self.memory("first step") if self.done == first else nullcontext():
                recorder.launch(self.done + 1, self.feed)  # records the step before, so that its snapshot may be written
            self.checkpoints.write()
            self.done += 1
            if self.average:
                self.average.update()
            if any((recipe.save_every, recipe.saves_per_epoch, recipe.eval_every, recipe.evals_per_epoch)):
                steps = self.done - first
                if steps == SETTLED and self.device.type == "cuda":
                    torch.cuda.empty_cache()  # of what placing and capturing have left: snapshots need room
                elif steps == 2 * SETTLED:
                    self.checkpoints.expect(self._state())
            improved = False
            if self.eval_feeds and (self.done == last or self._is_due(recipe.eval_every, recipe.evals_per_epoch)):
                improved = self._evaluate(recorder)
            if self.done < last and (improved or self._is_due(recipe.save_every, recipe.saves_per_epoch)):
                self.save()

    def _is_due(self, every: int, per_epoch: float) -> bool:
        """Return whether the present step is a multiple of `every`, or completes one of `per_epoch` parts of an epoch."""
        if every:
            return self.done % every == 0
        done, part = self.done - self.began, per_epoch / self.stage.steps_per_epoch
        return math.floor(done * part + 1e-9) > math.floor((done - 1) * part + 1e-9)

    def _evaluate(self, recorder: StepRecorder) -> bool:
        """Record the held-out loss and return True if it is this phase's best. When patience ends, restore the best weights."""
        self.ranks.at(self.done, "evaluating")
        values = self.ranks.of_first(self.validate())  # the first rank's, since the last bits may differ
        self.evaluations[self.done] = values["held_out"]
        recorder.note(**values)
        best, patience = self.best, self.stage.recipe.patience
        if best == self.done:
            return True
        if patience and best and sum(step > best for step in self.evaluations) >= patience:
            self.checkpoints.wait()
            self._load(convert_tensors(self.checkpoints.at(best), self._state()))
            self.evaluations[self.done] = self.evaluations[best]
            self.over = True
        return False

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return the objective's values on the first batches of the held-out rows, which are the same at each call.

        Of several sets each one's are named after it, and `held_out` is their mean.
        """
        values = list[dict[str, float]]()
        with mode(self.model, training=False), self.average.applied() if self.average else nullcontext():
            for eval_set, feed in zip(self.stage.eval_sets, self.eval_feeds):
                feed.seek(0)
                evaluate = partial(self.objective.validate, self.model, islice(feed, eval_set.batches))
                values.append(self.step.with_weights(evaluate))
        if len(values) == 1:
            return values[0]
        named = zip(self.stage.eval_sets, values)
        every = {f"{key}/{eval_set.name}": number for eval_set, own in named for key, number in own.items()}
        return {key: fmean(own[key] for own in values) for key in values[0]} | every

    def save(self, wait: bool = False) -> None:
        """Take a snapshot, which is written in the background after the newest record; with `wait`, write it now."""
        now = (self.done, self.phase, self.over)
        if now != self._saved:
            self._saved = now
            self.ranks.at(self.done, "saving")
            self.step.assert_alike()
            references = {f"{number:04d}": values for number, values in enumerate(self.references)}
            tensors = self._state() | joined(random=rng_states(self.ranks, self.device), **{REFERENCE: references})
            facts = {name: getattr(self, name) for name in ("id", "phase", "began", "over", "evaluations", "base", WHERE)}
            facts |= {"recipe": dataclasses.asdict(self.recipe), "feed": self.feed.state_dict(), "changes": self.changes}
            facts["steps"] = [stage.recipe.steps for stage in self.stages]
            loss = self.evaluations.get(self.done)
            # The best of a later phase is better than any of an earlier one.
            score = [-self.phase, loss] if loss is not None and math.isfinite(loss) else None
            self.checkpoints.snapshot(self.done, tensors, facts, score, to_host=wait, last=wait)
        if wait:
            self.checkpoints.write()
            self.checkpoints.wait()

    def restore(self, checkpoint: Checkpoint, new_rows: bool = False) -> None:
        """Continue where `checkpoint` was taken, bit for bit. Its phase must have been entered.

        new_rows  the recipe has other rows than the checkpoint's, which begin with their first epoch
        """
        facts = checkpoint.facts
        if not new_rows and facts["feed"]["corpus"] != self.feed.state_dict()["corpus"]:  # the same path, other texts
            raise DataError(
                f"{self.stage.training.path}: holds other tokens than the corpus that this run was trained on up to step "
                f"{checkpoint.step}; put that one back, or its texts, or give another --out to begin anew."
            )
        tensors = convert_tensors(checkpoint, self._state())
        self.done, self.began, self.over = checkpoint.step, facts["began"], facts["over"]
        self.changes, self.id = facts["changes"], facts["id"]
        self._load(tensors)
        if not new_rows:
            self.feed.load_state_dict(facts["feed"])
        restore_rng(_part(tensors, "random."), self.ranks, self.device, self.recipe.seed, self.done)
        self.evaluations = {int(step): loss for step, loss in facts["evaluations"].items()}

    def _state(self) -> dict[str, Tensor]:
        """Return the live tensors that change from step to step."""
        average = self.average.state() if self.average else {}
        return joined(model=trained_state(self.model), step=self.step.state_dict(), average=average)

    def _load(self, tensors: dict[str, Tensor]) -> None:
        load_trained_state(self.model, _part(tensors, "model."))
        self.step.load_state_dict(_part(tensors, "step."))
        if self.average:
            self.average.load(_part(tensors, "average."))

    @contextmanager
    def best_weights(self) -> Iterator[int]:
        """Set the weights, or their average, of this phase's lowest held-out loss while inside. Gives their step."""
        best = self.best or self.done
        with self.average.applied() if self.average else nullcontext():
            if best == self.done:
                yield best
                return
            with put_back(trained_state(self.model).values()):
                average = {name: torch.empty_like(t) for name, t in self.average.state().items()} if self.average else {}
                like = joined(model=trained_state(self.model), average=average)
                tensors = self.checkpoints.at(best).tensors(like=like, begin=("model.", "average."))
                load_trained_state(self.model, _part(tensors, "model."))
                with torch.no_grad():
                    for name, parameter in self.model.named_parameters():
                        parameter.copy_(tensors.get(f"average.{name}", parameter))
                yield best

    def export(self, path: str | Path, merge: bool = False, overwrite: bool = False) -> Path:
        """Write the best weights (see `best_weights`) and the tokenizer as a Hugging Face folder of the model's family.

        A run with adapters writes these in PEFT's files; with `merge`, the whole model with the adapters in its weights. The
        first rank writes. A folder that holds anything but an earlier export of this run is refused, unless `overwrite`.
        """
        path, family = Path(path), family_of(self.recipe.model)

        def on_first(work: Callable[[], None]) -> None:
            self.ranks.together(lambda: work() if self.ranks.first else None)

        on_first(lambda: claim_export(path, self.id, overwrite))
        with self.best_weights() as step:
            if self.recipe.adapters is not None:
                on_first(lambda: self._export_adapters(path, merge))
            else:
                save = partial(family.save, self.model, path, self.tokenizer, overwrite=True)
                local_shard.export(save, stored_state(self.model), self.ranks)
        if self.ranks.first:
            note_export(path, self.id, step, self.done)
        return path

    def _export_adapters(self, path: Path, merge: bool) -> None:
        if not merge:
            lora.save(self.model, path, overwrite=True)
            self.tokenizer.save(path, overwrite=True)
            return
        adapters, family = self.recipe.adapters, family_of(self.recipe.model)
        assert adapters is not None
        model = family.load(self.recipe.model, "cpu")  # in its files' dtype
        self.objective.adapt(model)
        add_adapters(adapters, model, self.objective)
        load_trained_state(model, trained_state(self.model))
        merge_adapters(model)
        family.save(model, path, self.tokenizer, overwrite=True)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
