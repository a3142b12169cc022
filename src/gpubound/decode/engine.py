"""gpubound.decoder: generation from the live weights, with no host in the loop. loop.py follows a request on its way."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import nn

from ..errors import GenerateError
from ..kernels.choose import hasten
from ..models import Decoder
from ..models.foreign import as_transformers
from ..models.llama.weights import ends_of
from ..trace import notice
from .cache import PLAIN, CacheLayout
from .certify import DecoderCertificate, certify
from .contract import Body
from .experts import ExpertsBody
from .fused import NARROW, FusedBody
from .judge import Accuracy, accuracy
from .live import bind, has_experts
from .loop import ActiveRequest
from .quantized import QuantizedBody
from .request import Choice, Request, check_count, check_prompts, check_stops, pad, read_prompts
from .result import Generation
from .slots import Slots
from .speculate import Draft, speculator, tokens_a_step
from .steps import StepGraphs

# What the fused body's first step calls; beside the model's own first forward they are compiled and tested sooner.
OPS = ("norm_product", "add_product", "norm_gate_up")
EXPERT_OPS = ("route", "routed_gate_up", "add_routed")
LADDER = (32, 8, 1)  # steps a launch
SPECULATIVE_LADDER = (8, 1)  # they bring several tokens each: long launches would run on for long behind the last


class FastDecoder:
    """Made by `gpubound.decoder`. `print(decoder)` says which path the model takes and what was verified."""

    def __init__(
        self,
        model: nn.Module,
        body: Body,
        path: str,
        ladder: tuple[int, ...],
        tokenizer: Any,
        verify: bool | str,
        width: int = 1,
        drafting: Body | None = None,
    ) -> None:
        self.model, self.body, self.path, self.ladder, self.tokenizer = model, body, path, ladder, tokenizer
        self.width = width  # tokens of a row that a step may bring
        self.slots = Slots(body.max_batch, body.vocab, max(ladder) * width, body.device)
        self.speculator = speculator(body, self.slots, width, drafting)
        self.graphs = StepGraphs(body, self.slots, self.speculator.run if self.speculator else None)
        self.certificate: DecoderCertificate | None = None
        self._busy = False
        self.layout = body.cache.layout if isinstance(body, FusedBody) else PLAIN
        self._modules = dict(model.named_modules())  # as bound: one put in another's place has weights that nothing here reads
        if verify:
            self.certificate = certify(self, quick=verify == "quick")
        else:
            notice("decoder: verify=False: nothing has shown that its tokens are those of the model.")

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text, as the model's generation config says; none where it says nothing."""
        config: Any = getattr(self.model, "generation_config", None)
        told = vars(config) if config is not None else getattr(self.model, "generation", {})
        return [token for token in ends_of(told) if 0 <= token < self.body.vocab]

    @property
    def kernels(self) -> str:
        """What computes a step, in a few words."""
        if self.path:
            return f"the model's own forward: {self.path}"
        return "plain torch" if isinstance(self.body, FusedBody) and self.body.host else "fused kernels"

    @property
    def max_batch(self) -> int:
        return self.body.max_batch

    @property
    def max_length(self) -> int:
        return self.body.max_length

    def generate(self, prompts: Any, **settings: Any) -> Generation:
        """Tokens for one prompt or several: text, ids, lists of either, a tensor.

        max_new_tokens      None: as far as max_length allows
        temperature         0 is greedy; then top_k, top_p, min_p, repetition_penalty as usual, each off by default
        stop                tokens or strings that end a sequence; None: the model's own end of text, (): nothing. A token stays
                            among the tokens; no text holds what stopped it
        seed, n             n sequences a prompt; a seed gives a prompt the same tokens in any batch
        logprobs            True: the log-probability of each token under the model
        """
        run = self.start(prompts, **settings)
        for _ in run.play():
            pass
        return run.result()

    def stream(self, prompts: Any, **settings: Any) -> Iterator[tuple[int, Any]]:
        """(row, what is new) as it arrives: text with a tokenizer, else a list of ids. Takes what `generate` takes.

        The request is checked at once; leaving the loop early leaves the decoder ready for the next request.
        """
        return self.start(prompts, **settings).play()

    def start(self, prompts: Any, **settings: Any) -> ActiveRequest:
        """A request checked and ready: `play()` yields what `stream` does; then `result()` is what `generate` gives."""
        return ActiveRequest(self, self._request(prompts, **settings))

    def score(self, prompts: Any) -> list[list[float]]:
        """The log-probability of every token of each sequence but its first, after what stands before it."""
        found = read_prompts(prompts, self.tokenizer)
        check_prompts(found, self.body.vocab, max(len(found), 1), self.max_length + 1)
        self._check_free()  # it uses the cache of the first row
        with self.plainly():
            self._follow_weights()
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
        """What rounding costs on `text` (text or ids): KL a token and both perplexities. Printed in the table."""
        if not isinstance(self.body, FusedBody) or not self.body.rounds:
            raise ValueError(
                "accuracy: the decoder reads the live weights, which are not rounded, and so is its cache; build it with "
                "weights='int4' or cache='int8'."
            )
        return accuracy(self.body, read_prompts(text, self.tokenizer)[0])

    def __repr__(self) -> str:
        from .table import table

        return table(self)

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Without gradients, and without the caller's autocast and inference mode: one would compute in another dtype than
        the weights', the other make buffers that later calls may not write. Left before the caller sees a token."""
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.body.device.type, enabled=False):
            yield

    def _check_free(self) -> None:
        if self._busy:
            raise GenerateError("a decoder runs one request at a time: finish or close the stream that is open first.")

    def _request(
        self,
        prompts: Any,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Any = None,
        seed: int = 0,
        n: int = 1,
        logprobs: bool = False,
    ) -> Request:
        check_count("n", n)
        if max_new_tokens is not None:
            check_count("max_new_tokens", max_new_tokens, "; None takes as many as fit")
        found = [prompt for prompt in read_prompts(prompts, self.tokenizer) for _ in range(n)]
        check_prompts(found, self.body.vocab, self.max_batch, self.max_length)
        self.layout.check_request([min(len(p) + (max_new_tokens or self.max_length), self.max_length) for p in found])
        stop = self.ends if stop is None else stop
        stops = [stop] if isinstance(stop, (str, Integral)) else list(stop)
        strings = tuple(s for s in stops if isinstance(s, str))
        if strings and self.tokenizer is None:
            raise ValueError("generate: a stop string needs a tokenizer; pass tokenizer= to gb.decoder, or stop token ids.")
        if "" in strings:
            raise ValueError("generate: a stop string is empty, which every text holds; leave it out.")
        return Request(
            found,
            self.max_length if max_new_tokens is None else max_new_tokens,
            Choice(temperature, top_k, top_p, min_p, repetition_penalty, seed),
            check_stops([int(s) if isinstance(s, Integral) else s for s in stops if not isinstance(s, str)], self.body.vocab),
            strings,
            logprobs,
        )

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor) -> None:
        self.body.reserve(self.slots.rows.limit[: len(ids)])
        self.graphs.prefill(ids, lengths)
        if self.speculator:
            self.speculator.prefill(ids, lengths)

    def moved(self) -> str | None:
        """The name of a weight that is no longer where the graphs read it."""
        return self.body.moved() or (self.speculator.moved() if self.speculator else None)

    def _follow_weights(self) -> None:
        """Graphs hold addresses: if a weight has moved since, say so, bind anew and capture again."""
        modules = dict(self.model.named_modules())
        if name := next((n for n in modules if modules[n] is not self._modules.get(n)), self.moved()):
            self.body.rebind()
            if self.speculator:
                self.speculator.rebind()
            self.graphs.clear()
            self._modules = modules
            notice(f"decoder: {name} is no longer where it was; bound to the weights as they are now, graphs captured again")

    def bucket(self, rows: int) -> int:
        """The rows that are launched for so many: the next power of two, so that few graphs serve all batches."""
        size = 1
        while size < rows:
            size *= 2
        return min(size, self.max_batch)


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
) -> FastDecoder:
    """A decoder on `model`'s live weights.

    max_batch   sequences at once
    max_length  tokens of a sequence, prompt included; the cache is made for as many
    k           steps in one launch, a token each: 'auto' takes 32, 8 or 1, whichever the rest of the text has room for
    dtype       must be the model's own, because the weights are read where they are and never cast
    tokenizer   for text in and out; anything with encode and decode
    fused       False: transformers' own forward over a static cache, instead of our kernels
    verify      True: the certificate; 'quick': without the comparison with fp32; False: none, and it says so
    weights     None: the live ones; 'int8', 'int4' or 'fp8': rounded copies, rounded again when a weight has changed.
                `accuracy(text)` says what the rounding costs
    cache       None: keys and values in the model's dtype; 'int8' or 'fp8': in 8 bits, each token and kv head with a scale of
                its own. `accuracy(text)` includes its cost
    pages       None: room for max_batch rows of max_length. A number: the rows share this many pages of 64 tokens, and a
                request takes as many as its prompts and max_new_tokens may fill
    speculate   a number: guess this many tokens from the row's own text and check them in one step; gb.Draft(model, tokens):
                let a small model guess. The tokens are the same, and come sooner
    """
    if max_batch < 1 or max_length < 2:
        raise ValueError(f"decoder: max_batch and max_length: got {max_batch} and {max_length}, wanted at least 1 and 2.")
    if k != "auto" and (not isinstance(k, int) or k < 1):
        raise ValueError(f"decoder: k: got {k!r}, wanted 'auto' or a number of tokens a launch.")
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        raise ValueError(f"decoder: model: got {type(model).__name__} without weights, wanted a causal language model.")
    if first.is_meta:
        raise ValueError(f"decoder: model: got {type(model).__name__} on meta, which holds no values; load its weights first.")
    own = first.dtype
    if dtype is not None and dtype != own:
        raise ValueError(
            f"decoder: dtype: got {dtype}, but the weights are {own} and are read as they are; cast the model with .to() first."
        )
    width = tokens_a_step(speculate, first.device)
    ladder = tuple(dict.fromkeys((k, 1))) if isinstance(k, int) else LADDER if width == 1 else SPECULATIVE_LADDER
    layout = CacheLayout(cache, pages)
    layout.check(max_batch, max_length)
    ops = (layout.op, *OPS, *(EXPERT_OPS if has_experts(model) else ())) if fused else ()
    hasten(ops, first.device, first.dtype)
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(first.device.type, enabled=False):
        body, path = _body(model, max_batch, max_length, fused, width, weights, layout)
        drafting = _body(speculate.model, max_batch, max_length, fused)[0] if isinstance(speculate, Draft) else None
        return FastDecoder(model, body, path, ladder, tokenizer, verify, width, drafting)


