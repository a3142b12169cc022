"""Generation by a masked diffusion model: places that hold the mask token are filled, the surest ones first.

An answer of N tokens begins as N masks behind its prompt. A step runs the model once, draws a token for every place that is
still masked, and writes those of which the model is surest; the others stay masked and are drawn anew, in the light of what was
written. So k steps write N tokens, N / k at a time (LLaDA's low-confidence remasking). With a `block` shorter than the answer
the masks are filled block by block from the left, which most models need for long answers.

A step is one function of fixed shapes that reads its number, and how many tokens to write, from the device. It is captured
once for a shape, and a request is its replays, one behind the other; the host reads nothing before the last (or, to show text,
before a block's last).

Guidance g > 0 runs each row a second time with its prompt masked and takes logits + g · (logits - logits without the prompt).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...decode.request import Choice, check_count, check_prompts, read_prompts
from ...decode.result import Generated, Generation
from ...decode.text import TextCodec, TextStream
from ...errors import GenerateError
from ...graph import capture
from ...guards import ReentryGuard
from ...layers.embedding_and_head import head_of
from ...trace import fallback
from ..language_model import is_causal, told_time, why_not_head
from ..placing import mode
from .canvas import Canvas, Filling, filling

MODES = ("auto", "require", "off")
MOST = 8  # shapes of request whose rows and graph are kept


class MaskedSampler:
    """Fills masks with a model that sees both sides of a token, on its live weights.

    tokenizer   for texts in and out. Its mask token and its end of text are taken
    mask_token  the mask token's id, where there is no tokenizer or it has none
    ends        tokens that end an answer. None: the tokenizer's end of text
    graph       "auto": the step is captured on a GPU. "require": captured, or GraphError. "off": called
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        mask_token: int | None = None,
        ends: Sequence[int] | None = None,
        graph: str = "auto",
    ) -> None:
        self.model, self.device = model, next(model.parameters()).device
        self.text = TextCodec.of(tokenizer, "MaskedSampler")
        self.vocab = head_of(model).weight.shape[0]
        self.mask_token = _mask_token(mask_token, self.text, self.vocab)
        own = None if self.text is None else self.text.eos
        self.ends = tuple(ends) if ends is not None else () if own is None else (own,)
        if graph not in MODES:
            raise ValueError(f"MaskedSampler: graph: got {graph!r}, wanted one of {', '.join(MODES)}.")
        self.graph = graph
        # Never written: the mask, and ids that the tokenizer has no token for.
        size = self.vocab if self.text is None else self.text.size(self.vocab)
        self.barred = torch.zeros(self.vocab, device=self.device, dtype=torch.float32)
        self.barred[[self.mask_token, *(token for token in range(size, self.vocab) if token not in self.ends)]] = -torch.inf
        self.whole = self._try()
        self.turn = ReentryGuard(
            GenerateError,
            "MaskedSampler: it fills one request at a time: finish or close the stream that is open first, or make another for "
            "each thread.",
        )
        self._canvases: dict[tuple, Canvas] = {}

    def _try(self) -> str | None:
        """Why the logits are asked whole; refuses a model that does not look ahead."""
        ids = torch.tensor([[self.mask_token, 0, 0]], device=self.device)
        inputs = {"input_ids": ids} | told_time(self.model, torch.full((1,), 0.5, device=self.device, dtype=torch.float32))
        if is_causal(self.model, inputs, 1):
            raise ValueError(
                f"MaskedSampler: {type(self.model).__name__} is causal, and cannot fill a place by what stands behind it; "
                f"generate with gpubound.decoder(model)."
            )
        with torch.no_grad():
            why = why_not_head(self.model, inputs)
        if why:
            fallback("masked sampler without whole logits", why)
        return why

    def generate(self, prompts: Any, tokens: int = 128, **settings: Any) -> Generation:
        """`tokens` tokens behind each prompt: text, ids, lists of either, a tensor.

        steps        model runs, shared by the blocks. None: one for each token. Fewer are faster, and write more at once
        block        tokens of a block, filled before the next; it divides `tokens`. None: one block
        temperature  0 takes the likeliest token of a place; above 0 it is drawn
        guidance     how far to move away from what is likely without the prompt; 0 is off
        seed         with the same seed, a prompt gets the same tokens
        n            sequences per prompt
        """
        run = self.start(prompts, tokens, **settings)
        for _ in run.play(reading=False):
            pass
        return run.result()

    def stream(self, prompts: Any, tokens: int = 128, **settings: Any) -> Iterator[tuple[int, Any]]:
        """Yield (row, new text) after each block; without a tokenizer, (row, list of new ids). Takes what `generate` takes."""
        return self.start(prompts, tokens, **settings).play()

    def start(
        self,
        prompts: Any,
        tokens: int = 128,
        *,
        steps: int | None = None,
        block: int | None = None,
        temperature: float = 0.0,
        guidance: float = 0.0,
        seed: int = 0,
        n: int = 1,
    ) -> "ActiveFilling":
        """A request, checked and ready: `play()` yields as `stream` does, and then `result()` is what `generate` returns."""
        how, choice = filling(tokens, steps, block), Choice(temperature=temperature, seed=seed)
        check_count("n", n)
        if not 0 <= guidance < float("inf"):
            raise ValueError(f"generate: guidance: got {guidance!r}, wanted a finite number of at least 0; 0 is off.")
        pad = None if self.text is None or self.text.pad in self.ends else self.text.pad
        given = read_prompts(prompts, self.text, pad)
        check_prompts(given, self.vocab, len(given), 1 << 30)
        for number, prompt in enumerate(given):
            if self.mask_token in prompt:
                raise ValueError(f"generate: prompt {number} holds the mask token {self.mask_token}; leave it out.")
        return ActiveFilling(self, [prompt for prompt in given for _ in range(n)], how, choice, guidance)

    def canvas(self, prompts: list[list[int]], how: Filling, guided: bool) -> Canvas:
        """For rows of this shape, made when first asked for."""
        longest, shortest = max(map(len, prompts)), min(map(len, prompts))
        key = (len(prompts), longest + how.tokens, how.tokens, how.block, longest > shortest, guided)
        if key not in self._canvases:
            if len(self._canvases) == MOST:
                del self._canvases[next(iter(self._canvases))]
            self._canvases[key] = Canvas(self, *key)
        return self._canvases[key]

    def runner(self, canvas: Canvas) -> Callable[[], Any]:
        """One step of `canvas`, captured or called."""
        if self.graph == "off" or (self.graph == "auto" and self.device.type != "cuda"):
            return canvas.step
        if canvas.graph is None:
            canvas.graph = capture(canvas.step, state=[self.model, *canvas.tensors()])
        return canvas.graph


