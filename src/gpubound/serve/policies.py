"""Several low-rank adapters on one base model, each a policy with its own optimizer: trained alternately, sampled by rows.

A policy's TrainStep trains its adapter alone; while it runs, the others are off and frozen. So a policy's weights are those of
training it alone. Sampling has all adapters on, and each row has one of them.

The files of a saved policy besides its adapter: the options of its optimizer, and the optimizer's state.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Never

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of, save as bytes_of
from torch import Tensor, nn

from .. import decode, lora
from ..data.formats import as_text
from ..decode.rollout import Rollout
from ..decode.text import TextCodec
from ..errors import DataError
from ..files import check_replaceable, read_json, reading, regular, replacing, write_atomic
from ..formatting import hint, shown
from ..layers.embedding_and_head import head_of
from ..lora.files import CONFIG, WEIGHTS
from ..lora.layers import adapted_layers, names_in
from ..lora.model import adapter_names, set_active
from ..train import AdamW, TrainStep
from ..train.checkpoint.files import checksum
from ..train.graph_cache import MODES as GRAPH_MODES
from ..train.precision import check_precision, precision as precision_named, spelled
from ..train.schedule import is_rate
from .requests import LOSS, RequestedLoss, loss_named, pack, read_examples

OPTIMIZER, FACTS = "optimizer.safetensors", "policy.json"
FILES = (WEIGHTS, CONFIG, OPTIMIZER, FACTS)
HALF = re.compile(r"\.(lora_(?:embedding_)?[AB])(?=\.weight$|$)")  # of an adapter, in a name without the adapter's own


def read_saved(folder: Path) -> tuple[dict[str, Any], int, dict[str, Tensor]]:
    """Return the options of the optimizer, the number of updates, and the optimizer's state."""
    facts = read_json(folder / FACTS, "save the policy again")
    sums = facts.get("crc32")
    for name, wanted in [(name, sums.get(name)) for name in (WEIGHTS, OPTIMIZER)] if isinstance(sums, dict) else ():
        with reading(folder / name):
            digest = checksum(regular(folder / name))
        if digest != wanted:  # a save over another one may have been interrupted
            raise DataError(f"{folder / name}: is not of the save that wrote {FACTS}; save the policy again.")
    options, updates = optimizer_options(facts.get("optimizer")), facts.get("updates")
    if type(updates) is not int:
        raise DataError(f"{folder / FACTS}: updates is {updates!r}, wanted a whole number; save the policy again.")
    try:
        with reading(folder / OPTIMIZER):
            return options, updates, tensors_of(regular(folder / OPTIMIZER).read_bytes())
    except SafetensorError as error:
        raise DataError(f"{folder / OPTIMIZER}: is not in safetensors' format: {error}; save the policy again.") from error


def rate(lr: Any) -> float:
    """Return a learning rate; raise ValueError for what is none."""
    if not is_rate(lr):
        raise ValueError(f"lr: got {lr!r}, wanted a finite number of at least 0.")
    return float(lr)


