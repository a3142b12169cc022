"""gpubound.decoder: generation from the live weights, with no host in the loop.

One token passes loop.py (launches, and reads what arrives), step_graphs.py (k steps in a graph, then a choice) and
transformer.py (a step, layer by layer).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ..device import label, plainly
from ..distributed.local_shard import any_sharded
from ..errors import GenerateError
from ..guards import NotCopyable, ReentryGuard
from ..kernels.dispatch import hasten
from ..lora.layers import base_of
from ..models import Decoder
from ..models.language_model import LanguageModel
from ..models.llama.checkpoint import as_transformers
from ..models.registry import reader_of, runner_of
from ..trace import fallback, notice
from .calls import kernel_calls
from .certificate import DecoderCertificate, certify
from .kv_cache import CacheLayout
from .loop import RunningRequest
from .model_watch import ModelWatch
from .reference import Accuracy, accuracy
from .request import (
    SAMPLING,
    Request,
    check_prompts,
    check_verify,
    describe_sampling,
    make_request,
    model_ends,
    pad,
    padding_of,
    read_prompts,
)
from .result import Generation
from .runner import ModelRunner, RunnerConfig
from .speculation import Draft, stepper_of, tokens_a_step
from .stages.body import pipeline_runner
from .stages.graphs import StageGraphs
from .stages.spread import devices_of
from .step_graphs import BatchState, StepGraphs, Stepper
from .tensors.body import sliced_runner
from .tensors.graphs import SliceGraphs
from .text import TextCodec
from .transformer import FusedRunner
from .ways import gemv_rows, tiled_gemm_rows
from .weight_view import bind, restore_on_error, warn_about_hooks

LADDER = (32, 8, 1)  # steps a launch
SPECULATIVE_LADDER = (8, 1)  # they bring several tokens each: long launches would run on for long behind the last


class FastDecoder(NotCopyable):
    """A decoder over live weights; `gpubound.decoder` makes it. `print(decoder)` shows its path and what was verified."""

    INSTEAD = "copy the model, and build a decoder of the copy"

    def __init__(
        self, model: nn.Module, stepper: Stepper, ladder: tuple[int, ...], text: TextCodec | None, verify: bool | str
    ) -> None:
        self.model, self.stepper, self.ladder, self.text = model, stepper, ladder, text
        self.body: ModelRunner = stepper.body
        self.slots = stepper.slots
        self.graphs = _graphs(stepper)
        self.max_batch, self.max_length = self.body.max_batch, self.body.max_length
        self.kernels = self.body.kernels  # what computes a step, in a few words
        self.path = self.body.path  # why the fused kernels do not compute it; empty where they do
        self.certificate: DecoderCertificate | None = None
        self.turn = ReentryGuard(
            GenerateError,
            "a decoder runs one request at a time: finish or close the stream that is open first, or build another for each "
            "thread.",
        )
        self.bound = ModelWatch(model, stepper, self.graphs)
        if verify:
            self.certificate = certify(self, quick=verify == "quick")
        else:
            notice("decoder: verify=False: nothing has shown that its tokens are those of the model.")
        if not self.body.calls:
            warn_about_hooks(model)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the decoder was built with, or None."""
        return None if self.text is None else self.text.tokenizer

    @property
    def generation(self) -> dict[str, Any]:
        """The model's generation config."""
        config: Any = getattr(self.model, "generation_config", None)
        return vars(config) if config is not None else getattr(self.model, "generation", {})

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text, from the model's generation config. The list may be empty."""
        return list(model_ends(self.generation, self.body.vocab))

    def generate(self, prompts: Any, **settings: Any) -> Generation:
        """Tokens for one prompt or several: text, ids, lists of either, a tensor.

        max_new_tokens  None: as many as max_length allows
        temperature     0 is greedy. top_k, top_p, min_p and repetition_penalty work as usual; each is off by default
        sampling        'model': the settings of the model's generation config, where none is passed here
        stop            tokens or strings that end a sequence. None: the model's own end of text. (): nothing. A stop token
                        stays in the sequence's tokens, but its text ends before whatever stopped it
        seed            with the same seed, a prompt draws the same random numbers in any batch. In fp32 its tokens are the
                        same, too; in 16 bits, logits of other batch sizes round differently and may choose other tokens
        n               sequences per prompt
        logprobs        True: also the log-probability of each token under the model
        adapters        a name for each prompt: that adapter alone is added to its rows; None for the model without any.
                        Without it, every row has all adapters that are on
        """
        run = self.start(prompts, **settings)
        for _ in run.play(alone=True):
            pass
        return run.result()

    def stream(self, prompts: Any, **settings: Any) -> Iterator[tuple[int, Any]]:
        """Yield (row, new text) as it arrives; without a tokenizer, (row, list of new ids). Takes what `generate` takes.

        The request is checked at once. You may leave the loop early: the decoder is then ready for the next request.
        """
        return self.start(prompts, **settings).play()

    def start(self, prompts: Any, **settings: Any) -> RunningRequest:
        """A request, checked and ready: `play()` yields as `stream` does, and then `result()` is what `generate` returns."""
        if settings.get("adapters") is not None:  # of which others may be on by now
            with self.turn, self.plainly():
                self.bound.follow()
        request = make_request(prompts, self.text, self.body, self.generation, **settings)
        if settings.get("sampling") == "model":
            explicit = {name: value for name, value in settings.items() if name in SAMPLING}
            notice(f"decoder: {describe_sampling(self.generation, explicit)}")
        return RunningRequest(self, request)

    def score(self, prompts: Any) -> list[list[float]]:
        """For each sequence, the log-probability of every token but the first, given the tokens before it."""
        found = read_prompts(prompts, self.text, padding_of(self.generation, self.text))
        check_prompts(found, self.body.vocab, max(len(found), 1), self.max_length, "score", new=0)
        with self.turn, self.plainly():  # it uses the cache of the first row
            self.bound.follow()
            return [self._score(number, ids) for number, ids in enumerate(found)]

    def _score(self, number: int, ids: list[int]) -> list[float]:
        if len(ids) < 2:
            return []
        row = pad([ids], len(ids), self.body.device)[0]
        scores = self.body.score(row).tolist()
        if not all(math.isfinite(score) for score in scores):
            raise GenerateError(
                f"score: the logits of prompt {number} are not finite; first seen in {self.body.locate(row)}. "
                "Check the weights (a diverged training run?) and the dtype."
            )
        return scores

    def accuracy(self, text: Any) -> Accuracy:
        """What rounding costs on `text` (text or ids): KL divergence per token and both perplexities, as a table."""
        if not self.body.rounds:
            raise ValueError(
                "accuracy: the decoder reads the live weights, which are not rounded, and so is its cache; build it with "
                "weights='int4' or cache='int8'."
            )
        texts = read_prompts(text, self.text)
        if len(texts) != 1:
            raise ValueError(f"accuracy: text: got {len(texts)}, wanted one; put them one behind the other.")
        return accuracy(self.body, texts[0])

    def __repr__(self) -> str:
        """Its path, kernels, sizes and certificate."""
        body = self.body
        head = (
            f"decoder of {type(self.model).__name__} on {label(body.device)}: up to {self.max_batch} rows of "
            f"{self.max_length} tokens, {' or '.join(str(k) for k in sorted(self.ladder))} "
            f"{'tokens' if self.stepper.tokens == 1 else 'steps'} a launch"
        )
        rows = body.report() + self.stepper.report()
        widths = [max(len(row[i]) for row in rows) for i in range(2)] if rows else [0, 0]
        lines = [f"  {part:{widths[0]}}  {what:{widths[1]}}  {why}".rstrip() for part, what, why in rows]
        path = f"  path: {body.kernels}{f' over {body.reads}' if body.reads else ''}"
        return "\n".join([head, path, *lines, f"  {self.certificate or 'not verified'}"])

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Without gradients, and without the caller's autocast and inference mode: one would compute in another dtype than
        the weights', the other make buffers that later calls may not write. Left before the caller sees a token."""
        with plainly(self.body.device), torch.no_grad():
            yield

    def begin(self, request: Request, ids: Tensor, lengths: Tensor, prefill: Callable[[Tensor, Tensor], None]) -> None:
        """Let the first rows stand behind prompts (B, T) of these lengths, which are without their last tokens."""
        rows = len(ids)
        self.slots.fill(request, rows, self.max_length)
        self.body.choose(request.adapters)
        self.body.reserve(self.slots.rows.limit[:rows])
        prefill(ids, lengths)
        self.stepper.prefill(ids, lengths)
        self.body.begin(self.slots.rows.token[:rows])

    def bucket(self, rows: int) -> int:
        """The rows that are launched for so many: the next power of two, so that few graphs serve all batches."""
        return min(1 << (rows - 1).bit_length(), self.max_batch)