class ActiveFilling:
    """One request while it runs."""

    def __init__(self, sampler: MaskedSampler, prompts: list[list[int]], how: Filling, choice: Choice, guidance: float) -> None:
        self.sampler, self.how, self.choice, self.guidance = sampler, how, choice, guidance
        self.sequences = [Generated(prompt) for prompt in prompts]
        self.found = Generation(self.sequences)
        self.texts = [TextStream(sampler.text, ends=sampler.ends) for _ in prompts]

    def play(self, reading: bool = True) -> Iterator[tuple[int, Any]]:
        """(row, new tokens or text) after each block; not `reading`, after the last alone."""
        begun, sampler, how = time.perf_counter(), self.sampler, self.how
        prompts = [sequence.prompt for sequence in self.sequences]
        with sampler.turn, mode(sampler.model, training=False):
            canvas = sampler.canvas(prompts, how, self.guidance > 0)
            canvas.fill(prompts, how, self.choice, self.guidance)
            step = sampler.runner(canvas)
            for begin, block_ends in zip(how.begins, how.block_ends):
                step()
                self.found.launches, self.found.steps = self.found.launches + 1, self.found.steps + 1
                if block_ends and (reading or begin + how.block == how.tokens):
                    rows = canvas.ids.tolist()  # waits for the device
                    self.found.seconds = time.perf_counter() - begun
                    self.found.first_token_s = self.found.first_token_s or self.found.seconds
                    yield from self._take(rows, begin + how.block)

    def _take(self, rows: list[list[int]], written: int) -> Iterator[tuple[int, Any]]:
        """What is new in the first `written` tokens of every answer."""
        for number, (row, sequence, text) in enumerate(zip(rows, self.sequences, self.texts)):
            if sequence.finish:
                continue
            begin, known, sampler = len(sequence.prompt), len(sequence.tokens), self.sampler
            answer = row[begin : begin + written]
            if sampler.mask_token in answer:
                raise GenerateError(
                    f"sequence {number}: the logits at position {begin + answer.index(sampler.mask_token)} are not finite. "
                    f"Check the weights (a diverged training run?) and the dtype."
                )
            end = next((at for at, token in enumerate(answer) if token in sampler.ends), None)
            sequence.tokens = answer if end is None else answer[: end + 1]
            sequence.finish = "stop token" if end is not None else "length" if written == self.how.tokens else ""
            new = sequence.tokens[known:]
            piece = text.add(new)
            if piece is not None and sequence.finish:
                piece, sequence.text = piece + text.rest(), text.complete()
            if shown := new if piece is None else piece:
                yield number, shown

    def result(self) -> Generation:
        self.found.row_steps = self.found.steps * len(self.sequences)
        return self.found


def _mask_token(given: int | None, text: TextCodec | None, vocab: int) -> int:
    found = (None if text is None else text.mask) if given is None else given
    if found is None:
        raise ValueError(
            "MaskedSampler: mask_token: got none, and the tokenizer has none; give the id that the model was trained with."
        )
    if not 0 <= found < vocab:
        raise ValueError(f"MaskedSampler: mask_token: got {found}, but the model knows the ids 0 to {vocab - 1}.")
    return found
