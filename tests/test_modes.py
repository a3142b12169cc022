"""What a caller is in when it calls: no_grad, inference_mode, autocast, a default device or dtype. Numbers stay the same."""

import ast
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import gpubound as gb
from gpubound.models import save_hf
from gpubound.models.storing import read_parts
from gpubound.train.checkpoint import Checkpoints
from tests.messages import message

ROOT = Path(gb.__file__).parent
FLOATS = ("empty", "eye", "linspace", "ones", "rand", "randn", "zeros")  # of the default dtype where none is given
OTHERS = ("arange", "as_tensor", "full", "randint", "randperm", "tensor")
# A module is made where and as its maker's modes say.
MODULES = ("models/deepseek_v4/family.py", "models/quantized/experts.py", "models/quantized/schemes.py")


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a default device": lambda: torch.device("meta"),
    "fp64": lambda: default_dtype(torch.float64),
    "bf16": lambda: default_dtype(torch.bfloat16),
}


@pytest.fixture(params=MODES)
def mode(request) -> Callable[[], AbstractContextManager]:
    return MODES[request.param]


def small() -> gb.Decoder:
    torch.manual_seed(0)
    return gb.Decoder(gb.DecoderConfig(hidden=32, intermediate=64, layers=1, heads=2, kv_heads=1, vocabulary=40))


def ids() -> torch.Tensor:
    return torch.arange(24, device="cpu").view(2, 12)


def trained(**options: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    def run(model: gb.Decoder) -> tuple:
        step = gb.TrainStep(model, "next_token", precision="fp32", clip=1.0, **options)
        results = [step({"input_ids": ids(), "labels": ids()}) for _ in range(2)]  # tensors of inference_mode, too
        return [(result.loss, result.grad_norm) for result in results], dict(model.named_parameters())

    return small, run


def decoded(model: gb.Decoder) -> tuple:
    gb.place(model, device="cpu")
    decoder = gb.decoder(model, max_batch=2, max_length=32)
    return [list(row) for row in decoder.generate(ids()[:, :4], max_new_tokens=8).tokens], decoder.score(ids().tolist())


def adapted(**options: Any) -> Callable[[gb.Decoder], dict]:
    def run(model: gb.Decoder) -> dict:
        torch.manual_seed(1)
        gb.lora.add(model, rank=4, **options)
        assert not any(p.is_inference() for p in model.parameters())
        gb.lora.merge(model)
        return dict(model.named_parameters())

    return run


def fed(table: torch.nn.Embedding) -> torch.Tensor | None:
    feed = gb.feed(lambda: (row[None].clone() for row in ids()), device="cpu", mode="resident")  # as a loader makes batches
    with torch.inference_mode(False), torch.enable_grad():  # behind the mode that it was made in
        for batch in feed:
            table(batch).sum().backward()
    return table.weight.grad


def kept(model: gb.Decoder) -> dict:
    with TemporaryDirectory() as folder:
        store = Checkpoints(folder)
        store.save(1, model.state_dict(), {}, wait=True)
        before = model.lm_head.weight.detach().clone()
        model.lm_head.weight.data.zero_()
        store.latest().read(model.state_dict())
    assert torch.equal(model.lm_head.weight, before)
    return dict(model.named_parameters())


def some_rows(model: gb.Decoder) -> torch.Tensor:
    rows = torch.zeros(3, 32, device="cpu", dtype=torch.float32)
    with TemporaryDirectory() as folder:
        read_parts(save_hf(model, Path(folder)), {"lm_head.weight": (rows, (slice(2, 5),))})
    return rows


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "step": trained(),
    "step in 8 bits": trained(optimizer="adamw8bit"),
    "decoder": (small, decoded),
    "adapters": (small, adapted(init=False)),
    "orthogonal adapters": (small, adapted(init="orthogonal")),
    "DoRA": (small, adapted(init=False, dora=True)),
    "feed": (lambda: torch.nn.Embedding.from_pretrained(torch.ones(40, 2, device="cpu"), freeze=False), fed),
    "checkpoint": (small, kept),
    "rows of a folder": (small, some_rows),
}


@functools.cache
def outside(case: str) -> Any:
    """Return what a case gives outside of all modes."""
    make, run = CASES[case]
    return run(make())


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same(case, mode):
    make, run = CASES[case]
    want, model = outside(case), make()
    with mode():
        got = run(model)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("inside", [torch.inference_mode, torch.no_grad])
def test_a_model_that_read_in_a_mode_trains_behind_it(inside):
    """Tables of positions that were made in inference_mode could not be kept for a backward."""
    model, placed = small(), small()
    gb.place(placed, device="cpu")
    for each in (model, placed):
        with inside():
            each(torch.arange(38, device="cpu")[None])
        each.loss(ids(), ids()).backward()
    torch.testing.assert_close(placed.lm_head.weight.grad, model.lm_head.weight.grad)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: gb.TrainStep(model, "causal_lm", precision="fp32"),
        gb.decoder,
        lambda model: gb.lora.add(model, rank=4),
        lambda model: [gb.lora.quantize_base(model, "nf4"), gb.lora.add(model, rank=4)],  # gains of norms are kept, too
    ],
)
def test_a_model_made_inside_inference_mode_is_refused_in_a_sentence(call):
    with torch.inference_mode():
        model = small()
    with pytest.raises(ValueError, check=message("modes:a_model_made_inside_infe")):
        call(model)


def factories(path: Path) -> list[tuple[str, int, set[str | None]]]:
    """(name, line, keywords) of each torch.name(...) that makes a tensor. A keyword None stands for `**others`."""
    text = path.read_text()
    if not any(f"torch.{name}(" in text for name in FLOATS + OTHERS):  # two thirds of the files need not be parsed
        return []
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    made = [(call.func, {k.arg for k in call.keywords}) for call in calls if isinstance(call.func, ast.Attribute)]
    return [
        (f.attr, f.lineno, keywords)
        for f, keywords in made
        if isinstance(f.value, ast.Name) and f.value.id == "torch" and f.attr in FLOATS + OTHERS
    ]


@pytest.mark.slow
def test_no_tensor_is_made_by_the_callers_defaults():
    """With torch.set_default_device("cuda") or a default dtype, a tensor that names neither is another one."""
    bare = []
    for path in sorted(ROOT.rglob("*.py")):
        for name, line, keywords in factories(path):
            wanted = {"device", "dtype"} if name in FLOATS else {"device"}
            if not (wanted <= keywords or keywords & {"out", None} or str(path.relative_to(ROOT)) in MODULES):
                bare.append(f"{path.relative_to(ROOT)}:{line}: torch.{name} without {' and '.join(sorted(wanted - keywords))}")
    assert bare == []
