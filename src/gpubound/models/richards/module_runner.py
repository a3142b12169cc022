"""The body for a model of ours whose parts have no fused step: its own layers over buffers of their own, in a graph.

The model says how it goes on from what it keeps (`cached` of models/own.py). That this is what its forward computes is tried
when the body is built: rows at two positions, against the logits of the whole text at once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...decode.model_watch import TensorWatch
from ...decode.runner import ModelRunner, RunnerConfig, check_room
from ...layers.fused_weights import Projecting
from ...layers.moe import MoE
from .model import RichardsDecoder

TRIED = 8  # tokens of the text that a new body is tried with
SCORED = 256  # tokens whose logits are whole in memory while a text is scored

# Relative, in the norm: between one product over a text and one a token there is rounding alone.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float64: 1e-5}


class ModuleRunner(ModelRunner):
    """`ModuleRunner(model, build)`: the body of a decoder around one of our own models, whose live weights it reads."""

    def __init__(self, model: RichardsDecoder, build: RunnerConfig, path: str = "") -> None:
        name = type(model).__name__
        if build.tokens > 1:
            raise ValueError(f"decoder: speculate: {name} is decoded by its own layers, a token a step; leave speculate out.")
        if why := model.undecoded():
            raise ValueError(f"decoder: model: got a {name} that is not decoded token by token: {why}.")
        self.model, self.path, self.kernels = model, path, f"the model's own layers: {path}"
        self.max_batch, self.max_length, self.vocab = build.max_batch, build.max_length, model.config.vocabulary
        weight = model.model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        one = model.cached(1, 1)
        state = sum(t.nbytes for t in one.carried())
        self.place_bytes = sum(t.nbytes for t in one.tensors()) - state  # which grows with the text
        check_room(build.max_batch * (state + self.place_bytes * build.max_length + 4 * self.vocab), self.device, build)
        self.cached = model.cached(build.max_batch, build.max_length)
        self.logits = torch.zeros(build.max_batch, self.vocab, device=self.device, dtype=torch.float32)
        self.rebind()
        self.error = self._try()

    def prefill(self, ids: Tensor, lengths: Tensor) -> None:
        if ids.shape[1]:
            self.cached.prompt(ids.long(), lengths)
        else:
            self._clear()

    def _clear(self) -> None:
        for tensor in self.cached.tensors():
            tensor.zero_()

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        return self.logits[: len(token)].copy_(self.cached.step(token.long(), position))

    def carried(self) -> list[Tensor]:
        return self.cached.carried()

    def moved(self) -> str | None:
        return self.weights.moved()

    def rebind(self) -> None:
        for module in self.model.modules():  # a first forward would join weights into one buffer, and so move them
            if isinstance(module, Projecting):
                module.stacked.joined(module.projections())
        self.weights = TensorWatch(self.model, "_parameters", "_buffers")

    def bytes_a_step(self, live: list[int]) -> int:
        """Every weight but the table once, of experts those that are chosen, and keys and values of rows with these lengths."""
        table = self.model.model.embed_tokens.weight
        read = {p.data_ptr(): p.nbytes for p in self.model.parameters() if p is not table or self.model.config.tied}
        left = sum(part.unread(len(live)) for part in self.model.modules() if isinstance(part, MoE))
        return sum(read.values()) - left + self.place_bytes * sum(live)

    def logits_after(self, ids: Tensor) -> Iterator[Tensor]:
        for hidden in self.model.model(ids[None].long())[0].split(SCORED):
            yield self.model.lm_head(hidden).float()

    def locate(self, ids: Tensor) -> str:
        bad: list[str] = []

        def seen(name: str, x: Tensor) -> None:
            if not x.isfinite().all():
                bad.append(f"model.{name}")

        self.cached.prompt(ids[None].long(), torch.full((1,), len(ids), device=ids.device), seen)
        return bad[0] if bad else "lm_head"

    def _try(self) -> float:
        """How far the logits of a prompt and a step are from those of the whole text at once, in the first two rows."""
        tokens, rows = min(TRIED, self.max_length), min(2, self.max_batch)
        ids = torch.randint(self.vocab, (tokens,), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        ids, last = ids.to(self.device), torch.tensor([tokens - 1, tokens - 2], device=self.device, dtype=torch.int32)[:rows]
        whole = self.model(ids[None])[0].float()
        self.prefill(ids[:-1].expand(rows, -1), last)
        error = ((self.step(ids[last], last) - whole[last]).norm() / whole[last].norm()).item()
        if not error <= TOLERANCE[self.dtype] and whole.isfinite().all():
            raise ValueError(
                f"decoder: model: got {type(self.model).__name__}, whose logits token by token differ from its own forward's "
                f"by {error:.1e}, wanted at most {TOLERANCE[self.dtype]:g}; is it in eval mode, without hooks?"
            )
        self._clear()
        return error

    def report(self) -> list[tuple[str, str, str]]:
        size = sum(t.nbytes for t in self.cached.tensors()) / 2**20
        c = self.model.config
        why = "no fused step has all of these parts; a graph takes their launches from the host"
        return [
            (f"{c.layers} layers, head", "its own layers", why),
            ("kept", f"{size:.1f} MiB for {self.max_batch} rows of {self.max_length} tokens", "cost follows max_length"),
            ("trial", f"logits within {self.error:.1e} of the whole text's at once", "rows at two positions"),
        ]
