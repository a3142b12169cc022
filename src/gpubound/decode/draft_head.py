"""Speculation by a draft head (models/draft_head.py) inside the launch.

A step of the model keeps the hidden states before three layers, of each of its T tokens. The next step's draft begins with all
of these positions at once: which of them were accepted is known on the device alone, so the layer computes keys and values of
all T and goes on from the last accepted one. Entries after it are overwritten before anything reads them. Then the layer's
output replaces the hidden states for one token after the other.

The head's entry at position p has the embedding of token p + 1. A row whose last token is at position P is drafted from the
entry P - 1, whose output predicts the token at P + 1.

Legend: B rows, T tokens of a row in a step (the last, and T - 1 drafted), V vocabulary of the model.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import begin_draft, extend_draft, keep_stream, write_tokens
from ..kernels.decode_product import EARLY, LATE, Norm
from ..kernels.dispatch import can_launch
from ..kernels.draft_inputs import Reads
from ..kernels.ngram_speculation import Chunk
from ..kernels.rope import rope
from ..kernels.sampling import Into, Rows, Settings
from ..layers.attention import RopeTable
from ..models.decoding import AttentionWeights, DenseWeights, Linear, Shape
from ..models.draft_head import DraftHead
from .kv_cache import Cache, CachedLayer
from .layer import CachedAttention, DenseMLP, Workspace, normed_rows
from .model_watch import TensorWatch
from .runner import BatchState, RunnerConfig, SamplingVariant, choose
from .speculation import DrawnDraft
from .transformer import FEW, PARTIAL_ROWS
from .weights import LiveFormat


class HiddenStates:
    """The stream before some layers: of the tokens of the last step, or of a prompt's last token, for each row."""

    def __init__(self, layers: tuple[int, ...], hidden: int, max_batch: int, tokens: int, device: torch.device) -> None:
        self.layers, self.hidden, self.tokens = layers, hidden, tokens
        self.rows = torch.zeros(max_batch * tokens, len(layers) * hidden, device=device, dtype=torch.float32)
        self.position = torch.zeros(max_batch, device=device, dtype=torch.int32)  # of the first of a row's tokens
        self.read_prompt: Callable[[Tensor, Tensor, int], None] = lambda ids, states, start: None
        self.plain: Tensor | None = None  # (rows, steps, width), of a launch of plain steps
        self.step = 0  # of it
        self._lengths: Tensor | None = None
        self._prompt: dict[int, Tensor] = {}

    def buffers_at(self, number: int, rows: int) -> list[Tensor]:
        """Return where a step writes the stream of its `rows` tokens before layer `number`, each (rows, hidden)."""
        buffers = []
        for at, layer in enumerate(self.layers):
            if layer == number:
                self.step += self.plain is not None and at == 0
                to = self.rows[:rows] if self.plain is None else self.plain[:, self.step - 1]
                buffers.append(to[:, at * self.hidden : (at + 1) * self.hidden])
        return buffers

    def begin_prompt(self, lengths: Tensor) -> None:
        """Begin a prefill of prompts of these lengths (B,)."""
        self._lengths = lengths
        self.rows.zero_()  # of rows whose prompt is one token, which has nothing before it
        self.position[: len(lengths)] = (lengths - 1).clamp(min=0)

    def keep_prompt(self, number: int, x: Tensor) -> None:
        """Keep the stream x (B, T, hidden) of a chunk of prompts before layer `number`."""
        if self._lengths is not None and number in self.layers:
            self._prompt[number] = x

    def end_chunk(self, ids: Tensor, start: int) -> None:
        """Pass the hidden states of a chunk of the prompts ids, from position `start` on, to the head."""
        assert self._lengths is not None
        states = torch.cat([self._prompt[number] for number in self.layers], -1)
        self._prompt.clear()
        last = self._lengths.long() - 1 - start
        inside = (last >= 0) & (last < states.shape[1])
        at = last.clamp(0, states.shape[1] - 1)[:, None, None].expand(-1, 1, states.shape[2])
        mine = self.rows.view(-1, self.tokens, states.shape[2])[: len(ids), 0]
        mine.copy_(torch.where(inside[:, None], states.gather(1, at)[:, 0].float(), mine))
        self.read_prompt(ids, states, start)

    def end_prompt(self) -> None:
        self._lengths = None
        self._prompt.clear()


