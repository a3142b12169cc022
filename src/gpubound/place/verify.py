"""Verification of swaps: one module against itself in a wider dtype, and a whole model before and after.

A module is compared on random input: its output, input gradient and every parameter gradient. The reference is the original in
a wider dtype (fp32 for 16-bit modules, fp64 for fp32 ones). The original in its own dtype differs from that by its rounding;
the swapped one may differ by FACTOR times as much, and one unit in the last place. So the limit grows where rounding is large
(long sums, deep inside a module) and is tight elsewhere; a wrong formula differs by orders of magnitude.

A whole model is too large to be copied into a wider dtype: it runs forward and backward before and after, and the two runs are
compared. This catches errors of the loop, the masks, the positions and the loss, which are of the order of 1. Two correct runs
differ, too, by rounding that grows with depth. In bf16 through 30 random layers, the smallest gradients of q and k came out 5 %
apart and everything else 2 % or less. So the limit of one gradient is loose, and those of all gradients together, of the
outputs and of the loss are tighter.

Some 16-bit models exceed these. Two correct bf16 runs of four Gemma 3 layers differ by 6.5e-2, because each of them differs by
5.0e-2 from fp32 (Llama: 1.6e-2). A limit on their distance would refuse a correct model, and a wider one would accept a wrong
Llama. So where that limit is exceeded, both runs are compared with the original model in fp32, as for a module: all gradients
together came out 0.85 to 1.25 times as far off, of eight layers of Gemma 3 once 1.5 times.

No run holds a second model: a gradient is freed once it is sampled, and that fp32 model widens its weights as they are used.

Of the original model in fp32 there is no copy, either: the weights of linear layers and embeddings, nearly all of a language
model, stay in 16 bits. Inside, `F.linear` and `F.embedding` widen CHUNK bytes of them at a time, in forward and again in
backward, and keep of their gradients only the elements that are compared. Everything else, such as norms and experts, is cast
for the duration.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import device as facts
from ..errors import FallbackError, GpuboundError
from ..kernels.dispatch import SIXTEEN_BITS
from ..layers import LMLoss
from ..models.registry import TOKENS, Case, made_up, mode, noise, put_back, reads_tokens, switch
from ..trace import timed
from .candidates import Fused, adopt, release

ELEMENTS = 4096  # of each tensor of a whole model that are compared, so that two runs need no memory for two models
CHUNK = 1 << 28  # bytes of fp32 weights that exist at a time
SAMPLED = "sampled_gradient"  # attribute of a parameter that is streamed


def sample(t: Tensor) -> Tensor:
    """Return up to ELEMENTS elements of `t`, evenly spaced, in fp32 or wider."""
    flat = (t.to_dense() if t.is_sparse else t).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].to(torch.promote_types(t.dtype, torch.float32))


@contextmanager
def in_fp32(model: nn.Module, streamed: bool = True) -> Iterator[None]:
    """Compute in fp32 inside. Parameters stay the same objects; those that were cast get their memory back.

    streamed  False: cast the weights of linear layers and embeddings, too, for a model that does not call them by F.linear
              and F.embedding
    """
    weights = dict[int, Tensor]()
    for m in model.modules() if streamed else ():
        if isinstance(m, nn.Linear | nn.Embedding) and m.weight.dtype in SIXTEEN_BITS and not getattr(m, "max_norm", None):
            weights[id(m.weight)] = m.weight
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in SIXTEEN_BITS and id(t) not in weights]
    before = [t.data for t in tensors]
    try:
        for t in tensors:
            t.data = t.data.float()
        for weight in weights.values():
            weight.__dict__[SAMPLED] = None
        with _Widening():
            yield
    finally:
        for t, data in zip(tensors, before):
            t.data = data
        for weight in weights.values():
            del weight.__dict__[SAMPLED]


def take_sampled(parameter: Tensor) -> Tensor | None:
    """Return the sample of the parameter's gradient in the last backward, and begin a new one; None if it is not streamed."""
    part = parameter.__dict__.get(SAMPLED)
    if part is not None:
        parameter.__dict__[SAMPLED] = None
    return part


def is_streamed(parameter: Tensor) -> bool:
    return SAMPLED in parameter.__dict__


