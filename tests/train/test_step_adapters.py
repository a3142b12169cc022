"""TrainStep over a frozen model: adapters train as PEFT's do, and backward ends where nothing below it trains."""

import json
import pickle
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import gpubound as gb
from gpubound.lora.layers import adapted_layers
from gpubound.place import place
from tests.messages import message, refusal

from .objectives.test_causal_lm import SIZES, batch, llama
from .test_peft import adapted, run_ours, run_theirs

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks for it
]
aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


def lora(model, seed=1, **options):
    torch.manual_seed(seed)
    gb.lora.add(model, **{"rank": 4, "alpha": 8, "init": False} | options)
    return model


def placed(model):
    place(model, "cpu")
    return model


def three():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 3})).train()


def own(layers):
    torch.manual_seed(0)
    sizes = {"vocabulary": 97, "hidden": 32, "layers": layers, "heads": 4, "kv_heads": 4, "intermediate": 48}
    return gb.Decoder(gb.DecoderConfig(**sizes))


def peft_model(model, targets):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config)


class FrozenProducts(TorchDispatchMode):
    """Which frozen matrices are multiplied by, and how many products are none of theirs."""

    def __init__(self, model):
        super().__init__()
        self.matrices = {n: p for n, p in model.named_parameters() if p.dim() == 2 and not p.requires_grad}
        self.names, self.others, self.attention = set(), 0, 0

    def below_head(self):
        return {name for name in self.names if not name.endswith("lm_head.weight")}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket in PRODUCTS:
            tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            found = {name for name, p in self.matrices.items() if any(overlap(p, t) for t in tensors)}
            self.names |= found
            self.others += not found
        self.attention += "attention" in op.name() and "backward" in op.name()
        return op(*args, **kwargs or {})


def overlap(p, t):
    return p.data_ptr() < t.data_ptr() + t.nbytes and t.data_ptr() < p.data_ptr() + p.nbytes


WAYS = {
    "our decoder": lambda targets: lora(own(3), targets=targets),
    "transformers": lambda targets: lora(three(), targets=targets),
    "placed": lambda targets: lora(placed(three()), targets=targets),
    "PEFT": lambda targets: peft_model(three(), targets),
    "PEFT, placed": lambda targets: placed(peft_model(three(), targets)),
}


