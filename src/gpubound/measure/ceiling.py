"""This machine's measured limits, and the shares of work in them.

Limits are measured once and cached in a file whose name contains the GPU, the driver, torch and CUDA. A busy machine only
measures too little, so the best value of all measurements counts, and a figure is measured again when some work exceeds it or
comes close to the value of a single measurement.
"""

import json
import re
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..device import resolve
from ..errors import DataError, MeasureError
from ..files import cache_folder, write_atomic
from ..trace import notice, say
from . import limits
from .limits import machine

MEASUREMENTS = 3  # work that exceeds the best of three is not bound by that figure
CLOSE = 0.9  # a share above this is less likely than a measurement on a busy machine

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
_PRECISION_OF = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


@dataclass(frozen=True)
class Ceilings:
    """The best rates of the device, in bytes, operations and microseconds. None: not on this device, or see `missing`."""

    device: str  # "cuda" or "cpu"
    name: str
    key: str
    date: str
    quick: bool
    copy_bytes_per_s: float
    """Device memory to device memory, bytes read plus bytes written."""
    read_bytes_per_s: float
    fp32_flops_per_s: float
    """Products of fp32 matrices with tf32 off."""
    bf16_flops_per_s: float
    launch_us: float
    """Host time of one eager launch of a tiny kernel (on a CPU: of one tiny operation)."""
    tf32_flops_per_s: float | None = None
    fp16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    pinned_h2d_bytes_per_s: float | None = None
    pageable_h2d_bytes_per_s: float | None = None
    graph_node_us: float | None = None
    """Device time of one tiny kernel inside a CUDA graph: the floor under a kernel's cost."""
    item_us: float | None = None
    """One `.item()`: the round trip in which the host waits and the device idles."""
    missing: dict[str, str] = field(default_factory=dict)
    """Figure -> why it could not be measured here."""
    measurements: int = 1
    """Each figure is the best of so many."""

    def flops_per_s(self, precision: str | torch.dtype) -> float:
        """Return the matrix rate in a dtype: 'bf16', torch.bfloat16 and so on. MeasureError if it was not measured."""
        short = _PRECISION_OF.get(precision, "") if isinstance(precision, torch.dtype) else precision
        if short not in PRECISIONS:
            raise ValueError(
                f"flops_per_s: got {precision!r}, wanted one of {', '.join(PRECISIONS)} or a floating torch.dtype."
            )
        figure = getattr(self, f"{short}_flops_per_s")
        if figure is None:
            why = self.missing.get(f"{short}_flops_per_s", f"it is not measured on a {self.device} device")
            raise MeasureError(f"no {short} matrix rate for {self.name}: {why}.")
        return figure

    def as_dict(self) -> dict:
        return asdict(self)


_unsaved: dict[tuple[str, bool], Ceilings] = {}  # (key, quick) -> ceilings that could not be written to a file


def ceilings(device: str | torch.device = "auto", *, refresh: bool = False, quick: bool = False) -> Ceilings:
    """Return the limits of `device`: from the cache, or measured now, within about 5 s. `quick` takes 2: fewer runs, less data.

    A line on stderr reports a measurement. Every figure has a time limit: a slow machine makes fewer runs of smaller products.
    `quick` uses full figures if the cache has them. `refresh` always measures again, and keeps the better value of each
    figure. Delete the cache's file to discard them.
    """
    device = resolve(device)
    key = _key(device)
    if not refresh:
        for is_quick in (False, True) if quick else (False,):
            if (cached := _read(cache_file(key, is_quick)) or _unsaved.get((key, is_quick))) is not None:
                return cached
    result = _measure(device, key, quick)
    if refresh and (cached := _read(cache_file(key, quick))) is not None:
        result = replace(_better(cached, result), measurements=1)
    _write(result)
    return result


def share(achieved: float, figure: str, device: str | torch.device = "auto") -> float | None:
    """Return `achieved` as a fraction of the ceiling named `figure` ("read_bytes_per_s", say). Never above 1.

    If `achieved` exceeds the ceiling, the ceiling was measured on a busy machine: measure it again and keep the better value,
    as for a ceiling that was measured once and is nearly reached. If `achieved` exceeds the new value too, return None with a
    notice: this ceiling does not bind such work, as memory does not bind a model that fits into the cache.
    """
    limits = ceilings(device, quick=True)
    while _is_doubtful(achieved / getattr(limits, figure), limits.measurements):
        limits = _better(limits, _measure(resolve(device), limits.key, limits.quick))
        _write(limits)
    if achieved > (limit := getattr(limits, figure)):
        notice(
            f"no share of {figure}: this work reaches {achieved:.3g}, and the best of {limits.measurements} measurements here "
            f"is {limit:.3g}. It is not bound by that figure (a small model is read from a cache), or the machine was busy "
            "each time: then run `gpubound env --refresh` on an idle one."
        )
        return None
    return achieved / limit