def decoder(
    model: nn.Module,
    max_batch: int = 1,
    max_length: int = 4096,
    k: int | str = "auto",
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    fused: bool = True,
    verify: bool | str = True,
    speculate: int | Draft | None = None,
    weights: str | None = None,
    cache: str | None = None,
    pages: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    split: str = "layers",
) -> FastDecoder:
    """A decoder that reads `model`'s weights where they are: after a training step it generates with the new ones.

    max_batch   sequences at once
    max_length  the most tokens of a sequence, prompt included; the cache has this size
    k           steps per launch, each of which brings a token. 'auto': 32, 8 or 1, by what the rest of the text has room for
    dtype       must be the model's own, because the weights are never cast
    tokenizer   for text in and out: any object with encode and decode
    fused       False: transformers' own forward over a static cache instead of our kernels
    verify      True: the certificate. 'quick': the certificate without the comparison with fp32. False: none, and a line
                says so
    weights     None: the model's own. 'int8', 'int4' or 'fp8': rounded copies, which follow the model's weights when these
                change. `accuracy(text)` measures what the rounding costs
    cache       None: keys and values in the model's dtype. 'int8' or 'fp8': in 8 bits, with one scale for each token and
                kv head. `accuracy(text)` measures this cost too
    pages       None: room for max_batch rows of max_length. A number: the rows share this many pages of 64 tokens, and a
                request reserves the pages that its prompts and max_new_tokens may fill
    speculate   a number: guess this many tokens from the row's own text and check them in one step. gb.Draft(model, tokens):
                a small model guesses. The tokens are the same; they come sooner
    devices     None: where the model lies. A list of GPUs: they share the model
    split       what of it: 'layers' are moved to the devices in stages, as their free memory allows, and groups of rows keep
                all of them at work. 'tensors': each has a slice of every layer, copied, and all work on each token of few rows
    """
    for name, given in (("model", model), ("speculate: its model", getattr(speculate, "model", model))):
        if not isinstance(given, nn.Module):
            raise ValueError(f"decoder: {name}: got {type(given).__name__}, wanted a causal language model.")
    model = base_of(model)
    check_kind(model)
    text = TextCodec.of(tokenizer)
    check_verify(verify)
    if k != "auto" and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
        raise ValueError(f"decoder: k: got {k!r}, wanted 'auto' or a number of tokens a launch.")
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        raise ValueError(f"decoder: model: got {type(model).__name__} without weights, wanted a causal language model.")
    if first.is_meta or (devices is not None and any(p.is_meta for p in model.parameters())):
        raise ValueError(f"decoder: model: got {type(model).__name__} on meta, which holds no values; load its weights first.")
    if any(p.is_inference() for p in model.parameters()):
        raise ValueError(
            f"decoder: model: got {type(model).__name__} made inside torch.inference_mode(), of whose weights torch does not "
            f"tell when they change; make or load it outside."
        )
    if any_sharded(model.parameters()):
        raise ValueError("decoder: model: got a sharded one, and no rank holds all of it; export it, and decode that folder.")
    own = first.dtype
    if dtype is not None and dtype != own:
        raise ValueError(
            f"decoder: dtype: got {dtype}, but the weights are {own} and are read as they are; cast the model with .to() first."
        )
    width = tokens_a_step(speculate, first.device)
    ladder = tuple(dict.fromkeys((k, 1))) if isinstance(k, int) else LADDER if width == 1 else SPECULATIVE_LADDER
    build = RunnerConfig(max_batch, max_length, width, weights, CacheLayout(cache, pages))
    if devices is None and split != "layers":
        raise ValueError(f"decoder: split: got {split!r} without devices; name the GPUs that share the model.")
    over = None if devices is None else devices_of(devices, split)
    where = first.device if over is None else over[0]
    drafts = [base_of(speculate.model)] if isinstance(speculate, Draft) else []
    for draft in drafts:
        check_kind(draft)
    with plainly(where), torch.no_grad(), restore_on_error(model, *drafts):
        shared = sliced_runner if split == "tensors" else pipeline_runner
        body = _body(model, build, fused) if over is None else shared(model, build, fused, over)
        drafting = _body(drafts[0], RunnerConfig(max_batch, max_length), fused) if drafts else None
        slots = BatchState(body.max_batch, body.vocab, max(ladder) * width, body.device)
        return FastDecoder(model, stepper_of(body, slots, width, drafting), ladder, text, verify)


