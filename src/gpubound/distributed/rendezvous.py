"""The rendezvous store of a run: how its processes connect, and the texts that they exchange through it.

Before the first collective, rank 0 compares the versions of all ranks. Every failure here is one sentence that all ranks raise;
torch would report a socket time-out, or an invalid use of NCCL. Exit messages go through the store, too: gloo reports only that
a connection was closed.
"""

import json
import os
import time
from contextlib import suppress
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist

from ..errors import DeviceError, GpuboundError, RankError
from ..formatting import duration
from ..version import __version__

GPU = "GPU"  # the only value that must differ between ranks
POLL = 0.002  # seconds between two checks by rank 0 of the joined ranks
SILENT = timedelta(minutes=1)  # for texts: all ranks end at the same step, then read a profile
SAME_CALLS = "All ranks must make the same calls in the same order, step() as often on each"
steps = 0  # that this process has launched, of any TrainStep: with the ranks of a DDP wrapper, no other object knows of all


def launched() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, made this process one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def rank_and_world() -> tuple[int, int]:
    """Return (this process's rank, number of ranks) from the launcher's variables; (0, 1) without a launcher."""
    return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if launched() else (0, 1)


def attempt() -> int:
    """Return the number of times that torch's agent has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def connect(timeout: timedelta) -> dist.TCPStore:
    """Return a new connection to the rendezvous store: a connection on which another thread waits cannot be used."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def open_store(rank: int, world: int, device: torch.device, timeout: timedelta) -> tuple[dist.Store, str]:
    """Return the store in which all ranks have registered, and the name of this start, which prefixes its keys. Raise
    DeviceError if a rank is absent or does not match rank 0.

    torch's agent keeps one store over restarts of the ranks, and the keys of earlier starts remain there: addresses on which no
    process listens any more. The number of restarts may differ between machines. So rank 0 chooses a name, and sends it to
    every rank that registers with a random token.
    """
    shared, token = _open_shared(rank, world, timeout), uuid4().hex
    if rank == 0:
        store = dist.PrefixStore(token, shared)
        store.set("gpubound/about/0", json.dumps(about(device)))
        if missing := _wait_for_ranks(shared, store, token, world, timeout):
            refusal = _absent(missing, world, timeout)
        else:
            refusal = mismatch([json.loads(store.get(f"gpubound/about/{other}")) for other in range(world)])
        store.set("gpubound/verdict", refusal)
    else:
        try:
            shared.set(f"gpubound/here/{rank}", token)
            token = shared.get(f"gpubound/start/{token}").decode()
            store = dist.PrefixStore(token, shared)
            store.set(f"gpubound/about/{rank}", json.dumps(about(device)))
            refusal = store.get("gpubound/verdict").decode()
        except dist.DistStoreError:
            refusal = _absent([0], world, timeout)
    if refusal:
        raise DeviceError(refusal)
    return store, token


def _open_shared(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """Return the store that all starts share."""
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", rank, world, timeout=timeout)))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        if "EADDRINUSE" in reason:
            raise DeviceError(
                f"rank {rank}: the port of the rendezvous store is taken, perhaps by another run ({reason}); "
                f"give torchrun another --master-port."
            ) from error
        raise DeviceError(
            f"rank {rank} of {world} timed out after {duration(timeout.total_seconds())} waiting for the others ({reason}); "
            f"start all of them, with the same --master-addr and --master-port."
        ) from error
    store.set_timeout(timeout)
    return store


def _wait_for_ranks(shared: dist.Store, store: dist.Store, name: str, world: int, timeout: timedelta) -> list[int]:
    """Return the ranks that have not joined within `timeout`. Each rank that registers receives the `name` of this start,
    and has joined once it has written its versions to `store`: the registration may be that of a rank of an earlier start."""
    missing, answered, until = list(range(1, world)), dict[int, bytes](), time.monotonic() + timeout.total_seconds()
    while missing and time.monotonic() < until:
        for rank in missing:
            key = f"gpubound/here/{rank}"
            if shared.check([key]) and (token := shared.get(key)) != answered.get(rank):
                shared.set(f"gpubound/start/{token.decode()}", name)
                answered[rank] = token
        missing = [rank for rank in missing if not store.check([f"gpubound/about/{rank}"])]
        time.sleep(POLL)
    return missing


def _absent(missing: list[int], world: int, timeout: timedelta) -> str:
    names = ", ".join(map(str, missing[:8])) + (" and more" if len(missing) > 8 else "")
    return (
        f"rank {names} of {world} has not joined within {duration(timeout.total_seconds())}; "
        f"start all of them, and look into the log of those that were."
    )


def about(device: torch.device) -> dict[str, str]:
    """Return the values that the ranks compare."""
    values = {"gpubound": __version__, "torch": torch.__version__}
    if device.type != "cuda":
        return values
    if not dist.is_nccl_available():
        raise DeviceError(
            f"torch {torch.__version__} has no NCCL, over which GPUs communicate; "
            f"install a CUDA build of torch for Linux, or give --device cpu."
        )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return values | {"NCCL": nccl, GPU: str(torch.cuda.get_device_properties(device).uuid)}


def mismatch(all_about: list[dict[str, str]]) -> str:
    """Return the first mismatch between two ranks as a sentence; empty if all match."""
    rank_of: dict[str, int] = {}
    first = all_about[0]
    for rank, values in enumerate(all_about):
        for what in values.keys() - {GPU}:
            if values[what] != (other := first.get(what, "none")):
                return f"rank {rank} has {what} {values[what]}, rank 0 has {other}; install the same version for every rank."
        if (gpu := values.get(GPU)) is not None and (earlier := rank_of.setdefault(gpu, rank)) != rank:
            return (
                f"ranks {earlier} and {rank} have the same GPU ({gpu}), and NCCL wants one for each; start as many processes "
                f"as there are GPUs, and let CUDA_VISIBLE_DEVICES be the same for all of a machine."
            )
    return ""


def init_group(backend: str, store: dist.Store, rank: int, world: int, device: torch.device, timeout: timedelta) -> None:
    """Initialize the process group. NCCL is initialized here on a GPU, and not inside the first step."""
    try:
        on = device if device.type == "cuda" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=on)
    except dist.DistBackendError as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
        raise DeviceError(
            f"rank {rank}: {backend.upper()} cannot begin on {device}: {lines[-1].strip().rstrip('.')}; "
            f"start again with NCCL_DEBUG=INFO, which logs what it tried."
        ) from error


