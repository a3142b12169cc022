"""The body of a decoder over several devices: planned by what is free on each, then put there and bound."""

from typing import Any

from ...models.decoding import Reader, weight_of
from ..bind import BoundModel, bind, examine
from ..cache import Cache
from ..contract import Build
from ..fused import NARROW, ON_ONE, FusedBody
from ..span import META, bytes_of_tables
from .plan import StageBytes, plan
from .spread import devices_of, rooms_of, spread, tell


def staged_body(model: Any, build: Build, fused: bool, given: Any) -> FusedBody:
    """`given`: devices. A ValueError where the model is not decoded over several, or does not fit."""
    devices = devices_of(given)
    for name, asked in (("speculate", build.tokens > 1), ("weights", build.weights is not None), ("fused=False", not fused)):
        if asked:
            raise ValueError(f"decoder: devices: got {len(devices)} together with {name}, which takes a single device.")
    together = build.max_batch > NARROW
    reader = examine(model, build.max_length, spread=True)
    if isinstance(reader, str):
        raise ValueError(f"decoder: devices: got {len(devices)}, which only the fused kernels run on, and {reader}.")
    if any(one.adapters for layer in reader.layers() for part in layer for one in part.linears()):
        raise ValueError(f"decoder: devices: got {len(devices)} for a model with low-rank adapters, {ON_ONE}.")
    sizes, rooms = _sizes(model, reader, build), rooms_of(model, devices)
    stages = plan(sizes, rooms)
    tell(stages, sizes, rooms)
    spread(model, reader.trunk.layers, stages)
    live = bind(model, build.max_length, together, spread=True)
    assert isinstance(live, BoundModel)  # moving changes nothing of what was examined
    return FusedBody(live, build, stages)


def _sizes(model: Any, reader: Reader, build: Build) -> StageBytes:
    blocks = [{t.data_ptr(): t.nbytes for t in (*block.parameters(), *block.buffers())} for block in reader.trunk.layers]
    inside = set().union(*blocks)
    ends = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers()) if t.data_ptr() not in inside}
    head, shape = weight_of(model.lm_head), reader.shape()
    kept = Cache(build, range(1), shape, head.dtype, META).nbytes
    return StageBytes(
        weights=[sum(block.values()) for block in blocks],
        kept=[kept] * len(blocks),
        ends=sum(ends.values()),
        read=head.nbytes,
        scratch=bytes_of_tables(reader, build),
        first=4 * build.max_batch * shape.vocab,
    )
