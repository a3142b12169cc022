"""Base class of the library's language models, and the hidden states and logits of any language model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..device import without_cudnn_attention
from ..errors import FallbackError, host_bytes_wanted
from ..kernels.dispatch import Call
from ..layers.attention import Mask
from ..layers.embedding_and_head import LMLoss, head_mismatch, head_of, lm_loss, logits_loss, plain_head, within
from ..layers.linear_product import plain_terms
from ..layers.packed_attention import Segments
from ..trace import fallback, notice
from .packed_rows import FIELDS, UNPACKED, packed_arguments
from .registry import mode

TRIAL = 48  # tokens of three examples in a row, where their logits are computed
TOKENS = 256  # of which three times all logits are in memory: 1.6 GiB for 1,920 tokens of 152k words

RESIDUAL_WRITERS = ("o_proj.weight", "down_proj.weight", "down_proj")


class LanguageModel(nn.Module):
    """A trunk of blocks below a linear head. A call gives logits; `loss` never materialises all logits.

    A subclass has a class attribute `reader` (models/reader.py), and a config with hidden, layers, vocabulary and tied. The
    trunk, token ids to the last hidden state, has a table embed_tokens.
    """

    reader: Any
    runner = ""  # module with the `ModuleRunner` that decodes by the model's own layers, where the fused kernels cannot
    task_type = "CAUSAL_LM"  # PEFT's name
    name_or_path = ""  # folder of the weights, as in transformers' models
    classes: tuple[str, ...] = ()  # names, of a model that classifies instead of predicting tokens

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
        return f"its head has {len(self.classes)} classes" if self.classes else None

    def unpacked(self) -> str | None:
        """Return why tokens of packed rows would see other examples; None if attention separates them."""
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
            if parameter.is_meta:  # each draw there runs through torch's Python references
                return
            if parameter.dim() > 1:
                into_stream = name.endswith(RESIDUAL_WRITERS)
                parameter.normal_(0.0, std / (2 * self.config.layers) ** 0.5 if into_stream else std)
            elif name.endswith("bias"):
                parameter.zero_()

    def classify(self, names: Sequence[str]) -> None:
        """Replace the head by a new one, of these classes; one class is a regression.

        The logits of a text are those of its last token, as in transformers' ForSequenceClassification, whose head is `score`.
        """
        weight = self.lm_head.weight
        self.lm_head = LMLoss(self.config.hidden, len(names), device=weight.device, dtype=weight.dtype)
        torch.nn.init.normal_(self.lm_head.weight, std=0.02)
        self.config, self.classes = replace(self.config, tied=False), tuple(names)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        mask: Mask = None,
        *,
        segment_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, vocabulary). Attention is causal, or by `mask` (an SDPA mask), or within the examples of packed
        rows (layers/packed_attention.py)."""
        return self.lm_head(self.model(input_ids, position_ids, self.mask_of(input_ids, mask, segment_ids, cu_seqlens)))

    def mask_of(self, input_ids: Tensor, mask: Mask, segment_ids: Tensor | None, cu_seqlens: Tensor | None) -> Mask:
        """Return the attention mask of a batch: that of its packed rows, else `mask`."""
        segments = Segments.of(input_ids, segment_ids, cu_seqlens)
        if segments is None:
            return mask
        if mask is not None:
            raise ValueError(f"{type(self).__name__}: got a mask and packed rows, wanted one of them; leave the mask out.")
        if why := self.unpacked():
            raise ValueError(f"{type(self).__name__} cannot read packed rows: {why}; {UNPACKED}.")
        return segments

    def loss(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        total: Tensor | float | None = None,
        *,
        segment_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy of the next token over labels other than -100, or their sum divided by `total`.

        In packed rows the first token of an example is not predicted.
        """
        mask, head = self.mask_of(input_ids, None, segment_ids, cu_seqlens), self.lm_head
        if isinstance(mask, Segments):
            labels = within(labels, mask.segment_ids)
        x = self.model(input_ids, position_ids, mask)
        if not plain_head(head):
            fallback("loss without whole logits", "the head is another module, or carries hooks: it is called")
            return logits_loss(head(x), labels, total)
        return lm_loss(x, head.weight, labels, total=total)


def freeze_image_parts(model: Any) -> Callable[[], None]:
    """Freeze all parts of a model of images and text except the text model and the head, report it, and return the reverse.

    Texts give them no gradient, and an optimizer would shrink their weights by its decay.
    """
    trunk: Any = getattr(model, "model", None)
    if "language_model" not in getattr(trunk, "_modules", {}):
        return lambda: None
    read = {id(p) for part in (trunk.language_model, head_of(model)) if part is not None for p in part.parameters()}
    apart = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in read]
    if not apart:
        return lambda: None

    def train(on: bool) -> None:
        for _, parameter in apart:
            parameter.requires_grad_(on)

    train(False)
    parts = ", ".join(dict.fromkeys(".".join(name.split(".")[:2]) for name, _ in apart))
    notice(
        f"train: {parts}: {sum(p.numel() for _, p in apart):,} parameters for images are frozen; train them by a loss function "
        "of your own instead of a name."
    )
    return partial(train, True)


def hidden_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the input of the head, (B, T, hidden). In packed rows, examples do not see each other."""
    arguments = _trunk_arguments(model, inputs)
    out = _trunk(model)(arguments.pop("input_ids"), **arguments)
    return out.last_hidden_state if hasattr(out, "last_hidden_state") else out


def logits_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the output of the model's forward, (B, T, vocabulary). In packed rows, examples do not see each other."""
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
    if row.keys() <= {"input_ids", "position_ids", *FIELDS}:  # masks and images may belong to later tokens
        width = row["input_ids"].shape[1]
        row = {name: value[:, :TOKENS] if _by_token(value, width) else value for name, value in row.items()}
        row |= {name: row[name].clamp_max(TOKENS) for name in row.keys() & {"cu_seqlens"}}
    with mode(model, training=False), without_cudnn_attention(), plain_terms():  # dropout would make the two differ
        return head_mismatch(head, lambda: logits_of(model, row), lambda: hidden_of(model, row))


@torch.no_grad()
def why_not_isolated(model: Any, inputs: dict[str, Any]) -> str | None:
    """Return why examples of this model's packed rows see each other; None if they do not. Synchronises with the device.

    The batch's first row is split into three examples. Other tokens in the second one must not change the others, and the third
    must give what it gives at the beginning of a row without the fields of packed rows.
    """
    width = inputs["input_ids"].shape[1]
    whole = head_of(model) is None or _trunk(model) is None  # no hidden states: logits, of few tokens
    tokens = min(width, TRIAL) if whole else width
    if tokens < 3:
        return None

    plain = first_row({name: value for name, value in inputs.items() if name not in (*FIELDS, "position_ids")})
    plain = {name: value[:, :tokens] if _by_token(value, width) else value for name, value in plain.items()}
    ids, bounds = plain["input_ids"], [0, tokens // 3, 2 * tokens // 3, tokens]
    first, second, third = map(slice, bounds[:-1], bounds[1:])
    number = torch.arange(3, device=ids.device).repeat_interleave(torch.tensor(bounds, device=ids.device).diff())
    starts = torch.tensor([*bounds, tokens], device=ids.device, dtype=torch.int32)  # the last example is empty, as in batches
    fields = {"segment_ids": number[None], "cu_seqlens": starts}
    row = plain | {name: value for name, value in fields.items() if name in inputs}
    row["position_ids"] = (torch.arange(tokens, device=ids.device) - starts[number])[None]
    others = ids.clone()
    others[:, second] = ids[:, second] == 0  # tokens 0 and 1, which every vocabulary has
    turned = {name: value.roll(-third.start, 1) if _by_token(value, tokens) else value for name, value in plain.items()}
    _trunk_arguments(model, row)  # or raise ValueError for a model whose layers are known to read other examples
    compute = logits_of if whole else hidden_of
    with mode(model, training=False), plain_terms():
        try:
            packed, changed, alone = (compute(model, x) for x in (row, row | {"input_ids": others}, turned))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, FallbackError | torch.OutOfMemoryError) or host_bytes_wanted(error):
                raise
            return f"a row of three examples raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    rounded = alone.dtype in (torch.float16, torch.bfloat16) or torch.get_float32_matmul_precision() != "highest"
    parts = (f"{name} {type(module).__name__}".lower() for name, module in model.named_modules())
    experts = rounded and any("expert" in part or "moe" in part for part in parts)
    # Of one shape, only sums whose order depends on the tokens differ, as those of experts: a token may go to another one.
    same = 5e-2 if experts else 1e-3 if rounded else 1e-5
    for what, got, want, limit, outliers in (
        ("other tokens in an example change the one before it", changed[:, first], packed[:, first], same, experts),
        ("other tokens in an example change the next one", changed[:, third], packed[:, third], same, experts),
        (
            "an example of a packed row differs from the same one alone",
            packed[:, third],
            alone[:, : tokens - third.start],
            0.1 if rounded else 2e-3,
            rounded,
        ),
    ):
        off = _apart(got[0].float(), want[0].float(), outliers)
        if not off <= limit:
            return f"{what} by {off:.1e}"
    return None


def _apart(got: Tensor, want: Tensor, outliers: bool) -> float:
    """Return the largest relative error of a token (T, ...). With outliers, the median of all tokens, or of the first three,
    which a convolution would change alone."""
    off = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-12)
    return (torch.maximum(off.median(), off[:3].median()) if outliers else off.amax()).item()


