"""The loop of reinforcement learning: sample, score, learn, record. Sampler and trainer share one copy of the weights."""

import logging
import time
from contextlib import closing
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ..distributed.rendezvous import rank_and_world
from ..errors import DeviceError, GenerateError, RewardError
from ..files import explain_disk_full, locked
from ..formatting import hint, readable
from ..trace import say
from ..train.loop import Stop
from .batches import advantages, micro_batches
from .prepare import prepare
from .recipe import RLRecipe
from .rewards import AnswerGroup, Scoring
from .run import RLRun, figures_of
from .sampled import Sampled


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
    module = policy if isinstance(policy, nn.Module) else None
    if module is not None and keys.get("lora"):
        raise ValueError("rl: lora: got a policy that is a module; call gb.lora.add(policy) first, or give its folder.")
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
            if any(group.has_signal for group in groups) or ((recipe.kl or recipe.entropy) and groups):
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
            groups += [group for group in new if group.has_signal or not recipe.dynamic]
            if len(groups) == recipe.prompts_per_step:
                break
    except torch.OutOfMemoryError:
        run.order.position = position
        raise
    except (RewardError, GenerateError) as error:
        run.order.position = position
        run.save(wait=True)
        raise type(error)(
            f"{error} Step {run.done + 1 + ahead:,} was not taken; {run.checkpoints.folder} has those before it: correct the "
            f"cause, and go on with --resume."
        ) from error
    return Sampled(groups, every, seconds, waited)
