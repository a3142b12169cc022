"""gpubound.decoder: generation from the live weights, with no host in the loop.

running.py has a request's way: a prefill, then launches of k steps each. runner.py has the launches (k steps in a CUDA graph, a
token chosen in each) and the batch that they work on; transformer.py has a step, layer by layer.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from typing import Any, Never

import torch
from torch import Tensor, nn

from ..device import collecting_new_objects, label, plainly, resolve
from ..errors import GenerateError
from ..formatting import unexpected
from ..graph.guards import NotCopyable, ReentryGuard
from ..graph.runner import LentMemory
from ..kernels.dispatch import start_self_tests
from ..layers.linear_product import any_sharded
from ..lora.layers import base_of
from ..models import Decoder
from ..models.draft_head import DraftHead
from ..models.language_model import LanguageModel
from ..models.llama.checkpoint import as_transformers
from ..models.registry import reader_of, runner_of
from ..trace import fallback, notice, timed
from .certificate import Accuracy, DecoderCertificate, accuracy, certify
from .draft_head import HeadDraft
from .exact import ExactRunner, ExactStepper
from .images import check_images, image_inputs, image_prefill
from .kv_cache import Cache, CacheLayout
from .model_watch import ModelWatch
from .placement.pipeline import StageGraphs, pipeline_runner
from .placement.plan import devices_of
from .placement.tensor_parallel import SliceGraphs, sliced_runner
from .request import (
    SAMPLING,
    Generation,
    Request,
    check_prompts,
    describe_sampling,
    make_request,
    model_ends,
    named,
    pad,
    padding_of,
    read_prompts,
)
from .rollout import Rollout
from .rollout_request import rollout_request
from .runner import BatchState, ModelRunner, RunnerConfig, SamplingVariant, StepGraphs, Stepper
from .running import RunningRequest
from .speculation import Draft, ModelDraft, Pace, TextDraft, tokens_a_step
from .text import TextCodec
from .transformer import FusedRunner, gemv_rows, kernel_calls, split_gemm_rows, tiled_gemm_rows
from .weight_view import HostView, bind, restore_on_error, warn_about_hooks

LADDER = (32, 8, 1)  # steps a launch
SPARE = 32  # rows for which the cache has a spare one: see Rollout._stage
TIMED_AT = 256  # the position at which steps are timed
SPECULATIVE_LADDER = (8, 1)  # a step brings several tokens: a long launch would run on long after the last one


class FastDecoder(NotCopyable):
    """A decoder over live weights; `gpubound.decoder` makes it. `print(decoder)` shows its path and what was verified."""

    INSTEAD = "copy the model, and build a decoder of the copy"

    def __init__(
        self, model: nn.Module, stepper: Stepper, ladder: tuple[int, ...], text: TextCodec | None, verify: bool | str
    ) -> None:
        self.model, self.stepper, self.ladder, self.text = model, stepper, ladder, text
        self.body: ModelRunner = stepper.body
        self.slots = stepper.slots
        graphs = SliceGraphs if self.body.peers else StageGraphs if len(self.body.spans) > 1 else StepGraphs
        self.graphs: StepGraphs = graphs(stepper)
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
        self.lent: LentMemory | None = None  # the cache's memory, where it is lent between requests
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
    def refills(self) -> bool:
        """True where `rollout` can give a row the next sequence while others go on."""
        return self.body.refills and self.stepper.tokens == 1

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
        """Generate tokens for one prompt or several: text, ids, lists of either, a tensor, a processor's output with images.

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
        """Return a checked request: `play()` yields as `stream` does, and then `result()` is what `generate` returns."""
        if settings.get("adapters") is not None:
            self._follow()
        request = make_request(prompts, self.text, self.body, self.generation, **settings)
        if inputs := image_inputs(prompts) if isinstance(prompts, Mapping) else None:
            check_images(inputs, self.model, self.body, request.prompts)
        if settings.get("sampling") == "model":
            explicit = {name: value for name, value in settings.items() if name in SAMPLING}
            notice(f"decoder: {describe_sampling(self.generation, explicit)}")
        return RunningRequest(self, request, image_prefill(self.model, self.body, inputs) if inputs else None)

    def rollout(
        self,
        prompts: Any,
        n: int = 1,
        max_new_tokens: int | Sequence[int] | None = None,
        temperature: float | Sequence[float] = 1.0,
        logprobs: bool = True,
        seed: int = 0,
        stop: Any = None,
        adapters: Any = None,
        **settings: Any,
    ) -> Rollout:
        """Return an iterator over `n` sequences of each prompt as they end, of any number of prompts.

        A row whose sequence ends gets the next one, and the other rows go on. The samples of a prompt share its prefill; in 16
        bits, steps of many rows read its keys once for them.

        max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty
                  one for all, or a list with one for each prompt
        logprobs  of each token under softmax(logits / temperature), that is of the distribution that is drawn from, unless
                  top_k, top_p, min_p or repetition_penalty cut or bend it further; at temperature 0, softmax(logits)
        seed      with the prompt's index and the sample's it makes each sequence's own seed. Neither the order of the queue
                  nor max_batch changes a sequence's draws; in fp32 its tokens are the same, too
        stop      tokens or strings that end a sequence. None: the model's own end of text. (): nothing
        adapters  a name for each prompt, or one for all, as in `generate`
        """
        if adapters is not None:
            self._follow()
        settings["temperature"] = temperature
        return Rollout(self, rollout_request(self, prompts, n, max_new_tokens, logprobs, seed, stop, adapters, settings))

    def _follow(self) -> None:
        """Read the model again where it has changed: other adapters may have been switched on."""
        with self.turn, self.plainly():
            self.bound.follow()

    @named("score")
    def score(self, prompts: Any) -> list[list[float]]:
        """Return, for each sequence, the log-probability of every token but the first, given the tokens before it."""
        sequences = read_prompts(prompts, self.text, padding_of(self.generation, self.text))
        check_prompts(sequences, self.body.vocab, max(len(sequences), 1), self.max_length, new=0)
        result = []
        with self.turn, self.plainly():  # it uses the cache of the first row
            self.bound.follow()
            for number, ids in enumerate(sequences):
                row = pad([ids], len(ids), self.body.device)[0]
                scores = self.body.score(row).tolist() if len(ids) > 1 else []
                if not all(math.isfinite(score) for score in scores):
                    raise GenerateError(
                        f"score: the logits of prompt {number} are not finite; first seen in {self.body.locate(row)}. "
                        "Check the weights (a diverged training run?) and the dtype."
                    )
                result.append(scores)
        return result

    @named("accuracy")
    def accuracy(self, text: Any) -> Accuracy:
        """Return what rounding costs on `text` (text or ids): KL divergence per token and both perplexities, as a table."""
        if not self.body.rounds:
            raise ValueError(
                "accuracy: the decoder reads the live weights, which are not rounded, and so is its cache; build it with "
                "weights='int4' or cache='int8'."
            )
        texts = read_prompts(text, self.text)
        if len(texts) != 1:
            raise ValueError(f"accuracy: text: got {len(texts)}, wanted one; concatenate them.")
        with self.plainly():
            return accuracy(self.body, texts[0])

    def __repr__(self) -> str:
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
        """Disable gradients, and leave the caller's autocast, which computes in another dtype than the weights', and inference
        mode, whose buffers later calls may not write."""
        with plainly(self.body.device), torch.no_grad():
            if self.lent is not None and self.lent.take_back():
                self.graphs.clear()
            yield

    def lend_cache(self, first: Tensor | None = None) -> LentMemory | None:
        """Return the cache's memory, to be lent to others' graphs between requests; the next request takes it back. Each then
        finds an empty cache. None where other parts than ours hold keys and values, or several devices do.

        first: a tensor that needs its contents only while the memory is lent
        """
        cache = getattr(self.body, "cache", None)
        stores = cache.stores if isinstance(cache, Cache) and len(self.body.spans) < 2 and not self.body.peers else []
        tensors = [tensor for store in stores for tensor in store.tensors]
        if tensors:
            self.lent = LentMemory(tensors, self.turn, first)
            self.graphs.clear()  # they hold the old addresses
        return self.lent

    def begin(self, request: Request, ids: Tensor, lengths: Tensor, prefill: Callable[[Tensor, Tensor], None]) -> None:
        """Prefill the first rows with prompts (B, T) of these lengths, which are without their last tokens.

        The prefill is launched first: writing the request into the rows takes the host 0.4 ms, in which the GPU has work.
        """
        rows = len(ids)
        self.body.choose(request.adapters)
        self.body.reserve([min(len(prompt) + request.max_new_tokens, self.max_length) for prompt in request.prompts])
        prefill(ids, lengths)
        self.slots.fill(request, rows, self.max_length)
        self.stepper.prefill(ids, lengths)
        self.body.begin(self.slots.rows.token[:rows])

    def time_steps(self, rows: int) -> None:
        """Time a verified and a plain step of so many rows, once, where launches may be of either kind: `Pace` needs both. It
        overwrites what the cache holds of the first rows."""
        pace, at = self.stepper.pace, self.slots.rows.position[:rows]
        if pace is None or rows in pace.seconds or at.device.type != "cuda":
            return
        saved, took = self.graphs.state(rows), []
        for variant, k in ((SamplingVariant(), self.ladder[0]), (SamplingVariant(plain=True), pace.ladder[0])):
            at.fill_(min(TIMED_AT, self.max_length // 2))
            times = []
            for _ in range(4):  # at the first the graph is captured
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                self.graphs.launch(rows, k, variant)
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / (1e3 * k))
            took.append(min(times))
        for tensor, before in saved:
            tensor.copy_(before)
        pace.seconds[rows] = took[0], took[1]

    def bucket(self, rows: int) -> int:
        """Return the next power of two up to max_batch, so that few graphs serve all batches."""
        return min(1 << (rows - 1).bit_length(), self.max_batch)


@timed("decoder")
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
    exact: bool = False,
    device: str | torch.device | None = None,
    **unknown: Never,
) -> FastDecoder:
    """Build a decoder that reads `model`'s weights in place: after a training step it generates with the new ones.

    max_batch   sequences at once
    max_length  the most tokens of a sequence, prompt included; the cache has this size
    k           steps per launch, each of which brings a token. 'auto': 32, 8 or 1, by what the rest of the text has room for
    dtype       must be the model's own, because the weights are never cast
    tokenizer   for text in and out: any object with encode and decode
    fused       False: transformers' own forward over a static cache instead of our kernels
    verify      True: the certificate. 'quick': the certificate without the comparison with fp32. False: none, and a line
                reports it
    weights     None: the model's own. 'int8', 'int4' or 'fp8': rounded copies, which follow the model's weights when these
                change. `accuracy(text)` measures what the rounding costs
    cache       None: keys and values in the model's dtype. 'int8' or 'fp8': in 8 bits, with one scale for each token and
                kv head. `accuracy(text)` measures this cost too
    pages       None: room for max_batch rows of max_length. A number: the rows share this many pages of 64 tokens, and a
                request reserves the pages that its prompts and max_new_tokens may fill
    speculate   a number: guess this many tokens from the row's own text and check them in one step. gb.Draft(model, tokens):
                a small model guesses, or a gb.DraftHead. The tokens are the same; they come sooner
    devices     None: the model's own. A list of GPUs: they share the model
    device      None: the model's own. With `weights` another one: the rounded copies are made there, part by part, and the
                model stays where it is, such as in host memory if a GPU has no room for it
    split       what of it: 'layers' are moved to the devices in stages, as their free memory allows, and groups of rows keep
                all of them at work. 'tensors': each has a slice of every layer, copied, and all work on each token of few rows
    exact       True: the model's own modules by batch-invariant kernels. Tokens do not depend on the batch, log-probabilities
                are those of a TrainStep with exact=True, bit for bit. For dense models that are placed, and gb.Decoder
    """
    if unknown:
        raise unexpected("decoder", unknown, list(signature(decoder).parameters)[:-1])
    for name, value in (("model", model), ("speculate: its model", getattr(speculate, "model", None) or model)):
        if not isinstance(value, nn.Module):
            raise ValueError(f"decoder: {name}: got {type(value).__name__}, wanted a causal language model.")
    model = base_of(model)
    check_kind(model)
    text = None if tokenizer is None else TextCodec.of(tokenizer)
    if verify not in (True, "quick", False, None):
        raise ValueError(f"decoder: verify: got {verify!r}, wanted True, 'quick' or False.")
    if not isinstance(exact, bool):
        raise ValueError(f"decoder: exact: got {exact!r}, wanted True or False.")
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
    if dtype is not None and dtype != first.dtype:
        raise ValueError(
            f"decoder: dtype: got {dtype}, but the weights are {first.dtype} and are read as they are; cast the model with "
            f".to() first."
        )
    if exact:
        check_exact(fused, speculate, weights, cache, devices)
    width = 1 if speculate is None else tokens_a_step(speculate, first.device)
    ladder = tuple(dict.fromkeys((k, 1))) if isinstance(k, int) else LADDER if width == 1 else SPECULATIVE_LADDER
    same_bits = not (isinstance(speculate, Draft) and speculate.tensor_cores)
    spare = max_batch // SPARE if type(max_batch) is int and max_batch >= 2 * SPARE and width == 1 and devices is None else 0
    config = RunnerConfig(max_batch, max_length, width, weights, CacheLayout(cache, pages), same_bits=same_bits, spare=spare)
    if devices is None and split != "layers":
        raise ValueError(f"decoder: split: got {split!r} without devices; name the GPUs that share the model.")
    gpus = None if devices is None else devices_of(devices, split)
    target = first.device if device is None else resolve(device)
    if target != first.device and (weights is None or gpus is not None or isinstance(speculate, Draft)):
        other = "devices" if gpus is not None else "a draft" if weights is not None else "the model's own weights"
        raise ValueError(
            f"decoder: device: got {target} for a model on {first.device} together with {other}; give weights='int8', 'int4' "
            f"or 'fp8' alone, whose copies can be made there, or move the model."
        )
    source = speculate.model if isinstance(speculate, Draft) else None
    head = source if isinstance(source, DraftHead) else None
    drafts = [] if source is None or head is not None else [base_of(source)]
    for draft in drafts:
        check_kind(draft)
    home = target if gpus is None else gpus[0]
    with plainly(home), torch.no_grad(), restore_on_error(model, *drafts), collecting_new_objects(home):
        runner: ModelRunner
        if exact:
            runner = ExactRunner(model, config)
        elif gpus is None:
            runner = runner_for(model, config, fused, target)
        else:
            runner = (sliced_runner if split == "tensors" else pipeline_runner)(model, config, fused, gpus)
        drafting = runner_for(drafts[0], RunnerConfig(max_batch, max_length, redone=width - 1), fused) if drafts else None
        pace = Pace(LADDER if k == "auto" else ladder) if switches(speculate, runner) else None
        longest = max(max(ladder) * width, 0 if pace is None else max(pace.ladder))
        state = BatchState(runner.max_batch, runner.vocab, longest, runner.device)
        stepper: Stepper
        if head is not None:
            stepper = HeadDraft(check_head(runner), state, width, head)
        elif speculate is None:
            stepper = (ExactStepper if exact else Stepper)(runner, state)
        else:
            stepper = TextDraft(runner, state, width) if drafting is None else ModelDraft(runner, state, width, drafting)
        stepper.pace = pace
        fast = FastDecoder(model, stepper, ladder, text, verify)
        with fast.plainly():
            fast.time_steps(1)
        return fast


