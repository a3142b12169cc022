"""Rank of this process, number of ranks, and communication between them.

torchrun starts the processes, one for each GPU, and numbers them with ranks. Host objects are exchanged over gloo and never
touch a GPU; gradients use the device's backend, NCCL on a GPU. A process without torchrun is alone: it communicates with no
other, and the calling code stays the same.

A model that a script has wrapped in DistributedDataParallel is unwrapped, for a step that sums gradients itself. Two owners of
one gradient would sum it twice, and divide it by different numbers of tokens. So the wrapper is removed, and the step takes its
process group. The wrapper's hooks have no effect in a backward whose forward did not run through the wrapper.
"""

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import DeviceError, GraphError, RankError
from ..formatting import shown
from ..trace import notice
from .failures import Watchdog, of_another
from .rendezvous import ExitMessages, init_group, launched, open_store

TIMEOUT = timedelta(minutes=10)  # a rank may compile kernels or write a checkpoint while the others wait for it
SETTLE = 0.05  # seconds
Result = TypeVar("Result")
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}

# Groups are never freed. Freeing one joins gloo's threads while holding the interpreter lock, for which a gloo thread may
# wait to free a tensor: torch 2.13 hung in one of ten programs that ended right after a collective.
_ENDED: list[Any] = []


@cache
def _sleep_at_exit() -> None:
    """Sleep for a moment when the program ends. gloo's threads free their last tensors some microseconds after the program has
    the results; without an interpreter that aborted one of two ranks."""
    atexit.register(time.sleep, SETTLE)


