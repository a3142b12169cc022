"""Rank of this process, number of ranks, and communication between them.

torchrun starts the processes, one for each GPU, and numbers them with ranks. Host objects are exchanged over gloo and never
touch a GPU; gradients use the device's backend, NCCL on a GPU. A process without torchrun is alone: it communicates with no
other, and the calling code stays the same.
"""

import atexit
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DeviceError, RankError
from ..formatting import shown
from .exit_messages import ExitMessages
from .failures import of_another
from .rendezvous import init_group, open_store
from .watchdog import Watchdog

TIMEOUT = timedelta(minutes=10)  # a rank may compile kernels or write a checkpoint while the others wait for it
SETTLE = 0.05  # seconds
Result = TypeVar("Result")
ENGINES = {"cuda": "nccl", "cpu": "gloo"}


# Groups are never freed. That joins gloo's threads, and one that lets go of a tensor just then waits for the interpreter, which
# the joining thread holds: torch 2.13 hung in one of ten programs that ended right behind a collective.
_ENDED: list[Any] = []


@cache
def _let_go_at_exit() -> None:
    """Let the program sleep for a moment at its end. The same threads let go of their last tensors some microseconds after it
    has heard of the sums. Where it ended just then, they found no interpreter any more, and aborted it: one of two ranks."""
    atexit.register(time.sleep, SETTLE)


@dataclass(frozen=True)
class Ranks:
    """The processes of this run, seen from one of them."""

    rank: int = 0
    world: int = 1
    local: int = 0
    """Which of its machine's processes."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Any = None
    """Process group of the devices; None if this process is alone."""
    host: Any = None
    """Process group of the hosts."""
    watchdog: Watchdog | None = None
    """Ends the run when a rank does not move on."""
    graphs: "WeakSet[Any]" = field(default_factory=WeakSet)
    """Those with sums over ranks inside. `join` releases them: NCCL ends a communicator only after them, and would wait."""

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
        """Begin to add up over all ranks, in place, beside what the device does next; what it returns makes the device wait."""
        if self.alone:
            return _nothing
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return work.wait

    def take_largest(self, tensor: Tensor) -> None:
        """Compute the maximum over all ranks, in place, on the device. No host waits."""
        if not self.alone:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)

    def spread(self, tensor: Tensor) -> None:
        """Make it the first rank's, in place, on the device. No host waits."""
        if not self.alone:
            given = tensor.contiguous()
            dist.broadcast(given, group_src=0, group=self.group)
            if given is not tensor:
                tensor.copy_(given)

    def all(self, value: bool) -> bool:
        """Return whether `value` is true on every rank. Waits for all of them."""
        return all(self.gather(value))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank. Waits for all of them."""
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
        """Until all ranks are here."""
        if not self.alone:
            self.check_joined()
            dist.barrier(group=self.host)

    def check_joined(self) -> None:
        """ValueError where what they speak over is gone. torch's calls then do nothing, or fail with a group's address."""
        if not dist.is_initialized():
            raise ValueError(
                "ranks: got a call after the end of their `with gb.distributed.join(...)` block or process group, wanted all "
                "calls inside of it; put this one, step() or save() perhaps, into the block."
            )

    def at(self, step: int, doing: str) -> None:
        """Say where this rank is, in a word or two: when it does not move on within the time-out, the run is ended."""
        if self.watchdog is not None:
            self.watchdog.at(step, doing)

    def timing(self, doing: str, step: int | None = None) -> AbstractContextManager[None]:
        """Inside, this rank may wait for others: when that takes longer than the time-out, the run is ended."""
        return nullcontext() if self.watchdog is None else self.watchdog.timing(doing, step)

    def rest(self) -> None:
        """What comes after the last step may take as long as it likes."""
        if self.watchdog is not None:
            self.watchdog.rest()

    def together(self, work: Callable[[], Result]) -> Result:
        """Return work() once it has succeeded on all ranks. If it fails on one, all ranks raise RankError."""
        if self.alone:
            return work()
        try:
            result, wrong = work(), None
        except RankError:  # which every rank raises
            raise
        except Exception as error:  # said by all, below
            result, wrong = None, str(error)
        if failed := [f"rank {rank}: {why}" for rank, why in enumerate(self.gather(wrong)) if why is not None]:
            raise RankError("; ".join(failed))
        return result  # type: ignore[return-value]

    def aside(self) -> "Ranks":
        """Return the same ranks with a separate gloo group, for a thread that communicates during the run. All must call it."""
        if self.alone:
            return self
        self.check_joined()
        members = dist.get_process_group_ranks(self.host)
        patience = TIMEOUT if self.watchdog is None else timedelta(seconds=2 * self.watchdog.timeout)
        with self.timing("asking for a line of its own"):
            host = dist.new_group(members, patience, "gloo", use_local_synchronization=True)
        _ENDED.append(host)
        return replace(self, host=host)

    def alike(self, what: str, values: dict[str, Any]) -> None:
        """ValueError, the same on every rank, where one's `values` are not the first's: it was started in another way."""
        first, *others = self.gather(values)
        for rank, other in enumerate(others, 1):
            if keys := [key for key in first if other.get(key) != first[key]]:
                listed = "; ".join(f"{key} is {shown(other.get(key))}, rank 0's {shown(first[key])}" for key in keys)
                raise ValueError(f"{what}: rank {rank} has another one than rank 0: {listed}. Start all ranks with the same.")

    def share(self, accumulate: int) -> int:
        """Return this rank's number of micro-batches per step. Raise ValueError if the ranks cannot share them evenly."""
        if accumulate % self.world:
            raise ValueError(
                f"accumulate: got {accumulate} micro-batches in a step, wanted a multiple of the {self.world} ranks that share "
                f"them; give accumulate {-(-accumulate // self.world) * self.world}, or another number of ranks."
            )
        return accumulate // self.world