TILED = 16  # entries that are multiplied together on tensor cores; their features and keys are no result, so they may round


class HeadAttention(CachedAttention):
    """Attention whose input is [normed embedding, normed feature] instead of the normed stream."""

    both: Tensor  # (rows, 2 hidden), fp32

    def operand(self, x: Tensor, mode: int, first: bool = False) -> tuple[Tensor, Norm | None]:
        return self.both[: len(x)], None

    def read(self, x: Tensor, mode: int = 0) -> Tensor:
        return self.both[: len(x)].to(self.workspace.dtype)

    def write_prompt(self, both: Tensor, start: int) -> None:
        """Write the keys and values of a prompt's inputs (B, T, 2 hidden)."""
        k, v = self._keys_values(both, slice(start, start + both.shape[1]))
        self.workspace.cache.extend(self.number, start, k, v)

    def write_runs(self, both: Tensor, place: Tensor, runs: list[int]) -> None:
        """Write those of inputs (B, T, 2 hidden) at positions `place` (B, T), in runs of these lengths, where the cache has
        them."""
        blocks = torch.arange(len(both), device=place.device).view(-1, 1, 1)
        pair = self._keys_values(both, place.clamp(max=len(self._angles[0]) - 1))
        for kept, new in zip(self.workspace.cache.keys_values(self.number), pair):
            for part, at in zip(new.split(runs, 1), place.split(runs, 1)):
                write_tokens(kept, part, blocks, at[:, 0].int())

    def _keys_values(self, both: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        q, k, v = (row.unflatten(-1, (-1, self.weights.head_dim)) for row in self.linear(self.qkv, both))
        cos, sin = self._angles
        return rope(q, k, cos[place], sin[place])[1], v


class HeadRunner:
    """The layer and the head over the kernels of a decoding step, from the module's weights in place."""

    def __init__(self, head: DraftHead, body: Any, tokens: int) -> None:
        self.head, self.body, self.vocab = head, body, body.vocab
        c, self.device, self.tokens = head.config, body.device, tokens
        rows, words, dtype = body.max_batch * tokens, len(head.d2t), head.fc.weight.dtype
        self.shape = Shape(c.hidden, words)
        config = RunnerConfig(body.max_batch, body.max_length, tokens, redone=tokens)
        self.cache = Cache(config, {0: CachedLayer(c.kv_heads, c.head_dim)}, dtype, self.device)
        positions = torch.arange(body.max_length, device=self.device)[None]
        cos, sin = (table[0].contiguous() for table in RopeTable(c.angles).at(positions))
        self.workspace = Workspace(self.shape, self.cache, [(cos, sin)], rows, tokens)
        fp32: Any = {"device": self.device, "dtype": torch.float32}
        self.own_rows = TILED if dtype == torch.bfloat16 and can_launch(self.device) else FEW
        self.workspace.gemv_rows, self.workspace.together = FEW if self.own_rows > FEW else None, True
        self.x = torch.zeros(rows, c.hidden, **fp32)
        self.both = torch.zeros(rows, 2 * c.hidden, **fp32)
        self.place = torch.zeros(rows, device=self.device, dtype=torch.int32)
        self.last = torch.zeros(body.max_batch, c.hidden, **fp32)
        self.last_entry = torch.zeros(body.max_batch, device=self.device, dtype=torch.int64)
        self.rounded = torch.zeros(body.max_batch, c.hidden, device=self.device, dtype=dtype)
        self.reduced = torch.zeros(body.max_batch, words, **fp32)
        whole = words == self.vocab
        self.logits = self.reduced if whole else torch.full((body.max_batch, self.vocab), float("-inf"), **fp32)
        parts = -(-words // PARTIAL_ROWS)
        self.best = torch.zeros(body.max_batch, parts, **fp32)
        self.arg = torch.zeros(body.max_batch, parts, device=self.device, dtype=torch.int32)
        self.states = HiddenStates(head.layers, head.width, body.max_batch, tokens, self.device)
        self.states.read_prompt = self.read_prompt
        body.keep_hidden_states(self.states)
        self.read_weights()

    def read_weights(self) -> None:
        """Read the head's current weights."""
        head, layer, form = self.head, self.head.midlayer, LiveFormat()
        head.check_model(self.body.live.model)
        form.begin(head, self.device, on_host=False)
        self.workspace.adapting.begin({})
        projections: list[Any] = [*layer.self_attn.children(), *layer.mlp.children()]
        q, k, v, o, gate, up, down = (Linear(one.weight.detach(), one.bias) for one in projections)
        norm = self._norm(layer.post_attention_layernorm)
        width = head.config.head_dim
        weights = AttentionWeights(None, q, k, v, o, width, width**-0.5, None, None, 0)
        self.attention = HeadAttention(weights, 0, form, self.workspace)
        self.attention.both = self.both
        self.mlp = DenseMLP(DenseWeights(norm, gate, up, down), 0, form, self.workspace)
        self.fc, self.lm_head = form.stacked(Linear(head.fc.weight)), form.head(Linear(head.lm_head.weight))
        self.fc.gemv_rows = self.workspace.gemv_rows
        self.workspace.adapting.close()
        self.table, self.norm = head.table(self.body.live.model).detach(), self._norm(head.norm)
        self.reads = Reads(self.table, self._norm(layer.input_layernorm), self._norm(layer.hidden_norm))
        self.targets = head.targets
        self.moved = TensorWatch(head, "_parameters", "_buffers").moved
        products = (self.fc, self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down, self.lm_head)
        read = {t.data_ptr(): t.nbytes for product in products for t in product.tensors()}
        self.weight_bytes = sum(read.values())

    def _norm(self, norm: Any) -> Norm:
        return Norm(norm.weight.detach(), norm.eps)

    def mode(self, rows: int) -> int:
        if not self.body.can_chain or rows > self.own_rows:
            return 0
        return EARLY if rows > FEW or self.mlp.gate_up_bytes <= LiveFormat.early_bytes else LATE

    def chained(self, rows: int) -> bool:
        return self.mode(rows) > 0

    def finds_best(self, rows: int) -> bool:
        return rows <= FEW

    def features(self, rows: int) -> Tensor:
        """Write the features of the first hidden states to the stream, and return it (rows, hidden)."""
        x, states = self.x[:rows], self.states.rows[:rows]
        if rows <= self.own_rows:
            return self.fc.norm_product(states, None, x, self.mode(rows))
        return x.copy_(F.linear(states.to(self.head.fc.weight.dtype), self.head.fc.weight))

    def attend(self, x: Tensor, position: Tensor) -> None:
        """Run the attention on the stream x in place, with `both` as its input, at positions (B, T) or (B,)."""
        run = self.attention.step if len(x) <= self.own_rows else self.attention.gemm_step
        run(x, position, self.mode(len(x)))

    def finish(self, x: Tensor) -> None:
        """Run the MLP on the stream x (B, hidden) in place, and compute the logits of the reduced vocabulary."""
        rows, mode = len(x), self.mode(len(x))
        reduced = self.reduced[:rows]
        if rows <= FEW:
            self.mlp.step(x, mode)
            self.lm_head.norm_product(x, self.norm, reduced, mode, (self.best[:rows], self.arg[:rows]))
        else:
            self.mlp.gemm_step(x, mode)
            reduced.copy_(F.linear(normed_rows(x, self.norm, self.rounded[:rows]), self.head.lm_head.weight))

    def choose(self, own: Rows, settings: Settings, into: Into) -> None:
        """Choose each row's next token, of the model's vocabulary, and write it to `own`."""
        logits = self.logits[: len(into.emitted)]
        if self.logits is not self.reduced:
            logits.index_copy_(1, self.targets, self.reduced[: len(logits)])
        choose(self, logits, own, settings, into)

    def read_prompt(self, ids: Tensor, states: Tensor, start: int) -> None:
        """Write the keys and values of a chunk of prompts ids, from position `start` on. The last token of a row is not among
        ids: its entry is written by the first step."""
        end = start + states.shape[1]
        following = F.pad(ids[:, start + 1 : end + 1], (0, max(0, end + 1 - ids.shape[1])))
        self.attention.write_prompt(self.inputs(states, following), start)

    def inputs(self, states: Tensor, following: Tensor) -> Tensor:
        """Return the layer's inputs (B, T, 2 hidden) of hidden states (B, T, width) and the tokens after them (B, T)."""
        dtype, layer = self.head.fc.weight.dtype, self.head.midlayer
        x = F.linear(states.to(dtype), self.head.fc.weight)
        embedded = F.embedding(following, self.table).to(dtype)
        return torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(x)], -1)