@pytest.mark.parametrize("recompute", ["cheap", "blocks"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_backward_ends_at_the_first_adapter(way, recompute):
    """On up_proj of the second of three layers: g goes through the third layer's products and through this one's down_proj,
    and no farther. What is below is not computed again, either."""
    model = way(r".*layers\.1\.mlp\.up_proj").train()
    step = gb.TrainStep(model, "causal_lm", "adamw", precision="fp32", graph="off", recompute=recompute)
    total, _ = step._graphs.step.loss(model, batch(0), scale=torch.ones(()))
    with FrozenProducts(model) as seen:
        total.backward()
    ends = {name.partition("layers.")[2].removesuffix(".weight").replace(".base_layer", "") for name in seen.below_head()}
    above = {f"2.self_attn.{end}_proj" for end in "qkvo"} | {f"2.mlp.{end}_proj" for end in ("gate", "up", "down")}
    if recompute == "cheap":
        assert ends == above | {"1.mlp.down_proj"}
        assert seen.others == 3, "b's g, and the gradients of a and b"
    else:
        assert above | {"1.mlp.down_proj"} <= ends and not any(end.startswith("0.") for end in ends)
    assert seen.attention == 1
    step.close()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_above_the_last_layer_there_is_next_to_nothing(way):
    """The last product's adapter: no frozen weight is multiplied by."""
    model = way(r".*layers\.2\.mlp\.down_proj").train()
    step = gb.TrainStep(model, "causal_lm", "adamw", precision="fp32", graph="off")
    total, _ = step._graphs.step.loss(model, batch(0), scale=torch.ones(()))
    with FrozenProducts(model) as seen:
        total.backward()
    assert (seen.below_head(), seen.others, seen.attention) == (set(), 3, 0)
    step.close()


def test_the_optimizer_holds_adapters_alone():
    model = lora(own(2))
    size = sum(p.numel() for p in gb.lora.parameters(model))
    step = gb.TrainStep(model, "causal_lm", "adamw", precision="bf16")
    state = step.state_dict()
    assert {n.split(".", 1)[1] for n in state if n.startswith(("m.", "v.", "master."))} == {
        n for n, _ in model.named_parameters() if ".lora_" in n
    }
    assert step.memory["moments"] == 8 * size and step.memory["gradient"] == 4 * size
    step.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["our decoder", "placed", "PEFT, placed"])
def test_micro_batches_are_one_batch(way):
    """fp32: the sums' order alone differs, as in test_step.py; 1e-6 of a gradient is 8 units in its last place."""

    def trained(parts):
        torch.manual_seed(2)
        model = WAYS[way]("all-linear" if "PEFT" not in way else ["q_proj", "v_proj", "down_proj"]).train()
        step = gb.TrainStep(model, "causal_lm", "adamw", precision="fp32", accumulate=parts, clip=1.0)
        whole = batch(3, rows=4)
        pieces = [{key: t.chunk(parts)[i] for key, t in whole.items()} for i in range(parts)]
        reports = [step(pieces).read() for _ in range(3)]
        step.close()
        return reports, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    (one, want), (cut, got) = trained(1), trained(4)
    for a, b in zip(one, cut):
        assert (b.loss, b.grad_norm) == pytest.approx((a.loss, a.grad_norm), rel=2e-6)
        assert a.tokens == b.tokens
    for name in want:
        assert (got[name] - want[name]).norm() <= 1e-5 * want[name].norm(), name


@pytest.mark.slow
@pytest.mark.parametrize(("place_it", "recompute"), [(False, "blocks"), (True, "cheap"), (True, "blocks")])
def test_twenty_steps_are_pefts(tmp_path, place_it, recompute):
    """The same adapters by PEFT and plain torch: AdamW, clip, fp32. Losses within 1e-5."""
    peft = pytest.importorskip("peft")
    ours = lora(placed(llama()) if place_it else llama(), init=True).train()
    gb.lora.save(ours, tmp_path)
    theirs = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True).train()
    want = list(run_theirs(theirs, steps=20))
    got = list(run_ours(ours, steps=20, recompute=recompute))
    assert max(abs(a - b) for a, b in zip(got, want)) <= 1e-5
    assert all(p.any() for p in gb.lora.parameters(ours)), "b was zeros"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["our decoder", "placed", "PEFT, placed"])
def test_fp16_halves_its_loss_scale_until_it_fits(way):
    """A step that overflows leaves every adapter as it was; from then on they train."""
    model = WAYS[way](["q_proj", "up_proj"]).train()
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.half()
    step = gb.TrainStep(model, "causal_lm", gb.AdamW(lr=1e-2), precision="fp16", graph="off", clip=1.0)
    step.state_dict()["state"][2] = 2.0**18
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    first = step(batch(0)).read()
    assert first.skipped == 1 and first.loss_scale == 2.0**17 and all(map(torch.equal, before, trained))
    reports = [step(batch(0)).read() for _ in range(24)]
    assert reports[-1].updates >= 10 and reports[-1].loss < first.loss and torch.isfinite(trained[0]).all()
    step.close()