def _nothing() -> None:
    pass


ALONE = Ranks()


class Poll:
    """Exchange one value per step between the ranks. The all-reduce overlaps the step: no rank waits for it."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self._under_way: tuple[Tensor, Any] | None = None

    def ask(self, number: float) -> list[float]:
        """Return the value of each rank at the previous call; an empty list at the first call. All ranks must call it equally
        often.

        A process that is alone gets its value at once.
        """
        if self.ranks.alone:
            return [number]
        before, given = self._under_way, torch.zeros(self.ranks.world, dtype=torch.float64, device="cpu")
        given[self.ranks.rank] = number
        self._under_way = given, dist.all_reduce(given, group=self.ranks.host, async_op=True)
        if before is None:
            return []
        answer, sent = before
        sent.wait()
        return answer.tolist()


def launched() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, made this process one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def check_ranks(ranks: Any, who: str) -> None:
    """`join` is easily called without its `with`, and gives no ranks then."""
    if not isinstance(ranks, Ranks):
        raise ValueError(
            f"{who}: ranks must be what `with gb.distributed.join(...) as ranks:` gives, got a {type(ranks).__name__}; put the "
            f"call into such a block."
        )


def ranks_of(group: Any, kind: str, timeout: timedelta = TIMEOUT) -> Ranks:
    """The ranks of a process group that is there already; None: of all processes. All its ranks must call it.

    kind  "cuda" or "cpu": what the ranks compute on, and what the group must be able to add up.
    """
    _let_go_at_exit()
    group = dist.group.WORLD if group is None else group
    engines = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if engines.get(kind) != ENGINES[kind]:
        raise ValueError(
            f"ranks: got a process group of {', '.join(sorted(set(engines.values())))}, wanted {ENGINES[kind]} for tensors on "
            f"{kind}; begin with torch.distributed.init_process_group({ENGINES[kind]!r}), or leave that to distributed.join."
        )
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    host = group
    if set(engines.values()) != {"gloo"}:
        host = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", timeout=timeout)
    return Ranks(dist.get_rank(group), dist.get_world_size(group), int(os.environ.get("LOCAL_RANK", 0)), device, group, host)


@contextmanager
def join(kind: str, timeout: timedelta = TIMEOUT) -> Iterator[Ranks]:
    """Inside, this process is one of the run's ranks, as torchrun's variables say; alone without them.

    kind  "cuda" or "cpu": what the ranks compute on. On GPUs the rank's own one is made the current one.

    A process group that is there already, the script's own or another library's, is used and left.
    """
    if dist.is_initialized():
        yield ranks_of(None, kind, timeout)
        return
    if not launched():
        yield Ranks(device=torch.device(kind))
        return
    _let_go_at_exit()
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
    backend = ENGINES[kind]
    store, start = open_store(rank, world, device, timeout)
    patience = 2 * timeout  # the watchdog speaks first
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(patience.total_seconds())))  # NCCL's own says 8 minutes
    init_group(backend, store, rank, world, device, patience)
    host = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=patience)
    watchdog, parting = Watchdog(rank, world, timeout, start), ExitMessages(store, rank, world)
    ranks = Ranks(rank, world, local, device, dist.group.WORLD, host, watchdog)
    try:
        yield ranks
    except BaseException as error:
        watchdog.close()
        if isinstance(error, RuntimeError):  # of a peer that is gone, perhaps, because it was judged
            watchdog.heed()
        if of_another(error):
            raise parting.lost() from error
        parting.fail(error)
        raise
    watchdog.close()
    parting.leave()
    for graph in list(ranks.graphs):
        graph.release()
    _ENDED.extend((dist.group.WORLD, host))
    dist.destroy_process_group()  # not after an error: the others would hear of it before this rank has said what it is
