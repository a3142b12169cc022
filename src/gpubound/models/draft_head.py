"""A draft head of EAGLE-3's kind: one decoder layer that guesses the tokens after those that a model has read.

The model's hidden states before three of its layers make one feature of each position (`fc`). The layer reads the feature of a
position together with the embedding of the token after it, and predicts the token after that. Further tokens come from the same
layer, whose output replaces the feature. Its vocabulary may be a part of the model's: token i of the head is token i + d2t[i].

Tensors are named as in published heads, whose folders `DraftHead.load` reads and `save` writes. decode/draft_head.py runs a
head inside a decoder, train/objectives/draft_head.py trains it.

Legend: B rows, T tokens, H query heads, K key and value heads, D width of a head.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import DataError
from ..files import check_replaceable, make_folder, write_atomic, writing
from ..formatting import shown, unexpected
from ..kernels import rope
from ..layers.attention import Rope, RopeTable, attend
from ..layers.block import MLP, RMSNorm, StreamBefore
from .folder import WEIGHTS, opened, read_config, weight_files
from .language_model import hidden_of
from .llama.checkpoint import config_of, hf_config
from .llama.decoder import DecoderConfig
from .reader import weight_of
from .registry import reader_of

QUERY = "midlayer.self_attn.q_proj.weight"
FEATURES = 3  # hidden states that make a feature
READ_LAYERS = "eagle_aux_hidden_state_layer_ids"  # in config.json
PICKLED = "pytorch_model.bin"


class DraftAttention(nn.Module):
    """The projections of attention over [embedding, feature], and attention as training needs it."""

    def __init__(self, config: DecoderConfig, device=None, dtype=None) -> None:
        super().__init__()
        where: Any = {"device": device, "dtype": dtype}
        self.head_dim = config.head_dim
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden, query, bias=config.qkv_bias, **where)
        self.k_proj = nn.Linear(2 * config.hidden, key, bias=config.qkv_bias, **where)
        self.v_proj = nn.Linear(2 * config.hidden, key, bias=config.qkv_bias, **where)
        self.o_proj = nn.Linear(query, config.hidden, bias=False, **where)

    def forward(self, x: Tensor, angles: Rope, mask: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend from x (B, T, 2 hidden) to its keys and to `earlier` ones, where its own are appended.

        mask  (B or 1, 1, T, T): keys of the first entry of `earlier` that a position sees. Of each later one it sees its own.
        """
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rope(q, k, *angles)
        earlier.append((k.transpose(1, 2), v.transpose(1, 2)))
        own = torch.eye(x.shape[1], dtype=torch.bool, device=x.device).expand_as(mask)
        visible = torch.cat([mask, *[own] * (len(earlier) - 1)], -1)
        keys, values = (torch.cat(parts, 2) for parts in zip(*earlier))
        mixed = attend(q.transpose(1, 2), keys, values, visible, self.head_dim**-0.5)
        return self.o_proj(mixed.flatten(-2))