def _is_doubtful(share: float, measurements: int) -> bool:
    return measurements < (MEASUREMENTS if share > 1 else 2 if share > CLOSE else 1)


def _better(one: Ceilings, other: Ceilings) -> Ceilings:
    """Return the better value of each figure."""
    figures: dict[str, Any] = {}
    for name in [f.name for f in fields(Ceilings) if f.name.endswith(("_per_s", "_us"))]:
        measured = [figure for figure in (getattr(one, name), getattr(other, name)) if figure is not None]
        figures[name] = min(measured, default=None) if name.endswith("_us") else max(measured, default=None)
    missing = {name: why for name, why in other.missing.items() if figures[name] is None}
    return replace(other, **figures, missing=missing, measurements=one.measurements + 1)


def cache_file(key: str, quick: bool = False) -> Path | None:
    """Return the file of the figures; None for a user who may write to no folder."""
    folder = cache_folder()
    return folder and folder / f"ceilings-{key}{'-quick' if quick else ''}.json"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine().cpu


def _key(device: torch.device) -> str:
    facts = machine()
    if device.type == "cuda":
        parts = [_name(device), f"driver {facts.driver}", f"torch {facts.torch}", f"cuda {facts.cuda}"]
    else:
        parts = [_name(device), f"{facts.threads} threads", f"torch {facts.torch}"]
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(parts).lower()).strip("-")


def _measure(device: torch.device, key: str, quick: bool) -> Ceilings:
    say(f"measuring the limits of {_name(device)} ({'about 2 s' if quick else 'about 5 s'}; once a machine)")
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # of no run's numbers
        measured = limits.of_gpu(device, quick) if device.type == "cuda" else limits.of_cpu(quick)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Ceilings(device=device.type, name=_name(device), key=key, date=date, quick=quick, **measured)


def _read(path: Path | None) -> Ceilings | None:
    """Return the file's figures; None when it does not exist or, with a notice, was not written by this version."""
    try:
        return None if path is None or not path.exists() else _checked(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:  # OSError: also of a folder without permission
        notice(f"{path} is not readable as measured ceilings ({getattr(error, 'strerror', error)}): measuring again.")
        return None


def _checked(row: object) -> Ceilings:
    names = {f.name for f in fields(Ceilings)}
    if not isinstance(row, dict) or set(row) != names:
        differing = sorted(set(row) ^ names) if isinstance(row, dict) else [type(row).__name__]
        raise ValueError(f"its fields are not this version's: {', '.join(differing)}")
    for name, figure in row.items():
        if name.endswith(("_per_s", "_us")) and not (figure is None or (isinstance(figure, float) and figure > 0)):
            raise ValueError(f"{name} is {figure!r}")
    return Ceilings(**row)


def _write(result: Ceilings) -> None:
    """Write the cache. On a full disk, or without a folder, the figures last as long as this process."""
    _unsaved[result.key, result.quick] = result
    path = cache_file(result.key, result.quick)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(result.as_dict(), indent=1) + "\n")
        del _unsaved[result.key, result.quick]
    except (OSError, DataError) as error:
        why = getattr(error.__cause__ or error, "strerror", error)
        notice(f"the measured ceilings cannot be kept in {path} ({why}): the next process measures them again.")


def train_flops_per_token(params_in_products: int, layers: int, hidden: int, seq: int) -> int:
    """Return the operations to train a decoder on one token: 6·P + 6·layers·seq·hidden.

    P counts the weights of every matrix product for a token: all linear layers and the output head, not the embedding's lookup
    (tied weights count once, for the head). Each costs a multiply and an add in forward, and twice that in backward.
    Attention's two products cost 4·seq·hidden per layer in forward over the full square, and 12 with backward. A causal mask
    needs half of that, so half is counted. `hidden` is query heads · head size where that differs from the model's width.

    >>> train_flops_per_token(1_000_000, layers=2, hidden=64, seq=128)
    6098304
    """
    return 6 * params_in_products + 6 * layers * seq * hidden


def mfu(tokens_per_s: float, flops_per_token: float, flops_per_s: float) -> float:
    """Return the model FLOPs utilisation: the fraction of `flops_per_s` that useful work reaches. State whether the peak is
    from a datasheet or measured on this machine.

    >>> mfu(tokens_per_s=100_000, flops_per_token=4e9, flops_per_s=800e12)
    0.5
    """
    if not flops_per_s > 0:
        raise ValueError(f"mfu: flops_per_s must be positive, got {flops_per_s}; take it from measure.ceilings().")
    return tokens_per_s * flops_per_token / flops_per_s
