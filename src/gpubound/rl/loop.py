"""The loop of reinforcement learning: sample, score, learn, record. Sampler and trainer share one copy of the weights.

`prepare` builds a run from its recipe: everything is checked before the first step.
"""

import copy
import logging
import multiprocessing
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import decode, lora
from ..data import Tokenizer
from ..data.tokenizer import ends_of_turn
from ..decode.kv_cache import PAGE, pages_for
from ..device import resolve
from ..distributed import ALONE
from ..distributed.rendezvous import rank_and_world
from ..errors import DeviceError, GenerateError, RewardError
from ..files import explain_disk_full, locked
from ..formatting import hint, quantity, readable
from ..graph.runner import released
from ..monitor import RunTape
from ..trace import notice, say
from ..train.adapters import base_of
from ..train.checkpoint import Checkpoints
from ..train.loop import Stop
from ..train.prepare import newest_checkpoint, place_model
from ..train.recipe import check_out
from ..train.step import TrainStep
from .batches import RowShape, Sampled, advantages, micro_batches
from .episodes import Episodes, read_environment
from .recipe import RLRecipe
from .rewards import (
    KNOWN,
    AnswerGroup,
    RLPrompt,
    Scoring,
    check_columns,
    check_sendable,
    check_tokens,
    fitting,
    read_prompts,
    read_rewards,
    with_signal,
)
from .run import RLRun, figures_of


def prepare(
    recipe: RLRecipe,
    policy: nn.Module | None,
    prompts: Any,
    eval_prompts: Any,
    rewards: Any,
    environment: Any,
    tokenizer: Any,
    resume: bool,
) -> RLRun:
    """Return the run of a recipe: everything is checked and built, and its checkpoint restored."""
    functions = read_rewards(recipe.rewards if rewards is None else rewards)
    if recipe.processes:
        check_sendable(functions)
    replies = read_environment(recipe.environment if environment is None else environment)
    if replies is not None and (recipe.seq is None or recipe.turns < 2):
        key, value, wanted = ("turns", recipe.turns, "2 or more") if recipe.turns < 2 else ("seq", None, "the most tokens")
        raise ValueError(f"rl: {key}: got {value} with an environment, wanted {wanted} that a conversation may have.")
    if replies is None and recipe.turns > 1:
        raise ValueError(f"rl: turns: got {recipe.turns} without an environment; give one, or leave turns out.")
    device, folder = resolve(recipe.device), Path(recipe.out)
    if policy is None and (recipe.model is None or not Path(recipe.model).is_dir()):
        raise ValueError(f"rl: model: got {recipe.model!r}, wanted a Hugging Face folder with the policy's weights.")
    check_out(recipe.model, recipe.out)
    known = _tokenizer(recipe, tokenizer)
    asked = read_prompts(recipe.prompts if prompts is None else prompts, known)
    validation = recipe.eval_prompts if eval_prompts is None else eval_prompts
    eval_list = [] if validation is None else read_prompts(validation, known, "eval_prompts")
    check_columns(functions, asked, "prompts")
    check_columns(functions, eval_list, "eval_prompts")
    if known is None and (name := next((one.name for one in functions if isinstance(one.call, tuple(KNOWN.values()))), None)):
        raise ValueError(
            f"rewards: {name} reads texts, and there is no tokenizer; pass tokenizer=, or a function of token ids."
        )
    new = recipe.max_new_tokens
    seq = recipe.seq or max(len(prompt.ids) for prompt in (*asked, *eval_list)) + new
    asked, eval_list = fitting(asked, seq, new, "prompts"), fitting(eval_list, seq, new, "eval_prompts") if eval_list else []
    checkpoints = Checkpoints(folder / "checkpoints", recipe.keep)
    checkpoint = newest_checkpoint(checkpoints, resume)
    shape = RowShape.of(recipe.prompts_per_step * recipe.samples, seq, recipe.row_tokens, recipe.micro_batch, recipe.pack)
    training = recipe.training(max(2, shape.most) if recipe.overlap else shape.most)  # one alone has no `add`
    objective = recipe.objective()
    torch.manual_seed(recipe.seed)
    if policy is None:
        assert known is not None
        model, _ = place_model(training, known, device, ALONE)
    else:
        model = policy
        device = next(model.parameters()).device
    exact = recipe.is_exact(model, device)
    recipe = replace(recipe, exact=exact)  # what the run's checkpoints record
    copied = recipe.kl and any(p.requires_grad for p in model.parameters()) and not _only_adapters(model)
    reference = copy.deepcopy(model).eval().requires_grad_(False) if copied else None
    step = training.make_step(model.train(), objective, device, exact=exact)
    if reference is not None:
        reference.to(next(p for p in model.parameters() if p.is_floating_point()).dtype)
    rows = min(recipe.rollout_rows, max(recipe.prompts_per_step * recipe.samples, len(eval_list)))
    pages = cache_pages(recipe, asked, rows, seq) if exact else None
    shares = shares_memory(recipe, step)
    with released(step.sums if shares else None):
        decoder = decode.decoder(model, rows, seq, verify="quick", cache=recipe.cache, exact=exact, pages=pages)
        memory = decoder.lend_cache(step.sums) if shares else None
    check_tokens(asked, decoder.body.vocab, "prompts")
    check_tokens(eval_list, decoder.body.vocab, "eval_prompts")
    if memory is not None:
        step.borrow(memory)
        notice(
            f"rl: the cache of {readable(decoder.body.cache_bytes())} and the activations of the step's graphs share memory."
        )
    run = RLRun(
        recipe, model, known, device, asked, eval_list, functions, objective, step, decoder, reference, shape,
        _ends(recipe, decoder, known), Episodes(known, replies, recipe.turns, new, seq, recipe.timeout), checkpoints,
        RunTape.create(folder),
        base_of(recipe.model) if recipe.adapters and recipe.model else {},
    )  # fmt: skip
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    notice(
        f"rl: {quantity(trained)} parameters train on {len(asked):,} prompts: {recipe.prompts_per_step} a step, "
        f"{recipe.samples} answers each, learnt in rows of {shape.tokens:,} tokens, {shape.rows} at once."
    )
    if checkpoint is not None:
        run.restore(checkpoint)
    return run