class ExitMessages:
    """Exit messages of the ranks of one start. A rank writes its own before its connections end; a rank that finds a
    connection closed reads those of the others."""

    def __init__(self, store: dist.Store, rank: int, world: int):
        self.rank, self.world, self._before = rank, world, steps
        self._store = dist.PrefixStore("gpubound/parting", store)

    def leave(self) -> None:
        """Record that this rank has finished its work."""
        self._write(f"has left its distributed.join block {self._position()}. {SAME_CALLS}")

    def fail(self, error: BaseException) -> None:
        """Record that this rank ends with `error`."""
        reason = str(error).strip().partition("\n")[0]
        kind = "an error" if isinstance(error, GpuboundError) else type(error).__name__
        self._write(f"ended with {kind}{': ' if reason else ''}{reason}")

    def lost(self) -> RankError:
        """Return the error of a rank whose wait for others failed, with their exit messages."""
        messages = []
        with suppress(dist.DistError, RuntimeError):  # the process of the store has ended
            for other in range(self.world):
                if other != self.rank and self._store.check([str(other)]):
                    messages.append(f"rank {other} {self._store.get(str(other)).decode()}")
        reason = "; ".join(messages) or "the other ended without a message. Look into its log"
        return RankError(f"rank {self.rank} waited for a rank that is gone, {self._position()}: {reason.rstrip('.')}.")

    def _position(self) -> str:
        done = steps - self._before
        return "after 1 step" if done == 1 else f"after {done:,} steps"

    def _write(self, text: str) -> None:
        with suppress(dist.DistError, RuntimeError):  # the process of the store has ended
            self._store.set(str(self.rank), text)


def gather_texts(text: str) -> dict[int, str]:
    """Return all ranks' texts by rank on the first rank, without those that did not arrive in time; {} on others.

    This needs no process group: a script may have destroyed its own.
    """
    rank, world = rank_and_world()
    texts = {rank: text} if rank == 0 else {}
    if world == 1:
        return texts
    keys = [f"gpubound/told/{attempt()}/{other}" for other in range(world)]
    try:
        store = connect(SILENT)
        store.set(keys[rank], text)
        until = time.monotonic() + SILENT.total_seconds()
        for other in range(1, world) if rank == 0 else ():
            with suppress(dist.DistStoreError):
                store.wait([keys[other]], timedelta(seconds=max(until - time.monotonic(), 0.1)))
                texts[other] = store.get(keys[other]).decode()
    except (dist.DistNetworkError, RuntimeError):  # the process of the store has ended
        return texts
    return texts


def wait_for_ranks() -> None:
    """Wait until all ranks are here, a minute at most: the store ends with its process, and others may still read it."""
    rank, world = rank_and_world()
    if world == 1:
        return
    keys = [f"gpubound/met/{other}" for other in range(world)]
    with suppress(dist.DistStoreError, dist.DistNetworkError, RuntimeError):
        store = connect(SILENT)
        store.set(keys[rank], "")
        store.wait(keys, SILENT)
