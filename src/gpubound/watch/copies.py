"""Copies that need not have been made: the same bytes uploaded again, and clones whose source nobody used afterwards."""

import zlib
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import ops, pretend
from .site import Place

SAMPLE = 65_536  # bytes looked at to tell whether a buffer was rewritten behind its version counter


def storage_of(t: torch.Tensor) -> torch.UntypedStorage:
    return t.elem.untyped_storage() if isinstance(t, pretend.SimTensor) else t.untyped_storage()


class Uploads:
    """Remembers what was uploaded, to notice the same storage, unchanged, going up again.

    A version counter does not see writes through NumPy, as into a pinned ring, so a sample of the bytes must agree too.
    """

    def __init__(self):
        self._seen: dict[tuple, tuple[StorageWeakRef, tuple]] = {}

    def again(self, t: torch.Tensor, device: torch.device) -> bool:
        reference = StorageWeakRef(t.untyped_storage())
        key = (reference.cdata, t.storage_offset(), tuple(t.shape), t.stride(), t.dtype, str(device))
        state = (_version(t), _fingerprint(t))
        known = self._seen.get(key)
        if known is not None and known[1] == state and not known[0].expired():
            return True
        if len(self._seen) > 4096:
            self._seen = {k: v for k, v in self._seen.items() if not v[0].expired()}
        self._seen[key] = (reference, state)
        return False


def _version(t: torch.Tensor) -> int | None:
    return None if t.is_inference() else t._version


def _fingerprint(t: torch.Tensor) -> int | None:
    if not t.is_contiguous() or t.numel() == 0:
        return None
    raw = t.detach().reshape(-1).view(torch.uint8)
    return zlib.crc32(raw[:: max(1, raw.numel() // SAMPLE)].contiguous().numpy().tobytes())


@dataclass(slots=True)
class _Candidate:
    source: StorageWeakRef
    place: Place
    bytes: int


class Clones:
    """Notices clones whose source is never used again and dies: the source itself would have done.

    Only clones that repeat a whole storage, stride for stride, are candidates: a clone that changes the layout, or keeps a
    slice so that the rest can be freed, does work.
    """

    LIMIT = 256  # candidates followed at a time; the oldest are let go uncounted

    def __init__(self):
        self._candidates: list[_Candidate] = []

    def used(self, args, kwargs) -> None:
        """Drop the candidates whose source this op uses: their clone was needed."""
        if not self._candidates:
            return
        touched = {storage_of(t)._cdata for t in ops.tensors((*args, *kwargs.values()))}
        self._candidates = [c for c in self._candidates if c.source.expired() or c.source.cdata not in touched]

    def cloned(self, source: torch.Tensor, place: Place) -> None:
        storage = storage_of(source)
        size = source.numel() * source.element_size()
        if size and size == storage.nbytes():
            self._candidates = [*self._candidates[-self.LIMIT + 1 :], _Candidate(StorageWeakRef(storage), place, size)]

    def dead(self) -> list[_Candidate]:
        """The candidates whose source has died since the last time."""
        found = [c for c in self._candidates if c.source.expired()]
        if found:
            self._candidates = [c for c in self._candidates if not c.source.expired()]
        return found


def repeats_layout(func, args, kwargs) -> bool:
    """True for a clone (or .contiguous(), .to(copy=True)) whose result has the source's strides."""
    source = args[0] if args else None
    if not isinstance(source, torch.Tensor) or not ops.dense(source):
        return False
    if func._opname == "clone":
        wanted = kwargs.get("memory_format")
    elif func._opname == "_to_copy" and kwargs.get("dtype") in (None, source.dtype):
        wanted = kwargs.get("memory_format")
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != source.device.type:
            return False
    else:
        return False
    return wanted in (None, torch.preserve_format) or source.is_contiguous(memory_format=wanted)
