"""How the processes of a run find each other, and what must be alike before the first number goes from one to another.

Every failure here is one sentence that all ranks know: rank 0 compares, the others hear what it found. torch would say that a
socket timed out, or that NCCL was used in an invalid way.
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

GPU = "GPU"  # the one thing that must differ
LOOK = 0.002  # seconds between two looks of the first rank at who has come


def open_store(rank: int, world: int, device: torch.device, timeout: timedelta) -> tuple[dist.Store, str]:
    """The store where all ranks have said who they are, and the name of this start, before which its keys stand.
    DeviceError where a rank stays away, or does not fit the first.

    torch's agent keeps one store while it starts the ranks again, and what the ranks before have written there stays:
    addresses where nobody listens any more. How often a rank was started again may differ between machines. So the first
    rank makes up a name, and tells it to every rank that calls with a word of its own.
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
    """The ranks that have not come within `timeout`. Each that calls is told the `name` of this start, and has come once it
    has said who it is in `store`: what called may have been a rank before, which is gone."""
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
    """What the ranks compare."""
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
    """How a rank does not fit the first, or another; empty if all fit."""
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
    """Let the devices speak to each other. NCCL begins here on a GPU, and not inside the first step."""
    try:
        on = device if device.type == "cuda" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=on)
    except dist.DistBackendError as error:
        said = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
        raise DeviceError(
            f"rank {rank}: {backend.upper()} cannot begin on {device}: {said[-1].strip().rstrip('.')}; "
            f"start again with NCCL_DEBUG=INFO, which says what it tried."
        ) from error