class _Widening(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is F.linear and is_streamed(args[1]):
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            y = _WidenedLinear.apply(args[0].float(), args[1])
            return y if bias is None else y + bias.float()
        if function is F.embedding and is_streamed(args[1]):
            return _WidenedRows.apply(args[0], args[1], args[2] if len(args) > 2 else (kwargs or {}).get("padding_idx"))
        return function(*args, **(kwargs or {}))


class _WidenedLinear(torch.autograd.Function):
    """x Wᵀ, by rows of W."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return torch.cat([x @ rows.float().t() for rows in _chunks(weight)], -1)

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        (x,), weight = ctx.saved_tensors, ctx.weight
        dx, parts, begin = torch.zeros_like(x), list[Tensor](), 0
        flat_x, step = x.reshape(-1, x.shape[-1]), max(1, weight.numel() // ELEMENTS)
        for rows in _chunks(weight):
            own = g[..., begin : begin + len(rows)]
            dx += own @ rows.float()
            dweight = (own.reshape(-1, len(rows)).t() @ flat_x).flatten()
            parts.append(dweight[-begin * weight.shape[1] % step :: step].clone())  # every step-th element of all of W
            begin += len(rows)
        _add(weight, torch.cat(parts)[:ELEMENTS])
        return dx, None


class _WidenedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.ids, ctx.weight, ctx.padding = ids, weight, padding
        return weight[ids].float()

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        weight, ids = ctx.weight, ctx.ids.flatten()
        width, step = weight.shape[1], max(1, weight.numel() // ELEMENTS)
        element = torch.arange(0, weight.numel(), step, device=ids.device)[:ELEMENTS]
        row = element // width
        own = (ids[:, None] == row) & (row != (-1 if ctx.padding is None else ctx.padding))  # tokens, elements
        _add(weight, torch.where(own, g.reshape(-1, width)[:, element % width], 0.0).sum(0))
        return None, None, None


def _chunks(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.detach().split(max(1, CHUNK // (4 * weight.shape[1])))


def _add(weight: Tensor, part: Tensor) -> None:
    before = weight.__dict__[SAMPLED]  # of the same weight elsewhere, as where the head is the embedding
    weight.__dict__[SAMPLED] = part if before is None else before + part


FACTOR = 2.0
GRADIENT, CASE = "gradient of ", " (case "  # of a tensor's name

# One unit in the last place, relative, and a little for the order of sums. The figure for fp64 is larger than its unit: Hugging
# Face's norms and rotary angles are computed in fp32 in any model.
UNIT = {torch.float64: 1e-6, torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Of a whole model's outputs, loss and all gradients together, and of a single gradient.
LIMIT = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
GRADIENT_LIMIT = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 1e-1, torch.bfloat16: 3e-1}
SEEDS = (1, 2)  # of further inputs of random tokens
FLOOR = 1e-3  # of the largest gradient: one that is zero in exact arithmetic is rounding alone
PART = 1 << 24  # elements of two tensors whose difference exists at a time
SMALL = 1 << 20  # of a tensor that is compared together with others
# Bytes without a tensor that the allocator may keep from one run to the next: in pieces, 8B kept 8.4 GiB. Of layers, a part of
# the model: 12 layers of 8B (H200) were placed in 1.1 s where an eighth of them stayed, which is 1 GB as a sixteenth of all 32
# is; in 1.3 to 1.4 where half of that or nothing stayed.
CACHED = 1 << 24
KEPT = 16
LARGE = 1 << 28  # bytes of a gradient: after a larger one, unused memory is released before the next

Named = dict[str, Tensor]
"""Outputs and gradients of a run by name, without the gradients that are None"""


@dataclass(frozen=True)
class Agreement:
    """The worst of all compared tensors and its limit, or `why` nothing could be compared."""

    where: str = ""
    error: float = 0.0
    limit: float = 0.0
    why: str = ""

    @property
    def ok(self) -> bool:
        return not self.why and self.error <= self.limit

    def __str__(self) -> str:
        if self.why:
            return self.why
        return f"{self.where} off by {self.error:.1e} ({'allowed' if self.ok else 'limit'} {self.limit:.1e})"


def attempt(what: str, check: Callable[[], Agreement]) -> Agreement:
    """Return check(), or the exception as a reason: a kernel's compiler can raise anything, and so can the user's model."""
    try:
        return check()
    except FallbackError:
        raise
    except Exception as error:  # the reason is reported
        return Agreement(why=f"{what} raised {first_line(error)}".lstrip())


def first_line(error: BaseException) -> str:
    line, kind = str(error).strip().partition("\n")[0].rstrip("."), type(error).__name__
    return line if line and isinstance(error, GpuboundError) else f"{kind}: {line}" if line else kind


def inference_weight(module: nn.Module) -> str:
    """Return why a module has no gradients to be compared, or an empty string."""
    name = next((name for name, p in module.named_parameters() if p.is_inference()), None)
    if name is None:
        return ""
    return (
        f"{name} was made inside torch.inference_mode(), and has no gradients to be verified by; "
        f"make or load the model outside of it"
    )


def coarsest(model: nn.Module) -> torch.dtype:
    """Return the coarsest dtype of the parameters, which decides how far two correct runs may differ."""
    dtypes = {p.dtype for p in model.parameters()}
    return max(dtypes & set(UNIT), key=UNIT.__getitem__, default=torch.float32)


def verify(module: nn.Module, cases: Iterable[Case], swap: Callable[[], None], cache_limit: int = CACHED) -> Agreement:
    """Run `module` on every case, call `swap`, run it again, and compare the runs.

    cache_limit: bytes without a tensor that the allocator may keep between the runs
    """
    cases, dtype = list(cases), coarsest(module)
    wider = torch.float32 if dtype.itemsize < 4 else torch.float64
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    truth = run(_widened(module, wider), cases, wider, spent=True)
    facts.release_cached(device, cache_limit)  # tensors of the other runs have other sizes
    original = Original.of(run(module, cases, dtype), truth)
    facts.release_cached(device, cache_limit)
    swap()
    return compare_with_truth(run(module, cases, dtype), original, truth, dtype)


def _widened(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of `module` in a wider dtype, whose weights are copied once, not in their own dtype before."""
    config = getattr(module, "config", None)
    copies: dict[int, Any] = {id(config): config}
    for p in module.parameters():
        if type(p) is nn.Parameter and p.is_floating_point():
            copies[id(p)] = nn.Parameter(p.detach().to(dtype, copy=True), p.requires_grad)
    return deepcopy(module, copies).to(dtype)


def run(module: nn.Module, cases: Sequence[Case], dtype: torch.dtype, spent: bool = False) -> Named:
    """Return outputs and gradients in eval mode (dropout off), of fixed upstream gradients. Parameters get no `grad`.

    spent: free each parameter once its gradient is complete, in the last case: nothing reads it after that
    """
    named: Named = {}
    with (
        for_comparison(module, train_all=True),
        torch.enable_grad(),
        mode(module, training=False),
        torch.autograd.set_multithreading_enabled(False),  # a workspace of cuBLAS for another thread, 32 MiB, would stay
    ):
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}  # quantised ones have no gradient
        for number, case in enumerate(cases):
            x, keywords = case(dtype)
            x.requires_grad_()
            y = module.forward(x, **keywords)  # not __call__: hooks are the user's business
            y = y[0] if isinstance(y, tuple) else y
            upstream = noise(y.shape, y, seed=1)
            for p in parameters.values() if spent and number == len(cases) - 1 else ():
                p.register_hook(lambda _, p=p: setattr(p, "data", p.data.new_empty(0)))
            gradients = torch.autograd.grad(y, [x, *parameters.values()], upstream, allow_unused=True)
            names = ["output", "input gradient", *(GRADIENT + name for name in parameters)]
            label = f"{CASE}{number + 1})" if number else ""
            named |= {name + label: t for name, t in zip(names, [y.detach(), *gradients]) if t is not None}
    return named


