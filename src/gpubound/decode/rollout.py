"""Rollouts: many sequences through the rows of a decoder. A row whose sequence ends gets the next one of a queue, and the
others go on.

The host launches a few steps for all rows, and reads the tokens of a launch while the next one runs. Once enough rows have
ended, their next prompts are prefilled and their state is written between two launches, on the device's stream: the host waits
for nothing. The samples of a prompt share its prefill: those that begin together get the same keys and values, and one that
begins later gets a copy from a row that still has them, or that row, if its sequence has ended. In a cache in pages they have
the prompt's full pages once. Several prompts are prefilled ahead, into spare rows, while few rows are free: a prefill of one
takes as long. When the queue is empty, the last sequences move to fewer rows.

A sequence's tokens depend on the weights, its prompt, its settings and its seed, which is made of the rollout's seed, the
prompt's index and the sample's.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from ..errors import GenerateError
from ..formatting import readable
from ..kernels.plans import power_of_two
from ..trace import notice
from .kv_cache import PAGE, PagePool
from .request import check_count, check_prompts, named, note_room, pad, prompt_width, to_device
from .rollout_request import RolloutRequest, RolloutSequence, Running
from .running import HEAVY, closed_at_exit, cut_at_stop, read_row, short_switch_interval
from .text import TextStream

if TYPE_CHECKING:
    from .generate import FastDecoder

# Steps of a launch, where a step reads HEAVY bytes and where it reads less. A row that has ended waits for the end of its
# launch, and for the one after it.
STEPS = 2, 4
AHEAD = 2  # launches that are not read yet
# A prefill of few short prompts is bound by its launches, so several rows share one: it waits until a sixteenth of the rows
# have ended, for at most so many steps. Where prompts are prefilled ahead, a refill is shorter, and MANY rows wait until a
# thirty-second has; not tried with fewer, whose steps are shorter, too.
SHARE, MANY, PATIENCE = (16, 32), 256, 16
KEPT = 2048  # tokens of a conversation from which on its cache is kept: fewer are prefilled again sooner, together with others
# A row that reads more keys than this, and than twice the mean, is long: attention waits for the program that reads them.
LONG = 512
# Of the keys that attention is told a row reads at most: fewer make as few programs, and each power of two is a capture.
FEWEST = 1024
MOVED = 16  # rows that are moved at once: the copy in between takes memory
# Tokens of the smallest prefill: 2.4 ms where one prompt of 32 takes 1.8 (H200, 0.6b), and fewer sizes to capture.
LEAST = 512
STAGED = 2048  # that are prefilled ahead
REFILL_TOKENS = 16384  # padding counted, that are prefilled at once: more would only take memory


class Rollout:
    """An iterator over the sequences of a rollout, as they end; `FastDecoder.rollout` makes it.

    A loop that is left early ends it. `next` takes single sequences.
    """

    def __init__(self, decoder: "FastDecoder", request: RolloutRequest) -> None:
        self.decoder, self.request, self.variant = decoder, request, request.variant
        shares = request.samples > 1 and max(len(one.ids) for one in request.sequences) >= PAGE
        self._grouped = decoder.body.grouped if shares else None
        self.waiting = deque(request.sequences)
        self.size = decoder.bucket(min(len(self.waiting), decoder.max_batch))  # rows of a launch
        self.rows: list[Running | None] = [None] * self.size
        self.most, self.total = self.size, len(self.waiting)
        # Whose keys and values each row has, also once it has ended.
        self._row_owners: list[Running | None] = [None] * self.size
        self._ahead = bool(decoder.body.spare) and request.samples > 1 and not request.chooses  # prompts are prefilled ahead
        self._staged: dict[int, Running] = {}  # these, by their spare rows
        self._last: dict[tuple[int, int], Running] = {}  # the last turn of each conversation, by prompt and sample
        self.finished: list[RolloutSequence] = []
        self.each_launch: Callable[[], object] = lambda: None  # called when the tokens of a launch have been read
        self.seconds = 0.0
        self.launches = self.prefills = self.row_steps = 0  # prefills: of prompts; row_steps: of all rows, alive or not
        self._flights: deque[list[Running | None]] = deque()  # the rows of each launch that is not read yet
        self._ended = False
        self._steps = 1  # of a launch
        self._since = 0  # steps since the last refill
        self._uneven = False  # whether some rows are far longer than the others
        self._unlike = False  # whether a row has ended before others
        self._common = [0] * decoder.max_batch  # first keys of each row that it reads together with others
        self._pages = PagePool(decoder.body.paged)
        notice(
            f"rollout: {self.size:,} rows of up to {decoder.max_length:,} tokens in a cache of "
            f"{readable(decoder.body.cache_bytes())}; a prefill takes up to {REFILL_TOKENS:,} tokens at once."
        )
        self._playing = self._play()
        closed_at_exit().add(self._playing)

    def __iter__(self) -> Iterator[RolloutSequence]:
        try:
            yield from self._playing
        finally:
            self.close()

    def __next__(self) -> RolloutSequence:
        return next(self._playing)

    def close(self) -> None:
        """End the rollout; the decoder is ready for the next request."""
        self._playing.close()

    @property
    def sequences(self) -> list[RolloutSequence]:
        """All sequences, ordered by prompt and sample. Runs the rollout to its end."""
        for _ in self:
            pass
        if left := self.total - len(self.finished):
            raise GenerateError(f"rollout: it was ended with {left:,} sequences left; `finished` has the others.")
        return sorted(self.finished, key=lambda one: (one.prompt, one.sample, one.turn))

    @named("rollout: extend")
    def extend(self, sequence: RolloutSequence, tokens: list[int], max_new_tokens: int | None = None) -> None:
        """Go on with a conversation: `tokens` follow a sequence that has ended, such as a tool's answer or the next question.

        It comes again as its next `turn`, with the tokens of that turn alone. To be called before the rollout has ended.
        """
        before = self._last.get((sequence.prompt, sequence.sample))
        if before is None or before.result is not sequence or self._ended:
            raise ValueError(
                f"rollout: extend: prompt {sequence.prompt}, sample {sequence.sample} is not the last turn of a conversation "
                f"of this rollout, or the rollout has ended; extend a sequence when the iteration yields it."
            )
        decoder, ids = self.decoder, [*before.ids, *sequence.tokens, *tokens]
        check_prompts([ids], decoder.body.vocab, 1, decoder.max_length)
        if max_new_tokens is not None:
            check_count("max_new_tokens", max_new_tokens, "; None takes as many as the turn before")
        note_room([ids], [max_new_tokens], decoder.max_length, "rollout: extend")
        most = before.limit - len(before.ids) if max_new_tokens is None else max_new_tokens
        text = TextStream(decoder.text, self.request.stop_strings, self.request.stops)
        result = RolloutSequence(sequence.prompt, sequence.sample, sequence.seed, turn=sequence.turn + 1)
        limit = min(len(ids) + most, decoder.max_length)
        self.waiting.appendleft(Running(result, ids, limit, before.choice, before.adapter, text, before))
        before.before, self.total = None, self.total + 1

    @property
    def count(self) -> int:
        """Tokens of the sequences that have ended."""
        return sum(len(one.tokens) for one in self.finished)

    @property
    def tokens_per_s(self) -> float:
        return self.count / self.seconds if self.seconds else 0.0

    @property
    def occupancy(self) -> float:
        """The share of all rows' steps that brought a token."""
        return self.count / self.row_steps if self.row_steps else 0.0

    def _play(self) -> Generator[RolloutSequence, None, None]:
        decoder, slots, begun = self.decoder, self.decoder.slots, time.perf_counter()
        ended = deque[RolloutSequence]()  # not yielded yet: the next ones begin before the caller looks at them
        with decoder.turn:
            try:
                with short_switch_interval():
                    with decoder.plainly():
                        decoder.bound.follow()
                        decoder.body.choose(None)
                        slots.vacate(self.request.stops)
                        light = decoder.body.bytes_a_step([1] * self.size) < HEAVY
                        longest = max((one.limit - len(one.ids) for one in self.waiting), default=1)
                        self._steps = min(STEPS[light], max(decoder.ladder), longest)
                        self._begin_compiling(self.size)
                    while self.waiting or any(self.rows) or ended:
                        if not (self.waiting or any(self.rows)):
                            yield ended.popleft()
                            continue
                        with decoder.plainly():
                            if self._due():
                                self._refill()
                            elif any(self.rows):
                                self._forget()
                                self._compact()
                            launches = self._launches()
                            if launches:
                                self._launch()
                        if launches:
                            continue
                        if ended and not slots.arrived:
                            yield ended.popleft()
                            continue
                        new = self._receive()
                        if new and any(self.rows) and not self._unlike:
                            self._unlike = True
                            with decoder.plainly():
                                for halved in range(1, self.size.bit_length()):
                                    self._begin_compiling(decoder.bucket(self.size >> halved))
                        for one in new:
                            if len(one.ids) + len(one.result.tokens) < KEPT:
                                ended.append(one.result)
                            else:  # its conversation may go on in its row
                                yield one.result
            finally:
                self._ended = True
                slots.drop()
                self.seconds += time.perf_counter() - begun

    def _due(self) -> bool:
        """Return whether ended rows get their next sequences now."""
        free = self.rows.count(None) + self.most - self.size
        share = SHARE[self._ahead and self.size >= MANY]
        enough = free >= max(1, self.size // share) or self._since >= PATIENCE or free == self.most
        unused = [*self._ended_rows(), *self._staged]
        return free > 0 and enough and bool(self.waiting) and self._pages.fits(self.waiting[0].limit, unused)

    def _ended_rows(self) -> list[int]:
        return [row for row, one in enumerate(self.rows) if one is None]

    def _refill(self) -> None:
        body, slots = self.decoder.body, self.decoder.slots
        live = len(self.rows) - self.rows.count(None)
        self._resize(max(self.size, self.decoder.bucket(min(self.most, live + len(self.waiting)))))
        owners, free, new = self._row_owners, self._ended_rows(), list[Running]()
        groups: dict[Running, list[Running]] = {}  # samples that are prefilled together, by the first of them
        copied: list[tuple[int, int, int]] = []  # from which row to which, and how many tokens
        # A sequence whose row has a prompt's keys: rather one that goes on, for the others may lose their rows.
        stored = sorted(filter(None, owners), key=lambda one: self.rows[one.row] is one) if body.keeps_prompts else []
        self._stage(free, {one.result.prompt for one in stored})
        holders = {one.result.prompt: one for one in [*stored, *self._staged.values()]}
        while free and self.waiting:
            one, row = self.waiting[0], free[0]
            before = holders.get(one.result.prompt) if not one.result.turn else one.before if body.keeps_prompts else None
            source, tokens = None, 0  # the row that has its first tokens
            if before is not None and before in (self._staged.get(before.row), *owners[before.row : before.row + 1]):
                if not one.result.turn:
                    source, tokens = before.row, len(one.ids) - 1
                elif before.row in free and len(before.ids) >= KEPT:
                    # A row that has ended writes its last token's keys where those of the one before it were.
                    source, tokens = before.row, max(0, len(before.ids) + len(before.result.tokens) - 2)
            row = source if source in free else row
            if not self._pages.give(row, one.limit, source, tokens):
                used = {other for other, *_ in copied}
                if source in self._staged and source not in used:  # its last page is not shared, and may be the one that lacks
                    source, tokens = None, 0
                self._drop([other for other in [*free, *self._staged] if other not in (row, source, *used)])
                if not self._pages.give(row, one.limit, source, tokens):
                    break
            self.waiting.popleft()
            free.remove(row)
            self.rows[row] = owners[row] = one
            one.row = row
            new.append(one)
            if before in groups and source is not None:
                groups[before].append(one)
                continue
            if one.result.turn:
                one.start = tokens
            elif source in (None, row):
                holders[one.result.prompt] = one
            if source is None or one.start:
                groups[one] = [one]
            elif row != source:
                copied.append((source, row, tokens))
        self._since, wanted = 0, {one.result.prompt for one in islice(self.waiting, self.request.samples * len(self._staged))}
        self._place()
        if body.paged:
            self._pages.copy_tails(copied)
        elif length := max((tokens for _, _, tokens in copied), default=0):
            sources, targets, _ = to_device(torch.tensor(copied, device="cpu").t().contiguous(), body.device)
            body.move(sources, targets, length)
        for batch in batches([group for one, group in groups.items() if not one.start]):
            self._prefill(batch)
        for one in groups:
            if one.start:
                self._prefill([[one]], one.start)
        slots.seat(
            [one.row for one in new],
            [one.ids for one in new],
            [one.limit for one in new],
            [one.choice for one in new],
            [one.result.seed for one in new],
            self.variant.tempered,
        )
        self._drop([row for row, one in self._staged.items() if one.result.prompt not in wanted])
        body.begin(slots.rows.token[: self.size])
        self._share()  # after the prefills have been launched, which do not read it

    def _stage(self, free: list[int], prefilled: set[int]) -> None:
        """Prefill the next prompts into spare rows, once one of them begins: its samples copy the row, or get its pages."""
        spare = [row for row in self.decoder.body.spare if row not in self._staged]
        prefilled = prefilled | {one.result.prompt for one in self._staged.values()}
        nexts: dict[int, Running] = {}
        begins = {one.result.prompt for one in islice(self.waiting, len(free)) if not one.result.turn} - prefilled
        if not self._ahead or not begins or len(begins) >= len(spare):
            return
        for one in islice(self.waiting, self.request.samples * len(spare)):
            number = len(nexts)
            if one.result.turn or one.result.prompt in prefilled or one.result.prompt in nexts or number == len(spare):
                continue
            if power_of_two(number + 1) * width_of(one) > STAGED or not self._pages.give(spare[number], len(one.ids)):
                break
            nexts[one.result.prompt] = replace(one, limit=len(one.ids), row=spare[number])
        if len(nexts) > len(begins):
            self._staged |= {one.row: one for one in nexts.values()}
            self._pages.upload()
            self._prefill([[one] for one in sorted(nexts.values(), key=lambda one: len(one.ids))])
        else:
            self._drop([one.row for one in nexts.values()])

    def _place(self) -> None:
        """Write the pages and the adapters of the rows as they are now, which have one prompt, and whether some are long."""
        self._pages.upload()
        if self.decoder.body.splits_keys:
            alone = self._grouped is None
            read = [one.launched + alone * len(one.ids) for one in self._row_owners if one is not None]
            self._uneven = bool(read) and max(read) > max(LONG, 2 * sum(read) / len(read))
        if self.request.chooses:
            self.decoder.body.choose([None if one is None else one.adapter for one in self.rows])

    def _share(self) -> None:
        """Write which rows have a prompt in common, whose keys steps read once."""
        if self._grouped is not None:
            groups = defaultdict[int, list[int]](list)
            for row, one in enumerate(self._row_owners):
                if one is not None and not one.result.turn and len(one.ids) >= PAGE:
                    groups[one.result.prompt].append(row)
            several = [rows for rows in groups.values() if len(rows) > 1]
            shared = {row for rows in several for row in rows}
            # the last one's key is the same, too, once a row is beyond it
            self._common = [len(one.ids) if one and row in shared else 0 for row, one in enumerate(self._row_owners)]
            self._grouped.group(several, self._common)
            self.variant = self.variant._replace(shared=bool(several))

    def _prefill(self, batch: list[list[Running]], start: int = 0) -> None:
        """Prefill prompts, each for all of its samples, padded to few sizes, since each is a graph.

        start: the first position, of a sequence whose row holds those before.
        """
        device, width = self.decoder.body.device, width_of(batch[-1][0], self.decoder.max_length)
        self.prefills += len(batch)
        count, captured = len(batch), device.type == "cuda" and not start
        least = max(1, LEAST // max(width, 1)) if captured else 1
        batch = batch + [batch[-1]] * (max(least, power_of_two(len(batch))) - len(batch))
        copies = 1 if max(map(len, batch)) == 1 else power_of_two(min(self.request.samples, self.most))
        rows = [[one.row for one in group] + [group[0].row] * (copies - len(group)) for group in batch]
        ids = [group[0].ids[start:-1] for group in batch]  # a prompt's last token goes through the first step
        lengths = torch.tensor([len(one) for one in ids], device="cpu")
        try:
            targets = to_device(torch.tensor(rows, device="cpu"), device)
            self.decoder.graphs.refill(pad(ids, width, device), to_device(lengths, device), targets, start)
        except torch.OutOfMemoryError as error:
            raise GenerateError(
                f"rollout: out of memory in the prefill of {count} prompts of up to {width} tokens, with {self.size} rows "
                f"and a cache of {readable(self.decoder.body.cache_bytes())}; build the decoder with a smaller max_batch or "
                f"max_length."
            ) from error

    def _forget(self) -> None:
        """Let the rows that have ended read no keys and values any more, but those that the next sequences may need."""
        begun = next((one.result.prompt for one in self.waiting if not one.result.turn), None)
        ended = [
            row
            for row in self._ended_rows()
            if (one := self._row_owners[row]) is not None
            and not (self.waiting and (one.result.prompt == begun or len(one.ids) + len(one.result.tokens) >= KEPT))
        ]
        if ended:
            self.decoder.slots.end(ended, forget=True)
            self._drop(ended)
            self._pages.upload()  # before a step writes to position 0, which other rows may read
            if not self.waiting:  # else at the next refill: their part of the common keys is computed until then
                self._share()

    def _drop(self, rows: list[int]) -> None:
        """Drop the keys and values of rows that have ended, or of prompts that were prefilled ahead."""
        for row in rows:
            self._pages.take(row)
            if self._staged.pop(row, None) is None and row < self.size:
                self._row_owners[row], self._common[row] = None, 0

    def _resize(self, size: int) -> None:
        self.rows = self.rows[:size] + [None] * (size - self.size)
        self._row_owners = self._row_owners[:size] + [None] * (size - self.size)
        self.size = size

    def _compact(self) -> None:
        """Move the last sequences to the first rows, once these are at most half of the rows."""
        live = [one for one in self.rows if one is not None]
        size = self.decoder.bucket(max(1, len(live)))
        if self.waiting or not live or size > self.size // 2:
            return
        free = [row for row in range(size) if self.rows[row] is None]
        moved = [one for one in live if one.row >= size]
        targets = free[: len(moved)]
        rows = torch.tensor([[one.row for one in moved], targets], dtype=torch.int64, device="cpu")
        sources_N, targets_N = to_device(rows, self.decoder.body.device)
        self.decoder.slots.move(sources_N, targets_N)
        if moved:
            reached = max(min(one.limit, len(one.ids) + one.launched) for one in moved)
            for pair in zip(sources_N.split(MOVED), targets_N.split(MOVED)):
                self.decoder.body.move(*pair, reached)
        for one, row in zip(moved, targets):
            self._pages.move(one.row, row)
            self.rows[row] = self._row_owners[row] = one
            one.row = row
        self._resize(size)
        self._place()
        self._share()
        self.decoder.body.begin(self.decoder.slots.rows.token[:size])

    def _begin_compiling(self, rows: int) -> None:
        """Begin to compile the steps of so many rows: one kernel after the other, a first rollout waited for them.

        Those of fewer rows, to which the last sequences move, took 10 s.
        """
        cache, plain = self.decoder.body.grouped, self.variant._replace(uneven=False, most=0, parts=0, many=False)
        if cache is not None:
            other = plain._replace(uneven=True, parts=rows) if cache.fills(rows) else plain._replace(many=True)
            shared = {False, rows > 1 and self._grouped is not None}
            self.decoder.graphs.begin_compiling(rows, [one._replace(shared=s) for one in (plain, other) for s in shared])

    def _launches(self) -> bool:
        """Return whether the next launch is to begin before the oldest is read."""
        slots, graphs = self.decoder.slots, self.decoder.graphs
        if slots.ahead >= min(AHEAD, slots.lead) or not any(one is not None and one.left > 0 for one in self.rows):
            return False
        if self.decoder.body.splits_keys:
            cache, most, parts = self.decoder.body.grouped, 0, 0
            read = [self._steps if one is None else len(one.ids) + one.launched + self._steps for one in self._row_owners]
            if fills := cache.fills(self.size):
                if self._uneven:
                    parts = cache.list_parts([count - common for count, common in zip(read, self._common)])
                if not parts and (bound := max(FEWEST, power_of_two(max(read)))) < self.decoder.max_length:
                    most = bound
            # Of fewer rows all keys are split, however long a row is: another variant would be a capture for nothing.
            uneven, many = self._uneven and fills, not fills and cache.keys_fill(read)
            self.variant = self.variant._replace(uneven=uneven, most=most, parts=parts, many=many)
        return not slots.ahead or graphs.made(self.size, self._steps, self.variant)

    def _launch(self) -> None:
        decoder, steps = self.decoder, self._steps
        decoder.bound.check_unmoved()
        decoder.graphs.launch(self.size, steps, self.variant)
        decoder.slots.send(steps)
        self._flights.append(list(self.rows))
        for one in self.rows:
            if one is not None:
                one.launched += steps
        self.launches, self._since = self.launches + 1, self._since + steps
        self.row_steps += steps * self.size

    def _receive(self) -> list[Running]:
        """Read the oldest launch, and return the sequences that it ended."""
        tokens, owners = self.decoder.slots.receive(self.request.logprobs), self._flights.popleft()
        ended: list[Running] = []
        stopped: list[int] = []  # rows that still generate
        for row, one in enumerate(owners):
            if one is None or one.result.finish:
                continue
            result, name = one.result, f"prompt {one.result.prompt}, sample {one.result.sample}"
            _, finish = read_row(self.decoder, tokens, row, result, one.text, self.request.stops, one.ids, name)
            result.finish = finish.partition(" ")[0]
            if finish == "stop string":
                cut_at_stop(result, one.text)
                stopped += [one.row] if tokens.alive[row] else []
            if result.finish:
                ended.append(one)
        self.each_launch()
        if stopped:
            self.decoder.slots.end(stopped)
        for one in ended:
            self.rows[one.row] = None
            one.result.text = one.text.complete()
            self._last[one.result.prompt, one.result.sample] = one
            self.finished.append(one.result)
        return ended


def batches(groups: list[list[Running]]) -> Iterator[list[list[Running]]]:
    """Yield groups of samples of one prompt, as many as a prefill takes, the shortest prompts first."""
    batch: list[list[Running]] = []
    for group in sorted(groups, key=lambda group: len(group[0].ids)):
        if batch and power_of_two(len(batch) + 1) * width_of(group[0]) > REFILL_TOKENS:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


def width_of(one: Running, most: int | None = None) -> int:
    """Return the padded length of a prompt without its last token."""
    width = prompt_width(len(one.ids) - 1 - one.start)
    return width if most is None else min(width, most - one.start)
