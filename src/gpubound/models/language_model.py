"""Base class of the library's language models, and the hidden states and logits of any language model, with packed rows, too.

Packed rows go through Hugging Face models: their attention functions and masks take the bounds of the examples.

transformers finds packed examples in position_ids by a read of the device, which a capture forbids, and then builds a mask of
T × T. Here the bounds go to every attention layer as the keyword `segments`. A model for which transformers supports flash
attention and other attention functions passes them all that changes the result, its window too; so its SDPA function is one of
ours that reads `segments`. Others, and eager attention, get masks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..device import without_cudnn_attention
from ..errors import FallbackError, host_bytes_wanted
from ..kernels.dispatch import Call
from ..layers.attention import Mask, attend
from ..layers.embedding_and_head import LMLoss, head_mismatch, head_of, lm_loss, logits_loss, plain_head, within
from ..layers.linear_product import plain_terms
from ..layers.packed_attention import Segments
from ..trace import fallback, notice
from .decoding import FULL as FULL, WINDOWED as WINDOWED
from .reader import config_window, has_field, layer_window
from .registry import mode

FIELDS = frozenset(("segment_ids", "cu_seqlens"))  # of a batch of packed rows, besides position_ids
SEGMENTS = "segments"  # keyword of attention

UNPACKED = "pack: none or stream"


def packed_arguments(trunk: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a transformers model, whose base model is `trunk`, for a batch of packed rows."""
    rest = {name: value for name, value in arguments.items() if name not in FIELDS}
    if rest.get("attention_mask") is not None:
        raise ValueError(
            "packed rows: the batch has an attention_mask and segment_ids, wanted one of them; leave the attention_mask out: "
            "padding is an example like others, and its labels are -100."
        )
    segments = Segments.of(arguments["input_ids"], *(arguments.get(name) for name in ("segment_ids", "cu_seqlens")))
    assert segments is not None
    config = trunk.config.get_text_config()
    if unknown := sorted({*(getattr(config, "layer_types", None) or ())} - {FULL, WINDOWED}):
        raise ValueError(
            f"packed rows: {type(trunk).__name__} has layers of type {unknown[0]!r}, wanted {FULL!r} or {WINDOWED!r}: others "
            f"read other examples of a row; {UNPACKED}."
        )
    implementation = config._attn_implementation
    if implementation == "sdpa" and trunk._supports_flash_attn and trunk._supports_attention_backend:
        # Four dimensions: transformers makes no mask then. Nemotron's layers pass it to attention, and no keywords.
        mask: Any = segments.segment_ids[:, None, None]
        setattr(mask, SEGMENTS, segments)
        read_segments()
    elif implementation in ("sdpa", "eager"):
        mask = _masks(trunk, config, segments, implementation)
    else:
        raise ValueError(
            f"packed rows: {type(trunk).__name__} has {implementation!r} attention, wanted 'sdpa'; load the model with "
            f"attn_implementation='sdpa', or {UNPACKED}."
        )
    return rest | {"attention_mask": mask, SEGMENTS: segments}


def restarts(positions: Tensor, rows: int) -> Segments | None:
    """Return the examples that position_ids (1 or B, T) mark, a new one where they do not go on by one, as transformers finds
    them; None if each of B rows is one example. Synchronises with the device once."""
    first = F.pad(positions.expand(rows, -1).diff(dim=1) != 1, (1, 0), value=True)
    starts = first.flatten().nonzero().flatten()
    if len(starts) == rows:
        return None
    return Segments(first.cumsum(1), F.pad(starts, (0, 1), value=first.numel()).to(torch.int32))


def _masks(trunk: Any, config: Any, segments: Segments, implementation: str) -> Any:
    """Return the mask of all layers, or masks by type of layer."""

    def mask(window: int | None) -> Tensor:
        dtype = trunk.get_input_embeddings().weight.dtype
        return segments.mask(window) if implementation == "sdpa" else segments.bias(dtype, window)

    if WINDOWED in (getattr(config, "layer_types", None) or ()):
        return _MaskByType(lambda kind: mask(config.sliding_window if kind == WINDOWED else None))
    windows = {vars(module)["sliding_window"] for module in trunk.modules() if "sliding_window" in vars(module)}
    return mask(windows.pop() if len(windows) == 1 else config_window(config))


class _MaskByType(dict[str, Tensor]):
    """Masks by type of layer, each made when transformers' forward reads it: a placed model takes the segments."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        self._make = make

    def __missing__(self, kind: str) -> Tensor:
        return self.setdefault(kind, self._make(kind))


def read_segments() -> None:
    """Let transformers' SDPA function read `segments`; calls without them do as before.

    It is replaced in the registry, not chosen by the config: a recomputed layer calls it again in backward, when the config of
    an unpacked forward may be in force.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not hasattr(sdpa, SEGMENTS):
        ALL_ATTENTION_FUNCTIONS.register("sdpa", _reading_segments(sdpa))


