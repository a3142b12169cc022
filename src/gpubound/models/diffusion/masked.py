"""Generation by a masked diffusion model: positions with the mask token are filled, those of the highest probability first.

An answer of N tokens begins as N masks after its prompt. A step runs the model once, draws a token for every masked position,
and writes those with the highest probabilities; the others stay masked and are drawn again in the next step. So k steps write
N tokens, N / k at a time (LLaDA's low-confidence remasking). With a `block` shorter than the answer, the masks are filled block
by block from the left, which most models need for long answers.

With a `threshold`, a step writes every token of at least that probability, and at least one, until the block is full
(Fast-dLLM's parallel decoding). With `cache`, most steps compute the positions of their block alone.

A step has fixed shapes, and reads its number and the number of tokens to write from the device. It is captured once per shape.
The host reads the tokens after the last step, or, to stream text, after the last step of each block. With a threshold it also
reads after each step whether the block is full.

Guidance g > 0 also runs each row with its prompt masked, and takes logits + g · (logits - logits without the prompt).

Legend: B rows, T positions of a row, N positions of a block, V tokens of the vocabulary.

Keys and values are kept between the steps of a block (the dual cache of Fast-dLLM, Wu et al. 2025). A full pass computes all
positions of a row, and stores their keys and values: of the prompt, of finished blocks, of the block itself, and of the masks
after it. A pass of the block computes the block's positions alone. It replaces their keys and values, and attends to all that
are stored.

The result is approximate. Attention goes in both directions, so each token that is written changes the hidden states of all
other positions from the second layer on, and with them their keys and values, which stay those of the last full pass. A pass of
the block that directly follows a full pass of the same tokens is exact.

Legend: B rows, L positions of a row, N positions of a block, K key and value heads, D width of a head.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Never

import torch
from torch import Tensor, nn

from ...decode.request import Choice, Generated, Generation, check_count, check_prompts, draws, read_prompts, to_device
from ...decode.text import TextCodec, TextStream
from ...device import host_bytes, label, usable_bytes
from ...errors import GenerateError
from ...formatting import readable, unexpected
from ...graph import Captured, capture
from ...graph.guards import ReentryGuard
from ...kernels import sample
from ...kernels.sampling import Into, Rows, Settings
from ...layers.attention import Attention, Rope
from ...layers.block import must_be_called, normed_for, run_blocks
from ...layers.embedding_and_head import head_of
from ...trace import fallback, notice
from ..folder import MASK_ID
from ..language_model import LanguageModel, hidden_of, logits_of, why_not_head
from ..registry import mode
from .objective import is_causal

MODES = ("auto", "require", "off")  # of `graph`
MOST = 8  # shapes whose buffers and graph are cached


def why_uncached(model: Any) -> str | None:
    """Return why keys and values of the model cannot be cached by `BlockCache`; None if they can."""
    name = type(model).__name__
    if not isinstance(model, LanguageModel):
        return f"{name} is no gb.Decoder or gb.RichardsDecoder"
    for block in model.model.layers:
        attention = block.self_attn
        if not isinstance(attention, Attention) or type(attention).mix is not Attention.mix:
            return f"its attention is a {type(attention).__name__}"
        if must_be_called(block) or must_be_called(attention):
            return "its blocks carry hooks or another forward"
        if block.apart or block.gathered is not None:
            return "its blocks are on several devices"
    return None


class BlockCache:
    """Keys and values (B, L, K, D) of each layer, at fixed addresses, and the model's passes that write and read them."""

    def __init__(self, model: Any, rows: int, length: int) -> None:
        self.trunk: Any = model.model
        attention, weight = self.trunk.layers[0].self_attn, self.trunk.embed_tokens.weight
        sizes = len(self.trunk.layers), rows, length, attention.kv_heads, attention.head_dim
        self.k, self.v = weight.new_zeros(2, *sizes)
        self.number = {block: number for number, block in enumerate(self.trunk.layers)}
        self.back = int(getattr(model.config, "shifted", False))  # how far before a token's position it is predicted

    def full(self, ids: Tensor, at: Tensor, mask: Tensor | None) -> Tensor:
        """Return the hidden states that predict the tokens at positions `at` (B, N) of ids (B, L), after a full pass.

        mask  SDPA's, of padded rows
        """
        x = self._run(ids, None, None, mask)
        place = (at - self.back).clamp(min=0)
        return x.gather(1, place[..., None].expand(*at.shape, x.shape[-1]))

    def block(self, ids: Tensor, at: Tensor, mask: Tensor | None) -> Tensor:
        """Return the same after a pass of the block's positions `at` alone, and of the one before them if it predicts."""
        if self.back:
            at = torch.cat([at[:, :1] - 1, at], 1)
        x = self._run(ids.gather(1, at), at, at[:1] if mask is None else at, mask)  # unpadded rows begin at equal positions
        return x[:, :-1] if self.back else x

    def _run(self, ids: Tensor, at: Tensor | None, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        rope = None if self.trunk.rope is None else self.trunk.rope.of(ids, positions)
        step = partial(self._block, at=at)
        return run_blocks(self.trunk.layers, self.trunk.norm, self.trunk.embed(ids), rope, mask, step)

    def _block(
        self, block: Any, x: Tensor, pending: Tensor | None, rope: Rope | None, mask: Tensor | None, *, at: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run a block as layers.block.run_block does, with the keys and values of its positions (all, or `at`) stored."""
        attention, mlp = block.self_attn, block.mlp
        y, x = normed_for(attention, block.input_layernorm, x, pending)
        q, *new = attention.project(y, rope)
        number = self.number[block]
        keys, values = stored = self.k[number], self.v[number]
        for kept, one in zip(stored, new):
            if at is None:
                kept.copy_(one)
            else:
                kept.scatter_(1, at[..., None, None].expand_as(one), one)
        y, _ = attention.attended(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask)
        y, x = normed_for(mlp, block.post_attention_layernorm, x, attention.output(y.flatten(-2)))
        return x, mlp(y) if must_be_called(mlp) else mlp.mix(y)


@dataclass(frozen=True)
class FillSchedule:
    """Steps of a request: step s writes `reveals[s]` tokens of the block that begins `begins[s]` positions after the prompt."""

    tokens: int
    block: int
    begins: list[int]
    reveals: list[int]
    threshold: float | None = None  # probability of tokens that any step writes; a full block skips the rest of its steps
    refresh: int | None = 1  # steps of a block after which all positions are computed; None: at its first step alone

    def by_block(self) -> Iterator[tuple[int, range]]:
        """Yield (where a block begins, numbers of its steps)."""
        for begin in range(0, self.tokens, self.block):
            first = self.begins.index(begin)
            yield begin, range(first, first + self.begins.count(begin))

    def refreshes(self, number: int) -> bool:
        """Return whether a step, counted in its block, computes all positions."""
        return number == 0 if self.refresh is None else number % self.refresh == 0

    @property
    def partial(self) -> bool:
        """True if some step computes the block's positions alone."""
        return any(not self.refreshes(number) for _, numbers in self.by_block() for number in range(len(numbers)))


def fill_schedule(
    tokens: int, steps: int | None, block: int | None, threshold: float | None = None, refresh: int | None = 1
) -> FillSchedule:
    """Split `steps` among the blocks, and the tokens of a block among its steps. None: a step per token, one block."""
    check_count("tokens", tokens)
    if threshold is not None and steps is not None:
        raise ValueError(
            f"generate: steps: got {steps}, but with a threshold they follow from the probabilities; leave one out."
        )
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"generate: threshold: got {threshold!r}, wanted a probability above 0, and 1 at most.")
    steps, block = tokens if steps is None else steps, tokens if block is None else block
    check_count("steps", steps)
    check_count("block", block)
    if refresh is not None:
        check_count("refresh", refresh)
    if tokens % block:
        raise ValueError(f"generate: block: got {block}, wanted a number that divides the {tokens} tokens to write.")
    count = tokens // block
    if not count <= steps <= tokens:
        raise ValueError(
            f"generate: steps: got {steps}, wanted {count} to {tokens}: at least one for each block of {block} tokens, and at "
            f"most one for each token."
        )
    begins, reveals = list[int](), list[int]()
    for number in range(count):
        block_steps = _share(steps, count, number)
        begins += [number * block] * block_steps
        reveals += [_share(block, block_steps, step) for step in range(block_steps)]
    return FillSchedule(tokens, block, begins, reveals, threshold, refresh)


def _share(total: int, parts: int, part: int) -> int:
    return total // parts + (part < total % parts)


MOST_CACHED = 2  # shapes with keys and values: of 4,096 tokens LLaDA-8B has 2.1 GB a row


class Buffers:
    """Sequences of one shape on the device, and one step, which writes some tokens."""

    def __init__(self, sampler: Any, rows: int, length: int, tokens: int, block: int, padded: bool, cached: bool):
        self.sampler, self.tokens, self.block, self.padded = sampler, tokens, block, padded
        device = sampler.device
        self.ids = torch.zeros(rows, length, device=device, dtype=torch.int64)
        self.start = torch.zeros(rows, 1, device=device, dtype=torch.int64)  # position of the answer's first token
        self.begins, self.reveals = torch.zeros(2, tokens, device=device, dtype=torch.int64)
        self.number = torch.zeros(1, device=device, dtype=torch.int64)  # of the step
        self.sure = torch.zeros((), device=device, dtype=torch.float32)  # log-probability of tokens that any step writes
        self.masks = torch.zeros((), device=device, dtype=torch.int64)  # left in the block
        self.cache = BlockCache(sampler.model, rows, length) if cached else None
        each = rows * block
        off = {name: torch.zeros(each, device=device, dtype=torch.float32) for name in ("temperature", "min_p")}
        on = {name: torch.ones(each, device=device, dtype=torch.float32) for name in ("top_p", "penalty")}
        top_k, row = torch.zeros(2, each, device=device, dtype=torch.int32)
        self.settings = Settings(**off, **on, top_k=top_k, row=row, seed=torch.zeros(each, device=device, dtype=torch.int64))
        self.stops = torch.full((1,), -1, device=device, dtype=torch.int32)
        self.lane = torch.arange(block, device=device)
        self.place = torch.arange(length, device=device)
        self.graphs: dict[bool, Captured] = {}  # of `step`

    def fill(self, prompts: list[list[int]], schedule: FillSchedule, choice: Choice) -> None:
        """Write a request, by a few asynchronous copies."""

        def write(target: Tensor, values: list) -> None:
            target.copy_(to_device(torch.tensor(values, dtype=target.dtype, device="cpu"), target.device))

        masks, width, steps = [self.sampler.mask_token] * self.tokens, self.ids.shape[1], len(schedule.begins)
        rows = [[*prompt, *masks] for prompt in prompts]
        write(self.ids, [row + [0] * (width - len(row)) for row in rows])
        write(self.start, [[len(prompt)] for prompt in prompts])
        write(self.begins[:steps], schedule.begins)
        write(self.reveals[:steps], schedule.reveals)
        write(self.settings.row, [row for row in draws(prompts) for _ in range(self.block)])
        self.number.zero_()
        self.sure.fill_(math.inf if schedule.threshold is None else math.log(schedule.threshold))
        self.settings.temperature.fill_(choice.temperature)
        self.settings.seed.fill_(choice.seed)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a step reads or writes, other than the model's."""
        tensors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        tensors += [] if self.cache is None else [self.cache.k, self.cache.v]
        return [*tensors, *(t for t in self.settings if t is not None), self.sampler.barred]

    @property
    def computed(self) -> int:
        """The number of positions of a row that a step of the block computes."""
        return self.block + (0 if self.cache is None else self.cache.back)

    @torch.no_grad()
    def step(self, full: bool) -> None:
        """Run the model once, and write the tokens with the highest probabilities. full: over all positions, not the block's
        with the cached keys and values of all others"""
        number = self.number.clamp(max=self.tokens - 1)  # a capture's warm-up steps go beyond the last
        at_BN = self.start + self.begins[number] + self.lane
        logits_BNV = self._logits(at_BN, full).float() + self.sampler.barred
        now_BN = self.ids.gather(1, at_BN)
        masked = now_BN == self.sampler.mask_token
        sampled, confidence = self._draw(logits_BNV.flatten(0, 1), masked.flatten(), number)
        sampled, known = sampled.view(now_BN.shape).long(), masked & (sampled >= 0).view(now_BN.shape)
        order = torch.where(known, confidence.view(now_BN.shape), -torch.inf).argsort(dim=1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(1, order, self.lane.expand_as(order))
        chosen = (rank < self.reveals[number]) | (confidence.view(now_BN.shape) >= self.sure)
        written = torch.where(known & chosen, sampled, now_BN)
        self.ids.scatter_(1, at_BN, written)
        self.masks.copy_((written == self.sampler.mask_token).sum())
        self.number.add_(1)

    def _logits(self, at_BN: Tensor, full: bool) -> Tensor:
        """Return the logits of the positions at_BN."""
        model, real_BT = self.sampler.model, self.place < self.start + self.tokens
        if self.cache is not None:
            mask = real_BT[:, None, None] if self.padded else None
            return head_of(model)((self.cache.full if full else self.cache.block)(self.ids, at_BN, mask))
        inputs = {"input_ids": self.ids} | (padding_argument(model, real_BT) if self.padded else {})
        if self.sampler.full_logits:
            return _at(logits_of(model, inputs), at_BN)
        return head_of(model)(_at(hidden_of(model, inputs), at_BN))

    def _draw(self, logits: Tensor, masked: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token for each masked row of `logits`, else -1, and its log-probability.

        The random numbers depend on the seed, the row, the step and the position in the answer.
        """
        count, zero = len(logits), torch.zeros(len(logits), device=logits.device, dtype=torch.int32)
        lane = (self.begins[number] + self.lane).repeat(count // self.block)
        position = (number * self.tokens + lane).int()
        emitted, confidence = zero.clone(), torch.zeros(count, device=logits.device, dtype=torch.float32)
        rows = Rows(zero.clone(), position, masked.int(), torch.full_like(zero, 2**31 - 1), zero.clone(), self.stops)
        sample(logits, rows, self.settings, Into(emitted), confidence)
        return emitted, confidence


class MaskedSampler:
    """Fill masks by a model that attends in both directions, with its current weights.

    tokenizer   of texts. Its mask token and end of text are the defaults
    mask_token  id of the mask token; None: the tokenizer's, else that of the model's files
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
        known = mask_token, None if self.text is None else self.text.mask, getattr(model, "generation", {}).get(MASK_ID)
        self.mask_token = _mask_token(next((token for token in known if token is not None), None), self.vocab)
        own = None if self.text is None else self.text.eos
        self.ends = tuple(ends) if ends is not None else () if own is None else (own,)
        if graph not in MODES:
            raise ValueError(f"MaskedSampler: graph: got {graph!r}, wanted one of {', '.join(MODES)}.")
        self.graph = graph
        # Tokens that are never written: the mask, and ids without a token of the tokenizer.
        size = self.vocab if self.text is None else self.text.size(self.vocab)
        self.barred = torch.zeros(self.vocab, device=self.device, dtype=torch.float32)
        self.barred[[self.mask_token, *(token for token in range(size, self.vocab) if token not in self.ends)]] = -torch.inf
        self.full_logits = self._check()
        self.turn = ReentryGuard(
            GenerateError,
            "MaskedSampler: it fills one request at a time: finish or close the stream that is open first, or make another for "
            "each thread.",
        )
        self._buffers: dict[tuple, Buffers] = {}

    def _check(self) -> str | None:
        """Raise ValueError for a causal model. Return why the head cannot compute the logits of single positions, or None."""
        ids = torch.tensor([[self.mask_token, 0, 0]], device=self.device)
        inputs = {"input_ids": ids}
        if is_causal(self.model, inputs, 1):
            raise ValueError(
                f"MaskedSampler: {type(self.model).__name__} is causal, and cannot fill a position by later tokens; "
                f"generate with gpubound.decoder(model)."
            )
        with torch.no_grad():
            why = why_not_head(self.model, inputs)
        if why:
            fallback("masked sampler without whole logits", why)
        return why

    def generate(self, prompts: Any, tokens: int = 128, **settings: Any) -> Generation:
        """Return `tokens` tokens after each prompt: text, ids, lists of either, a tensor.

        steps        forward passes, split among the blocks. None: one per token. Fewer are faster, and write more at once
        block        tokens of a block, filled before the next; it divides `tokens`. None: one block
        temperature  0: the most likely token of a position; above 0: sampling
        threshold    a step writes every token of at least this probability, and at least one; `steps` follows. None: off
        cache        compute only the block's positions, with the keys and values of all others from the block's first step.
                     Faster, and approximate. False: every step computes all positions
        refresh      with `cache`: steps of a block after which all positions are computed again. None: once for each block
        seed         with the same seed, a prompt gets the same tokens
        n            sequences per prompt
        """
        request = self.start(prompts, tokens, **settings)
        for _ in request.play(reading=False):
            pass
        return request.result()

    def stream(self, prompts: Any, tokens: int = 128, **settings: Any) -> Iterator[tuple[int, Any]]:
        """Yield (row, new text) after each block; without a tokenizer, (row, list of new ids). Takes what `generate` takes.

        Blocks after the end of every answer are not computed.
        """
        return self.start(prompts, tokens, **settings).play()

    def start(
        self,
        prompts: Any,
        tokens: int = 128,
        *,
        steps: int | None = None,
        block: int | None = None,
        temperature: float = 0.0,
        threshold: float | None = None,
        cache: bool = False,
        refresh: int | None = None,
        seed: int = 0,
        n: int = 1,
        **unknown: Never,
    ) -> "ActiveRequest":
        """Return a checked request: `play()` yields as `stream` does, and then `result()` returns as `generate` does."""
        if unknown:
            raise unexpected("generate", unknown, list(signature(self.start).parameters)[:-1])
        check_count("tokens", tokens)
        choice = Choice(temperature=temperature, seed=seed)
        if refresh is not None and not cache:
            raise ValueError(f"generate: refresh: got {refresh}, but without a cache every step computes all; give cache=True.")
        if cache and (why := self.full_logits or why_uncached(self.model)):
            raise ValueError(f"generate: cache: got True, but {why}; leave it out.")
        check_count("n", n)
        pad = None if self.text is None or self.text.pad in self.ends else self.text.pad
        ids = read_prompts(prompts, self.text, pad)
        check_prompts(ids, self.vocab, len(ids), 1 << 30)
        for number, prompt in enumerate(ids):
            if self.mask_token in prompt:
                raise ValueError(f"generate: prompt {number} holds the mask token {self.mask_token}; leave it out.")
        longest, positions = max(map(len, ids)) + tokens, getattr(getattr(self.model, "config", None), "positions", None)
        if positions is not None and longest > positions:
            notice(
                f"generate: tokens: got {tokens}, and a prompt has {longest - tokens}, together more than the {positions} "
                f"positions that the model is made for; ask for fewer.",
                key=f"generate: {tokens} tokens of {positions}",
            )
        check_count("block", block or 1)
        width, rows = head_of(self.model).weight.shape[1], len(ids) * n
        needed = 4 * rows * (longest * width + (block or tokens) * self.vocab)
        free = usable_bytes(self.device) if self.device.type == "cuda" else host_bytes()
        if free is not None and needed > free:
            raise ValueError(
                f"generate: tokens: got {tokens} for {rows} rows, whose hidden states and logits take {readable(needed)}, but "
                f"{readable(free)} are free on {label(self.device)}; ask for fewer."
            )
        schedule = fill_schedule(tokens, steps, block, threshold, refresh if cache else 1)
        return ActiveRequest(self, [prompt for prompt in ids for _ in range(n)], schedule, choice, cache)

    def buffers(self, prompts: list[list[int]], schedule: FillSchedule, cached: bool = False) -> Buffers:
        """Return the cached buffers of a shape."""
        longest, shortest = max(map(len, prompts)), min(map(len, prompts))
        key = (len(prompts), longest + schedule.tokens, schedule.tokens, schedule.block, longest > shortest, cached)
        if key not in self._buffers:
            alike = [other for other in self._buffers if other[-1] == cached]
            if len(alike) == (MOST_CACHED if cached else MOST):
                del self._buffers[alike[0]]
            self._buffers[key] = Buffers(self, *key)
        return self._buffers[key]

    def runner(self, buffers: Buffers, full: bool) -> Callable[[], Any]:
        """Return a step of the buffers, or its CUDA graph, by the option `graph`."""
        step = partial(buffers.step, full)
        if self.graph == "off" or (self.graph == "auto" and self.device.type != "cuda"):
            return step
        if full not in buffers.graphs:
            buffers.graphs[full] = capture(step, state=[self.model, *buffers.tensors()])
        return buffers.graphs[full]


class ActiveRequest:
    """A request in progress."""

    def __init__(
        self,
        sampler: MaskedSampler,
        prompts: list[list[int]],
        schedule: FillSchedule,
        choice: Choice,
        cache: bool,
    ) -> None:
        self.sampler, self.schedule, self.choice, self.cache = sampler, schedule, choice, cache
        self.sequences = [Generated(prompt) for prompt in prompts]
        self.generation = Generation(self.sequences)
        self.texts = [TextStream(sampler.text, ends=sampler.ends) for _ in prompts]

    def play(self, reading: bool = True) -> Iterator[tuple[int, Any]]:
        """Yield (row, new tokens or text) after each block, or only after the last if not `reading`, until all rows have ended.

        With a threshold the host waits for each step anyway, and reads each block.
        """
        begun, sampler, schedule = time.perf_counter(), self.sampler, self.schedule
        prompts = [sequence.prompt for sequence in self.sequences]
        with sampler.turn, mode(sampler.model, training=False):
            buffers = sampler.buffers(prompts, schedule, self.cache)
            buffers.fill(prompts, schedule, self.choice)
            full, rows = sampler.runner(buffers, True), len(prompts)
            part = sampler.runner(buffers, False) if schedule.partial else full
            for begin, numbers in schedule.by_block():
                for number in numbers:
                    refreshes = schedule.refreshes(number - numbers.start)
                    (full if refreshes else part)()
                    self.generation.launches, self.generation.steps = self.generation.launches + 1, self.generation.steps + 1
                    self.generation.positions += rows * (buffers.ids.shape[1] if refreshes else buffers.computed)
                    if schedule.threshold is not None and not buffers.masks.item():  # synchronises with the device
                        buffers.number.fill_(numbers.stop)
                        break
                written = begin + schedule.block
                if reading or schedule.threshold is not None or written == schedule.tokens:
                    answers = buffers.ids.tolist()  # synchronises with the device
                    self.generation.seconds = time.perf_counter() - begun
                    self.generation.first_token_s = self.generation.first_token_s or self.generation.seconds
                    yield from self._read(answers, written)
                    if all(sequence.finish for sequence in self.sequences):
                        break

    def _read(self, rows: list[list[int]], written: int) -> Iterator[tuple[int, Any]]:
        """Yield what is new in the first `written` tokens of every answer."""
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
            sequence.finish = "stop token" if end is not None else "length" if written == self.schedule.tokens else ""
            new = sequence.tokens[known:]
            piece = text.add(new)
            if piece is not None and sequence.finish:
                piece, sequence.text = piece + text.rest(), text.complete()
            if shown := new if piece is None else piece:
                yield number, shown

    def result(self) -> Generation:
        self.generation.row_steps = self.generation.steps * len(self.sequences)
        return self.generation


def _mask_token(token: int | None, vocab: int) -> int:
    if token is None:
        raise ValueError(
            "MaskedSampler: mask_token: got none, and the tokenizer has none; give the id that the model was trained with."
        )
    if not 0 <= token < vocab:
        raise ValueError(f"MaskedSampler: mask_token: got {token}, but the model has the ids 0 to {vocab - 1}.")
    return token


def padding_argument(model: Any, real_BT: Tensor) -> dict[str, Tensor]:
    """Return the keyword argument that masks padding: transformers' attention_mask, or an SDPA mask."""
    if "attention_mask" in signature(model.forward).parameters:
        return {"attention_mask": real_BT.long()}
    return {"mask": real_BT[:, None, None, :]}


def _at(x: Tensor, at: Tensor) -> Tensor:
    """Return the positions `at` (B, N) of x (B, T, width)."""
    return x.gather(1, at[..., None].expand(*at.shape, x.shape[-1]))
