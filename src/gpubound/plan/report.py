"""The text and the JSON of a plan."""

from typing import Any

from ..train.recipe import Recipe
from ..words import in_words, quantity, readable
from .cards import GIB
from .pace import EAGER, LAST_BUCKET
from .propose import FREE, Proposal
from .setting import Setting

ABOUT = [
    f"assumed: replicas sum their gradient beside the last backward, but for its last {readable(LAST_BUCKET)}; sharded ranks "
    f"gather and sum beside the blocks",
    f"assumed: a step of replicas is captured; a sharded one is not, and costs the host {EAGER} bare launches for each kernel",
    "assumed: the data keeps up, and takes no memory; what passes over links slows no kernel beside it",
    "checked: on one GPU, on two and on four, by gpubound plan --check; no prediction for more has met a run yet",
    f"fits: at most {1 - FREE:.0%} of the memory is used",
]


def headline(recipe: Recipe, setting: Setting, gpus: str) -> str:
    vocabulary, tokens = f"vocabulary {setting.config.vocabulary:,}", quantity(setting.tokens_per_step)
    model = f"{recipe.model}, {vocabulary}: {setting}, {recipe.optimizer}"
    return f"{model}; a step has {tokens} tokens, rows of {setting.seq:,}; {gpus}"


def gib(total: int) -> str:
    """The memory of a GPU. --memory may say less than 1 GiB."""
    return f"{total / GIB:.0f}" if total >= 10 * GIB else f"{total / GIB:.1f}"


def table(found: list[Proposal], best: Proposal | None) -> str:
    head = f"{'':9}{'sharing':9}{'micro':>6}{'acc':>6} {'recompute':10}{'GiB':>7}{'fits':>6}{'sent':>10}{'step':>10}"
    head += f"{'tok/s':>9}{'MFU':>6}  bound by"
    return "\n".join([head, *(f"{'best' if p is best else '':9}{row(p)}" for p in found)])


def row(p: Proposal) -> str:
    s = p.setting
    sharing = p.sharing or "one GPU"
    sent = readable(sum(call.sent(s.world) for call in p.wire)) if p.wire else "-"
    cut = f"{sharing:9}{s.rows:>6}{s.accumulate * s.world:>6} {s.recompute:10}"
    size = f"{p.bytes / GIB:>7.1f}{'yes' if p.fits else 'no':>6}"
    pace = f"{in_words(p.step_s):>10}{quantity(p.tokens_per_s):>9}{p.mfu:>6.0%}"
    return f"{cut}{size}{sent:>10}{pace}  {p.bottleneck}"


def parts(p: Proposal) -> str:
    lines = [f"memory of a GPU, {p.bytes / GIB:.1f} GiB:"]
    lines += [f"  {name:36}{size / GIB:>8.2f} GiB" for name, size in p.memory.items()]
    if p.wire:
        lines.append("sent by a GPU in a step:")
        for call in p.wire:
            whole, sent = readable(call.bytes), readable(call.sent(p.setting.world))
            lines.append(f"  {f'{call.what}, {call.kind}':56}{call.times:>6} x {whole:>9}{sent:>11}")
    lines.append(f"a step, {in_words(p.step_s)}:")
    lines += [f"  {name:36}{1e3 * s:>9.2f} ms {s / p.step_s:>5.0%}" for name, s in p.seconds.items()]
    return "\n".join(lines)


def as_json(
    model: str,
    gpus: int,
    gpu: str,
    total: int,
    assumed: list[str],
    as_it_is: Proposal,
    best: Proposal | None,
    found: list[Proposal],
) -> dict[str, Any]:
    return {
        "model": model, "gpus": gpus, "gpu": gpu, "memory_bytes": total, "assumed": assumed,
        "parameters": as_it_is.setting.outline.parameters, "trained": as_it_is.setting.trained,
        "tokens_per_step": as_it_is.setting.tokens_per_step, "precision": as_it_is.setting.precision,
        "as_it_is": as_it_is.as_dict(), "best": best.as_dict() if best else None,
        "plans": [p.as_dict() for p in found],
    }  # fmt: skip
