"""Runs with a `lora` section: adapters alone train and are kept, resumed bit for bit, and exported."""

import inspect
import json
import os
import shutil
from dataclasses import fields
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from gpubound import lora
from gpubound.data import train_tokenizer
from gpubound.errors import DataError
from gpubound.generate.batches import open_saved
from gpubound.layers.quantized_base import Base
from gpubound.models import load_hf
from gpubound.models.llama import checkpoint as llama
from gpubound.train.fields import Lora
from gpubound.train.prepare import build_model, prepare
from gpubound.train.recipe import Recipe
from gpubound.train.records import flops_of
from tests.messages import message, refusal, refusals

from .runs import CHATS, assert_same, losses, recipe, texts, train

pytestmark = pytest.mark.usefixtures("one_thread")
RANK = {"rank": 4, "alpha": 8, "dropout": 0.1}


def adapting(corpus, base, out, **changes) -> Recipe:
    return recipe(corpus, out, **{"model": str(base), "lora": RANK, "lr": 1e-2} | changes)


def frozen(model):
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def logits_of(model):
    with torch.no_grad():
        out = model.eval()(torch.arange(24).view(2, 12))
    return out.logits if hasattr(out, "logits") else out


@pytest.mark.slow
def test_adapters_alone_train_and_are_kept(corpus, base, tmp_path):
    run, _ = train(adapting(corpus, base, tmp_path / "run"))
    assert all(p.any() for p in lora.parameters(run.model)), "b was zeros"
    whole = dict(load_hf(base).named_parameters())
    still = {name.replace(".base_layer", ""): p for name, p in frozen(run.model).items()}
    assert still.keys() == whole.keys() and all(torch.equal(p, whole[name]) for name, p in still.items())
    kept = run.checkpoints.latest().tensors()
    trained = {name for name, p in run.model.named_parameters() if p.requires_grad}
    assert {n.removeprefix("model.") for n in kept if n.startswith("model.")} == trained and len(trained) == 2 * 2 * 7
    assert {n.removeprefix("step.m.") for n in kept if n.startswith("step.m.")} == trained


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"precision": "bf16", "ema": 0.5}, {"precision": "fp16"}, {"lora": RANK | {"base": "nf4"}}], ids=str
)
def test_resumed_bit_for_bit(corpus, base, tmp_path, options):
    """Dropout's masks, too."""
    options = {"steps": 5, "eval_every": 3} | options
    whole, records = train(adapting(corpus, base, tmp_path / "whole", **options))
    train(adapting(corpus, base, tmp_path / "halved", **options), until=2)
    second, after = train(adapting(corpus, base, tmp_path / "halved", **options), resume=True)
    assert losses(after) == {step: loss for step, loss in losses(records).items() if step > 2} and len(after) == 3
    assert second.evaluations == whole.evaluations
    assert_same(second, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"recompute": "blocks", "lora": {"rank": 4}}, {"precision": "fp16"}], ids=str)
def test_resumed_bit_for_bit_on_a_gpu(corpus, base, tmp_path, options):
    options = {"device": "cuda", "eval_every": 5} | options
    whole, _ = train(adapting(corpus, base, tmp_path / "whole", **options))
    assert whole.step.captured
    train(adapting(corpus, base, tmp_path / "halved", **options), until=7)
    second, _ = train(adapting(corpus, base, tmp_path / "halved", **options), resume=True)
    assert_same(second, whole)


@pytest.mark.slow
def test_phases_go_on_with_the_same_adapters(two_phases, base, tmp_path):
    options = {"model": str(base), "lora": RANK, **two_phases}
    del options["vocabulary"]
    whole, records = train(recipe("", tmp_path / "whole", **options))
    assert whole.phase == 1 and [r["step"] for r in records] == list(range(1, 12))
    train(recipe("", tmp_path / "halved", **options), until=8)
    second, _ = train(recipe("", tmp_path / "halved", **options), resume=True)
    assert_same(second, whole)
    assert 0 < records[6]["tokens"] < 4 * 32 * 0.7, "prompts do not count"