class DraftLayer(nn.Module):
    """The layer: attention over the normed embedding and feature, and an MLP. The feature is its residual stream."""

    def __init__(self, config: DecoderConfig, device=None, dtype=None) -> None:
        super().__init__()
        where: Any = {"device": device, "dtype": dtype}
        self.input_layernorm = RMSNorm(config.hidden, config.eps, **where)  # of the embedding
        self.hidden_norm = RMSNorm(config.hidden, config.eps, **where)  # of the feature
        self.self_attn = DraftAttention(config, **where)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps, **where)
        self.mlp = MLP(config.hidden, config.intermediate, **where)

    def forward(self, embedded: Tensor, x: Tensor, angles: Rope, mask: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1)
        x = x + self.self_attn(both, angles, mask, earlier)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftHead(nn.Module):
    """A draft head: `DraftHead.for_model(model)` makes one to train, `DraftHead.load(folder, model)` reads a published one."""

    d2t: Tensor  # (tokens that the head may draft), int64: what is added to each for the model's token
    t2d: Tensor  # (vocabulary of the model), bool: whether the head may draft the token

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[int],
        width: int | None = None,
        draft_vocabulary: int | None = None,
        embeds: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        """config: of the layer, whose vocabulary is the model's. layers: the hidden states before these layers of the model are
        read. width: of these; None: hidden. embeds: the head has an embedding, else it reads the model's."""
        super().__init__()
        where: Any = {"device": device, "dtype": dtype}
        words = draft_vocabulary or config.vocabulary
        self.config, self.layers, self.width = config, tuple(layers), width or config.hidden
        self.fc = nn.Linear(len(self.layers) * self.width, config.hidden, bias=False, **where)
        self.midlayer = DraftLayer(config, **where)
        self.norm = RMSNorm(config.hidden, config.eps, **where)
        self.lm_head = nn.Linear(config.hidden, words, bias=False, **where)
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden, **where) if embeds else None
        self.register_buffer("d2t", torch.zeros(words, dtype=torch.int64, device=device))
        self.register_buffer("t2d", torch.arange(config.vocabulary, device=device) < words)

    @classmethod
    def for_model(cls, model: nn.Module, tokens: Tensor | Sequence[int] | None = None, **sizes: Any) -> "DraftHead":
        """Return an untrained head for a model, with its device and dtype.

        tokens  ids that the head may draft, such as the most frequent ones; None: all
        sizes   fields of the layer that differ from the model's: intermediate, heads, kv_heads
        """
        config = layer_config(model)
        if unknown := sizes.keys() - vars(config).keys():
            raise unexpected("DraftHead.for_model", unknown, vars(config))
        config = replace(config, **sizes)
        chosen: Any = None
        if tokens is not None:
            with suppress(TypeError, ValueError, RuntimeError):
                chosen = torch.as_tensor(tokens, device="cpu")
            if chosen is None or chosen.dim() != 1 or not len(chosen) or chosen.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"DraftHead: tokens: got {shown(tokens)}, wanted a list of token ids, or None for all.")
        words = config.vocabulary if chosen is None else len(chosen)
        head = cls(config, layers_read(len(reader(model).blocks)), None, words, **_like(model))
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.02)
        if chosen is not None:
            head.choose_tokens(chosen)
        return head

    def forward(
        self, states: Tensor, embedded: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> list[Tensor]:
        """Return the inputs (B, T, hidden) of lm_head of S guesses from each position, each after the one before.

        states        (B, T, layers · width): the model's hidden states
        embedded      (B, T + S, hidden): guess s from position t reads embedded[:, t + 1 + s], and predicts the token after it
        position_ids  (B, T) or (1, T); None: 0 to T - 1
        mask          (B, 1, T, T): the positions that each position sees; None: those up to it
        """
        tokens, results, earlier = states.shape[1], list[Tensor](), list[tuple[Tensor, Tensor]]()
        at = torch.arange(tokens, device=states.device)[None] if position_ids is None else position_ids
        if mask is None:
            mask = torch.ones(1, 1, tokens, tokens, device=states.device, dtype=torch.bool).tril()
        x, angles = self.fc(states), RopeTable(self.config.angles)
        for step in range(embedded.shape[1] - tokens):
            turn = angles.at(at[0] + step if len(at) == 1 else at + step)
            x = self.midlayer(embedded[:, step + 1 : step + 1 + tokens], x, turn, mask, earlier)
            results.append(self.norm(x))
        return results

    def choose_tokens(self, tokens: Tensor) -> None:
        """Set the model's tokens that the head may draft."""
        words, vocabulary = len(self.d2t), self.config.vocabulary
        tokens = tokens.to(self.d2t.device).long().unique()  # sorted
        if len(tokens) != words or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise ValueError(
                f"DraftHead: tokens: got {len(tokens)} different ones from {int(tokens.min())} to {int(tokens.max())}, wanted "
                f"{words} of a vocabulary of {vocabulary}, each once."
            )
        self.d2t.copy_(tokens - torch.arange(words, device=tokens.device))
        self.t2d.zero_().index_fill_(0, tokens, True)

    @property
    def targets(self) -> Tensor:
        """The model's token of each of the head's."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def table(self, model: nn.Module) -> Tensor:
        """Return the embedding that the head reads."""
        return weight_of(reader(model).embedding if self.embed_tokens is None else self.embed_tokens)

    def check_model(self, model: nn.Module) -> None:
        """Raise ValueError where the head does not fit a model."""
        result, own = reader(model), self.config
        shape, count = result.shape(), len(result.blocks)
        for what, got, wanted in (
            ("hidden states of width", self.width, shape.hidden),
            ("a vocabulary of", own.vocabulary, shape.vocab),
            ("embeddings of width", own.hidden, self.table(model).shape[1]),
        ):
            if got != wanted:
                raise ValueError(
                    f"DraftHead: it reads {what} {got:,}, and the {type(model).__name__} has {wanted:,}; take the head "
                    f"that was made for this model."
                )
        if not all(0 <= layer < count for layer in self.layers):
            raise ValueError(
                f"DraftHead: it reads the hidden states before the layers {', '.join(map(str, self.layers))}, and the "
                f"{type(model).__name__} has layers 0 to {count - 1}; take the head that was made for this model."
            )

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module) -> "DraftHead":
        """Load the head of a model from its folder, to the model's device and in its dtype."""
        path, about = Path(folder), read_config(Path(folder))
        state = _stored(path)
        for name in ("fc.weight", "lm_head.weight", QUERY):
            if name not in state:
                raise DataError(f"{path} has no tensor {name}; wanted the folder of an EAGLE-3 head.")
        config = config_of(about | {"model_type": "llama", "attention_bias": False}, path)
        config = replace(config, layers=1, tied=False, qkv_bias=QUERY.replace("weight", "bias") in state)
        words, width = len(state["lm_head.weight"]), state["fc.weight"].shape[1] // FEATURES
        layers = about.get(READ_LAYERS) or (about.get("eagle_config") or {}).get(READ_LAYERS)
        layers = layers or layers_read(len(reader(model).blocks))
        head = cls(config, layers, width, words, "embed_tokens.weight" in state, **_like(model))
        if words == config.vocabulary:  # a head that drafts all tokens may have no tables
            state = {"d2t": head.d2t, "t2d": head.t2d} | state
        for name, tensor in head.state_dict().items():
            result = tuple(state[name].shape) if name in state else "nothing"
            if result != tuple(tensor.shape):
                raise DataError(f"{path}: {name}: got {result}, wanted {tuple(tensor.shape)}; check config.json.")
        unread = [name for name in state if name not in head.state_dict() and "rotary_emb" not in name]
        if unread or about.get("norm_before_residual"):
            what = f"tensor {unread[0]}" if unread else "norm_before_residual"
            raise DataError(f"{path}: has {what}, which a DraftHead does not compute; take an EAGLE-3 head without it.")
        head.load_state_dict({name: state[name] for name in head.state_dict()})
        head.check_model(model)
        return head

    def save(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Write a folder as published heads have it."""
        path, config = Path(folder), replace(self.config, qkv_bias=False)
        check_replaceable(path, "folder", overwrite=overwrite)
        make_folder(path)
        about = hf_config(config, self.fc.weight.dtype) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.d2t),
            "target_hidden_size": self.width,
            READ_LAYERS: list(self.layers),
        }
        with writing(path):
            save_file({name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}, path / WEIGHTS)
        write_atomic(path / "config.json", json.dumps(about, indent=2))
        return path


def reader(model: nn.Module) -> Any:
    """Return the reader of a model whose hidden states a head can read."""
    if (result := reader_of(model)) is None:
        raise ValueError(
            f"DraftHead: model: got {type(model).__name__}, wanted gb.Decoder or a model of transformers that "
            f"docs/models.md lists."
        )
    return result


def layers_read(count: int) -> tuple[int, ...]:
    """Return the layers before which published heads read a model of `count` layers."""
    return (2, count // 2, count - 3) if count >= 6 else (0, count // 2, count - 1)


def layer_config(model: nn.Module) -> DecoderConfig:
    """Return the config of a layer with the sizes of a model's."""
    result = reader(model)
    shape, config = result.shape(), result.config
    if isinstance(config, DecoderConfig):
        return replace(config, layers=1, tied=False, qkv_bias=False, qk_norm=False)
    attention, theta = result.first_attention(), (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    heads, kv_heads = result.heads(attention)
    width = getattr(config, "intermediate_size", None)  # GPT-2 and others name it differently, Gemma 3n has one a layer
    return DecoderConfig(
        hidden=shape.hidden,
        intermediate=width if isinstance(width, int) else 4 * shape.hidden,
        layers=1,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=shape.vocab,
        head_width=result.head_dim(attention),
        rope_theta=float(theta),
        eps=float(getattr(config, "rms_norm_eps", 1e-5)),
    )


def hidden_states_of(model: nn.Module, inputs: dict[str, Any], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the hidden states before `layers`, concatenated (B, T, layers · hidden), and the input of the model's head."""
    blocks, kept = reader(model).blocks, {number: StreamBefore() for number in layers}
    with ExitStack() as hooks:
        for number, hook in kept.items():
            hooks.enter_context(blocks[number].register_forward_pre_hook(hook, with_kwargs=True))
        last = hidden_of(model, inputs)
    return torch.cat([kept[number].x for number in layers], -1), last


def _like(model: nn.Module) -> dict[str, Any]:
    first = next(p for p in model.parameters() if p.is_floating_point())
    return {"device": first.device, "dtype": first.dtype}


def _stored(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a head's folder: heads are published in safetensors, or as torch.save writes them."""
    if not (path / WEIGHTS).exists() and (path / PICKLED).exists():
        return torch.load(path / PICKLED, map_location="cpu", weights_only=True)
    state: dict[str, Tensor] = {}
    for file in weight_files(path):
        with opened(file) as tensors:
            state |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (it is no dict)
    return state