@dataclass(frozen=True)
class Original:
    """The original's run: the names, dtypes and shapes of its tensors, and their errors. The tensors can be freed."""

    kinds: dict[str, tuple[torch.dtype, torch.Size]]
    errors: dict[str, float]

    @classmethod
    def of(cls, run: Named, truth: Named, floor: float = FLOOR) -> "Original":
        return cls({name: (t.dtype, t.shape) for name, t in run.items()}, distances(run, truth, floor))


def compare_with_truth(
    after: Named, original: Original, truth: Named, dtype: torch.dtype, single: float = 0.0, floor: float = FLOOR
) -> Agreement:
    """Compare the errors of `after` and of the original, over all cases. single: an error that a single gradient may have"""
    if why := missing(after, original.kinds):
        return Agreement(why=why)
    for name, new in after.items():
        if (new.dtype, new.shape) != (kind := original.kinds[name]):
            return Agreement(why=f"{name} is {new.dtype} {tuple(new.shape)}, the original's {kind[0]} {tuple(kind[1])}")
    limits = {name: FACTOR * error + UNIT[dtype] for name, error in over_cases(original.errors).items()}
    limits |= {name: max(single, limit) for name, limit in limits.items() if name.startswith(GRADIENT)}
    return worst(over_cases(distances(after, truth, floor)), limits)


