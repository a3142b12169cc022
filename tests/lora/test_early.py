"""The kernels of an adapted model's first step are named before it runs."""

import threading

import pytest
import torch
import torch.nn.functional as F

import gpubound as gb
from gpubound.graph import recording
from gpubound.kernels import dispatch, lora, norms
from gpubound.kernels.registry import OPS
from gpubound.kernels.triton.lora import _within
from gpubound.lora import model as early
from gpubound.models import language_model

from .cases import placed

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.mark.parametrize("base", [None, "int8"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_step_asks_for_what_was_named(dropout, base, monkeypatch):
    model = placed(**SIZES)
    gb.lora.add(model, 4, dropout=dropout, base=base)
    named, asked = named_and_asked(model, {}, monkeypatch)
    assert named == asked


def test_rows_with_adapters_of_their_own(monkeypatch):
    model = placed(**SIZES)
    for name in ("first", "second"):
        gb.lora.add(model, 4, name=name)
    with gb.lora.rows(model, ["first", "second"]):
        named, asked = named_and_asked(model, {"adapter_ids": torch.tensor([1, 0])}, monkeypatch)
    assert named == asked


def named_and_asked(model, more, monkeypatch):
    """What was said beforehand of a step's calls, and these calls."""
    asked = set()

    def noted(op, x, unable=None, shape=()):
        if op.startswith("lora") or shape[1:]:  # the objective's trial asks for no product with adapters
            asked.add((op, tuple(shape)))
        return dispatch.implementation(op, x, unable, shape)

    monkeypatch.setattr(lora, "implementation", noted)
    monkeypatch.setattr(norms, "implementation", noted)
    monkeypatch.setattr(
        "gpubound.layers.linear_product.has_fused_kernel", lambda format, x: format is early.DENSE
    )  # as on a GPU
    ids = torch.randint(64, (2, 16))
    step = gb.TrainStep(model.train(), "causal_lm", precision="fp32", graph="off")
    named = {*early.calls_of_any_batch(model), *early.calls_of_batch(model, {"input_ids": ids})}
    step([{"input_ids": ids, "labels": ids, **more}])
    step.close()
    return named, asked


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.25, "targets": ["q_proj", "up_proj"]}, {"base": "int8"}])
def test_adding_adapters_to_train_begins_what_a_step_will_ask_for(options, training, monkeypatch):
    """Before PEFT makes its layers, and the same after that."""
    model, begun = placed(**SIZES).bfloat16().train(training), []

    def start_self_tests(calls, device, dtype):
        begun.append(({*calls}, dtype, any(early.has_reader(module) for module in model.modules())))

    monkeypatch.setattr("gpubound.lora.model.start_self_tests", start_self_tests)
    gb.lora.add(model, 4, **options)
    asked = {*early.calls_of_any_batch(model)}
    assert asked and begun == ([(asked, torch.bfloat16, False), (asked, torch.bfloat16, True)] if training else [])


@pytest.mark.parametrize("base, products", [(None, {2}), ("int8", set())])
def test_adding_adapters_begins_the_products_that_are_large_in_most_batches(base, products, monkeypatch):
    """A product is named by the size of its batch, and 2^17 tokens make those of gate and up large here, not the others."""
    model, begun = placed(**SIZES).bfloat16().train(), []
    monkeypatch.setattr("gpubound.lora.model.start_self_tests", lambda calls, *_: begun.append({*calls}))
    monkeypatch.setattr(early, "EXPECTED_TOKENS", 1 << 17)
    gb.lora.add(model, 4, base=base)
    named = {shape for op, shape in begun[0] if op == "lora_product"}
    asked = {shape for _, shape in early.calls_of_batch(model, {"input_ids": torch.zeros(4, 1 << 15, dtype=torch.long)})}
    assert named == {shape for shape in asked if shape[0] == 2} and {shape[0] for shape in named} == products


def test_products_begin_before_the_checks_that_run_the_model(monkeypatch):
    model, order = placed(**SIZES), list[str]()
    gb.lora.add(model, 4)
    step = gb.TrainStep(model.train(), "causal_lm", precision="fp32", graph="off")
    model.register_forward_pre_hook(lambda *_: order.append("model"))
    monkeypatch.setattr("gpubound.train.device_step.start_self_tests", lambda calls, *_: order.extend({op for op, _ in calls}))
    ids = torch.randint(64, (2, 16))
    step([{"input_ids": ids, "labels": ids}])
    assert order[:2] == ["lora_product", "model"]


@pytest.mark.parametrize("adapters", [True, False])
def test_attention_begins_in_the_shapes_that_the_step_will_call(adapters, monkeypatch):
    """Behind the check of the first row, which sees fewer tokens of it."""
    model, begun, called = placed(**SIZES), [], set()
    if adapters:
        gb.lora.add(model, 4)
    own, there = F.scaled_dot_product_attention, torch.device("cuda", 0)

    def attend(*tensors, **options):
        if torch.is_grad_enabled():
            called.add(tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors))
        return own(*tensors, **options)

    class Now(threading.Thread):
        start = threading.Thread.run

    step = gb.TrainStep(model.train(), "causal_lm", precision="fp32", graph="off")
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(recording, "_compiles_attention", lambda: True)
    monkeypatch.setattr(recording, "_run", lambda stream, own, key, *_: begun.append(key))
    monkeypatch.setattr(recording.threading, "Thread", Now)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr("gpubound.train.step.attention_of", lambda *size: recording.attention_of(*size[:2], there))
    monkeypatch.setattr(language_model, "TOKENS", 9)
    ids = torch.randint(64, (2, 16))
    step([{"input_ids": ids, "labels": ids}])
    assert len(begun) == len(called) > 0 and {*begun} == called


def test_the_example_of_a_large_product_has_the_tiles_of_a_models():
    """Self-tests had 64 columns to a block, for a kernel that no call launched: q, k and v of 8b were compiled afterwards."""
    for size in (1, 2):
        *_, blocks, _ = OPS["lora_product"].example(torch.Generator(), size, 16, False, True, 3)
        assert _within(256, blocks) == _within(256, [4096, 1024, 1024]) == 256


def test_a_product_is_named_by_the_tokens_of_the_batch():
    """As its door will ask: qkv has 128 outputs here, gate and up 256, o and down, and the gradients of x, 64 and 128."""
    model = placed(**SIZES)
    gb.lora.add(model, 4)
    few, many = torch.zeros(2, 16, dtype=torch.long), torch.zeros(4, 1 << 15, dtype=torch.long)
    sizes = {
        rows: {shape[0] for _, shape in early.calls_of_batch(model, {"input_ids": ids})}
        for rows, ids in (("few", few), ("many", many))
    }
    assert sizes == {"few": {0}, "many": {1, 2}}  # 2^17 tokens
    assert {shape[0] for _, shape in early.calls_of_batch(model, (few,))} == {2}  # who knows how many
    assert {op for op, _ in early.calls_of_any_batch(model)} == {"lora_down", "lora_gradients", "rms_norm", "add_rms_norm"}