@pytest.mark.slow
@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_the_best_adapters_are_exported(corpus, base, tmp_path, monkeypatch, ema):
    run = prepare(adapting(corpus, base, tmp_path / "run", steps=9, eval_every=3, keep=1, ema=ema), progress=False)
    coming = iter([3.0, 2.0, 2.5])
    monkeypatch.setattr(run, "validate", lambda: {"held_out": next(coming)})
    run.go(lambda record: None)
    live = {name: t.clone() for name, t in run.model.state_dict().items()}
    written = load_file(run.export(tmp_path / "adapter") / "adapter_model.safetensors")
    best, name = run.checkpoints.at(6).tensors(), "model.layers.1.mlp.up_proj"
    part = "average" if ema else "model"
    assert torch.equal(written[f"base_model.model.{name}.lora_A.weight"], best[f"{part}.{name}.lora_A.default.weight"])
    assert torch.equal(written[f"base_model.model.{name}.lora_B.weight"], best[f"{part}.{name}.lora_B.default.weight"])
    assert all(torch.equal(live[name], t) for name, t in run.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_what_is_exported_is_what_was_trained(corpus, base, tmp_path):
    """The adapters, read by PEFT and here, and the merged model, read by transformers and here."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    run, _ = train(adapting(corpus, base, tmp_path / "run", steps=8))
    want = logits_of(run.model)
    folder = run.export(tmp_path / "adapter")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(logits_of(theirs), want, atol=1e-2)
    ours = load_hf(base)
    lora.load(ours, folder)
    about = json.loads((folder / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(base) and about["task_type"] == "CAUSAL_LM"
    merged = run.export(tmp_path / "merged", merge=True)
    for model in (
        ours,
        peft.PeftModel.from_pretrained(theirs, folder),
        peft.AutoPeftModelForCausalLM.from_pretrained(folder),
        load_hf(merged),
        transformers.AutoModelForCausalLM.from_pretrained(merged),
    ):
        torch.testing.assert_close(logits_of(model), want, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits_of(run.model), want), "the run goes on with its adapters"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_over_a_base_in_fewer_bits(corpus, base, tmp_path, format):
    """A checkpoint holds no codes, and what is merged computes what was trained: the rounded base and its adapters."""
    run, _ = train(adapting(corpus, base, tmp_path / "run", steps=8, lora={"rank": 4, "alpha": 8, "base": format}))
    assert run.model.model.layers[0].mlp.up_proj.weight.dtype is not torch.float32
    kept = [name for name in run.checkpoints.latest().tensors() if name.startswith("model.")]
    assert len(kept) == 2 * 2 * 7 and all(".lora_" in name for name in kept)
    want = logits_of(run.model)
    torch.testing.assert_close(logits_of(load_hf(run.export(tmp_path / "merged", merge=True))), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits_of(open_saved(tmp_path / "run", torch.device("cpu")).model), want, rtol=1e-4, atol=1e-5)
    ours = load_hf(base)
    lora.load(ours, run.export(tmp_path / "adapter"))
    assert not torch.allclose(logits_of(ours), want, atol=1e-5), "the base has numbers there"
    lora.quantize_base(ours, format)
    torch.testing.assert_close(logits_of(ours), want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_another_base_is_refused(corpus, base, tmp_path):
    copy = shutil.copytree(base, tmp_path / "base")
    train(adapting(corpus, copy, tmp_path / "run", steps=4))
    (found,) = (tmp_path / "run" / "checkpoints").iterdir()
    model = load_hf(copy)
    with torch.no_grad():
        model.model.norm.weight[3] += 1
    from gpubound.models import save_hf

    save_hf(model, copy, overwrite=True)
    said = refusal(DataError, lambda: prepare(adapting(corpus, copy, tmp_path / "run", steps=8), resume=True, progress=False))
    assert said == message("train/adapters:another_base_is_refused", found, copy)


def test_a_target_that_is_not_there_is_refused_before_a_corpus_is_built(base, tmp_path):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    options = {"model": str(base), "data": (str(tmp_path / "chats.jsonl"),), "lora": {"rank": 4, "targets": ["q_prj"]}}
    said = refusal(ValueError, lambda: prepare(recipe("", tmp_path / "run", **options), progress=False))
    assert said.startswith("lora.add: no layer of Decoder is named 'q_prj'; ")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_changed_section_is_refused(corpus, base, tmp_path):
    train(adapting(corpus, base, tmp_path, steps=2))
    spelled = RANK | {"alpha": 8.0, "targets": "all-linear", "rslora": False, "init": True, "base": None}
    for same in (base, os.path.relpath(base)):
        assert prepare(adapting(corpus, same, tmp_path, steps=4, lora=spelled), resume=True, progress=False).done == 2
    with pytest.raises(ValueError, check=message("train/adapters:a_changed_section_is_ref")):
        prepare(adapting(corpus, base, tmp_path, steps=4, lora=RANK | {"rank": 8}), resume=True, progress=False)


def test_its_options_are_those_of_add():
    theirs = {n: p.default for n, p in inspect.signature(lora.add).parameters.items() if n not in ("model", "name")}
    ours = {field.name: field.default for field in fields(Lora)}
    assert {n: d for n, d in ours.items() if n != "rank"} == {n: d for n, d in theirs.items() if n != "rank"}


def test_a_wrong_section():
    eight = {"rank": 8}
    wrong = [
        {"alpha": 8}, eight | {"target": "q_proj"}, {"rank": 8.5}, {"rank": 0}, eight | {"alpha": "much"},
        eight | {"alpha": float("inf")}, eight | {"alpha": 0}, eight | {"targets": [1]}, eight | {"dropout": 1},
        eight | {"rslora": "yes"}, eight | {"init": "pissa"}, eight | {"base": "nf3"},
    ]  # fmt: skip
    refusals("train/adapters:a_wrong_section", *(partial(Recipe, model="some/folder", lora=section) for section in wrong))


def test_what_does_not_go_with_adapters():
    wrong = {"model": "10m"}, {"optimizer": "muon"}, {"precision": "fp8"}
    calls = [partial(Recipe, **{"model": "some/folder", "lora": RANK} | changes) for changes in wrong]
    refusals("train/adapters:what_does_not_go_with_ad", *calls)


def test_the_work_of_a_token(base):
    """Counted here product by product: an adapter on the second of two layers cuts the first one's backward."""
    from gpubound.models.llama.checkpoint import sizes

    model = load_hf(base)
    matrices = {n: p.numel() for n, p in model.named_parameters() if p.dim() == 2}  # the head is tied to the embedding
    every, first = sum(matrices.values()), sum(n for name, n in matrices.items() if ".layers.0." in name)
    assert flops_of(model, sizes(model)).flops_per_token(10) == 6 * every + 6 * 2 * 64 * 10
    lora.add(model, 4, targets=[r"model.layers.1.mlp.up_proj"])
    assert flops_of(model, sizes(model)).flops_per_token(10) == (
        6 * 4 * (64 + 128) + 4 * (every - first) + 2 * first + (6 + 2) * 64 * 10
    )
    before = flops_of(model, sizes(model))
    lora.quantize_base(model, "nf4")
    assert flops_of(model, sizes(model)) == before, "codes stand for as many numbers"


@pytest.mark.parametrize("format", ["nf4", "fp8"])
def test_a_base_is_quantised_as_it_is_read(corpus, base, tmp_path, format, monkeypatch):
    """The same codes as of a model that was loaded first, with one weight at a time in the computing dtype."""
    todo = adapting(corpus, base, tmp_path, precision="bf16", lora={"rank": 2, "base": format})
    whole = load_hf(base, dtype=torch.bfloat16)
    lora.quantize_base(whole, format)
    model, unquantised = [], []

    def counting(child, layer, kind, begin=Base.__init__):
        linear = [m.weight for m in model[0].modules() if isinstance(m, torch.nn.Linear)]
        unquantised.append(sum(w.dtype is torch.bfloat16 and not w.is_meta for w in linear))
        begin(child, layer, kind)

    monkeypatch.setattr(llama, "unread", lambda folder, read=llama.unread: model.append(read(folder)) or model[0])
    monkeypatch.setattr(Base, "__init__", counting)
    ours = build_model(todo, train_tokenizer(texts(), 300), torch.device("cpu"))
    assert unquantised == [2] * 14  # with the head
    state = whole.state_dict()
    assert ours.state_dict().keys() == state.keys()
    assert [name for name, t in ours.state_dict().items() if not t.view(torch.uint8).equal(state[name].view(torch.uint8))] == []
    assert torch.equal(logits_of(ours), logits_of(whole))
