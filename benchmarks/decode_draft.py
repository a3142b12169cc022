"""The part of the decoding benchmark about speculation: a verified step of several tokens beside a plain one, batch 1.

Random weights accept no draft, so the cost of a step is measured, not a speed. With `a` tokens a step accepted, the speed is a
times the plain one divided by the ratio of the steps.
"""

from typing import Any

import gpubound
from gpubound import measure
from gpubound.decode.runner import SamplingVariant
from gpubound.trace import strict

from .decode_peers import LENGTH, prompts
from .harness import Bench, release

STEPS = 8  # a launch
TOKENS = (2, 3, 4, 5, 6)  # of a step
DRAFTED = 32768  # tokens that a head may draft, as of published heads


def measure_draft(bench: Bench, name: str, model: Any, rounds: int) -> None:
    """Measure steps that are looked up and steps that a head drafts, verified together by tensor cores."""
    ids = prompts(name, 1, bench.device).tolist()
    words = model.get_output_embeddings().weight.shape[0]
    for tokens in TOKENS[:1] if bench.dry else TOKENS:
        head = gpubound.DraftHead.for_model(model, range(min(DRAFTED, words)))
        kinds = {
            "plain step": None,
            "ours": gpubound.Draft(head, tokens - 1, tensor_cores=True),
            "looked up": gpubound.Draft(None, tokens - 1, tensor_cores=True),
        }
        works = {who: _launches(model, ids, speculate) for who, speculate in kinds.items()}
        found = measure.compare({"ours": works.pop("ours")} | works, device=bench.device, rounds=rounds)
        bench.keep(f"{name} batch 1, {STEPS} steps of {tokens} tokens with a draft head", found, unit="ms", amount=STEPS)
        release(bench.device)


def _launches(model: Any, ids: list[list[int]], speculate: Any) -> Any:
    """Return a launch of STEPS steps behind a prompt, captured."""
    with strict():
        decoder = gpubound.decoder(model, 1, LENGTH, k=STEPS, speculate=speculate, verify=False)
    decoder.generate(ids, max_new_tokens=4 * STEPS, stop=())

    def launch() -> None:
        with decoder.plainly():
            decoder.graphs.launch(1, STEPS, SamplingVariant())

    return launch