def optimizer_options(options: Any) -> dict[str, Any]:
    """Return the options of a policy's optimizer; raise ValueError for others."""
    wanted = {"lr", "betas", "weight_decay", "clip"}
    if not isinstance(options, dict) or options.keys() != wanted:
        raise ValueError(f"optimizer: got {options!r}, wanted {', '.join(sorted(wanted))}.")
    betas, clip = options["betas"], options["clip"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(is_rate(beta) and beta < 1 for beta in betas):
        raise ValueError(f"betas: got {betas!r}, wanted two numbers from 0 to below 1.")
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ValueError(f"clip: got {clip!r}, wanted a number above 0, or None.")
    AdamW(options["lr"], tuple(betas), weight_decay=options["weight_decay"])  # refuses its own
    return options | {"lr": rate(options["lr"]), "betas": list(betas)}


TOKENS = 8192  # of a micro-batch
SETTINGS = ("top_k", "top_p", "min_p", "repetition_penalty")  # of `sample`, besides those that it names
ALL = object()  # the decoder of all policies, whose rows have each their own


@dataclass(eq=False)
class TrainedPolicy:
    """A policy: its optimizer's options, and its step."""

    options: dict[str, Any]
    step: TrainStep
    loss: RequestedLoss
    pending: int = 0  # examples whose gradients the next update takes
    updates: int = 0
    saved: int = 0  # updates at the last save


class Policies:
    """Policies on one frozen base model, which may be quantised.

    model       a causal language model, placed or not, without a TrainStep
    tokenizer   of transformers, or a gb.Tokenizer: prompts and answers may then be texts
    max_length  tokens of a prompt and its answer, and of a row that is learnt
    max_batch   rows that are sampled at once; their keys and values stay in memory
    rows        rows of a micro-batch; None: as many as have 8,192 tokens
    precision, graph, recompute
                of each policy's TrainStep. precision "auto" is bf16 on a GPU and fp32 on a CPU
    ends        tokens that end an answer, where `sample` gets no `stop`. None: those of the model's generation config
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        max_length: int = 1024,
        max_batch: int = 64,
        rows: int | None = None,
        precision: str = "auto",
        graph: str = "auto",
        recompute: str | int = "cheap",
        ends: Sequence[int] | None = None,
    ):
        if adapter_names(model):
            raise ValueError(
                "policies: model: got one with adapters, wanted the base alone; merge them, or load them as a policy."
            )
        for what, value, least in (("max_length", max_length, 2), ("max_batch", max_batch, 1), ("rows", rows, 1)):
            if (type(value) is not int or value < least) and not (what == "rows" and value is None):
                raise ValueError(f"policies: {what}: got {value!r}, wanted a whole number, {least} or more.")
        self.model, self.tokenizer = model.requires_grad_(False), tokenizer
        self._text = TextCodec.of(tokenizer, "policies")
        self.max_length, self.max_batch, self.rows = max_length, max_batch, rows or max(1, TOKENS // max_length)
        self.device, self.ends = next(model.parameters()).device, ends
        precision = ("bf16" if self.device.type == "cuda" else "fp32") if precision == "auto" else precision
        precision_named(precision)  # a wrong one would be found by the first create
        if graph not in GRAPH_MODES:
            raise ValueError(f"policies: graph: got {graph!r}, wanted one of {', '.join(GRAPH_MODES)}.")
        self._settings: dict[str, Any] = {"precision": precision, "graph": graph, "recompute": recompute}
        self._policies: dict[str, TrainedPolicy] = {}
        self._decoders: dict[Any, Any] = {}
        self._by_rows: bool | None = None  # whether one decoder serves all policies; None: not known yet

    def create(
        self,
        name: str,
        rank: int = 16,
        alpha: float | None = None,
        targets: str | Sequence[str] = "all-linear",
        lr: float = 1e-4,
        betas: Sequence[float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        clip: float | None = 1.0,
        seed: int = 0,
        **unknown: Never,
    ) -> dict[str, Any]:
        """Give the model another adapter, and return its `status`. The first sample after this captures its graphs again.

        alpha  as in gpubound.lora.add; None: as large as the rank
        seed   of the adapter's start
        """
        if unknown:
            key = min(unknown)
            known = list(signature(self.create).parameters)[:-1]
            raise ValueError(f"create: {key!r} is unknown; {hint(key, known, 'it takes')}")
        optimizer = optimizer_options({"lr": lr, "betas": betas, "weight_decay": weight_decay, "clip": clip})
        if type(seed) is not int or not -(1 << 63) <= seed < 1 << 64:
            raise ValueError(f"create: seed: got {seed!r}, wanted a whole number of 64 bits.")
        _check_name(name, "create")
        if name in self._policies:
            raise ValueError(f"create: there is a policy {name!r} already; give another name.")
        with self._remaking("create"), torch.random.fork_rng([] if self.device.type == "cpu" else [self.device]):
            torch.manual_seed(seed)
            lora.add(self.model, rank, alpha, list(targets) if isinstance(targets, tuple) else targets, name=name)
        try:
            self._make(name, optimizer)
        except Exception:  # a step that cannot be: without its adapter the name is free again
            with self._remaking("create"):
                lora.remove(self.model, name)
            raise
        return self.status()[name]

    def forward_backward(
        self, name: str, examples: Sequence[Any], objective: str = "cross_entropy", **options: Any
    ) -> dict[str, Any]:
        """Add the gradients of these examples to those that the next `optim_step` divides by all of their items and takes.

        Return {"loss", "items", "logprobs": one list for each example, of its answer's tokens, 0 where one is not learnt, and
        the figures of the loss}. These are the policy's before the update.

        examples   dicts with prompt and answer, texts or token ids, and if you like `advantage` (a number, or one for each of
                   the answer's tokens; 1), `learnt` (0 for each token that a tool or an environment wrote), and
                   log-probabilities of the answer's tokens, in all examples or in none: `logprobs` of the sampler,
                   `old_logprobs`, `reference_logprobs`. An answer's text gets no special tokens: write the end of its turn
        objective  "cross_entropy", or a variant of the objective `policy`: "reinforce", "grpo", "dr_grpo", "dapo" or "gspo",
                   whose `options` are clip, clip_high, kl, entropy, average, truncate, temperature and max_tokens
        """
        policy, loss = self._policy(name, "forward_backward"), loss_named(objective, options)
        vocab = head_of(self.model).weight.shape[0]
        asked = read_examples(examples, self._ids, self.max_length, vocab)
        batches, slots = pack(asked, self.max_length, self.rows, self.device)
        recorded = []
        self._turn_to(name)
        policy.loss.begin()
        try:
            for batch in batches:
                policy.step.add(batch | {LOSS: loss})
                recorded.append(policy.loss.by_options[loss].kept[tuple(batch["labels"].shape)].clone())
        except BaseException:
            policy.pending = 0
            policy.step.discard()
            raise
        policy.pending += len(asked)
        logprobs = [values.tolist() for values in recorded]
        rows = [logprobs[at.batch][at.row][at.begin : at.end] for at in slots]
        return policy.loss.take(loss) | {"logprobs": rows}

    def optim_step(self, name: str, lr: float | None = None) -> dict[str, Any]:
        """Update the policy's weights by the mean of its gradients since the last update. lr: the rate from now on

        Return {"loss", "grad_norm", "items", "lr", "updates", "skipped"}: over all examples since then. An update that is not
        finite is skipped.
        """
        policy = self._policy(name, "optim_step")
        if not policy.pending:
            raise ValueError(f"optim_step: {name!r} has no gradients; call forward_backward first.")
        if lr is not None:
            policy.step.lr = policy.options["lr"] = rate(lr)
        self._turn_to(name)
        policy.pending = 0
        values = policy.step.update().read()
        policy.updates = values.updates
        return {
            "loss": values.loss, "grad_norm": values.grad_norm, "items": values.tokens, "lr": values.lr,
            "updates": values.updates, "skipped": values.skipped,
        }  # fmt: skip

    def sample(
        self,
        name: str | Sequence[str | None] | None,
        prompts: Sequence[Any],
        n: int = 1,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        seed: int = 0,
        logprobs: bool = True,
        stop: Any = None,
        **settings: Any,
    ) -> list[dict[str, Any]]:
        """Return `n` sequences of each prompt, in order, from the live weights: dicts with prompt (its index), sample, tokens,
        logprobs, finish, seed, and text where there is a tokenizer.

        name  a policy, None for the base alone, or one of these for each prompt: rows of one batch
        The other arguments are those of `FastDecoder.rollout`; settings: top_k, top_p, min_p, repetition_penalty.
        """
        arguments = n, max_new_tokens, temperature, logprobs, seed, self.ends if stop is None else stop
        runs = self._rollouts(name, self._prompts(prompts, "sample"), *arguments, **settings)
        sequences = [replace(one, prompt=numbers[one.prompt]) for run, numbers in runs for one in run.sequences]
        sequences.sort(key=lambda one: (one.prompt, one.sample))
        return [
            {
                "prompt": one.prompt, "sample": one.sample, "tokens": one.tokens, "logprobs": one.logprobs,
                "finish": one.finish, "seed": one.seed, "text": one.text,
            }
            for one in sequences
        ]  # fmt: skip

    def _prompts(self, prompts: Any, who: str) -> list[list[int]]:
        if not isinstance(prompts, Sequence) or isinstance(prompts, str) or not prompts:
            raise ValueError(f"{who}: prompts: wanted a list of at least one text or list of token ids.")
        return [self._ids(prompt, f"prompts[{number}]") for number, prompt in enumerate(prompts)]

    def _rollouts(
        self, name: str | Sequence[str | None] | None, ids: list[list[int]], *given: Any, **settings: Any
    ) -> Iterator[tuple[Rollout, list[int]]]:
        """Yield rollouts, each with the numbers of its prompts: a single one where rows choose their policy."""
        if not (name is None or isinstance(name, str | list | tuple)):
            raise ValueError(f"sample: name: got {name!r}, wanted a policy, None, or a list with one of these for each prompt.")
        if unknown := [key for key in settings if key not in SETTINGS]:
            raise ValueError(f"sample: {unknown[0]!r} is unknown; {hint(unknown[0], SETTINGS, 'the other settings are')}")
        names = list(name) if isinstance(name, list | tuple) else [name] * len(ids)
        if len(names) != len(ids):
            raise ValueError(f"sample: name: got {len(names)} for {len(ids)} prompts, wanted a policy or None for each.")
        for each in names:
            if each is not None:
                self._policy(each, "sample")
        self.model.eval()
        self._switch_on(list(self._policies))
        if self._by_rows is None:
            self._by_rows = not self._policies or self._decoder_of(ALL).body.adapters is not None
            if not self._by_rows:
                del self._decoders[ALL]  # with its keys and values
        if self._by_rows:
            yield self._decoder_of(ALL).rollout(ids, *given, names if self._policies else None, **settings), [*range(len(ids))]
            return
        for each in dict.fromkeys(names):  # the model's own forward computes all rows alike: a decoder for each policy
            self._switch_on([] if each is None else [each])
            numbers = [number for number, one in enumerate(names) if one == each]
            yield self._decoder_of(each).rollout([ids[number] for number in numbers], *given, **settings), numbers

    def _decoder_of(self, name: Any) -> Any:
        if name not in self._decoders:
            self._decoders[name] = decode.decoder(
                self.model, max_batch=self.max_batch, max_length=self.max_length, tokenizer=self.tokenizer, verify="quick"
            )
        return self._decoders[name]

    def save_state(self, name: str, folder: str | Path, overwrite: bool = False) -> dict[str, Any]:
        """Write the policy's adapter, in PEFT's layout, and its optimizer's state into `folder`."""
        policy, folder = self._policy(name, "save_state"), Path(folder)
        if policy.pending:
            raise ValueError(
                f"save_state: {name!r} has gradients that no update took, which are not saved; call optim_step first."
            )
        check_replaceable(folder, "save_state", FILES, overwrite=overwrite)
        lora.save(self.model, folder, name, overwrite=True)
        # Tensors are stored without the policy's name, which may be another later.
        named, live = re.compile(rf"\.(lora_(?:embedding_)?[AB])\.{re.escape(name)}(?=\.weight$|$)"), policy.step.state_dict()
        state = {named.sub(r".\1", key): t.detach().cpu().contiguous() for key, t in live.items()}
        with replacing(folder / OPTIMIZER) as file:
            file.write(bytes_of(state))
        sums = {each: checksum(folder / each) for each in (WEIGHTS, OPTIMIZER)}
        facts = {"optimizer": policy.options, "updates": policy.updates, "crc32": sums}
        write_atomic(folder / FACTS, json.dumps(facts, indent=2) + "\n")
        policy.saved = policy.updates
        return {"name": name, "updates": policy.updates}

    def load_state(self, name: str, folder: str | Path) -> dict[str, Any]:
        """Continue from what `save_state` wrote, exactly; a policy `name` that there is not is created. Return its `status`."""
        _check_name(name, "load_state")
        folder = Path(folder)
        optimizer, updates, state = read_saved(folder)
        check_precision(spelled(self._settings["precision"]), state)
        state = {HALF.sub(lambda m: f".{m[1]}.{name}", key): tensor for key, tensor in state.items()}
        known = self._policies.get(name)
        if known is None:
            with self._remaking("load_state"):
                lora.load(self.model, folder, name)
            known = self._make(name, optimizer)
            try:
                known.step.check_state_dict(state)
            except ValueError:
                known.step.close()
                del self._policies[name]
                with self._remaking("load_state"):
                    lora.remove(self.model, name)
                raise
        elif {**known.options, "lr": 0} != {**optimizer, "lr": 0}:
            raise ValueError(
                f"load_state: {folder} has other options of the optimizer than {name!r}; load it under another name."
            )
        else:
            known.step.check_state_dict(state)
            lora.load(self.model, folder, name)
        known.step.load_state_dict(state)
        known.step.lr = known.options["lr"] = optimizer["lr"]
        known.pending, known.updates, known.saved = 0, updates, updates
        return self.status()[name]

    def status(self) -> dict[str, dict[str, Any]]:
        """Return, by policy: its rank, its updates, those that no `save_state` has, and examples that wait for an update."""
        configs: Any = getattr(self.model, "peft_config", {})
        return {
            name: {
                "rank": configs[name].r, "lr": policy.options["lr"], "updates": policy.updates,
                "unsaved": policy.updates - policy.saved, "pending": policy.pending,
            }
            for name, policy in self._policies.items()
        }  # fmt: skip

    def close(self) -> None:
        """Release the model, whose adapters stay."""
        self._decoders.clear()
        for policy in self._policies.values():
            policy.step.close()
        self._policies.clear()

    def _policy(self, name: str, who: str) -> TrainedPolicy:
        if not isinstance(name, str) or name not in self._policies:
            known = self._policies
            why = hint(name, known, "the policies are") if known else "there is none yet; call create first."
            raise ValueError(f"{who}: there is no policy {name!r}; {why}")
        return self._policies[name]

    def _ids(self, value: Any, where: str, rest: bool = False) -> list[int]:
        """Return the tokens of a prompt, or of the `rest` of one, which no special token begins."""
        if isinstance(value, Sequence) and not isinstance(value, str) and all(type(token) is int for token in value):
            return list(value)
        if isinstance(value, str) and self._text is not None:
            return self._text.encode_rest(as_text(value, where)) if rest else self._text.encode(as_text(value, where))
        what = "a text, and there is no tokenizer" if isinstance(value, str) else shown(value)
        raise ValueError(f"{where}: got {what}, wanted token ids{' or a text' if self.tokenizer is not None else ''}.")

    def _make(self, name: str, options: dict[str, Any]) -> TrainedPolicy:
        loss = RequestedLoss()
        self._policies[name] = TrainedPolicy(options, self._step(name, options, loss), loss)
        return self._policies[name]

    def _step(self, name: str, options: dict[str, Any], loss: RequestedLoss) -> TrainStep:
        self._turn_to(name)
        optimizer = AdamW(options["lr"], tuple(options["betas"]), weight_decay=options["weight_decay"])
        step = TrainStep(self.model, loss, optimizer, accumulate=2, clip=options["clip"], **self._settings)
        for policy in self._policies.values():
            if not policy.step.closed:  # their steps are taken one after the other
                step.share_pool(policy.step)
                break
        return step

    def _turn_to(self, name: str) -> None:
        """Let the adapter `name` train and be on alone, as when its TrainStep was made."""
        self.model.train()
        self._switch_on([name])
        for one in adapter_names(self.model):
            for parameter in lora.parameters(self.model, one):
                parameter.requires_grad_(one == name)

    def _switch_on(self, names: Collection[str]) -> None:
        for _, layer in adapted_layers(self.model):
            set_active(layer, [one for one in names_in(layer) if one in names])

    @contextmanager
    def _remaking(self, who: str) -> Iterator[None]:
        """Release the model while an adapter is added to it; each policy then goes on, in a new step, as it was."""
        if waiting := [name for name, policy in self._policies.items() if policy.pending]:
            raise ValueError(
                f"{who}: {waiting[0]!r} has gradients that no update took, and would lose them; call optim_step first."
            )
        states = {}
        for name, policy in reversed(self._policies.items()):
            states[name] = {key: tensor.clone() for key, tensor in policy.step.state_dict().items()}
            policy.step.close()
        self._switch_on(list(self._policies))
        self._decoders.clear()
        self._by_rows = None
        try:
            yield
        finally:
            for name, policy in self._policies.items():
                policy.loss = RequestedLoss()
                policy.step = self._step(name, policy.options, policy.loss)
                policy.step.load_state_dict(states[name])


def _check_name(name: Any, who: str) -> None:
    parts = ("lora_A", "lora_B", "weight", "bias")  # of tensors' names, which PEFT could not tell from an adapter's
    if not isinstance(name, str) or not name or "." in name or "/" in name or name in parts:
        raise ValueError(f"{who}: name: got {name!r}, wanted a word without dots and slashes, and none of {', '.join(parts)}.")
