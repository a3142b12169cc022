"""A run: the policy with its step and its decoder, the prompts, the rewards, and what a checkpoint keeps of them."""

import dataclasses
import json
import logging
import math
import os
import secrets
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from .. import lora, trace
from ..data import Tokenizer
from ..device import label
from ..distributed import ALONE
from ..errors import DataError
from ..files import reading, write_atomic
from ..formatting import counted, shown
from ..layers import BatchInvariant
from ..models.registry import family_of, put_back
from ..monitor import LiveLine, RunTape, changed, write_report
from ..monitor.figures import warnings
from ..monitor.live import Gauges, open_log
from ..trace import fallbacks, say
from ..train.adapters import check_base, load_trained_state, merge as merge_adapters, trained_state
from ..train.checkpoint import Checkpoint, Checkpoints, joined
from ..train.checkpoint.checkpoints import WHERE, claim_export, note_export, restore_rng, rng_states
from ..train.device_step import StepResult
from ..train.objectives.policy import Policy
from ..train.step import TrainStep
from ..version import __version__
from .batches import RowShape, Sampled, as_state, from_state
from .episodes import Episode, Episodes
from .recipe import RLRecipe
from .rewards import AnswerGroup, PromptOrder, RewardFunction, RLPrompt, Scoring, means_of_parts, with_signal

LEARNT = (  # keys that decide what the next step does; a resumed run has those of its checkpoint
    "lora", "environment", "turns", "prompts_per_step", "samples", "max_new_tokens", "temperature", "seq", "cache", "exact",
    "dynamic", "rounds", "passes", "overlap", "variant", "advantages", "ratio_clip", "ratio_clip_high", "kl", "entropy",
    "truncate", "optimizer", "lr", "schedule", "warmup", "final", "weight_decay", "betas", "clip", "precision", "seed",
)  # fmt: skip
SHOWN = 4  # answers of a step that are kept to be read
SAMPLES = "samples.jsonl"


