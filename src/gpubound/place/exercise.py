"""A whole model, forward and backward, before and after: too large to be copied into a wider dtype, so the two runs are
compared as they are. Each swap inside was judged tightly on its own (verify.py); this catches what only shows in the whole:
the loop, the masks, the positions, the loss. Such mistakes are of the order of 1.

Two right runs differ, too, by rounding that grows with depth. In bf16 through 30 random layers, the smallest gradients of q
and k came out 5 % apart and everything else 2 % or less. So one gradient alone is held loosely, and all of them together,
the outputs and the loss more tightly.

That does for most 16-bit models. Two right bf16 runs of four Gemma 3 layers lie 6.5e-2 apart, because each of them lies 5.0e-2
from fp32 (Llama: 1.6e-2). A limit on their distance would refuse what is right, and a wider one would let pass what is wrong in
a Llama. So where that limit is passed, both runs are measured against the model as it came, in fp32, as verify.py measures a
module: the placed one may be FACTOR times as far off. All gradients together came out 0.85 to 1.25 times as far off, of eight
layers of Gemma 3 once 1.5 times.

Gradients are reduced to a sketch, 4,096 elements of each and nothing more, so the two runs never hold two models' worth of
them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..kernels.checks import SIXTEEN_BITS
from ..layers import LMLoss
from ..models.placing import TOKENS, made_up, mode, noise, put_back, reads_tokens
from .fused import Fused, adopt, release
from .verify import GRADIENT, Agreement, Named, bare, coarsest, distances, judge, made_inside, missing, said, worst

LIMIT = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
LOOSE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 1e-1, torch.bfloat16: 3e-1}  # a single gradient's
ELEMENTS = 4096


class Exercise:
    """A model on its device and its run as it came, which later ones are compared with. `trouble`: why there was no run."""

    def __init__(self, model: nn.Module, example: Any = None) -> None:
        self.model, self.trouble = model, "its input cannot be guessed; pass example=<a batch>"
        run = run_of(model, example)
        if run is None:
            return
        self.run, self.trouble = run, ""
        if why := made_inside(model):
            self.trouble = f"{why}; as it is, its own forward runs, under no_grad"
            return
        try:
            self.before = run()
            self.trouble = "" if self.before else "it gives no floating-point output"
        except Exception as error:  # the model is the user's, and may not take what was made up for it; the reason is reported
            self.trouble = f"its own forward and backward raised {said(error)}"
            if example is None:
                self.trouble += " on random tokens; pass example=<a batch>"

    def again(self) -> Agreement:
        """The model as it is now, against what it was."""
        dtype, after = coarsest(self.model), self.run()
        verdict = compare(after, self.before, dtype)
        if verdict.ok or not rounding_may_be_it(verdict, dtype):
            return verdict
        try:
            return judge_by_truth(self.model, self.run, after, self.before, dtype)
        except torch.OutOfMemoryError:  # the first verdict stands
            return replace(
                verdict, why=f"{verdict}; whether that is rounding, a run in fp32 would say, for which there is no memory"
            )


def run_of(model: Any, example: Any = None) -> Callable[[], Named] | None:
    """How to run `model` forward and backward, or None where its input cannot be guessed."""
    if example is not None:
        return lambda: _sketched(model, lambda: _call(model, example), training=model.training)
    if isinstance(getattr(model, "lm_head", None), LMLoss):  # a model of gpubound's own (models/)
        return lambda: _sketched(model, lambda: ({"loss": model.loss(made_up(model), made_up(model))}, {}), training=True)
    if not reads_tokens(model):
        return None
    if hasattr(model, "lm_head") or "ForCausalLM" in type(model).__name__:
        return lambda: _sketched(model, lambda: _language_loss(model), training=True) | _padded_logits(model)
    return lambda: _sketched(model, lambda: _call(model, {"input_ids": made_up(model)[:1]}), training=True)


def check_example(example: Any) -> None:
    """Raise ValueError for an example that is no batch: one without a tensor."""
    if example is not None and not any(isinstance(leaf, Tensor) for leaf in _leaves(example)):
        raise ValueError(
            f"place: example: got {type(example).__name__} without a tensor in it, wanted a batch: a dict of keywords, a tuple "
            f"of arguments, or one argument, with torch tensors in it."
        )


def _leaves(example: Any) -> list:
    return tree_leaves(dict(example) if isinstance(example, Mapping) else example)


def compare(after: Named, before: Named, dtype: torch.dtype) -> Agreement:
    """The worst of all outputs, all gradients, and all gradients taken as one."""
    if why := missing(after, before):
        return Agreement(why=why)
    limits = {name: (LOOSE if name.startswith(GRADIENT) else LIMIT)[dtype] for name in before}
    return worst(distances(after, before), limits)


def judge_by_truth(model: nn.Module, run: Callable[[], Named], after: Named, before: Named, dtype: torch.dtype) -> Agreement:
    """After and before against the model as it came in fp32, on the same input."""
    with as_it_came(model), in_fp32(model):
        truth = run()
    verdict = judge(after, before, truth, dtype, loose=LOOSE[dtype])
    return replace(verdict, where=f"{verdict.where}, from fp32,")


def rounding_may_be_it(verdict: Agreement, dtype: torch.dtype) -> bool:
    """Whether rounding may be what is wrong: a difference of 16-bit numbers, not far beyond its limit."""
    return not verdict.why and dtype in SIXTEEN_BITS and verdict.error <= 5 * LIMIT[dtype]


def _sketched(model: nn.Module, outputs: Callable[[], tuple[Named, Named]], training: bool) -> Named:
    """Outputs and gradients of one forward and backward. `outputs` gives named outputs, and inputs that want a gradient."""
    with _quietly(model), torch.enable_grad(), mode(model, training):
        named, inputs = outputs()
        leaves = inputs | {GRADIENT + name: p for name, p in model.named_parameters() if p.requires_grad}
        total = sum((t.float() * noise(t.shape, t.float(), seed=1)).sum() for t in named.values() if t.requires_grad)
        gradients: tuple = ()
        if leaves and isinstance(total, Tensor):
            gradients = torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
        found = {name: _sample(g) for name, g in zip(leaves, gradients) if g is not None}
        together = {"all gradients together": torch.cat([*found.values()])} if found else {}
        return {name: _sample(t) for name, t in named.items()} | found | together


def _language_loss(model: Any) -> tuple[Named, Named]:
    """The training path: a loss over labels of which some are ignored, with a gradient back to the embeddings."""
    ids = made_up(model)
    embeddings = model.get_input_embeddings()(ids).requires_grad_()
    labels = ids.clone()
    labels[:, : TOKENS // 4] = -100
    try:
        loss = model(inputs_embeds=embeddings, labels=labels).loss
    except Exception:  # some read the ids beside them, as DeepSeek-V4 does to choose experts
        return {"loss": model(input_ids=ids, labels=labels).loss}, {}
    return {"loss": loss}, {GRADIENT + "the embeddings": embeddings}


def _padded_logits(model: Any) -> Named:
    """The reading path: eval mode, one row shorter than the other."""
    ids = made_up(model)
    mask = torch.ones_like(ids)
    mask[1, -TOKENS // 3 :] = 0
    with torch.no_grad(), _quietly(model), mode(model, training=False):
        return {"logits of a padded batch": _sample(model(input_ids=ids, attention_mask=mask).logits)}


def _call(model: nn.Module, example: Any) -> tuple[Named, Named]:
    """Any model on the user's example: a dict of keywords, a tuple of arguments, or one argument."""
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


def _sample(t: Tensor) -> Tensor:
    flat = (t.to_dense() if t.is_sparse else t).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].to(torch.promote_types(t.dtype, torch.float32))


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """The same random numbers in every run; the user's own, the buffers and the accumulators as they were afterwards."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    # The buffers too: a batch norm's running statistics change without a sign.
    with torch.random.fork_rng(devices), put_back(model.buffers()), bare(model, all_train=False):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[d.index] for d in devices)):
            generator.manual_seed(0)
        yield


@contextmanager
def as_it_came(model: nn.Module) -> Iterator[None]:
    """Every swapped module is its old self for as long as the block lasts."""
    swapped = [module for module in model.modules() if isinstance(module, Fused)]
    held = [(module, module.part, {name: module.__dict__[name] for name in module._added}) for module in swapped]
    for module in swapped:
        release(module)
    try:
        yield
    finally:
        for module, part, attributes in held:
            adopt(module, part, attributes)


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """The model's 16-bit numbers in fp32. The parameters stay the same objects, and get their own memory back."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in SIXTEEN_BITS]
    before = [t.data for t in tensors]
    try:
        for t in tensors:
            t.data = t.data.float()
        yield
    finally:
        for t, data in zip(tensors, before):
            t.data = data
