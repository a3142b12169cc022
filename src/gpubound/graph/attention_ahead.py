"""Attention's backward, compiled by cuDNN in a thread while the forward goes on: a shape's first forward takes 0.7 s at 350m.

cuDNN has a plan for each thread, and keeps what it compiled for all: the certificate's backward runs in another thread than the
first one, and took 0.14 s. So a thread that runs each shape on empty tensors leaves little to the thread of the first backward.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..trace import hooked


@contextmanager
def attention_ahead(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Compile the backward of each shape that F.scaled_dot_product_attention is called with inside, on the calls' stream.

    None: do nothing, as on a CPU
    """
    if stream is None or not (torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()):
        yield
        return
    started, threads, caller = set[Any](), list[threading.Thread](), threading.get_ident()

    def attend(own: Callable, *arguments: Any, **options: Any) -> Any:
        out = own(*arguments, **options)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        drops = options.get("dropout_p") or len(arguments) > 4  # it would draw from the generator
        if threading.get_ident() == caller and out.requires_grad and len(tensors) == 3 and not drops and key not in started:
            started.add(key)
            threads.append(threading.Thread(target=_run, args=(stream, own, key, tensors[0].device, options), daemon=True))
            threads[-1].start()
        return out

    try:
        with hooked(F, "scaled_dot_product_attention", attend):
            yield
    finally:  # after an error, too: what follows may capture on this stream
        for thread in threads:
            thread.join()


def _run(stream: torch.cuda.Stream, own: Callable, key: Any, device: torch.device, options: dict[str, Any]) -> None:
    # What fails here, as for want of memory, fails again in the call itself, which raises.
    with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False), suppress(RuntimeError):
        leaves = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in key]
        out = own(*(tensor.requires_grad_() for tensor in leaves), **options)
        torch.autograd.grad(out, leaves, torch.empty_like(out))
