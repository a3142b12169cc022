"""Connect the processes of a run, and check that their versions agree before the first collective.

Every failure here is one sentence that all ranks raise: rank 0 compares, the others receive its result. torch would report a
socket time-out, or an invalid use of NCCL.
"""

import json
import time
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist

from ..errors import DeviceError
from ..formatting import duration
from ..version import __version__

GPU = "GPU"  # the only value that must differ between ranks
LOOK = 0.002  # seconds between two checks by rank 0 of the joined ranks


def open_store(rank: int, world: int, device: torch.device, timeout: timedelta) -> tuple[dist.Store, str]:
    """Return the store in which all ranks have registered, and the name of this start, which prefixes its keys. Raise
    DeviceError if a rank is absent or does not match rank 0.

    torch's agent keeps one store over restarts of the ranks, and the keys of earlier starts remain there: addresses on which no
    process listens any more. The number of restarts may differ between machines. So rank 0 chooses a name, and sends it to
    every rank that registers with a random token.
    """
    place, mine = _opened(rank, world, timeout), uuid4().hex
    if rank == 0:
        store, verdict = dist.PrefixStore(mine, place), ""
        store.set(_about(0), json.dumps(about(device)))
        if missing := _awaited(place, store, mine, world, timeout):
            verdict = _absent(missing, world, timeout)
        else:
            verdict = mismatch([json.loads(store.get(_about(other))) for other in range(world)])
        store.set("gpubound/verdict", verdict)
    else:
        try:
            place.set(f"gpubound/here/{rank}", mine)
            mine = place.get(f"gpubound/start/{mine}").decode()
            store = dist.PrefixStore(mine, place)
            store.set(_about(rank), json.dumps(about(device)))
            verdict = store.get("gpubound/verdict").decode()
        except dist.DistStoreError:
            verdict = _absent([0], world, timeout)
    if verdict:
        raise DeviceError(verdict)
    return store, mine


def _about(rank: int) -> str:
    return f"gpubound/about/{rank}"


def _awaited(place: dist.Store, store: dist.Store, name: str, world: int, timeout: timedelta) -> list[int]:
    """Return the ranks that have not joined within `timeout`. Each rank that registers receives the `name` of this start,
    and has joined once it has written its versions to `store`: the registration may be that of a rank of an earlier start."""
    missing, answered, until = list(range(1, world)), dict[int, bytes](), time.monotonic() + timeout.total_seconds()
    while missing and time.monotonic() < until:
        for rank in missing:
            if place.check([f"gpubound/here/{rank}"]) and (word := place.get(f"gpubound/here/{rank}")) != answered.get(rank):
                place.set(f"gpubound/start/{word.decode()}", name)
                answered[rank] = word
        missing = [rank for rank in missing if not store.check([_about(rank)])]
        time.sleep(LOOK)
    return missing


def about(device: torch.device) -> dict[str, str]:
    """Return the values that the ranks compare."""
    mine = {"gpubound": __version__, "torch": torch.__version__}
    if device.type != "cuda":
        return mine
    if not dist.is_nccl_available():
        raise DeviceError(
            f"torch {torch.__version__} has no NCCL, which GPUs speak to each other over; "
            f"install a CUDA build of torch for Linux, or give --device cpu."
        )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return mine | {"NCCL": nccl, GPU: str(torch.cuda.get_device_properties(device).uuid)}


def _opened(rank: int, world: int, timeout: timedelta) -> dist.Store:
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", rank, world, timeout=timeout)))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        said = str(error).partition("\n")[0]
        if "EADDRINUSE" in said:
            raise DeviceError(
                f"rank {rank}: the port where the ranks would meet is taken, perhaps by another run ({said.rstrip('.')}); "
                f"give torchrun another --master-port."
            ) from error
        raise DeviceError(
            f"rank {rank} of {world} waited {duration(timeout.total_seconds())} for the others in vain ({said.rstrip('.')}); "
            f"start all of them, with the same --master-addr and --master-port."
        ) from error
    store.set_timeout(timeout)
    return store


def _absent(missing: list[int], world: int, timeout: timedelta) -> str:
    names = ", ".join(map(str, missing[:8])) + (" and more" if len(missing) > 8 else "")
    return (
        f"rank {names} of {world} has not come within {duration(timeout.total_seconds())}; "
        f"start all of them, and look into the log of those that were."
    )


def mismatch(all_about: list[dict[str, str]]) -> str:
    """Return the first mismatch between two ranks as a sentence; empty if all match."""
    owners: dict[str, int] = {}
    for rank, mine in enumerate(all_about):
        for what in mine.keys() - {GPU}:
            if mine[what] != all_about[0].get(what):
                there = all_about[0].get(what, "none")
                return f"rank {rank} has {what} {mine[what]}, rank 0 has {there}; install the same version for every rank."
        if (gpu := mine.get(GPU)) is not None and (other := owners.setdefault(gpu, rank)) != rank:
            return (
                f"ranks {other} and {rank} have the same GPU ({gpu}), and NCCL wants one for each; start as many processes "
                f"as there are GPUs, and let CUDA_VISIBLE_DEVICES be the same for all of a machine."
            )
    return ""


def init_group(backend: str, store: dist.Store, rank: int, world: int, device: torch.device, timeout: timedelta) -> None:
    """Initialize the process group. NCCL is initialized here on a GPU, and not inside the first step."""
    try:
        on = device if device.type == "cuda" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=on)
    except dist.DistBackendError as error:
        said = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
        raise DeviceError(
            f"rank {rank}: {backend.upper()} cannot begin on {device}: {said[-1].strip().rstrip('.')}; "
            f"start again with NCCL_DEBUG=INFO, which says what it tried."
        ) from error
