"""Base class of the library's language models, and the hidden states and logits of any language model."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.dispatch import Call
from ..layers.embedding_and_head import LMLoss, head_mismatch, head_of, lm_loss, logits_loss, plain_head
from ..trace import fallback
from .placing import mode

RESIDUAL_WRITERS = ("o_proj.weight", "down_proj.weight", "down_proj")


class LanguageModel(nn.Module):
    """A trunk of blocks below a linear head. A call gives logits; `loss` never materialises all logits.

    A subclass has a class attribute `reader` (models/decoding.py), and a config with hidden, layers, vocabulary and tied. The
    trunk, token ids to the last hidden state, has a table embed_tokens.
    """

    reader: Any
    runner = ""  # module with the `ModuleRunner` that decodes by the model's own layers, where the fused kernels cannot
    task_type = "CAUSAL_LM"  # PEFT's name
    name_or_path = ""  # folder of the weights, as in transformers' models

    def __init__(self, config: Any, trunk: Any, device=None, dtype=None) -> None:
        super().__init__()
        self.config = config
        self.generation: dict[str, Any] = {}  # fields of generation_config.json, such as the tokens that end a text
        self.model = trunk
        self.lm_head = LMLoss(config.hidden, config.vocabulary, device=device, dtype=dtype)
        if config.tied:
            self.lm_head.weight = trunk.embed_tokens.weight
        self.initialise()

    def calls(self) -> Iterator[Call]:
        """Yield the ops that training calls, with their shapes."""
        raise NotImplementedError

    def extra_loss(self) -> Tensor | None:
        """Return the term that the last training call of the trunk adds to the mean loss, and clear it."""
        return None

    def undecoded(self) -> str | None:
        """Return why the model cannot generate a text token by token; None if it can."""
        return None

    @property
    def base_model(self) -> Any:
        """All layers below the head. Hugging Face uses this name."""
        return self.model

    def get_output_embeddings(self) -> LMLoss:
        return self.lm_head

    @torch.no_grad()
    def initialise(self, std: float = 0.02) -> None:
        """Draw normal weights. Those that write to the residual stream are smaller, so that depth does not widen it."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_stream = name.endswith(RESIDUAL_WRITERS)
                parameter.normal_(0.0, std / (2 * self.config.layers) ** 0.5 if into_stream else std)
            elif name.endswith("bias"):
                parameter.zero_()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return logits (B, T, vocabulary). Attention is causal, or as `mask` says (an SDPA mask)."""
        return self.lm_head(self.model(input_ids, position_ids, mask))

    def loss(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None, total: Tensor | float | None = None
    ) -> Tensor:
        """Return the mean cross-entropy of the next token over labels other than -100, or their sum divided by `total`."""
        x, head = self.model(input_ids, position_ids), self.lm_head
        if not plain_head(head):
            fallback("loss without whole logits", "the head is another module, or carries hooks: it is called")
            return logits_loss(head(x), labels, total)
        return lm_loss(x, head.weight, labels, total=total)


def hidden_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the input of the head, (B, T, hidden)."""
    arguments = _arguments(model, inputs)
    out = _trunk(model)(arguments.pop("input_ids"), **arguments)
    return out.last_hidden_state if hasattr(out, "last_hidden_state") else out


def logits_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the output of the model's forward, (B, T, vocabulary)."""
    out = model(**_arguments(model, inputs))
    return out.logits if hasattr(out, "logits") else out


def why_not_head(model: Any, inputs: dict[str, Any]) -> str | None:
    """Return None if the logits are the head's product with the hidden states, else why not. Synchronises with the device."""
    head = head_of(model)
    if head is None or _trunk(model) is None:
        return f"{type(model).__name__} does not offer a base model and a linear head (get_output_embeddings)"
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return f"{type(model).__name__} adds a router loss; pass a loss that includes it"
    row = first_row(inputs)
    with mode(model, training=False):  # dropout would make the two differ
        return head_mismatch(head, lambda: logits_of(model, row), lambda: hidden_of(model, row))


def first_row(inputs: dict[str, Any]) -> dict[str, Any]:
    return {key: value[:1] if isinstance(value, Tensor) and value.dim() else value for key, value in inputs.items()}


def _arguments(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {**inputs}


def _trunk(model: Any) -> Any:
    """Return the module that computes the last hidden states, or None.

    It is the base model; for a wrapper that still has the head inside, such as PEFT's, the base model of the wrapped model.
    """
    inner, head = model, model.get_output_embeddings()
    while (below := getattr(inner, "base_model", inner)) is not inner:
        inner = below
        if not hasattr(inner, "get_output_embeddings") or inner.get_output_embeddings() is not head:
            return inner
    return None
