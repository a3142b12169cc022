"""Model runners, and the launches of their steps.

A `ModelRunner` computes logits, a `Stepper` chooses a token after each step, and `StepGraphs` captures a launch of k steps
in a CUDA graph, one for each bucket of rows, number of steps and variant of sampling; on a CPU a launch is a plain call. A
prefill that comes a second time in one size is captured, too, if it is small enough to be bound by its launches.

`BatchState` is the running batch on the device, with the pinned ring through which its tokens leave. One block of int32 holds
all that the host reads after a launch: the tokens of each step, their log-probabilities, and which rows are alive or have
logits that are not finite. So a launch is followed by one copy to pinned memory and one event, which the host queries and never
waits for. A slot of the ring is written again only after its event was seen, at least one launch later.
"""

import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..device import PRETENDED, host_bytes, label, usable_bytes
from ..errors import GpuboundError
from ..formatting import readable
from ..graph.runner import GraphRunner
from ..kernels import pick, sample
from ..kernels.dispatch import compile_ahead
from ..kernels.sampling import SETTINGS, Into, Rows, Settings
from .kv_cache import PLAIN, CacheLayout
from .request import PROMPT_TOKENS, STOPS, Choice, Request, draws, to_device
from .weights import weight_format


@dataclass(frozen=True)
class RunnerConfig:
    """The sizes and formats that a runner is built for."""

    max_batch: int  # sequences at once
    max_length: int  # the most tokens of one, prompt included
    tokens: int = 1  # of a row that a step may take
    weights: str | None = None  # their format, by name
    cache: CacheLayout = PLAIN
    redone: int = 0  # of a row's last positions that a later step may write again, as after wrong drafts
    same_bits: bool = True  # whether each of a row's tokens in a step gets the bits that it gets alone
    spare: int = 0  # rows of the cache besides, for prompts that are prefilled before rows are free: see Rollout._stage

    def __post_init__(self) -> None:
        for what, value in (("max_batch", self.max_batch), ("max_length", self.max_length)):
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise ValueError(f"decoder: {what}: got {value!r}, wanted a whole number.")
        if self.max_batch < 1 or self.max_length < 2:
            raise ValueError(
                f"decoder: max_batch and max_length: got {self.max_batch} and {self.max_length}, wanted at least 1 and 2."
            )
        self.cache.check(self.max_batch, self.max_length)
        weight_format(self.weights)  # raises for a wrong name


