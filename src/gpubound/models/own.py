"""What our own language models have in common: a trunk of blocks below a linear head, and what a run asks of such a model."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.dispatch import Call
from ..layers.embedding_and_head import LMLoss, lm_loss, logits_loss, plain_head
from ..trace import fallback

INTO_STREAM = ("o_proj.weight", "down_proj.weight", "down_proj")


class LanguageModel(nn.Module):
    """A call gives logits; `loss` never holds the whole logits.

    A subclass has a class attribute `reader` (models/decoding.py), and a config with hidden, layers, vocabulary and tied. The
    trunk, token ids to the last hidden state, has a table embed_tokens.
    """

    reader: Any
    runner = ""
    """the module whose `ModuleRunner` decodes with the model's own layers, where the fused kernels cannot; '': none"""
    task_type = "CAUSAL_LM"  # what PEFT calls what it is for
    name_or_path = ""  # the folder that it was read from, as transformers' models have it

    def __init__(self, config: Any, trunk: Any, device=None, dtype=None) -> None:
        super().__init__()
        self.config = config
        self.generation: dict[str, Any] = {}  # what generation_config.json says, which tokens end a text among it
        self.model = trunk
        self.lm_head = LMLoss(config.hidden, config.vocabulary, device=device, dtype=dtype)
        if config.tied:
            self.lm_head.weight = trunk.embed_tokens.weight
        self.initialise()

    def calls(self) -> Iterator[Call]:
        """What its training calls, and in which shapes."""
        raise NotImplementedError

    def extra_loss(self) -> Tensor | None:
        """What the last call of the trunk in training adds to the mean loss of a token; asked once."""
        return None

    def undecoded(self) -> str | None:
        """Why no text goes on from it token by token, whatever computes its steps."""
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
                into_stream = name.endswith(INTO_STREAM)
                parameter.normal_(0.0, std / (2 * self.config.layers) ** 0.5 if into_stream else std)
            elif name.endswith("bias"):
                parameter.zero_()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocabulary). Attention is causal, or as `mask` says (an SDPA mask)."""
        return self.lm_head(self.model(input_ids, position_ids, mask))

    def loss(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None, total: Tensor | float | None = None
    ) -> Tensor:
        """Mean cross-entropy of the next token over the labels that are not -100, or their sum divided by `total`."""
        x, head = self.model(input_ids, position_ids), self.lm_head
        if not plain_head(head):
            fallback("loss without whole logits", "the head is another module, or carries hooks: it is called as it is")
            return logits_loss(head(x), labels, total)
        return lm_loss(x, head.weight, labels, total=total)
