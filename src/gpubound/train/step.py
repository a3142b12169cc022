"""TrainStep: one call, one optimizer step, on any nn.Module; one launch a micro-batch where it can be captured.

    feed = gpubound.feed(corpus, seq=1024, batch_size=16)
    schedule = Schedule("cosine", steps=10_000, warmup=0.02)
    step = TrainStep(model, "next_token", AdamW(lr=3e-4), accumulate=8, clip=1.0, schedule=schedule)
    for _ in range(10_000):
        result = step(feed)

What it changes about the model: the trainable parameters move into flat buffers, in the precision's dtype, and get a main_grad;
frozen parameters and buffers stay as they are. `close()` takes everything off again but the dtype and the place in memory.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar
from weakref import finalize

import torch
from torch import Tensor, nn

from ..device import plainly
from ..distributed import ALONE, Ranks, exit_messages
from ..distributed.ddp_unwrap import tell_if_alone, unwrapped
from ..formatting import readable
from ..graph import Captured
from ..guards import NotCopyable, ReentryGuard
from ..kernels.dispatch import Call, hasten
from ..layers import fp8
from ..layers.weight_memory import give_own_storages
from ..lora import early
from ..lora.adapter import pack_adapters
from ..models.language_model import LanguageModel
from ..trace import notice, say
from .adamw8 import AdamW8bit
from .device_step import DeviceStep, Loss, StepResult, StepValues
from .flat_buffers import Weights
from .graph_cache import MODES as GRAPH_MODES, GraphCache, MicroBatch, gather
from .model_guard import ModelGuard
from .muon import Muon
from .objectives import OBJECTIVES, Objective, objective_class
from .optimizer import AdamW
from .precision import Fp8Weights, Precision, cast_inputs, check_precision, precision as precision_named, spelled
from .recompute import recompute_as
from .schedule import Schedule, is_rate
from .sharding import check_replicas, check_replicas_equal, make_sharding, settings
from .torch_optimizer import TorchOptimizer
from .uneven_data import MicroBatchCounts

Result = TypeVar("Result")
MakesOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
IN_A_ROW = 3  # skipped steps that are reported
FP16_SEARCH = 10  # of fp16, which begins by searching for its loss scale
OPTIMIZERS: dict[str, type[AdamW] | type[Muon]] = {"adamw": AdamW, "adamw8bit": AdamW8bit, "muon": Muon}


class TrainStep(NotCopyable):
    """A whole optimizer step over `accumulate` micro-batches: exact fp32 sums, one division, clip and update, no host sync.

    loss       "causal_lm": labels are the input tokens, as in Hugging Face models. "next_token": labels are already the next
               tokens, as a Corpus gives them. Or a function (model, batch) -> (sum of the loss over valid items, their
               number), both tensors on the device
    optimizer  AdamW(...), AdamW8bit(...) or Muon(...); "adamw", "adamw8bit" or "muon" for their defaults; or a function from
               a list of parameters to a torch.optim.Optimizer, such as torch.optim.SGD or a functools.partial (foreign.py)
    clip       the largest global gradient norm; None does not clip
    precision  "bf16" (fp32 master weights), "fp8" (as bf16, but with 8-bit linear products in the blocks), "bf16-pure" (no
               masters, stochastic rounding), "fp16" (fp32 masters, loss scale), "tf32" or "fp32"
    graph      "auto": captured in a CUDA graph when possible, otherwise run call by call, and a line says why. "require":
               captured, or GraphError. "off": never captured
    schedule   a Schedule; None keeps the rate constant
    recompute  what backward computes again to save memory. "cheap": norms and gated activations of our layers. "none":
               nothing; a little faster, more memory. "blocks": all of each block but its input. A number: that of so many
               blocks
    overlap    compute weight gradients on a second stream, beside the rest of backward: for models too small to fill the GPU
    ranks      the processes that share each step, from gpubound.distributed.join: each has all weights, which begin as those
               of the first rank, and its own micro-batches; `accumulate` counts these. Gradients are summed before the update
               A model in DistributedDataParallel comes out of it, and brings its ranks
    """

    INSTEAD = "save its state_dict() and the model's, and load them into a new model and TrainStep"

    @torch.inference_mode(False)  # buffers made inside could not be written by later steps, nor kept for a backward
    def __init__(
        self,
        model: nn.Module,
        loss: str | Loss | Objective,
        optimizer: str | AdamW | Muon | MakesOptimizer = "adamw",
        *,
        accumulate: int = 1,
        clip: float | None = None,
        precision: str = "bf16",
        graph: str = "auto",
        schedule: Schedule | None = None,
        recompute: str | int = "cheap",
        ranks: Ranks = ALONE,
        overlap: bool = False,
        seed: int = 0,
    ):
        _check(model, accumulate, clip, graph, schedule)
        model, ranks = unwrapped(model, ranks)
        numbers, config, lossy = precision_named(precision), _optimizer(optimizer, graph), _loss(loss)
        if isinstance(lossy, Objective):
            lossy.check_model(model)
        sharding = self._sharding = make_sharding(model, ranks)
        tell_if_alone(sharding.ranks)
        stored, graph = sharding.storage_precision(numbers), sharding.graph(graph)
        pack_adapters(model)
        layout = config.lay_out(sharding, stored)
        alike = {"accumulate": accumulate, "clip": clip, "precision": precision, "graph": graph, "seed": seed}
        sharding.ranks.alike("TrainStep", alike | settings("optimizer", config) | settings("schedule", schedule or Schedule()))
        sharding.check_optimizer(config)
        check_replicas(layout, sharding.ranks)
        self.memory = layout.bytes(stored.masters) | {"moments": config.moment_bytes(layout)}
        parts = ", ".join(f"{name} {readable(size)}" for name, size in self.memory.items() if size)
        notice(f"train: {precision}, {readable(sum(self.memory.values()))} besides activations: {parts}.")
        self.model, self.accumulate, self.device, self._precision = model, accumulate, layout.device, precision
        self._guard = ModelGuard(model)
        self._closed, self._timing = False, ranks.timing
        self._turn = ReentryGuard(
            ValueError, "step: another call of this TrainStep is under way; call it from one thread at a time."
        )
        hasten(_calls(model, numbers, lossy), layout.device, numbers.dtype)
        with ExitStack() as undo:  # out of memory, no blocks to recompute: the model must not be left half prepared
            undo.callback(sharding.release)
            undo.callback(recompute_as(model, recompute))
            if numbers.dtype != torch.float32:
                undo.callback(cast_inputs(model, numbers.dtype).remove)
            accumulators = sharding.accumulators(layout, overlap)
            undo.callback(accumulators.release)
            self._fp8 = Fp8Weights(model, layout) if numbers.fp8 else None
            if self._fp8 is not None:
                undo.callback(self._fp8.release)
            sharding.broadcast_start()
            give_own_storages(model)
            self._weights = sharding.weights(layout, stored.masters)  # after all that may be refused: it casts the parameters
            self._optimizer = config.flat(self._weights, stored, clip, schedule or Schedule(), seed)
            self._optimizer.hasten()
            self._undo = undo.pop_all()
            finalize(self, self._undo.close).atexit = False  # one that is dropped must not keep the model's gradients to itself
        device_step = DeviceStep(model, lossy, accumulators, self._optimizer, numbers, accumulate == 1, sharding, self._fp8)
        self._graphs = GraphCache(device_step, graph)
        self._skips = SkippedSteps(precision, lossy, model)
        self._turnout = MicroBatchCounts(sharding.ranks, accumulate, sharding.gathers)

    def __call__(self, micro_batches: Any) -> StepResult | None:
        """One step over a list of micro-batches, one batch, a feed (across epochs) or an iterator.

        Returns None when an iterator is empty, on many ranks those of all: one that is empty before adds nothing to the others'
        steps. A shorter list, or the rest of an iterator, gives a smaller step, just as exact.
        What surrounds the call does not reach it: neither autocast, for which there is `precision`, nor no_grad.
        """
        if self._closed:
            raise ValueError("step: this TrainStep is closed, its model released; make a new one with TrainStep(model, ...).")
        with self._turn, plainly(self.device), self._timing("taking a step", exit_messages.steps() + 1):
            return self._step(micro_batches)

    def _step(self, micro_batches: Any) -> StepResult | None:
        self._guard.check_unmerged()
        batches = gather(micro_batches, self.accumulate)
        if not self._turnout.begins(len(batches)):
            return None
        self._sharding.rest()
        signature = self._guard.check()
        self._weights.check()
        self._optimizer.check()
        try:
            result = self._graphs.run([MicroBatch(batch, self.device, signature) for batch in batches])
        except IndexError as error:  # a CPU's, of a token outside the vocabulary
            if why := self._skips.explain(batches):
                raise ValueError(why) from error
            raise
        if result is None:
            return None
        if not batches:
            self._turnout.idle()
        self._optimizer.carry_on(self._graphs.step.accumulators.gradient)
        self._weights.stepped()
        self._sharding.stepped(len(batches))
        exit_messages.stepped()
        report = StepResult(result, None if self._sharding.gathers else self._graphs.step.reduction.waited, self._timing)
        self._skips.watch(report, batches)
        return report

    @property
    def lr(self) -> float:
        """AdamW's base learning rate. Set it, and the next step uses it, captured or not. Muon's rate keeps its ratio to it."""
        return self._optimizer.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        if not is_rate(lr):
            raise ValueError(f"TrainStep: lr must be a finite number of at least 0, got {lr!r}.")
        self._optimizer.set_lr(lr)

    @property
    def captured(self) -> list[Captured]:
        """The captured graphs, each with its certificate: one of the step, or one of a micro-batch and one of the update.
        Each further shape of micro-batch adds one, and so does a model in another mode, with other hooks or adapters."""
        return self._graphs.captured

    def assert_alike(self) -> None:
        """RankError, on every rank, where one's weights or optimizer state have other bits than the first's.

        All ranks must call it behind the same step. It waits for the device: a matter of milliseconds, for now and then.
        """
        if self._sharding.ranks.alone:
            return
        weights = [(slot.name, slot.parameter) for slot in self._weights.layout.slots]
        state = [(name, tensor) for name, tensor in self.state_dict().items() if tensor.dim()]
        check_replicas_equal(self._sharding.replicated_tensors([*weights, *state]), self._sharding.ranks)

    def state_dict(self) -> dict[str, Tensor]:
        """What the next step needs besides the model's own state_dict: moments and masters by parameter name, and counters.

        The tensors are live, not copies. `precision` is its name as character codes, because every value is a tensor.
        """
        layout, optimizer = self._weights.layout, self._optimizer
        state = {"precision": spelled(self._precision), "state": optimizer.state, **dict(optimizer.named_moments())}
        for group, _, master in self._weights.rounded:
            state |= {f"master.{slot.name}": slot.view(master, group.start) for slot in layout.slots_of(group)}
        if self._fp8 is not None:
            state |= {f"fp8.{slot.name}": states[:, 0] for slot, states in zip(self._fp8.slots, self._fp8.states)}
        return self._sharding.global_state(state)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue where `state` was taken, bit for bit. Load the model's own state too, before or after."""
        here = self.state_dict()
        check_precision(here.pop("precision"), state)
        here, given = ({n: t for n, t in some.items() if not n.startswith(self._optimizer.loads)} for some in (here, state))
        for name in here.keys() | given.keys() - {"precision"}:
            if name not in state or name not in here or state[name].shape != here[name].shape:
                got = "nothing" if name not in state else f"shape {tuple(state[name].shape)}"
                wanted = "nothing" if name not in here else f"shape {tuple(here[name].shape)}"
                raise ValueError(
                    f"load_state_dict: {name}: got {got}, wanted {wanted}; "
                    f"the state is another model's, or another precision's."
                )
        self._optimizer.load(state)
        for name, tensor in here.items():
            tensor.copy_(state[name])
        self._optimizer.loaded(state)
        self._weights.round_masters()
        if self._fp8 is not None:
            self._fp8.loaded()

    @property
    def flat_weights(self) -> Weights:
        """The trained weights in their flat buffers."""
        return self._weights

    @property
    def updates(self) -> Tensor:
        """The number of updates so far: a scalar on the device that each step writes."""
        return self._optimizer.state[0]

    @property
    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(a trained weight, its fp32 master or itself) by name, where they lie: of a sharded model this rank's rows."""
        return self._weights.by_name()

    def global_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors like those of `weights`, named part.NAME, as `state_dict` gives them: rows as part of the whole tensor."""
        return self._sharding.global_state(state)

    def with_weights(self, work: Callable[[], Result]) -> Result:
        """work(), which runs the model or reads its weights outside of a step. All ranks of a sharded model call it."""
        return self._sharding.with_weights(work)

    def close(self) -> None:
        """Release the model: hooks, main_grad and recomputing are removed. Its weights keep their dtype."""
        self._closed = True
        self._graphs.drop()
        self._undo.close()


class SkippedSteps:
    """Warns of a run of skipped steps, from reports that have reached the host: it never waits for the device."""

    def __init__(self, precision: str, loss: Loss | Objective, model: nn.Module):
        self.loss, self.model = loss, model
        self._limit = FP16_SEARCH if precision == "fp16" else IN_A_ROW
        self._pending: StepResult | None = None
        self._skipped = self._updates = 0  # as reported at the last step that was not skipped
        self._warned = False

    def watch(self, report: StepResult, batches: Sequence[Any]) -> None:
        """Read the oldest report that has not been looked at, if it is there, and look at `report` next."""
        if self._pending is not None:
            if not self._pending.ready():
                return
            self._look(self._pending.read(), batches)
        self._pending = report

    def _look(self, values: StepValues, batches: Sequence[Any]) -> None:
        if values.updates != self._updates or values.skipped < self._skipped:  # the weights moved, or a state was loaded
            self._updates, self._skipped, self._warned = values.updates, values.skipped, False
        in_a_row = values.skipped - self._skipped
        if in_a_row < self._limit or self._warned:
            return
        self._warned = True
        bad = "gradient" if math.isfinite(values.loss) else "loss"
        why = self.explain(batches) or (
            f"try a lower learning rate (now {values.lr:.2e}) or clip=1.0, and look for inputs that are not finite."
        )
        say(f"train: {in_a_row} steps in a row were skipped, because their {bad} is not finite: {why}", logging.WARNING)

    def explain(self, batches: Sequence[Any]) -> str | None:
        """Return what the objective objects to in these batches, if anything. Waits for the device."""
        if isinstance(self.loss, Objective):
            try:
                for batch in batches:
                    self.loss.check_batch(self.model, batch)
            except ValueError as error:
                return str(error)
        return None


def _calls(model: nn.Module, numbers: Precision, lossy: Loss | Objective) -> Iterator[Call]:
    """What a first step is known to call, so that its kernels are compiled side by side."""
    yield from model.calls() if isinstance(model, LanguageModel) else ()
    yield from (("add_rows", (m.embedding_dim,)) for m in model.modules() if isinstance(m, nn.Embedding))
    yield from fp8.CALLS if numbers.fp8 else ()
    yield from early.calls(model)
    yield from lossy.calls(model) if isinstance(lossy, Objective) else ()


def _check(model: Any, accumulate: Any, clip: Any, graph: Any, schedule: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"TrainStep: model must be a torch.nn.Module, got a {type(model).__name__}; pass the model itself.")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"TrainStep: accumulate must be a whole number of at least 1, got {accumulate!r}.")
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ValueError(f"TrainStep: clip must be above 0, got {clip!r}; None does not clip.")
    if schedule is not None and not isinstance(schedule, Schedule):
        raise ValueError(
            f"TrainStep: schedule must be a Schedule, got {schedule!r}; "
            f"say its shape and length, as in Schedule('cosine', steps=10_000), or leave it out to keep the rate."
        )
    if schedule is not None and callable(schedule.shape):
        schedule.table(1.0)  # a function that gives no rate is refused before anything has moved
    if graph not in GRAPH_MODES:
        raise ValueError(f"TrainStep: graph must be one of {', '.join(GRAPH_MODES)}, got {graph!r}.")


def _optimizer(optimizer: str | AdamW | Muon | MakesOptimizer, graph: str) -> AdamW | Muon | TorchOptimizer:
    if isinstance(optimizer, AdamW | Muon):
        return optimizer
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]()
    if callable(optimizer):
        return TorchOptimizer(optimizer, graph=graph)
    made = isinstance(optimizer, torch.optim.Optimizer)
    raise ValueError(
        f"TrainStep: optimizer must be {' or '.join(map(repr, OPTIMIZERS))}, an AdamW(...) or Muon(...), or what makes a torch "
        f"optimizer of a list of parameters, as torch.optim.SGD does, "
        f"got {optimizer if isinstance(optimizer, str) else type(optimizer).__name__!r}"
        f"{', which is made already and holds other parameters' if made else ''}."
    )


def _loss(loss: str | Loss | Objective) -> Loss | Objective:
    if isinstance(loss, str) and loss in OBJECTIVES:
        return objective_class(loss)()
    if callable(loss):
        return loss
    names = " or ".join(map(repr, OBJECTIVES))
    raise ValueError(f"TrainStep: loss must be {names} or a function of (model, batch), got {loss!r}.")