def switches(speculate: Any, runner: ModelRunner) -> bool:
    """Return whether launches may be of plain steps, too. A model that drafts would have to read the tokens of those."""
    drafted = speculate.model is None or isinstance(speculate.model, DraftHead) if isinstance(speculate, Draft) else speculate
    return bool(drafted) and getattr(speculate, "adaptive", True) and not runner.peers and len(runner.spans) < 2


def check_exact(fused: bool, speculate: Any, weights: Any, cache: Any, devices: Any) -> None:
    """Refuse what the batch-invariant kernels do not compute."""
    options = {"fused": not fused, "speculate": speculate, "weights": weights, "cache": cache, "devices": devices}
    if conflicts := [name for name, value in options.items() if value]:
        raise ValueError(
            f"decoder: exact: got {conflicts[0]}, too, for which there are no batch-invariant kernels; leave one of them out."
        )


def check_head(runner: ModelRunner) -> FusedRunner:
    """Return the runner if a draft head can read its hidden states."""
    if not isinstance(runner, FusedRunner):
        why = runner.path or "the model's layers have their own step"
        raise ValueError(
            f"decoder: speculate: got a DraftHead, which reads the hidden states of the fused kernels, and {why}; take a "
            "number, or gb.Draft of a model."
        )
    return runner


