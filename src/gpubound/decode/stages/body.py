"""The body of a decoder over several devices: planned by what is free on each, then put there and bound."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...kernels.dispatch import hasten
from ...models.decoding import Reader, weight_of
from ...models.registry import runner_of
from ..calls import kernel_calls
from ..kv_cache import Cache
from ..runner import ModelRunner, RunnerConfig
from ..span import META, bytes_of_tables
from ..transformer import ON_ONE, FusedRunner
from ..ways import gemv_rows, tiled_gemm_rows
from ..weight_view import ANYWHERE, WeightView, bind, readable_model
from .plan import LayerStage, StageBytes, plan
from .spread import rooms_of, spread, tell


def pipeline_runner(model: Any, build: RunnerConfig, fused: bool, devices: Sequence[torch.device]) -> ModelRunner:
    """A ValueError where the model is not decoded over several, or does not fit."""
    refuse_together(build, fused, len(devices))
    form = runner_of(model) or FUSED
    reader = form.reader_for(model, build, len(devices))
    sizes, rooms = _sizes(model, reader, build, *form.kept_bytes(reader, build)), rooms_of(model, devices)
    stages = plan(sizes, rooms)
    tell(stages, sizes, rooms)
    spread(model, reader.trunk.layers, stages)
    return form.runner(reader, build, stages)


def refuse_together(build: RunnerConfig, fused: bool, count: int) -> None:
    for name, asked in (("speculate", build.tokens > 1), ("weights", build.weights is not None), ("fused=False", not fused)):
        if asked:
            raise ValueError(f"decoder: devices: got {count} together with {name}, which takes a single device.")


def _sizes(model: Any, reader: Reader, build: RunnerConfig, kept: list[int], tables: int) -> StageBytes:
    blocks = [{t.data_ptr(): t.nbytes for t in (*block.parameters(), *block.buffers())} for block in reader.trunk.layers]
    inside = set().union(*blocks)
    ends = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers()) if t.data_ptr() not in inside}
    head = weight_of(model.lm_head)
    return StageBytes(
        weights=[sum(block.values()) for block in blocks],
        kept=kept,
        ends=sum(ends.values()),
        read=head.nbytes,
        scratch=tables,
        first=4 * build.max_batch * len(head),
    )


class StagedForm(NamedTuple):
    """What is asked of a kind of body before its layers are moved, and how it is made behind that."""

    reader_for: Callable[[Any, RunnerConfig, int], Any]  # (model, build, how many devices) -> its reader, or a ValueError
    kept_bytes: Callable[
        [Any, RunnerConfig], tuple[list[int], int]
    ]  # bytes by layer beside the weights, and on each device beside layers
    runner: Callable[[Any, RunnerConfig, Sequence[LayerStage]], ModelRunner]


def fused_reader(model: Any, build: RunnerConfig, count: int, spread: bool | str = ANYWHERE) -> Reader:
    """Return the reader of a model that several devices are to share. spread: see `readable_model`."""
    reader = readable_model(model, build.max_length, spread)
    if isinstance(reader, str):
        raise ValueError(f"decoder: devices: got {count}, which only the fused kernels run on, and {reader}.")
    if any(one.adapters for layer in reader.layers() for part in layer for one in part.linears()):
        raise ValueError(f"decoder: devices: got {count} for a model with low-rank adapters, {ON_ONE}.")
    return reader


def _fused_kept(reader: Reader, build: RunnerConfig) -> tuple[list[int], int]:
    a_layer = Cache(build, range(1), reader.shape(), weight_of(reader.model.lm_head).dtype, META).nbytes
    return [a_layer] * len(reader.trunk.layers), bytes_of_tables(reader, build)


def _fused_body(reader: Reader, build: RunnerConfig, stages: Sequence[LayerStage]) -> ModelRunner:
    live = bind(reader.model, build.max_length, build.max_batch > gemv_rows(build), spread=True)
    assert isinstance(live, WeightView)  # moving changes nothing of what was examined
    for stage in stages:
        hasten(kernel_calls(live, None, tiled_gemm_rows(live, build) > 0), stage.device, live.dtype)
    return FusedRunner(live, build, stages)


FUSED = StagedForm(fused_reader, _fused_kept, _fused_body)