def _by_token(value: Any, width: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == width


def first_row(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the first row of a batch. Of cu_seqlens, which hold all rows, the examples of the first."""
    row = {key: value[:1] if isinstance(value, Tensor) and value.dim() else value for key, value in inputs.items()}
    bounds = inputs.get("cu_seqlens")
    if bounds is not None:
        rows, tokens = inputs["input_ids"].shape
        row["cu_seqlens"] = bounds[: (len(bounds) - 1) // rows + 1].clamp_max(tokens)
    return row


def _arguments(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the model or its trunk; of packed rows, in the form that the model takes."""
    arguments = {**inputs, "use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {**inputs}
    if FIELDS & arguments.keys() and hasattr(getattr(model, "config", None), "_attn_implementation"):
        return packed_arguments(_trunk(model) or model, arguments)
    return arguments


def _trunk_arguments(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    arguments = _arguments(model, inputs)
    if FIELDS & arguments.keys():
        own = next((module for module in model.modules() if isinstance(module, LanguageModel)), None)
        if own is not None:
            fields = (arguments.pop(name, None) for name in ("mask", "segment_ids", "cu_seqlens"))
            arguments["mask"] = own.mask_of(arguments["input_ids"], *fields)
    return arguments


def _trunk(model: Any) -> Any:
    """Return the module that computes the last hidden states, or None; of a model without a head it is the base model.

    It is the base model; for a wrapper that still has the head inside, such as PEFT's, the base model of the wrapped model.
    """
    inner, head = model, head_of(model)
    while (below := getattr(inner, "base_model", inner)) is not inner:
        inner = below
        if head_of(inner) is not head:
            return inner
    return inner if head is None else None
