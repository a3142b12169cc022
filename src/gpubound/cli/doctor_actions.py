"""Actions of `gpubound doctor`: patches and their proof, the gate for CI, and the audit of what a CUDA graph can hold.

For --graph-ready, the step of one token of a language model is audited, as transformers runs it and as `gpubound.decoder`
does. A function or another module is audited with its example inputs.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..decode import FastDecoder, decoder
from ..decode.runner import SamplingVariant
from ..decode.transformer import FusedRunner
from ..device import resolve
from ..distributed import launched
from ..distributed.rendezvous import rank_and_world
from ..doctor.finding import Verdict
from ..doctor.fix.prove import Proof, prove, timed_steps
from ..doctor.fix.repair import PATCHES, Repair, expected_ms, patched
from ..doctor.gate import FAILED, NOT_MEASURED, OK, Budgets, gate, read_allowances, read_baseline
from ..errors import DataError, GpuboundError
from ..formatting import hint
from ..graph.audit import Audit, AuditedPart, Obstacle, audit
from ..models.language_model import LanguageModel
from ..models.registry import cache_in, cache_word, family_of, is_named
from .place import call, load

if TYPE_CHECKING:
    from .doctor import Command, Doctor


NOT_WRITTEN = 2
Result = tuple[list[str], int]
"""Lines to print, exit code."""


def progress() -> Callable[[str], None]:
    """Return a function that prints lines of progress to the present stderr, which the script may replace."""
    stderr = sys.stderr
    return lambda line: print(f"gpubound doctor: {line}", file=stderr, flush=True)


def read_gate(options: "Doctor") -> Callable[[Verdict], Result]:
    """Read the limits before the script runs, as an invalid file should cost no run. Return a function that applies them."""
    budgets = Budgets(**{each.name: getattr(options, each.name) for each in fields(Budgets)})
    if budgets.max_regress_pct is not None and options.baseline is None:
        raise ValueError("--max-regress-pct: got no --baseline to compare with; give the doctor.json of a good run.")
    baseline = None if options.baseline is None else read_baseline(Path(options.baseline))
    allowances = [] if options.allow is None else read_allowances(Path(options.allow))

    def apply(verdict: Verdict) -> Result:
        if budgets == Budgets() and options.baseline is None and options.allow is None:
            return [], OK
        result = gate(verdict, budgets, baseline, allowances)
        return result.lines(), result.code

    return apply


@dataclass(frozen=True)
class FixResult:
    """A verdict with its patches, all of them in one repair, and their proof."""

    verdict: Verdict
    repair: Repair | None = None
    proof: Proof | None = None

    @property
    def diff(self) -> str:
        return "" if self.repair is None else self.repair.diff()

    @property
    def expected_ms(self) -> float | None:
        """Milliseconds of a patched step, by the prices; None without patches or prices."""
        return expected_ms(self.verdict, self.repair) if self.repair is not None and self.repair.patches else None


def check_fix(options: "Doctor") -> None:
    """Raise ValueError for options of --fix that make no sense."""
    for option, present in (("fix-also", options.fix_also), ("apply", options.apply), ("prove", options.prove is not None)):
        if present and not options.fix:
            raise ValueError(f"--{option}: got no --fix; there is no patch without it.")
    for name in options.other_patches:
        if name not in PATCHES:
            raise ValueError(f"--fix-also: {name!r} is no patch; {hint(name, list(PATCHES), 'wanted one of')}")
    if options.prove is None:
        return
    if options.prove < 3:
        raise ValueError(f"--prove: got {options.prove}, wanted at least 3 rounds: an interval needs them.")
    _, world = rank_and_world()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if local != world:
        raise ValueError(
            f"--prove: got {world} ranks, {local} of them on this machine, wanted all on one, where a proof can start them "
            f"again and again; run it on one machine, or leave out --prove."
        )


def patch(options: "Doctor", command: "Command", verdict: Verdict) -> FixResult:
    """Return the verdict with its patches, and their proof if --prove was given."""
    if not options.fix:
        return FixResult(verdict)
    verdict, repair = patched(verdict, options.other_patches)
    if not repair.changes or options.prove is None:
        return FixResult(verdict, repair)
    changes = {path: after for path, (_, after) in repair.changes.items()}
    gc.collect()  # the script's memory: the runs of the proof need the same amount on the same GPU
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    proof = prove(
        command.target, command.rest, changes=changes, equal=repair.equal, rounds=options.prove, module=command.module,
        marker=options.step_marker, dry=options.dry_run, ranks=rank_and_world()[1] if launched() else 0, report=progress(),
        **timed_steps(verdict),
    )  # fmt: skip
    return FixResult(verdict, repair, proof)


def finish_fix(options: "Doctor", result: FixResult) -> Result:
    """Write the files if --apply was given and the proof holds."""
    if result.repair is None:
        return [], OK
    lines = [str(result.repair) or "--fix: no finding has a line that could be patched.", result.diff]
    if result.expected_ms is not None:
        step = result.verdict.step_ms or 0.0
        lines.append(f"expected by the prices: {step:.2f} ms before, {result.expected_ms:.2f} ms a step after")
    code = OK
    if options.prove is not None:
        code = NOT_MEASURED if result.proof is None else OK if result.proof.holds else FAILED
        lines.append("--prove: there is no patch to prove." if result.proof is None else str(result.proof))
    if options.apply and code == FAILED:
        lines.append("--apply: nothing was written: the losses are not the same.")
    elif options.apply:
        try:
            lines += [f"patched: {path.name}" for path in result.repair.apply()]
        except (DataError, OSError) as error:  # reported after the diff, which took a run
            lines.append(f"--apply: nothing was written: {error}")
            code = NOT_WRITTEN
    return [text for text in lines if text], code


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
