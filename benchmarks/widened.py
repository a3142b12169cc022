"""A 16-bit model's own forward in fp32 arithmetic, without room for its weights in fp32: one block's are wide at a time."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from gpubound.device import products
from gpubound.kernels.dispatch import SIXTEEN_BITS


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Inside, each block's 16-bit numbers are fp32 for as long as its forward lasts. They get their own memory back.

    A block is a member of a list of modules; whatever is in none (embeddings, the last norm, the head) is wide by itself.
    """
    with products("ieee"), ExitStack() as undo:
        for module, tensors in _units(model):
            undo.enter_context(_wide_in_forward(module, tensors))
        yield


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Modules, and what is to be wide in the forward of each. No module is in two."""
    blocks = [m for held in _outermost_lists(model) for m in held]
    inside = {id(m) for block in blocks for m in block.modules()}
    for block in blocks:
        yield block, _narrow([*block.parameters(), *block.buffers()])
    for module in model.modules():
        if id(module) not in inside:
            yield module, _narrow([*module.parameters(recurse=False), *module.buffers(recurse=False)])


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def _narrow(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t for t in tensors if t.dtype in SIXTEEN_BITS]


@contextmanager
def _wide_in_forward(module: nn.Module, tensors: list[Tensor]) -> Iterator[None]:
    own: list[Any] = []

    def widen(*_: Any) -> None:
        own.extend(t.data for t in tensors)
        for t in tensors:
            t.data = t.data.float()

    def narrow(*_: Any) -> None:
        for t, data in zip(tensors, own):
            t.data = data
        own.clear()

    if not tensors:
        yield
        return
    with ExitStack() as undo:
        undo.callback(narrow)  # where a forward has raised
        undo.callback(module.register_forward_pre_hook(widen, prepend=True).remove)
        undo.callback(module.register_forward_hook(narrow, always_call=True).remove)
        yield
