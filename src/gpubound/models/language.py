"""The language model around a decoder stack: its loss straight from the hidden states."""

from collections import Counter
from functools import partial
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..kernels.choose import Call
from ..kernels.cross_entropy import loss_shape
from ..layers.stacked import Kernels, describe, plain
from ..layers.vocabulary import LOSS as KERNELS
from ..layers.vocabulary import lm_loss, why_whole
from .placing import Swap, by_name, delegate, made_up, mode

# What the loss reads; the rest goes to the decoder.
READ = ("labels", "shift_labels", "num_items_in_batch", "ignore_index", "logits_to_keep", "return_dict")


class HFCausalLM:
    """In training with labels: the loss straight from the hidden states. The output's logits are then None, for they never
    existed.

    Without labels, or in eval mode, the original forward and its logits.
    """

    delegated: Counter[str]
    original: Any
    base_model_prefix: str
    config: Any
    lm_head: Any
    loss_function: Any
    training: bool

    def forward(self, *args, **kwargs):
        if args:
            kwargs = by_name(self, args, kwargs)
        if kwargs.get("labels") is None or not self.training:
            return self.original.forward(self, **kwargs)
        if why := self.unable(kwargs):
            return delegate(self, why, **kwargs)
        shifted, total, ignored = (kwargs.get(name) for name in ("shift_labels", "num_items_in_batch", "ignore_index"))
        labels = kwargs["labels"] if shifted is None else shifted
        outputs = getattr(self, self.base_model_prefix)(**{k: v for k, v in kwargs.items() if k not in READ})
        x, head = outputs.last_hidden_state, self.lm_head
        loss = lm_loss(
            x,
            head.weight,
            labels.to(x.device),
            head.bias,
            shifted=shifted is not None,
            total=total.to(x.device) if isinstance(total, Tensor) else total,
            ignore_index=-100 if ignored is None else ignored,
        )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=None,
            past_key_values=outputs.get("past_key_values"),
            hidden_states=outputs.get("hidden_states"),
            attentions=outputs.get("attentions"),
        )

    def unable(self, kwargs: dict[str, Any]) -> str | None:
        keep = kwargs.get("logits_to_keep")
        if keep is not None and not (isinstance(keep, int) and keep == 0):
            return "logits_to_keep was given"
        if kwargs.get("return_dict") is False or not self.config.return_dict:
            return "return_dict=False"
        if getattr(self.loss_function, "__name__", "") != "ForCausalLMLoss":
            return "the model has a loss function of its own"
        return None if plain(self.lm_head) else f"lm_head: {describe(self.lm_head)}"

    def fused_kernels(self) -> Kernels:
        return KERNELS


def loss_calls(module: Any) -> tuple[Call, ...]:
    head = getattr(module, "lm_head", None)
    return () if head is None else (("linear_cross_entropy", (*loss_shape(head.weight.shape[0]), False)),)


def causal_lm(module: Any, stack: Any) -> Swap:
    """For a family whose logits are known to be lm_head's product with the hidden states."""
    return Swap(HFCausalLM, loss_calls(module), {"delegated": Counter()})


def tried_causal_lm(module: Any, stack: Any) -> Swap:
    """For any other: the swap is refused where a trial shows that the model does more to its logits."""
    return Swap(HFCausalLM, loss_calls(module), {"delegated": Counter()}, trial=partial(_why_not_head, module))


def _why_not_head(module: Any) -> str | None:
    """Whether its logits are its head's product with the hidden states and nothing more."""
    trunk = getattr(module, module.base_model_prefix, module)
    if trunk is module:
        return f"it has no {module.base_model_prefix!r} to take hidden states from"
    ids = made_up(module)
    with mode(module, training=False):
        return why_whole(
            module.lm_head,
            lambda: module(input_ids=ids, use_cache=False).logits,
            lambda: trunk(input_ids=ids, use_cache=False).last_hidden_state,
        )
