"""A contestant of the families benchmark's training cases, in a process of its own: Liger patches transformers' classes.

It serves one family after the other: {"family": NAME} builds the model and answers the first loss and gradient norm, or what
was raised; {"steps": N} times steps, {} frees the model.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from gpubound import measure
from gpubound.trace import strict

from .families import build, by_fla, config_of, train_of
from .harness import release
from .serving import answer, job_given

Step = Callable[[], torch.Tensor]


class Absent(Exception):
    """Liger has no patch for this model_type."""


def patch_by_liger(kind: str) -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as PATCHES

    if kind not in PATCHES:
        raise Absent(kind)
    PATCHES[kind]()


def contestant(who: str, name: str, device: torch.device, dry: bool) -> tuple[Any, Step]:
    """Return the model, and a step: gradients cleared, forward with the loss, backward. Weights and batch are everyone's."""
    if who == "liger":
        patch_by_liger(config_of(name, dry).model_type)
    model = build(name, device, dry, cut=True).train()
    model.config.use_cache = False
    train = train_of(name, dry)
    assert train is not None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (train.micro, train.seq), generator=generator).to(device)
    if who == "ours":
        from gpubound.place import place

        print(f"{name}: {str(place(model, device)).splitlines()[-1]}", file=sys.stderr)

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        with strict():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        return loss.detach()

    return model, step


def introduce(model: Any, step: Step, device: torch.device) -> dict[str, Any]:
    """Return the first step's loss and gradient norm, and the peak of one that is warm."""
    loss = step().item()
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in model.parameters() if p.grad is not None]
    facts = {"loss": loss, "gradient_norm": torch.stack(norms).norm().item(), "peak_gib": 0.0}
    for _ in range(2):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        facts["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return facts


def main() -> None:
    job = job_given()
    device, dry = torch.device(job.device), job.shape == "dry"
    model: Any = None
    step: Any = None
    answer({})
    for line in sys.stdin:
        wish = json.loads(line)
        if "steps" in wish:
            answer(measure.time(step, warmup=0, runs=wish["steps"], device=device).median_s)
            continue
        model = step = None
        release(device)
        try:
            if "family" in wish:
                model, step = contestant(job.who, wish["family"], device, dry)
            answer(introduce(model, step, device) | {"fla": by_fla(wish["family"])} if step else {})
        except Absent as absent:
            answer({"absent": str(absent)})
        except Exception as error:  # a kernel can raise anything; the next family's turn comes
            model = step = None
            answer({"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"})


if __name__ == "__main__":
    main()