def _reading_segments(sdpa: Any) -> Any:
    @wraps(sdpa)
    def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
        segments = kwargs.pop(SEGMENTS, getattr(attention_mask, SEGMENTS, None))
        if segments is None and attention_mask is not None and attention_mask.dtype in (torch.int32, torch.int64):
            segments = Segments(attention_mask[:, 0, 0])  # a recomputed layer has a copy of our mask
        if segments is None:
            return sdpa(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
        for name in ("softcap", "position_bias", "s_aux"):
            if kwargs.get(name) is not None:
                raise ValueError(f"packed rows: {type(module).__name__} has {name}, which SDPA does not; {UNPACKED}.")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # Qwen2-MoE passes its mask's window; OLMoE any sliding_window of its config, which SDPA and its mask leave out.
        passed = "sliding_window" in kwargs and has_field(module.config, "sliding_window")
        window = kwargs["sliding_window"] if passed else layer_window(module)
        return attend(query, key, value, segments, scale, dropout, causal, window), None

    setattr(attention, SEGMENTS, True)
    return attention


TRIAL = 48  # tokens of three examples in a row, where their logits are computed
TOKENS = 256  # of which three times all logits are in memory: 1.6 GiB for 1,920 tokens of 152k words

RESIDUAL_WRITERS = ("o_proj.weight", "down_proj.weight", "down_proj")


class LanguageModel(nn.Module):
    """A trunk of blocks below a linear head. A call gives logits; `loss` never materialises all logits.

    A subclass has as class attributes a `reader` (models/reader.py), CONFIG, a class with hidden, layers, vocabulary and tied,
    and TRUNK, a class of modules from token ids to the last hidden state, with a table embed_tokens.
    """

    CONFIG: Any
    TRUNK: Any
    reader: Any
    runner = ""  # module with the `ModuleRunner` that decodes by the model's own layers, where the fused kernels cannot
    task_type = "CAUSAL_LM"  # PEFT's name
    name_or_path = ""  # folder of the weights, as in transformers' models
    classes: tuple[str, ...] = ()  # names, of a model that classifies instead of predicting tokens

    def __init__(self, config: Any, device=None, dtype=None) -> None:
        if not isinstance(config, self.CONFIG):
            name, wanted = type(self).__name__, self.CONFIG.__name__
            raise ValueError(f"{name}: config: got {type(config).__name__}, wanted a {wanted}.")
        super().__init__()
        self.config = config
        self.generation: dict[str, Any] = {}  # fields of generation_config.json, such as the tokens that end a text
        self.model = trunk = self.TRUNK(config, device, dtype)
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
            if parameter.is_meta:  # each draw there runs through torch's Python references, which import torch._dynamo
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
        if not weight.is_meta:
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
    """Freeze all parts of a model of images or sounds except the text model and the head, report it, and return the reverse.

    Texts give them no gradient, and an optimizer would shrink their weights by its decay.
    """
    parts: Any = getattr(getattr(model, "model", None), "_modules", {})
    inside = parts.get("language_model", parts.get("text_model"))
    if inside is None:
        return lambda: None
    read = {id(p) for part in (inside, head_of(model)) if part is not None for p in part.parameters()}
    apart = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in read]
    if not apart:
        return lambda: None

    def train(on: bool) -> None:
        for _, parameter in apart:
            parameter.requires_grad_(on)

    train(False)
    names = ", ".join(dict.fromkeys(".".join(name.split(".")[:2]) for name, _ in apart))
    notice(
        f"train: {names}: {sum(p.numel() for _, p in apart):,} parameters for images or sounds are frozen; train them by a "
        "loss function of your own instead of a name."
    )
    return partial(train, True)


def hidden_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the input of the head, (B, T, hidden). In packed rows, examples do not see each other."""
    arguments = _trunk_arguments(model, inputs)
    out = _trunk(model)(arguments.pop("input_ids"), **arguments)
    return out.last_hidden_state if hasattr(out, "last_hidden_state") else out


def logits_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the output of the model's forward, (B, T, vocabulary). In packed rows, examples do not see each other."""
    return logits_and_added_loss(model, inputs)[0]


def logits_and_added_loss(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return `logits_of`, and what transformers adds to the mean loss: that of a mixture's routers, or Bamba's z-loss."""
    out = model(**_arguments(model, inputs))
    logits, term = out.logits if hasattr(out, "logits") else out, getattr(out, "aux_loss", None)
    if z := getattr(model, "z_loss_coefficient", 0):
        return logits, z * logits.logsumexp(-1).to(torch.promote_types(logits.dtype, torch.float32)).square().mean()
    if not isinstance(term, Tensor):
        return logits, None
    # Of images and text the config alone has it, and JetMoe names it otherwise.
    owners = model, getattr(getattr(model, "config", None), "get_text_config", lambda: None)()
    names = "router_aux_loss_coef", "aux_loss_coef"
    weights = [getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)]
    return logits, term * weights[0] if weights else None


def why_not_head(model: Any, inputs: dict[str, Any]) -> str | None:
    """Return None if the logits are the head's product with the hidden states, else why not. Synchronises with the device."""
    head = head_of(model)
    if head is None or _trunk(model) is None:
        return f"{type(model).__name__} does not offer a base model and a linear head (get_output_embeddings)"
    if getattr(getattr(model, "config", None), "output_router_logits", False) or getattr(model, "z_loss_coefficient", 0):
        return f"{type(model).__name__} adds another loss, which losses of tokens take from its forward, and others leave out"
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