def over_cases(errors: dict[str, float]) -> dict[str, float]:
    """Return the root mean square of each tensor's errors in all cases.

    In one case they may be a few tokens' roundings. With SmolLM2-135M's weights the gradient of layer 1's keys was off by 9.3 %
    in one case and 8.2 % in the other, the original's by 4.2 and 9.2 %; with other values by 5 to 8 % and 5 to 8 %.
    """
    cases = defaultdict[str, list[float]](list)
    for name, error in errors.items():
        cases[name.partition(CASE)[0]].append(error)
    return {name: math.sqrt(sum(error * error for error in each) / len(each)) for name, each in cases.items()}


def missing(after: Collection[str], before: Collection[str]) -> str:
    """Return the first tensor that only one of the two runs has, or an empty string."""
    for name in (*before, *after):
        if name not in after or name not in before:
            return f"{name} is {'missing' if name in before else 'there'}, unlike the original's"
    return ""


def distances(run: Named, other: Named, floor: float = FLOOR) -> dict[str, float]:
    """Return the relative distances of the tensors of two runs. The device is read once, at the end.

    floor: the fraction of the largest gradient that smaller ones are measured against
    """
    names = [name for name in other if name in run]
    both = [(run[name], other[name]) for name in names]
    values = torch.stack([*_norms([(t,) for t in other.values()]), *_norms(both)]).tolist()
    norms, gaps = dict(zip(other, values)), dict(zip(names, values[len(other) :]))
    least = floor * max((norm for name, norm in norms.items() if name.startswith(GRADIENT)), default=0.0)
    scales = {name: max(norm, least) if name.startswith(GRADIENT) else norm for name, norm in norms.items()}
    return {name: gap / max(scales[name], 1e-12) for name, gap in gaps.items()}  # all of it may be zero, as at weights of zeros