class ModelRunner(ABC):
    """`prefill` fills the cache, `step` gives the logits after one more token of every row.

    A step may not wait for the device, may not allocate what outlives it, and uses the same addresses each time.
    """

    vocab: int
    max_batch: int
    max_length: int
    device: torch.device
    embed: Tensor | None = None  # a weight whose rows the sampler writes into x, the input of the next step
    x: Tensor | None = None
    best: Tensor | None = None  # partial maxima of the logits, and their tokens: see `finds_best`
    arg: Tensor | None = None
    captures_prefill = False  # whether a graph can hold `prefill`
    kernels: str  # what computes a step, in a few words
    reads = ""  # which weights, in a few words; empty where the model's own forward reads them
    path = ""  # the reason why it is not the fused kernels
    calls = False  # whether it calls the model itself, and so its hooks
    rounds = ""  # what is rounded to less than the model's dtype: weights, cache, both, or nothing
    spans: Sequence[Any] = ()  # its groups of layers, where they are on several devices
    peers: Sequence[Any] = ()  # its devices, where all of them work on each token
    taken = 0  # how often it has read the model's weights: graphs hold the addresses of the last time
    refills = False  # whether `refill` and `move` work
    spare = range(0)  # rows of the cache that no step reads: see Rollout._stage
    splits_keys = False  # whether steps may split a row's keys by the rows' lengths: see SamplingVariant.uneven and most
    launches_alike = False  # whether a step launches the same kernels, and torch reads no index, whatever its kernels compute

    @abstractmethod
    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        """Fill the cache with ids (B, T), right-padded. Positions after a row's length may hold any value afterwards."""

    def refill(self, ids: Tensor, lengths: Tensor, rows: Tensor, start: int = 0) -> None:
        """Fill `rows` (B, C) of the cache with prompts ids (B, T), right-padded, C copies of each. Other rows stay.

        start: their first position, after those that the rows hold.
        """
        raise NotImplementedError

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` positions of the rows `sources` of the cache to the rows `targets`."""
        raise NotImplementedError

    @abstractmethod
    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Return the logits (B, V), fp32, after `token` (B,) at `position` (B,), both int32.

        A runner that takes several tokens of a row at once takes them as (B, T), and returns (B T, V).
        """

    @abstractmethod
    def report(self) -> list[tuple[str, str, str]]:
        """Return (part, implementation, reason) for the rows of the decoder's table."""

    @abstractmethod
    def moved(self) -> str | None:
        """Return the name of a weight that was replaced or moved; None if there is none."""

    @abstractmethod
    def rebind(self) -> None:
        """Read the weights again."""

    def numbers(self) -> Any:
        """Return the scalars that a step reads from the model. None: it calls the model's forward, which may read any."""
        return None

    @abstractmethod
    def bytes_a_step(self, live: list[int]) -> int:
        """Return the bytes that a step of these rows has to read: the weights, and keys and values of these lengths."""

    def lanes(self, rows: int) -> list[range]:
        """Return the groups of rows that go through the model together. A step reads the weights once for each."""
        return lanes(rows, 1 if self.peers or not self.spans else len(self.spans))

    def readers(self, rows: int) -> int:
        """Return the number of devices that read at the same time, each its part of the weights."""
        count = len({one.device for one in self.peers or self.spans})  # a CPU may be listed several times
        return max(1, count if self.peers else min(count, len(self.lanes(rows))))

    @abstractmethod
    def locate(self, ids: Tensor) -> str:
        """Return the name of the module that first computes a NaN or infinity for the sequence ids (T,)."""

    @abstractmethod
    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the logits (N, V) after the tokens of the sequence ids (T,), N at a time. Overwrites the first row's cache."""

    @torch.no_grad()
    def score(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities (T - 1,) of ids[1:], each given the tokens before it."""
        self.reserve([len(ids) - 1])
        self.choose(None)
        scores, start = [], 1
        for logits in self.logits_after(ids[:-1]):
            following = ids[start : start + len(logits), None].long()
            scores.append(logits.float().log_softmax(-1).gather(-1, following)[:, 0])
            start += len(logits)
        return torch.cat(scores)

    def cache_bytes(self) -> int:
        """Return the bytes of the keys and values of all rows."""
        return 0

    @property
    def keeps_prompts(self) -> bool:
        """Return whether the keys and values of a row's first tokens stay in the cache while it generates."""
        return True

    @property
    def grouped(self) -> Any:
        """The cache, if steps can read what its rows have in common once: see SamplingVariant.shared."""
        return None

    @property
    def paged(self) -> Any:
        """The cache, if its rows share pages."""
        return None

    def reserve(self, limits: Sequence[int]) -> None:  # noqa: B027
        """Reserve cache for the first rows, of up to `limits` tokens each. Called before each prefill."""

    def check_request(self, limits: list[int]) -> None:  # noqa: B027
        """Raise a ValueError where rows of up to these lengths do not fit together."""

    @property
    def adapters(self) -> list[str] | None:
        """The names of the adapters that a row may select. None: all rows have the same."""
        return None

    def choose(self, names: Sequence[str | None] | None) -> None:  # noqa: B027
        """Select the adapter of each row by name, None for no adapter. No list: every row has all adapters that are on."""

    def begin(self, token: Tensor) -> None:  # noqa: B027
        """Prepare the first step of a batch."""

    def chained(self, rows: int) -> bool:
        """Return whether the step's last kernel triggers its successor early (programmatic dependent launch)."""
        return False

    def same_kernels(self, rows: int) -> bool:
        """Return whether this number of rows uses the kernels of one row, so that logits do not depend on the batch."""
        return False

    def row_counts(self) -> set[int]:
        """Return one number of rows for each path that computes a step."""
        return {1}

    def finds_best(self, rows: int) -> bool:
        """Return whether a step leaves partial maxima in `best` and `arg`."""
        return False

    def exact(self) -> Any:
        """Return the model as reference.py reads it; None where the certificate compares no logits with fp32."""
        return None

    def carried(self) -> list[Tensor]:
        """Return the tensors that a step changes permanently, besides its position in the cache."""
        return []

    def poison(self) -> None:  # noqa: B027
        """Fill the cache with NaN, where a runner never reads beyond a row's live length."""


def lanes(rows: int, count: int) -> list[range]:
    """Split `rows` rows into up to `count` lanes that are as equal as possible, the larger ones first.

    >>> lanes(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    count = min(rows, count)
    size, larger = divmod(rows, count)
    return [range(n * size + min(n, larger), (n + 1) * size + min(n + 1, larger)) for n in range(count)]


def config_value(config: Any, name: str) -> Any:
    """Return a value of a model's config; None where it has none, or another for each layer, for which transformers raises."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError
        return None


@contextmanager
def own_forward(model: nn.Module, how: str = "") -> Iterator[None]:
    """Raise a ValueError where the model's own forward fails: a decoder cannot repair it."""
    try:
        yield
    except (GpuboundError, torch.OutOfMemoryError):
        raise
    except Exception as failure:
        raise ValueError(
            f"decoder: model: got {type(model).__name__}, whose own forward fails{how} ({summary(failure)}); check its config "
            f"and weights."
        ) from failure


def random_ids(vocab: int, length: int, device: torch.device, seed: int = 0) -> Tensor:
    """Return a sequence (T,) for trials, the same on every device."""
    return torch.randint(vocab, (length,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(device)


def summary(failure: Exception) -> str:
    """Return the class of an exception and the first line of its message; of one without, as an assertion is, of the code."""
    lines = str(failure).strip().splitlines() or [str(frame.line) for frame in traceback.extract_tb(failure.__traceback__)[-1:]]
    return f"{type(failure).__name__}: {[*lines, ''][0]}"


def check_room(needed: int, device: torch.device, build: RunnerConfig) -> None:
    """Raise a ValueError where the `needed` bytes of keys, values and logits are not free.

    It is called before anything is allocated: a host with too little memory swaps, or kills the process.
    """
    free = usable_bytes(device) if device.type == "cuda" else host_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"decoder: max_batch and max_length: got {build.max_batch} and {build.max_length}, whose keys, values and logits "
            f"take {readable(needed)}, but {readable(free)} are free on {label(device)}; ask for fewer or shorter sequences."
        )


RING = 3  # launches that the host may be ahead of what it has read
ON_CPU = 1  # on a CPU, where a launch has ended when it returns: its tokens are shown before the next one begins


@dataclass(frozen=True)
class Tokens:
    """The result of one launch, on the host."""

    emitted: list[list[int]]  # (k, B), -1 where a row had ended
    logprobs: list[list[float]]  # (k, B); empty unless asked for
    alive: list[int]  # (B,)
    bad: list[int]  # (B,): 0, or 1 + the position whose logits were not finite


class BatchState:
    """State of `max_batch` rows on the device. A request fills the first rows, and kernels get views of them."""

    def __init__(self, max_batch: int, vocab: int, longest: int, device: torch.device) -> None:
        self.max_batch, self.vocab, self.longest, self.device = max_batch, vocab, longest, device
        self.block = torch.zeros(2 * longest + 2, max_batch, device=device, dtype=torch.int32)
        self.emitted, self.logprobs = self.block[:longest], self.block[longest:-2].view(torch.float32)  # a line a token
        # One allocation each, as in the certificate: Triton compiles attention anew for an address that is no multiple of 16.
        token, position, limit = (torch.zeros(max_batch, device=device, dtype=torch.int32) for _ in range(3))
        stops = torch.full((STOPS,), -1, device=device, dtype=torch.int32)
        self.rows = Rows(token, position, self.block[-2], limit, self.block[-1], stops)
        zeros = {name: torch.zeros(max_batch, device=device, dtype=dtype) for name, dtype in SETTINGS.items()}
        self.settings = Settings(**zeros)  # a request writes all of them
        # of the logits, before their log-probabilities are taken
        self.scale = torch.ones(max_batch, device=device, dtype=torch.float32)
        self.seen: Tensor | None = None
        pinned = device.type == "cuda"
        self.lead = RING if pinned else ON_CPU
        self._ring = [torch.zeros(self.block.shape, dtype=torch.int32, device="cpu", pin_memory=pinned) for _ in range(RING)]
        if device.type == PRETENDED:
            self._ring = [slot.pin_memory() for slot in self._ring]
        self._events = [torch.cuda.Event() for _ in range(RING)] if pinned else []
        self._waiting: deque[tuple[int, int]] = deque()
        self._next = 0

    def choice(self, rows: slice, seen: bool) -> Settings:
        return Settings._make([*[t[rows] for t in self.settings[:-1]], self.marks()[rows] if seen else None])

    def marks(self) -> Tensor:
        """Return uint8 (max_batch, V), 1 where a row holds the token. It is allocated for the first penalty."""
        if self.seen is None:
            self.seen = torch.zeros(self.max_batch, self.vocab, device=self.device, dtype=torch.uint8)
        return self.seen

    def fill(self, request: Request, rows: int, max_length: int) -> None:
        """Write a request into the first `rows` rows, one small copy for each field. Rows without a prompt are not alive."""
        prompts, choice = request.prompts, request.choice
        table = [
            [prompt[-1], len(prompt) - 1, 1, min(len(prompt) + request.max_new_tokens, max_length), number]
            for prompt, number in zip(prompts, draws(prompts))
        ]
        columns = torch.tensor(table + [[0] * 5] * (rows - len(table)), dtype=torch.int32, device="cpu").t().contiguous()
        targets = self.rows.token, self.rows.position, self.rows.alive, self.rows.limit, self.settings.row
        for target, values in zip(targets, to_device(columns, self.device)):
            target[:rows] = values
        self.rows.bad.zero_()
        self.rows.stops.fill_(-1)
        if request.stops:
            stops = torch.tensor(request.stops, dtype=torch.int32, device="cpu")
            self.rows.stops[: len(stops)] = to_device(stops, self.device)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            getattr(self.settings, name).fill_(getattr(choice, name))
        self.settings.penalty.fill_(choice.repetition_penalty)
        if choice.repetition_penalty != 1:
            marks = torch.zeros(rows, self.vocab, dtype=torch.uint8, device="cpu")
            for row, prompt in zip(marks, request.prompts):
                row[prompt] = 1
            self.marks()[:rows] = to_device(marks, self.device)

    def vacate(self, stops: Sequence[int]) -> None:
        """End all rows, and set the tokens that end those to come."""
        for tensor in self.rows[:-1]:
            tensor.zero_()
        padded = torch.tensor([*stops, *[-1] * (STOPS - len(stops))], dtype=torch.int32, device="cpu")
        self.rows.stops.copy_(to_device(padded, self.device))

    def seat(
        self,
        rows: list[int],
        prompts: list[list[int]],
        limits: list[int],
        choices: Sequence[Choice],
        seeds: Sequence[int],
        tempered: bool,
    ) -> None:
        """Begin a sequence in each of these rows, while the others go on.

        tempered: scale the logits by the temperature before all else, so that log-probabilities are those of the draw.
        """
        integers = [
            [row, prompt[-1], len(prompt) - 1, limit, draws([prompt])[0], choice.top_k, seed, 1, 0]
            for row, prompt, limit, choice, seed in zip(rows, prompts, limits, choices, seeds)
        ]
        scales = [1 / choice.temperature if tempered and choice.temperature else 1.0 for choice in choices]
        real = [
            [choice.temperature * scale, choice.top_p, choice.min_p, choice.repetition_penalty, scale]
            for choice, scale in zip(choices, scales)
        ]
        state, settings = self.rows, self.settings
        into = [state.token, state.position, state.limit, settings.row, settings.top_k, settings.seed, state.alive, state.bad]
        into += [settings.temperature, settings.top_p, settings.min_p, settings.penalty, self.scale]
        index, *columns = to_device(torch.tensor(integers, dtype=torch.int64, device="cpu").t().contiguous(), self.device)
        columns += to_device(torch.tensor(real, dtype=torch.float32, device="cpu").t().contiguous(), self.device)
        for tensor, values in zip(into, columns):
            tensor.index_copy_(0, index, values.to(tensor.dtype))
        if any(choice.repetition_penalty != 1 for choice in choices):
            marks = torch.zeros(len(rows), self.vocab, dtype=torch.uint8, device="cpu")
            for row, prompt in zip(marks, prompts):
                row[prompt] = 1
            self.marks().index_copy_(0, index, to_device(marks, self.device))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Move sequences to other rows."""
        for tensor in (*self.rows[:-1], *self.settings[:-1], self.scale, self.seen):
            if tensor is not None:
                tensor[targets] = tensor[sources]
        self.rows.alive.index_fill_(0, sources, 0)  # `alive[sources] = 0` would copy the number to the device, and wait

    def end(self, rows: list[int], forget: bool = False) -> None:
        """End these rows, for a reason that only the host knows, such as a stop string.

        forget: their steps read no keys and values any more, and write those of position 0.
        """
        mask = torch.ones(self.max_batch, dtype=torch.int32, device="cpu")
        mask[rows] = 0
        mask = to_device(mask, self.device)
        self.rows.alive.mul_(mask)
        if forget:
            self.rows.position.mul_(mask)

    def send(self, steps: int) -> None:
        """Copy the results of a launch of `steps` into the next slot of the ring."""
        slot, self._next = self._next, (self._next + 1) % RING
        self._ring[slot].copy_(self.block, non_blocking=True)
        if self._events:
            self._events[slot].record()
        self._waiting.append((slot, steps))

    @property
    def ahead(self) -> int:
        """Launches sent and not yet received."""
        return len(self._waiting)

    @property
    def arrived(self) -> bool:
        """Return whether the results of the oldest launch have, while others run. On a CPU none runs while the host does."""
        return bool(self._events and self._waiting) and self._events[self._waiting[0][0]].query()

    def receive(self, logprobs: bool = False) -> Tokens:
        """Return the oldest launch's results as lists once they have arrived: indexing a tensor takes a µs each time."""
        slot, steps = self._waiting.popleft()
        while self._events and not self._events[slot].query():
            time.sleep(2e-5)  # lets other threads run; a wait on the event would hold the host
        block = self._ring[slot]
        values = block[self.longest : self.longest + steps].view(torch.float32).tolist() if logprobs else []
        alive, bad = block[-2:].tolist()
        return Tokens(block[:steps].tolist(), values, alive, bad)

    def drop(self) -> None:
        """Discard launches that will not be read, of a stream that was closed early."""
        while self._waiting:
            self.receive()


class SamplingVariant(NamedTuple):
    """The options of a launch that change which kernels it has, those of sampling above all."""

    greedy: bool = True
    penalty: bool = False
    logprobs: bool = False
    tempered: bool = False  # log-probabilities after the temperature
    filtered: bool = False  # some rows are under top-k, top-p or min-p
    shared: bool = False  # attention reads what rows have in common once
    uneven: bool = False  # attention splits the keys of long rows among more programs
    most: int = 0  # keys that attention reads of a row at most; 0: all positions
    plain: bool = False  # steps of one token, by a stepper that drafts
    many: bool = False  # attention's programs are those of many rows: see Cache.keys_fill
    parts: int = 0  # entries of the list of rows' parts (Cache.list_parts), which attention reads if lengths are uneven


class Stepper:
    """Run steps of the rows of `slots`, each of which brings a row one token. speculation.py has steps of several."""

    tokens = 1  # of a row that a step may bring
    pace: Any = None  # of speculation.py: whether the next launch drafts

    def __init__(self, body: Any, slots: BatchState) -> None:
        self.body, self.slots = body, slots

    def run(self, rows: int, steps: int, variant: SamplingVariant) -> None:
        """Run `steps` steps of the first `rows` rows, all on the device: a graph records this call."""
        body, slots, state = self.body, self.slots, self.slots.rows.first(rows)
        plain = variant.greedy and not variant.logprobs and body.finds_best(rows)
        settings = None if plain else slots.choice(slice(rows), variant.penalty)
        if body.grouped is not None:
            cache = body.grouped
            cache.sharing, cache.uneven, cache.most, cache.listed = variant.shared, variant.uneven, variant.most, variant.parts
            cache.many = variant.many
        for step in range(steps):
            logits = body.step(state.token, state.position)
            if variant.tempered:
                logits.mul_(slots.scale[:rows, None])
            logprob = slots.logprobs[step, :rows] if variant.logprobs else None
            choose(body, logits, state, settings, into_body(body, slots.emitted[step, :rows]), logprob, variant.filtered)

    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        """Store what the stepper needs of prompts (B, T), right-padded, which are without their last tokens."""

    def moved(self) -> str | None:
        """Return the name of a weight that moved and that the runner does not read."""
        return None

    def rebind(self) -> None:
        """Read such weights again."""

    def bytes_a_step(self, live: list[int]) -> int:
        """Return the bytes that a step reads besides the runner's."""
        return 0

    def report(self) -> list[tuple[str, str, str]]:
        return []

    def exact(self, rows: int) -> bool:
        """Return whether this number of rows gets its logits from the kernels of a plain step."""
        return True


def into_body(body: Any, emitted: Tensor) -> Into:
    """Return the outputs of a choice, among them the runner's next input where it takes embeddings."""
    return Into(emitted, body.embed, None if body.embed is None else body.x[: len(emitted)])


def choose(
    body: Any, logits: Tensor, state: Rows, settings: Settings | None, into: Into, logprob: Tensor | None = None,
    filtered: bool = True,
) -> None:  # fmt: skip
    """Choose the next token of each row. Without settings: the likeliest, from the runner's partial maxima."""
    rows = len(into.emitted)
    if settings is None:
        pick(body.best[:rows], body.arg[:rows], state, into, dependent=body.chained(rows))
    else:
        sample(logits, state, settings, into, logprob, body.chained(rows), filtered)


class StepGraphs:
    """Captured launches of a stepper, each made at its first use. Graphs of one device share a memory pool."""

    longest_prompt = PROMPT_TOKENS

    def __init__(self, stepper: Stepper) -> None:
        self.body, self.slots, self.run = stepper.body, stepper.slots, stepper.run
        self.clear()

    def clear(self) -> None:
        """Forget every graph, after the weights have moved."""
        self._launches: dict[tuple[int, int, SamplingVariant], Callable[[], None]] = {}
        self._warm: set[tuple[int, SamplingVariant]] = set()
        self._begun: set[tuple[int, SamplingVariant]] = set()  # to compile
        self._prompts: dict[tuple[torch.Size, ...], tuple[tuple[Tensor, ...], Callable[[], None]] | None] = {}
        self._pools: dict[torch.device, Any] = {}

    def __len__(self) -> int:
        return len(self._launches)

    def made(self, rows: int, steps: int, variant: SamplingVariant) -> bool:
        """Return whether the graph for `launch` is captured."""
        return (rows, steps, variant) in self._launches

    def launch(self, rows: int, steps: int, variant: SamplingVariant) -> None:
        key = (rows, steps, variant)
        if key not in self._launches:
            self._launches[key] = self._make(*key)
        self._launches[key]()

    def begin_compiling(self, rows: int, variants: Iterable[SamplingVariant]) -> None:
        """Compile the kernels of launches to come in the background, where no result of a kernel is an index for torch."""
        new = {(rows, variant) for variant in variants} - self._warm - self._begun
        if not new or not self.body.launches_alike:
            return
        self._begun |= new
        saved = self.state(rows)  # torch's own ops run
        with self.body.fewer_layers():
            for key in new:
                compile_ahead(partial(self.run, rows, 1, key[1]), self.slots.device)
        for tensor, before in saved:
            tensor.copy_(before)

    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        """body.prefill(ids (B, T), lengths (B,))."""
        self._fill(self.body.prefill, "prefill {} x {}", ids, lengths)

    def refill(self, ids: Tensor, lengths: Tensor, rows: Tensor, start: int = 0) -> None:
        """body.refill(ids (B, T), lengths (B,), rows (B, C))."""
        if start:
            self.body.refill(ids, lengths, rows, start)
        else:
            self._fill(self.body.refill, f"refill {{}} x {{}} for {rows.numel()} rows", ids, lengths, rows)

    def _fill(self, call: Callable[..., None], name: str, *inputs: Tensor) -> None:
        ids, size = inputs[0], tuple(t.shape for t in inputs)
        fits = self.body.captures_prefill and ids.device.type == "cuda" and 0 < ids.numel() <= self.longest_prompt
        if not fits or size not in self._prompts:  # at its first, its kernels compile and test themselves
            call(*inputs)
            self._prompts.setdefault(size, None)
            return
        if (captured := self._prompts[size]) is None:
            buffers = tuple(t.clone() for t in inputs)
            self._prompts[size] = captured = buffers, self._capture_prompt(call, name.format(*ids.shape), buffers)
        for buffer, new in zip(captured[0], inputs):
            buffer.copy_(new)
        captured[1]()

    def _capture_prompt(self, call: Callable[..., None], name: str, buffers: tuple[Tensor, ...]) -> Callable[[], None]:
        """Return the replay of a captured prompt, which reads `buffers`."""
        runner = self._runner_on(self.slots.device)
        runner.record(name, lambda: call(*buffers), [], set())
        return runner.replay

    def _runner_on(self, device: torch.device) -> GraphRunner:
        runner = GraphRunner(device, self._pools.get(device))
        self._pools[device] = runner.pool
        return runner

    def _make(self, rows: int, steps: int, variant: SamplingVariant) -> Callable[[], None]:
        call = partial(self.run, rows, steps, variant)
        if self.slots.device.type != "cuda":
            return call
        runner = self._runner_on(self.slots.device)
        if (rows, variant) not in self._warm:  # first calls compile and test kernels, which no graph can hold
            saved = self.state(rows)
            runner.run(lambda: self.run(rows, 1, variant))
            for tensor, before in saved:
                tensor.copy_(before)
            self._warm.add((rows, variant))
        runner.record(f"decode {rows} x {steps}", call, [], set())
        return runner.replay

    def state(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Return copies of the tensors that a step changes, except the cache, whose position the next step writes again."""
        tensors = [self.slots.block, self.slots.rows.token, self.slots.rows.position, *self.body.carried()]
        tensors += [t for t in (self.body.x, self.slots.seen) if t is not None]
        return [(t, t.clone()) for t in tensors]