def _body(
    model: Any,
    max_batch: int,
    max_length: int,
    fused: bool,
    tokens: int = 1,
    weights: str | None = None,
    layout: CacheLayout = PLAIN,
) -> tuple[Body, str]:
    """What runs the model, and why it is not the fused kernels."""
    together = weights is None and max_batch * tokens > NARROW
    live = bind(model, neighbours=together) if fused else "fused=False was asked for"
    for name, value in (("weights", weights), ("cache", layout.kind), ("pages", layout.pages)):
        if isinstance(live, str) and value is not None:
            raise ValueError(f"decoder: {name}: got {value!r}, which only the fused kernels read, and {live}.")
    if isinstance(live, str):
        own = as_transformers(model) if isinstance(model, Decoder) else model  # first: below is an import of transformers
        from .any_model.body import StaticBody

        return StaticBody(own, max_batch, max_length, tokens), live
    if live.shape.routing is not None:
        if weights is not None:
            raise ValueError(f"decoder: weights: got {weights!r}, but a mixture of experts is read as it is; leave it out.")
        return ExpertsBody(live, max_batch, max_length, tokens, cache=layout), ""
    if weights is not None:
        return QuantizedBody(live, max_batch, max_length, weights, tokens, cache=layout), ""
    return FusedBody(live, max_batch, max_length, tokens, cache=layout), ""
