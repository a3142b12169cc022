"""`gpubound doctor --graph-ready TARGET`: the audit of what a CUDA graph can hold.

For a language model, the step of one token is audited, as transformers runs it and as `gpubound.decoder` does. A function or
another module is audited with its example inputs.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..decode import FastDecoder, decoder
from ..decode.runner import SamplingVariant
from ..decode.transformer import FusedRunner
from ..device import resolve
from ..errors import GpuboundError
from ..graph.audit import Audit, AuditedPart, Obstacle, audit
from ..models.language_model import LanguageModel
from ..models.registry import cache_in, cache_word, family_of, is_named
from .place import call, load

VOCABULARY, POSITIONS = 512, 512  # of a preset, whose tokenizer is unknown
PROMPT = 16  # tokens before the step
STEPS = 12  # tokens that replays generate one after the other, compared with eager calls


def graph_ready(target: str, device: str, as_json: bool) -> int:
    """Print the audits of `target`. Return 0: all is ready; 1: something is not; 3: no device to capture on."""
    where = resolve(device)
    results = audits(_load(target, where), where)
    code = max((audit.exit_code for audit in results), key=(0, 3, 1).index)
    if as_json:
        print(json.dumps({"version": 2, "target": target, "exit": code, "audits": [a.as_dict() for a in results]}, indent=1))
    else:
        print("\n\n".join(map(str, results)))
    return code


def _load(target: str, device: Any) -> Any:
    if (Path(target) / "config.json").is_file():
        return load(target)[0]
    if is_named(target):
        return family_of(target).make(target, VOCABULARY, POSITIONS, device)
    return call_named(target)


def audits(thing: Any, device: torch.device) -> list[Audit]:
    """Return the audits of a model, of a callable, or of (callable, *inputs), on `device`."""
    fn, *inputs = thing if isinstance(thing, tuple) else (thing,)
    if isinstance(fn, nn.Module):
        fn = fn.to(device)
    with torch.no_grad() if isinstance(fn, nn.Module) else nullcontext():
        if not inputs and (isinstance(fn, LanguageModel) or hasattr(fn, "prepare_inputs_for_generation")):
            return [_audit_token(fn.eval(), device), _audit_decoder(fn)]
        return [audit(fn, *tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tuple(inputs)))]


def _audit_token(model: Any, device: torch.device) -> Audit:
    """Audit the model's own call for one token, with the cache of a prompt where the model is transformers' own."""
    config = model.config
    own = isinstance(model, LanguageModel)
    vocabulary = config.vocabulary if own else config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, PROMPT + 1), generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    if own:
        return audit(model, ids)
    prompt = model(input_ids=ids[:, :-1], use_cache=True)
    return audit(model, kwargs={"input_ids": ids[:, -1:], cache_word(model.forward): cache_in(prompt), "use_cache": True})


def _audit_decoder(model: Any) -> Audit:
    name = f"gpubound.decoder({type(model).__name__})"
    try:
        engine = decoder(model, max_length=PROMPT + 4 * STEPS)
    except (GpuboundError, ValueError) as error:  # its message is the result
        refused = AuditedPart(name, model, (), {}, obstacles=[Obstacle(str(error).rstrip("."))])
        return Audit(name, next(model.parameters()).device, [refused])
    if isinstance(engine.body, FusedRunner):
        engine.body.host = None  # the CPU's own path reads positions; the step that a GPU would capture is audited
    return audit_decoding(engine, name)


def audit_decoding(engine: FastDecoder, name: str = "gpubound.decoder", prompt: int = PROMPT, steps: int = STEPS) -> Audit:
    """Audit the whole step of a decoder after a prompt, sampling included. Replays make `steps` tokens in a row."""
    step = decoding_step(engine, prompt, steps)
    step.__name__ = name
    return audit(step, other_inputs=[()] * steps)


def decoding_step(engine: FastDecoder, prompt: int, steps: int) -> Callable[[], torch.Tensor]:
    ids = torch.randint(engine.body.vocab, (prompt,), generator=torch.Generator().manual_seed(0), device="cpu")
    run = engine.start(ids.tolist(), max_new_tokens=min(3 * steps, engine.max_length - prompt), stop=())
    with engine.plainly():
        tokens = ids[None, :-1].to(engine.body.device, torch.int32)
        lengths = torch.tensor([prompt - 1], dtype=torch.int32, device="cpu").to(engine.body.device)
        engine.begin(run.request, tokens, lengths, engine.body.prefill)
    state = engine.slots.rows.first(1)

    def step() -> torch.Tensor:
        with engine.plainly():
            if engine.body.device.type == "cpu":  # where sampling has a short cut that reads tensors
                state.token.copy_(engine.body.step(state.token, state.position).argmax(-1))
                engine.body.begin(state.token)
                state.position.add_(1)
                return state.token.clone()
            engine.stepper.run(1, 1, SamplingVariant())
            return engine.slots.emitted[0, :1].clone()

    return step


def call_named(target: str) -> Any:
    """Call what MODULE:NAME or FILE.py:NAME names, without arguments; return a callable, or a callable with its inputs.

    Where the call returns neither, the named function itself is the step that is audited.
    """
    where, _, name = target.rpartition(":")
    if not where or not name.isidentifier():
        raise ValueError(
            f"graph-ready: got {target!r}, wanted a folder with a config.json, a preset's name, MODULE:NAME or FILE.py:NAME."
        )
    maker, result = call(target)
    inputs: Any = getattr(result, "example_inputs", None)
    if isinstance(result, nn.Module) and inputs is not None:
        return (result, *inputs())
    first = result[0] if isinstance(result, tuple) and result else result
    return result if callable(first) else maker
