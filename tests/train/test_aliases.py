"""Keys with the names of other trainers: what they are here, and which are left out or refused."""

import dataclasses

import pytest

from gpubound import trace
from gpubound.cli.train_options import OPTIONS
from gpubound.train.aliases import ALIASES, NO_EFFECT, NOT_HERE, READ, RECIPE, SAME, advice, convert, read
from gpubound.train.recipe import Recipe
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
