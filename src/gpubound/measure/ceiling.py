"""This machine's measured limits, and the formulas of every percentage that is a share of them (bandwidth, matrix rate, MFU).

They are measured once and kept in a file whose name holds the GPU, the driver, torch and CUDA: change one, and they are
measured again. A busy machine only ever measures too little. So the best that was ever seen is kept, and a figure is measured
again when some work has passed it, or comes so near to it that one measurement is not enough to believe.
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
from ..files import cache_folder, write_whole
from ..trace import notice, say
from . import limits
from .limits import machine

MEASUREMENTS = 3  # of one machine: work that passes the best of so many is not bound by that figure
CLOSE = 0.9  # a share above this is rare, and one measurement that was made on a busy machine a likelier reason

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
        """The matrix rate in a dtype: 'bf16', torch.bfloat16 and so on. MeasureError if it was not measured."""
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


_unsaved: dict[tuple[str, bool], Ceilings] = {}  # (key, quick): what no file could be written for


def ceilings(device: str | torch.device = "auto", *, refresh: bool = False, quick: bool = False) -> Ceilings:
    """Return the limits of `device`: from the cache, or measured now, within about 5 s. `quick` takes 2: fewer runs, less data.

    A line on stderr says when they are measured. Every figure has a limit in seconds: a slow machine makes fewer runs of
    smaller products. `quick` uses full figures if the cache has them. `refresh` always measures again, and keeps the better
    value of each figure. Delete the cache's file to forget them.
    """
    where = resolve(device)
    key = _key(where)
    if not refresh:
        for least in (False, True) if quick else (False,):
            if (kept := _read(cache_file(key, least)) or _unsaved.get((key, least))) is not None:
                return kept
    found = _measure(where, key, quick)
    if refresh and (kept := _read(cache_file(key, quick))) is not None:
        found = replace(_better(kept, found), measurements=1)
    _write(found)
    return found


def share(achieved: float, figure: str, device: str | torch.device = "auto") -> float | None:
    """Return `achieved` as a fraction of the ceiling named `figure` ("read_bytes_per_s", say). Never above 1.

    If `achieved` exceeds the ceiling, that was measured on a busy machine. It is measured again, and the better value is kept;
    so is one that was measured once and is nearly reached. If `achieved` exceeds the new value too, the result is None, with a
    notice: this ceiling does not bind such work, as memory does not bind a model that fits into the cache.
    """
    found = ceilings(device, quick=True)
    while _doubtful(achieved / getattr(found, figure), found.measurements):
        found = _better(found, _measure(resolve(device), found.key, found.quick))
        _write(found)
    if achieved > (limit := getattr(found, figure)):
        notice(
            f"no share of {figure}: this work reaches {achieved:.3g}, and the best of {found.measurements} measurements here "
            f"is {limit:.3g}. It is not bound by that figure (a small model is read from a cache), or the machine was busy "
            "each time: then run `gpubound env --refresh` on an idle one."
        )
        return None
    return achieved / limit


def _doubtful(share: float, measurements: int) -> bool:
    return measurements < (MEASUREMENTS if share > 1 else 2 if share > CLOSE else 1)


def _better(one: Ceilings, other: Ceilings) -> Ceilings:
    """The better of each figure: a busy machine only ever measures too little."""
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
    here = machine()
    if device.type == "cuda":
        parts = [_name(device), f"driver {here.driver}", f"torch {here.torch}", f"cuda {here.cuda}"]
    else:
        parts = [_name(device), f"{here.threads} threads", f"torch {here.torch}"]
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(parts).lower()).strip("-")


def _measure(device: torch.device, key: str, quick: bool) -> Ceilings:
    say(f"measuring the limits of {_name(device)} ({'about 2 s' if quick else 'about 5 s'}; once a machine)")
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
    wanted = {f.name for f in fields(Ceilings)}
    if not isinstance(row, dict) or set(row) != wanted:
        differing = sorted(set(row) ^ wanted) if isinstance(row, dict) else [type(row).__name__]
        raise ValueError(f"its fields are not this version's: {', '.join(differing)}")
    for name, figure in row.items():
        if name.endswith(("_per_s", "_us")) and not (figure is None or (isinstance(figure, float) and figure > 0)):
            raise ValueError(f"{name} is {figure!r}")
    return Ceilings(**row)


def _write(found: Ceilings) -> None:
    """Write the cache. On a full disk, or without any folder, the figures last as long as this process."""
    _unsaved[found.key, found.quick] = found
    path = cache_file(found.key, found.quick)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(found.as_dict(), indent=1) + "\n")
        del _unsaved[found.key, found.quick]
    except (OSError, DataError) as error:
        why = getattr(error.__cause__ or error, "strerror", error)
        notice(f"the measured ceilings cannot be kept in {path} ({why}): the next process measures them again.")


def bandwidth(bytes_moved: float, seconds: float) -> float:
    """Bytes per second. `bytes_moved` counts every input and every output once, whatever an implementation does.

    >>> bandwidth(2e9, 0.001) / 1e12
    2.0
    """
    return _per_second("bandwidth", bytes_moved, seconds)


def rate(flops: float, seconds: float) -> float:
    """Floating-point operations per second. An (m, k) by (k, n) product is 2·m·k·n. Recomputed work does not count."""
    return _per_second("rate", flops, seconds)


def train_flops_per_token(params_in_products: int, layers: int, hidden: int, seq: int) -> int:
    """Operations to train a decoder on one token: 6·P + 6·layers·seq·hidden.

    P counts the weights of every matrix product for a token: all linear layers and the output head, not the embedding's lookup
    (tied weights count once, for the head). Each costs a multiply and an add in forward, and twice that in backward.
    Attention's two products cost 4·seq·hidden per layer in forward over the full square, and 12 with backward. A causal mask
    needs half of that, so half is counted. `hidden` is query heads · head size where that differs from the model's width.

    >>> train_flops_per_token(1_000_000, layers=2, hidden=64, seq=128)
    6098304
    """
    return 6 * params_in_products + 6 * layers * seq * hidden


def mfu(tokens_per_s: float, flops_per_token: float, flops_per_s: float) -> float:
    """Model FLOPs utilisation: the fraction of `flops_per_s` that useful work reaches. State whether that peak is a datasheet's
    or this machine's.

    >>> mfu(tokens_per_s=100_000, flops_per_token=4e9, flops_per_s=800e12)
    0.5
    """
    if not flops_per_s > 0:
        raise ValueError(f"mfu: flops_per_s must be positive, got {flops_per_s}; take it from measure.ceilings().")
    return tokens_per_s * flops_per_token / flops_per_s


def _per_second(what: str, amount: float, seconds: float) -> float:
    if not seconds > 0:
        raise ValueError(f"{what}: seconds must be positive, got {seconds}; time more work in one run.")
    return amount / seconds