@dataclass(frozen=True)
class Ranks:
    """The processes of this run, and this one's rank among them."""

    rank: int = 0
    world: int = 1
    local: int = 0
    """Index among the processes of its machine."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Any = None
    """Process group of the devices; None if this process is alone."""
    host: Any = None
    """Process group of the hosts."""
    watchdog: Watchdog | None = None
    """Ends the run when a rank makes no progress."""
    graphs: "WeakSet[Any]" = field(default_factory=WeakSet)
    """CUDA graphs with collectives. `join` releases them: NCCL waits for them before it ends a communicator."""

    @property
    def first(self) -> bool:
        """Return whether this is rank 0, which logs and writes for all."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.world == 1

    def sum(self, tensor: Tensor) -> None:
        """Add up over all ranks, in place, on the device. No host waits."""
        if not self.alone:
            dist.all_reduce(tensor, group=self.group)

    def begin_sum(self, tensor: Tensor) -> Callable[[], Any]:
        """Begin to add up over all ranks, in place, asynchronously. Return a function that makes the device wait for it."""
        if self.alone:
            return lambda: None
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return work.wait

    def take_largest(self, tensor: Tensor) -> None:
        """Compute the maximum over all ranks, in place, on the device. No host waits."""
        if not self.alone:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)

    def gather_tensors(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor, all of one shape, stacked by rank, on the device. No host waits."""
        every = tensor.new_empty(self.world, *tensor.shape)
        dist.all_gather(list(every.unbind()), tensor.contiguous(), group=self.group)
        return every

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the first rank's tensor to all ranks, in place, on the device. No host waits."""
        if not self.alone:
            buffer = tensor.contiguous()
            dist.broadcast(buffer, group_src=0, group=self.group)
            if buffer is not tensor:
                tensor.copy_(buffer)

    def all(self, value: bool) -> bool:
        """Return whether `value` is true on every rank. Waits for all of them."""
        return all(self.gather(value))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, on every rank. Waits for all of them."""
        if self.alone:
            return [value]
        self.check_joined()
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.host)
        return values

    def of_first(self, value: Any) -> Any:
        """Return the first rank's value on every rank. Waits for the first rank."""
        if self.alone:
            return value
        self.check_joined()
        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=self.host)
        return values[0]

    def wait(self) -> None:
        """Wait until all ranks have called this."""
        if not self.alone:
            self.check_joined()
            dist.barrier(group=self.host)

    def check_joined(self) -> None:
        """Raise ValueError after the end of the process group: torch's calls would do nothing, or name a group's address."""
        if not dist.is_initialized():
            raise ValueError(
                "ranks: got a call after the end of their `with gb.distributed.join(...)` block or process group, wanted all "
                "calls inside of it; put this one, step() or save() perhaps, into the block."
            )

    def at(self, step: int, activity: str) -> None:
        """Tell the watchdog what this rank does now. The run is ended if nothing follows within the time-out."""
        if self.watchdog is not None:
            self.watchdog.at(step, activity)

    def timing(self, activity: str, step: int | None = None) -> AbstractContextManager[None]:
        """Apply the watchdog's time-out to the block, in which this rank may wait for others."""
        return nullcontext() if self.watchdog is None else self.watchdog.timing(activity, step)

    def idle(self) -> None:
        """Suspend the watchdog's time-out."""
        if self.watchdog is not None:
            self.watchdog.idle()

    def together(self, work: Callable[[], Result]) -> Result:
        """Return work() once it has succeeded on all ranks. If it fails on one, all ranks raise RankError."""
        if self.alone:
            return work()
        result, reason = None, None
        try:
            result = work()
        except RankError:  # which every rank raises
            raise
        except Exception as error:  # all ranks raise it, below
            reason = str(error)
        if failed := [f"rank {rank}: {why}" for rank, why in enumerate(self.gather(reason)) if why is not None]:
            raise RankError("; ".join(failed))
        return result  # type: ignore[return-value]

    def aside(self) -> "Ranks":
        """Return the same ranks with a separate gloo group, for a thread that communicates during the run. All must call it."""
        if self.alone:
            return self
        self.check_joined()
        patience = TIMEOUT if self.watchdog is None else timedelta(seconds=2 * self.watchdog.timeout)
        with self.timing("creating a process group"):
            ranks = dist.get_process_group_ranks(self.host)
            host = dist.new_group(ranks, patience, "gloo", use_local_synchronization=True)
        _ENDED.append(host)
        return replace(self, host=host)

    def check_same(self, what: str, values: dict[str, Any]) -> None:
        """Raise ValueError on every rank if one's `values` differ from the first rank's: it was started in another way."""
        first, *others = self.gather(values)
        for rank, other in enumerate(others, 1):
            if keys := [key for key in first if other.get(key) != first[key]]:
                differences = "; ".join(f"{key} is {shown(other.get(key))}, rank 0's {shown(first[key])}" for key in keys)
                raise ValueError(
                    f"{what}: rank {rank} has another one than rank 0: {differences}. Start all ranks with the same."
                )

    def share(self, accumulate: int) -> int:
        """Return this rank's number of micro-batches per step. Raise ValueError if the ranks cannot share them evenly."""
        if accumulate % self.world:
            raise ValueError(
                f"accumulate: got {accumulate} micro-batches in a step, wanted a multiple of the {self.world} ranks that share "
                f"them; give accumulate {-(-accumulate // self.world) * self.world}, or another number of ranks."
            )
        return accumulate // self.world


ALONE = Ranks()


class Poll:
    """Exchange one number per step between the hosts of the ranks. The all-reduce overlaps the step: no rank waits for it."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self._pending: tuple[Tensor, Any] | None = None

    def ask(self, number: float) -> list[float]:
        """Return the number of each rank at the previous call; an empty list at the first call. All ranks must call it equally
        often.

        A process that is alone gets its number at once.
        """
        if self.ranks.alone:
            return [number]
        before = self.finish()
        self.begin(number)
        return before

    def begin(self, number: float) -> None:
        """Begin an exchange. The one before is finished first: gloo raises if it is dropped."""
        self.finish()
        numbers = torch.zeros(self.ranks.world, dtype=torch.float64, device="cpu")
        numbers[self.ranks.rank] = number
        self._pending = numbers, dist.all_reduce(numbers, group=self.ranks.host, async_op=True)

    def finish(self) -> list[float]:
        """Wait for the exchange that has begun, and return each rank's number; an empty list where none has."""
        if self._pending is None:
            return []
        (numbers, work), self._pending = self._pending, None
        work.wait()
        return numbers.tolist()


