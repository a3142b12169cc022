"""TrainStep on PEFT's models: adapters train as in plain torch, and PEFT's wrapper is not taken for the model's trunk."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gpubound import trace
from gpubound.place import place
from gpubound.train import AdamW, TrainStep
from tests.messages import message

from .objectives.test_causal_lm import SIZES, batch

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # PEFT asks for a name that transformers has renamed
]


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).train()


def adapted(model, **options):
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM"} | options)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:  # zeros, with which the first gradient of A is zero too
                p.normal_(0.0, 0.1)
    return model


def placed(model):
    place(model, "cpu")
    return model


WAYS = {
    "plain": lambda: adapted(llama()),
    "then placed": lambda: placed(adapted(llama(), target_modules="all-linear")),
    "of a placed model": lambda: adapted(placed(llama())),
    "a mixed model": lambda: peft.PeftMixedModel(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"]), "a"),
    "injected": lambda: peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["q_proj"]), llama()),
}


def run_theirs(model, steps=3):
    """Plain PEFT and torch: what Trainer does."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for number in range(steps):
        optimizer.zero_grad()
        loss = model(**batch(number)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        yield loss.item()


def run_ours(model, steps=3, **options):
    config = AdamW(lr=1e-2, decays=lambda name, parameter: True)
    step = TrainStep(model, "causal_lm", config, clip=1.0, **{"precision": "fp32", "graph": "off"} | options)
    for number in range(steps):
        yield step(batch(number)).read().loss


def assert_same_adapters(ours, theirs):
    trained = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        if p.requires_grad:
            assert (p - trained[name]).norm() <= 1e-4 * trained[name].norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_adapters_train_as_in_plain_torch(way, monkeypatch):
    monkeypatch.setattr("gpubound.train.objectives.word_loss.fallback", lambda what, why: pytest.fail(why))
    ours = way()
    theirs = copy.deepcopy(ours)
    assert list(run_ours(ours)) == pytest.approx(list(run_theirs(theirs)), rel=1e-5)
    assert_same_adapters(ours, theirs)


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}], ids=str)
def test_an_adapted_head_is_asked_for_its_logits(options):
    ours = adapted(llama(), **options)
    theirs = copy.deepcopy(ours)
    with trace.strict(), pytest.raises(trace.FallbackError, check=message("train/peft:an_adapted_head_is_asked")):
        next(run_ours(copy.deepcopy(ours)))
    assert list(run_ours(ours)) == pytest.approx(list(run_theirs(theirs)), rel=1e-5)
    assert_same_adapters(ours, theirs)


@pytest.mark.slow
def test_a_captured_step_too():
    """Placed: the masks that transformers makes read the device."""
    ours = placed(adapted(llama()))
    theirs = copy.deepcopy(ours)
    assert list(run_ours(ours, graph="require")) == pytest.approx(list(run_theirs(theirs)), rel=1e-5)


def test_bf16_adapters_over_a_frozen_model():
    """The adapters are in bf16 with fp32 masters, the frozen weights stay as they are: the losses differ by rounding."""
    ours = adapted(llama())
    frozen = {name: p.detach().clone() for name, p in ours.named_parameters() if not p.requires_grad}
    want = list(run_theirs(copy.deepcopy(ours)))
    assert list(run_ours(ours, precision="bf16")) == pytest.approx(want, rel=2e-2)
    assert all(p.equal(frozen[name]) for name, p in ours.named_parameters() if name in frozen)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # PEFT gives a cache by its old name
def test_prefix_tuning_runs_its_own_forward():
    """PEFT hands the trunk a cache of learned keys and values: below the wrapper they are not to be had."""
    torch.manual_seed(0)
    ours = peft.get_peft_model(llama(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    theirs = copy.deepcopy(ours)
    assert list(run_ours(ours)) == pytest.approx(list(run_theirs(theirs)), rel=1e-5)


def test_a_prompt_of_its_own_is_named():
    model = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, check=message("train/peft:a_prompt_of_its_own_is_n")):
        next(run_ours(model))
