"""What is audited where a person names a model: the step that makes one token, as transformers runs it and as
`gpubound.decoder` does. A function or another module is audited as it is, with the inputs that came with it."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ...decode import FastDecoder, decoder
from ...decode.fused import FusedBody
from ...decode.steps import LaunchWay
from ...errors import GpuboundError
from ...models.keywords import cache_in, cache_word
from ...models.own import LanguageModel
from .audit import ready
from .readiness import Obstacle, PartReadiness, Readiness

PROMPT = 16  # tokens before the step
STEPS = 12  # tokens in a row that a replay makes beside an eager call


@dataclass(frozen=True)
class AuditTarget:
    """Something to audit: a callable and what it is called with."""

    fn: Callable
    inputs: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    others: list[tuple] | None = None

    def audit(self) -> Readiness:
        with torch.no_grad() if isinstance(self.fn, nn.Module) else nullcontext():
            return ready(self.fn, *self.inputs, kwargs=self.kwargs, other_inputs=self.others)


def audits(thing: Any, device: torch.device) -> list[Readiness]:
    """The audits of a model, of a callable, or of (callable, *inputs), on `device`."""
    fn, *inputs = thing if isinstance(thing, tuple) else (thing,)
    if isinstance(fn, nn.Module):
        fn = fn.to(device)
    if not inputs and (isinstance(fn, LanguageModel) or hasattr(fn, "prepare_inputs_for_generation")):
        fn.eval()
        return [_token_step(fn, device).audit(), _decoder_audit(fn)]
    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tuple(inputs))
    return [AuditTarget(fn, moved).audit()]


def _token_step(model: Any, device: torch.device) -> AuditTarget:
    """The call that brings one token: with the cache of a prompt where the model is transformers' own."""
    config = model.config
    own = isinstance(model, LanguageModel)
    vocabulary = config.vocabulary if own else config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, PROMPT + 1), generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    if own:
        return AuditTarget(model, (ids,))
    with torch.no_grad():
        prompt = model(input_ids=ids[:, :-1], use_cache=True)
    return AuditTarget(model, (), {"input_ids": ids[:, -1:], cache_word(model.forward): cache_in(prompt), "use_cache": True})


def _decoder_audit(model: Any) -> Readiness:
    name = f"gpubound.decoder({type(model).__name__})"
    try:
        made = decoder(model, max_length=PROMPT + 4 * STEPS)
    except (GpuboundError, ValueError) as error:  # its sentence is the answer
        device = next(model.parameters()).device
        return Readiness(name, device, [PartReadiness(name, obstacles=[Obstacle(str(error).rstrip("."))])])
    if isinstance(made.body, FusedBody):
        made.body.host = None  # a CPU's own way reads its places, as it may: the step that a GPU would capture is audited
    return decoding_step(made, name).audit()


def decoding_step(made: FastDecoder, name: str = "gpubound.decoder", prompt: int = PROMPT, steps: int = STEPS) -> AuditTarget:
    """The whole step of a decoder, the choice of the token included, behind a prompt. Replays make `steps` tokens in a row."""
    ids = torch.randint(made.body.vocab, (prompt,), generator=torch.Generator().manual_seed(0), device="cpu")
    run = made.start(ids.tolist(), max_new_tokens=min(3 * steps, made.max_length - prompt), stop=())
    with made.plainly():
        given = ids[None, :-1].to(made.body.device, torch.int32)
        lengths = torch.tensor([prompt - 1], dtype=torch.int32, device="cpu").to(made.body.device)
        made.begin(run.request, given, lengths, made.body.prefill)

    state = made.slots.rows.first(1)

    def step() -> torch.Tensor:
        with made.plainly():
            if made.body.device.type == "cpu":  # where the choice by a kernel has a short cut that reads its tensors
                state.token.copy_(made.body.step(state.token, state.position).argmax(-1))
                made.body.begin(state.token)
                state.position.add_(1)
                return state.token.clone()
            made.stepper.run(1, 1, LaunchWay())
            return made.slots.emitted[0, :1].clone()

    step.__name__ = name
    return AuditTarget(step, others=[()] * steps)


def named(target: str) -> Any:
    """What MODULE:NAME or FILE.py:NAME makes: a callable, or a callable with its inputs.

    NAME is called without arguments. Where it gives neither, it is itself the step that is audited.
    """
    where, _, name = target.rpartition(":")
    if not where or not name.isidentifier():
        raise ValueError(
            f"graph-ready: got {target!r}, wanted a folder with a config.json, a preset's name, MODULE:NAME or FILE.py:NAME."
        )
    try:
        maker = getattr(_module(where), name)
        made = maker()
    except (Exception, SystemExit) as error:  # the user's own code may raise anything, or end; the cause is kept
        raise ValueError(f"{target} raised {type(error).__name__}: {error}") from error
    inputs: Any = getattr(made, "example_inputs", None)
    if isinstance(made, nn.Module) and inputs is not None:
        return (made, *inputs())
    first = made[0] if isinstance(made, tuple) and made else made
    return made if callable(first) else maker


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        sys.path.insert(0, "")  # as `python -m` would
        try:
            return import_module(where)
        finally:
            sys.path.remove("")
    name = Path(where).stem
    while name in sys.modules:  # another file's
        name += "_"
    spec = importlib.util.spec_from_file_location(name, where)
    assert spec is not None and spec.loader is not None  # its name ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(where).resolve().parent))
    sys.modules[name] = module  # where dataclasses and pickle look for a class's own
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.pop(0)
    return module