def check_kind(model: nn.Module) -> None:
    """Refuse a module that is neither one of transformers' models nor one of ours: no decoder knows its cache."""
    bases = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(model).__mro__}
    if not isinstance(model, LanguageModel) and "transformers.PreTrainedModel" not in bases:
        raise ValueError(
            f"decoder: model: got {type(model).__name__}, a plain module; wanted a causal language model of transformers or a "
            f"gb.Decoder. gb.capture(model) holds a forward of it in a CUDA graph."
        )


def runner_for(model: Any, config: RunnerConfig, fused: bool, device: torch.device | None = None) -> ModelRunner:
    """Return the runner of a model on one device: its family's, that of the fused kernels, or one that calls its forward.

    device  of packed weights, where it is not the model's
    """
    family = runner_of(model) if fused else None
    many = config.weights is None and config.max_batch * config.tokens > gemv_rows(config)
    view: Any  # of the weights, or the reason why the fused kernels cannot read them
    if family is not None:
        view = "the model's layers have their own step"
    else:
        view = bind(model, config.max_length, many) if fused else "fused=False was asked for"
    for name, value in (("weights", config.weights), ("cache", config.cache.kind), ("pages", config.cache.pages)):
        if isinstance(view, str) and value is not None:
            raise ValueError(f"decoder: {name}: got {value!r}, which only the fused kernels read, and {view}.")
    if family is not None:
        return family.runner(reader_of(model), config)
    if not isinstance(view, str):
        view = view if device in (None, view.device) else HostView(view, device)
        tiled, rows = tiled_gemm_rows(view, config) > 0, split_gemm_rows(view, config)
        split = bool(rows) and config.max_batch >= rows.start
        start_self_tests(kernel_calls(view, config.weights, tiled, many, split), view.device, view.dtype)
        return FusedRunner(view, config)
    runner: ModelRunner
    if isinstance(model, LanguageModel) and model.runner:
        runner = import_module(model.runner).ModuleRunner(model, config, view)
    else:
        from .hf_forward import StaticCacheRunner  # imports transformers

        try:
            runner = StaticCacheRunner(as_transformers(model) if isinstance(model, Decoder) else model, config, view, model)
        except ValueError as error:
            if not fused or reader_of(model) is None:
                raise
            raise ValueError(f"{error} The fused kernels do not take it, since {view}.") from error
    if fused:
        fallback("decoder: the fused kernels", view)
    return runner