def _graphs(stepper: Stepper) -> StepGraphs:
    if stepper.body.peers:
        return SliceGraphs(stepper)
    return StageGraphs(stepper) if len(stepper.body.spans) > 1 else StepGraphs(stepper)


OWN_STEP = "the model's layers have a step of their own"


def check_kind(model: nn.Module) -> None:
    """Refuse a module that is neither one of transformers' models nor one of ours: no decoder knows its cache."""
    bases = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(model).__mro__}
    if not isinstance(model, LanguageModel) and "transformers.PreTrainedModel" not in bases:
        raise ValueError(
            f"decoder: model: got {type(model).__name__}, a plain module; wanted a causal language model of transformers or a "
            f"gb.Decoder. gb.capture(model) holds a forward of it in a CUDA graph."
        )


def _slow_body(model: Any, build: RunnerConfig, why: str) -> ModelRunner:
    """Return the body that runs the model's own forward."""
    if isinstance(model, LanguageModel) and model.runner:
        return import_module(model.runner).ModuleRunner(model, build, why)
    shell = as_transformers(model) if isinstance(model, Decoder) else model
    from .hf_forward import StaticCacheRunner  # imports transformers

    return StaticCacheRunner(shell, build, why, model)


def _body(model: Any, build: RunnerConfig, fused: bool) -> ModelRunner:
    """What runs the model."""
    special = runner_of(model) if fused else None
    together = build.weights is None and build.max_batch * build.tokens > gemv_rows(build)
    live = OWN_STEP if special else bind(model, build.max_length, together) if fused else "fused=False was asked for"
    for name, value in (("weights", build.weights), ("cache", build.cache.kind), ("pages", build.cache.pages)):
        if isinstance(live, str) and value is not None:
            raise ValueError(f"decoder: {name}: got {value!r}, which only the fused kernels read, and {live}.")
    if special is not None:
        return special.runner(reader_of(model), build)
    if isinstance(live, str):
        body = _slow_body(model, build, live)
        if fused:
            fallback("decoder: the fused kernels", live)
        return body
    hasten(kernel_calls(live, build.weights, tiled_gemm_rows(live, build) > 0, together), live.device, live.dtype)
    return FusedRunner(live, build)