def _norms(tensors: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Return the norm of each tensor, or of the difference of two, in fp32. Small ones share a few launches: seven for each of
    291 gradients took 0.1 s of a comparison at 8B."""
    norms = {}
    for i, pair in enumerate(tensors):
        if pair[0].numel() > SMALL:
            parts = zip(*(t.reshape(-1).split(PART) for t in pair))
            norms[i] = torch.stack([(one - other[0] if other else one).norm() for one, *other in parts]).norm()
    small = [i for i in range(len(tensors)) if i not in norms]
    columns = [[tensors[i][side] for i in small] for side in range(len(tensors[0]) if small else 0)]
    differences = columns[0] if len(columns) == 1 else torch._foreach_sub(*columns) if columns else []
    norms |= zip(small, torch._foreach_norm(differences) if differences else ())
    return [norms[i].float() for i in range(len(tensors))]


def worst(errors: dict[str, float], limits: dict[str, float]) -> Agreement:
    """Return the tensor whose error is largest relative to its limit; NaN is the largest of all."""
    where = max(errors, key=lambda name: float("inf") if math.isnan(errors[name]) else errors[name] / limits[name])
    return Agreement(where, errors[where], limits[where])


@contextmanager
def for_comparison(module: nn.Module, train_all: bool) -> Iterator[None]:
    """Remove the accumulators of parameters inside, and with `train_all` let every parameter train.

    Results that a large batch recomputes in backward are recomputed here too: that path is the longer one. Products with
    quantised weights do not round x: in 8 bits, a scale for one product or for several as one gives different values. Layers
    drop nothing: kernels of attention draw in other orders.
    """
    before = [(p, p.requires_grad, p.__dict__.pop("main_grad", None)) for p in module.parameters()]
    options = {"recompute_bytes": 0, "rounds_inputs": False, "attention_dropout": 0.0, "residual_dropout": 0.0}
    # A number alone: attention_dropout is a module in some models, which nn.Module would look for at length.
    switched: list[tuple[nn.Module, dict[str, Any]]] = []
    for m in module.modules():
        own = ((name, vars(m).get(name, getattr(type(m), name, None))) for name in options)
        switched.append((m, {name: options[name] for name, value in own if isinstance(value, int | float)}))
    undo = switch(switched)
    try:
        for p, _, _ in before if train_all else ():
            p.requires_grad_(p.is_floating_point())
        with facts.without_cudnn_attention():
            yield
    finally:
        undo()
        for p, requires_grad, main in before:
            p.requires_grad_(requires_grad)
            if main is not None:
                p.__dict__["main_grad"] = main


class Exercise:
    """A forward and backward of the original model, with which later runs are compared. `trouble`: why there was none."""

    def __init__(self, model: nn.Module, example: Any = None) -> None:
        self.model, self.trouble = model, "its input cannot be guessed; pass example=<a batch>"
        self.seeds = SEEDS if example is None else ()
        self.agreement: Agreement | None = None  # of the model before any swap
        run = run_of(model, example)
        if run is None:
            return
        self.run, self.trouble = run, ""
        if why := inference_weight(model):
            self.trouble = f"{why}; its own forward runs, under no_grad"
            return
        try:
            with timed(f"a run of {type(model).__name__}"):
                self.before = run()
            self.trouble = "" if self.before else "it gives no floating-point output"
        except Exception as error:  # the user's model may not take made-up tokens; the reason is reported
            self.trouble = f"its own forward and backward raised {first_line(error)}"
            if example is None:
                self.trouble += " on random tokens; pass example=<a batch>"

    def again(self) -> Agreement:
        """Run the model again, and compare."""
        dtype = coarsest(self.model)
        with timed(f"a run of {type(self.model).__name__} after its swap"):
            result = compare(after := self.run(), self.before, dtype)
        if result.ok or not may_be_rounding(result, dtype):
            return result
        try:
            return compare_in_fp32(self.model, self.run, after, dict(self.before), dtype, self.seeds)
        except torch.OutOfMemoryError:
            why = f"{result}; whether that is rounding, a run in fp32 would show, for which there is no memory"
            return replace(result, why=why)


def run_of(model: Any, example: Any = None) -> Callable[..., Named] | None:
    """Return a function of a seed that runs `model` forward and backward, or None where its input cannot be guessed."""
    if example is not None:
        return lambda: _sketched(model, lambda: _call(model, example), training=model.training)
    if isinstance(getattr(model, "lm_head", None), LMLoss):  # a model of gpubound's (models/)
        ids = partial(made_up, model)
        if model.lm_head.out_features != model.config.vocabulary:  # a head of classes, of which token ids are no labels
            return lambda seed=0: _sketched(model, lambda: _call(model, ids(seed)), training=True)
        return lambda seed=0: _sketched(model, lambda: ({"loss": model.loss(ids(seed), ids(seed))}, {}), training=True)
    if not reads_tokens(model):
        return None
    if hasattr(model, "lm_head") or "ForCausalLM" in type(model).__name__:
        return lambda seed=0: (
            _sketched(model, lambda: _language_loss(model, made_up(model, seed)), training=True) | _padded_logits(model, seed)
        )
    return lambda seed=0: _sketched(model, lambda: _call(model, {"input_ids": made_up(model, seed)[:1]}), training=True)


def check_example(example: Any) -> None:
    """Raise ValueError for an example that is no batch: one without a tensor."""
    leaves = tree_leaves(dict(example) if isinstance(example, Mapping) else example)
    if example is not None and not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise ValueError(
            f"place: example: got {type(example).__name__} without a tensor in it, wanted a batch: a dict of keywords, a tuple "
            f"of arguments, or one argument, with torch tensors in it."
        )


def compare(after: Named, before: Named, dtype: torch.dtype) -> Agreement:
    """Return the worst of all outputs, all gradients, and all gradients concatenated."""
    if why := missing(after, before):
        return Agreement(why=why)
    limits = {name: (GRADIENT_LIMIT if name.startswith(GRADIENT) else LIMIT)[dtype] for name in before}
    return worst(distances(after, before, smallest(dtype)), limits)


def smallest(dtype: torch.dtype) -> float:
    """Return the fraction of a whole model's largest gradient that its smaller ones are measured against.

    Gradients of q and k are what remains of terms that nearly cancel, each with a rounding of UNIT. In a bf16 model with large
    biases, they had a thousandth of the largest gradient's norm, and two correct runs were 10 to 45 % apart.
    """
    return max(FLOOR, UNIT[dtype])


@timed("comparison with fp32")
def compare_in_fp32(
    model: nn.Module, run: Callable[..., Named], after: Named, before: Named, dtype: torch.dtype, seeds: Sequence[int] = ()
) -> Agreement:
    """Compare both runs with one of the original model in fp32, on the same input. If they are apart by up to twice the limit,
    compare them over the inputs of `seeds`, too: a few tokens' roundings may be most of a gradient's error in one.

    With SmolLM2-135M's weights one of 272 gradients was off by 0.38 on an H200, and the original's by 0.18.
    """
    floor, truth = smallest(dtype), _run_in_fp32(model, run)

    def compared() -> Agreement:
        return compare_with_truth(after, Original.of(before, truth, floor), truth, dtype, GRADIENT_LIMIT[dtype], floor)

    result = compared()
    if not result.ok and not result.why and result.error <= 2 * result.limit:
        for seed in seeds:
            again = partial(run, seed)
            with original_classes(model):
                original = again()
            for named, other in ((truth, _run_in_fp32(model, again)), (before, original), (after, again())):
                named |= {f"{name}{CASE}{seed + 1})": t for name, t in other.items()}
        result = compared()
    return replace(result, where=f"{result.where}, from fp32,")


def _run_in_fp32(model: nn.Module, run: Callable[[], Named]) -> Named:
    with original_classes(model):
        try:
            with in_fp32(model):
                return run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # 16-bit weights met fp32 in an operation other than F.linear and F.embedding
            with in_fp32(model, streamed=False):
                return run()


def may_be_rounding(result: Agreement, dtype: torch.dtype) -> bool:
    """Return whether rounding may explain the difference: between 16-bit values, and not far beyond the limit."""
    return not result.why and dtype in SIXTEEN_BITS and result.error <= 5 * result.limit


def _sketched(model: nn.Module, outputs: Callable[[], tuple[Named, Named]], training: bool) -> Named:
    """Return outputs and gradients of one forward and backward. `outputs` returns outputs, and inputs that want a gradient."""
    with _reproducible(model), torch.enable_grad(), mode(model, training):
        named, inputs = outputs()
        leaves = inputs | {GRADIENT + name: p for name, p in model.named_parameters() if p.requires_grad}
        total = sum((t.float() * noise(t.shape, t.float(), seed=1)).sum() for t in named.values() if t.requires_grad)
        sketches: Named = {}
        if leaves and isinstance(total, Tensor):
            sketches = _sampled_gradients(total, leaves)
        together = {"all gradients together": torch.cat([*sketches.values()])} if sketches else {}
        return {name: sample(t) for name, t in named.items()} | sketches | together


def _sampled_gradients(total: Tensor, leaves: Named) -> Named:
    """Return samples of the gradients. All of them would be a second model: each is freed as soon as it has been sampled.

    Of a tied weight's gradient each part is, and their samples are added. Autograd would keep the head's part until the
    embeddings' comes, and add them out of place: three tables, 1.5 GiB at 1b.
    """
    samples, tied = Named(), _tied_edges(total, leaves)
    parts = [name for edges in tied.values() for name in edges.values()]
    waiting = len(leaves) - len({*parts}) + len(parts)
    facts.release_cached(total.device, CACHED)

    def sampled(name: str, gradient: Tensor | None) -> Tensor | None:
        nonlocal waiting
        waiting -= 1
        if gradient is None:  # of a weight that is streamed
            return None
        first = name not in samples
        samples[name] = sample(gradient) if first else samples[name] + sample(gradient)
        if gradient.numel() * gradient.itemsize >= LARGE or waiting == 1:
            # Otherwise smaller gradients take the place of the head's, and the embeddings', the last one, needs as much again.
            facts.release_cached(total.device, CACHED)
        # What backward keeps instead: one element, expanded. Nothing of another part: the sum would have every element. That
        # of the embeddings stays: zeros would go on into the table.
        plain = first and leaves[name].is_leaf and type(gradient) is Tensor and not gradient.is_sparse
        return gradient.new_zeros(()).expand_as(gradient) if plain else None

    def sampled_parts(edges: dict[int, str], gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(sampled(edges[i], g) if i in edges else g for i, g in enumerate(gradients))

    hooks = [t.register_hook(partial(sampled, name)) for name, t in leaves.items() if name not in parts]
    hooks += [node.register_hook(partial(sampled_parts, edges)) for node, edges in tied.items()]
    try:
        torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for name, t in leaves.items():
        if (streamed := take_sampled(t)) is not None:
            samples[name] = streamed
    return {name: samples[name] for name in leaves if name in samples}


def _tied_edges(total: Tensor, leaves: Named) -> dict[Any, dict[int, str]]:
    """Return the graph's nodes that give a part of a tied weight's gradient, with the position and name of each.

    Weights with hooks are left out: a hook that writes into its gradient wants all of it.
    """
    names = {id(t): name for name, t in leaves.items() if t.is_leaf and not t._backward_hooks}
    edges, nodes, visited = list[tuple[Any, int, str]](), list[Any]([total.grad_fn]), {total.grad_fn}
    for node in nodes:  # grows
        for position, (below, _) in enumerate(node.next_functions):
            name = names.get(id(getattr(below, "variable", None)))
            if name is not None:
                edges.append((node, position, name))
            elif below is not None and below not in visited:
                visited.add(below)
                nodes.append(below)
    counts = Counter(name for _, _, name in edges)
    tied = dict[Any, dict[int, str]]()
    for node, position, name in edges:
        if counts[name] > 1:
            tied.setdefault(node, {})[position] = name
    return tied


def _language_loss(model: Any, ids: Tensor) -> tuple[Named, Named]:
    """Run the training path: a loss over labels of which some are ignored, with a gradient of the embeddings."""
    embeddings = model.get_input_embeddings()(ids).requires_grad_()
    labels = ids.clone()
    labels[:, : TOKENS // 4] = -100
    try:
        loss = model(inputs_embeds=embeddings, labels=labels).loss
    except Exception:  # some read the ids, too, as DeepSeek-V4 does to choose experts
        return {"loss": model(input_ids=ids, labels=labels).loss}, {}
    return {"loss": loss}, {GRADIENT + "the embeddings": embeddings}


def _padded_logits(model: Any, seed: int) -> Named:
    """Run in eval mode, with one row shorter than the other."""
    ids = made_up(model, seed)
    mask = torch.ones_like(ids)
    mask[1, -TOKENS // 3 :] = 0
    with torch.no_grad(), _reproducible(model), mode(model, training=False):
        return {"logits of a padded batch": sample(model(input_ids=ids, attention_mask=mask).logits)}


def _call(model: nn.Module, example: Any) -> tuple[Named, Named]:
    """Run any model on the user's example: a dict of keywords, a tuple of arguments, or one argument."""
    device = next((p.device for p in model.parameters()), None)
    example = dict(example) if isinstance(example, Mapping) else example  # transformers' BatchEncoding is a Mapping
    example = example if device is None else tree_map_only(Tensor, lambda t: t.to(device), example)
    if isinstance(example, dict):
        result = model(**example)
    else:
        result = model(*example) if isinstance(example, tuple) else model(example)
    return {f"output {name}".strip(): t for name, t in _tensors(result)}, {}


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, f"{name}.{key}".strip("."))


@contextmanager
def _reproducible(model: nn.Module) -> Iterator[None]:
    """Draw the same random numbers in every run. Restore the user's RNG state, the buffers and the accumulators."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    # The buffers too: a batch norm updates its running statistics silently.
    with torch.random.fork_rng(devices), put_back(model.buffers()), for_comparison(model, train_all=False):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[d.index] for d in devices)):
            generator.manual_seed(0)
        yield


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Give every swapped module its original class inside."""
    swapped = [module for module in model.modules() if isinstance(module, Fused)]
    before = [(module, module.part, {name: module.__dict__[name] for name in module._added}) for module in swapped]
    for module in swapped:
        release(module)
    try:
        yield
    finally:
        for module, part, attributes in before:
            adopt(module, part, attributes)
