"""From a loaded model to the first token in a fresh process: importing the decoder, building and verifying it, one prompt.

On the clock: importing gpubound.decode and triton, `gpubound.decoder(model)` with its certificate, the prefill, the first token
on the host. Off it: torch and transformers, the CUDA context, the weights. One line on stdout says what was found.

python -m benchmarks.decode_start 350m cuda
"""

import json
import os
import sys
import time
from typing import Any

import torch

from .decode_peers import NEW, build_model, prompts
from .shapes import shape_of

MARK = "@@ "
LENGTH = 4096  # the decoder's own default


def main(shape: str, device: torch.device) -> dict[str, Any]:
    model, ids = build_model(shape, device), prompts(shape, 1, device).tolist()
    before = used_bytes(device)
    begun = time.perf_counter()

    import gpubound
    from gpubound.measure.memory_phases import MemoryPhases
    from gpubound.trace import strict

    memory = MemoryPhases(device)
    with strict():
        with memory("make decoder"):
            decoder = gpubound.decoder(model, max_length=LENGTH)
        built_s = time.perf_counter() - begun
        with memory("generate"):
            stream = decoder.stream(ids, max_new_tokens=NEW, stop=())
            next(stream)
            facts: dict[str, Any] = {"first_token_s": time.perf_counter() - begun, "built_s": built_s, "path": decoder.path}
            for _ in stream:
                pass
            decoder.generate(ids, max_new_tokens=NEW, stop=())  # by now everything is captured
        facts["phases"] = {phase: peak._asdict() for phase, peak in memory.peaks.items()}
        if device.type == "cuda":
            facts["beyond_bytes"] = used_bytes(device) - before - cache_bytes(shape, model.dtype)
            facts["syncs"] = syncs(lambda: decoder.generate(ids, max_new_tokens=NEW, stop=()))
    return facts


def used_bytes(device: torch.device) -> int:
    """Of this process, by NVML: a graph's own memory and loaded kernels are in no allocator's figures. Where NVML does not know
    it, as in some containers, of the whole GPU."""
    if device.type != "cuda":
        return 0
    import pynvml

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    own = [p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
    free, total = torch.cuda.mem_get_info(device)
    return own[0] if own and own[0] is not None else total - free


def cache_bytes(shape: str, dtype: torch.dtype) -> int:
    s = shape_of(shape)
    return 2 * s.layers * s.kv_heads * s.head_dim * LENGTH * dtype.itemsize


def syncs(run: Any) -> int:
    """By torch's own hook, which sees every thread; once on, it costs 4 µs an allocation, so it comes last."""
    from gpubound.watch import watch

    with watch(gputrace=True) as ledger:
        run()
    return int(ledger.totals["syncs"])


if __name__ == "__main__":
    print(MARK + json.dumps(main(sys.argv[1], torch.device(sys.argv[2]))), flush=True)
