"""TrainStep: one call, one optimizer step, on any nn.Module; one launch a micro-batch where it can be captured.

    feed = gpubound.feed(corpus, seq=1024, batch_size=16)
    schedule = Schedule("cosine", steps=10_000, warmup=0.02)
    step = TrainStep(model, "next_token", AdamW(lr=3e-4), accumulate=8, clip=1.0, schedule=schedule)
    for _ in range(10_000):
        result = step(feed)

The model's trainable parameters move into flat buffers, in the precision's dtype, and get a main_grad; frozen parameters and
buffers are unchanged. `close()` undoes everything but the dtype and the place in memory.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from threading import Lock
from typing import Any, TypeVar
from weakref import finalize

import torch
from torch import Tensor, nn

from ..device import collecting_new_objects, without_autocast
from ..distributed import ALONE, Ranks, rendezvous
from ..distributed.ranks import tell_if_alone, unwrapped
from ..formatting import readable
from ..graph import Captured
from ..graph.guards import NotCopyable
from ..graph.recording import attention_of
from ..graph.runner import LentMemory
from ..kernels.dispatch import Call, start_self_tests
from ..layers import fp8
from ..layers.fused_weights import give_own_storages, release_stacks
from ..lora.adapter import pack_adapters
from ..lora.model import calls_of_any_batch
from ..models.language_model import LanguageModel, freeze_image_parts
from ..models.registry import why_not_invariant
from ..trace import notice, say, timed
from .accumulate import Accumulators
from .adamw import AdamW, AdamW8bit, Muon, Weights
from .device_step import BackwardUpdate, DeviceStep, Loss, StepResult, check as check_update_in_backward, gradient_bytes
from .graph_cache import MODES as GRAPH_MODES, GraphCache
from .objectives import OBJECTIVES, Objective, objective_class
from .offload import HostMemory, check as check_offload, move_to_host, recompute_as
from .precision import (
    Fp8Weights,
    Precision,
    cast_inputs,
    check_precision,
    explain_dtypes,
    precision as precision_named,
    spelled,
)
from .schedule import Schedule, is_rate
from .sharding import Sharded, check_replicas, check_replicas_equal, make_sharding, settings, uncaptured
from .step_inputs import MicroBatch, MicroBatchCounts, ModelGuard, gather
from .torch_optimizer import TorchOptimizer

Result = TypeVar("Result")
MakesOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
REPORTED_SKIPS = 3  # skipped steps in a row that are reported
REPORTED_SKIPS_FP16 = 10  # fp16 begins by searching for its loss scale
OPTIMIZERS: dict[str, type[AdamW] | type[Muon]] = {"adamw": AdamW, "adamw8bit": AdamW8bit, "muon": Muon}


class TrainStep(NotCopyable):
    """An optimizer step over `accumulate` micro-batches: exact fp32 sums, one division, clip and update, no host sync.

    loss       "causal_lm": labels are the input tokens, as in Hugging Face models. "next_token": labels are already the next
               tokens, as a Corpus gives them. "dpo": pairs of answers. Or a function (model, batch) -> (sum of the loss over
               valid items, their number), both tensors on the device
    optimizer  AdamW(...), AdamW8bit(...) or Muon(...); "adamw", "adamw8bit" or "muon" for their defaults; or a function from
               a list of parameters to a torch.optim.Optimizer, such as torch.optim.SGD or a functools.partial
    clip       the largest global gradient norm; None does not clip
    precision  "bf16" (fp32 master weights), "fp8" (as bf16, but with 8-bit linear products in the blocks), "bf16-pure" (no
               masters, stochastic rounding), "bf16-split" (as bf16, a master being the weight and 16 more bits), "fp16" (fp32
               masters, loss scale), "tf32" or "fp32"
    graph      "auto": captured in a CUDA graph when possible, otherwise run call by call, with a warning. "require":
               captured, or GraphError. "off": never captured
    schedule   a Schedule; None keeps the rate constant
    recompute  what backward computes again to save memory. "cheap": norms and gated activations of our layers. "none":
               nothing; a little faster, more memory. "blocks": all of each block but its input. A number: all of this many
               blocks
    overlap    compute weight gradients on a second stream during backward: for models too small to fill the GPU
    update_in_backward  each block's weights move as soon as backward has its gradient, whose memory the next block takes:
               bit for bit the same numbers (device_step.py). For accumulate=1, clip=None and AdamW on one GPU
    offload_optimizer  moments and masters are in pinned host memory, and pass through the GPU in parts as they are updated:
               bit for bit the same numbers, of "bf16-pure" rounded by other random numbers (offload.py). For AdamW on one GPU
    exact      forward computes products and attention by batch-invariant kernels, so that the log-probabilities of tokens are
               those of gpubound.decoder(model, exact=True), bit for bit. Gradients are the usual ones
    ranks      the processes that share each step, from gpubound.distributed.join: each has all weights, which begin as those
               of the first rank, and its own micro-batches; `accumulate` counts these. Gradients are summed before the update.
               A model in DistributedDataParallel is unwrapped, and its ranks are used
    """

    INSTEAD = "save its state_dict() and the model's, and load them into a new model and TrainStep"

    @torch.inference_mode(False)  # buffers made inside could not be written by later steps, nor kept for a backward
    @timed("TrainStep")
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
        update_in_backward: bool = False,
        offload_optimizer: bool = False,
        exact: bool = False,
        seed: int = 0,
    ):
        _check(model, accumulate, clip, graph, schedule)
        flags = {"update_in_backward": update_in_backward, "offload_optimizer": offload_optimizer}
        for name, value in {**flags, "overlap": overlap, "exact": exact}.items():
            if not isinstance(value, bool):
                raise ValueError(f"TrainStep: {name} must be True or False, got {value!r}.")
        model, ranks = unwrapped(model, ranks)
        dtypes, config, loss_fn = precision_named(precision), _optimizer(optimizer, graph), _loss(loss)
        if isinstance(loss_fn, Objective):
            loss_fn.check_model(model)
            loss_fn.load(model)
        thaw = freeze_image_parts(model) if isinstance(loss_fn, Objective) else None
        if exact and (why := "fp8 products round by batch" if dtypes.fp8 else why_not_invariant(model)):
            raise ValueError(f"TrainStep: exact: {why}; leave exact out.")
        sharding = self._sharding = make_sharding(model, ranks)
        self._sharded = sharding if isinstance(sharding, Sharded) else None
        tell_if_alone(sharding.ranks)
        stored, graph = sharding.storage_precision(dtypes), sharding.graph(graph)
        why_together = loss_fn.join(sharding.ranks) if isinstance(loss_fn, Objective) else None
        if why_together:
            graph = uncaptured(graph, f"{why_together}, and that is not captured", sharding.ranks)
        elif self._sharded is not None:
            why_together = "the ranks of a sharded model gather its weights for each of them"
        pack_adapters(model)
        layout = config.lay_out(model, sharding.named_parameters(), stored)
        shared = {"accumulate": accumulate, "clip": clip, "precision": precision, "graph": graph, "seed": seed}
        shared |= settings("optimizer", config) | settings("schedule", schedule or Schedule())
        sharding.ranks.check_same("TrainStep", shared)
        sharding.check_optimizer(config)
        if update_in_backward:
            check_update_in_backward(accumulate, clip, dtypes, config, sharding.ranks.alone, overlap)
        check_replicas(layout, sharding.ranks)
        self.memory = layout.bytes(stored.masters) | {"moments": config.moment_bytes(layout)}
        if update_in_backward:
            self.memory["gradient"] = gradient_bytes(layout, model)
        self.host_memory: dict[str, int] = {}
        if offload_optimizer:
            self.host_memory = {name: self.memory.pop(name) for name in ("masters", "moments")}
            check_offload(config, sharding.ranks.alone, sum(self.host_memory.values()))
        resident = f"{readable(sum(self.memory.values()))} besides activations: {_listed(self.memory)}"
        notice(f"train: {precision}, {resident}{_listed(self.host_memory, '; in host memory ')}.")
        self.model, self.accumulate, self.device, self._precision = model, accumulate, layout.device, precision
        self._guard = ModelGuard(model)
        self._closed, self._running, self._ranks = False, Lock(), ranks
        self._no_autocast = without_autocast(self.device)
        self._first = True  # all ranks take their first step
        self._added: list[Any] = []  # micro-batches since the last update, by `add`
        self._checked: set[Any] = set()  # signatures of micro-batches that the objective has checked
        start_self_tests(_calls(model, dtypes, loss_fn), layout.device, dtypes.dtype)
        with ExitStack() as undo:  # an error, such as out of memory, must leave the model as it was
            undo.callback(sharding.release)
            if thaw is not None:
                undo.callback(thaw)
            undo.callback(recompute_as(model, recompute))
            if dtypes.dtype != torch.float32:
                undo.callback(cast_inputs(model, dtypes.dtype).remove)
            if update_in_backward and isinstance(config, AdamW):
                accumulators: Accumulators = BackwardUpdate(layout, model, config)
            else:
                accumulators = sharding.accumulators(layout, overlap)
            undo.callback(accumulators.release)
            self._fp8 = Fp8Weights(model, layout) if dtypes.fp8 else None
            if self._fp8 is not None:
                undo.callback(self._fp8.release)
            sharding.broadcast_start()
            give_own_storages(model)
            host = HostMemory(layout.device) if offload_optimizer else None
            if host is not None:  # a model that does not fit twice is moved by way of the host
                undo.callback(move_to_host([slot.parameter for slot in layout.slots]))
                release_stacks(model)
            # After all that may be refused: it casts the parameters.
            self._weights = sharding.weights(layout, stored.masters, host)
            release_stacks(model)
            if self.device.type == "cuda":  # the memory of the old weights is in pieces that are too small for moments
                torch.cuda.empty_cache()
            self._optimizer = config.flat(self._weights, stored, clip, schedule or Schedule(), seed)
            if host is not None:
                self.memory["buffers of offloaded state"] = host.buffer_bytes
            self._optimizer.agree(sharding.ranks)
            self._optimizer.start_self_tests()
            self._undo = undo.pop_all()
            finalize(self, self._undo.close).atexit = False  # a step that is dropped releases the model
        device_step = DeviceStep(
            model, loss_fn, accumulators, self._optimizer, dtypes, accumulate == 1, sharding, self._fp8, exact
        )
        device_step.compile_update()
        self._graphs = GraphCache(device_step, graph)
        self._skips = SkippedSteps(precision, loss_fn, model)
        self._counts = MicroBatchCounts(sharding.ranks, accumulate, why_together)

    def __call__(self, micro_batches: Any) -> StepResult | None:
        """Take one step over a list of micro-batches, one batch, a feed (across epochs) or an iterator.

        Return None when the iterators of all ranks are empty: one that is empty before adds nothing to the others' steps. A
        shorter list, or the rest of an iterator, gives a smaller step, just as exact. Autocast (use `precision`) and no_grad
        around the call have no effect.
        """
        if not self._first:
            with self._calling():
                return self._step(micro_batches)
        with timed("first step"), self._calling(), collecting_new_objects(self.device):
            return self._step(micro_batches)

    def add(self, micro_batch: Any) -> None:
        """Compute the loss and gradients of a micro-batch, and add them to the sums that the next `update` divides and takes.

        `add` and `update` are the two halves of a call, for a caller who learns only later how many micro-batches a step has.
        They are for one process and accumulate > 1: with 1 gradients overwrite those of the last micro-batch.
        """
        step = self._graphs.step
        with self._calling():
            if step.single or not self._ranks.alone:
                got = "accumulate=1" if step.single else f"{self._ranks.world} ranks"
                raise ValueError(f"add: got a TrainStep with {got}; make it with accumulate=2 or more, on one rank.")
            self._guard.check_unmerged()
            batch = MicroBatch(micro_batch, self.device, self._guard.check())
            self._prepare([batch])
            if not self._added:
                step.begin()
            try:
                self._graphs.add(batch)
            except BaseException:
                self._added.clear()  # the sums hold a part of this micro-batch
                raise
            self._added.append(micro_batch)

    def update(self) -> StepResult:
        """Divide the sums by their number of items, clip, and update the weights. The next `add` begins new sums."""
        with self._calling():
            if not self._added:
                raise ValueError("update: there are no gradients; call add(micro_batch) first.")
            signature = self._guard.check()
            self._weights.check()
            self._optimizer.check()
            report, batches = self._graphs.update(signature), list(self._added)
            self._added.clear()
            return self._result(report, batches)

    def discard(self) -> None:
        """Drop the gradients of `add` since the last `update`."""
        self._added.clear()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        if self._closed:
            raise ValueError("step: this TrainStep is closed, its model released; make a new one with TrainStep(model, ...).")
        if not self._running.acquire(blocking=False):
            raise ValueError("step: another call of this TrainStep is under way; call it from one thread at a time.")
        try:
            watchdog = self._ranks.watchdog
            timing = nullcontext() if watchdog is None else watchdog.timing("taking a step", rendezvous.steps + 1)
            # Autograd cannot save tensors that are made in inference_mode, and autocast computes in other dtypes.
            with torch.inference_mode(False), self._no_autocast, timing:
                if self._graphs.memory is not None:
                    self._graphs.memory.lend()
                yield
        except (RuntimeError, ValueError) as error:
            if why := explain_dtypes(self.model, self._precision, error):
                raise ValueError(why) from error
            raise
        finally:
            self._running.release()

    def _step(self, micro_batches: Any) -> StepResult | None:
        self._guard.check_unmerged()
        if self._added:
            raise ValueError(
                "step: micro-batches were added since the last update, whose gradients would be lost; call update()."
            )
        batches = gather(micro_batches, self.accumulate)
        if not self._counts.begins(len(batches)):
            return None
        sharded = self._sharded
        if sharded is not None:
            sharded.rest()
        signature = self._guard.check()
        self._weights.check()
        self._optimizer.check()
        parts, graphs = [MicroBatch(batch, self.device, signature) for batch in batches], self._graphs
        try:
            first = bool(parts) and self._prepare(parts)
            if not parts:  # this rank takes part in the others' step; None if they have no micro-batch either
                report = graphs.step.take_part()
            elif graphs.off:
                report = graphs.step.run([part.whole() for part in parts])
            else:
                report = graphs.run(parts, first)
        except IndexError as error:  # on a CPU, from a token outside the vocabulary
            if why := self._skips.explain(batches):
                raise ValueError(why) from error
            raise
        if report is None:
            return None
        if not batches:
            self._counts.report_idle()
        return self._result(report, batches)

    def _result(self, report: Tensor, batches: Sequence[Any]) -> StepResult:
        """Return the result of a step that is taken."""
        device_step, sharded = self._graphs.step, self._sharded
        waited = device_step.reduction.waited if device_step.reduces and sharded is None else None
        result = StepResult(report, waited, self._ranks.timing)
        self._optimizer.carry_on(device_step.accumulators.gradient, result)
        self._weights.stepped()
        if sharded is not None:
            sharded.stepped(len(batches))
        rendezvous.steps += 1
        self._skips.watch(result, batches)
        return result

    def _prepare(self, batches: list[MicroBatch]) -> bool:
        """Check micro-batches whose signature is new, and prepare the first step. Return whether this is the first."""
        step, first = self._graphs.step, self._first
        if first:
            step.start_self_tests(batches[0].whole())  # before the checks, which run the model
        if isinstance(step.loss, Objective):
            for number, batch in enumerate(batches):
                if batch.signature not in self._checked:
                    inputs = batch.whole()
                    check = partial(step.loss.check_batch, step.model, inputs)
                    if first and not number:  # it runs the model, whose weights may be sharded: all ranks take part
                        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
                        size = ids.shape if isinstance(ids, Tensor) and ids.dim() == 2 else None
                        ahead = nullcontext() if size is None else attention_of(*size, self.device)  # type: ignore[call-arg]
                        with timed("check of the first batch"), ahead:
                            self.with_weights(check)
                    else:
                        check()
                    self._checked.add(batch.signature)
        self._first = False
        if first:
            with timed("scales of fp8, and the order of gradients"):
                step.prepare(batches[0].whole())
        return first

    @property
    def lr(self) -> float:
        """AdamW's base learning rate. Setting it changes the next step, captured or not. Muon's rate keeps its ratio to it."""
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

    def share_pool(self, other: "TrainStep") -> None:
        """Capture graphs in the memory pool of another step's: two steps that are taken alternately, on one stream, then keep
        the activations of one. To be called before the first step."""
        if self.captured:
            raise ValueError("share_pool: this TrainStep has captured its graphs; call it before the first step.")
        self._graphs.share_pool(other._graphs)

    def borrow(self, memory: LentMemory) -> None:
        """Capture graphs in memory that is lent to each step, until its owner takes it back. To be called before the first."""
        assert not self.captured, "graphs have their memory already"
        self._graphs.memory = memory

    @property
    def sums(self) -> Tensor | None:
        """The sums of gradients, whose contents a step does not need before it begins; None where others have them, too."""
        accumulators = self._graphs.step.accumulators
        return accumulators.gradient if type(accumulators) is Accumulators and accumulators.peers is None else None

    @property
    def captures(self) -> bool:
        """True where steps are captured, or are to be."""
        return not self._graphs.off

    @property
    def closed(self) -> bool:
        return self._closed

    def assert_alike(self) -> None:
        """Raise RankError on every rank if one's weights or optimizer state have other bits than the first's.

        All ranks must call it after the same step. It waits for the device, some milliseconds.
        """
        if self._sharding.ranks.alone:
            return
        weights = [(slot.name, slot.parameter) for slot in self._weights.layout.slots]
        state = [(name, tensor) for name, tensor in self.state_dict().items() if tensor.dim()]
        check_replicas_equal(self._sharding.replicated_tensors([*weights, *state]), self._sharding.ranks)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the next step needs besides the model's state_dict: moments and masters by parameter name, and counters.

        The tensors are live, not copies. `precision` is its name as character codes, because every value is a tensor.
        """
        layout, optimizer = self._weights.layout, self._optimizer
        self._weights.memory.wait()
        state = {"precision": spelled(self._precision), "state": optimizer.state, **dict(optimizer.named_moments())}
        kind = "remainder" if self._weights.split else "master"
        for group, _, master in self._weights.rounded:
            state |= {f"{kind}.{slot.name}": slot.view(master, group.start) for slot in layout.slots_of(group)}
        if self._fp8 is not None:
            state |= {f"fp8.{slot.name}": states[:, 0] for slot, states in zip(self._fp8.slots, self._fp8.states)}
        return self._sharding.global_state(state)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue where `state` was taken, bit for bit. Load the model's state too, before or after."""
        live = self.check_state_dict(state)
        self._added.clear()
        self._optimizer.load(state)
        for name, tensor in live.items():
            tensor.copy_(state[name])
        self._optimizer.loaded(state)
        self._weights.round_masters()
        if self._fp8 is not None:
            self._fp8.loaded()

    def check_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Raise ValueError for a state that `load_state_dict` refuses; return the live tensors that it copies."""
        live = self.state_dict()
        check_precision(live.pop("precision"), state)
        live, names = ({n: t for n, t in each.items() if not n.startswith(self._optimizer.loads)} for each in (live, state))
        for name in live.keys() | names.keys() - {"precision"}:
            if name not in state or name not in live or state[name].shape != live[name].shape:
                got = "nothing" if name not in state else f"shape {tuple(state[name].shape)}"
                wanted = "nothing" if name not in live else f"shape {tuple(live[name].shape)}"
                raise ValueError(
                    f"load_state_dict: {name}: got {got}, wanted {wanted}; "
                    f"the state is another model's, or another precision's."
                )
        return live

    @property
    def flat_weights(self) -> Weights:
        """The trained weights in their flat buffers."""
        return self._weights

    @property
    def updates(self) -> Tensor:
        """The number of updates so far, a scalar on the device that each step writes."""
        return self._optimizer.state[0]

    @property
    def weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(trained weight, its fp32 master or itself) by name, live: of a sharded model this rank's rows."""
        return self._weights.by_name()

    def global_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors like those of `weights`, named part.NAME, with global shapes: shards as DTensors."""
        return self._sharding.global_state(state)

    def with_weights(self, work: Callable[[], Result]) -> Result:
        """Return work(), which runs the model or reads its weights outside of a step. All ranks of a sharded model call it."""
        return work() if self._sharded is None else self._sharded.with_weights(work)

    def close(self) -> None:
        """Release the model: remove hooks, main_grad and recomputation. Its weights keep their dtype."""
        self._closed = True
        self._graphs.drop()
        self._undo.close()


class SkippedSteps:
    """Warns of steps in a row that were skipped or had no items, from reports that have reached the host: it never waits."""

    def __init__(self, precision: str, loss: Loss | Objective, model: nn.Module):
        self.loss, self.model = loss, model
        self._limit = REPORTED_SKIPS_FP16 if precision == "fp16" else REPORTED_SKIPS
        self._pending: StepResult | None = None
        self._skipped = self._updates = 0  # as reported at the last step that was not skipped
        self._warned = False
        self._without_items = 0  # reports in a row
        self._warned_of_items = False

    def watch(self, report: StepResult, batches: Sequence[Any]) -> None:
        """Check the pending report if it has reached the host; then `report` is the pending one."""
        pending = self._pending
        if pending is not None and not pending.ready():
            return
        self._pending = report
        if pending is None:
            return
        values = pending.read()
        self._count_items(values.tokens)
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

    def _count_items(self, items: float) -> None:
        self._without_items = 0 if items > 0 else self._without_items + 1
        if self._without_items < REPORTED_SKIPS or self._warned_of_items:
            return
        self._warned_of_items = True
        of_objective = isinstance(self.loss, Objective)
        why = "all labels are -100" if of_objective and not items else f"the loss function counted {items:g} items"
        text = f"train: {REPORTED_SKIPS} steps in a row had no item that counts, so they moved no weight: {why}"
        say(f"{text}; look at what the labels of a batch hold.", logging.WARNING)

    def explain(self, batches: Sequence[Any]) -> str | None:
        """Return the objective's error for these batches, if it has one. Waits for the device."""
        if isinstance(self.loss, Objective):
            try:
                for batch in batches:
                    self.loss.check_batch(self.model, batch)
            except ValueError as error:
                return str(error)
        return None


def _calls(model: nn.Module, precision: Precision, loss: Loss | Objective) -> Iterator[Call]:
    """Yield the kernels that the first step is known to call, so that they are compiled in parallel."""
    yield from model.calls() if isinstance(model, LanguageModel) else ()
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad)
    yield from (("add_rows", (m.embedding_dim,)) for m in embeddings)
    yield from fp8.CALLS if precision.fp8 else ()
    yield from calls_of_any_batch(model)
    yield from loss.calls(model) if isinstance(loss, Objective) else ()


def _listed(sizes: dict[str, int], begin: str = "") -> str:
    parts = ", ".join(f"{name} {readable(size)}" for name, size in sizes.items() if size)
    return f"{begin}{parts}" if parts else ""


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