def check_ranks(ranks: Any, who: str) -> None:
    """Raise ValueError unless `ranks` is a Ranks: `join` without `with` gives a context manager."""
    if not isinstance(ranks, Ranks):
        raise ValueError(
            f"{who}: ranks must be what `with gb.distributed.join(...) as ranks:` gives, got a {type(ranks).__name__}; put the "
            f"call into such a block."
        )


def ranks_of(group: Any, kind: str, timeout: timedelta = TIMEOUT) -> Ranks:
    """Return the ranks of an existing process group; None: of all processes. All its ranks must call it.

    kind  "cuda" or "cpu": device of the ranks, whose tensors the group must be able to add up
    """
    _sleep_at_exit()
    group = dist.group.WORLD if group is None else group
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if backends.get(kind) != BACKENDS[kind]:
        raise ValueError(
            f"ranks: got a process group of {', '.join(sorted(set(backends.values())))}, wanted {BACKENDS[kind]} for "
            f"tensors on {kind}; begin with torch.distributed.init_process_group({BACKENDS[kind]!r}), or leave that to join."
        )
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    host = group
    if set(backends.values()) != {"gloo"}:
        host = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", timeout=timeout)
    return Ranks(dist.get_rank(group), dist.get_world_size(group), int(os.environ.get("LOCAL_RANK", 0)), device, group, host)


@contextmanager
def join(kind: str, timeout: timedelta = TIMEOUT) -> Iterator[Ranks]:
    """Make this process one of the run's ranks inside the block, as torchrun's variables say; alone without them.

    kind  "cuda" or "cpu": device of the ranks. On GPUs the rank's own GPU becomes the current one.

    An existing process group, of the script or of another library, is used and left open.
    """
    if dist.is_initialized():
        yield ranks_of(None, kind, timeout)
        return
    if not launched():
        yield Ranks(device=torch.device(kind))
        return
    _sleep_at_exit()
    rank, world, local = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device(kind)
    if kind == "cuda":
        if local >= torch.cuda.device_count():
            raise DeviceError(
                f"rank {rank}: wanted GPU {local} of this machine, got {torch.cuda.device_count()} GPUs; "
                f"start as many processes a machine as it has GPUs."
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    backend = BACKENDS[kind]
    store, start = open_store(rank, world, device, timeout)
    patience = 2 * timeout  # longer than the watchdog's, which reports first
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(patience.total_seconds())))  # NCCL's default: 8 minutes
    init_group(backend, store, rank, world, device, patience)
    host = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=patience)
    dist.barrier(host)  # gloo connects pair by pair: a rank that ended at once would cut off one that still connects
    watchdog, messages = Watchdog(rank, world, timeout, start), ExitMessages(store, rank, world)
    ranks = Ranks(rank, world, local, device, dist.group.WORLD, host, watchdog)
    try:
        yield ranks
    except BaseException as error:
        watchdog.close()
        if isinstance(error, RuntimeError):  # perhaps of a peer that a watchdog has ended
            watchdog.exit_if_ended()
        if of_another(error):
            raise messages.lost() from error
        messages.fail(error)
        raise
    watchdog.close()
    messages.leave()
    for graph in list(ranks.graphs):
        graph.release()
    _ENDED.extend((dist.group.WORLD, host))
    dist.destroy_process_group()  # not after an error: other ranks would fail before this rank's message is written


GOES, DONE = "goes", "done"


def capture_on_all_ranks(ranks: Ranks, attempt: Callable[[Callable[[], None]], Result]) -> Result:
    """Return attempt(go), the capture of a CUDA graph with collectives, or raise an error on every rank.

    A capture calls the function several times, and each call waits for the other ranks. A rank that gives up, out of memory or
    with another result, would leave them waiting. So `attempt` calls `go` before each such call, where all ranks agree; if one
    has given up, it sends its reason, and all ranks raise it.
    """
    over = False

    def go() -> None:
        nonlocal over
        states = ranks.gather((GOES, ""))
        if any(state != GOES for state, _ in states):
            over = True
            raise GraphError(_reason(states))

    try:
        result = attempt(go)
    except Exception as error:
        if not over:
            states = ranks.gather(("", str(error)))
            if isinstance(error, GraphError | torch.OutOfMemoryError) and len(states) > 1:
                raise GraphError(_reason(states)) from error
        raise
    states = ranks.gather((DONE, ""))
    if any(state != DONE for state, _ in states):
        raise GraphError(_reason(states))
    return result