@pytest.mark.slow
def test_what_it_has_trained_of_a_wrapped_model_peft_saves(tmp_path):
    """What `TrainStep` has trained, PEFT saves and reads."""
    peft = pytest.importorskip("peft")
    model = placed(adapted(llama()))
    list(run_ours(model, steps=2, graph="require"))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    again = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
    inputs = {"input_ids": batch(0)["input_ids"]}
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**inputs).logits, again(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_a_frozen_model_has_nothing_to_train():
    model = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    with pytest.raises(ValueError, check=message("train/step_adapters:a_frozen_model_has_nothi")):
        gb.TrainStep(model, lambda m, b: (m(b).sum(), 1), "adamw")


def test_no_adapter_comes_or_goes_while_a_step_has_the_model(tmp_path):
    """A step trains the parameters that it found when it was made."""
    model = lora(own(2).train())
    gb.lora.save(model, tmp_path)
    step = gb.TrainStep(model, "causal_lm", "adamw", precision="fp32")
    calls = {
        "add": lambda: gb.lora.add(model, 4, name="new"),
        "load": lambda: gb.lora.load(model, tmp_path, name="new"),
        "remove": lambda: gb.lora.remove(model),
    }
    for name, call in calls.items():
        assert refusal(ValueError, call) == message("train/step_adapters:no_adapter_comes_or_goes", name)
    gb.lora.load(model, tmp_path)  # values alone
    gb.lora.remove(pickle.loads(pickle.dumps(model)))  # a copy is in no step
    step.close()
    calls["remove"]()
    assert not gb.lora.parameters(model)


def test_another_library_that_sums_into_main_grad_is_named():
    """Megatron's buffers are in no TrainStep that could be closed."""
    model = own(1)
    p = model.get_parameter(name := "model.layers.0.mlp.up_proj.weight")
    p.main_grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} has a main_grad, in which another library"):
        gb.lora.add(model, 4)


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["off", "require"])
def test_a_merged_adapter_is_not_left_untrained_unseen(graph):
    model = lora(lora(own(2).train()), name="second", seed=2)
    step = gb.TrainStep(model, "causal_lm", "adamw", precision="fp32", graph=graph)
    step(batch(0))
    gb.lora.merge(model, "second")
    before, batches = [p.clone() for p in gb.lora.parameters(model)], iter([batch(1)])
    said = refusal(ValueError, lambda: step(batches))
    assert "'second'" in said and "q_proj" in said
    gb.lora.unmerge(model)
    assert step(batches) is not None, "the refused step has drawn no batch"
    assert not any(p.equal(q) for p, q in zip(gb.lora.parameters(model), before))


def test_a_merged_adapter_that_does_not_train_is_a_part_of_the_base():
    model = lora(lora(own(2).train()), name="second", seed=2)
    for p in gb.lora.parameters(model, "second"):
        p.requires_grad_(False)
    gb.lora.merge(model, "second")
    assert gb.TrainStep(model, "causal_lm", "adamw", precision="fp32")(batch(0)) is not None


def frozen_second(**options):
    model = lora(lora(own(2).train(), **options), name="second", seed=2, **options)
    for p in gb.lora.parameters(model, "second"):
        p.requires_grad_(False)
    merged = [lambda: gb.lora.merge(model, "second"), lambda: gb.lora.unmerge(model)]
    return model, [*merged, lambda: gb.lora.disable(model, "second")], [2, 4, 4, 4]


def pefts_second():
    """It lies on other layers than the one that trains."""
    peft = pytest.importorskip("peft")
    model = placed(peft_model(three(), ["q_proj", "v_proj"])).train()
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    for name, p in model.named_parameters():
        p.requires_grad_("default" in name)
    layers = [m for m in model.modules() if hasattr(m, "scale_layer")]
    merged = [lambda: model.merge_adapter(["second"]), lambda: [layer.unmerge() for layer in layers if layer.merged]]
    return model, [*merged, lambda: [layer.scale_layer(2.0) for layer in layers]], [2, 4, 4, 6]


def scaled():
    model = lora(placed(three()))
    layers = [layer for _, layer in adapted_layers(model)]

    def scale(by):
        for layer in layers:
            layer.scaling["default"] *= by

    return model, [lambda: scale(2), lambda: scale(0.5)], [2, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("made", [frozen_second, pefts_second, scaled])
def test_adapters_that_are_merged_or_switched_make_another_graph(made):
    """A graph has baked in what they add: behind a merge it would add it a second time. Back again, the first one serves."""
    model, changes, want = made()
    step = gb.TrainStep(model, "causal_lm", "adamw", precision="fp32", graph="require")
    captured = []
    for change in (lambda: None, *changes):
        change()
        step(batch(0))
        captured.append(len(step.captured))
    assert captured == want


def test_what_peft_has_merged_is_not_left_untrained_unseen():
    """PEFT computes none of a layer's adapters once some are merged into it."""
    model = placed(peft_model(three(), ["q_proj"])).train()
    model.get_submodule("base_model.model.model.norm").requires_grad_(True)
    step = gb.TrainStep(model, "causal_lm", "adamw", precision="fp32")
    step(batch(0))
    model.merge_adapter()
    batches = iter([batch(1)])
    said = refusal(ValueError, lambda: step(batches))
    assert "'default'" in said and "q_proj" in said
    model.unmerge_adapter()
    assert step(batches) is not None, "the refused step has drawn no batch"
