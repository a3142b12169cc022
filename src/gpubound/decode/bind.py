"""A model bound for the fused kernels: which families they read, and where the weights of each lie.

`bind` says what the kernels need to know of a model, or in one sentence why they cannot run it. The tensors are the model's own
parameters, taken without a copy: an optimizer's step, a load in place, a merge is seen by the next launch. What puts another
tensor in a place, or moves one (`.to()`, `assign=True`, resharding, tying anew), is seen by `BoundModel.moved`.

Of mixtures of experts, Mixtral and Qwen3-MoE are read: a sparse block has a router (`gate`) and its experts' weights stacked in
two parameters. Qwen3-MoE may have dense layers between; Mixtral has none, and always divides the shares of the chosen experts
by their sum.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import GenerateError
from ..layers import MLP, RotaryAngles
from ..layers import Attention as AttentionModule
from ..layers.stacked import Stacked, describe, plain
from ..models import Decoder
from ..models.placing import ACTIVATIONS
from ..models.registry import role_of
from ..models.rotary import FIXED, HFAngles
from .contract import Watched, WeightPlace
from .experts import ExpertWeights
from .layer import AttentionWeights, DenseWeights, Shape

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LayerWeights(NamedTuple):
    attention: AttentionWeights
    mlp: DenseWeights | ExpertWeights

    def tensors(self) -> list[Tensor]:
        return [*self.attention.tensors(), *self.mlp.tensors()]


class BoundModel:
    """A bound model: its shape, its weights as of now, and whether they still are where they were."""

    def __init__(
        self, model: nn.Module, shape: Shape, angles: Callable[[Tensor], tuple[Tensor, Tensor]], neighbours: bool
    ) -> None:
        self.model, self.shape, self.angles = model, shape, angles
        self._stacks: defaultdict[tuple[int, int], Stacked] | None = defaultdict(Stacked) if neighbours else None
        self._read()

    def refresh(self) -> None:
        """Read the places again, after `moved` or when a module was replaced."""
        found = _examine(self.model)
        if isinstance(found, str):
            raise GenerateError(f"decoder: the model has changed since its decoder was built: {found}; build a new one.")
        trunk: Any = self.model.model
        embed = _weight(trunk.embed_tokens)
        was, now = (self.shape, self.dtype, self.device), (found[0], embed.dtype, embed.device)
        if now != was:
            raise GenerateError(
                f"decoder: the weights are now {now[1]} on {now[2]} with {now[0].vocab} words, the decoder was built for "
                f"{was[1]} on {was[2]} with {was[0].vocab}; build a new one."
            )
        self._read()

    def _read(self) -> None:
        _settle(self.model)
        self.apart = None if self._stacks is None else _make_neighbours(self.model, self._stacks)
        self._watched = Watched(_places(self.model))
        trunk: Any = self.model.model
        self.embed: Tensor = _weight(trunk.embed_tokens)
        self.norm: Tensor = _weight(trunk.norm)
        self.head: Tensor = _weight(self.model.lm_head)
        self.layers = [_layer(block) for block in trunk.layers]
        self.dtype, self.device = self.embed.dtype, self.embed.device

    def moved(self) -> str | None:
        """The name of the first weight that is another tensor than when it was bound, or lies elsewhere; None if all stayed."""
        return self._watched.moved()

    def bytes_read(self) -> int:
        """Of weights, once each, in one step: all but the embedding, of which a step reads single rows, and the experts."""
        read = {t.data_ptr(): t.nbytes for layer in self.layers for t in layer.tensors()}
        return sum((read | {self.norm.data_ptr(): self.norm.nbytes, self.head.data_ptr(): self.head.nbytes}).values())

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin (length, D/2) in fp32 of every position."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            cos, sin = self.angles(torch.arange(length, device=self.device)[None])
        return cos[0].float().contiguous(), sin[0].float().contiguous()


def bind(model: nn.Module, neighbours: bool = False) -> BoundModel | str:
    """`model` for the fused kernels, or why they cannot decode it.

    neighbours  q, k and v of a block, and gate and up, lie one behind the other in memory afterwards, where that may be
    """
    found = _examine(model)
    return found if isinstance(found, str) else BoundModel(model, *found, neighbours)


def _examine(model: nn.Module) -> tuple[Shape, Callable] | str:
    if isinstance(model, Decoder):
        return _unreadable(model) or _own(model)
    if role_of(model, "llama") == "ForCausalLM" or has_experts(model):
        return _unreadable(model) or _unknown_option(model) or _hugging_face(model)
    return (
        f"{type(model).__name__} is none of the families with fused kernels (Llama, Mistral, Qwen2, Qwen3, SmolLM, Mixtral, "
        "Qwen3-MoE)"
    )


def has_experts(model: nn.Module) -> bool:
    """Whether it is a causal language model of a family with sparse layers."""
    return role_of(model, "mixtral") == "ForCausalLM"


def _settle(model: nn.Module) -> None:
    """Let parts that keep their weights in one buffer fill it now: their first forward would move the weights later."""
    for module in model.modules():
        if isinstance(module, (AttentionModule, MLP)):
            names = ("q_proj", "k_proj", "v_proj") if isinstance(module, AttentionModule) else ("gate_proj", "up_proj")
            module.stacked.joined([module._modules[name] for name in names])


def _make_neighbours(model: Any, stacks: Mapping[tuple[int, int], Stacked]) -> str | None:
    """Put what reads the same input side by side, the parameters slices of one buffer. None, or why some stay apart.

    For many rows they are one product then: at batch 32, three and a concatenation took 0.3 ms a step of a 1b model, a fifth.
    """
    why = None
    for number, block in enumerate(model.model.layers):
        attention, mlp = block.self_attn, block.mlp
        groups = [[attention.q_proj, attention.k_proj, attention.v_proj]]
        if hasattr(mlp, "gate_proj"):
            groups.append([mlp.gate_proj, mlp.up_proj])
        for at, group in enumerate(groups):
            biases = [layer.bias for layer in group if layer.bias is not None]
            why = stacks[number, at].repack([_weight(layer) for layer in group], biases) or why
    if (device := _weight(model.lm_head).device).type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()  # where they were: blocks too small for what comes
    return why


def _own(model: Decoder) -> tuple[Shape, Callable]:
    c = model.config
    shape = Shape(c.hidden, c.heads, c.kv_heads, c.head_dim, c.vocabulary, c.eps, c.eps, c.head_dim**-0.5)
    return shape, RotaryAngles(c.head_dim, c.rope_theta)


def _hugging_face(model: Any) -> tuple[Shape, Callable]:
    c, first = model.config, model.model.layers[0]
    attention = first.self_attn
    q_norm = getattr(attention, "q_norm", None)
    shape = Shape(
        hidden=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=attention.head_dim,
        vocab=model.lm_head.weight.shape[0],
        eps=_eps(model.model.norm),
        head_eps=0.0 if q_norm is None else _eps(q_norm),
        scale=attention.scaling,
    )
    return shape, HFAngles(model.model.rotary_emb)


def _unknown_option(model: Any) -> str | None:
    c = model.config
    kind = getattr(model.model.rotary_emb, "rope_type", "default")
    if kind not in FIXED:
        return f"its rotary angles ({kind!r}) change with the length of what is read"
    if ACTIVATIONS.get(c.hidden_act) != "silu":
        return f"its activation is {c.hidden_act!r}, the kernels' is silu"
    if any(getattr(attention, "head_dim", 0) % 2 for attention in _attentions(model)):
        return "its heads have an odd width, and rotation works on pairs"
    eps = {_eps(norm) for block in model.model.layers for norm in (block.input_layernorm, block.post_attention_layernorm)}
    if eps != {_eps(model.model.norm)}:
        return "its norms have different eps"
    return None


def _unreadable(model: nn.Module) -> str | None:
    """Why the kernels may not read the parameters directly."""
    trunk: Any = model.model
    for name, module in trunk.named_modules(prefix="model"):
        if isinstance(module, nn.Linear) and not plain(module):
            return f"{name}: {describe(module)}"
        if not isinstance(module, nn.Linear) and name.endswith(("_proj",)):
            return f"{name}: {describe(module)}"
    if type(trunk.embed_tokens) is not nn.Embedding:
        return f"its embedding is {type(trunk.embed_tokens).__name__}, not nn.Embedding"
    if getattr(model.lm_head, "bias", None) is not None:
        return "its head has a bias"
    weights = {name: holder[key] for name, holder, key in _places(model)}
    kinds = {(t.dtype, t.device.type, t.device.index) for t in weights.values()}
    if len(kinds) > 1:
        return f"its weights differ in dtype or device: {', '.join(sorted(f'{k[0]} on {k[1]}' for k in kinds))}"
    if next(iter(kinds))[0] not in DTYPES:
        return f"its weights are {next(iter(kinds))[0]}; the kernels take fp32, fp16 and bf16"
    loose = [name for name, t in weights.items() if not t.is_contiguous() or type(t) is not nn.Parameter]
    return f"{loose[0]} is not a plain, contiguous parameter" if loose else _unreadable_experts(model)


def _attentions(model: Any) -> list[Any]:
    return [block.self_attn for block in model.model.layers]


def _layer(block: Any) -> LayerWeights:
    attention, mlp = block.self_attn, block.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return LayerWeights(
        AttentionWeights(
            norm=_weight(block.input_layernorm),
            q=_weight(attention.q_proj),
            k=_weight(attention.k_proj),
            v=_weight(attention.v_proj),
            q_bias=attention.q_proj.bias,
            k_bias=attention.k_proj.bias,
            v_bias=attention.v_proj.bias,
            q_norm=None if q_norm is None else _weight(q_norm),
            k_norm=None if k_norm is None else _weight(k_norm),
            o=_weight(attention.o_proj),
            o_bias=attention.o_proj.bias,
            window=_window(attention),
            turned=bool(getattr(attention, "use_rope", True)),
        ),
        (_experts if is_sparse(mlp) else _dense)(mlp, _weight(block.post_attention_layernorm)),
    )


def _dense(mlp: Any, norm: Tensor) -> DenseWeights:
    return DenseWeights(
        norm=norm,
        gate=_weight(mlp.gate_proj),
        up=_weight(mlp.up_proj),
        gate_bias=mlp.gate_proj.bias,
        up_bias=mlp.up_proj.bias,
        down=_weight(mlp.down_proj),
        down_bias=mlp.down_proj.bias,
    )


def _experts(mlp: Any, norm: Tensor) -> ExpertWeights:
    return ExpertWeights(
        norm=norm,
        router=_weight(mlp.gate),
        gate_up=mlp.experts._parameters["gate_up_proj"],
        down=mlp.experts._parameters["down_proj"],
        slots=int(mlp.gate.top_k),
        normalise=bool(getattr(mlp.gate, "norm_topk_prob", True)),
    )


def sparse_mlps(model: Any) -> dict[int, Any]:
    """The sparse blocks of a causal language model, by the numbers of their layers."""
    return {number: block.mlp for number, block in enumerate(model.model.layers) if is_sparse(block.mlp)}


def is_sparse(mlp: nn.Module) -> bool:
    return role_of(mlp, "mixtral") == "SparseMoeBlock"


def _unreadable_experts(model: Any) -> str | None:
    """Why the kernels may not read the experts, where they may not."""
    for number, block in sparse_mlps(model).items():
        name = f"model.layers.{number}.mlp"
        for part, kind, names in (("gate", "TopKRouter", {"weight"}), ("experts", "Experts", {"gate_up_proj", "down_proj"})):
            module = getattr(block, part)
            if role_of(module, "mixtral") != kind or set(module._parameters) != names:
                return f"{name}.{part}: {type(module).__name__}, not the family's own"
            if module._forward_hooks or module._forward_pre_hooks:
                return f"{name}.{part}: it carries hooks"
        if getattr(block.experts, "_is_expert_parallel", False):
            return f"{name}.experts: shared out among several devices"
    if len({(*block.experts.gate_up_proj.shape, block.gate.top_k) for block in sparse_mlps(model).values()}) > 1:
        return "its sparse layers differ in experts or width"
    return None


def _window(attention: Any) -> int:
    """Qwen says it layer by layer, Mistral in its config for all of them; 0 where every key is seen."""
    whole = getattr(getattr(attention, "config", None), "sliding_window", None)
    return getattr(attention, "sliding_window", whole) or 0


def _weight(module: Any) -> Tensor:
    return module._parameters["weight"]


def _eps(norm: Any) -> float:
    """Ours call it eps, Hugging Face's variance_epsilon."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def _places(model: nn.Module) -> Iterator[WeightPlace]:
    """(name, the dict that holds it, its key in there) of every parameter."""
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{key}", module._parameters, key
