"""PEFT's own adapters run through our products, in whatever state they are; what is not plain LoRA runs as PEFT wrote it."""

import copy

import pytest
import torch

import gpubound as gb
from gpubound import trace
from gpubound.layers.linear_product import _Product
from tests.messages import message

from ..place.models import assert_close, assert_near, batch, place, tiny, tokens, training_run
from .cases import placed

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}


def adapted(model, **options):
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(**ALL | options))


def second(model, **options):
    torch.manual_seed(4)
    model.add_adapter("second", peft.LoraConfig(**ALL | {"r": 2, "target_modules": ["q_proj", "down_proj"]} | options))
    return model


def both(order, **options):
    """(ours, through our products; theirs, as PEFT wrote it)"""
    if order == "adapters first":
        ours = adapted(tiny(), **options)
        place(ours, strict=True)
    else:
        ours = adapted(placed(), **options)
    return ours, adapted(tiny(), **options)


@pytest.fixture(params=["adapters first", "placed first"], scope="module")
def made(request):
    ours, theirs = both(request.param)
    return second(ours), second(theirs)


@pytest.fixture
def pair(made):
    """Copies: placing, of which most is verification, takes 0.2 s."""
    return copy.deepcopy(made)


def activate(*names):
    return lambda model: model.base_model.set_adapter(list(names))


def scale(model):
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.set_scale("default", 3.0)


STATES = {
    "as they came": lambda model: None,
    "the second": activate("second"),
    "both": activate("default", "second"),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "enabled again": lambda model: [model.base_model.disable_adapter_layers(), model.base_model.enable_adapter_layers()],
    "merged": lambda model: model.merge_adapter(),
    "unmerged": lambda model: [model.merge_adapter(), model.unmerge_adapter()],
    "another scale": scale,
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_in_every_state_of_theirs(pair, change, monkeypatch):
    """The state changes after the model has run, and is read at the next call."""
    ours, theirs = pair
    assert_close(training_run(ours, batch()), training_run(theirs, batch()))
    for model in pair:
        change(model)
    monkeypatch.setattr(peft.tuners.lora.Linear, "forward", lambda *_, **__: pytest.fail("called as it is"))
    got = ours(tokens()).logits
    gradients = training_run(ours, batch()) if got.requires_grad else {}
    monkeypatch.undo()
    assert_near(got, theirs(tokens()).logits)
    if gradients:
        assert_close(gradients, training_run(theirs, batch()))


def test_q_k_and_v_read_x_once(monkeypatch):
    ours, _ = both("adapters first")
    products, apply = [], _Product.apply
    monkeypatch.setattr(_Product, "apply", lambda *arguments: products.append(len(arguments[2])) or apply(*arguments))
    ours(tokens())
    assert products == [1] * 4 * 2, "a layer: qkv, o, gate and up, down, each with one adapter over all of it"


def test_disabled_while_merged(pair):
    """PEFT's forward unmerges then."""
    ours, theirs = pair
    for model in pair:
        model.merge_adapter()
        model.base_model.disable_adapter_layers()
    for _ in range(2):
        assert_near(ours(tokens()).logits, theirs(tokens()).logits)


def test_dropout_in_training_alone():
    ours, theirs = both("placed first", lora_dropout=0.5)
    assert_near(ours.eval()(tokens()).logits, theirs.eval()(tokens()).logits)
    ours.train()
    assert not torch.allclose(ours(tokens()).logits, ours(tokens()).logits)


UNUSUAL = {
    "DoRA": ({"use_dora": True}, "PEFT's adapter 'default' is a DoraLinearVariant, not plain LoRA"),
    "a bias": ({"lora_bias": True}, "PEFT's adapter 'default' adds a bias"),
}


@pytest.mark.filterwarnings("ignore:.*lora_bias.*")
@pytest.mark.parametrize("order", ["adapters first", "placed first"])
@pytest.mark.parametrize("options, why", UNUSUAL.values(), ids=UNUSUAL)
def test_what_is_not_plain_lora_runs_as_peft_wrote_it(options, why, order):
    trace.fallbacks.clear()
    ours, theirs = both(order, **options)
    assert_close(training_run(ours, batch()), training_run(theirs, batch()))
    assert {reason for _, reason in trace.fallbacks} == {f"{why}, so it is called"}


MIXED = [["default", "__base__"], ["second", "default"], ["second", "second"], ["__base__", "__base__"]]


def test_rows_of_their_own_adapters(pair, monkeypatch):
    """PEFT gives the names to hooks on its layers, some of which have one of the two adapters alone."""
    ours, theirs = (model.eval() for model in pair)
    want = [theirs(tokens(), adapter_names=names).logits for names in MIXED]
    monkeypatch.setattr(peft.tuners.lora.Linear, "forward", lambda *_, **__: pytest.fail("called as it is"))
    for names, logits in zip(MIXED, want):
        assert_near(ours(tokens(), adapter_names=names).logits, logits)


def test_rows_of_merged_adapters(pair):
    """Called as they are, and PEFT refuses."""
    ours, _ = pair
    ours.eval().merge_adapter()
    with pytest.raises(ValueError, check=message("lora/peft_layers:rows_of_merged_adapters")):
        ours(tokens(), adapter_names=MIXED[0])


def losses_of_ours(model, steps, **options):
    config = gb.AdamW(lr=1e-2, weight_decay=0.0)
    step = gb.TrainStep(model, "causal_lm", config, clip=1.0, precision="fp32", **options)
    return [step(batch()).read().loss for _ in range(steps)]