class HeadDraft(DrawnDraft):
    """Drafts by a head over the model's hidden states."""

    def __init__(self, body: Any, slots: BatchState, tokens: int, head: DraftHead) -> None:
        super().__init__(body, slots, tokens)
        self.runner = HeadRunner(head, body, tokens)
        states = self.runner.states.rows
        self.plain_states = states.new_zeros(slots.max_batch * slots.longest, states.shape[1])

    def draft(self, state: Rows, chunk: Chunk, variant: SamplingVariant) -> None:
        (rows, T), runner, body = chunk.token.shape, self.runner, self.body
        n, own, into, x = rows * T, self.own.first(rows), Into(self.chosen_draft[:rows]), runner.last[:rows]
        settings = None if variant.greedy and runner.finds_best(rows) else self._own_settings(rows, variant, runner.vocab)
        begin, place, last = runner.states.position[:rows], runner.place[:n].view(rows, T), runner.last_entry[:rows]
        stream, both, to = runner.features(n), runner.both[:rows], body.x[:n]
        mode = EARLY if runner.chained(n) else 0
        text, reads = self.text[:rows], runner.reads
        begin_draft(state, text, begin, stream, reads, chunk, place, last, runner.both[:n], body.embed, to, mode)
        runner.attend(stream, place)
        keep_stream(stream, x, mode, last, chunk.position, begin)
        if settings is not None:
            own.token.copy_(state.token)
            own.position.copy_(state.position)
            own.alive.fill_(1)
        best, arg = (None, None) if settings is not None else (runner.best[:rows], runner.arg[:rows])
        mode = EARLY if runner.chained(rows) else 0
        for t in range(1, T):
            runner.finish(x)
            if settings is not None:
                runner.choose(own, settings, into)
            after = both if t < T - 1 else None
            extend_draft(best, arg, runner.targets, own.token, x, reads, chunk, t, after, body.embed, to, mode)
            if after is not None:
                runner.attend(x, chunk.position[:, t - 1].contiguous())

    def run_plain(self, rows: int, steps: int, variant: SamplingVariant) -> Tensor:
        """Run steps of one token, and write the head's entries of the last verified step, then theirs. The next draft begins
        with the last one, as after a prompt."""
        states, text, T = self.runner.states, self.text[:rows], self.tokens
        verified, first = states.rows[: rows * T].view(rows, T, -1), states.position[:rows].clone()
        states.plain, states.step = self.plain_states[: rows * steps].view(rows, steps, -1), 0
        try:
            begin = super().run_plain(rows, steps, variant)
            runs = [(first, T), (begin, steps)]
            place = torch.cat([at[:, None] + torch.arange(count, device=at.device) for at, count in runs], 1)
            following = text.gather(1, (place + 1).clamp(max=text.shape[1] - 1)).long()
            both = self.runner.inputs(torch.cat([verified, states.plain], 1), following)
            self.runner.attention.write_runs(both, place, [T, steps])
            verified[:, 0] = states.plain[:, -1]
            states.position[:rows] = self.slots.rows.position[:rows] - 1
        finally:
            states.plain = None
        return begin

    def moved(self) -> str | None:
        return self.runner.moved()

    def rebind(self) -> None:
        self.runner.read_weights()

    def bytes_a_step(self, live: list[int]) -> int:
        return (self.tokens - 1) * (self.runner.weight_bytes + self.runner.cache.bytes_read(live))

    def report(self) -> list[tuple[str, str, str]]:
        head, runner = self.runner.head, self.runner
        layers = ", ".join(map(str, head.layers))
        words = f"{len(head.d2t):,} of {runner.vocab:,} tokens" if len(head.d2t) < runner.vocab else "all tokens"
        kind = f"{runner.workspace.kernels}: a decoder layer, a head over {words}"
        return [
            ("speculation", f"{self._drafted()} drafted by a head", self._proof()),
            ("draft head", kind, f"reads the hidden states before layers {layers}"),
            *self._paces(),
        ]