@dataclass(eq=False)
class RLRun:
    """A run. `train` (loop.py) takes its steps; `export` writes the policy afterwards."""

    recipe: RLRecipe
    model: nn.Module
    tokenizer: Tokenizer | None
    device: torch.device
    prompts: list[RLPrompt]
    eval_prompts: list[RLPrompt]
    rewards: list[RewardFunction]
    objective: Policy
    step: TrainStep
    decoder: Any
    reference: nn.Module | None  # a frozen copy, where kl counts and more than adapters train
    shape: RowShape
    stop_tokens: list[int]
    episodes: Episodes
    checkpoints: Checkpoints
    tape: RunTape
    base: dict[str, int] = field(default_factory=dict)  # checksums of the frozen model's files
    id: str = field(default_factory=lambda: secrets.token_hex(8))  # marks its exports
    done: int = 0
    ahead: Sampled | None = None  # the answers of the next step, where they were sampled before the last update
    order: PromptOrder = field(init=False)
    evaluations: dict[int, float] = field(default_factory=dict)  # held-out reward by step
    stopped: str | None = None  # the signal that ended it
    silent: bool = False  # a step without a signal has been reported

    _side: Any = None  # stream
    _thread: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        self.order = PromptOrder(len(self.prompts), self.recipe.seed)
        ids = chain.from_iterable((len(prompt.ids), *prompt.ids) for prompt in self.prompts)
        self.prompts_checksum = crc32(np.fromiter(ids, np.int64).tobytes())
        self.reference_objective = self.recipe.objective()  # which remembers the model that it has tried

    @property
    def folder(self) -> Path:
        return Path(self.recipe.out)

    @property
    def finished(self) -> bool:
        return self.done >= self.recipe.steps

    @property
    def best(self) -> int | None:
        """The step with the highest held-out reward, the first of equal ones; None without held-out prompts."""
        rewards = {step: reward for step, reward in self.evaluations.items() if step}
        return max(rewards, key=lambda step: (rewards[step], -step), default=None)

    def answers(
        self, prompts: list[RLPrompt], samples: int, temperature: float, seed: int, stopping: Callable[[], Any] = lambda: None
    ) -> Generator[Episode, None, None]:
        """Return an iterator over the answers to `prompts` as they end, sampled from the weights as they are now.

        stopping  returns True where it is not to wait for an environment any more
        """
        rollout = self.decoder.rollout(
            [prompt.ids for prompt in prompts], n=samples, max_new_tokens=self.recipe.max_new_tokens, temperature=temperature,
            logprobs=True, seed=seed, stop=self.stop_tokens,
        )  # fmt: skip
        return self.episodes.play(rollout, prompts, stopping)

    def seed_of(self, done: int, attempt: int = 0) -> int:
        """Return the seed of the rollout of a step after `done` others: a resumed run repeats it."""
        return (self.recipe.seed * 1_000_003 + done * 64 + attempt) & ((1 << 63) - 1)

    def add_concurrently(self, batches: list[dict[str, Tensor]]) -> None:
        """Launch the gradients of micro-batches on a second stream; `update` waits for it. On a CPU they are computed now.

        They are launched, and their graphs captured, by a second thread: cuBLAS has a workspace for each thread and stream, and
        all graphs are captured on one stream, so that products of the decoder's would share it otherwise.
        """
        if self.device.type != "cuda":
            return self._add(batches)
        self._side = self._side or torch.cuda.Stream(self.device)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="gpubound-gradients")
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        return self._thread.submit(self._add, batches).result()

    def _add(self, batches: list[dict[str, Tensor]]) -> None:
        with torch.cuda.stream(self._side):  # which is of this thread
            for batch in batches:
                self.step.add(batch)

    def update(self) -> StepResult:
        """Update the weights by the gradients of `add_concurrently`."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
        return self.step.update()

    def close(self) -> None:
        """Release the model. Gradients that are not computed yet are waited for: their graphs' memory is freed."""
        if self._side is not None:
            self._side.synchronize()
        if self._thread is not None:
            self._thread.shutdown()
        self.step.close()

    def reference_of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the log-probabilities of the reference for a batch, where the step does not compute them itself."""
        if self.reference is None:
            return {}
        return {"reference_logprobs": self.reference_objective.logprobs(self.reference, batch)}

    def logprobs_of(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the log-probabilities of the current policy for a batch."""
        with BatchInvariant() if self.recipe.exact else nullcontext():
            return self.objective.logprobs(self.model, batch)

    def evaluate(self, scoring: Scoring) -> dict[str, float]:
        """Return the mean reward of an answer to each held-out prompt, in all and by function."""
        groups = [AnswerGroup(prompt) for prompt in self.eval_prompts]
        for answer in self.answers(self.eval_prompts, 1, self.recipe.eval_temperature, seed=0):
            groups[answer.number].answers.append(answer)
            scoring.submit(groups[answer.number])
        scoring.collect()
        reward = sum(group.rewards[0] for group in groups) / len(groups)
        self.evaluations[self.done] = reward
        return {"eval_reward": reward} | {f"eval/{name}": mean for name, mean in means_of_parts(groups).items()}

    # Checkpoints

    def state(self) -> dict[str, Tensor]:
        return joined(model=trained_state(self.model), step=self.step.state_dict())

    def save(self, wait: bool = False) -> None:
        """Take a snapshot between two steps, in host memory; with `wait`, write it now, else in the background."""
        facts: dict[str, Any] = {"rl": dataclasses.asdict(self.recipe), "id": self.id, "base": self.base, WHERE: os.getcwd()}
        facts |= {"recipe": dataclasses.asdict(self.recipe.training())}  # by which `gpubound generate` finds the model
        facts |= {"position": self.order.position, "evaluations": self.evaluations, "prompts": self.prompts_checksum}
        reward = self.evaluations.get(self.done)
        score = None if reward is None or not math.isfinite(reward) else -reward
        tensors = self.state() | joined(random=rng_states(ALONE, self.device))
        if self.ahead is not None:
            columns, facts["ahead"] = as_state(self.ahead, self.prompts)
            tensors |= joined(ahead=columns)
        self.checkpoints.save(self.done, tensors, facts, score, wait=wait, to_host=True)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where `checkpoint` was taken."""
        facts = checkpoint.facts
        if "rl" not in facts:
            raise DataError(f"{checkpoint.path}: is of gpubound train; go on with that, or give another --out.")
        old, new = facts["rl"], json.loads(json.dumps(dataclasses.asdict(self.recipe)))
        if changed := next((key for key in LEARNT if key in old and old[key] != new[key]), None):
            raise ValueError(
                f"resume: {changed}: got {shown(new[changed])}, and the run in {self.folder} has {shown(old[changed])}; give "
                f"that, or another --out to begin anew."
            )
        if self.base:
            check_base(self.recipe.model or "", self.base, checkpoint)
        if facts.get("prompts", self.prompts_checksum) != self.prompts_checksum:
            if facts.get("ahead") is not None:
                raise ValueError(f"resume: prompts: got others than {checkpoint.path} has answers to; give those of the run.")
            say("resume: prompts: got others than the run had; from here on they come in another order.", logging.WARNING)
        like, shapes = self.state(), {name: tuple(shape) for name, (shape, _) in checkpoint.shapes().items()}
        if wrong := next((name for name, t in like.items() if shapes.get(name, ()) != tuple(t.shape)), None):
            raise ValueError(
                f"resume: the policy: {wrong.removeprefix('model.')} has the shape {tuple(like[wrong].shape)}, and in "
                f"{checkpoint.path} {shapes.get(wrong)}; give the model that the run began with, or another --out."
            )
        tensors = checkpoint.tensors(like=like)
        load_trained_state(self.model, _part(tensors, "model."))
        self.step.load_state_dict(_part(tensors, "step."))
        restore_rng(_part(tensors, "random."), ALONE, self.device, self.recipe.seed, checkpoint.step)
        self.done, self.order.position, self.id = checkpoint.step, facts["position"], facts["id"]
        self.evaluations = {int(step): reward for step, reward in facts["evaluations"].items()}
        if facts.get("ahead") is not None:
            self.ahead = from_state(_part(tensors, "ahead."), facts["ahead"], self.prompts)

    @contextmanager
    def best_weights(self) -> Iterator[int]:
        """Set the weights of the highest held-out reward while inside, the last ones without held-out prompts."""
        best = self.done if self.best is None else self.best
        paths = {int(path.name.removeprefix("step-")): path for path in self.checkpoints.paths()}
        if best == self.done or best not in paths:
            yield self.done
            return
        with put_back(trained_state(self.model).values()):
            tensors = self.checkpoints.at(best).tensors(like=joined(model=trained_state(self.model)), begin=("model.",))
            load_trained_state(self.model, _part(tensors, "model."))
            yield best

    def export(self, path: str | Path, merge: bool = False, overwrite: bool = False) -> Path:
        """Write the best weights (see `best_weights`) as a Hugging Face folder; of a run with adapters these, in PEFT's files,
        or with `merge` the whole model."""
        path, recipe = Path(path), self.recipe
        if recipe.model is None or self.tokenizer is None:
            raise ValueError(
                "export: the policy is a module of yours; save it as it was made, with save_pretrained or state_dict."
            )
        claim_export(path, self.id, overwrite)
        family = family_of(recipe.model)
        with self.best_weights() as step:
            if recipe.adapters is None:
                family.save(self.model, path, self.tokenizer, overwrite=True)
            elif not merge:
                lora.save(self.model, path, overwrite=True)
                self.tokenizer.save(path, overwrite=True)
            else:
                merged = family.load(recipe.model, "cpu")
                recipe.adapters.add(merged)
                load_trained_state(merged, trained_state(self.model))
                merge_adapters(merged)
                family.save(merged, path, self.tokenizer, overwrite=True)
        note_export(path, self.id, step, self.done)
        return path

    # Records

    @contextmanager
    def recording(self, log: str | None = None) -> Iterator[Callable[[dict[str, Any], list[AnswerGroup]], None]]:
        """Write what it yields is given, a step's record and groups, to the tape, the live line and a logger."""
        recipe, title = self.recipe, self.folder.resolve().name
        config = dataclasses.asdict(recipe)
        versions = {"gpubound": __version__, "torch": torch.__version__, "python": sys.version.split()[0]}
        self.tape.rewind(self.done)
        self._rewind_samples()
        self.tape.tell(
            name=title,
            config=config,
            changed=changed(recipe),
            machine={"device": label(self.device)} | versions,
            verdict=None,
            finished=False,
        )
        self.checkpoints.before_commit = self.tape.flush
        quiet = trace.logger.level > logging.INFO
        line: Any = nullcontext() if quiet else LiveLine(recipe.steps, title)
        with open_log(log, self.folder, title, config) as logged, Gauges(self.device) as gauges, line as live:

            def write(record: dict[str, Any], groups: list[AnswerGroup]) -> None:
                record = record | gauges.read()
                self.tape.append(record)
                if groups:
                    self.tape.tell(sample=self._write_samples(record["step"], groups))
                if live is not None:
                    live.show(record)
                logged(record)

            yield write

    def _rewind_samples(self) -> None:
        """Remove the answers of steps after the checkpoint, which a resumed run samples again."""
        path = self.folder / SAMPLES
        if path.is_file():
            with reading(path):
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            write_atomic(path, "".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.done))

    def _write_samples(self, step: int, groups: list[AnswerGroup]) -> str:
        """Add some answers of a step to samples.jsonl; return them as text, for the report."""
        group = [*with_signal(groups), *groups][0]
        prompt = group.prompt.ids if group.prompt.text is None else group.prompt.text
        rows = [
            {"step": step, "prompt": prompt, "answer": _shown_answer(answer), "reward": reward, "finish": answer.finish}
            for answer, reward in zip(group.answers, group.rewards)
        ][:SHOWN]
        with open(self.folder / SAMPLES, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        asked = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        return "\n\n".join([f"step {step}: {asked}", *(f"reward {row['reward']:g}: {row['answer']}" for row in rows)])

    def conclude(self) -> str:
        """Write the verdict and the report; return the verdict."""
        steps = self.tape.steps()
        rewards = [float(record["reward"]) for record in steps if "reward" in record]
        parts = [f"{counted(self.done, 'step')} on {label(self.device)}"]
        if rewards:
            parts.append(f"reward {rewards[0]:.3f} to {rewards[-1]:.3f}")
        if self.evaluations:
            first, last = min(self.evaluations), max(self.evaluations)
            parts.append(f"held-out reward {self.evaluations[first]:.3f} to {self.evaluations[last]:.3f}")
            if self.best is not None and self.evaluations[self.best] > self.evaluations[last]:
                parts.append(f"best {self.evaluations[self.best]:.3f} at step {self.best:,}")
        shares = {
            name: [r[f"{name}_share"] for r in steps[1:] if f"{name}_share" in r] for name in ("sample", "reward", "learn")
        }
        if shares["sample"]:
            parts.append(
                ", ".join(f"{name} {sum(values) / len(values):.0%}" for name, values in shares.items()) + " of the time"
            )
        if self.stopped:
            parts.append(f"stopped by {self.stopped}, checkpoint of step {self.done} in {self.checkpoints.folder}")
        if self.device.type == "cuda" and self.step.captured:
            parts.append(f"captured as {counted(len(self.step.captured), 'graph')}")
        parts += warnings(steps)
        total = sum(fallbacks.values())
        parts.append("no fallback" if not total else f"{total} fallbacks")
        verdict = ", ".join(parts) + "."
        rows = [{"what": what, "why": why, "times": times} for (what, why), times in fallbacks.items()]
        self.tape.tell(verdict=verdict, finished=self.finished, fallbacks=rows)
        write_report([self.tape])
        return verdict


def _shown_answer(answer: Episode) -> Any:
    """Return an answer to be read: a text, without a tokenizer token ids; of several turns, all messages."""
    return answer.turns[0]["content"] if len(answer.turns) == 1 else answer.turns


def figures_of(groups: list[AnswerGroup]) -> dict[str, float]:
    """Return the figures of a step's answers."""
    answers = [answer for group in groups for answer in group.answers]
    figures = {"reward": fmean(reward for group in groups for reward in group.rewards)}
    figures |= {f"reward/{name}": mean for name, mean in means_of_parts(groups).items()}
    figures |= {"tokens": (tokens := sum(sum(answer.learnt) for answer in answers)), "length": tokens / len(answers)}
    figures |= {"ended": fmean(answer.finish == "stop" for answer in answers)}
    figures |= {"turns": fmean(answer.policy_turns for answer in answers)}
    return figures | {"no_signal": 1 - len(with_signal(groups)) / len(groups)}


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