def shares_memory(recipe: RLRecipe, step: TrainStep) -> bool:
    """Return whether the cache and the activations of captured steps share memory: with `overlap` both are in use at once."""
    return step.captures and not recipe.overlap and step.device.type == "cuda"


def cache_pages(recipe: RLRecipe, prompts: list[RLPrompt], rows: int, seq: int) -> int | None:
    """Return how many pages the cache of a run has, in which the samples of a prompt have its full pages once.

    They are enough for the longest prompts in all rows, and for twice as many prompts as begin together, since the last sample
    of one still needs its pages while the rows of the others have the next one's. Where prompts come with one sample, as in an
    evaluation, some rows may wait. None: room for all rows, as conversations need, which grow.
    """
    if recipe.turns > 1:
        return None
    shared = [(len(prompt.ids) - 1) // PAGE for prompt in prompts]
    own = [pages_for(min(len(prompt.ids) + recipe.max_new_tokens, seq)) - n for prompt, n in zip(prompts, shared)]
    needed = rows * max(own) + 2 * -(-rows // recipe.samples) * max(shared)
    return min(max(needed, pages_for(seq)), rows * pages_for(seq))


def _only_adapters(model: nn.Module) -> bool:
    adapters = {id(p) for p in lora.parameters(model)}
    return bool(adapters) and all(id(p) in adapters for p in model.parameters() if p.requires_grad)


def _tokenizer(recipe: RLRecipe, tokenizer: Any) -> Tokenizer | None:
    """Return the run's tokenizer: the one that is given, the recipe's, or that of the model's folder."""
    if isinstance(tokenizer, str | Path):
        known = Tokenizer.load(tokenizer)
    elif isinstance(tokenizer, Tokenizer):
        known = tokenizer
    elif tokenizer is not None:
        inner = getattr(tokenizer, "backend_tokenizer", None)
        if inner is None:
            raise ValueError(
                f"rl: tokenizer: got a {type(tokenizer).__name__}, wanted a folder, or a fast tokenizer of transformers."
            )
        known = Tokenizer(inner, tokenizer.eos_token, tokenizer.chat_template, bos_token=tokenizer.bos_token)
    elif recipe.tokenizer is not None or recipe.model is not None:
        known = Tokenizer.load(recipe.tokenizer or recipe.model or "")
    else:
        return None
    return known if recipe.chat_template is None else known.with_template(recipe.chat_template)


def _ends(recipe: RLRecipe, decoder: Any, tokenizer: Tokenizer | None) -> list[int]:
    """Return the tokens that end an answer."""
    ends = set(decoder.ends)
    if tokenizer is not None:
        ends |= {*([] if tokenizer.eos is None else [tokenizer.eos]), *ends_of_turn(tokenizer)}
    for text in recipe.stop:
        token = None if tokenizer is None else tokenizer.inner.token_to_id(text)
        if token is None and text.isdecimal():
            token = int(text)
        if token is None:
            raise ValueError(f"rl: stop: {text!r} is no single token of the tokenizer; give one that is, or its number.")
        ends.add(token)
    return sorted(ends)


def train(
    policy: str | nn.Module,
    prompts: Any = None,
    rewards: Any = None,
    *,
    environment: Any = None,
    tokenizer: Any = None,
    eval_prompts: Any = None,
    resume: bool = False,
    log: str | None = None,
    **keys: Any,
) -> RLRun:
    """Train `policy` to answer `prompts` with higher `rewards`; return the run, whose `export(folder)` writes the best weights.

    policy     a Hugging Face folder; or a causal language model, placed or not, with adapters or not
    prompts    a .jsonl file, or a list: texts, messages, token ids, or dicts with one of these as `prompt` and other keys
    rewards    a function, a list of functions, or a dict with their weights (rewards.py)
    environment
               what replies to the policy's turns, for answers of several (episodes.py): a function, or the name of one
    tokenizer  of a policy that is a module: a folder, or a fast tokenizer of transformers; None: prompts are token ids
    resume     go on from the newest checkpoint in `out`
    log        also write the records to tensorboard, wandb or trackio
    keys       what an RLRecipe has: steps, samples, max_new_tokens, variant, kl, lr, out, ...
    """
    known = [each.name for each in fields(RLRecipe)]
    if unknown := [key for key in keys if key not in known]:
        raise ValueError(f"rl: {unknown[0]!r} is no key of an RLRecipe; {hint(unknown[0], known, 'they are')}")
    if (world := rank_and_world()[1]) > 1:
        raise ValueError(
            f"rl: got {world} processes, started by torchrun, wanted one: a run samples and learns on one GPU. Start it "
            f"without torchrun, or one for each GPU, by --device cuda:<index> and with another out each."
        )
    if keys.get("processes") and getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ValueError(
            "rl: processes: each process runs this script again, up to this call; put it under if __name__ == '__main__'."
        )
    module = policy if isinstance(policy, nn.Module) else None
    if module is not None and keys.get("lora"):
        raise ValueError("rl: lora: got a policy that is a module; call gb.lora.add(policy) first, or give its folder.")
    named = {"prompts": prompts, "eval_prompts": eval_prompts, "environment": environment, "tokenizer": tokenizer}
    keys |= {key: str(value) for key, value in named.items() if isinstance(value, str | Path)}  # those that run.json can hold
    if isinstance(rewards, Mapping) and all(isinstance(name, str) for name in rewards):
        keys["rewards"] = dict(rewards)
    recipe = RLRecipe(**keys if module is not None else keys | {"model": str(policy)})
    advice = "what was saved there before is intact. Free space, then go on with --resume, or give another --out."
    with explain_disk_full(recipe.out, advice), locked(recipe.out):
        run = prepare(recipe, module, prompts, eval_prompts, rewards, environment, tokenizer, resume)
        try:
            take_steps(run, log)
        except torch.OutOfMemoryError as error:
            run.save(wait=True)
            rows, tokens = run.shape.rows, run.shape.tokens
            raise DeviceError(
                f"rl: out of memory in step {run.done + 1:,}, with {rows} rows of {tokens:,} tokens learnt at once, and a "
                f"cache of {readable(run.decoder.body.cache_bytes())}: give a smaller micro_batch or rollout_rows. "
                f"{run.checkpoints.folder} has the steps before, and answers that were sampled: go on with --resume."
            ) from error
        finally:
            run.close()
        return run


def take_steps(run: RLRun, log: str | None = None) -> None:
    """Take the steps of `run` to the end, or until Ctrl-C; save and report either way."""
    recipe, step, objective = run.recipe, run.step, run.objective
    scoring, stop = Scoring(run.rewards, recipe.processes, recipe.timeout), Stop()
    with run.recording(log) as write, run.episodes, scoring, stop:
        if run.eval_prompts and not run.done:
            write({"step": 0} | run.evaluate(scoring), [])
        while not run.finished and not stop.asked:
            began, following = time.perf_counter(), None
            fresh = sample(run, scoring, stop) if run.ahead is None else None
            run.ahead = sampled = run.ahead or fresh  # checkpoints hold them until they are learnt
            if sampled is None:
                break

            # Learn: one update a pass. Of answers that are all worth the same nothing is learnt.
            record: dict[str, Any] = {"step": run.done + 1}
            groups, batches = sampled.groups, list[Any]()
            if with_signal(groups) or ((recipe.kl or recipe.entropy) and groups):
                batches = micro_batches(groups, advantages(groups, recipe.scaled), run.shape, run.device, recipe.pack)
            if batches:
                for batch in batches:
                    batch |= run.reference_of(batch)
                    if recipe.passes > 1:
                        batch["old_logprobs"] = run.logprobs_of(batch)
                if not recipe.overlap:
                    result = step(batches)
                else:  # the gradients are computed while the next answers are sampled: both read the weights before the update
                    run.add_concurrently(batches)
                    if run.done + 1 < recipe.steps:
                        following = sample(run, scoring, stop, ahead=1)
                        if following is None:
                            step.discard()
                            break
                    result = run.update()
                for _ in range(recipe.passes - 1):
                    result = step(batches)
                assert result is not None, "there is a micro-batch"
                values, figures = result.read(), objective.take_figures()
                record |= {"policy_loss": values.loss} | {
                    name: getattr(values, name) for name in ("grad_norm", "lr", "skipped")
                }
                record |= {name: figures[name] for name in ("entropy", "gap", "largest_gap", "clipped", "truncated")}
                record |= {"kl": figures["kl"]} if recipe.kl else {}
            elif not run.silent:
                run.silent = True
                say(
                    f"rl: step {run.done + 1:,}: the answers to each prompt all have one reward, so nothing is learnt; "
                    f"such steps are counted as no_signal. Give easier prompts, more samples, or a finer reward.",
                    logging.WARNING,
                )
            learnt = time.perf_counter()

            # Record.
            run.done, run.ahead = run.done + 1, following
            record |= figures_of(sampled.every) | {"seconds": learnt - began}
            record["sampled_per_s"] = record["tokens"] / sampled.seconds
            new = [each for each in (fresh, following) if each is not None]
            shares = {"sample": sum(each.seconds for each in new), "reward": sum(each.waited for each in new)}
            for phase, seconds in (shares | {"learn": learnt - began - sum(shares.values())}).items():
                record[f"{phase}_share"] = seconds / record["seconds"]
            failed: RewardError | None = None
            if run.eval_prompts and (run.finished or (recipe.eval_every and run.done % recipe.eval_every == 0)):
                try:
                    record |= run.evaluate(scoring)
                except RewardError as error:
                    failed = error
            write(record, sampled.every)
            if failed is not None:  # the step itself is taken, and kept
                run.save(wait=True)
                raise RewardError(
                    f"{failed} It failed in the evaluation after step {run.done:,}; {run.checkpoints.folder} has that step: "
                    f"correct the cause, and go on with --resume."
                ) from failed
            if "eval_reward" in record or (recipe.save_every and run.done % recipe.save_every == 0):
                run.save()
        run.stopped = stop.asked
        run.save(wait=True)
    say(f"{run.folder.resolve().name}: {run.conclude()}")


def sample(run: RLRun, scoring: Scoring, stop: Stop, ahead: int = 0) -> Sampled | None:
    """Sample the answers of the next step, and score those to a prompt while others are still being sampled.

    None if Ctrl-C comes before all are there: the rollout is repeated from its seed when the run goes on.

    ahead  1: of the step after the next one
    """
    recipe, position = run.recipe, run.order.position
    groups, every, seconds, waited = list[AnswerGroup](), list[AnswerGroup](), 0.0, 0.0
    try:
        for attempt in range(recipe.rounds if recipe.dynamic else 1):
            began = time.perf_counter()
            new = [AnswerGroup(run.prompts[i]) for i in run.order.take(recipe.prompts_per_step - len(groups))]
            asked, seed = [group.prompt for group in new], run.seed_of(run.done + ahead, attempt)
            with closing(run.answers(asked, recipe.samples, recipe.temperature, seed, lambda: stop.asked)) as answers:
                for answer in answers:
                    group = new[answer.number]
                    group.answers.append(answer)
                    if len(group.answers) == recipe.samples:
                        group.answers.sort(key=lambda each: each.sample)
                        scoring.submit(group)
                    if stop.asked:
                        break
            ended = time.perf_counter()
            seconds += ended - began
            if any(len(group.answers) < recipe.samples for group in new):
                run.order.position = position
                return None
            scoring.collect()
            waited += time.perf_counter() - ended
            every += new
            groups += with_signal(new) if recipe.dynamic else new
            if len(groups) == recipe.prompts_per_step:
                break
    except torch.OutOfMemoryError:
        run.order.position = position
        raise
    except (RewardError, GenerateError) as error:
        run.order.position = position
        run.save(wait=True)
        raise type(error)(
            f"{error} Step {run.done + 1 + ahead:,} was not taken; {run.checkpoints.folder} has the state before it: correct "
            f"the cause, and go on with --resume."
        ) from error
    return Sampled(groups, every, seconds, waited)