def first_refusal(ranks: Ranks, own: str | None) -> str | None:
    """Return the first refusal of any rank, on every rank; None if no rank refuses."""
    states = ranks.gather(("", own) if own is not None else (DONE, ""))
    return None if all(state == DONE for state, _ in states) else _reason(states)


def _reason(states: list[tuple[str, str]]) -> str:
    for rank, (state, reason) in enumerate(states):
        if state not in (GOES, DONE):
            return reason if len(states) == 1 else f"rank {rank}: {reason}"
    going = ", ".join(str(rank) for rank, (state, _) in enumerate(states) if state == GOES)
    return f"rank {going} wants to call the function once more, and the others are done; their captures took different ways."


REFUSED = {
    "FullyShardedDataParallel": "shard it with torch.distributed.fsdp.fully_shard, which keeps parameters apart",
    "DataParallel": "start a process for each GPU with torchrun, and give ranks=",
    "DistributedDataParallel": "give the model itself, or wrap the whole of it",
}


def unwrapped(model: nn.Module, ranks: Ranks) -> tuple[nn.Module, Ranks]:
    """Return the model inside DistributedDataParallel, and the wrapper's ranks if `ranks` is ALONE; return any other model
    unchanged."""
    check_ranks(ranks, "TrainStep")
    if isinstance(model, DistributedDataParallel):
        if hooks := getattr(model, "_comm_hooks", ()):
            raise ValueError(
                f"model: its DistributedDataParallel has the communication hook {hooks[0][0].__name__}, which a step that adds "
                f"up gradients by itself would not call; wrap the model without one."
            )
        kind = next(model.module.parameters()).device.type
        world = dist.get_world_size(model.process_group)
        ranks = ranks_of(model.process_group, kind) if ranks is ALONE else ranks
        if ranks.world != world:
            raise ValueError(
                f"ranks: got {ranks.world}, but the model's DistributedDataParallel has {world}; leave ranks= out to "
                f"train over these."
            )
        model = model.module
        notice(
            f"train: DistributedDataParallel is taken off the model. Its hooks are not used: gradients are summed once a "
            f"step, over {ranks.world} ranks."
        )
    for name, module in model.named_modules():
        for base in type(module).__mro__:  # matched by name: importing the classes is slow
            if base.__name__ in REFUSED and base.__module__.startswith("torch."):
                raise ValueError(
                    f"model: {name or 'it'} is a {base.__name__}, whose parameters a step cannot take over; "
                    f"{REFUSED[base.__name__]}."
                )
    return model, ranks


def tell_if_alone(ranks: Ranks) -> None:
    """Log a warning if a step has no ranks although this is one of several processes: each would train a separate model."""
    if ranks.alone and dist.is_initialized() and dist.get_world_size() > 1:
        notice(
            f"train: this is one of {dist.get_world_size()} processes, but its step has no ranks and trains alone; "
            f"give ranks=, from gpubound.distributed.join.",
            logging.WARNING,
        )


def tell_if_saved_apart(ranks: Ranks, folder: Path) -> None:
    """Log a warning if a rank other than the first saves without ranks: the first may save to the same location."""
    if ranks.alone and dist.is_initialized() and (rank := dist.get_rank()) > 0:
        notice(
            f"checkpoint: rank {rank} of {dist.get_world_size()} saves into {folder} without ranks, and would spoil what "
            f"another rank saves there; give Checkpoints ranks=, from gpubound.distributed.join, or save on rank 0 alone.",
            logging.WARNING,
        )
