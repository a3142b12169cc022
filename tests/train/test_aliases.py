"""Configs of other trainers, and the names of their options, as recipes."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from gpubound import trace
from gpubound.cli import main
from gpubound.cli.train_options import OPTIONS, from_file
from gpubound.train.aliases import ALIASES, NO_EFFECT, NOT_HERE, READ, RECIPE, SAME, advice, convert, read
from gpubound.train.recipe import Recipe
from gpubound.train.translate import translate
from tests.messages import refusal

COMMON = {
    "learning_rate": ("2e-4", {"lr": 2e-4}),
    "per_device_train_batch_size": (2, {"micro_batch": 2}),
    "gradient_accumulation_steps": (4, {"accumulate": 4}),
    "max_steps": (7, {"steps": 7}),
    "max_seq_length": (64, {"seq": 64}),
    "output_dir": ("there", {"out": "there"}),
    "max_grad_norm": (0, {"clip": None}),
    "warmup_ratio": (0.1, {"warmup": 0.1}),
    "warmup-steps": (3, {"warmup": 3}),
    "lr_scheduler_type": ("cosine", {"schedule": "cosine", "final": 0}),
    "optim": ("paged_adamw_8bit", {"optimizer": "adamw8bit"}),
    "bf16": (True, {"precision": "bf16"}),
    "torch_dtype": ("torch.bfloat16", {"precision": "bf16"}),
    "gradient_checkpointing": (True, {"recompute": "blocks"}),
    "save_steps": (5, {"save_every": 5}),
    "eval_steps": (5, {"eval_every": 5}),
    "model_name_or_path": ("tiny", {"model": "tiny"}),
    "train_file": ("a.txt", {"data": ("a.txt",)}),
    "val_set_size": (0.1, {"validation": 0.1}),
}


def make_recipe(**values) -> Recipe:
    return Recipe(**convert(values, RECIPE, "recipe"))


@pytest.mark.parametrize("name, value, ours", [(name, *row) for name, row in COMMON.items()], ids=COMMON)
def test_a_key_of_another_trainer(name, value, ours):
    recipe = dataclasses.asdict(make_recipe(**{name: value}))
    assert {key: recipe[key] for key in ours} == ours


def test_every_name_has_one_meaning():
    tables = [SAME, READ, NO_EFFECT, NOT_HERE]
    assert sum(map(len, tables)) == len(ALIASES) and not ALIASES & OPTIONS.keys()
    assert {key.partition(".")[0] for key in SAME.values()} <= OPTIONS.keys() | {
        "epochs",
        "betas",
        "eps",
        "eval_data",
        "eval_batches",
        "chat_template",
    }


def test_one_line_says_what_was_read(monkeypatch):
    said = []
    monkeypatch.setattr("gpubound.train.aliases.notice", said.append)
    values = {"learning_rate": 1e-3, "seed": 3, "dataloader_num_workers": 4, "num_workers": 2, "push_to_hub": False}
    assert read(values, OPTIONS) == {"lr": 1e-3, "seed": 3}
    (line,) = said
    assert "learning_rate as lr = 0.001" in line and "dataloader_num_workers, num_workers: " in line and "seed" not in line


@pytest.mark.parametrize(
    "values, ours",
    [
        ({"bf16": True, "fp16": False, "tf32": True}, {"precision": "bf16"}),
        ({"bf16": False, "fp16": True}, {"precision": "fp16"}),
        ({"bf16": False, "fp16": False}, {"precision": "fp32"}),
        ({"warmup_steps": 0, "warmup_ratio": 0.03}, {"warmup": 0.03}),
        ({"warmup_steps": 0}, {"warmup": 0}),
        ({"max_steps": -1, "num_train_epochs": 3}, {"epochs": 3}),
        ({"max_steps": 100, "num_train_epochs": 3}, {"steps": 100}),
        ({"eval_strategy": "no", "eval_steps": 50}, {"eval_every": 0}),
        ({"eval_strategy": "epoch", "eval_steps": 50}, {"evals_per_epoch": 1.0}),
        ({"save_strategy": "epoch"}, {"saves_per_epoch": 1.0}),
        ({"adam_beta2": 0.999, "adam_beta1": 0.8}, {"betas": (0.8, 0.999)}),
        ({"lora_r": 8, "lora_alpha": 16, "load_in_4bit": True}, {"lora": {"rank": 8, "alpha": 16, "base": "nf4"}}),
        ({"lora": {"r": 8, "target_modules": "all-linear"}}, {"lora": {"rank": 8, "targets": "all-linear"}}),
        ({"phases": [{"learning_rate": 1e-3}]}, {"phases": [{"lr": 1e-3}]}),
        ({"packing": True, "train_on_inputs": False}, {"pack": "examples", "train_on": "assistant"}),
        ({"sample_packing": False, "assistant_only_loss": False}, {"pack": "none", "train_on": "all"}),
        ({"report_to": ["wandb"]}, {"log": "wandb"}),
        ({"report_to": "none", "max_seq_length": None}, {}),
        ({"lr_scheduler_type": "linear", "final": 0.2}, {"schedule": "linear", "final": 0.2}),
    ],
)
def test_names_that_are_read_together(values, ours):
    assert read(values, OPTIONS) == ours


@pytest.mark.parametrize(
    "values, names",
    [
        ({"lr": 1e-3, "learning_rate": 2e-3}, ["lr", "learning_rate", "0.001", "0.002"]),
        ({"bf16": True, "fp16": True}, ["bf16", "fp16"]),
        ({"push_to_hub": True}, ["push_to_hub", "--export"]),
        ({"deepspeed": "zero3.json"}, ["deepspeed", "fsdp"]),
        ({"optim": "adafactor"}, ["optim", "adafactor", "muon"]),
        ({"warmup_ratio": 2}, ["warmup_ratio", "warmup_steps"]),
        ({"report_to": ["wandb", "tensorboard"]}, ["report_to"]),
        ({"resume_from_checkpoint": "some/checkpoint-9"}, ["resume_from_checkpoint", "out"]),
    ],
)
def test_what_is_refused(values, names):
    refused = refusal(ValueError, lambda: read(values, OPTIONS))
    assert all(name in refused for name in names)


@pytest.mark.parametrize(
    "data, paths, weights",
    [
        ("a", ("a",), ()),
        (["a", "b"], ("a", "b"), ()),
        ([{"path": "a", "weight": 2}, "b"], ("a", "b"), (2.0, 1.0)),
        ({"path": "a", "weight": "5e-1"}, ("a",), (0.5,)),
        ({"a": 2, "b": 0.5}, ("a", "b"), (2.0, 0.5)),
    ],
)
def test_sources_with_weights(data, paths, weights):
    """Of a run, and of a phase."""
    recipe = make_recipe(model="tiny", data=data)
    assert (recipe.data, recipe.data_weights) == (paths, weights)
    ((_, phase),) = make_recipe(model="tiny", data="x", data_weights=3, phases=[{"name": "p", "data": data}]).stages()
    assert (phase.data, phase.data_weights) == (paths, weights)


@pytest.mark.parametrize(
    "values, names",
    [
        ({"data": [{"path": "a", "type": "alpaca"}]}, ["alpaca", "weight: 2", "format"]),
        ({"data": [{"path": "a", "weight": 0}]}, ["data_weights", "above 0"]),
        ({"data": ["a", "b"], "data_weights": [1]}, ["data_weights", "2 paths"]),
        ({"data": {"a": 2}, "data_weights": [1]}, ["data_weights", "give one of them"]),
        ({"data": [{"path": "a", "weight": "many"}]}, ["data_weights", "many"]),
        ({"eval_data": [{"path": "a", "weight": 2}]}, ["eval_data", "weight"]),
        ({"buckets": 9}, ["buckets", "8"]),
        ({"buckets": 2, "pack": "examples"}, ["buckets", "'examples'"]),
        ({"eval_every": 3, "evals_per_epoch": 1}, ["eval_every", "evals_per_epoch"]),
        ({"saves_per_epoch": -1}, ["saves_per_epoch", "-1"]),
    ],
)
def test_recipes_that_are_refused(values, names):
    refused = refusal(ValueError, lambda: make_recipe(model="tiny", **values))
    assert all(name in refused for name in names), refused


def test_equal_values_under_two_names(monkeypatch):
    monkeypatch.setattr(trace, "_printed", set())
    assert read({"lr": 1e-3, "learning_rate": 1e-3}, OPTIONS) == {"lr": 1e-3}


def test_a_hint_goes_by_the_meaning():
    known = [field.name for field in dataclasses.fields(Recipe)]
    assert "'lr'" in advice("learn_rate", known) and "'seq'" in advice("max_sequence_length", known)
    assert "'steps'" in advice("stepps", known) and "shuffled" in advice("shufle", known)
    assert "option of dpo, as in objective_options: {beta: ...}" in advice("beta", known)
    assert len(advice("qqqq", known)) < 60, "no list of all keys"


FOLDER = Path(__file__).parent / "configs"
AXOLOTL, TRL, LLAMAFACTORY, TORCHTUNE = (
    (FOLDER / f"{name}.yaml").read_text() for name in ("axolotl", "trl", "llamafactory", "torchtune")
)
RECIPES = yaml.safe_load((FOLDER / "recipes.yaml").read_text())


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_of_another_tool(name):
    found = translate(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()), OPTIONS)
    assert found.values == RECIPES[name]["values"]
    assert [line.partition(":")[0] for line in found.missing] == RECIPES[name]["missing"]


@pytest.mark.parametrize(
    "text",
    [AXOLOTL.replace("adapter: qlora", "").replace("load_in_4bit: true", ""), TRL.replace("use_peft: true", "use_peft: false")],
)
def test_adapters_that_are_off_are_left_out(text):
    found = translate(yaml.safe_load(text), OPTIONS)
    assert "lora" not in found.values and any("lora_r" in line for line in found.left_out)


@pytest.mark.parametrize(
    "changes, ours, missing",
    [
        ({"finetuning_type": "full", "stage": "dpo", "pref_loss": "ipo"}, {
            "objective": "dpo", "objective_options": {"loss": "ipo"}, "lora": None, "pack": "pairs"}, 2),
        ({"lora_target": "q_proj, v_proj", "quantization_bit": 4}, {"lora": {
            "rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"], "base": "nf4"}}, 2),
        ({"stage": "ppo", "template": "qwen"}, {"chat_template": None}, 4),
    ],
)  # fmt: skip
def test_stages_of_llamafactory(changes, ours, missing):
    found = translate(yaml.safe_load(LLAMAFACTORY) | changes, OPTIONS)
    assert {key: found.values.get(key) for key in ours} == ours and len(found.missing) == missing


def test_what_is_done_here_anyway_is_no_loss():
    data = {"path": "a.jsonl", "type": "chat_template", "roles_to_train": ["assistant"], "roles": {"user": ["user"]}}
    found = translate({"base_model": "m", "datasets": [data | {"train_on_eos": "turn"}]}, OPTIONS)
    assert not found.missing and sum("datasets" in line for line in found.left_out) == 3
    found = translate({"base_model": "m", "datasets": [data | {"train_on_eos": "all"}]}, OPTIONS)
    assert found.missing == ["datasets: train_on_eos: 'all'"]


def test_evaluations_of_trl_have_data():
    of = {"model_name_or_path": "m", "eval_strategy": "steps", "eval_steps": 10}
    assert translate(of | {"dataset_name": "owner/name"}, OPTIONS).values["eval_data"] == "owner/name:test"
    found = translate(of | {"dataset_name": "chats.jsonl"}, OPTIONS)
    assert "eval_every" not in found.values and [line.partition(":")[0] for line in found.missing] == ["eval_strategy"]
    least = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-4, "bnb_4bit_quant_type": "nf4"}
    for options in ({"min_lr_rate": 0.2}, {"min_lr": 2e-5}):
        found = translate({"model_name_or_path": "m"} | least | {"lr_scheduler_kwargs": options}, OPTIONS)
        assert found.values["final"] == pytest.approx(0.2) and not found.missing


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_printed_is_a_config(name, tmp_path, capsys):
    ours, missing = RECIPES[name].values()
    assert main(["train", "--from", str(FOLDER / f"{name}.yaml"), "--print"]) == 0
    printed = capsys.readouterr().out
    assert all(f"# not translated: {key}" in printed for key in missing)
    (tmp_path / "ours.yaml").write_text(printed)
    made = from_file(str(tmp_path / "ours.yaml")).recipe()
    assert made.model == ours["model"] and capsys.readouterr().err == ""


def test_what_is_no_config_of_another_tool(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("colour: red\n")
    for words in (["--from", str(tmp_path / "c.yaml")], ["--print"], ["x.yaml", "--from", str(tmp_path / "c.yaml")]):
        assert main(["train", *words]) == 2
        assert capsys.readouterr().err.startswith("gpubound train: ")


def test_a_refused_config_of_another_tool_names_from(capsys):
    assert main(["train", str(FOLDER / "axolotl.yaml")]) == 2
    assert f"gpubound train --from {FOLDER / 'axolotl.yaml'}" in capsys.readouterr().err


@pytest.mark.parametrize("tool, key, value", [
    (AXOLOTL, "special_tokens", 5), (AXOLOTL, "betas", "x"), (TRL, "dataset_name", 5), (LLAMAFACTORY, "template", []),
    (TORCHTUNE, "checkpointer", 5), (TORCHTUNE, "dataset", [1]),
])  # fmt: skip
def test_values_of_another_form(tool, key, value):
    with pytest.raises(ValueError, match=f"^from: {key}: got "):
        translate(yaml.safe_load(tool) | {key: value}, OPTIONS)
    assert translate({"base_model": "m", "datasets": [5]}, OPTIONS).missing[0].startswith("datasets: 5, which is no path")
